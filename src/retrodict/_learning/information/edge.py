"""Parameters that were estimated at the edge of their domain, where no curvature measures them.

A scale v that the data do not ask for goes to zero. It enters a log-likelihood by its square, which
is then log p(y) ≈ a − c v², with a standard error of 1 / √(2c) on its own scale: v lies at the edge
if it is a small part of that. In the coordinate log v in which it is learned, both derivatives
vanish as v² does, the inverse information says that nothing is known, and an interval would run
from nothing to the sky.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Float
from scipy.special import expit

from retrodict._learning.information.coordinates import Coordinates
from retrodict._series import Series

Total: TypeAlias = Callable[[np.ndarray], np.ndarray]

FLAT = 0.02
"""Below it the information in log v, 4cv², puts v within a tenth of a standard error of zero."""

NEGLIGIBLE = 1e-3
"""Up to which share of the spread of the data a scale can be at the edge of zero."""

FAR_OUT = 5.0
"""Beyond it a logistic function is within a hundredth of its bounds."""


def spread_of(batch: Series, total: Total) -> float:
    """The largest standard deviation of a column of the data, or size if nothing varies.

    Args:
        batch: the series.
        total: the sum of an array over all who hold some of them.
    """
    ys = np.asarray(batch.ys, np.float64).reshape(-1, batch.ys.shape[-1])
    seen = np.ones(ys.shape, bool) if batch.mask is None else np.asarray(batch.mask)
    seen = seen.reshape(ys.shape)
    count = np.maximum(total(seen.sum(axis=0).astype(np.float64)), 1.0)
    mean = total(np.where(seen, ys, 0.0).sum(axis=0)) / count
    variance = total(np.where(seen, (ys - mean) ** 2, 0.0).sum(axis=0)) / count
    return float(np.sqrt(np.max(variance)) or np.max(np.abs(mean)) or 1.0)


def raised(
    theta: Float[np.ndarray, "parameter"], coordinates: Coordinates, spread: float
) -> Float[np.ndarray, "parameter"]:
    """θ with scales that are nothing beside the data raised to where their squares exist.

    Whitened by a scale of 1e-150, data overflow; at a rounding error of the data they do not, and
    no likelihood tells the two apart.
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
    """The coordinates at an edge, and where that edge is."""
    found = {}
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
            found[i] = lower if upper is None or theta[i] < 0 else upper
    return found


def depends_only_on(
    at_edge: Bool[np.ndarray, "parameter"],
    slopes: Float[np.ndarray, "quantity parameter"],
    slopes_inside: Float[np.ndarray, "quantity parameter"],
) -> Bool[np.ndarray, "quantity"]:
    """Which quantities hang on parameters at an edge, and on nothing else.

    Args:
        at_edge: which parameters are there.
        slopes: the gradients of the quantities at θ.
        slopes_inside: those with the parameters at an edge moved away from it, where their
            influence does not vanish.
    """
    others = np.any(slopes[:, ~at_edge] != 0, axis=1)
    return np.any(slopes_inside[:, at_edge] != 0, axis=1) & ~others


def inside(
    theta: Float[Array, "parameter"], at_edge: Bool[np.ndarray, "parameter"]
) -> Float[Array, "parameter"]:
    """θ with what is at an edge moved to the middle of its domain."""
    return theta.at[np.flatnonzero(at_edge)].set(0.0)
