"""Parameters that were estimated at the edge of their domain, where the curvature vanishes.

A scale v that the data do not support converges to zero. A log-likelihood depends on its square,
log p(y) ≈ a − c v², so that its standard error is 1 / √(2c): v is at the edge if it is a small
fraction of that. In the coordinate log v, in which it is learned, both derivatives vanish as v²,
the inverse information diverges, and an interval would be unbounded.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Float
from scipy.special import expit

from retrodict._learning.coordinates import Coordinates
from retrodict._series import Series

Total: TypeAlias = Callable[[np.ndarray], np.ndarray]

FLAT = 0.02
"""The information in log v, 4cv², below which v is within 0.1 standard errors of zero."""

NEGLIGIBLE = 1e-3
"""The fraction of the spread of the data up to which a scale can be at the edge of zero."""

FAR_OUT = 5.0
"""The coordinate beyond which a logistic function is within a hundredth of its bounds."""


def spread_of(batch: Series, total: Total) -> float:
    """Return the largest standard deviation of a column, or its size if nothing varies.

    Args:
        batch: the series.
        total: the sum of an array over all processes.
    """
    ys = np.asarray(batch.ys, np.float64).reshape(-1, batch.ys.shape[-1])
    mask = np.ones(ys.shape, bool) if batch.mask is None else np.asarray(batch.mask)
    mask = mask.reshape(ys.shape)
    count = np.maximum(total(mask.sum(axis=0).astype(np.float64)), 1.0)
    mean = total(np.where(mask, ys, 0.0).sum(axis=0)) / count
    variance = total(np.where(mask, (ys - mean) ** 2, 0.0).sum(axis=0)) / count
    return float(np.sqrt(np.max(variance)) or np.max(np.abs(mean)) or 1.0)


def raised(
    theta: Float[np.ndarray, "parameter"], coordinates: Coordinates, spread: float
) -> Float[np.ndarray, "parameter"]:
    """Return θ with negligible scales raised to the rounding error of the data.

    Data whitened by a scale of 1e-150 overflow. At the rounding error of the data they do not, and
    the likelihood is the same.
    """
    least = float(np.finfo(coordinates.theta().dtype).eps) * spread
    lowest = math.log(math.expm1(least)) if least < 1.0 else least
    is_scale = np.array([edge == (0.0, None) for edge in coordinates.edges], bool)
    return np.where(is_scale, np.maximum(theta, lowest), theta)


def edges_of(
    coordinates: Coordinates,
    theta: Float[np.ndarray, "parameter"],
    score: Float[np.ndarray, "parameter"],
    information: Float[np.ndarray, "parameter parameter"],
    spread: float,
) -> dict[int, float]:
    """Return the coordinates at an edge, and the value of that edge."""
    edges = {}
    for i, (lower, upper) in enumerate(coordinates.edges):
        if lower is None:
            continue
        if upper is not None:
            # A logistic function, whose distance to a bound is exponential in the coordinate.
            slope, near = 1.0, abs(theta[i]) > FAR_OUT
        else:
            value = np.logaddexp(0.0, theta[i])
            slope = value / expit(theta[i])  # of the coordinate in log v
            near = value < NEGLIGIBLE * spread
        flat = abs(score[i] * slope) < FLAT and abs(information[i, i] * slope**2) < FLAT
        if near and flat:
            edges[i] = lower if upper is None or theta[i] < 0 else upper
    return edges


def depends_only_on(
    at_edge: Bool[np.ndarray, "parameter"],
    slopes: Float[np.ndarray, "quantity parameter"],
    slopes_inside: Float[np.ndarray, "quantity parameter"],
) -> Bool[np.ndarray, "quantity"]:
    """Return which quantities depend on parameters at an edge only.

    Args:
        at_edge: which parameters are at an edge.
        slopes: the gradients of the quantities at θ.
        slopes_inside: the gradients with these parameters moved away from the edge, where their
            derivatives do not vanish.
    """
    others = np.any(slopes[:, ~at_edge] != 0, axis=1)
    return np.any(slopes_inside[:, at_edge] != 0, axis=1) & ~others


def inside(
    theta: Float[Array, "parameter"], at_edge: Bool[np.ndarray, "parameter"]
) -> Float[Array, "parameter"]:
    """Return θ with the parameters at an edge moved to the middle of their domain."""
    return theta.at[np.flatnonzero(at_edge)].set(0.0)
