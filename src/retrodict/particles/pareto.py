"""The largest importance weights as draws of a generalised Pareto law.

Everything here is in double precision on the host, since weights span more than single precision
holds.
"""

import math
from typing import Any, NamedTuple

import numpy as np

K_HAT_GOOD = 0.7
"""Up to this Pareto shape, importance weights correct a posterior reliably (Vehtari et al.)."""

FEWEST = 5
"""How many weights a tail must have for a shape to be fitted to it."""

FEWEST_WEIGHTS = 5 * (FEWEST - 1) + 1
"""How many weights there must be for a fifth of them, rounded up, to make a tail."""

PRIOR_SIZE = 10.0
"""How many draws of a tail with shape ½ the shape is drawn towards."""


class _Tail(NamedTuple):
    """The largest weights, in units of the largest one.

    Attributes:
        threshold: the largest weight that is not in the tail.
        excess: what the weights of the tail are above it, in increasing order; those that are not
            above it are left out.
    """

    threshold: float
    excess: np.ndarray


def pareto_shape(log_weights: Any) -> float:
    """The shape k̂ of a generalised Pareto law fitted to the largest weights.

    The tail is the largest min(S/5, 3√S) of S weights; its shape is the weighted mean of Zhang and
    Stephens (2009) over a profile likelihood, drawn towards ½ as Vehtari et al. (2024) do. Weights
    without a tail, as of the exact posterior, give −∞. Weights of which hardly any but the largest
    is above zero give ∞, and so do fewer than 21 weights, and weights that are all zero or of which
    one is undefined. A path that the model excludes has log weight −∞: it is a draw of weight zero.
    """
    logs = np.asarray(log_weights)
    if np.any(np.isnan(logs) | (logs == np.inf)) or np.all(logs == -np.inf):
        return math.inf
    return pareto_smoothed(log_weights)[1]


def pareto_smoothed(log_weights: Any) -> tuple[np.ndarray, float]:
    """Normalised log weights with a smoothed tail, and its shape k̂.

    The weight of rank j of the M in the tail becomes the quantile (j − ½)/M of the generalised
    Pareto law that was fitted to them, which stands for its expected order statistic, and at most
    the largest raw weight (Vehtari et al. 2024). Weights without a tail, or with one that no law
    can be fitted to, stay as they are, and weights of zero are zero.

    Args:
        log_weights: of shape `(sample,)`; none may be NaN or +∞, and one must be finite.
    """
    logs = np.asarray(log_weights, np.float64)
    logs = logs - np.max(logs)
    tail = _tail(log_weights)
    k_hat = -math.inf
    if tail is not None and tail.excess.size < FEWEST:
        k_hat = math.inf
    elif tail is not None:
        k_hat, scale = _zhang_stephens(tail.excess)
        size = tail.excess.size
        # −log of the probability of a larger draw, by which quantiles do not cancel.
        rarity = -np.log1p(-(np.arange(size) + 0.5) / size)
        excess = scale * (rarity if k_hat == 0 else np.expm1(k_hat * rarity) / k_hat)
        # A stable order keeps ties where they are.
        largest = np.argsort(logs, kind="stable")[-size:]
        logs[largest] = np.log(np.minimum(tail.threshold + excess, 1.0))
    return logs - np.log(np.sum(np.exp(logs))), k_hat


def _tail(log_weights: Any) -> _Tail | None:
    """The tail of the weights; `None` if all of it is as large as the largest one."""
    ordered = np.sort(np.asarray(log_weights, np.float64))
    size = math.ceil(min(0.2 * ordered.size, 3 * math.sqrt(ordered.size)))
    # Against rounding: the log densities of a long path are large, and agree to a few digits less.
    magnitude = np.max(np.abs(ordered[np.isfinite(ordered)]))
    rounding = 1e3 * np.finfo(np.asarray(log_weights).dtype).eps * magnitude
    below = ordered[max(ordered.size - size - 1, 0)]
    if ordered[-1] - below <= rounding:
        return None
    threshold = np.exp(below - ordered[-1])
    excess = np.exp(ordered[-size:] - ordered[-1]) - threshold
    return _Tail(float(threshold), excess[excess > np.finfo(np.float64).tiny])


def _zhang_stephens(excess: np.ndarray) -> tuple[float, float]:
    """The shape, drawn towards ½, and the scale of a generalised Pareto law."""
    size = excess.size
    num_points = 30 + math.isqrt(size)
    quartile = excess[max(math.floor(size / 4 + 0.5), 1) - 1]
    steps = 1 - np.sqrt(num_points / (np.arange(1, num_points + 1) - 0.5))
    slopes = 1 / excess[-1] + steps / (3 * quartile)
    shapes = np.mean(np.log1p(-slopes[:, None] * excess[None, :]), axis=1)
    profile = size * (np.log(-slopes / shapes) - shapes - 1)
    weights = np.exp(profile - np.max(profile))
    slope = np.sum(slopes * weights) / np.sum(weights)
    shape = np.mean(np.log1p(-slope * excess))
    drawn = (size * shape + 0.5 * PRIOR_SIZE) / (size + PRIOR_SIZE)
    return float(drawn), float(-shape / slope)
