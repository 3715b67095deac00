"""Tests of a model on data: one-step-ahead residuals, and coverage of hidden points."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import chdtrc, gammaln, ndtr, ndtri

import retrodict as rd

NUM_LAGS = 10
"""The number of autocorrelations tested together."""

TINY = 1e-12
"""The distance of levels from zero and one, whose quantiles are infinite."""

MIN_EFFECTIVE = 0.02
"""The median effective share of particles below which a filter is not used."""

WIDE = 3.0
"""Rows whose law is this many times wider than the median depend on the prior, and are ignored."""

NUM_BINS = 10
"""The number of bins of the chi-square test of levels."""


class Test(NamedTuple):
    """A test of one column, whose statistic has a chi-square law under the model.

    Attributes:
        name: the tested property.
        p_value: the probability of a larger statistic; NaN if there are too few points.
        meaning: the interpretation of a small p-value.
    """

    name: str
    p_value: float
    meaning: str


def pit(
    key: Any,
    model: rd.StateSpaceModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    num_particles: int = 1000,
) -> np.ndarray:
    """Return the probability integral transform of each observation, given the rows before it.

    u_k = P(y < y_k | y_{0:k-1}) + V P(y = y_k | y_{0:k-1}), with V uniform, which breaks the ties
    of counts. Under the model these are independent and uniform on (0, 1). Probabilities are exact
    for linear-Gaussian models, and otherwise those of predicted particles.

    Under a diffuse prior the first levels are near 1/2 whatever the data. In linear-Gaussian
    models, rows whose predictive standard deviation exceeds `WIDE` times the median are therefore
    NaN. If the particle filter degenerates, all rows are NaN.

    Args:
        key: a typed key; linear-Gaussian models need none.
        model: the model.
        ys: one series, of shape `(time, obs)`.
        mask: true where an entry was observed.
        inputs: inputs, of shape `(time, input)`, if the model takes them.
        num_particles: the number of particles.

    Returns:
        Levels of shape `(time, obs)`, NaN where nothing was observed.
    """
    model = rd.unwrap(model)
    observed = ~np.isnan(np.asarray(ys)) if mask is None else np.asarray(mask)
    us = None if inputs is None else jnp.asarray(inputs)
    if model.is_linear_gaussian:
        mean, std = one_step_ahead(model, ys, mask, us)
        level = ndtr((np.where(observed, ys, mean) - mean) / std)
        narrow = std <= WIDE * np.median(std, axis=0)
        return np.where(observed & narrow, np.clip(level, TINY, 1 - TINY), np.nan)
    filter_key, draw_key, tie_key = jax.random.split(key, 3)
    filtered = rd.particle_filter(
        filter_key, model, ys, num_particles, mask=mask, inputs=inputs, strict=False
    )
    rows = observed.any(axis=1)
    if not np.median(np.asarray(filtered.ess)[rows]) > MIN_EFFECTIVE * num_particles:
        return np.full(observed.shape, np.nan)
    draws = _draw_ahead(model, filtered.particles, filtered.log_weights, draw_key, us)
    uniform = np.asarray(jax.random.uniform(tie_key, observed.shape))
    level = randomised_rank(uniform, np.asarray(draws), np.asarray(ys))
    # Levels of zero and one have infinite quantiles: keep half a particle away from them.
    edge = 0.5 / num_particles
    return np.where(observed, np.clip(level, edge, 1 - edge), np.nan)


def randomised_rank(uniform: np.ndarray, draws: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the share of draws below each value; a random part of the draws equal to it counts.

    Args:
        uniform: uniform random numbers of the shape of `values`.
        draws: `(..., sample, obs)` with the draws on the last axis but one.
        values: `(..., obs)`.
    """
    below = np.mean(draws < values[..., None, :], axis=-2)
    equal = np.mean(draws == values[..., None, :], axis=-2)
    return below + uniform * equal


def has_independent_noise(model: rd.StateSpaceModel) -> bool:
    """Return whether a model without wrappers is linear Gaussian, with independent noise."""
    emission = model.emission
    linear = model.is_linear_gaussian and isinstance(emission, rd.LinearGaussianKernel)
    return linear and isinstance(emission.scale_tril, rd.Diagonal)


def smoothed_levels(model: rd.StateSpaceModel, ys: np.ndarray, **options: Any) -> np.ndarray:
    """Return P(y < y_k | observed entries) of each entry of a batch.

    Args:
        model: a model with `has_independent_noise`.
        ys: a batch of series, of shape `(batch, time, obs)`.
        **options: `mask`, `inputs` and `length`; only levels of entries that the mask hides mean
            anything.
    """
    mean, covariance = _smoothed_rows(model, ys, **options)
    variance = np.diagonal(np.asarray(covariance), axis1=-2, axis2=-1)
    return ndtr((ys - np.asarray(mean)) / np.sqrt(variance))


def one_step_ahead(
    model: rd.StateSpaceModel, ys: Any, mask: Any = None, us: jax.Array | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation of each entry given the rows before it.

    Args:
        model: a linear-Gaussian model without wrappers.
        ys: one series, of shape `(time, obs)`.
        mask: true where an entry was observed.
        us: inputs, of shape `(time, input)`, if the model takes them.
    """
    observed = ~np.isnan(np.asarray(ys)) if mask is None else np.asarray(mask)
    mean, covariance = _predictions(model, ys, True if observed.all() else observed, us)
    variance = np.diagonal(np.asarray(covariance), axis1=1, axis2=2)
    return np.asarray(mean), np.sqrt(np.maximum(variance, 0.0))


@eqx.filter_jit
def _predictions(
    model: rd.StateSpaceModel, ys: Any, mask: Any, us: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the moments of each row given the rows before it."""
    filtered = rd.kalman_smoother(model, ys, mask=mask, inputs=us).chain.laws
    later = None if us is None else us[1:]
    before = filtered.mean[:-1], filtered.covariance[:-1]
    mean, covariance = propagate_rows(model.transition, *before, later)
    mean = jnp.concatenate([model.prior.mean[None], mean])
    covariance = jnp.concatenate([model.prior.covariance[None], covariance])
    return propagate_rows(model.emission, mean, covariance, us)


@eqx.filter_jit
def _smoothed_rows(
    model: rd.StateSpaceModel, ys: Any, *, mask: Any, inputs: Any, length: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the moments of each row of a batch given the observed entries."""

    def one(ys: Any, mask: Any, us: Any, length: Any) -> tuple[jax.Array, jax.Array]:
        exact = rd.kalman_smoother(model, ys, mask=mask, inputs=us, length=length)
        laws = exact.chain.marginals()
        return propagate_rows(model.emission, laws.mean, laws.covariance, us)

    return jax.vmap(one)(ys, mask, inputs, length)


@eqx.filter_jit
def propagate_rows(
    kernel: Any, mean: jax.Array, covariance: jax.Array, us: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the moments of each row after a linear-Gaussian kernel."""
    return jax.vmap(kernel.propagate)(mean, covariance, us)


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
    z = [ndtri(levels) for levels in series]
    return [
        Test(
            "distribution of residuals",
            _test_uniform(np.concatenate(series)),
            "a small p: the noise has another law, such as one with heavier tails or skewness",
        ),
        Test(
            "autocorrelation of residuals",
            _test_uncorrelated(z),
            "a small p: the model lacks dependence on the past, such as a season or more lags",
        ),
        Test(
            "autocorrelation of squared residuals",
            _test_uncorrelated([each**2 for each in z]),
            "a small p: the noise variance changes over time, but that of the model does not",
        ),
    ]


def _test_uniform(levels: np.ndarray) -> float:
    """Return the p-value of Pearson's test, with bins of equal probability."""
    observed = levels[~np.isnan(levels)]
    if observed.size < 5 * NUM_BINS:
        return np.nan
    counts = np.histogram(observed, NUM_BINS, (0.0, 1.0))[0]
    expected = observed.size / NUM_BINS
    return float(chdtrc(NUM_BINS - 1, np.sum((counts - expected) ** 2) / expected))


def _test_uncorrelated(series: list[np.ndarray]) -> float:
    """Return the p-value of Q = Σ_k n_k ρ_k², with ρ_k over the n_k pairs that are k rows apart."""
    series = [each - np.mean(each[~np.isnan(each)]) for each in series if not np.isnan(each).all()]
    every = np.concatenate([*series, []])
    num_observed = np.sum(~np.isnan(every))
    variance = np.nanmean(every**2) if num_observed >= 5 * NUM_LAGS else 0.0
    if not variance > 0:  # too few rows, or a constant series without noise
        return np.nan
    total = 0.0
    for lag in range(1, NUM_LAGS + 1):
        products = np.concatenate([each[lag:] * each[:-lag] for each in series])
        pairs = products[~np.isnan(products)]
        total += pairs.size * (np.sum(pairs) / max(1, pairs.size) / variance) ** 2
    return float(chdtrc(NUM_LAGS, total))


class Coverage(NamedTuple):
    """The coverage of intervals for entries that were hidden from the smoother.

    Attributes:
        inside: the number of hidden entries inside it.
        hidden: the number of hidden entries.
        p_value: the p-value of the two-sided binomial test.
    """

    inside: int
    hidden: int
    p_value: float


def hide(random: np.random.Generator, mask: np.ndarray, share: float, fewest: int) -> np.ndarray:
    """Choose observed entries to hide: a random share of them, then others if needed.

    Args:
        random: the generator of random numbers.
        mask: true where an entry was observed.
        share: the share of the entries hidden at a time.
        fewest: the number of entries to hide in all.

    Returns:
        The hidden entries of each time, of shape `(times, *mask.shape)`. No entry is hidden twice,
        and all are hidden once if there are too few.
    """
    uniform = random.random(mask.shape)
    parts = [
        mask & (uniform >= i * share) & (uniform < (i + 1) * share) for i in range(int(1 / share))
    ]
    enough = np.cumsum([part.sum() for part in parts]) >= fewest
    return np.stack(parts[: int(np.argmax(enough)) + 1] if enough.any() else parts)


def coverage(ranks: np.ndarray, level: float = 0.9) -> Coverage:
    """Compute the coverage of central intervals from the levels of hidden entries.

    Args:
        ranks: levels in (0, 1), with ties broken at random as in `pit`.
        level: the probability of the interval.
    """
    inside = int(np.sum(np.abs(ranks - 0.5) < level / 2))
    return Coverage(inside, ranks.size, _test_binomial(inside, ranks.size, level))


def _test_binomial(inside: int, count: int, level: float) -> float:
    """Return the probability of all outcomes that are at most as likely as the observed one."""
    outcomes = np.arange(count + 1)
    log_ways = gammaln(count + 1) - gammaln(outcomes + 1) - gammaln(count - outcomes + 1)
    logs = log_ways + outcomes * np.log(level) + (count - outcomes) * np.log1p(-level)
    rounding = 1e-7  # of outcomes that are equally likely
    return min(1.0, float(np.sum(np.exp(logs[logs <= logs[inside] + rounding]))))
