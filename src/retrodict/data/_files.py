"""Files to frames: CSV, Parquet and NetCDF. Whatever is wrong with one is said in one line."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrodict.data._errors import DataError, optional, shorten
from retrodict.data._source import Source, check_names, frame_source

SEPARATORS = {".csv": None, ".tsv": "\t"}
SUFFIXES = (".csv", ".tsv", ".parquet", ".nc")


def open_file(path: Path, name: str) -> Any:
    """A `Source` of a text or Parquet file, or the xarray dataset of a NetCDF file."""
    if not path.exists():
        raise DataError(f"{name}: there is no such file; check the path.")
    if path.is_dir():
        raise DataError(f"{name}: this is a folder; name a file in it.")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{name}: the suffix {suffix!r} is not known; use one of {', '.join(SUFFIXES)}."
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{name}: cannot be opened ({error.strerror}).") from None
    if not content:
        raise DataError(f"{name}: the file is empty; write it again.")
    if suffix == ".parquet":
        return _parquet(content, name)
    if suffix == ".nc":
        return _netcdf(content, name)
    return text_source(content, name, SEPARATORS[suffix])


def damaged(name: str, kind: str, error: Exception) -> DataError:
    """What to say of a file that its reader refused."""
    lines = str(error).strip().splitlines()
    because = lines[0] if lines else type(error).__name__
    return DataError(
        f"{name}: damaged, cut short or no {kind} file ({because[:120]}); write or fetch it again."
    )


def _parquet(content: bytes, name: str) -> Source:
    pandas = optional("pandas")
    optional("pyarrow")
    try:
        frame = pandas.read_parquet(io.BytesIO(content), engine="pyarrow")
    except Exception as error:  # pyarrow raises a dozen types on damaged files
        raise damaged(name, "Parquet", error) from None
    return frame_source(frame, name, "frame")


def _netcdf(content: bytes, name: str) -> Any:
    xarray = optional("xarray")
    # The name of an engine, so that a damaged file is not said to need a package. Numbers in units
    # of time stay the numbers that they are.
    classic = content.startswith(b"CDF")
    engine = "scipy" if classic else "h5netcdf"
    optional(engine)
    try:
        with xarray.open_dataset(
            io.BytesIO(content), engine=engine, decode_timedelta=False
        ) as dataset:
            return dataset.load()
    except Exception as error:  # as above, for HDF5
        raise damaged(name, "NetCDF", error) from None


def text_source(content: bytes, name: str, separator: str | None = None) -> Source:
    """Comma-separated values, kept as text, with the line of each row."""
    pandas = optional("pandas")
    header, rows, lines = _records(_decoded(content, name), name, separator)
    if not rows:
        raise DataError(f"{name}: there are no rows below the header; add some.")
    frame = pandas.DataFrame(
        {
            key: np.array(cells, object)
            for key, cells in zip(header, zip(*rows, strict=True), strict=True)
        },
        columns=header,
    )
    if header[0] != "":
        source = frame_source(frame, name, "frame")
    else:
        source = frame_source(_with_index(frame), name, "frame")
    return dataclasses.replace(source, lines=np.array(lines), unit="line")


def _with_index(frame: Any) -> Any:
    """A first column without a name is an index that was written with its frame."""
    pandas = optional("pandas")
    cells = frame[""].tolist()
    frame = frame.drop(columns="")
    if cells == [str(i) for i in range(len(cells))]:
        return frame
    try:
        return frame.set_index(pandas.Index([float(cell) for cell in cells]))
    except ValueError:
        return frame.set_index(pandas.Index(cells, dtype=object, name="index"))


def _decoded(content: bytes, name: str) -> str:
    if b"\0" in content:
        at = content.index(b"\0")
        raise DataError(
            f"{name}: byte {at} is zero, so this is not plain text; save it as CSV in UTF-8."
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name}, line {line}: byte {error.start} of the file is not UTF-8; save it as UTF-8."
        ) from None


def _records(
    text: str, name: str, separator: str | None
) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the cells of each row, and the line on which each row begins."""
    first = text.lstrip("\r\n").partition("\n")[0]
    if separator is None:
        separator = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    header: list[str] | None = None
    begin = 1
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if header is None:
                header = _header(cells, name, begin) if cells else None
            else:
                if not cells and len(header) == 1:
                    cells = [""]
                if cells:
                    _check_width(cells, header, name, begin)
                    rows.append(cells)
                    lines.append(begin)
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name}, line {begin}: not comma-separated values ({error}); is a quote not closed?"
        ) from None
    if header is None:
        raise DataError(f"{name}: the file has nothing but empty lines; write it again.")
    if len(header) == 1:
        while rows and rows[-1] == [""]:
            rows.pop()
            lines.pop()
    return header, rows, lines


def _header(cells: list[str], name: str, line: int) -> list[str]:
    if all(_is_number(cell) for cell in cells):
        raise DataError(
            f"{name}, line {line}: the first line holds numbers; add a line of column names above."
        )
    for place, cell in enumerate(cells):
        if not cell and place:
            raise DataError(f"{name}, line {line}: column {place + 1} has no name; give it one.")
    check_names(cells, f"{name}, line {line}")
    return cells


def _check_width(cells: Sequence[str], header: Sequence[str], name: str, line: int) -> None:
    if len(cells) != len(header):
        raise DataError(
            f"{name}, line {line}: {len(cells)} values below {len(header)} column names (it begins"
            f" with {shorten(cells[0])}); add or remove some."
        )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
