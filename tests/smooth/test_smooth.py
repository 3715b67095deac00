"""Smoothing without choosing: what is chosen, why, and what must be refused."""

import dataclasses
import importlib
from dataclasses import replace
from typing import Any

import bimodal_posterior
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from linear_models import linear_kernel, linear_model, linear_transition_model
from nonlinear_models import nonlinear_emission_model, nonlinear_kernel

import retrodict as rd
from retrodict._model import prepare_batch
from retrodict._smooth import check as checking
from retrodict._smooth.check import BatchCheck
from retrodict._smooth.simulate_like import simulate_batch
from retrodict._smooth.smooth import _is_as_good
from retrodict.bounds.reference import find_reference

# The package exports the function under the same name.
driver = importlib.import_module("retrodict._smooth.smooth")

N, QUICK = 30, {"num_steps": 3, "num_series": 8, "num_samples": 32, "progress": False}


def model_with(emission, weight=0.9, noise=0.4, driven=False):
    """A model that starts from its stationary law."""
    return linear_transition_model(
        emission,
        prior=noise / np.sqrt(1 - weight**2),
        weight=weight,
        noise=noise,
        input_weight=1.0 if driven else None,
    )


def bent(x):
    return x + 0.1 * jnp.sin(x)


LINEAR = model_with(linear_kernel(scale=0.3))
MILD = model_with(nonlinear_kernel(bent, 0.3))
SQUARE = model_with(nonlinear_kernel(jnp.square, 0.1), weight=0.95, noise=0.2)


def simulated(model, count=None, n=N, seed=2):
    if count is None:
        return model.simulate(jax.random.key(seed), n)[1]
    keys = jax.random.split(jax.random.key(seed), count)
    return jax.vmap(lambda key: model.simulate(key, n)[1])(keys)


def grid_moments(model, ys):
    oracle = rd.grid_smoother(model, ys, rd.Grid(jnp.array([-5.0]), jnp.array([5.0]), 600))
    return oracle.mean, oracle.covariance


def untrained(key, model, batch, **options):
    """What stands in for the training, which takes long to compile."""
    family = rd.MixtureFamily(key, 1, 1).prepare(model, batch.ys)
    return family, f"A family was not trained, with {options['num_steps']} steps"


@pytest.fixture(scope="module")
def squared():
    """A series with two explanations, smoothed by a family that was not trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "train_family", untrained)
        return rd.smooth(SQUARE, simulated(SQUARE), **QUICK)


# --- exact ----------------------------------------------------------------------------------------


def test_a_linear_gaussian_model_is_smoothed_exactly():
    ys = np.asarray(simulated(LINEAR)).copy()
    ys[5:9] = np.nan
    smoothed = rd.smooth(LINEAR, ys)
    expected = rd.kalman_smoother(LINEAR, ys).chain.marginals()
    np.testing.assert_allclose(smoothed.mean, expected.mean, atol=1e-10)
    np.testing.assert_allclose(smoothed.covariance, expected.covariance, atol=1e-10)
    assert (
        smoothed.method == "exact"
        and "linear and Gaussian" in smoothed.reason
        and smoothed.trustworthy
    )
    assert smoothed.family is None and smoothed.model is LINEAR
    assert not smoothed.mean_standard_error.any() and not smoothed.covariance_standard_error.any()
    assert smoothed.chain.num_times == N
    assert repr(smoothed) == f"Smoothed(mean of shape (30, 1), exact: {smoothed.reason})"


@pytest.mark.slow
def test_batch_uses_its_masks_inputs_and_lengths():
    model = model_with(linear_kernel(scale=0.3), driven=True)
    us = jnp.sin(jnp.arange(3.0 * N)).reshape(3, N, 1)
    keys = jax.random.split(jax.random.key(0), 3)
    ys = jax.vmap(lambda key, u: model.simulate(key, N, inputs=u)[1])(keys, us)
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, ys.shape)
    length = jnp.array([N, 10, 20])
    smoothed = rd.smooth(model, ys, mask=mask, inputs=us, length=length)
    for i in range(3):
        alone = rd.smooth(model, ys[i], mask=mask[i], inputs=us[i], length=length[i])
        np.testing.assert_allclose(smoothed.mean[i], alone.mean, atol=1e-10)
        np.testing.assert_allclose(smoothed.covariance[i], alone.covariance, atol=1e-10)


# --- linearised -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mild():
    return rd.smooth(MILD, simulated(MILD))


@pytest.mark.slow
def test_a_mildly_nonlinear_model_is_linearised(mild):
    assert mild.method == "linearised" and mild.family is None
    assert mild.trustworthy
    assert (
        "iterated smoother passes check_posterior: compared with a reference (grid)" in mild.reason
    )
    mean, covariance = grid_moments(MILD, simulated(MILD))
    # A twentieth of the posterior standard deviation.
    assert jnp.max(jnp.abs(mild.mean - mean)) < 0.05 * jnp.sqrt(jnp.min(covariance))
    np.testing.assert_allclose(mild.covariance, covariance, rtol=0.05)


@pytest.mark.parametrize(("most", "said"), [(2, True), (3, False)])
def test_the_reason_counts_the_series_that_were_checked(monkeypatch, most: int, said: bool):
    monkeypatch.setattr(checking, "MAX_CHECKED", most)
    ys = jnp.linspace(-0.5, 0.5, 12).reshape(3, 4, 1)
    reason = rd.smooth(MILD, ys, method="linearised").reason
    assert ("check_posterior, run on 2 of 3 series" in reason) == said, reason


@pytest.mark.slow
def test_smooth_is_deterministic(mild):
    again = rd.smooth(MILD, simulated(MILD), key=jax.random.key(0))
    assert again.reason == mild.reason
    np.testing.assert_array_equal(again.mean, mild.mean)


def sharp(error):
    """A sensor that sees x² with little noise, x near 3, and a prior that allows both signs."""
    model = nonlinear_emission_model(jnp.square, error, mean=1.0, prior=2.0, weight=1.0, noise=0.1)
    draws = np.random.default_rng(0).normal(size=(2, N))
    return model, (3.0 + 0.1 * np.cumsum(draws[0])) ** 2 + error * draws[1]


def negative_mass(model, ys, points):
    """P(x_k < 0 | y) for each k, by sums over a grid in numpy."""
    (mean, std), step = (float(each) for each in (model.prior.mean[0], model.prior.std[0])), 0.1
    error = float(model.emission.scale_tril.std[0])

    def normal(z, scale):
        return np.exp(-0.5 * (z / scale) ** 2)

    move = normal(points[None] - points[:, None], step)
    logs = [-0.5 * ((y - points**2) / error) ** 2 for y in ys]
    likelihoods = [np.exp(each - each.max()) for each in logs]
    forward = [normal(points - mean, std) * likelihoods[0]]
    for each in likelihoods[1:]:
        joint = (forward[-1] @ move) * each
        forward.append(joint / joint.sum())
    backward = [np.ones_like(points)]
    for each in reversed(likelihoods[1:]):
        earlier = move @ (each * backward[0])
        backward.insert(0, earlier / earlier.max())
    smoothed = np.array(forward) * np.array(backward)
    return smoothed[:, points < 0].sum(axis=1) / smoothed.sum(axis=1)


@pytest.mark.parametrize(
    "error",
    [0.3, pytest.param(0.1, marks=pytest.mark.slow), pytest.param(0.03, marks=pytest.mark.slow)],
)
def test_linearised_result_that_lost_a_mode_is_not_trustworthy(error):
    model, ys = sharp(error)
    ys = ys[:8] if error > 0.2 else ys
    exact = negative_mass(model, ys, np.linspace(-6.0, 6.0, 1501 if error > 0.2 else 4001))
    np.testing.assert_allclose(exact, 0.18, atol=0.02)
    smoothed = rd.smooth(model, ys[:, None], method="linearised")
    assert smoothed.method == "linearised" and not smoothed.trustworthy
    assert jnp.max(smoothed.covariance) < 0.1  # where the exact variance is above 4
    assert "does not pass check_posterior (mode loss" in smoothed.reason


@pytest.mark.slow
def test_lost_mode_is_detected_without_a_grid():
    """At an error of 0.01 the grid is too coarse, and a bootstrap filter degenerates."""
    model, ys = sharp(0.01)
    smoothed = rd.smooth(model, ys[:, None], method="linearised")
    assert not smoothed.trustworthy and "mode loss" in smoothed.reason
    assert "a reference (particles)" in smoothed.reason


def failed_reference(key, model, series):
    reference = find_reference(key, model, series)
    return dataclasses.replace(reference, problem="a smoother degenerates")


@pytest.mark.parametrize("method", ["linearised", pytest.param("auto", marks=pytest.mark.slow)])
def test_failed_reference_leaves_result_unchecked(monkeypatch, method):
    monkeypatch.setattr("retrodict.bounds.find_reference", failed_reference)
    monkeypatch.setattr(driver, "train_family", untrained)
    smoothed = rd.smooth(MILD, simulated(MILD), method=method, **QUICK)
    assert not smoothed.trustworthy
    assert "was not checked: a smoother degenerates." in smoothed.reason
    assert ("A family was not trained" in smoothed.reason) == (method == "auto")


def test_unchecked_result_is_not_trustworthy():
    smoothed = rd.smooth(MILD, simulated(MILD), method="linearised", check=False)
    assert not smoothed.trustworthy and "was not checked otherwise" in smoothed.reason
    assert repr(smoothed).startswith(
        "Smoothed(mean of shape (30, 1), linearised, not trustworthy: "
    )


@pytest.mark.slow
def test_forced_method_is_used_and_checked():
    smoothed = rd.smooth(SQUARE, simulated(SQUARE), method="linearised")
    assert smoothed.method == "linearised" and not smoothed.trustworthy
    assert "does not pass check_posterior (" in smoothed.reason


@pytest.mark.slow
def test_reference_survives_many_sharp_observations():
    # Twenty observations with little noise each: the weights of a bootstrap filter are on one
    # particle, and no affordable grid is fine enough.
    wide = rd.NonlinearGaussianKernel(
        lambda x: jnp.repeat(bent(x), 20), rd.Diagonal(jnp.full(20, 1e-3))
    )
    model = model_with(wide)
    smoothed = rd.smooth(model, simulated(model, n=8))
    assert smoothed.method == "linearised" and smoothed.trustworthy
    assert "a reference (particles)" in smoothed.reason


@pytest.mark.slow
def test_model_without_density_falls_back_to_linearised_status():
    stiff = replace(MILD, transition=linear_kernel(0.9, scale=0.0))
    smoothed = rd.smooth(stiff, simulated(stiff, 2))
    assert smoothed.method == "linearised" and smoothed.mean.shape == (2, N, 1)
    assert not smoothed.trustworthy
    assert "has status 'ok'" in smoothed.reason and "transition with a density" in smoothed.reason
    with pytest.raises(ValueError, match="transition with a density"):
        rd.smooth(stiff, simulated(stiff), method="amortised")


# --- amortised ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bimodal_posterior_trains_a_family(squared):
    assert squared.method == "amortised"
    assert "The iterated smoother does not pass check_posterior (" in squared.reason
    assert "A family was not trained, with 3 steps. It does not pass" in squared.reason
    assert squared.mean.shape == (N, 1) and squared.covariance.shape == (N, 1, 1)
    assert jnp.all(squared.mean_standard_error >= 0) and jnp.any(squared.mean_standard_error > 0)
    assert isinstance(squared.family, rd.AbstractSampledFamily)
    assert squared.chain.sample(jax.random.key(0), 3).shape == (3, N, 1)


@pytest.mark.slow
def test_trained_family_is_reused_without_training(squared):
    log = []
    options = {"num_samples": 32, "progress": lambda *at: log.append(at)}
    new = simulated(SQUARE, 2, seed=7)
    smoothed = rd.smooth(SQUARE, new, family=squared.family, **options)
    assert smoothed.method == "amortised" and smoothed.reason.startswith("The family was given.")
    assert not log and smoothed.mean.shape == (2, N, 1)
    chain = squared.family.infer(new[1])
    key = jax.random.fold_in(jax.random.split(jax.random.key(0))[1], 1)
    estimator = rd.BackwardSampling(32, noise="stratified", by_component=True)
    alone = rd.marginals(chain, estimator=estimator, key=key)
    np.testing.assert_allclose(smoothed.mean[1], alone.mean, atol=1e-10)


@pytest.mark.slow
def test_a_linear_gaussian_family_needs_no_draws():
    ys = simulated(MILD)
    family = rd.ConjugateFamily(jax.random.key(0), 1, 1, width=4).prepare(MILD, ys)
    smoothed = rd.smooth(MILD, ys, family=family)
    assert smoothed.method == "amortised" and not smoothed.mean_standard_error.any()


def test_broken_or_worse_family_is_rejected():
    """NaN compares as nothing: a broken family must not stand."""

    def graded(elbo, *objections):
        return BatchCheck(objections, elbo, "", None if objections else "not checked")

    assert _is_as_good(graded(-5.0), graded(-6.0))
    assert not _is_as_good(graded(-7.0), graded(-6.0))
    assert _is_as_good(graded(-7.0), graded(-6.0, "mode loss"))
    assert not _is_as_good(graded(-7.0, "mode loss"), graded(-6.0, "mode loss"))
    assert not _is_as_good(graded(float("nan")), graded(-6.0, "mode loss"))
    assert _is_as_good(BatchCheck((), -7.0, ""), graded(-6.0, "wrong law"))


@pytest.mark.slow
def test_training_series_match_lengths_gaps_and_inputs():
    model = model_with(nonlinear_kernel(jnp.square, 0.1), driven=True)
    us = jnp.arange(2.0 * 80).reshape(2, 80, 1)
    observed = np.ones((2, 80, 1), bool)
    observed[0, ::2] = False
    batch = prepare_batch(
        jnp.zeros((2, 80, 1)),
        mask=observed,
        inputs=us,
        length=jnp.array([80, 20]),
        takes_input=True,
    )
    simulated_batch = simulate_batch(jax.random.key(0), model, batch, 6, 64)
    assert simulated_batch.ys.shape == (6, 64, 1)
    assert simulated_batch.options["length"].tolist() == [64, 20, 64, 20, 64, 20]
    inputs, mask = (
        simulated_batch.options["inputs"][..., 0],
        simulated_batch.options["mask"][..., 0],
    )
    np.testing.assert_array_equal(mask[0::2], inputs[0::2] % 2 == 1)
    np.testing.assert_array_equal(inputs[1::2, :20], np.tile(np.arange(80.0, 100.0), (3, 1)))
    assert mask[1::2, :20].all() and not mask[1::2, 20:].any()


@pytest.mark.slow
def test_a_family_is_trained_with_gaps_inputs_and_lengths():
    model = model_with(nonlinear_kernel(jnp.square, 0.1), driven=True)
    us = 0.1 * jnp.sin(jnp.arange(2.0 * N)).reshape(2, N, 1)
    keys = jax.random.split(jax.random.key(0), 2)
    ys = np.array(jax.vmap(lambda key, u: model.simulate(key, N, inputs=u)[1])(keys, us))
    ys[0, 10:15] = np.nan
    smoothed = rd.smooth(model, ys, method="amortised", inputs=us, length=[N, 20], **QUICK)
    assert "Family was trained on 8 simulated series of 30 rows" in smoothed.reason
    assert smoothed.mean.shape == (2, N, 1) and jnp.all(jnp.isfinite(smoothed.mean))
    np.testing.assert_allclose(
        smoothed.mean[1, 20:], jnp.tile(smoothed.mean[1, 19], (10, 1)), atol=1e-10
    )


@pytest.mark.slow
def test_better_linearised_smoother_is_kept(monkeypatch):
    # Nothing is good enough for this check.
    monkeypatch.setattr("retrodict.bounds.check.MAX_DISTANCE", -1.0)
    monkeypatch.setattr(driver, "train_family", untrained)
    smoothed = rd.smooth(MILD, simulated(MILD), **QUICK)
    assert smoothed.method == "linearised" and "which is therefore kept" in smoothed.reason
    assert smoothed.family is not None


@pytest.mark.slow
def test_trained_family_covers_both_modes():
    ys = simulated(SQUARE)
    smoothed = rd.smooth(SQUARE, ys, num_steps=600, num_series=256, progress=False)
    assert smoothed.method == "amortised" and isinstance(smoothed.family, rd.MixtureFamily)
    mean, covariance = grid_moments(SQUARE, ys)
    assert jnp.max(jnp.abs(smoothed.mean - mean)) < 0.3 * jnp.sqrt(jnp.max(covariance))
    np.testing.assert_allclose(smoothed.covariance, covariance, rtol=0.25, atol=0.02)


# --- misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"method": "exact"}, TypeError, "linear-Gaussian kernels, got Gaussian, Linear"),
        ({"method": "best"}, ValueError, "`method` must be one of"),
        ({"family": 3}, TypeError, "expects a family, got int"),
        ({"key": 0}, TypeError, "one typed key"),
        ({"num_samples": 16}, ValueError, "32 or more, got 16"),
        ({"num_samples": 100}, ValueError, "a multiple of it, got 100"),
        ({"check": False}, ValueError, "check chooses the method"),
        ({"num_steps": 0}, ValueError, "num_steps must be at least 1"),
        ({"inputs": np.zeros((N, 1))}, ValueError, "takes no inputs"),
        ({"mask": np.ones(N, bool)}, ValueError, "mask must have the shape of ys"),
        ({"length": N + 1}, ValueError, "length must be between 1 and 30"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_smooth_refuses_bad_arguments(options, kind, message):
    with pytest.raises(kind, match=message):
        rd.smooth(MILD, np.zeros((N, 1)), **options)


@pytest.mark.usefixtures("untyped")
def test_smooth_refuses_bad_models_and_data():
    wrong: Any = 3
    with pytest.raises(TypeError, match="expects a StateSpaceModel, got int"):
        rd.smooth(wrong, np.zeros((N, 1)))
    with pytest.raises(ValueError, match=r"shape \(time, obs\) with at least one row"):
        rd.smooth(MILD, np.zeros(N))
    with pytest.raises(ValueError, match="must have 1 columns, got 2"):
        rd.smooth(MILD, np.zeros((N, 2)))
    family = rd.ConjugateFamily(jax.random.key(0), 1, 1, width=4)
    with pytest.raises(ValueError, match="method 'linearised' does not use a family"):
        rd.smooth(MILD, np.zeros((N, 1)), method="linearised", family=family)
    wrong = rd.smooth(LINEAR, np.zeros((N, 1)))
    with pytest.raises(TypeError, match="Pass its .family"):
        rd.smooth(LINEAR, np.zeros((N, 1)), family=wrong)


LEVELS = [0.05, 0.3, 0.95]


@pytest.fixture(scope="module")
def quantiles_of_two_modes() -> np.ndarray:
    smoothed = bimodal_posterior.smoothed()
    quantiles = smoothed.quantile(LEVELS)
    assert quantiles.shape == (3, *smoothed.mean.shape)
    # Draws are the same in every call.
    np.testing.assert_array_equal(smoothed.quantile(LEVELS), quantiles)
    return np.asarray(quantiles)


@pytest.mark.parametrize("level", LEVELS)
def test_quantiles_of_two_modes_are_those_of_draws(
    quantiles_of_two_modes: np.ndarray, level: float
):
    """Against a grid; a false alarm has a probability of 2e-9 per row."""
    exact, smoothed = bimodal_posterior.posterior(), bimodal_posterior.smoothed()
    expected = np.asarray(exact.quantile(level))[:, 0]
    near = bimodal_posterior.tolerance(exact, level, 1000)
    quantiles = quantiles_of_two_modes[LEVELS.index(level)]
    assert np.all(np.abs(quantiles[:, 0] - expected) < near)
    # A Gaussian interval is elsewhere: modes at ±3 have a standard deviation of 3.
    gaussian = smoothed.mean[:, 0] + 1.645 * np.sqrt(smoothed.covariance[:, 0, 0])
    assert np.all(np.abs(gaussian - np.asarray(exact.quantile(0.95))[:, 0]) > 1.5)


@pytest.mark.slow
def test_batch_quantiles_have_levels_as_first_axis():
    smoothed = bimodal_posterior.smoothed()
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), eqx.filter(smoothed, eqx.is_array))
    batch = eqx.combine(batch, smoothed)
    assert batch.quantile([0.3, 0.5]).shape == (2, 2, *smoothed.mean.shape)


def test_quantiles_of_a_linear_gaussian_posterior_are_exact():
    ys = simulated(LINEAR)
    smoothed = rd.smooth(LINEAR, ys)
    std = np.sqrt(np.asarray(smoothed.covariance)[:, 0, 0])
    expected = scipy.stats.norm.ppf(0.95, np.asarray(smoothed.mean)[:, 0], std)
    np.testing.assert_allclose(smoothed.quantile(0.95)[:, 0], expected, rtol=1e-6)
    assert smoothed.quantile([[0.1, 0.9]]).shape == (1, 2, N, 1)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, np.nan])
def test_quantile_refuses_non_probabilities(level: float):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        bimodal_posterior.smoothed().quantile(level)


def explosive(scale: float) -> rd.StateSpaceModel:
    """A double well, out of which paths that start far away are thrown to infinity."""
    return replace(
        linear_model(prior=scale),
        transition=nonlinear_kernel(lambda x: x + 0.2 * (x - x**3), 0.2),
    )


@pytest.mark.slow
def test_failed_simulation_keeps_linearised_result():
    ys = 1.0 + 0.5 * np.sin(np.arange(12.0))[:, None]
    smoothed = rd.smooth(explosive(50.0), ys, **QUICK)
    assert smoothed.method == "linearised"
    assert smoothed.trustworthy or "simulates series that are not finite" in smoothed.reason
    with pytest.raises(ValueError, match="simulates series that are not finite"):
        rd.smooth(explosive(50.0), ys, method="amortised", check=False, **QUICK)


def test_simulated_paths_that_are_not_finite_are_replaced():
    key, ys = jax.random.key(0), jnp.zeros((20, 1))
    plain = jax.vmap(lambda key: explosive(2.0).simulate(key, 20)[1])(jax.random.split(key, 64))
    assert not np.all(np.isfinite(plain))
    simulated = rd.simulate_like(key, explosive(2.0), ys, 64)
    assert simulated.ys.shape == (64, 20, 1) and np.all(np.isfinite(simulated.ys))
    with pytest.raises(ValueError, match="simulates series that are not finite"):
        rd.simulate_like(key, explosive(50.0), ys, 64)
