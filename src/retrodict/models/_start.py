"""Statistics of data, from which ready models take their starting values."""

from typing import Any, NamedTuple

import numpy as np

from retrodict._series import prepare_batch

PRIOR_WIDTH = 10.0
"""A diffuse prior is this many times as wide as the data."""


class Sample(NamedTuple):
    """Data for starting values.

    Attributes:
        ys: observations, of shape `(batch, time, obs)`, NaN where missing.
        inputs: inputs, of shape `(batch, time, input)`, or `None`.
    """

    ys: np.ndarray
    inputs: np.ndarray | None

    @property
    def obs_dim(self) -> int:
        """The number of columns."""
        return self.ys.shape[2]

    def columns(self, values: np.ndarray | None = None) -> list[np.ndarray]:
        """Return the finite entries of each column, of the data or of values computed from it."""
        values = self.ys if values is None else values
        flat = values.reshape(-1, values.shape[-1]).T
        return [column[np.isfinite(column)] for column in flat]

    def step(self, irregular: bool) -> float:
        """Return the mean step of time: 1, or the mean of the first input after the first row."""
        if not irregular or self.inputs is None or self.inputs.shape[1] < 2:
            return 1.0
        steps = self.inputs[:, 1:, 0]
        steps = steps[np.isfinite(steps) & (steps > 0)]
        return float(steps.mean()) if steps.size else 1.0


def sample_of(ys: Any, mask: Any, inputs: Any, length: Any) -> Sample:
    """Return the data with NaN for missing entries and rows that do not exist."""
    options: dict[str, Any] = {"mask": mask, "inputs": inputs, "length": length}
    batch = prepare_batch(ys, **options, takes_input=inputs is not None)
    values = np.array(batch.ys, float)
    if batch.mask is not None:
        values[~np.asarray(batch.mask)] = np.nan
    if batch.inputs is None:
        return Sample(values, None)
    us = np.array(batch.inputs, float)
    if batch.length is not None:
        us[np.arange(us.shape[1])[None] >= np.asarray(batch.length)[:, None]] = np.nan
    return Sample(values, us)


def centre(column: np.ndarray) -> float:
    """Return the mean of a column; zero if it is empty."""
    return float(column.mean()) if column.size else 0.0


def first(column: np.ndarray) -> float:
    """Return the first value of a column; zero if it is empty."""
    return float(column[0]) if column.size else 0.0


def spread(column: np.ndarray) -> float:
    """Return the standard deviation of a column; for a constant, 0.001 times its size."""
    if column.size < 2:
        return 1.0
    std = float(column.std())
    return std if std > 0 else max(1e-3 * abs(float(column[0])), 1e-3)


def differences(ys: np.ndarray, order: int = 1) -> np.ndarray:
    """Return differences in time, NaN where a value is missing."""
    if ys.shape[1] <= order:
        return np.full((ys.shape[0], 1, ys.shape[2]), np.nan)
    return np.diff(ys, n=order, axis=1)


def autocorrelation(ys: np.ndarray) -> list[float]:
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
    return correlations
