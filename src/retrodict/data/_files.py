"""Files to frames: CSV, Parquet and NetCDF. Any defect of a file is reported in one line."""

import csv
import dataclasses
import gc
import io
import itertools
import mmap
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from retrodict._interface import DataError, optional, shorten
from retrodict.data._source import Source, check_names, frame_source

T = TypeVar("T")

SEPARATORS = {".csv": None, ".tsv": "\t"}
SUFFIXES = (".csv", ".tsv", ".parquet", ".nc")

HEAP = b"GCOL\1\0\0\0"
"""The first bytes of a global heap of HDF5."""

MAX_BYTES, MAX_GROWTH = 1 << 30, 1000
"""A file may declare arrays of so many bytes, or of so many times its own size if that is more."""


def check_exists(path: Path, name: str) -> None:
    """Refuse a path that is not a regular file."""
    if not path.exists():
        raise DataError(f"{name}: there is no such file; check the path.")
    if path.is_dir():
        raise DataError(f"{name}: this is a folder; name a file in it.")
    if not path.is_file():
        raise DataError(f"{name}: this is not a regular file; write the table to one.")


def check_suffix(path: Path, name: str, suffixes: Iterable[str]) -> str:
    """Return the suffix of a path; refuse one that is not in `suffixes`."""
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        raise DataError(
            f"{name}: the suffix {suffix!r} is not known; use one of {', '.join(suffixes)}."
        )
    return suffix


def open_file(path: Path, name: str) -> Any:
    """Return a `Source` of a text or Parquet file, or the xarray dataset of a NetCDF file."""
    check_exists(path, name)
    suffix = check_suffix(path, name, SUFFIXES)
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise DataError(f"{name}: cannot be opened ({error.strerror}).") from None
    if is_empty:
        raise DataError(f"{name}: the file is empty; write it again.")
    if suffix in SEPARATORS:
        return text_source(text_lines(path, name), name, SEPARATORS[suffix])
    if suffix == ".parquet":
        parquet = open_parquet(path, name)
        frame = read_binary(
            lambda: validated(parquet.read(use_pandas_metadata=True)).to_pandas(), name, "Parquet"
        )
        return frame_source(frame, name, "frame")
    with open_netcdf(path, name, in_memory=True) as dataset:
        return read_binary(dataset.load, name, "NetCDF")


def read_binary(read: Callable[[], T], name: str, kind: str) -> T:
    """Call a reader of binary files, and turn its errors into one line.

    Libraries raise many types of errors on damaged files. Partly initialised objects may raise
    again when they are freed, which Python prints: they are freed here, without printing.

    Args:
        read: reads the file, or a part of it.
        name: the path of the file.
        kind: the format.
    """
    reason = None
    with _SILENCE:
        try:
            return read()
        except DataError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = lines[0][:120] if lines else type(error).__name__
        gc.collect(1)  # new objects only; the whole heap would take a second
    raise DataError(
        f"{name}: damaged, truncated or not a {kind} file ({reason}); write or fetch it again."
    )


class _Silence:
    """Silence of warnings and destructors; the last of several threads that read ends it."""

    def __init__(self) -> None:
        self.lock, self.readers, self.changes = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.readers:
                self.changes.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                self.changes.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
                sys.unraisablehook = lambda _: None
            self.readers += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.readers -= 1
            if not self.readers:
                self.changes.close()


_SILENCE = _Silence()


def check_size(declared: int, stored: int, name: str) -> None:
    """Refuse a file that declares far more than it can hold, before memory is allocated.

    Args:
        declared: the bytes of the arrays that it declares.
        stored: the bytes of the file.
        name: the path of the file.
    """
    if not 0 <= declared <= max(MAX_BYTES, MAX_GROWTH * stored):
        raise DataError(
            f"{name}: a file of {stored} bytes that declares {declared} bytes of data is damaged;"
            " write or fetch it again."
        )


def open_parquet(path: Path, name: str) -> Any:
    """Open a Parquet file; refuse one whose columns could not be stored in its bytes."""
    parquet = optional("pyarrow.parquet")

    def read() -> Any:
        file = parquet.ParquetFile(path)
        cells = file.metadata.num_rows * max(1, file.metadata.num_columns)
        check_size(8 * cells, path.stat().st_size, name)
        return file

    return read_binary(read, name, "Parquet")


def validated(table: Any) -> Any:
    """Return a table of Arrow after a check of its content.

    Arrow reads bytes of a damaged file as text, and fails when the text is first used.
    """
    table.validate(full=True)
    return table


def open_netcdf(path: Path, name: str, *, in_memory: bool = False) -> Any:
    """Open a NetCDF file with xarray, without loading its arrays.

    Args:
        path: the file.
        name: its name in messages.
        in_memory: whether to copy the bytes of the file, which may then be replaced.
    """
    xarray = optional("xarray")
    with path.open("rb") as file:
        # With a named engine, a damaged file is not reported as a missing package.
        engine = "scipy" if file.read(3) == b"CDF" else "h5netcdf"
    optional(engine)

    def read() -> Any:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            check_heaps(content)
            source = io.BytesIO(content) if in_memory else path
        # Numbers in units of time stay numbers.
        dataset = xarray.open_dataset(source, engine=engine, decode_timedelta=False)
        check_size(dataset.nbytes, path.stat().st_size, name)
        return dataset

    return read_binary(read, name, "NetCDF")


def check_heaps(content: mmap.mmap) -> None:
    """Refuse an HDF5 file on whose damaged heaps the library would loop forever.

    A global heap is a header of 16 bytes, then objects: index, references, size, data. The library
    goes from one to the next by its size, and index 0, the free space, counts its header in it. A
    size of 0 there makes no progress.
    """
    at = content.find(HEAP)
    while at >= 0:
        offset = at + 16
        end = at + int.from_bytes(content[at + 8 : at + 16], "little")
        while offset + 16 <= min(end, len(content)):
            index = int.from_bytes(content[offset : offset + 2], "little")
            size = int.from_bytes(content[offset + 8 : offset + 16], "little")
            step = 16 + -(-size // 8) * 8 if index else size
            if step < 16 or offset + step > end:
                raise ValueError("a heap is damaged")
            offset += step
        at = content.find(HEAP, at + 1)


def text_lines(path: Path, name: str) -> Iterator[str]:
    """Yield the lines of a text file with their ends; one line at a time is in memory."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except UnicodeDecodeError:
        try:
            path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:  # with the place in the file
            line = error.object.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{name}, line {line}: byte {error.start} of the file is not UTF-8; save it as"
                " UTF-8."
            ) from None


def text_source(lines: Iterable[str], name: str, separator: str | None = None) -> Source:
    """Parse comma-separated values as text, with the line of each row."""
    (_, header), *records = text_records(lines, name, separator)
    while len(header) == 1 and records and records[-1][1] == [""]:
        records.pop()
    return rows_source(header, records, name)


def text_records(
    lines: Iterable[str], name: str, separator: str | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line of each record and its cells; the first record is the header.

    pandas would fill short rows without an error, and does not return the lines of rows.

    Args:
        lines: the lines of the text.
        name: the path of the file.
        separator: between values; by default the most frequent candidate in the header.
    """
    lines = iter(lines)
    start = 1
    while (first := next(lines, None)) is not None and not first.strip("\r\n"):
        start += 1
    if first is None:
        raise DataError(f"{name}: the file has only empty lines; write it again.")
    separator = separator or max(",;\t", key=first.count)
    reader = csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)
    header, begin = None, start
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if "\0" in "".join(cells):
                raise DataError(
                    f"{name}, line {begin}: a byte is zero, so this is not plain text; save it as"
                    " CSV in UTF-8."
                )
            if header is None:
                header = _header(cells, name, begin)
                yield begin, header
            elif cells or len(header) == 1:
                cells = cells or [""]
                if len(cells) != len(header):
                    raise DataError(
                        f"{name}, line {begin}: {len(cells)} values below {len(header)} column"
                        f" names (it begins with {shorten(cells[0])}); add or remove some."
                    )
                yield begin, cells
            begin = start + reader.line_num
    except csv.Error as error:
        raise DataError(
            f"{name}, line {begin}: not comma-separated values ({error}); is a quote not closed?"
        ) from None


def rows_source(
    header: Sequence[str],
    records: Sequence[tuple[int, Sequence[str]]],
    name: str,
    is_numbered: bool | None = None,
) -> Source:
    """Convert rows of text.

    Args:
        header: the names of columns.
        records: the line and the cells of each row.
        name: the path of the file.
        is_numbered: whether a first column without a name counts the rows of the file; detected by
            default.
    """
    if not records:
        raise DataError(f"{name}: there are no rows below the header; add some.")
    lines, rows = zip(*records, strict=True)
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    frame = optional("pandas").DataFrame(columns, columns=header, dtype=object)
    if header[0] == "":
        frame = _with_index(frame, is_numbered)
    source = frame_source(frame, name, "frame")
    return dataclasses.replace(source, lines=np.array(lines), unit="line")


def _with_index(frame: Any, is_numbered: bool | None) -> Any:
    """Turn a first column without a name into the index: pandas writes an index in this way."""
    pandas = optional("pandas")
    cells = frame[""].tolist()
    frame = frame.drop(columns="")
    if is_numbered is None:
        is_numbered = cells == [str(i) for i in range(len(cells))]
    if is_numbered:
        return frame
    try:
        return frame.set_index(pandas.Index([float(cell) for cell in cells]))
    except ValueError:
        return frame.set_index(pandas.Index(cells, dtype=object, name="index"))


def _header(cells: list[str], name: str, line: int) -> list[str]:
    if all(_is_number(cell) for cell in cells):
        raise DataError(
            f"{name}, line {line}: the first line holds numbers; add a line of column names above."
        )
    for index, cell in enumerate(cells):
        if not cell and index:
            raise DataError(f"{name}, line {line}: column {index + 1} has no name; give it one.")
    check_names(cells, f"{name}, line {line}")
    return cells


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
