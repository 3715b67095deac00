"""Markov-switching autoregressions against statsmodels, with the series that it ships."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import statsmodels.api as sm
from statsmodels_series import statsmodels_series

import retrodict as rd
from retrodict.switching import (
    base_probabilities,
    canonical_order,
    em,
    forward_backward,
    log_evidence,
    markov_autoregression,
    match_regimes,
)

GNP = statsmodels_series("test_markov_autoregression", "rgnp")
RETURNS = statsmodels_series("test_markov_regression", "areturns")


def with_values(model, transition, levels=None, std=None, coefficients=None):
    """Return a model with the given parameters, as they stand in its equation."""
    emission = model.emission
    levels = emission.levels if levels is None else jnp.asarray(levels)
    coefficients = emission.coefficients if coefficients is None else jnp.asarray(coefficients)
    return eqx.tree_at(
        lambda m: (
            m.regimes.transition_logits,
            m.emission.levels,
            m.emission.coefficients,
            m.emission.std,
        ),
        model,
        (jnp.log(jnp.asarray(transition)), levels, coefficients, rd.Positive(std)),
    )


def transition_of(mod, parameters):
    return np.asarray(mod.regime_transition_matrix(parameters))[..., 0].T


def smoothed(model, ys):
    chain = forward_backward(model, ys[:, None]).chain
    return np.asarray(base_probabilities(model, chain.marginals().probabilities))


def test_hamiltons_model_of_gnp_has_the_likelihood_of_statsmodels():
    mod = sm.tsa.MarkovAutoregression(GNP, k_regimes=2, order=4, switching_ar=False)
    parameters = np.array([0.76, 0.1, -0.36, 1.16, 0.59, 0.01, -0.06, -0.25, -0.21])
    model = with_values(
        markov_autoregression(2, order=4),
        transition_of(mod, parameters),
        parameters[2:4],
        np.sqrt(parameters[4:5]),
        parameters[None, 5:],
    )
    np.testing.assert_allclose(
        log_evidence(model, GNP[:, None]), mod.loglike(parameters), rtol=1e-12
    )
    wanted = mod.smooth(parameters)
    np.testing.assert_allclose(
        smoothed(model, GNP)[4:], wanted.smoothed_marginal_probabilities, atol=1e-12
    )


def test_switching_coefficients_and_scales_in_the_mean_adjusted_form():
    mod = sm.tsa.MarkovAutoregression(
        GNP, k_regimes=3, order=1, switching_ar=True, switching_variance=True
    )
    transition = np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.05, 0.15, 0.8]])
    levels, variances, coefficients = [-0.5, 1.0, 2.0], [0.5, 1.0, 0.3], [0.3, -0.2, 0.1]
    parameters = np.concatenate([transition[:, :2].T.ravel(), levels, variances, coefficients])
    np.testing.assert_allclose(transition_of(mod, parameters), transition)
    model = with_values(
        markov_autoregression(3, order=1, switching_coefficients=True, switching_scale=True),
        transition,
        levels,
        np.sqrt(variances),
        np.array(coefficients)[:, None],
    )
    np.testing.assert_allclose(
        log_evidence(model, GNP[:, None]), mod.loglike(parameters), rtol=1e-12
    )


def test_intercepts_that_switch_with_coefficients_and_variances():
    mod = sm.tsa.MarkovRegression(
        RETURNS[1:], k_regimes=2, exog=RETURNS[:-1], switching_variance=True
    )
    parameters = np.array([0.75, 0.25, 0.7, -0.2, 0.03, 0.1, 0.5, 2.0])
    model = with_values(
        markov_autoregression(
            2, order=1, form="intercept", switching_coefficients=True, switching_scale=True
        ),
        transition_of(mod, parameters),
        parameters[2:4],
        np.sqrt(parameters[6:]),
        parameters[4:6, None],
    )
    np.testing.assert_allclose(
        log_evidence(model, RETURNS[:, None]), mod.loglike(parameters), rtol=1e-12
    )


def test_three_variances_without_a_mean():
    ys = RETURNS - RETURNS.mean()
    mod = sm.tsa.MarkovRegression(ys, k_regimes=3, trend="n", switching_variance=True)
    transition = np.array([[0.9, 0.05, 0.05], [0.1, 0.8, 0.1], [0.05, 0.15, 0.8]])
    variances = [0.5, 2.0, 10.0]
    parameters = np.concatenate([transition[:, :2].T.ravel(), variances])
    model = markov_autoregression(3, form="none", switching_scale=True)
    model = with_values(model, transition, std=np.sqrt(variances))
    np.testing.assert_allclose(
        log_evidence(model, ys[:, None]), mod.loglike(parameters), rtol=1e-12
    )
    wanted = mod.smooth(parameters).smoothed_marginal_probabilities
    np.testing.assert_allclose(smoothed(model, ys), wanted, atol=1e-12)


def test_starting_values_come_from_a_regression():
    model = rd.unwrap(markov_autoregression(2, order=2, form="intercept", ys=GNP))
    kernel = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), model.emission.parts)
    rows = np.stack([GNP[1:-1], GNP[:-2], np.ones(len(GNP) - 2)], axis=1)
    wanted = np.linalg.lstsq(rows, GNP[2:], rcond=None)[0]
    np.testing.assert_allclose(kernel.weight[0], wanted[:2], atol=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "none"}, "Nothing switches"),
        ({"form": "slope"}, "`form` must be"),
        ({"switching_coefficients": True}, "needs an `order`"),
        ({"ys": np.zeros((3, 2))}, r"ys must have shape"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_refuses_models_in_which_nothing_switches(options, message):
    with pytest.raises(ValueError, match=message):
        markov_autoregression(2, **options)


@pytest.mark.slow
def test_em_finds_hamiltons_maximum_from_at_least_eight_of_ten_starts():
    mod = sm.tsa.MarkovAutoregression(GNP, k_regimes=2, order=4, switching_ar=False)
    wanted: Any = mod.fit(disp=False)
    model = markov_autoregression(2, order=4, ys=GNP)
    result = em(
        jax.random.key(0), model, GNP[:, None], num_starts=10, num_iterations=500, tolerance=1e-11
    )
    best = max(wanted.llf, result.log_evidence)
    assert np.sum(result.start_values > best - 0.01) >= 8
    model = canonical_order(result.model)
    got = rd.unwrap(model.emission.levels), rd.unwrap(model.emission.coefficients)[0]
    np.testing.assert_allclose(got[0], wanted.params[2:4], rtol=0.01)
    np.testing.assert_allclose(got[1], wanted.params[5:], rtol=0.01)
    np.testing.assert_allclose(
        np.exp(model.regimes.base_transition()), transition_of(mod, wanted.params), rtol=0.01
    )
    np.testing.assert_allclose(
        smoothed(model, GNP)[4:], wanted.smoothed_marginal_probabilities, atol=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_em_finds_the_best_variances_from_at_least_eight_of_ten_starts(count):
    ys = RETURNS - RETURNS.mean()
    mod = sm.tsa.MarkovRegression(ys, k_regimes=count, trend="n", switching_variance=True)
    model = markov_autoregression(count, form="none", switching_scale=True, ys=ys)
    result = em(
        jax.random.key(0), model, ys[:, None], num_starts=10, num_iterations=600, tolerance=1e-10
    )
    assert np.sum(result.start_values > result.log_evidence - 0.01) >= 8
    model = canonical_order(result.model)
    transition = np.exp(model.regimes.base_transition())
    variances = np.asarray(rd.unwrap(model.emission.std)) ** 2
    # statsmodels from our maximum: its own starts reach a lower one with three regimes.
    start = np.concatenate([transition[:, :-1].T.ravel(), variances])
    wanted: Any = mod.fit(start_params=start, em_iter=0, disp=False)
    np.testing.assert_allclose(result.log_evidence, wanted.llf, atol=0.01)
    np.testing.assert_allclose(variances, wanted.params[-count:], rtol=0.01)
    np.testing.assert_allclose(
        smoothed(model, ys), wanted.smoothed_marginal_probabilities, atol=0.01
    )
    order = match_regimes(smoothed(model, ys), wanted.smoothed_marginal_probabilities)
    assert order.tolist() == list(range(count))
