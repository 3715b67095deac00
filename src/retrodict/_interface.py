"""What public interfaces share: errors that name arguments, and lazy exports (PEP 562).

Importing the whole library takes seconds, mostly for JAX, and `retrodict --help` needs none of it.
A package writes its exports as imports under `if TYPE_CHECKING`, and its `__getattr__` runs one
when the name is first used.
"""

import ast
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """An argument of a Python function that a message names.

    Attributes:
        name: the name of the argument.
        value: the value that was passed or that is recommended; `...` for any value.
        hint: how to obtain the value in Python.
    """

    name: str
    value: Any = ...
    hint: str = ""

    def __str__(self) -> str:
        """Return the argument as it is written in a call: `freq='D'` or `columns=...`."""
        value = "..." if self.value is ... else repr(self.value)
        return f"{self.name}={value}" + (f" {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class ModelArgument(Argument):
    """An argument of the constructor of a ready model, which is an option on the command line.

    Attributes:
        model: the name of the ready model.
    """

    model: str = ""

    def __str__(self) -> str:
        """Return the call with the argument: `models.seasonal(period=12)`."""
        return f"models.{self.model}({super().__str__()})"


def fill(template: str, arguments: Mapping[str, Any], spelling: Callable[[Argument], str]) -> str:
    """Return a message: each `{name}` of a template is replaced by that argument.

    Other braces are text; names of files and columns may contain them.

    Args:
        template: the message.
        arguments: by name, the value that was passed or that is recommended, `...` for any value;
            an `Argument`, if its name differs; or an error, whose message is included.
        spelling: how an argument is written.
    """
    for name, value in arguments.items():
        if isinstance(value, UserError):
            text = value.spelled(spelling)
        elif isinstance(value, Exception):
            text = str(value)
        else:
            text = spelling(value if isinstance(value, Argument) else Argument(name, value))
        template = template.replace(f"{{{name}}}", text)
    return " ".join(template.split())


class Notice(str):
    """A message to a callback, in Python's spelling, that can be spelled again; see `fill`."""

    template: str
    arguments: Mapping[str, Any]

    def __new__(cls, template: str, **arguments: Any) -> "Notice":
        """Fill the template."""
        notice = super().__new__(cls, fill(template, arguments, str))
        notice.template, notice.arguments = template, arguments
        return notice


class UserError(ValueError):
    """An invalid argument, file or option. One line states the cause and the remedy.

    Args:
        template: the message, with `{name}` where it names an argument; see `fill`.
        **arguments: the arguments that the message names.

    Attributes:
        argument: the name of the first argument in the message; `None` if there is none.
        value: its value.
    """

    def __init__(self, template: str, **arguments: Any) -> None:
        self._template, self._arguments = template, arguments
        named: list[Argument] = []
        super().__init__(self.spelled(lambda argument: named.append(argument) or str(argument)))
        self.argument = named[0].name if named else None
        self.value = named[0].value if named else None

    def spelled(self, spelling: Callable[[Argument], str]) -> str:
        """Return the message with arguments in another spelling."""
        return fill(self._template, self._arguments, spelling)


class DataError(UserError):
    """A table that cannot be read. The message names the file, the row and the column.

    Example:
        >>> import retrodict as rd
        >>> try:
        ...     rd.data.read({"year": [1871, 1872], "flow": [1.0, 2.0]}, columns="flwo")
        ... except rd.data.DataError as error:
        ...     print(error)
        the dict: there is no column 'flwo' (columns); there are year, flow. Did you mean 'flow'?
    """


class ModelError(UserError):
    """An invalid model, model file, option of a model or parameter.

    Example:
        >>> import retrodict as rd
        >>> try:
        ...     rd.models.from_options("local_levels")
        ... except rd.models.ModelError as error:
        ...     print(error)
        There is no ready model local_levels. Did you mean local_level? ...
    """


MIN_THREADS = 16
"""The smallest number of threads of XLA, more than batches of LAPACK calls that run at once."""


def ensure_threads() -> None:
    """Let XLA start `MIN_THREADS` threads or more, if JAX has not computed anything yet.

    jaxlib 0.10 divides a batch of LAPACK calls among its threads, one per core, and waits for them
    on one of these threads. If as many batches as threads run at once, all threads wait: a
    deadlock, which occurs on two cores. A number that the user has set has precedence.
    """
    os.environ.setdefault("PJRT_NPROC", str(max(MIN_THREADS, os.cpu_count() or 1)))


ensure_threads()  # here, since every import of the library begins with this module


def optional(name: str, extra: str = "data") -> Any:
    """Import a package that only some functions need.

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
    """Return a value as it is quoted in a message, in at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def listed(names: Iterable[Any], most: int = 12, count: int | None = None) -> str:
    """Return names separated by commas, at most `most` of them.

    Args:
        names: the names, or the first of them.
        most: the number of names to write.
        count: the number of all names, if it is not that of `names`.
    """
    texts = [str(name) for name in names]
    count = len(texts) if count is None else count
    more = f", ... ({count} in all)" if count > most else ""
    return ", ".join(texts[:most]) + more


def guess(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name nearest to an unknown one; empty if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name nearest to an unknown one, or with all of them."""
    known = list(known)
    return guess(name, known) or (f" Known: {', '.join(known)}." if known else "")


def lazily(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that is being imported.

    Public are the names of the package's `__all__` if it has one, and all exports otherwise.

    Args:
        package: its name. Its `__init__` holds `from MODULE import NAME as NAME`, each under
            `if TYPE_CHECKING`.
    """
    module = sys.modules[package]
    owners = _modules_of_exports(package)
    public = sorted(vars(module).get("__all__", owners))

    def load(name: str) -> Any:
        if name not in owners:
            hint = "" if name.startswith("_") else _hint(package, name, owners)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        owner = owners[name]
        if owner == package:  # a namespace within the package
            value: Any = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(owner), name)
        setattr(module, name, value)
        return value

    return load, public.copy, public


def _hint(package: str, name: str, owners: dict[str, str]) -> str:
    """Name the namespace of the package that has this public name, if there is one."""
    for namespace in [name for name, module in owners.items() if module == package]:
        if name in importlib.import_module(f"{package}.{namespace}").__all__:
            return f"; use {package}.{namespace}.{name}"
    return ""


def _modules_of_exports(package: str) -> dict[str, str]:
    """Return the module of each export, parsed from the source of the package."""
    loader: Any = getattr(sys.modules[package].__spec__, "loader", None)
    tree = ast.parse(loader.get_source(package))
    return {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
