"""Statistics of data, from which ready models take their starting values."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from retrodict._model import prepare_batch

PRIOR_WIDTH = 10.0
"""A diffuse prior is this many times as wide as the data."""


class Sample(NamedTuple):
    """Data for starting values.

    Attributes:
        ys: observations, of shape `(batch, time, obs)`, NaN where missing.
        inputs: inputs, of shape `(batch, time, input)`, or `None`.
        step: the mean step of time: 1, or for irregular times the mean of the first input.
    """

    ys: np.ndarray
    inputs: np.ndarray | None
    step: float


def sample_of(ys: Any, irregular: bool, **series: Any) -> Sample:
    """Return the data with NaN for missing entries and rows that do not exist.

    Args:
        ys: observations.
        irregular: whether the first input is the step of time.
        **series: `mask`, `inputs` and `length`, as in `retrodict.models.start_from`.
    """
    batch = prepare_batch(ys, **series, takes_input=series.get("inputs") is not None)
    values, inputs, step = np.array(batch.ys, float), None, 1.0
    if batch.mask is not None:
        values[~np.asarray(batch.mask)] = np.nan
    if batch.inputs is not None:
        inputs = np.array(batch.inputs, float)
        if batch.length is not None:
            inputs[np.arange(inputs.shape[1]) >= np.asarray(batch.length)[:, None]] = np.nan
        if irregular:
            steps = inputs[:, 1:, 0]  # that of the first row is arbitrary
            steps = steps[steps > 0]
            step = float(steps.mean()) if steps.size else 1.0
    return Sample(values, inputs, step)


def by_column(statistic: Callable[[np.ndarray], float]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the statistic of the finite entries of each column of an array."""

    @functools.wraps(statistic)
    def of_columns(values: np.ndarray) -> np.ndarray:
        columns = values.reshape(-1, values.shape[-1]).T
        return np.array([statistic(column[np.isfinite(column)]) for column in columns])

    return of_columns


@by_column
def centre(column: np.ndarray) -> float:
    """Return the mean of a column; zero if it is empty."""
    return float(column.mean()) if column.size else 0.0


@by_column
def variance(column: np.ndarray) -> float:
    """Return the variance of a column; zero if it is empty."""
    return float(column.var()) if column.size else 0.0


@by_column
def first(column: np.ndarray) -> float:
    """Return the first value of a column; zero if it is empty."""
    return float(column[0]) if column.size else 0.0


@by_column
def spread(column: np.ndarray) -> float:
    """Return the standard deviation of a column; for a constant, 0.001 times its size."""
    if column.size < 2:
        return 1.0
    std = float(column.std())
    return std if std > 0 else max(1e-3 * abs(float(column[0])), 1e-3)


def reverting(mean: Any, spread: Any, persistence: Any, step: float) -> dict[str, Any]:
    """Return the parameters of an AR(1) process of this spread.

    Args:
        mean: the mean of each column.
        spread: the standard deviation of the stationary law.
        persistence: the correlation over a mean step.
        step: the length of a mean step.
    """
    phi = np.broadcast_to(persistence ** (1 / step), np.shape(mean))
    return {"mean": mean, "persistence": phi, "scale": spread * np.sqrt(1 - phi**2)}


def differences(ys: np.ndarray, order: int = 1) -> np.ndarray:
    """Return differences in time, NaN where a value is missing."""
    if ys.shape[1] <= order:
        return np.full((ys.shape[0], 1, ys.shape[2]), np.nan)
    return np.diff(ys, n=order, axis=1)


def autocorrelation(ys: np.ndarray) -> np.ndarray:
    """Return the lag-one autocorrelation of each column, clipped to 0.1 to 0.98."""
    correlations = []
    for column in np.moveaxis(ys, -1, 0):
        before, after = column[:, :-1].ravel(), column[:, 1:].ravel()
        both = np.isfinite(before) & np.isfinite(after)
        before, after = before[both], after[both]
        if before.size < 3 or before.std() == 0 or after.std() == 0:
            correlations.append(0.5)
        else:
            correlations.append(float(np.clip(np.corrcoef(before, after)[0, 1], 0.1, 0.98)))
    return np.array(correlations)
