"""Forecasts, replicates and completed series of switching models."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd

switching = rd.switching
KEY = jax.random.key(0)
NUM = 4000

REGIMES = switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.3, 0.7]])
TRANSITION = np.array([[0.9, 0.1], [0.3, 0.7]])


def kernel(weight: float, bias: float, scale: float) -> rd.LinearGaussianKernel:
    return rd.LinearGaussianKernel(jnp.full((1, 1), weight), jnp.full(1, bias), scale * jnp.eye(1))


HIDDEN_MARKOV = switching.SwitchingModel(
    REGIMES, emission=[rd.Gaussian(jnp.full(1, m), s * jnp.eye(1)) for m, s in ((0.0, 1), (5.0, 2))]
)
LEVEL = switching.SwitchingModel(
    REGIMES,
    prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
    transition=[kernel(0.9, -0.2, 0.3), kernel(0.7, 0.5, 1.0)],
    emission=[kernel(1.0, 0.0, 0.5), kernel(1.0, 1.0, 0.2)],
)
LAGGED = switching.SwitchingModel(
    REGIMES, emission=[kernel(0.5, 0.0, 1.0), kernel(-0.5, 2.0, 0.5)], num_lags=1
)
YS = jnp.array([[0.3], [4.0], [0.1], [1.2], [0.4]])


def exact_ahead(law: np.ndarray, steps: int) -> np.ndarray:
    return np.stack([law @ np.linalg.matrix_power(TRANSITION, k + 1) for k in range(steps)])


def test_forecast_of_hidden_markov_model_is_exact():
    chain = switching.forward_backward(HIDDEN_MARKOV, YS).chain
    ahead = switching.forecast(KEY, HIDDEN_MARKOV, chain, 4, num_samples=NUM)
    expected = exact_ahead(np.asarray(chain.filtered[-1]), 4)
    np.testing.assert_allclose(ahead.probabilities, expected, atol=1e-12)
    means, variances = np.array([0.0, 5.0]), np.array([1.0, 4.0])
    mean = expected @ means
    variance = expected @ (variances + means**2) - mean**2
    np.testing.assert_allclose(ahead.mean[:, 0], mean, atol=1e-10)
    np.testing.assert_allclose(ahead.covariance[:, 0, 0], variance, atol=1e-9)
    assert not np.any(ahead.mean_standard_error)
    # A mean of NUM draws, at 5 standard errors: a false alarm in 4e5 seeds.
    drawn = np.asarray(ahead.observations.mean(axis=0)[:, 0])
    assert np.all(np.abs(drawn - mean) < 5 * np.sqrt(variance / NUM))
    shares = np.asarray(jnp.mean(ahead.regimes == 1, axis=0))
    error = np.sqrt(expected[:, 1] * expected[:, 0] / NUM)
    assert np.all(np.abs(shares - expected[:, 1]) < 5 * error)


def test_forecast_with_states_has_the_moments_of_the_mixture():
    """Moments of (regime, state) pairs are propagated exactly, one pair per component."""
    chain = switching.gpb2_smoother(LEVEL, YS).chain
    ahead = switching.forecast(KEY, LEVEL, chain, 3, num_samples=NUM)
    last = chain.terminal
    weight = np.exp(np.asarray(last.log_weights))
    first = weight * np.asarray(last.means)[:, 0]  # E[x; z], then E[x²; z]
    second = weight * (
        np.asarray(last.means)[:, 0] ** 2 + np.asarray(last.scale_trils)[:, 0, 0] ** 2
    )
    f, b, q = np.array([0.9, 0.7]), np.array([-0.2, 0.5]), np.array([0.09, 1.0])
    shift, noise = np.array([0.0, 1.0]), np.array([0.25, 0.04])
    for k in range(3):
        p, m, s = weight @ TRANSITION, first @ TRANSITION, second @ TRANSITION
        weight, first = p, f * m + b * p
        second = f**2 * s + 2 * f * b * m + (b**2 + q) * p
        np.testing.assert_allclose(ahead.probabilities[k], weight, atol=1e-12)
        mean = first.sum() + shift @ weight
        squares = second.sum() + 2 * shift @ first + shift**2 @ weight + noise @ weight
        for value, error, expected in (
            (ahead.state_mean[k, 0], ahead.state_mean_standard_error[k, 0], first.sum()),
            (ahead.mean[k, 0], ahead.mean_standard_error[k, 0], mean),
            (
                ahead.covariance[k, 0, 0],
                ahead.covariance_standard_error[k, 0, 0],
                squares - mean**2,
            ),
        ):
            # 5 standard errors, nine comparisons: a false alarm in 1.9e5 seeds.
            assert abs(float(value) - expected) < 5 * float(error)


def test_forecast_of_one_regime_equals_that_of_the_model_without():
    parts = {
        "prior": rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        "transition": kernel(0.9, 0.1, 0.3),
        "emission": kernel(1.0, 0.0, 0.5),
    }
    single = switching.SwitchingModel(
        switching.Regimes.from_probabilities([1.0], [[1.0]]),
        **{**parts, "transition": [parts["transition"]]},
    )
    plain = rd.StateSpaceModel(**parts)
    exact = rd.forecast(KEY, plain, rd.kalman_smoother(plain, YS).chain, 3)
    chain = switching.gpb2_smoother(single, YS).chain
    ahead = switching.forecast(KEY, single, chain, 3, num_samples=NUM)
    gap = np.abs(np.asarray(ahead.mean - exact.mean))
    assert np.all(gap < 5 * np.asarray(ahead.mean_standard_error))
    spread = np.abs(np.asarray(ahead.covariance - exact.covariance))
    assert np.all(spread < 5 * np.asarray(ahead.covariance_standard_error))


def test_first_row_ahead_of_lagged_model_follows_the_last_row():
    chain = switching.forward_backward(LAGGED, YS).chain
    ahead = switching.forecast(KEY, LAGGED, chain, 2, observed=YS, num_samples=NUM)
    weight = exact_ahead(np.asarray(chain.filtered[-1]), 1)[0]
    means = np.array([0.5 * 0.4, -0.5 * 0.4 + 2.0])
    # Only the regime before is sampled: 5 standard errors.
    error = 5 * float(ahead.mean_standard_error[0, 0])
    assert abs(float(ahead.mean[0, 0]) - weight @ means) < error
    with pytest.raises(ValueError, match="pass `observed`"):
        switching.forecast(KEY, LAGGED, chain, 2)


def test_forecast_starts_after_the_last_existing_row():
    """Padding changes nothing."""
    padded = jnp.concatenate([YS, jnp.full((2, 1), 9.0)])
    for model in (HIDDEN_MARKOV, LEVEL, LAGGED):
        smoother: Any = switching.forward_backward if model.is_finite else switching.gpb2_smoother
        whole = switching.forecast(KEY, model, smoother(model, YS).chain, 2, observed=YS)
        chain = smoother(model, padded, length=5).chain
        short = switching.forecast(KEY, model, chain, 2, observed=padded)
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(short), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-9)


def test_recurrent_regimes_average_over_states():
    regimes = switching.Regimes(jnp.zeros(2), jnp.zeros((2, 2)), jnp.array([[2.0], [-2.0]]))
    model = eqx.tree_at(lambda m: m.regimes, LEVEL, regimes, is_leaf=lambda x: x is LEVEL.regimes)
    chain = switching.gpb2_smoother(model, YS).chain
    ahead = switching.forecast(KEY, model, chain, 1, num_samples=NUM)
    last = chain.terminal
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    expected = 0.0
    for c in range(2):
        xs = float(last.means[c, 0]) + float(last.scale_trils[c, 0, 0]) * nodes
        share = 1 / (1 + np.exp(-4 * xs))
        expected += np.exp(float(last.log_weights[c])) * (weights @ share) / weights.sum()
    # Probabilities in [0, 1] have a deviation of at most ½: 5 standard errors.
    assert abs(float(ahead.probabilities[0, 0]) - expected) < 5 * 0.5 / np.sqrt(NUM)


@pytest.mark.parametrize("model", [HIDDEN_MARKOV, LEVEL], ids=["finite", "state"])
def test_completed_series_keep_what_was_observed(model: switching.SwitchingModel):
    mask = jnp.ones(YS.shape, bool).at[2].set(False)
    smoother: Any = switching.forward_backward if model.is_finite else switching.gpb2_smoother
    chain = smoother(model, YS, mask=mask).chain
    completed = switching.impute(KEY, model, chain, YS, NUM, mask=mask)
    kept = np.asarray(completed)[:, [0, 1, 3, 4]]
    np.testing.assert_array_equal(kept, np.broadcast_to(YS[jnp.array([0, 1, 3, 4])], kept.shape))
    replicates = switching.predictive(jax.random.key(1), model, chain, NUM)
    ours, theirs = np.asarray(completed[:, 2, 0]), np.asarray(replicates[:, 2, 0])
    error = np.sqrt((ours.var() + theirs.var()) / NUM)
    assert abs(ours.mean() - theirs.mean()) < 5 * error  # the same law: 5 standard errors


def test_missing_entries_follow_the_others_of_their_row():
    """Two columns with almost the same noise: one determines the other."""
    scale = jnp.array([[1.0, 0.0], [1.0, 1e-3]])
    model = switching.SwitchingModel(
        REGIMES, emission=[rd.Gaussian(jnp.zeros(2), scale) for _ in range(2)]
    )
    ys = jnp.array([[1.5, 0.0], [0.2, 0.2]])
    mask = jnp.array([[True, False], [True, True]])
    chain = switching.forward_backward(model, ys, mask=mask).chain
    completed = switching.impute(KEY, model, chain, ys, 50, mask=mask)
    np.testing.assert_allclose(completed[:, 0, 1], 1.5, atol=0.01)


def test_rows_that_lags_condition_on_are_the_observed_ones():
    chain = switching.forward_backward(LAGGED, YS).chain
    replicates = switching.predictive(KEY, LAGGED, chain, 3, observed=YS)
    np.testing.assert_array_equal(replicates[:, 0, 0], np.full(3, 0.3))
    assert np.all(np.asarray(replicates[:, 1:]) != np.asarray(YS)[None, 1:])


def test_rows_that_do_not_exist_are_missing():
    chain = switching.forward_backward(HIDDEN_MARKOV, YS, length=3).chain
    replicates = np.asarray(switching.predictive(KEY, HIDDEN_MARKOV, chain, 2))
    assert np.isnan(replicates[:, 3:]).all() and np.isfinite(replicates[:, :3]).all()


def test_quantiles_are_those_of_the_draws():
    chain = switching.forward_backward(HIDDEN_MARKOV, YS).chain
    ahead = switching.forecast(KEY, HIDDEN_MARKOV, chain, 2, num_samples=100)
    expected = np.quantile(np.asarray(ahead.observations), [0.1, 0.9], axis=0)
    np.testing.assert_allclose(ahead.quantile([0.1, 0.9]), expected)


def test_chains_of_other_models_are_refused():
    chain = switching.forward_backward(HIDDEN_MARKOV, YS).chain
    with pytest.raises(ValueError, match="pass the chain of this model"):
        switching.forecast(KEY, LEVEL, chain, 2)
