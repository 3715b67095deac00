"""Results with names: xarray datasets, pandas frames, or the type of the source."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from retrodict._files import version_of
from retrodict._interface import optional
from retrodict.data._table import Table

OTHER_STATE = "state_other"
"""The second axis of a covariance: each dimension of a dataset needs a distinct name."""


def to_xarray(
    table: Table,
    result: Any = None,
    *,
    mean: Any = None,
    covariance: Any = None,
    states: Any = None,
    observations: Any = None,
    future: bool | None = None,
    times: Sequence[np.ndarray] | None = None,
    state_names: Sequence[str] | None = None,
    shown_states: Sequence[str] | None = None,
    level: float | None = None,
    attributes: Mapping[str, str | int | float] | None = None,
) -> Any:
    """Return moments and draws as a dataset with named dimensions.

    These are `series`, `time`, `state`, `obs` and `sample`; the coordinates are the identifiers,
    times and column names of the table. `time` holds the times themselves if all series share them;
    otherwise it counts rows, and `time_stamp` holds the times by series. There is no dimension
    `series` if the table has no identifiers. Rows that do not exist are NaN. Without a result,
    the dataset holds the observations and inputs of the table.

    Example:
        >>> import numpy as np, retrodict as rd
        >>> table = rd.data.read({"year": [1871, 1872, 1873], "flow": [1.0, 2.0, 3.0]})
        >>> posterior = rd.data.to_xarray(table, mean=np.zeros((3, 1)), state_names=["level"])
        >>> posterior["mean"].sel(time=1872, state="level").item()
        0.0

    A result with `probabilities` of regimes has the dimension `regime`, whose labels are
    `regime_1`, `regime_2`, ..., and the number of the most probable regime of each row.

    Args:
        table: the table of the series.
        result: a result of `smooth` or `forecast`, or any object with `mean` and `covariance`.
        mean: means of states, of shape `(time, state)` or `(batch, time, state)`.
        covariance: covariances of states, of shape `(..., time, state, state)`.
        states: draws, of shape `(sample, time, state)` or `(batch, sample, time, state)`.
        observations: draws, of shape `(sample, time, obs)` or `(batch, sample, time, obs)`.
        future: whether rows are those after the end of each series, as in a forecast; by default
            only for forecasts.
        times: the times of those rows, one array per series, for irregular tables: see
            `read_times`.
        state_names: names of the coordinates of the state; `x0`, `x1`, ... by default.
        shown_states: the names of the coordinates to return; all by default.
        level: the probability of the central interval of the states, whose ends are added as
            `lower` and `upper`: from the `quantile` method of the result if it has one, else from
            `states`, else from the Gaussian law with this mean and covariance.
        attributes: further attributes of the dataset.

    Returns:
        An xarray Dataset with the available ones of `mean`, `std`, `lower`, `upper`, `covariance`,
        `mean_standard_error`, `states` and `observations`; or `observed` and `inputs`.

    Raises:
        ValueError: if a shape does not fit the table.
    """
    by_name = {
        "mean": mean,
        "covariance": covariance,
        "states": states,
        "observations": observations,
    }
    parts = _parts_of(result) | {key: value for key, value in by_name.items() if value is not None}
    if result is not None and not parts:
        raise TypeError(
            "to_xarray expects a result with mean and covariance, or with states and observations,"
            f" got {type(result).__name__}."
        )
    if future is None:
        future = _is_forecast(result)
    if level is not None:
        parts |= _interval(result, parts, level)
    if not parts:
        parts = {"observed": table.ys}
        if table.inputs is not None:
            parts["inputs"] = table.inputs
    arrays = {key: _with_batch(table, key, np.asarray(value)) for key, value in parts.items()}
    if "probabilities" in arrays:
        arrays["most_probable_regime"] = _most_probable(arrays["probabilities"])
    if "covariance" in arrays:
        arrays["std"] = _std(arrays["covariance"])
    counts = {key: array.shape[1 + DIMENSIONS[key].index("time")] for key, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"Results must have equally many rows, got {counts}.")
    rows = next(iter(counts.values()))
    longest = rows if future else int(table.length.max())
    if rows not in (longest, table.ys.shape[1]):
        raise ValueError(
            f"The result has {rows} rows and the table {table.ys.shape[1]}; pass future=True for"
            " rows after its end."
        )
    stamps = _times(table, rows, future, times)
    xarray = optional("xarray")
    variables = {
        key: (("series", *dimensions), arrays[key])
        for key, dimensions in DIMENSIONS.items()
        if key in arrays
    }
    # No series has rows beyond the longest, which are padding.
    dataset = xarray.Dataset(variables).isel(time=slice(longest))
    exists = np.arange(longest) < np.array([[len(series)] for series in stamps])
    dataset = dataset.where(xarray.DataArray(exists, dims=("series", "time")))
    dataset = dataset.assign_coords(_coordinates(table, stamps, dataset.sizes, state_names))
    if table.series is None:
        dataset = dataset.isel(series=0)
    dataset.attrs = _attributes(result) | ({} if level is None else {"level": level})
    dataset.attrs |= dict(attributes or {})
    if shown_states is None:
        return dataset
    shown = {name: list(shown_states) for name in ("state", OTHER_STATE) if name in dataset.dims}
    return dataset.sel(shown)


DIMENSIONS = {
    "mean": ("time", "state"),
    "std": ("time", "state"),
    "lower": ("time", "state"),
    "upper": ("time", "state"),
    "covariance": ("time", "state", OTHER_STATE),
    "mean_standard_error": ("time", "state"),
    "probabilities": ("time", "regime"),
    "most_probable_regime": ("time",),
    "states": ("sample", "time", "state"),
    "observations": ("sample", "time", "obs"),
    "observed": ("time", "obs"),
    "inputs": ("time", "input"),
}


def _times(
    table: Table, rows: int, future: bool, times: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, ...]:
    """Return the times of the rows of a result."""
    if not future:
        return table.times
    if times is None:
        return table.future_times(rows)
    checked = table.check_future_times(times)
    if any(len(series) != rows for series in checked):
        raise ValueError(f"The result has {rows} rows; pass as many times per series.")
    return checked


def _is_forecast(result: Any) -> bool:
    return hasattr(result, "states") and hasattr(result, "observations")


def _parts_of(result: Any) -> dict[str, Any]:
    """Return the available arrays of a result of the library."""
    fields = {name: name for name in ("mean", "covariance", "mean_standard_error")}
    fields["probabilities"] = "probabilities"
    if _is_forecast(result):
        fields |= {"mean": "state_mean", "covariance": "state_covariance"}
        del fields["mean_standard_error"]
        fields |= {"states": "states", "observations": "observations"}
    parts = {name: getattr(result, field, None) for name, field in fields.items()}
    # A model whose only hidden state is its regime has states without coordinates.
    return {name: part for name, part in parts.items() if part is not None and np.shape(part)[-1]}


def _interval(result: Any, parts: Mapping[str, Any], level: float) -> dict[str, np.ndarray]:
    """Return the ends of the central interval of each state, if there are states."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"`level` must be between 0 and 1, got {level}.")
    ends = (0.5 - level / 2, 0.5 + level / 2)
    if _is_forecast(result):
        gaussian = getattr(result, "gaussian_states", False)
    else:
        gaussian = "states" not in parts
        if hasattr(result, "quantile"):
            return {"lower": _quantile(result, ends[0]), "upper": _quantile(result, ends[1])}
    if not gaussian and "states" in parts:
        lower, upper = np.quantile(np.asarray(parts["states"]), ends, axis=-3)
    elif "mean" in parts and "covariance" in parts:
        lower, upper = gaussian_ends(parts["mean"], parts["covariance"], level)
    else:
        return {}
    return {"lower": lower, "upper": upper}


def _quantile(result: Any, probability: float) -> np.ndarray:
    """Return the quantile of the states of a result of one series, or of a batch."""
    if np.ndim(result.mean) == 2 or hasattr(result, "draw_key"):
        return np.asarray(result.quantile(probability))
    return np.asarray(optional("jax").vmap(lambda one: one.quantile(probability))(result))


def gaussian_ends(mean: Any, covariance: Any, level: float) -> np.ndarray:
    """Return the ends of the central intervals of Gaussian laws, on a leading axis.

    Args:
        mean: means, of shape `(..., d)`.
        covariance: covariances, of shape `(..., d, d)`.
        level: the probability of the interval.
    """
    reach = NormalDist().inv_cdf(0.5 + level / 2) * _std(np.asarray(covariance))
    return np.stack([np.asarray(mean) - reach, np.asarray(mean) + reach])


def _most_probable(probabilities: np.ndarray) -> np.ndarray:
    """Return the number of the most probable regime, from 1; NaN where a row does not exist."""
    exists = np.all(np.isfinite(probabilities), axis=-1)
    best = np.argmax(np.where(exists[..., None], probabilities, 0.0), axis=-1) + 1.0
    return np.where(exists, best, np.nan)


def _std(covariance: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(np.diagonal(covariance, axis1=-2, axis2=-1), 0.0))


def _with_batch(table: Table, key: str, array: np.ndarray) -> np.ndarray:
    """Return an array with a leading axis for the series, checked against the table."""
    dimensions = DIMENSIONS[key]
    if array.ndim == len(dimensions):
        array = array[None]
    expected = f"(series, {', '.join(dimensions)})"
    if array.ndim != len(dimensions) + 1:
        raise ValueError(f"{key}: expected shape {expected}, got {array.shape}.")
    if array.shape[0] != table.num_series:
        raise ValueError(
            f"{key}: expected {table.num_series} series as in the table, got {array.shape[0]}"
            f" (shape {array.shape}, read as {expected})."
        )
    if "obs" in dimensions and array.shape[-1] != len(table.names):
        raise ValueError(
            f"{key}: expected {len(table.names)} columns as in the table, got {array.shape[-1]}."
        )
    return array if array.dtype.kind == "f" else array.astype(float)


def _coordinates(
    table: Table,
    times: Sequence[np.ndarray],
    sizes: Mapping[Any, int],
    state_names: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the coordinates of a dataset whose dimensions have these sizes."""
    coordinates: dict[str, Any] = {"obs": table.names, "input": table.input_names}
    if "state" in sizes:
        names = [f"x{i}" for i in range(sizes["state"])] if state_names is None else state_names
        if len(names) != sizes["state"]:
            raise ValueError(f"state_names: expected {sizes['state']} names, got {len(names)}.")
        coordinates |= {"state": names, OTHER_STATE: names}
    if "regime" in sizes:
        coordinates["regime"] = [f"regime_{j}" for j in range(1, sizes["regime"] + 1)]
    if table.series is not None:
        coordinates["series"] = table.series
    coordinates = {name: list(labels) for name, labels in coordinates.items() if name in sizes}
    longest = max(times, key=len)
    if all(np.array_equal(series, longest) for series in times):
        return coordinates | {"time": longest}
    stamps = np.stack([_padded(series, sizes["time"]) for series in times])
    numbers = np.arange(sizes["time"])
    return coordinates | {"time": numbers, "time_stamp": (("series", "time"), stamps)}


def _padded(times: np.ndarray, rows: int) -> np.ndarray:
    """Return times with NaT or NaN in rows that do not exist."""
    short = rows - len(times)
    if short and times.dtype.kind != "M":
        times = times.astype(float)
    absent = np.datetime64("NaT", "us") if times.dtype.kind == "M" else np.nan
    return np.concatenate([times, np.full(short, absent)]) if short else times


def _attributes(result: Any) -> dict[str, Any]:
    attributes = {"library": "retrodict", "version": version_of()}
    for name in ("method", "reason"):
        if isinstance(value := getattr(result, name, None), str):
            attributes[name] = value
    if isinstance(trustworthy := getattr(result, "trustworthy", None), bool):
        attributes["trustworthy"] = str(trustworthy).lower()  # NetCDF has no booleans
    return attributes


def to_frame(table: Table, result: Any = None, *, level: float = 0.9, **options: Any) -> Any:
    """Return moments and draws as a pandas frame, one row per existing time.

    Probabilities of regimes are the columns `regime_1`, `regime_2`, ..., and `regime` is the most
    probable one. Each coordinate of the state, and each observed column with draws, has the columns
    `NAME_mean`, `NAME_std`, `NAME_lower` and `NAME_upper`. The last two bound the central interval
    of probability `level`. They are exact quantiles for Gaussian laws, and else quantiles of draws,
    which are meaningful for a posterior with two modes too. The law is assumed Gaussian only if
    nothing but `mean` and `covariance` is given. Without a result, the frame holds the observations
    and inputs of the table.

    Example:
        >>> import numpy as np, retrodict as rd
        >>> table = rd.data.read({"year": [1871, 1872], "flow": [1.0, 2.0]})
        >>> moments = {"mean": np.zeros((2, 1)), "covariance": np.ones((2, 1, 1))}
        >>> list(rd.data.to_frame(table, **moments, state_names=["level"]))
        ['year', 'level_mean', 'level_std', 'level_lower', 'level_upper']

    Args:
        table: the table of the series.
        result: as in `to_xarray`.
        level: the probability of the interval.
        options: further arguments of `to_xarray`.

    Returns:
        A pandas DataFrame; the first columns are those of the identifier and the time.
    """
    dataset = to_xarray(table, result, level=level, **options)
    if table.series is None:
        dataset = dataset.expand_dims("series")
    columns = _summaries(dataset, level)
    if _is_forecast(result) and hasattr(result, "covariance"):
        columns |= _of_forecast(table, result, level)
    rows = dataset.sizes["time"]
    future = options.get("future")
    future = _is_forecast(result) if future is None else future
    times = _times(table, rows, future, options.get("times"))
    frame: dict[str, Any] = {}
    if table.series is not None:
        name = "-".join(table.layout["series"] or ["series"])
        frame[name] = np.repeat(np.array(table.series), [len(series) for series in times])
    frame[table.time_name or "time"] = np.concatenate(times)
    exists = np.arange(rows) < np.array([[len(series)] for series in times])
    columns = {name: values[exists] for name, values in columns.items()}
    if "regime" in columns and "probabilities" in dataset:
        columns["regime"] = columns["regime"].astype(int)
    return optional("pandas").DataFrame(frame | columns)


def _summaries(dataset: Any, level: float) -> dict[str, np.ndarray]:
    """Return columns of shape `(series, time)` by name."""
    columns: dict[str, np.ndarray] = {}
    for key in ("observed", "inputs"):
        if key in dataset:
            names = dataset[DIMENSIONS[key][-1]].values
            columns |= {str(name): dataset[key].values[..., i] for i, name in enumerate(names)}
    for key in ("states", "observations"):
        if key in dataset:
            summaries = _of_draws(np.moveaxis(dataset[key].values, 1, -1), level)
            columns |= _by_name(dataset[DIMENSIONS[key][-1]].values, summaries)
    if "probabilities" in dataset:
        labels = dataset["regime"].values
        columns |= {
            str(name): dataset["probabilities"].values[..., i] for i, name in enumerate(labels)
        }
        columns["regime"] = dataset["most_probable_regime"].values
    moments = {w: dataset[w].values for w in ("mean", "std", "lower", "upper") if w in dataset}
    return columns | _by_name(dataset["state"].values if moments else (), moments)


def _by_name(names: Iterable[str], summaries: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return columns `NAME_SUMMARY` of summaries of shape `(series, time, name)`."""
    return {
        f"{name}_{what}": values[..., i]
        for i, name in enumerate(names)
        for what, values in summaries.items()
    }


def _of_forecast(table: Table, result: Any, level: float) -> dict[str, np.ndarray]:
    """Return the exact moments of observations of a forecast, in place of those of draws."""
    mean, covariance = np.asarray(result.mean), np.asarray(result.covariance)
    if mean.ndim == 2:
        mean, covariance = mean[None], covariance[None]
    moments = {"mean": mean, "std": _std(covariance)}
    if getattr(result, "gaussian", False):
        moments["lower"], moments["upper"] = gaussian_ends(mean, covariance, level)
    return _by_name(table.names, moments)


def _of_draws(draws: np.ndarray, level: float) -> dict[str, np.ndarray]:
    """Return summaries over the last axis."""
    lower, upper = np.quantile(draws, [0.5 - level / 2, 0.5 + level / 2], axis=-1)
    # One draw has no standard deviation, and rows of NaN stay NaN.
    single = draws.shape[-1] == 1
    std = np.full(lower.shape, np.nan) if single else np.std(draws, axis=-1, ddof=1)
    return {"mean": np.mean(draws, axis=-1), "std": std, "lower": lower, "upper": upper}


def like(table: Table, result: Any = None, **options: Any) -> Any:
    """Return a result as the type of object that the table was read from.

    Example:
        >>> import numpy as np, pandas as pd, retrodict as rd
        >>> table = rd.data.read(pd.DataFrame({"year": [1871, 1872], "flow": [1.0, 2.0]}))
        >>> moments = {"mean": np.zeros((2, 1)), "covariance": np.ones((2, 1, 1))}
        >>> type(rd.data.like(table, **moments, state_names=["level"])).__name__
        'DataFrame'

    Args:
        table: the table of the series.
        result: as in `to_xarray`.
        options: further arguments of `to_xarray`, or of `to_frame` for a frame.

    Returns:
        For arrays a dictionary of arrays, with the names and axes of `to_xarray`; for a DataFrame,
        a CSV or a Parquet file the frame of `to_frame`; for xarray or a NetCDF file the dataset of
        `to_xarray`.
    """
    if table.kind == "frame":
        return to_frame(table, result, **options)
    dataset = to_xarray(table, result, **options)
    if table.kind == "dataset":
        return dataset
    return {str(key): variable.values for key, variable in dataset.data_vars.items()}
