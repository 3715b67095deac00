"""Columns to numbers, and which columns are data."""

from typing import Any

import numpy as np

from retrodict._errors import optional, shorten
from retrodict.data._source import Source

# The marks of missing values that pandas knows, and no others: "-" or "-999" may mean something.
MISSING = frozenset(
    ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"]
    + ["<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"]
)
LARGEST = 1e150
"""Squares of larger numbers overflow."""


def numbers(source: Source, column: str) -> np.ndarray:
    """A column as float64, NaN where missing.

    Raises:
        DataError: if it holds text, an infinity or a number beyond 1e150, with its row.
    """
    values, wrong = parsed(source.frame[column])
    if wrong.any():
        row = int(np.argmax(wrong))
        cell = source.frame[column].iloc[row]
        decimal = isinstance(cell, str) and "," in cell
        hint = "write a decimal point and no other separator" if decimal else "correct it"
        raise source.error(
            f"{shorten(cell)} is not a number; {hint}, or leave it empty if missing.",
            row=row,
            column=column,
        )
    huge = np.abs(values) > LARGEST
    if huge.any():
        row = int(np.argmax(huge))
        raise source.error(
            f"the value {values[row]:g} is infinite or beyond {LARGEST:g}; correct it, or leave it"
            " empty if missing.",
            row=row,
            column=column,
        )
    return values


def is_numeric(source: Source, column: str) -> bool:
    """Whether at least half of what a column holds are numbers; the rest is then an error."""
    values, wrong = parsed(source.frame[column])
    return int(np.sum(wrong)) <= int(np.sum(~np.isnan(values)))


def is_missing(cell: Any) -> bool:
    """Whether a cell holds nothing: no object, NaN, or a mark that pandas reads as missing."""
    if isinstance(cell, str):
        return cell.strip() in MISSING
    if isinstance(cell, int | float):
        return cell != cell
    return cell is None or bool(np.all(optional("pandas").isna(cell)))


def missing_cells(series: Any) -> np.ndarray:
    """Which cells of a pandas series hold nothing; text is looked at cell by cell."""
    types = optional("pandas").api.types
    if types.is_numeric_dtype(series.dtype) or types.is_datetime64_any_dtype(series.dtype):
        return series.isna().to_numpy()
    return np.array([is_missing(cell) for cell in series.tolist()], bool)


def parsed(series: Any) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a pandas series, and where there is something that is none."""
    types = optional("pandas").api.types
    dtype = series.dtype
    if types.is_bool_dtype(dtype) or types.is_numeric_dtype(dtype):
        if not types.is_complex_dtype(dtype):
            values = series.to_numpy(dtype=float, na_value=np.nan)
            return values, np.zeros(len(values), bool)
    values = np.full(len(series), np.nan)
    wrong = np.zeros(len(series), bool)
    cells = series.tolist()
    if (quick := _quickly(cells)) is not None:
        return quick, wrong
    for row, cell in enumerate(cells):
        if is_missing(cell):
            continue
        try:
            values[row] = _number(cell)
        except (TypeError, ValueError):
            wrong[row] = True
        except OverflowError:  # an integer of Python may have any size
            values[row] = np.inf
    return values, wrong


def _quickly(cells: list[Any]) -> np.ndarray | None:
    """Text of which all is numbers or missing, in one go; `None` if it is not so."""
    if not all(isinstance(cell, str) for cell in cells):
        return None
    together = "".join(cells)
    if "_" in together or not together.isascii():
        return None
    try:
        plain = ["nan" if cell.strip() in MISSING else cell for cell in cells]
        return np.array(plain, object).astype(float)
    except ValueError:
        return None


def _number(cell: Any) -> float:
    # Python would read "1_000" as a thousand, and a date as nothing.
    if isinstance(cell, str) and ("_" in cell or not cell.isascii()):
        raise ValueError(cell)
    if isinstance(cell, str | int | float | np.number | np.bool_):
        return float(cell)
    if type(cell).__name__ in ("Decimal", "Fraction"):
        return float(cell)
    raise TypeError(cell)
