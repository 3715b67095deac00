"""Objects to frames: arrays, mappings of arrays, pandas, polars, Arrow and xarray."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrodict._errors import DataError, listed, optional
from retrodict.data._files import open_file
from retrodict.data._source import TIME_NAMES, Source, frame_source

MOST_SPREAD = 100
"""A dataset may have so many rows a value, where values do not depend on all dimensions."""


def to_source(
    given: Any, *, time: str | None, series: Sequence[str], keep: Sequence[str]
) -> Source:
    """Whatever holds a table, as one frame.

    Args:
        given: a path; an object of pandas, polars, Arrow or xarray; an array; a mapping of arrays.
        time: the name of the time, if it was given.
        series: names of what tells series apart.
        keep: further names that were asked for, which coordinates of a dataset may have.
    """
    if isinstance(given, Source):
        return given
    name = f"the {type(given).__name__}"
    if isinstance(given, str | os.PathLike):
        name = os.fspath(given)
        given = open_file(Path(given), name)
        if isinstance(given, Source):
            return given
    kind = type(given).__module__.partition(".")[0]
    if kind == "pandas":
        return _from_pandas(given, name)
    if kind == "xarray":
        return from_xarray(given, name, time=time, series=series, keep=keep)
    if isinstance(given, Mapping):
        return _from_mapping(given, name)
    if kind == "polars" or hasattr(given, "__arrow_c_stream__"):
        return _from_arrow(given, name)
    return _from_array(given, name, series)


def _from_pandas(given: Any, name: str) -> Source:
    pandas = optional("pandas")
    if isinstance(given, pandas.Series):
        given = given.to_frame(name="value" if given.name is None else str(given.name))
    if not isinstance(given, pandas.DataFrame):
        raise DataError(f"{name}: neither a DataFrame nor a Series; give one of them.")
    return frame_source(given, name, "frame")


def _from_arrow(given: Any, name: str) -> Source:
    """A frame of polars, or any table that offers its columns by the Arrow protocol."""
    pandas, pyarrow = optional("pandas"), optional("pyarrow")
    if hasattr(given, "collect"):
        raise DataError(f"{name}: the frame is lazy; call its collect() first.")
    try:
        if hasattr(given, "to_frame"):  # a single column of polars
            given = given.to_frame(given.name or "value")
        table = pyarrow.table(given)
    except (AttributeError, TypeError, ValueError, pyarrow.ArrowInvalid):
        raise DataError(f"{name}: expected a table of named columns; give a DataFrame.") from None
    frame = table.to_pandas(date_as_object=False)
    if not isinstance(frame, pandas.DataFrame):
        raise DataError(f"{name}: expected a table of named columns; give a DataFrame.")
    return frame_source(frame, name, "frame")


def _from_mapping(given: Mapping[Any, Any], name: str) -> Source:
    pandas = optional("pandas")
    columns = {str(key): _column(value) for key, value in given.items()}
    lengths = {key: np.shape(value) for key, value in columns.items()}
    if len(set(lengths.values())) > 1 or any(len(shape) != 1 for shape in lengths.values()):
        shapes = listed(f"{key} {shape}" for key, shape in lengths.items())
        raise DataError(f"{name}: expected arrays of one length each, got {shapes}.")
    return frame_source(pandas.DataFrame(columns), name, "array")


def _column(value: Any) -> Any:
    """The values of one column; a masked entry is missing."""
    if isinstance(value, np.ma.MaskedArray) and value.ndim == 1:
        return optional("pandas").Series(value)
    return _native(np.asarray(value))


def _native(array: np.ndarray) -> np.ndarray:
    """The array in the byte order of the machine, without which pandas cannot sort it."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _from_array(given: Any, name: str, series: Sequence[str]) -> Source:
    """An array of shape `(time,)`, `(time, obs)` or `(batch, time, obs)`; columns `y0`, ..."""
    pandas = optional("pandas")
    if isinstance(given, np.ma.MaskedArray):
        given = np.ma.filled(given.astype(float), np.nan)
    try:
        array = _native(np.asarray(given))
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
    columns = array.reshape(-1, 1 if array.ndim == 1 else array.shape[-1])
    frame = pandas.DataFrame(columns, columns=[f"y{i}" for i in range(columns.shape[1])])
    if array.ndim == 3:
        apart = series[0] if series else "series"
        frame[apart] = np.repeat(np.arange(len(array)), array.shape[1])
        return dataclasses.replace(frame_source(frame, name, "array"), series=(apart,))
    return frame_source(frame, name, "array")


def from_xarray(
    given: Any, name: str, *, time: str | None, series: Sequence[str], keep: Sequence[str]
) -> Source:
    """A dataset of variables along the time, along series too, or with one axis of columns."""
    xarray = optional("xarray")
    alone = isinstance(given, xarray.DataArray)
    dataset = given.to_dataset(name=given.name or "value") if alone else given
    if not isinstance(dataset, xarray.Dataset):
        raise DataError(f"{name}: neither a Dataset nor a DataArray; give one of them.")
    dataset = _without_coordinates(dataset, {time, *series, *keep})
    if not dataset.dims or not dataset.data_vars:
        raise DataError(f"{name}: there is no variable along a dimension; give one along the time.")
    along = _time_dimension(dataset, name, time)
    apart = [dimension for dimension in dataset.dims if dimension in series]
    dataset = _spread(dataset, name, {along, *apart}, alone)
    bare = along not in dataset.coords
    order = [*apart, along]
    rows, entries = (
        math.prod(dataset.sizes[d] for d in order),
        sum(v.size for v in dataset.values()),
    )
    if rows > MOST_SPREAD * max(entries, 100_000):
        raise DataError(
            f"{name}: the dimensions {listed(order)} make {rows} rows of {entries} values; give"
            " variables along all of them."
        )
    frame = dataset.to_dataframe(dim_order=order).reset_index()
    if apart:
        # A rectangle of series has rows for times at which a series has none.
        values = [column for column in frame.columns if column not in order]
        kept = ~frame[values].isna().all(axis=1)
        if bare:
            # The row number is the time: rows that count are all up to the last that was observed.
            seen = frame[along].where(kept).groupby([frame[i] for i in apart], dropna=False)
            kept = frame[along] <= seen.transform("max")
        frame = frame[kept].reset_index(drop=True)
    if bare:
        frame = frame.drop(columns=along)
        order.remove(along)
    source = frame_source(frame, name, "dataset")
    return Source(
        source.frame,
        name,
        "dataset",
        source.lines,
        index=tuple(str(dimension) for dimension in order),
        time_index=None if bare or not _is_time(dataset, along, time) else str(along),
        row_index=None if bare else str(along),
    )


def _without_coordinates(dataset: Any, wanted: set[str | None]) -> Any:
    """Leaves out coordinates beside the dimensions, which would be taken for data.

    Not those that were asked for, nor one called as a time if no dimension is the time.
    """
    timed = any(_is_time(dataset, dimension, None) for dimension in dataset.dims)
    others = [
        name
        for name in dataset.coords
        if name not in dataset.dims
        and name not in wanted
        and (timed or str(name).lower() not in TIME_NAMES)
    ]
    return dataset.drop_vars(others).reset_coords()


def _is_time(dataset: Any, dimension: Any, time: str | None) -> bool:
    return (
        dimension == time
        or str(dimension).lower() in TIME_NAMES
        or dataset[dimension].dtype.kind == "M"
    )


def _time_dimension(dataset: Any, name: str, time: str | None) -> Any:
    dimensions = list(dataset.dims)
    if time in dimensions:
        return time
    found = [d for d in dimensions if _is_time(dataset, d, time)]
    if len(found) == 1:
        return found[0]
    if len(dimensions) == 1:
        return dimensions[0]
    raise DataError(
        f"{name}: which of the dimensions {listed(dimensions)} is the time? Say so with time=..."
    )


def _spread(dataset: Any, name: str, kept: set[Any], alone: bool) -> Any:
    """Turns one further dimension of a variable into columns, one for each of its labels."""
    columns = {}
    for key, variable in dataset.data_vars.items():
        further = [dimension for dimension in variable.dims if dimension not in kept]
        if not further:
            columns[str(key)] = variable
            continue
        if len(further) > 1:
            raise DataError(
                f"{name}, column {str(key)!r}: the dimensions {listed(further)} are too many; name"
                " the one that tells series apart with series=..., and select along the others."
            )
        labels = dataset[further[0]].values
        for place, label in enumerate(labels):
            column = variable.isel({further[0]: place}, drop=True)
            columns[str(label) if alone else f"{key}_{label}"] = column
    return optional("xarray").Dataset(columns)
