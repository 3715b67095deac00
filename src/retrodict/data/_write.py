"""Results to files, written atomically."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from retrodict._files import replacing
from retrodict._interface import DataError, optional
from retrodict.data._files import check_suffix

SUFFIXES = (".csv", ".parquet", ".nc")


def check_target(
    path: str | os.PathLike[str], *, overwrite: bool = False, suffixes: Sequence[str] = SUFFIXES
) -> Path:
    """Refuse a file that cannot be written, before any work is done for it.

    Args:
        path: where to write.
        overwrite: whether a file of this name may be replaced.
        suffixes: the allowed suffixes; any if there are none.

    Returns:
        The path.

    Raises:
        DataError: if the suffix is not known, the file exists, or its folder does not exist or is
            read-only.
    """
    target, name = Path(path), os.fspath(path)
    if suffixes:
        check_suffix(target, name, suffixes)
    if not target.parent.is_dir():
        raise DataError(f"{name}: the folder does not exist; make it first.")
    if target.is_dir():
        raise DataError(f"{name}: this is a folder; name a file in it.")
    if target.exists() and not overwrite:
        text = f"{name}: the file exists; pass {{overwrite}}, or choose another name."
        raise DataError(text, overwrite=True)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise DataError(f"{name}: the folder is read-only; choose another.")
    return target


def write(result: Any, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a dataset or a frame in the format of the suffix: `.csv`, `.parquet` or `.nc`.

    The file appears complete or not at all: it is written under another name, and then renamed.
    Names of columns and series are written as given, so that they can be read again. A spreadsheet
    may run a name that begins with =, +, - or @ as a formula.

    Example:
        >>> import tempfile, numpy as np, retrodict as rd
        >>> table = rd.data.read({"year": [1871, 1872], "flow": [1.0, 2.0]})
        >>> frame = rd.data.to_frame(table, mean=np.zeros((2, 1)), state_names=["level"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rd.data.write(frame, f"{folder}/level.csv").name
        'level.csv'

    Args:
        result: an xarray Dataset or a pandas DataFrame.
        path: where to write.
        overwrite: whether a file of this name may be replaced.

    Returns:
        The path.

    Raises:
        DataError: if the suffix is not known, the folder does not exist, or the file exists.
    """
    target = check_target(path, overwrite=overwrite)
    name, suffix = os.fspath(path), target.suffix.lower()
    try:
        with replacing(target) as file:
            _write_as(suffix, result, file)
    except OSError as error:
        raise DataError(f"{name}: cannot be written ({error.strerror or error}).") from None
    return target


def _write_as(suffix: str, result: Any, file: BinaryIO) -> None:
    pandas, xarray = optional("pandas"), optional("xarray")
    if isinstance(result, xarray.DataArray):
        result = result.to_dataset(name=result.name or "value")
    if not isinstance(result, xarray.Dataset | pandas.DataFrame):
        raise TypeError(
            f"write expects an xarray Dataset or a pandas DataFrame, got {type(result).__name__}."
        )
    if suffix == ".nc":
        if isinstance(result, pandas.DataFrame):
            result = xarray.Dataset.from_dataframe(result)
        # In memory: the HDF5 library crashes at the end of a program if a disk was full.
        content = io.BytesIO()
        result.to_netcdf(content, engine="h5netcdf")
        file.write(content.getbuffer())
        return
    frame = result.to_dataframe() if isinstance(result, xarray.Dataset) else result
    if not (isinstance(frame.index, pandas.RangeIndex) and frame.index.name is None):
        frame = frame.reset_index()
    if suffix == ".csv":
        frame.to_csv(file, index=False, lineterminator="\n")
    else:
        frame.to_parquet(file, engine="pyarrow", index=False)
