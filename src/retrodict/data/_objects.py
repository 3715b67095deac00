"""Objects to frames: arrays, mappings of arrays, pandas, polars, Arrow and xarray."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrodict._interface import DataError, listed, optional
from retrodict.data._files import open_file
from retrodict.data._source import TIME_NAMES, Source, frame_source

MAX_SPREAD = 100
"""Rows per value of a dataset, at most, if variables lack some dimensions."""


def to_source(
    source: Any, *, time: str | None, series: Sequence[str], keep: Sequence[str]
) -> Source:
    """Convert anything that holds a table to one frame.

    Args:
        source: a path; an object of pandas, polars, Arrow or xarray; an array; or a mapping of
            arrays.
        time: the name of the time, if the user passed it.
        series: the names of what identifies series.
        keep: further names that coordinates of a dataset may have.
    """
    if isinstance(source, Source):
        return source
    name = f"the {type(source).__name__}"
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        source = open_file(Path(source), name)
        if isinstance(source, Source):
            return source
    package = type(source).__module__.partition(".")[0]
    if package == "pandas":
        return _from_pandas(source, name)
    if package == "xarray":
        return from_xarray(source, name, time=time, series=series, keep=keep)
    if isinstance(source, Mapping):
        return _from_mapping(source, name)
    if package == "polars" or hasattr(source, "__arrow_c_stream__"):
        return _from_arrow(source, name)
    return _from_array(source, name, series)


def _from_pandas(source: Any, name: str) -> Source:
    pandas = optional("pandas")
    if isinstance(source, pandas.Series):
        source = source.to_frame(name="value" if source.name is None else str(source.name))
    if not isinstance(source, pandas.DataFrame):
        raise DataError(f"{name}: neither a DataFrame nor a Series; give one of them.")
    return frame_source(source, name, "frame")


def _from_arrow(source: Any, name: str) -> Source:
    """Convert a frame of polars, or any table with the Arrow protocol."""
    pyarrow = optional("pyarrow")
    if hasattr(source, "collect"):
        raise DataError(f"{name}: the frame is lazy; call its collect() first.")
    try:
        if hasattr(source, "to_frame"):  # a single column of polars
            source = source.to_frame(source.name or "value")
        frame = pyarrow.table(source).to_pandas(date_as_object=False)
    except (AttributeError, TypeError, ValueError, pyarrow.ArrowInvalid):
        raise DataError(f"{name}: expected a table of named columns; give a DataFrame.") from None
    return frame_source(frame, name, "frame")


def _from_mapping(source: Mapping[Any, Any], name: str) -> Source:
    columns = {str(key): _column(value) for key, value in source.items()}
    shapes = {key: np.shape(value) for key, value in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        described = listed(f"{key} {shape}" for key, shape in shapes.items())
        raise DataError(f"{name}: expected arrays of one length each, got {described}.")
    return frame_source(optional("pandas").DataFrame(columns), name, "array")


def _column(value: Any) -> Any:
    """Return the values of one column; a masked entry is missing."""
    if isinstance(value, np.ma.MaskedArray) and value.ndim == 1:
        return optional("pandas").Series(value)
    return _native(np.asarray(value))


def _native(array: np.ndarray) -> np.ndarray:
    """Return the array in the byte order of the machine, which pandas needs for sorting."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _from_array(source: Any, name: str, series: Sequence[str]) -> Source:
    """Convert an array of shape `(time,)`, `(time, obs)` or `(batch, time, obs)`."""
    if isinstance(source, np.ma.MaskedArray):
        source = np.ma.filled(source.astype(float), np.nan)
    try:
        array = _native(np.asarray(source))
    except ValueError:
        raise DataError(f"{name}: rows of unequal length; pad them with NaN.") from None
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: expected numbers in an array, a DataFrame, a dataset or a path, got dtype"
            f" {array.dtype}."
        )
    if not 1 <= array.ndim <= 3 or 0 in array.shape:
        raise DataError(
            f"{name}: expected shape (time,), (time, obs) or (batch, time, obs), got {array.shape}."
        )
    rows = array.reshape(-1, 1 if array.ndim == 1 else array.shape[-1])
    frame = optional("pandas").DataFrame(rows, columns=[f"y{i}" for i in range(rows.shape[1])])
    if array.ndim < 3:
        return frame_source(frame, name, "array")
    key = series[0] if series else "series"
    frame[key] = np.repeat(np.arange(len(array)), array.shape[1])
    return dataclasses.replace(frame_source(frame, name, "array"), series=(key,))


def from_xarray(
    source: Any, name: str, *, time: str | None, series: Sequence[str], keep: Sequence[str]
) -> Source:
    """Convert a dataset of variables along time, and along series or columns too."""
    xarray = optional("xarray")
    alone = isinstance(source, xarray.DataArray)
    dataset = source.to_dataset(name=source.name or "value") if alone else source
    if not isinstance(dataset, xarray.Dataset):
        raise DataError(f"{name}: neither a Dataset nor a DataArray; give one of them.")
    dataset = _without_coordinates(dataset, {time, *series, *keep})
    if not dataset.dims or not dataset.data_vars:
        raise DataError(f"{name}: there is no variable along a dimension; give one along the time.")
    along = _time_dimension(dataset, name, time)
    keys = [dimension for dimension in dataset.dims if dimension in series]
    dataset = _as_columns(dataset, name, {along, *keys}, alone)
    order = [*keys, along]
    num_rows = math.prod(dataset.sizes[dimension] for dimension in order)
    num_values = sum(variable.size for variable in dataset.values())
    if num_rows > MAX_SPREAD * max(num_values, 100_000):
        raise DataError(
            f"{name}: the dimensions {listed(order)} make {num_rows} rows of {num_values} values;"
            " give variables along all of them."
        )
    frame = dataset.to_dataframe(dim_order=order).reset_index()
    unlabelled = along not in dataset.coords
    if keys:
        frame = _without_empty_rows(frame, keys, along, unlabelled)
    if unlabelled:
        frame = frame.drop(columns=along)
        order.remove(along)
    return dataclasses.replace(
        frame_source(frame, name, "dataset"),
        index=tuple(str(dimension) for dimension in order),
        time_index=None if unlabelled or not _is_time(dataset, along, time) else str(along),
        row_index=None if unlabelled else str(along),
    )


def _without_empty_rows(frame: Any, keys: list[Any], along: Any, unlabelled: bool) -> Any:
    """Drop rows of a rectangle of series at times that a series does not have.

    If the row number is the time, rows up to the last observed one exist.
    """
    values = [column for column in frame.columns if column not in (*keys, along)]
    exists = ~frame[values].isna().all(axis=1)
    if unlabelled:
        observed = frame[along].where(exists).groupby([frame[key] for key in keys], dropna=False)
        exists = frame[along] <= observed.transform("max")
    return frame[exists].reset_index(drop=True)


def _without_coordinates(dataset: Any, names: set[str | None]) -> Any:
    """Drop coordinates that are not dimensions, since they would be read as data.

    Those in `names` stay, and one named like a time if no dimension is a time.
    """
    timed = any(_is_time(dataset, dimension, None) for dimension in dataset.dims)
    others = [
        name
        for name in dataset.coords
        if name not in dataset.dims
        and name not in names
        and (timed or str(name).lower() not in TIME_NAMES)
    ]
    return dataset.drop_vars(others).reset_coords()


def _is_time(dataset: Any, dimension: Any, time: str | None) -> bool:
    named = dimension == time or str(dimension).lower() in TIME_NAMES
    return named or dataset[dimension].dtype.kind == "M"


def _time_dimension(dataset: Any, name: str, time: str | None) -> Any:
    dimensions = list(dataset.dims)
    if time in dimensions:
        return time
    candidates = [d for d in dimensions if _is_time(dataset, d, time)]
    if len(candidates) == 1:
        return candidates[0]
    if len(dimensions) == 1:
        return dimensions[0]
    raise DataError(
        f"{name}: each of the dimensions {listed(dimensions)} may be the time; name it with"
        f" {{time}}",
        time=...,
    )


def _as_columns(dataset: Any, name: str, indexed: set[Any], alone: bool) -> Any:
    """Turn one further dimension of a variable into columns, one per label."""
    columns = {}
    for key, variable in dataset.data_vars.items():
        further = [dimension for dimension in variable.dims if dimension not in indexed]
        if not further:
            columns[str(key)] = variable
            continue
        if len(further) > 1:
            raise DataError(
                f"{name}, column {str(key)!r}: the dimensions {listed(further)} are too many;"
                " select along all but the one that identifies series, and name that with"
                f" {{series}}",
                series=...,
            )
        for index, label in enumerate(dataset[further[0]].values):
            column = variable.isel({further[0]: index}, drop=True)
            columns[str(label) if alone else f"{key}_{label}"] = column
    return optional("xarray").Dataset(columns)
