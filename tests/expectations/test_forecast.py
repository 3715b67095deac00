"""Forecasts, replicates and imputations against exact smoothing and one joint Gaussian."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from backward_chains import OpaqueChain
from joint_gaussian import arrays_of, condition
from linear_models import random_mask, random_model
from nonlinear_models import count_model, hide_linearity

import retrodict as rd

N, AHEAD = 6, 4
KEY = jax.random.key(7)


class Case(NamedTuple):
    """A linear-Gaussian model, a series with missing entries, and inputs of past and future."""

    model: rd.StateSpaceModel
    ys: np.ndarray
    inputs: Any
    ahead: Any
    chain: rd.LinearGaussianChain


@functools.cache
def case(state: int = 2, obs: int = 3, num_inputs: int = 2) -> Case:
    rng = np.random.default_rng(1)
    model = random_model(rng, state, obs, num_inputs)
    inputs = rng.normal(size=(N + AHEAD, num_inputs)) if num_inputs else None
    past, ahead = (None, None) if inputs is None else (inputs[:N], inputs[N:])
    ys = np.array(model.simulate(jax.random.key(2), N, inputs=past)[1])
    ys[~random_mask(rng, N, obs, 0.7)] = np.nan
    return Case(model, ys, past, ahead, rd.kalman_smoother(model, ys, inputs=past).chain)


def smoothed_ahead(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """The laws of the coming states: smoothing of the series with empty rows appended."""
    longer = np.concatenate([c.ys, np.full((AHEAD, c.ys.shape[1]), np.nan)])
    inputs = None if c.inputs is None else np.concatenate([c.inputs, c.ahead])
    laws = rd.kalman_smoother(c.model, longer, inputs=inputs).chain.marginals()
    return np.asarray(laws.mean)[N:], np.asarray(laws.covariance)[N:]


def seen_ahead(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """The laws of the coming observations."""
    means, covariances = smoothed_ahead(c)
    inputs = None if c.inputs is None else np.concatenate([c.inputs, c.ahead])
    linear = arrays_of(c.model, N + AHEAD, inputs)
    design = linear.designs[N:]
    spread = design @ covariances @ np.swapaxes(design, 1, 2) + linear.errors[N:]
    return np.einsum("tod,td->to", design, means) + linear.shifts[N:], spread


@functools.cache
def exact() -> rd.Forecast:
    c = case()
    return rd.forecast(KEY, c.model, c.chain, AHEAD, inputs=c.ahead, num_samples=4000)


def test_forecast_moments_equal_smoothing_of_missing_rows():
    forecast, (mean, covariance), rows = exact(), smoothed_ahead(case()), seen_ahead(case())
    np.testing.assert_allclose(forecast.state_mean, mean, atol=1e-9)
    np.testing.assert_allclose(forecast.state_covariance, covariance, atol=1e-9)
    np.testing.assert_allclose(forecast.mean, rows[0], atol=1e-9)
    np.testing.assert_allclose(forecast.covariance, rows[1], atol=1e-9)
    for error in (
        forecast.mean_standard_error,
        forecast.covariance_standard_error,
        forecast.state_mean_standard_error,
        forecast.state_covariance_standard_error,
    ):
        assert not np.any(error)


def test_forecast_quantiles_of_gaussians_are_exact():
    forecast, levels = exact(), np.array([0.025, 0.5, 0.9])
    assert forecast.gaussian
    mean, covariance = seen_ahead(case())
    law = dist.Normal(mean, np.sqrt(np.diagonal(covariance, axis1=1, axis2=2)))
    expected = np.stack([law.icdf(level) for level in levels])
    np.testing.assert_allclose(forecast.quantile(levels), expected, atol=1e-9)
    np.testing.assert_allclose(forecast.quantile(0.5)[0], mean, atol=1e-9)


@pytest.mark.statistical
def test_forecast_draws_have_the_forecast_moments():
    # 20 means and 4 distances, each beyond 4.5 standard errors with probability 7e-6.
    forecast = exact()
    for draws, mean, covariance in (
        (forecast.states, forecast.state_mean, forecast.state_covariance),
        (forecast.observations, forecast.mean, forecast.covariance),
    ):
        count, dim = draws.shape[0], draws.shape[2]
        std = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2) / count)
        assert np.all(np.abs(np.mean(draws, axis=0) - mean) < 4.5 * std)
        shifts = np.asarray(draws - mean[None])
        squares = np.einsum("std,tde,ste->st", shifts, np.linalg.inv(covariance), shifts)
        # Squared distances are χ² with `dim` degrees of freedom: mean dim, variance 2 dim.
        assert np.all(np.abs(squares.mean(0) - dim) < 4.5 * np.sqrt(2 * dim / count))


@pytest.mark.statistical
def test_forecast_paths_have_lag_one_covariance():
    # The lag-one covariance of states is w P: a mean of 4000 products, 12 entries at 4.5 errors.
    forecast, c = exact(), case()
    shifts = np.asarray(forecast.states - forecast.state_mean[None])
    products = shifts[:, 1:, :, None] * shifts[:, :-1, None, :]
    expected = np.asarray(c.model.transition.weight) @ np.asarray(forecast.state_covariance[:-1])
    error = products.std(0) / np.sqrt(len(products))
    assert np.all(np.abs(products.mean(0) - expected) < 4.5 * error)


def test_forecast_starts_at_the_last_existing_row():
    c = case()
    padded = np.concatenate([c.ys, np.full((3, 3), 1e6)])
    inputs = np.concatenate([c.inputs, np.full((3, 2), 1e6)])
    chain = rd.kalman_smoother(c.model, padded, inputs=inputs, length=N).chain
    forecast = rd.forecast(KEY, c.model, chain, AHEAD, inputs=c.ahead, num_samples=4000)
    np.testing.assert_allclose(forecast.mean, exact().mean, atol=1e-9)
    np.testing.assert_allclose(forecast.observations, exact().observations, atol=1e-9)


def plain_case() -> Case:
    return case(2, 2, 0)


@pytest.mark.statistical
def test_sampled_moments_are_within_their_standard_errors():
    # 4 rows of 12 moments, each beyond 5 standard errors with probability 6e-7.
    c, (mean, covariance) = plain_case(), smoothed_ahead(plain_case())
    forecast = rd.forecast(KEY, hide_linearity(c.model), c.chain, AHEAD, num_samples=4000)
    rows = seen_ahead(c)
    for got, error, expected in (
        (forecast.state_mean, forecast.state_mean_standard_error, mean),
        (forecast.state_covariance, forecast.state_covariance_standard_error, covariance),
        (forecast.mean, forecast.mean_standard_error, rows[0]),
        (forecast.covariance, forecast.covariance_standard_error, rows[1]),
    ):
        assert np.all(error > 0)
        assert np.all(np.abs(got - expected) < 5 * error)
    assert not forecast.gaussian
    # A quantile of 4000 draws has a standard error of √(p(1-p)/4000)/density, 0.04 deviations here.
    std = np.sqrt(np.diagonal(rows[1], axis1=1, axis2=2))
    quantile = dist.Normal(rows[0], std).icdf(0.9)
    assert np.all(np.abs(forecast.quantile(0.9)[0] - quantile) < 5 * 0.03 * std)


@functools.cache
def counts() -> tuple[rd.StateSpaceModel, rd.LinearGaussianChain]:
    model = count_model(prior=0.3, weight=0.8, bias=1.0, noise=0.3)
    chain = rd.LinearGaussianChain.from_arrays(
        jnp.ones((2, 1)),
        0.3 * jnp.ones((2, 1, 1)),
        0.5 * jnp.ones((1, 1, 1)),
        jnp.zeros((1, 1)),
        0.2 * jnp.ones((1, 1, 1)),
    )
    return model, chain


@pytest.mark.statistical
def test_forecast_of_counts_draws_counts():
    # The rate exp(x) is log-normal: 3 means and 3 variances at 5 standard errors.
    model, chain = counts()
    forecast = rd.forecast(KEY, model, chain, 3, num_samples=4000)
    assert not np.any(forecast.state_mean_standard_error)
    m, p = np.asarray(forecast.state_mean)[:, 0], np.asarray(forecast.state_covariance)[:, 0, 0]
    rate = np.exp(m + p / 2)
    variance = rate + rate**2 * np.expm1(p)
    assert np.all(np.abs(forecast.mean[:, 0] - rate) < 5 * forecast.mean_standard_error[:, 0])
    error = forecast.covariance_standard_error[:, 0, 0]
    assert np.all(np.abs(forecast.covariance[:, 0, 0] - variance) < 5 * error)
    draws = np.asarray(forecast.observations)
    assert np.all(draws == np.round(draws)) and np.all(draws >= 0)
    assert np.all(np.abs(draws.mean(0)[:, 0] - rate) < 5 * np.sqrt(variance / 4000))


@pytest.mark.slow
def test_forecast_from_mixture_uses_its_moments():
    # Moments pass a linear kernel whatever the law: only its mean and covariance count.
    model = random_model(np.random.default_rng(3), 1, 1)
    family = rd.MixtureFamily(jax.random.key(0), 1, 1, num_components=2, hidden=4, width=4)
    chain = family.infer(np.ones((3, 1)))
    forecast = rd.forecast(KEY, model, chain, 1, num_samples=10)
    weight, noise = model.transition.weight, model.transition.scale_tril
    np.testing.assert_allclose(
        forecast.state_mean[0], weight @ chain.terminal.mean + model.transition.bias, rtol=1e-12
    )
    np.testing.assert_allclose(
        forecast.state_covariance[0],
        weight @ chain.terminal.covariance @ weight.T + noise @ noise.T,
        rtol=1e-12,
    )
    assert not forecast.gaussian


@pytest.mark.statistical
def test_forecast_accepts_any_chain():
    # 16 means at 5 standard errors.
    c = plain_case()
    forecast = rd.forecast(KEY, c.model, OpaqueChain(c.chain), AHEAD, num_samples=2000)
    mean, rows = smoothed_ahead(c)[0], seen_ahead(c)[0]
    assert np.all(np.abs(forecast.state_mean - mean) < 5 * forecast.state_mean_standard_error)
    assert np.all(np.abs(forecast.mean - rows) < 5 * forecast.mean_standard_error)


@pytest.mark.slow
def test_forecast_works_under_vmap():
    c = plain_case()
    chains = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), c.chain)
    run = jax.vmap(lambda chain: rd.forecast(KEY, c.model, chain, AHEAD, num_samples=5))
    forecasts = run(chains)
    np.testing.assert_allclose(forecasts.mean[1], seen_ahead(c)[0], atol=1e-9)
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        forecasts.quantile(0.5)
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        rd.forecast(KEY, c.model, chains, AHEAD)


def test_forecast_refuses_bad_arguments(untyped: None):
    c = case()
    posterior: Any = rd.kalman_smoother(c.model, c.ys, inputs=c.inputs)
    no_model: Any = c.chain
    with pytest.raises(ValueError, match="num_times must be at least 1"):
        rd.forecast(KEY, c.model, c.chain, 0, inputs=c.ahead)
    with pytest.raises(ValueError, match="inputs must be given, of shape"):
        rd.forecast(KEY, c.model, c.chain, AHEAD)
    with pytest.raises(ValueError, match="one row per time step, 2 rows"):
        rd.forecast(KEY, c.model, c.chain, 2, inputs=c.ahead)
    with pytest.raises(ValueError, match="state dimensions"):
        rd.forecast(KEY, random_model(np.random.default_rng(0), 1, 1), c.chain, AHEAD)
    with pytest.raises(TypeError, match="backward chain"):
        rd.forecast(KEY, c.model, posterior, AHEAD)
    with pytest.raises(TypeError, match="StateSpaceModel"):
        rd.predictive(KEY, no_model, c.chain, 3)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        exact().quantile([0.0, 0.5])
    with pytest.raises(ValueError, match="as many rows as the chain"):
        rd.impute(KEY, c.model, c.chain, c.ys[:-1], 3, inputs=c.inputs[:-1])


class JointRows(NamedTuple):
    """All observations as one Gaussian vector."""

    mean: np.ndarray
    covariance: np.ndarray


def all_rows(c: Case, observed: np.ndarray) -> JointRows:
    """The law of a replicate of the whole series, for paths given the entries of `given`."""
    linear = arrays_of(c.model, N, c.inputs)
    path = condition(linear, np.nan_to_num(c.ys), observed)
    m, d = linear.designs.shape[1:]
    design, error = np.zeros((N * m, N * d)), np.zeros((N * m, N * m))
    for k in range(N):
        design[k * m : (k + 1) * m, k * d : (k + 1) * d] = linear.designs[k]
        error[k * m : (k + 1) * m, k * m : (k + 1) * m] = linear.errors[k]
    return JointRows(
        design @ path.mean.ravel() + linear.shifts.ravel(),
        design @ path.covariance @ design.T + error,
    )


def agrees(draws: np.ndarray, law: JointRows) -> None:
    """Draws `(sample, entry)` of a Gaussian vector: every mean and covariance at 4.5 errors."""
    count = len(draws)
    variance = np.diagonal(law.covariance)
    assert np.all(np.abs(draws.mean(0) - law.mean) < 4.5 * np.sqrt(variance / count))
    shifts = draws - law.mean
    error = np.sqrt((np.outer(variance, variance) + law.covariance**2) / count)
    assert np.all(np.abs(shifts.T @ shifts / count - law.covariance) < 4.5 * error)


@pytest.mark.statistical
def test_replicates_have_the_posterior_predictive_law():
    # 18 means and 171 covariances: a false alarm with probability about 1e-3.
    c = case()
    replicates = rd.predictive(KEY, c.model, c.chain, 4000, inputs=c.inputs)
    agrees(np.asarray(replicates).reshape(4000, -1), all_rows(c, ~np.isnan(c.ys)))


@functools.cache
def imputed() -> np.ndarray:
    c = case()
    return np.asarray(rd.impute(KEY, c.model, c.chain, c.ys, 4000, inputs=c.inputs))


@pytest.mark.statistical
def test_imputed_entries_have_their_law_given_observed_entries():
    # Given all that was seen, its noise included: some ten means and their covariances, as above.
    c, observed = case(), ~np.isnan(case().ys).ravel()
    prior = all_rows(c, np.zeros((N, 3), bool))
    hidden = ~observed
    cross = prior.covariance[np.ix_(hidden, observed)]
    gain = np.linalg.solve(prior.covariance[np.ix_(observed, observed)], cross.T).T
    expected = JointRows(
        prior.mean[hidden] + gain @ (c.ys.ravel()[observed] - prior.mean[observed]),
        prior.covariance[np.ix_(hidden, hidden)] - gain @ cross.T,
    )
    rows = np.isnan(c.ys)
    assert rows.all(1).any() and (rows.any(1) & ~rows.all(1)).any()
    agrees(imputed().reshape(4000, -1)[:, hidden], expected)


def test_observed_entries_are_kept():
    observed = ~np.isnan(case().ys)
    expected = np.broadcast_to(case().ys[observed], (4000, observed.sum()))
    np.testing.assert_array_equal(imputed()[:, observed], expected)
    c = plain_case()
    full = np.where(np.isnan(c.ys), 0.5, c.ys)
    chain = rd.kalman_smoother(c.model, full).chain
    same = rd.impute(KEY, c.model, chain, full, 3)
    np.testing.assert_array_equal(same, np.broadcast_to(full, (3, *full.shape)))


def test_imputation_treats_mask_and_nan_alike():
    c = plain_case()
    hidden = np.where(np.isnan(c.ys), 1e3, c.ys)
    by_nan = rd.impute(KEY, c.model, c.chain, c.ys, 5)
    by_mask = rd.impute(KEY, c.model, c.chain, hidden, 5, mask=~np.isnan(c.ys))
    np.testing.assert_array_equal(by_nan, by_mask)


def test_rows_of_padding_hold_nan():
    c = plain_case()
    ys = np.concatenate([c.ys, np.full((2, 2), 7.0)])
    chain = rd.kalman_smoother(c.model, ys, length=N).chain
    filled = rd.impute(KEY, c.model, chain, ys, 3, length=N)
    replicates = rd.predictive(KEY, c.model, chain, 3)
    for series in (filled, replicates):
        assert np.all(np.isfinite(series[:, :N])) and np.all(np.isnan(series[:, N:]))


def test_missing_counts_are_counts():
    model, chain = counts()
    ys = np.array([[3.0], [np.nan]])
    filled = np.asarray(rd.impute(KEY, model, chain, ys, 200))
    assert np.all(filled[:, 0] == 3.0)
    assert np.all(filled[:, 1] == np.round(filled[:, 1])) and len(np.unique(filled[:, 1])) > 3


@pytest.mark.slow
def test_forecast_in_float32_stays_float32(x32: None):
    with jax.enable_x64(True):
        c, expected = plain_case(), seen_ahead(plain_case())[0]
    model, chain = jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.float32) if eqx.is_array(leaf) else leaf,
        (c.model, c.chain),
    )
    forecast = rd.forecast(jax.random.key(0), model, chain, AHEAD, num_samples=5)
    assert forecast.observations.dtype == forecast.mean.dtype == jnp.float32
    np.testing.assert_allclose(forecast.mean, expected, rtol=1e-4, atol=1e-4)
