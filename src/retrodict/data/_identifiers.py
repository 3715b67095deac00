"""Which rows are of which series, and the order of series."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from retrodict._errors import optional
from retrodict.data._columns import missing_cells
from retrodict.data._source import Source


def grouped(table: Source, apart: list[str]) -> tuple[tuple[Any, ...] | None, list[np.ndarray]]:
    """Identifiers in increasing order, and the rows of each."""
    everything = np.arange(len(table.frame))
    if not apart:
        return None, [everything]
    pandas = optional("pandas")
    columns = [table.frame[name] for name in apart]
    check_identified(table, apart)
    if len(columns) == 1 and pandas.api.types.is_signed_integer_dtype(columns[0].dtype):
        keys = columns[0].to_numpy(dtype=np.int64)  # as they are, without a look at each
    else:
        parts = [
            _plain(column.tolist(), text=name in table.text)
            for name, column in zip(apart, columns, strict=True)
        ]
        every = parts[0] if len(parts) == 1 else zip(*parts, strict=True)
        keys = np.fromiter(every, object, len(table.frame))
    codes, found = pandas.factorize(keys)
    unique = found.tolist()
    unique = unique if len(columns) == 1 else _joined(table, unique)
    order = sorted(range(len(unique)), key=lambda i: _sort_key(unique[i]))
    by_code = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[by_code], np.arange(len(unique) + 1))
    rows = [by_code[bounds[i] : bounds[i + 1]] for i in order]
    return tuple(unique[i] for i in order), rows


def check_identified(table: Source, apart: Sequence[str]) -> None:
    """Refuses rows whose series is not known."""
    for name in apart:
        gone = missing_cells(table.frame[name])
        if gone.any():
            raise table.error(
                "the identifier is missing; fill it in or remove the row.",
                row=int(np.argmax(gone)),
                column=name,
            )


class Ordered(NamedTuple):
    """Series in the order in which `grouped` has them.

    Attributes:
        places: the place of each of the given identifiers; two that mean the same have one.
        num_series: how many series there are.
        text: those of the columns whose identifiers are text.
    """

    places: np.ndarray
    num_series: int
    text: tuple[str, ...]


def ordered(table: Source, apart: Sequence[str], cells: Sequence[tuple[Any, ...]]) -> Ordered:
    """The order of series of which the identifiers alone are known, one cell a column.

    Args:
        table: whose they are, for messages.
        apart: the columns that tell series apart.
        cells: identifiers as they stand in those columns.
    """
    if not cells:
        return Ordered(np.zeros(0, int), 0, ())
    columns = [_plain(list(column)) for column in zip(*cells, strict=True)]
    keys = list(zip(*columns, strict=True))
    unique = list(dict.fromkeys(keys))
    names = [key[0] for key in unique] if len(apart) == 1 else _joined(table, unique)
    order = sorted(range(len(unique)), key=lambda i: _sort_key(names[i]))
    place = {unique[i]: rank for rank, i in enumerate(order)}
    text = [name for name, own in zip(apart, columns, strict=True) if isinstance(own[0], str)]
    return Ordered(np.array([place[key] for key in keys]), len(unique), tuple(text))


def _joined(table: Source, keys: Sequence[tuple[Any, ...]]) -> list[str]:
    """One name for each combination of identifiers, refused if two would have the same."""
    found: dict[str, tuple[Any, ...]] = {}
    for key in keys:
        other = found.setdefault("-".join(map(str, key)), key)
        if other is not key:
            raise table.error(
                f"two series would be called {'-'.join(map(str, key))!r}, those of {other} and of"
                f" {key}; rename one of them."
            )
    return list(found)


def _plain(cells: list[Any], *, text: bool = False) -> list[Any]:
    """Identifiers as integers if all are whole numbers, however they are written; else as text."""
    written_out = [
        str(int(c)) if isinstance(c, float | np.floating) and float(c).is_integer() else str(c)
        for c in cells
    ]
    if text:
        return written_out
    digits = set(written_out)
    if all(text.removeprefix("-").isdecimal() and str(int(text)) == text for text in digits):
        return [int(text) for text in written_out]
    return written_out


def _sort_key(identifier: Any) -> tuple[int, Any]:
    return (0, identifier) if isinstance(identifier, int) else (1, identifier)
