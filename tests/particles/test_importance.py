"""Importance weights of paths: Pareto smoothing, the smoother, and the bound.

Keys are fixed. A Monte Carlo average may be off by 4.5 standard errors, which happens to one
average in 150,000.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from backward_chains import shifted_chain
from linear_models import random_mask, random_model
from nonlinear_models import UniformLaw

import retrodict as rd
from retrodict._expectations import Estimate
from retrodict.particles import ImportancePosterior
from retrodict.particles.pareto import pareto_shape, pareto_smoothed

UNTYPED = cast(Any, rd)
"""The library as it is called by those who do not read types."""

N = 6
MODEL = random_model(np.random.default_rng(3), 2, 2)
YS = MODEL.simulate(jax.random.key(4), N)[1]
EXACT = rd.kalman_smoother(MODEL, YS)
WRONG = shifted_chain(EXACT.chain, 0.1, 1.3)


# --- Pareto smoothing -----------------------------------------------------------------------------


def slow_smoothing(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Smoothed weights by the algorithm of Vehtari et al. (2024), one weight after another."""
    weights = np.exp(log_weights - log_weights.max())
    size = int(np.ceil(min(len(weights) / 5, 3 * np.sqrt(len(weights)))))
    order = np.argsort(weights)
    threshold = weights[order[-size - 1]]
    excess = [weights[i] - threshold for i in order[-size:]]
    # Zhang and Stephens (2009): the posterior mean of b = k/σ under their prior, on a grid.
    points = 30 + int(np.sqrt(size))
    grid, heights = [], []
    for j in range(1, points + 1):
        b = (1 - np.sqrt(points / (j - 0.5))) / (3 * excess[int(size / 4 + 0.5) - 1])
        b += 1 / excess[-1]
        k = sum(math.log1p(-b * x) for x in excess) / size
        grid.append(b)
        heights.append(size * (math.log(-b / k) - k - 1))
    mean = float(np.average(grid, weights=scipy.special.softmax(heights)))
    k = sum(math.log1p(-mean * x) for x in excess) / size
    scale = -k / mean
    k = k * size / (size + 10) + 0.5 * 10 / (size + 10)
    for rank, i in enumerate(order[-size:]):
        quantile = scipy.stats.genpareto.ppf((rank + 0.5) / size, k, scale=scale)
        weights[i] = min(threshold + quantile, 1.0)
    return np.log(weights / weights.sum()), k


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("count", [30, 1000])
def test_pareto_smoothing_equals_published_algorithm(spread: float, count: int):
    logs = spread * np.random.default_rng(count).normal(size=count) - 700.0
    weights, shape = pareto_smoothed(logs)
    expected, expected_shape = slow_smoothing(logs)
    assert shape == pytest.approx(expected_shape, rel=1e-9) and shape == pareto_shape(logs)
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-9)


def test_pareto_smoothing_keeps_order_and_lowers_the_largest_weight():
    logs = 2.0 * np.random.default_rng(0).standard_t(3, size=2000)
    weights, _ = pareto_smoothed(logs)
    order = np.argsort(logs)
    assert np.all(np.diff(weights[order]) >= -1e-12)
    assert np.exp(weights).sum() == pytest.approx(1)
    smaller = order[: -math.ceil(3 * math.sqrt(2000))]
    # Below the tail nothing but the normalisation changes.
    assert np.ptp(weights[smaller] - logs[smaller]) < 1e-12
    assert np.all(weights - weights[smaller[0]] <= logs.max() - logs[smaller[0]] + 1e-12)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_weights_without_a_tail_are_unchanged(kind: Any):
    weights, shape = pareto_smoothed(np.full(100, -1234.5, kind))
    assert shape == -math.inf
    np.testing.assert_allclose(weights, -np.log(100))


def test_single_finite_weight_is_unchanged():
    logs = np.append(np.full(99, -np.inf), 3.0)
    weights, shape = pareto_smoothed(logs)
    assert shape == math.inf
    np.testing.assert_array_equal(weights, np.append(np.full(99, -np.inf), 0.0))


@pytest.mark.parametrize("excluded", [1, 100, 900])
def test_paths_outside_model_support_have_zero_weight(excluded: int):
    # Zero weights, and weights that are next to nothing, have the same shape in both functions.
    logs = np.random.default_rng(1).normal(size=1000)
    logs[:excluded] = -np.inf
    tiny = np.where(np.isfinite(logs), logs, -600.0)
    weights, shape = pareto_smoothed(logs)
    assert shape == pareto_shape(logs) == pytest.approx(pareto_smoothed(tiny)[1], rel=1e-9)
    np.testing.assert_array_equal(weights[:excluded], -np.inf)
    np.testing.assert_allclose(np.exp(weights), np.exp(pareto_smoothed(tiny)[0]), atol=1e-12)


@pytest.mark.parametrize("bad", [[0.0, np.nan], [0.0, np.inf], [-np.inf, -np.inf]])
def test_degenerate_weights_have_infinite_pareto_shape(bad: list[float]):
    assert pareto_shape(np.array(bad * 50)) == math.inf


def test_pareto_smoothing_lowers_the_error_of_a_mean():
    # Weights with tails of shape ½, of which the mean of a bounded function is known to be ½.
    rng = np.random.default_rng(0)
    raw, smooth = [], []
    for _ in range(300):
        logs = rng.exponential(size=200) * 0.5 / 0.9
        values = rng.random(200)
        raw.append(np.average(values, weights=np.exp(logs)) - 0.5)
        smooth.append(np.average(values, weights=np.exp(pareto_smoothed(logs)[0])) - 0.5)
    assert np.mean(np.square(smooth)) < np.mean(np.square(raw))


# --- the smoother ---------------------------------------------------------------------------------


def test_paths_of_the_exact_posterior_have_equal_weights(key: jax.Array):
    posterior = rd.importance_smoother(key, MODEL, EXACT.chain, YS, 200)
    assert posterior.messages == () and float(posterior.k_hat) == -math.inf
    np.testing.assert_allclose(posterior.log_weights, -np.log(200), rtol=0, atol=1e-9)
    assert float(posterior.ess) == pytest.approx(200)
    for value in (posterior.log_evidence, posterior.elbo):
        assert float(value) == pytest.approx(float(EXACT.log_evidence), abs=1e-9)
    assert float(posterior.log_evidence_standard_error) < 1e-9
    assert float(posterior.elbo_standard_error) < 1e-9
    np.testing.assert_allclose(posterior.mean, posterior.samples.mean(0), atol=1e-9)
    np.testing.assert_allclose(
        posterior.quantile(0.503),
        np.quantile(posterior.samples, 0.503, axis=0, method="inverted_cdf"),
    )


@pytest.fixture(scope="module", params=[True, False], ids=["smoothed", "raw"])
def corrected(request: pytest.FixtureRequest) -> ImportancePosterior:
    return rd.importance_smoother(jax.random.key(1), MODEL, WRONG, YS, 20_000, smooth=request.param)


def test_importance_weights_correct_a_wrong_chain(corrected: ImportancePosterior):
    laws = EXACT.chain.marginals()
    assert -1 < float(corrected.k_hat) < 0.7 and corrected.messages == ()
    value, error = corrected.expectation(rd.StateSum())
    assert np.all(np.abs(value - laws.mean.sum(0)) < 4.5 * error)
    # The chain itself is off by many of these standard errors.
    assert np.any(np.abs(WRONG.marginals().mean.sum(0) - laws.mean.sum(0)) > 20 * error)
    moments, errors = corrected.expectation(rd.SecondMoments())
    exact = rd.expectation(EXACT.chain, rd.SecondMoments())
    assert np.all(np.abs(moments.within - exact.within) < 4.5 * errors.within)
    assert np.all(np.abs(moments.between - exact.between) < 4.5 * errors.between)
    np.testing.assert_allclose(corrected.mean, laws.mean, atol=0.05)
    np.testing.assert_allclose(corrected.covariance, laws.covariance, atol=0.08)
    assert 0 < float(corrected.ess) < 20_000


def test_evidence_and_elbo_of_wrong_chain_are_unbiased(corrected: ImportancePosterior):
    # The exponential of the estimate is unbiased, and 20,000 weights make it nearly normal.
    error = float(corrected.log_evidence_standard_error)
    ratio = math.exp(float(corrected.log_evidence - EXACT.log_evidence))
    assert abs(ratio - 1) < 4.5 * error < 0.2
    gap = corrected.elbo - rd.elbo(MODEL, WRONG, YS)
    assert abs(float(gap)) < 4.5 * float(corrected.elbo_standard_error)


def test_importance_expectation_passes_functional_data(corrected: ImportancePosterior):
    functional = rd.AdditiveFunctional(lambda before, x, data: data * x, lambda x, data: data * x)
    data = jnp.zeros((N, 1)).at[2].set(3.0)
    value, _ = corrected.expectation(functional, data)
    np.testing.assert_allclose(value, 3 * corrected.mean[2], rtol=1e-9)
    observed, _ = corrected.expectation(rd.LogJoint(MODEL))
    assert np.isfinite(observed)


def test_heavy_tailed_weights_are_reported(key: jax.Array):
    thin = shifted_chain(EXACT.chain, 0.0, 0.5)
    posterior = rd.importance_smoother(key, MODEL, thin, YS, 2000)
    (message,) = posterior.messages
    assert float(posterior.k_hat) > 0.7 and "unreliable" in message and "guided_smoother" in message


@pytest.mark.parametrize("count", [20, 21])
def test_too_few_paths_are_reported(key: jax.Array, count: int):
    posterior = rd.importance_smoother(key, MODEL, WRONG, YS, count)
    named = [message for message in posterior.messages if "at least 21 paths" in message]
    assert (float(posterior.k_hat) == math.inf) == (len(named) == 1) == (count == 20)


@pytest.mark.slow
def test_weights_with_inputs_masks_and_padding_are_exact(key: jax.Array):
    rng = np.random.default_rng(5)
    model = random_model(rng, 2, 2, 1)
    inputs = rng.normal(size=(8, 1))
    ys = np.array(model.simulate(key, 8, inputs=inputs)[1])
    mask = random_mask(rng, 8, 2, 0.7)
    options = {"mask": mask, "inputs": inputs, "length": 5}
    exact = rd.kalman_smoother(model, ys, **options)
    posterior = rd.importance_smoother(key, model, exact.chain, ys, 50, **options)
    assert float(posterior.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-9)
    chain = shifted_chain(exact.chain)
    posterior = rd.importance_smoother(key, model, chain, ys, 50, **options)
    cut = {"mask": mask[:5], "inputs": inputs[:5]}
    short = eqx.tree_at(lambda q: q.length, chain.prefix(5), None)
    for path, weight in zip(posterior.samples[:2], posterior.raw_log_weights, strict=False):
        expected = model.log_joint(path[:5], ys[:5], **cut) - short.log_prob(path[:5])
        assert float(weight) == pytest.approx(float(expected), abs=1e-9)
    value, error = posterior.expectation(rd.StateSum())
    weights = np.exp(posterior.log_weights)
    sums = np.asarray(posterior.samples[:, :5].sum(1))
    np.testing.assert_allclose(value, weights @ sums, rtol=1e-9)
    np.testing.assert_allclose(
        error, np.sqrt(weights**2 @ (sums - np.asarray(value)) ** 2), rtol=1e-9
    )


@pytest.mark.slow
def test_importance_smoother_in_float32_stays_float32(x32: None, key: jax.Array):
    model = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), MODEL)
    ys = np.asarray(YS, np.float32)
    exact = rd.kalman_smoother(model, ys)
    posterior = rd.importance_smoother(key, model, exact.chain, ys, 100)
    assert posterior.samples.dtype == posterior.log_weights.dtype == jnp.float32
    assert float(posterior.k_hat) == -math.inf
    assert float(posterior.log_evidence) == pytest.approx(float(exact.log_evidence), rel=1e-5)
    wide = rd.importance_smoother(key, model, shifted_chain(exact.chain), ys, 100)
    assert wide.mean.dtype == jnp.float32 and np.isfinite(wide.mean).all()


# --- the bound ------------------------------------------------------------------------------------


def test_importance_bound_increases_from_elbo_to_evidence(key: jax.Array):
    chain = shifted_chain(EXACT.chain)
    values = [
        rd.particles.importance_weighted_bound(key, MODEL, chain, YS, count, num_replicates=300)
        for count in (1, 10, 100)
    ]
    elbo = float(rd.elbo(MODEL, chain, YS))
    assert abs(float(values[0].value) - elbo) < 4.5 * float(values[0].standard_error)
    for below, above in zip(values, values[1:], strict=False):
        noise = math.hypot(float(below.standard_error), float(above.standard_error))
        assert float(above.value - below.value) > 4.5 * noise
    assert float(values[-1].value) < float(EXACT.log_evidence)


@pytest.mark.slow
def test_importance_bound_of_exact_posterior_equals_log_evidence(key: jax.Array):
    def value(chain: rd.LinearGaussianChain) -> Estimate:
        return rd.particles.importance_weighted_bound(key, MODEL, chain, YS, 10, num_replicates=3)

    bound = jax.jit(value)(EXACT.chain)
    assert float(bound.value) == pytest.approx(float(EXACT.log_evidence), abs=1e-9)
    assert float(bound.standard_error) < 1e-9
    slopes = eqx.filter_grad(lambda chain: value(chain).value)(EXACT.chain)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
    assert np.isnan(
        rd.particles.importance_weighted_bound(
            key, MODEL, WRONG, YS, 10, num_replicates=1
        ).standard_error
    )


@pytest.mark.slow
def test_importance_bound_is_differentiable(key: jax.Array):
    def value(shift: Any) -> Any:
        return rd.particles.importance_weighted_bound(
            key, MODEL, shifted_chain(EXACT.chain, shift), YS, 20, num_replicates=2
        ).value

    slope = jax.grad(value)(0.2)
    assert float(slope) == pytest.approx(
        float((value(0.2 + 1e-5) - value(0.2 - 1e-5)) / 2e-5), rel=1e-6
    )


# --- misuse ---------------------------------------------------------------------------------------


def test_importance_smoother_refuses_tracing(key: jax.Array):
    with pytest.raises(TypeError, match="outside of jax.jit.*guided_smoother"):
        jax.jit(lambda ys: rd.importance_smoother(key, MODEL, EXACT.chain, ys, 10).mean)(YS)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("verb", ["importance_smoother", "importance_weighted_bound"])
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"chain": EXACT}, TypeError, r"expects a backward chain, got KalmanPosterior.*\.chain"),
        ({"model": "model"}, TypeError, "expects a StateSpaceModel, got str"),
        ({"ys": YS[:-1]}, ValueError, "as many rows as the chain, 6, got 5"),
        ({"length": 3}, ValueError, "the chain has 6 rows and no padding"),
        ({"count": 0}, ValueError, "must be at least 1, got 0"),
        ({"key": 0}, TypeError, "expects one typed key"),
        ({"model": random_model(np.random.default_rng(0), 1, 2)}, ValueError, "1 state dim"),
    ],
)
def test_importance_smoother_refuses_bad_arguments(
    verb: str, change: dict, kind: type[Exception], words: str
):
    defaults = {"key": jax.random.key(0), "model": MODEL, "chain": WRONG, "ys": YS, "count": 10}
    defaults |= change
    count = defaults.pop("count")
    arguments = [defaults.pop(name) for name in ("key", "model", "chain", "ys")]
    with pytest.raises(kind, match=words):
        getattr(UNTYPED.particles, verb)(*arguments, count, **defaults)


def broken(case: str) -> tuple[rd.StateSpaceModel, rd.LinearGaussianChain]:
    if case == "undefined":
        return MODEL, eqx.tree_at(lambda q: q.laws.mean, WRONG, WRONG.laws.mean * jnp.nan)
    emission: Callable = lambda x: UniformLaw(x + 1e6, 1.0)  # noqa: E731
    return eqx.tree_at(lambda m: m.emission, MODEL, rd.DistributionKernel(emission)), WRONG


@pytest.mark.parametrize(
    ("case", "words"),
    [("undefined", "10 of 10 paths are NaN"), ("impossible", "all 10 paths are impossible")],
)
def test_degenerate_weights_are_refused(key: jax.Array, case: str, words: str):
    model, chain = broken(case)
    with pytest.raises(FloatingPointError, match=words):
        rd.importance_smoother(key, model, chain, YS, 10)


@pytest.mark.usefixtures("untyped")
def test_importance_posterior_refuses_bad_arguments(key: jax.Array):
    posterior = rd.importance_smoother(key, MODEL, EXACT.chain, YS, 10)
    with pytest.raises(TypeError, match="expects a functional"):
        posterior.expectation(cast(Any, lambda x: x))
    with pytest.raises(ValueError, match="one row per time step, 6 rows"):
        posterior.expectation(rd.StateSum(), jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        posterior.quantile(1.5)
