"""What goes wrong with tables, and with packages that are not there."""

import importlib
from typing import Any


class DataError(ValueError):
    """A table cannot be read: one line that names the file, the row and column, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def optional(name: str, extra: str = "data") -> Any:
    """A package that only tables need, imported when the first table comes.

    Raises:
        ImportError: if it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"retrodict.data needs {name}: pip install 'retrodict[{extra}]'."
        ) from error


def shorten(value: Any) -> str:
    """A value as it is quoted in a message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def listed(names: Any, most: int = 12, count: int | None = None) -> str:
    """Names in a message, not too many of them.

    Args:
        names: the names, or the first of them.
        most: how many to write.
        count: how many there are in all, if these are not.
    """
    names = [str(name) for name in names]
    count = len(names) if count is None else count
    more = f", ... ({count} in all)" if count > most else ""
    return ", ".join(names[:most]) + more
