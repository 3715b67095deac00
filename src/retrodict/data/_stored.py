"""Tables larger than memory: series that stay in their files, and are read block by block."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from retrodict._interface import DataError, listed
from retrodict._learning import AbstractSeriesStore, Arrays, ProgressLine
from retrodict.data._chunked import AbstractParts, NetcdfSeries, ParquetRows, open_parts
from retrodict.data._files import check_exists, check_suffix
from retrodict.data._reader import as_names, read
from retrodict.data._source import Source
from retrodict.data._summary import Summary, add_up
from retrodict.data._table import Table
from retrodict.distributed import all_gather_object, by_all

BLOCK_ROWS = 50_000
"""The smallest number of rows of a block, except the last."""


class StoredSeries(AbstractSeriesStore):
    """Series in files, as returned by `open_series`.

    Attributes:
        names: the observed columns.
        input_names: the inputs.
        num_times: the number of rows of the longest series.
        num_rows: the number of rows of all series, including those inserted in gaps.
        num_missing: the number of missing entries.
        block_sizes: the number of series of each block.
        layout: the arguments with which `read` reads any part.
    """

    def __init__(
        self,
        blocks: Sequence["_Block"],
        layout: dict[str, Any],
        summaries: Sequence[Summary],
        inputs: Sequence[str],
    ) -> None:
        self._blocks = list(blocks)
        total = add_up(summaries)
        prints = " ".join(summary.fingerprint for summary in summaries)
        self._digest = hashlib.sha256(prints.encode()).hexdigest()
        self._equal = total.shortest == total.longest
        self.layout, self.names, self.input_names = layout, tuple(layout["columns"]), tuple(inputs)
        self.num_times, self.num_rows = total.longest, total.num_rows
        self.num_missing = total.num_rows * len(self.names) - sum(total.num_observed)
        self.block_sizes = tuple(summary.num_series for summary in summaries)

    def __repr__(self) -> str:
        return (
            f"StoredSeries({self.num_series} series, up to {self.num_times} rows,"
            f" {len(self.names)} columns: {listed(self.names)}; {len(self.block_sizes)} blocks)"
        )

    def table(self, block: int) -> Table:
        """Read the series of a block, padded to the longest of all."""
        source = self._blocks[block].read(self.layout, known=True)
        return read(source, **{**self.layout, "pad_to": self.num_times})

    def tables(self) -> Iterator[Table]:
        """Read all series block by block, to smooth or summarise data larger than memory."""
        return (self.table(block) for block in range(len(self.block_sizes)))

    def load(self, block: int) -> Arrays:
        """Return the arrays of a block, as `fit` draws from them."""
        table = self.table(block)
        return {
            "ys": np.where(table.mask, table.ys, 0.0),
            "mask": table.mask if self.num_missing or not self._equal else None,
            "inputs": table.inputs,
            "length": None if self._equal else table.length,
        }

    def digest(self) -> str:
        """Return the SHA-256 of the content of all blocks, in their order."""
        return self._digest

    def described(self) -> list[str]:
        """Return a description of the files, in lines."""
        missing = self.num_missing / (self.num_rows * len(self.names))
        names = dict.fromkeys(block.name for block in self._blocks)
        return [
            f"source: {listed(names, 3)}",
            f"rows: {self.num_rows}, in {self.num_series} series of up to {self.num_times},"
            f" in {len(self.block_sizes)} blocks",
            f"time: {self.layout['time'] or 'the row number'}, step {self.layout['freq']}",
            f"columns: {listed(self.names)}; missing: {100 * missing:.1f} %",
            *([f"inputs: {listed(self.input_names)}"] if self.input_names else []),
        ]


def open_series(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    series: str | Sequence[str],
    time: str | None = None,
    columns: str | Sequence[str] | None = None,
    inputs: str | Sequence[str] | None = None,
    freq: str | int | float | None = None,
    step_input: bool = False,
    step_unit: str | int | float | None = None,
    time_format: str | None = None,
    together: bool = False,
    progress: bool = True,
) -> StoredSeries:
    """Open series that do not fit into memory; `fit` reads its minibatches from the files.

    All blocks are read once and checked as in `read`; one block at a time is in memory. The first
    block determines the columns and the step of the times, unless they are passed. In a Parquet
    file the rows of a series must be consecutive. A block is one row group or several, with at
    least 50,000 rows, and training holds up to eight blocks: write row groups of about this size.

    Example:
        >>> import tempfile, pandas as pd, retrodict as rd
        >>> frame = pd.DataFrame({"id": [1, 1, 2], "t": [0, 1, 0], "y": [1.0, 2.0, 3.0]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame.to_parquet(f"{folder}/many.parquet")
        ...     store = rd.data.open_series(f"{folder}/many.parquet", series="id", progress=False)
        ...     store.num_series, store.num_times  # pass `store` to `fit` in place of arrays
        (2, 2)

    Args:
        source: the path of a `.parquet` or `.nc` file, or of several files of one data set.
        series: the columns, or the dimension of a NetCDF file, that identify series.
        time: as in `read`, like the following arguments.
        columns: the observed columns.
        inputs: the columns of inputs.
        freq: the step of the times.
        step_input: whether to add the time since the previous row as the first input.
        step_unit: the unit of that input.
        time_format: the format of dates.
        together: whether all processes of a job open the same files at this point, so that each
            reads its share of the blocks.
        progress: whether to show a progress line.

    Returns:
        The series, for `fit`, or for iteration with `tables()`.

    Raises:
        DataError: if a file cannot be read or is inconsistent, in one line.
        ValueError: if so in another process, with `together`.
        ProcessLostError: if another process has ended, with `together`.
    """
    keys = as_names(series)
    if not keys:
        raise DataError(
            "open_series: {series} is empty; name what identifies series.", series=series
        )
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not paths:
        raise DataError("open_series: there is no file; name one.")
    run: Any = by_all if together else lambda compute: compute()
    blocks = run(lambda: [block for path in paths for block in _blocks(path, keys)])
    layout: dict[str, Any] = {
        "time": time,
        "series": keys,
        "columns": None if columns is None else as_names(columns),
        "inputs": None if inputs is None else as_names(inputs),
        "freq": freq,
        "step_input": step_input,
        "step_unit": step_unit,
        "time_format": time_format,
    }
    first, table = run(lambda: _first_table(blocks, layout))
    share = _share(len(blocks)) if together else range(len(blocks))
    scans = run(lambda: _scan(blocks, first, table, share, progress))
    if together:
        gathered = [scan for local in all_gather_object(scans) for scan in local.items()]
        scans = {int(number): scan for number, scan in gathered}
    numbers = sorted(scans)
    blocks = [blocks[number] for number in numbers]
    parts, hashes = zip(*(scans[number] for number in numbers), strict=True)
    if (index := _repeated(hashes)) is not None:
        raise DataError(
            f"{blocks[index].name}: a series of block {blocks[index].number + 1} is in another"
            f" block too; sort the rows by {listed(keys)}, so that each series is in one block."
        )
    summaries = [Summary.from_dict(part) for part in parts]
    if not any(add_up(summaries).num_observed):
        raise _all_missing(blocks)
    return StoredSeries(blocks, table.layout, summaries, table.input_names)


class _Block(NamedTuple):
    """A part of a file: consecutive rows of a Parquet file, or series of a NetCDF file."""

    file: AbstractParts
    number: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        return self.file.name

    def read(self, layout: dict[str, Any], *, known: bool) -> Source:
        """Read the block; the arguments are those of `AbstractParts.read`."""
        return self.file.read(np.arange(self.begin, self.end), layout, known=known)


def _blocks(path: str | os.PathLike[str], keys: list[str]) -> list[_Block]:
    target, name = Path(path), os.fspath(path)
    check_exists(target, name)
    check_suffix(target, name, (".parquet", ".nc"))
    file = open_parts(target, name, keys)
    if isinstance(file, NetcdfSeries) and not file.can_be_split:
        raise DataError(
            f"{name}: {listed(keys)} is not a dimension of the file; name the one that identifies"
            f" series out of {listed(file.dimensions)}."
        )
    if not file.count:
        raise DataError(f"{name}: there are no rows; add some.")
    step = max(1, BLOCK_ROWS // file.rows)
    is_table = isinstance(file, ParquetRows)
    cuts = _series_starts(file) if is_table else list(range(0, file.count, step))
    ends = [*cuts[1:], file.count]
    return [_Block(file, i, *bounds) for i, bounds in enumerate(zip(cuts, ends, strict=True))]


def _series_starts(file: ParquetRows) -> list[int]:
    """Return the rows at which blocks begin: each the first series start of a row group."""
    cuts, last = [0], None
    for lines, cells in file.cells(file.keys):
        changes = (cells != cells.shift()).any(axis=1).to_numpy(copy=True)
        changes[0] = last is None or tuple(cells.iloc[0]) != last
        last = tuple(cells.iloc[-1])
        starts = lines[0] - 1 + np.flatnonzero(changes)
        if starts.size and starts[0] - cuts[-1] >= BLOCK_ROWS:
            cuts.append(int(starts[0]))
    return cuts


def _first_table(blocks: Sequence[_Block], layout: dict[str, Any]) -> tuple[int, Table]:
    """Return the first block with rows and its number; it determines how others are read."""
    for number, block in enumerate(blocks):
        part = block.read(layout, known=False)
        if len(part.frame):  # series of a rectangle without an observation have no rows
            return number, read(part, **layout)
    raise _all_missing(blocks)


def _all_missing(blocks: Sequence[_Block]) -> DataError:
    names = dict.fromkeys(block.name for block in blocks)
    return DataError(f"{listed(names)}: every value is missing.")


def _share(count: int) -> range:
    """Return the numbers of the blocks that this process scans."""
    process, num_processes = jax.process_index(), jax.process_count()
    return range(count * process // num_processes, count * (process + 1) // num_processes)


def _scan(
    blocks: Sequence[_Block], first: int, table: Table, share: range, progress: bool
) -> dict[int, tuple[dict[str, Any], list[int]]]:
    """Scan the blocks with rows among some.

    Returns:
        By the number of the block, its summary and hashes of its identifiers, which are the same in
        every process.
    """
    line = ProgressLine("{:.0f} rows were read", len(share)) if progress else None
    scans = {}
    num_rows = 0
    for done, number in enumerate(share):
        part = None if number == first else blocks[number].read(table.layout, known=True)
        if part is None or len(part.frame):
            block = table if part is None else read(part, **table.layout)
            hashes = [hashlib.blake2b(str(i).encode(), digest_size=8) for i in block.series or ()]
            identifiers = [int.from_bytes(each.digest(), "big") for each in hashes]
            scans[number] = block.summary.to_dict(), identifiers
            num_rows += block.summary.num_rows
        if line is not None:
            line(done + 1, -float(num_rows))
    return scans


def _repeated(hashes: Sequence[list[int]]) -> int | None:
    """Return the index of the last block with a series that is in another block too."""
    every = np.concatenate([np.array(block, np.uint64) for block in hashes])
    values, counts = np.unique(every, return_counts=True)
    if counts.max() == 1:
        return None
    at = int(np.flatnonzero(every == values[np.argmax(counts)])[-1])
    return int(np.searchsorted(np.cumsum([len(block) for block in hashes]), at, side="right"))
