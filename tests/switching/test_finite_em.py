"""Exact EM of hidden Markov models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd
from retrodict.switching import (
    Regimes,
    SwitchingModel,
    canonical_order,
    em,
    fit_evidence,
    log_evidence,
)

STICKY = Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]])


def gaussian_model(means=(-1.0, 2.0), regimes=STICKY, scale=None):
    scale = np.array([[1.0, 0.0], [0.5, 0.8]]) if scale is None else scale
    laws = [rd.Gaussian(jnp.array([mean, -mean]), scale) for mean in means]
    return SwitchingModel(regimes, emission=laws)


def lagged_model():
    kernels = [
        rd.LinearGaussianKernel([[0.9]], [0.5], [[0.5]], [[1.0]]),
        rd.LinearGaussianKernel([[-0.5]], [0.0], [[1.0]], [[-1.0]]),
    ]
    return SwitchingModel(STICKY, emission=kernels, num_lags=1)


def simulated(model, n=400, seed=0):
    us = jax.random.normal(jax.random.key(9), (n, 1)) if model.takes_input else None
    zs, _, ys = model.simulate(jax.random.key(seed), n, inputs=us)
    return zs, ys, us


def moments_by_hand(model, ys):
    chain = rd.switching.forward_backward(model, ys).chain
    law = chain.marginals()
    return np.asarray(law.probabilities), np.asarray(law.pairs), np.asarray(ys)


def test_one_iteration_is_the_weighted_mean_and_covariance():
    model = gaussian_model()
    _, ys, _ = simulated(model)
    weights, pairs, data = moments_by_hand(model, ys)
    new = em(jax.random.key(0), model, ys, num_iterations=1).model
    for j in range(2):
        mean = np.average(data, axis=0, weights=weights[:, j])
        covariance = np.cov(data.T, aweights=weights[:, j], ddof=0)
        np.testing.assert_allclose(rd.unwrap(new.emission[j]).mean, mean, rtol=1e-10)
        np.testing.assert_allclose(new.emission[j].covariance, covariance, rtol=1e-9)
    counts = pairs.sum(0)
    wanted = counts / counts.sum(1, keepdims=True)
    np.testing.assert_allclose(np.exp(new.regimes.log_transition()), wanted, rtol=1e-10)
    np.testing.assert_allclose(np.exp(new.regimes.log_initial()), weights[0], rtol=1e-8)


def test_one_iteration_of_lagged_emissions_is_a_weighted_regression():
    model = lagged_model()
    _, ys, us = simulated(model)
    law = rd.switching.forward_backward(model, ys, inputs=us).chain.marginals()
    new = em(jax.random.key(0), model, ys, inputs=us, num_iterations=1).model
    assert us is not None
    rows = np.stack([ys[:-1, 0], us[1:, 0], np.ones(len(ys) - 1)], axis=1)
    for j in range(2):
        roots = np.sqrt(np.asarray(law.probabilities)[1:, j])
        wanted = np.linalg.lstsq(roots[:, None] * rows, roots * ys[1:, 0], rcond=None)[0]
        kernel = rd.unwrap(new.emission[j])
        got = [kernel.weight[0, 0], kernel.input_weight[0, 0], kernel.bias[0]]
        np.testing.assert_allclose(got, wanted, rtol=1e-8)
    assert new.num_lags == 1


@pytest.mark.parametrize("name", ["gaussian", "lagged", "tied"])
def test_the_evidence_never_decreases(name):
    models = {
        "gaussian": gaussian_model,
        "lagged": lagged_model,
        "tied": lambda: rd.models.markov_switching(order=1, switching="mean,variance"),
    }
    model = models[name]()
    _, ys, us = simulated(model, 150)
    result = em(jax.random.key(0), model, ys + 0.3, inputs=us, num_iterations=15, tolerance=1e-9)
    assert np.all(np.diff(result.history) >= -1e-10)
    last = log_evidence(result.model, ys + 0.3, inputs=us)
    np.testing.assert_allclose(result.log_evidence, last, rtol=1e-10)
    np.testing.assert_allclose(result.history[-1] * 150, last, rtol=1e-10)


def test_newton_steps_reach_the_maximum_of_the_closed_form():
    """A frozen entry leaves no closed form, and is free to be where the closed form puts it."""
    model = gaussian_model()
    _, ys, _ = simulated(model, 200)
    closed = em(jax.random.key(0), model, ys, num_iterations=200, tolerance=1e-10)
    fixed = rd.unwrap(closed.model.emission[0]).mean
    laws = [rd.Gaussian(rd.Frozen(fixed), model.emission[0].scale_tril), model.emission[1]]
    start = SwitchingModel(STICKY, emission=laws)
    newton = em(jax.random.key(0), start, ys, num_iterations=200, tolerance=1e-10)
    np.testing.assert_allclose(newton.log_evidence, closed.log_evidence, atol=1e-4)
    np.testing.assert_array_equal(rd.unwrap(newton.model.emission[0]).mean, fixed)


def test_frozen_parts_stay():
    model = gaussian_model()
    _, ys, _ = simulated(model, 100)
    frozen = SwitchingModel(rd.Frozen(STICKY), emission=model.emission)
    new = em(jax.random.key(0), frozen, ys, num_iterations=2).model
    np.testing.assert_array_equal(
        rd.unwrap(new).regimes.transition_logits, STICKY.transition_logits
    )
    assert not np.allclose(rd.unwrap(new).emission[0].mean, model.emission[0].mean)


def test_em_and_gradients_find_the_same_maximum():
    model = gaussian_model()
    _, ys, _ = simulated(model)
    batch = jnp.stack([ys[:200], ys[200:]])
    mask = jax.random.bernoulli(jax.random.key(1), 0.9, batch.shape[:2])[..., None]
    mask = jnp.broadcast_to(mask, batch.shape)
    length = jnp.array([200, 150])
    options: Any = {"mask": mask, "length": length}
    by_em = em(jax.random.key(0), model, batch, num_iterations=300, tolerance=1e-10, **options)
    by_slope = fit_evidence(
        jax.random.key(0), model, batch, num_starts=1, progress=False, **options
    )
    np.testing.assert_allclose(by_em.log_evidence, by_slope.log_evidence, atol=1e-3)
    assert by_em.status == by_slope.status == "converged"
    for a, b in zip(by_em.model.emission, by_slope.model.emission, strict=True):
        np.testing.assert_allclose(rd.unwrap(a).mean, rd.unwrap(b).mean, atol=5e-3)


@pytest.mark.slow
def test_several_starts_keep_the_best_and_report_all():
    model = gaussian_model()
    _, ys, _ = simulated(model, 200)
    even = Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]])
    equal = gaussian_model(means=(0.0, 0.0), regimes=even, scale=3 * np.eye(2))
    result = em(jax.random.key(0), equal, ys, num_starts=3, num_iterations=60)
    assert result.start_values.shape == (3,)
    assert result.log_evidence == result.start_values.max()
    # Regimes that start equal stay equal; a start that is moved at random does not.
    assert result.start_values[1:].max() > result.start_values[0] + 50
    means = [law.mean[0] for law in canonical_order(result.model).emission]
    np.testing.assert_allclose(means, [-1.0, 2.0], atol=0.5)
    assert result.issues == ()


def test_reports_regimes_that_coincide_or_die():
    _, ys, _ = simulated(gaussian_model(), 100)
    equal = gaussian_model(
        means=(0.5, 0.5), regimes=Regimes.from_probabilities([0.5, 0.5], np.full((2, 2), 0.5))
    )
    result = em(jax.random.key(0), equal, ys, num_iterations=3)
    assert any("coincide" in issue for issue in result.issues)
    far = gaussian_model(means=(0.5, 1e3))
    result = em(jax.random.key(0), far, ys, num_iterations=3)
    assert any("regime 1 has" in issue for issue in result.issues)


def test_refuses_states_and_series_without_data():
    model = gaussian_model()
    with pytest.raises(ValueError, match="observed entries"):
        em(jax.random.key(0), model, jnp.full((5, 2), jnp.nan))


def test_reports_a_regime_that_shrinks_to_equal_rows():
    noise = jax.random.normal(jax.random.key(0), (80, 2))
    ys = noise.at[30:50].set(0.0)
    laws = [rd.Gaussian(jnp.zeros(2), scale * jnp.eye(2)) for scale in (1e-3, 1.0)]
    result = em(jax.random.key(0), SwitchingModel(STICKY, emission=laws), ys, num_iterations=5)
    assert any("regime 0 shrank" in issue for issue in result.issues)
