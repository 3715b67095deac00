"""Identifiers of series: the rows of each series, and the order of series."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from retrodict.data._source import Source, missing_cells


def grouped(table: Source, keys: list[str]) -> tuple[tuple[Any, ...] | None, list[np.ndarray]]:
    """Return the identifiers in increasing order, and the rows of each.

    Args:
        table: the table.
        keys: the columns that identify series; without any, all rows are one series.
    """
    if not keys:
        return None, [np.arange(len(table.frame))]
    codes, cells = factorize(table, keys)
    order = ordered(table, keys, cells)
    codes = order.places[codes]
    by_code = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[by_code], np.arange(1, len(order.names)))
    return order.names, np.split(by_code, bounds)


def factorize(table: Source, keys: list[str]) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
    """Return the number of the identifier of each row, and the cells of each identifier.

    Raises:
        DataError: if a row has no identifier, or one that is nested.
    """
    for name in keys:
        missing = missing_cells(table.frame[name])
        table.refuse(missing, name, "the identifier is missing; fill it in or remove the row.")
        if table.frame[name].dtype == object:
            nested = [not isinstance(cell, Hashable) for cell in table.frame[name]]
            text = (
                "an identifier must be a number or text, got a list or record; flatten the column."
            )
            table.refuse(np.array(nested, bool), name, text)
    cells = table.frame[keys]
    codes = cells.groupby(keys, sort=False, observed=True, dropna=False).ngroup().to_numpy()
    first = cells.iloc[np.unique(codes, return_index=True)[1]]
    return codes, list(zip(*(first[key].tolist() for key in keys), strict=True))


class Ordered(NamedTuple):
    """Series in increasing order of their identifiers.

    Attributes:
        places: the place of each of the given identifiers; equivalent ones share a place.
        names: the identifier of each place.
        text: the columns whose identifiers are text.
    """

    places: np.ndarray
    names: tuple[Any, ...]
    text: tuple[str, ...]


def ordered(table: Source, keys: Sequence[str], cells: Sequence[tuple[Any, ...]]) -> Ordered:
    """Sort identifiers: whole numbers by value, then text.

    Args:
        table: the table, for messages.
        keys: the columns that identify series.
        cells: the cells of those columns, for each identifier.
    """
    columns = {
        key: _as_numbers_or_text([row[i] for row in cells], text=key in table.text)
        for i, key in enumerate(keys)
    }
    identifiers = list(zip(*columns.values(), strict=True))
    unique = list(dict.fromkeys(identifiers))
    names = [key[0] for key in unique] if len(keys) == 1 else _joined(table, unique)
    order = sorted(range(len(unique)), key=lambda i: (isinstance(names[i], str), names[i]))
    place = {unique[i]: rank for rank, i in enumerate(order)}
    places = np.array([place[identifier] for identifier in identifiers], int)
    text = tuple(key for key, column in columns.items() if isinstance(next(iter(column), 0), str))
    return Ordered(places, tuple(names[i] for i in order), text)


def _joined(table: Source, identifiers: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return one name per combination of cells; refuse two combinations with the same name."""
    names: dict[str, tuple[Any, ...]] = {}
    for cells in identifiers:
        name = "-".join(map(str, cells))
        other = names.setdefault(name, cells)
        if other is not cells:
            raise table.error(
                f"two series would be called {name!r}, those of {other} and of {cells}; rename one"
                " of them."
            )
    return list(names)


def _as_numbers_or_text(cells: list[Any], *, text: bool) -> list[Any]:
    """Return identifiers as integers if all are whole numbers in any notation, else as text."""
    texts = [
        str(int(c)) if isinstance(c, float | np.floating) and float(c).is_integer() else str(c)
        for c in cells
    ]
    if text or not all(t.removeprefix("-").isdecimal() and str(int(t)) == t for t in texts):
        return texts
    return [int(t) for t in texts]
