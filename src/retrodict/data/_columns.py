"""Columns of numbers."""

from typing import Any

import numpy as np

from retrodict._errors import optional, shorten
from retrodict.data._source import Source

# The marks of missing values that pandas reads, and no others: "-" or "-999" may mean something.
MISSING = frozenset(
    ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"]
    + ["<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"]
)
LARGEST = 1e150
"""Squares of larger numbers overflow."""


def numbers(source: Source, column: str) -> np.ndarray:
    """Return a column as float64, with NaN for missing values.

    Raises:
        DataError: if it holds text, an infinity or a number beyond 1e150, with its row.
    """
    values, invalid = parse_numbers(source.frame[column])
    if invalid.any():
        row = int(np.argmax(invalid))
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
    """Return whether at least half of the cells are numbers; the others are then errors."""
    values, invalid = parse_numbers(source.frame[column])
    return int(np.sum(invalid)) <= int(np.sum(~np.isnan(values)))


def missing_cells(series: Any) -> np.ndarray:
    """Return which cells of a pandas series are empty, NaN or a mark of missing values."""
    absent, types = series.isna().to_numpy(), optional("pandas").api.types
    if types.is_numeric_dtype(series.dtype) or types.is_datetime64_any_dtype(series.dtype):
        return absent
    cells = series.tolist()
    return absent | np.array([isinstance(c, str) and c.strip() in MISSING for c in cells], bool)


def parse_numbers(series: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a pandas series, and which cells hold something else."""
    pandas = optional("pandas")
    types = pandas.api.types
    if types.is_numeric_dtype(series.dtype) and not types.is_complex_dtype(series.dtype):
        values = series.to_numpy(dtype=float, na_value=np.nan)
        return values, np.zeros(len(values), bool)
    cells = pandas.Series([_number_or_text(cell) for cell in series.tolist()], dtype=object)
    values = pandas.to_numeric(cells, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    return values, np.isnan(values) & ~missing_cells(series)


def _number_or_text(cell: Any) -> float | str:
    if isinstance(cell, str):
        return cell
    if not isinstance(cell, int | float | np.number | np.bool_):
        if type(cell).__name__ not in ("Decimal", "Fraction"):
            return str(cell)
    try:
        return float(cell)
    except OverflowError:  # an integer of Python may have any size
        return np.inf
