"""Summaries of tables. The summaries of parts add up to that of the whole."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_NAMED = 13
"""The number of stored identifiers: one more than messages list."""


@dataclass(frozen=True)
class Summary:
    """Summary of all series of a table.

    Attributes:
        series: the first identifiers.
        num_series: the number of series.
        num_rows: the number of rows, including those inserted in gaps.
        num_rows_observed: the number of rows with at least one observed entry.
        shortest: the number of rows of the shortest series.
        longest: the number of rows of the longest series.
        inserted: the number of rows inserted in gaps.
        begin: the first time; dates in microseconds.
        end: the last time.
        num_observed: the number of observed entries of each column.
        lowest: the smallest observed entry of each column; `None` if there is none.
        highest: the largest.
        digest: the sum, modulo 2²⁵⁶, of the SHA-256 of each series: its identifier, times, values,
            mask and inputs.
        notes: further changes of the rows, and ignored columns.
    """

    series: tuple[str, ...]
    num_series: int
    num_rows: int
    num_rows_observed: int
    shortest: int
    longest: int
    inserted: int
    begin: int | float
    end: int | float
    num_observed: tuple[int, ...]
    lowest: tuple[float | None, ...]
    highest: tuple[float | None, ...]
    digest: int
    notes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """The digest in hexadecimal."""
        return f"{self.digest:064x}"

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that JSON can store."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Summary":
        """Return the summary of a dictionary; JSON turns tuples into lists."""
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**arguments)


def add_up(parts: Sequence[Summary]) -> Summary:
    """Return the summary of a table from those of its parts, in their order."""
    names = [name for part in parts for name in part.series]
    notes = [note for part in parts for note in part.notes]
    return Summary(
        series=tuple(names[:MAX_NAMED]),
        num_series=sum(part.num_series for part in parts),
        num_rows=sum(part.num_rows for part in parts),
        num_rows_observed=sum(part.num_rows_observed for part in parts),
        shortest=min(part.shortest for part in parts),
        longest=max(part.longest for part in parts),
        inserted=sum(part.inserted for part in parts),
        begin=min(part.begin for part in parts),
        end=max(part.end for part in parts),
        num_observed=tuple(map(sum, zip(*(part.num_observed for part in parts), strict=True))),
        lowest=_extreme(min, [part.lowest for part in parts]),
        highest=_extreme(max, [part.highest for part in parts]),
        digest=sum(part.digest for part in parts) % 2**256,
        notes=tuple(dict.fromkeys(notes)),
    )


def _extreme(which: Any, parts: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    return tuple(
        which((value for value in column if value is not None), default=None)
        for column in zip(*parts, strict=True)
    )


def digest_of(
    name: Any, times: np.ndarray, ys: np.ndarray, mask: np.ndarray, inputs: np.ndarray | None
) -> int:
    """Return the SHA-256 of one series."""
    # Whole numbers may be integers in one part of a table and floats in another.
    times = times if times.dtype.kind == "M" else times.astype(np.float64)
    digest = hashlib.sha256(str(name).encode())
    for array in (times, np.nan_to_num(ys), mask, inputs):
        if array is not None:
            digest.update(np.ascontiguousarray(array).tobytes())
    return int.from_bytes(digest.digest(), "big")


def as_number(time: Any) -> int | float:
    """Return a time as a number; dates in microseconds."""
    return (time.astype(np.int64) if isinstance(time, np.datetime64) else time).item()


def as_time(number: int | float, dates: bool) -> Any:
    """Return the time of a number."""
    return np.datetime64(int(number), "us") if dates else number


def written(time: Any) -> str:
    """Return a time as text: a date at midnight without the clock."""
    if isinstance(time, np.datetime64):
        return str(time).removesuffix("T00:00:00.000000").removesuffix(".000000").replace("T", " ")
    return f"{time:.12g}" if isinstance(time, float | np.floating) else str(time)
