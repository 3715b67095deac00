"""Tests of a model on data: one-step-ahead residuals, and coverage of hidden points."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr, ndtri
from jax.scipy.stats import chi2

import retrodict as rd
from retrodict.runs._exact import one_step_ahead

NUM_LAGS = 10
"""The number of autocorrelations tested together."""

TINY = 1e-12
"""The distance of levels from zero and one, whose quantiles are infinite."""

LEAST_EFFECTIVE = 0.02
"""The median effective share of particles below which a filter is not used."""

WIDE = 3.0
"""Rows whose law is this many times wider than the median depend on the prior, and are ignored."""

NUM_BINS = 10
"""The number of bins of the chi-square test of levels."""


class Test(NamedTuple):
    """A statistic with a chi-square law under the model, and its p-value.

    Attributes:
        name: the tested property.
        statistic: its value.
        p_value: the probability of a larger value; NaN if there are too few points.
        meaning: the interpretation of a small p-value.
    """

    name: str
    statistic: float
    p_value: float
    meaning: str


def levels(
    key: Any,
    model: rd.StateSpaceModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    num_particles: int = 1000,
) -> np.ndarray:
    """Return the level of each observation in its law given the rows before it.

    u_k = P(y < y_k | y_{0:k-1}) + V P(y = y_k | y_{0:k-1}), with V uniform, which breaks the ties
    of counts. Under the model these are independent and uniform on (0, 1). Probabilities are exact
    for linear-Gaussian models, and otherwise those of predicted particles.

    The prior of a nonstationary state is wide, and the first rows are near its centre whatever they
    are: in linear-Gaussian models, where the width does not depend on the data, rows with a law far
    wider than the others have no level. If the particle filter degenerates, no row has a level.

    Args:
        key: a typed key.
        model: the model.
        ys: one series, of shape `(time, obs)`.
        mask: true where an entry was observed.
        inputs: inputs, of shape `(time, input)`, if the model takes them.
        num_particles: the number of particles.

    Returns:
        Levels of shape `(time, obs)`, NaN where nothing was observed.
    """
    filter_key, draw_key, tie_key = jax.random.split(key, 3)
    model = rd.unwrap(model)
    observed = ~np.isnan(np.asarray(ys)) if mask is None else np.asarray(mask)
    if model.is_linear_gaussian:
        law = one_step_ahead(model, ys, mask=mask, inputs=inputs)
        level = np.asarray(ndtr((np.where(observed, ys, law.mean) - law.mean) / law.std))
        narrow = law.std <= WIDE * np.median(law.std, axis=0)
        return np.where(observed & narrow, np.clip(level, TINY, 1 - TINY), np.nan)
    filtered = rd.particle_filter(
        filter_key, model, ys, num_particles, mask=mask, inputs=inputs, strict=False
    )
    rows = observed.any(axis=1)
    if not np.median(np.asarray(filtered.ess)[rows]) > LEAST_EFFECTIVE * num_particles:
        return np.full(observed.shape, np.nan)
    us = None if inputs is None else jnp.asarray(inputs)
    draws = _draw_ahead(model, filtered.particles, filtered.log_weights, draw_key, us)
    ties = jax.random.uniform(tie_key, np.shape(ys))
    values = np.asarray(ys)[:, None]
    below = np.mean(np.asarray(draws) < values, axis=1)
    equal = np.mean(np.asarray(draws) == values, axis=1)
    # Levels of zero and one have infinite quantiles: keep half a particle away from them.
    edge = 0.5 / num_particles
    level = np.clip(below + np.asarray(ties) * equal, edge, 1 - edge)
    return np.where(observed, level, np.nan)


@eqx.filter_jit
def _draw_ahead(
    model: rd.StateSpaceModel, particles: Any, log_weights: Any, key: Any, us: Any
) -> jax.Array:
    """Draw each row given the rows before it, of shape `(time, particle, obs)`."""
    count = particles.shape[1]
    first_key, key = jax.random.split(key)
    first = jax.vmap(model.prior.sample)(jax.random.split(first_key, count))

    def ahead(key: Any, xs: Any, log_weights: Any, u: Any) -> jax.Array:
        pick_key, move_key = jax.random.split(key)
        # Systematic resampling: the copies of each particle are proportional to its weight.
        grid = (jnp.arange(count) + jax.random.uniform(pick_key)) / count
        shares = jnp.cumsum(jnp.exp(log_weights))
        picked = jnp.minimum(jnp.searchsorted(shares / shares[-1], grid), count - 1)
        keys = jax.random.split(move_key, count)
        return jax.vmap(lambda k, x: model.transition.sample(k, x, u=u))(keys, xs[picked])

    n = particles.shape[0]
    keys = jax.random.split(key, (2, n))
    later = None if us is None else us[1:]
    axes = (0, 0, 0, None if us is None else 0)
    moved = jax.vmap(ahead, axes)(keys[0, 1:], particles[:-1], log_weights[:-1], later)
    states = jnp.concatenate([first[None], moved])

    def observe(key: Any, xs: Any, u: Any) -> jax.Array:
        keys = jax.random.split(key, count)
        return jax.vmap(lambda k, x: model.emission.sample(k, x, u=u))(keys, xs)

    return jax.vmap(observe, (0, 0, None if us is None else 0))(keys[1], states, us)


def residual_tests(series: list[np.ndarray]) -> list[Test]:
    """Test the levels of one column in one or more series.

    Args:
        series: the levels of each series, NaN where nothing was observed.
    """
    z = [
        np.where(np.isnan(u), np.nan, np.asarray(ndtri(np.nan_to_num(u, nan=0.5)))) for u in series
    ]
    squared = [_centred(each**2 - 1) for each in z]
    return [
        _uniform(np.concatenate(series)),
        _uncorrelated(
            "autocorrelation of residuals",
            [_centred(each) for each in z],
            "a small p: the model lacks dependence on the past, such as a season or more lags",
        ),
        _uncorrelated(
            "autocorrelation of squared residuals",
            squared,
            "a small p: the noise variance changes over time, but that of the model does not",
        ),
    ]


def _centred(values: np.ndarray) -> np.ndarray:
    observed = ~np.isnan(values)
    return values - values[observed].mean() if observed.any() else values


def _uniform(values: np.ndarray) -> Test:
    """Apply Pearson's test to the levels in bins of equal probability."""
    observed = values[~np.isnan(values)]
    name = "distribution of residuals"
    meaning = "a small p: the noise has another law, such as one with heavier tails or skewness"
    if observed.size < 5 * NUM_BINS:
        return Test(name, np.nan, np.nan, meaning)
    counts = np.histogram(observed, NUM_BINS, (0.0, 1.0))[0]
    expected = observed.size / NUM_BINS
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    return _test(name, statistic, NUM_BINS - 1, meaning)


def _uncorrelated(name: str, series: list[np.ndarray], meaning: str) -> Test:
    """Test Q = Σ_k n_k ρ_k², with ρ_k over the n_k observed pairs that are k rows apart."""
    observed = np.concatenate([each[~np.isnan(each)] for each in series])
    if observed.size < 5 * NUM_LAGS:
        return Test(name, np.nan, np.nan, meaning)
    variance = float(np.mean(observed**2))
    if not variance > 0:  # a constant series, without noise
        return Test(name, np.nan, np.nan, meaning)
    total = 0.0
    for lag in range(1, NUM_LAGS + 1):
        products = np.concatenate([each[lag:] * each[:-lag] for each in series])
        pairs = products[~np.isnan(products)]
        if pairs.size:
            total += pairs.size * float(np.mean(pairs) / variance) ** 2
    return _test(name, total, NUM_LAGS, meaning)


def _test(name: str, statistic: float, degrees: int, meaning: str) -> Test:
    return Test(name, statistic, float(chi2.sf(statistic, degrees)), meaning)


class Coverage(NamedTuple):
    """The coverage of intervals for entries that were hidden from the smoother.

    Attributes:
        level: the probability of the interval.
        inside: the number of hidden entries inside it.
        hidden: the number of hidden entries.
        p_value: the p-value of the two-sided binomial test (normal approximation).
    """

    level: float
    inside: int
    hidden: int
    p_value: float


def hide(key: Any, mask: np.ndarray, share: float, fewest: int) -> np.ndarray:
    """Choose observed entries to hide: a random share of them, then others if needed.

    Args:
        key: a typed key.
        mask: true where an entry was observed.
        share: the share of the entries hidden at a time.
        fewest: the number of entries to hide in all.

    Returns:
        The hidden entries of each time, of shape `(times, *mask.shape)`. No entry is hidden twice,
        and all are hidden once if there are too few.
    """
    uniform = np.asarray(jax.random.uniform(key, mask.shape))
    parts = [
        mask & (uniform >= i * share) & (uniform < (i + 1) * share) for i in range(int(1 / share))
    ]
    enough = np.cumsum([part.sum() for part in parts]) >= fewest
    return np.stack(parts[: int(np.argmax(enough)) + 1] if enough.any() else parts)


def coverage(ranks: np.ndarray, level: float = 0.9) -> Coverage:
    """Compute the coverage of central intervals from the levels of hidden entries.

    Args:
        ranks: levels in (0, 1), with ties broken at random as in `levels`.
        level: the probability of the interval.
    """
    inside = int(np.sum(np.abs(ranks - 0.5) < level / 2))
    count = ranks.size
    spread = np.sqrt(count * level * (1 - level)) if count else np.nan
    z = (inside - count * level) / spread if count else np.nan
    return Coverage(level, inside, count, float(chi2.sf(z**2, 1)) if count else float("nan"))
