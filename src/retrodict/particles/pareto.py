"""Fit a generalised Pareto law to the largest importance weights.

All computations are in double precision on the host, since weights exceed the range of single
precision.
"""

import math
from typing import Any

import numpy as np

K_HAT_GOOD = 0.7
"""Up to this Pareto shape, importance weights correct a posterior reliably (Vehtari et al.)."""

FEWEST = 5
"""The least number of weights in a tail to which a shape is fitted."""

MIN_WEIGHTS = 5 * (FEWEST - 1) + 1
"""The least number of weights of which a fifth, rounded up, makes a tail."""

PRIOR_SIZE = 10.0
"""The weight of the prior on the shape, as a number of draws from a tail with shape ½."""


def pareto_shape(log_weights: Any) -> float:
    """Return the shape k̂ of a generalised Pareto law fitted to the largest weights.

    The tail is the largest min(S/5, 3√S) of S weights. Its shape is the weighted mean of Zhang and
    Stephens (2009) over a profile likelihood, shrunk towards ½ as in Vehtari et al. (2024). Weights
    without a tail, as of the exact posterior, give −∞. The shape is ∞ for fewer than 21 weights, if
    few weights besides the largest are positive, if all are zero, and if one is undefined. A path
    that the model excludes has log weight −∞: it is a draw of weight zero.
    """
    logs = np.asarray(log_weights)
    if np.any(np.isnan(logs) | (logs == np.inf)) or np.all(logs == -np.inf):
        return math.inf
    return pareto_smoothed(log_weights)[1]


def pareto_smoothed(log_weights: Any) -> tuple[np.ndarray, float]:
    """Return normalised log weights with a smoothed tail, and its shape k̂.

    The weight of rank j of the M in the tail becomes the quantile (j − ½)/M of the fitted
    generalised Pareto law, which approximates its expected order statistic, and at most the largest
    raw weight (Vehtari et al. 2024). Weights without a tail, or with one too short to fit, are
    unchanged, and weights of zero stay zero.

    Args:
        log_weights: of shape `(sample,)`; none may be NaN or +∞, and one must be finite.
    """
    logs = np.asarray(log_weights, np.float64)
    logs = logs - np.max(logs)
    tail = _tail(log_weights)
    k_hat = -math.inf
    if tail is not None:
        threshold, excess = tail
        size, k_hat = excess.size, math.inf
        if size >= FEWEST:
            k_hat, scale = _zhang_stephens(excess)
            # The quantile of probability p is scale ((1 − p)^(−k̂) − 1) / k̂.
            reach = -np.log1p(-(np.arange(size) + 0.5) / size)
            quantiles = scale * (np.expm1(k_hat * reach) / k_hat if k_hat else reach)
            # A stable order keeps the order of ties.
            largest = np.argsort(logs, kind="stable")[-size:]
            logs[largest] = np.log(np.minimum(threshold + quantiles, 1.0))
    return logs - np.log(np.sum(np.exp(logs))), k_hat


def _tail(log_weights: Any) -> tuple[float, np.ndarray] | None:
    """Return the tail of the weights; `None` if all of it is as large as the largest one.

    Returns:
        The largest weight that is not in the tail, and the weights of the tail minus it, in
        increasing order and without zeros; both in units of the largest weight.
    """
    ordered = np.sort(np.asarray(log_weights, np.float64))
    size = math.ceil(min(0.2 * ordered.size, 3 * math.sqrt(ordered.size)))
    # The log densities of a long path are large, and their rounding errors grow with them.
    magnitude = np.max(np.abs(ordered[np.isfinite(ordered)]))
    rounding = 1e3 * np.finfo(np.asarray(log_weights).dtype).eps * magnitude
    below = ordered[max(ordered.size - size - 1, 0)]
    if ordered[-1] - below <= rounding:
        return None
    threshold = np.exp(below - ordered[-1])
    excess = np.exp(ordered[-size:] - ordered[-1]) - threshold
    return float(threshold), excess[excess > np.finfo(np.float64).tiny]


def _zhang_stephens(excess: np.ndarray) -> tuple[float, float]:
    """Return the shape, shrunk towards ½, and the scale of a generalised Pareto law."""
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
    shrunk = (size * shape + 0.5 * PRIOR_SIZE) / (size + PRIOR_SIZE)
    return float(shrunk), float(-shape / slope)
