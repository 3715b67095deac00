"""Switching models: densities against explicit sums, simulation, and refused arguments."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from assertions import raises_with
from scipy.stats import multivariate_normal
from switching_models import hidden_markov, linear, probabilities, recurrent

import retrodict as rd

SwitchingModel = rd.switching.SwitchingModel
normal: Any = multivariate_normal


def explicit_log_joint(model, zs, xs, ys):
    """Return log p(z, x, y) as a sum over rows, with the densities of scipy."""

    def log_normal(kernel, x, value):
        scale = kernel.scale_tril
        scale = np.diag(scale.std) if isinstance(scale, rd.Diagonal) else np.array(scale)
        mean = np.array(kernel.weight) @ x + np.array(kernel.bias)
        return normal.logpdf(value, mean, scale @ scale.T)

    prior = model.prior[zs[0]]
    total = float(model.regimes.log_initial()[zs[0]])
    total += normal.logpdf(xs[0], prior.mean, np.array(prior.covariance))
    for k in range(len(zs)):
        if k:
            log_moves = model.regimes.log_transition(jnp.array(xs[k - 1]))
            total += float(log_moves[zs[k - 1], zs[k]])
            total += log_normal(model.transition[zs[k]], xs[k - 1], xs[k])
        total += log_normal(model.emission[zs[k]], xs[k], ys[k])
    return total


@pytest.mark.parametrize("model", [linear(3, 2, 2), recurrent(2, 2)], ids=["linear", "recurrent"])
def test_the_log_joint_is_the_sum_of_its_factors(model):
    zs, xs, ys = (np.array(a) for a in model.simulate(jax.random.key(0), num_times=6))
    assert zs.shape == (6,) and xs.shape == (6, 2) and ys.shape == (6, 2)
    expected = explicit_log_joint(model, zs, xs, ys)
    np.testing.assert_allclose(model.log_joint(zs, xs, ys), expected, rtol=1e-12)


def test_padding_and_missing_entries_add_nothing():
    model = linear(2, 1, 2)
    zs, xs, ys = (np.array(a) for a in model.simulate(jax.random.key(0), num_times=6))
    short = model.log_joint(zs[:4], xs[:4], ys[:4])
    zs[4:], xs[4:], ys[4:] = 1, np.nan, np.nan
    np.testing.assert_allclose(model.log_joint(zs, xs, ys, length=4), short, rtol=1e-14)
    # A row without observations contributes its transition alone.
    gap = ys[:4].copy()
    gap[2] = np.nan
    kernel = model.emission[zs[2]]
    difference = short - model.log_joint(zs[:4], xs[:4], gap)
    np.testing.assert_allclose(
        difference, kernel.log_prob(jnp.array(xs[2]), jnp.array(ys[2])), rtol=1e-10
    )


def test_a_shared_part_equals_a_list_of_copies():
    model = linear(3, 2, 2)
    shared = eqx.tree_at(lambda m: m.emission, model, model.emission[0], is_leaf=lambda x: False)
    copies = SwitchingModel(model.regimes, [model.emission[0]] * 3, model.prior, model.transition)
    path = copies.simulate(jax.random.key(1), num_times=5)
    np.testing.assert_allclose(shared.log_joint(*path), copies.log_joint(*path), rtol=1e-14)


def test_kernels_of_different_types_may_be_mixed():
    model = linear(2, 1, 1)
    smooth = rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(jnp.ones(1)))
    mixed = SwitchingModel(
        model.regimes, model.emission, model.prior, [model.transition[0], smooth]
    )
    zs, xs, ys = mixed.simulate(jax.random.key(0), num_times=4)
    zs = jnp.array([0, 1, 0, 1])
    moves = [mixed.transition[z].log_prob(xs[k], xs[k + 1]) for k, z in enumerate(zs[1:])]
    only = SwitchingModel(model.regimes, model.emission, model.prior, model.transition[0])
    others = [model.transition[0].log_prob(xs[k], xs[k + 1]) for k in range(3)]
    difference = mixed.log_joint(zs, xs, ys) - only.log_joint(zs, xs, ys)
    np.testing.assert_allclose(difference, sum(moves) - sum(others), rtol=1e-10)


def test_a_hidden_markov_model_takes_any_law():
    model = SwitchingModel(
        probabilities(2), emission=[dist.Poisson(jnp.ones(1)), dist.Poisson(jnp.full(1, 9.0))]
    )
    zs, xs, ys = model.simulate(jax.random.key(0), num_times=200)
    assert xs.shape == (200, 0) and model.is_finite
    assert abs(float(ys[zs == 1].mean()) - 9) < 4 * 3 / np.sqrt(float(np.sum(zs == 1)))
    rows = [dist.Poisson([1.0, 9.0][z]).log_prob(y).sum() for z, y in zip(zs, ys, strict=True)]
    table = model.regimes.log_transition()
    expected = model.regimes.log_initial()[zs[0]] + sum(rows) + table[zs[:-1], zs[1:]].sum()
    np.testing.assert_allclose(model.log_joint(zs, None, ys), expected, rtol=1e-10)


def test_emissions_without_a_state_receive_lagged_observations():
    kernels = [
        rd.LinearGaussianKernel(jnp.array([[a, b]]), jnp.zeros(1), jnp.eye(1))
        for a, b in [(0.5, 0.2), (-0.5, 0.1)]
    ]
    model = SwitchingModel(probabilities(2), emission=kernels, num_lags=2)
    zs, _, ys = model.simulate(jax.random.key(0), num_times=6)
    y = np.array(ys)[:, 0]
    expected = float(model.regimes.log_initial()[zs[0]])
    for k in range(1, 6):
        expected += float(model.regimes.log_transition()[zs[k - 1], zs[k]])
        if k >= 2:
            a, b = np.array(kernels[int(zs[k])].weight)[0]
            expected += normal.logpdf(y[k], a * y[k - 1] + b * y[k - 2], 1.0)
    np.testing.assert_allclose(model.log_joint(zs, None, ys), expected, rtol=1e-12)
    with raises_with(ValueError, "lagged observations", "fill in the missing values"):
        model.log_joint(zs, None, ys.at[3].set(jnp.nan))
    with raises_with(ValueError, "more rows than the 2 lags", "got 2"):
        model.series(ys[:2])


def test_simulated_regimes_follow_their_transition_probabilities():
    """The false-alarm rate is below 1e-4: four entries, each within 4.5 standard errors."""
    zs = np.array(hidden_markov(2).simulate(jax.random.key(0), num_times=4000)[0])
    expected = np.exp(hidden_markov(2).regimes.log_transition())
    for i in range(2):
        after = zs[1:][zs[:-1] == i]
        for j in range(2):
            error = np.sqrt(expected[i, j] * (1 - expected[i, j]) / len(after))
            assert abs(np.mean(after == j) - expected[i, j]) < 4.5 * error


def test_a_batch_of_series_is_mapped():
    model = linear(2, 1, 1)
    keys = jax.random.split(jax.random.key(0), 3)
    zs, xs, ys = jax.vmap(lambda key: model.simulate(key, num_times=4))(keys)
    values = jax.vmap(model.log_joint)(zs, xs, ys)
    np.testing.assert_allclose(values[1], model.log_joint(zs[1], xs[1], ys[1]), rtol=1e-14)


def test_wrong_parts_are_refused():
    model = linear(2, 1, 1)
    regimes, kernel, prior = model.regimes, model.transition[0], model.prior[0]
    with raises_with(ValueError, "2 regimes", "list of transitions", "got 3"):
        SwitchingModel(regimes, kernel, prior, [kernel] * 3)
    with raises_with(ValueError, "prior and no transition"):
        SwitchingModel(regimes, kernel, prior)
    with raises_with(TypeError, "kernels as its emission", "Gaussian"):
        SwitchingModel(regimes, prior, prior, kernel)
    with raises_with(TypeError, "law of regimes", "ndarray"):
        SwitchingModel(np.zeros(2), kernel, prior, kernel)
    with raises_with(ValueError, "regime 1", "2 coordinates", "its transition does not accept"):
        two = linear(2, 2, 2)
        SwitchingModel(regimes, two.emission, two.prior, [two.transition[0], kernel])
    with raises_with(ValueError, "emissions of one shape", "(1,)", "(2,)"):
        other = rd.LinearGaussianKernel(jnp.ones((2, 1)), jnp.zeros(2), jnp.eye(2))
        SwitchingModel(regimes, [model.emission[0], other], prior, kernel)
    with raises_with(ValueError, "num_lags"):
        SwitchingModel(regimes, kernel, prior, kernel, num_lags=1)


def test_wrong_paths_are_refused():
    model = linear(2, 1, 1)
    zs, xs, ys = model.simulate(jax.random.key(0), num_times=4)
    with raises_with(TypeError, "integers"):
        model.log_joint(zs.astype(float), xs, ys)
    with raises_with(ValueError, "from 0 to 1", "3"):
        model.log_joint(zs + 2, xs, ys)
    with raises_with(ValueError, "(time,) = (4,)", "(3,)"):
        model.log_joint(zs[:3], xs, ys)
    with raises_with(ValueError, "ys must have 1 columns"):
        model.log_joint(zs, xs, jnp.concatenate([ys, ys], axis=1))
    with raises_with(ValueError, "no continuous state", "(4, 1)"):
        hidden_markov(2).log_joint(zs, xs, ys)


@pytest.mark.usefixtures("untyped")
def test_verbs_for_other_models_name_the_namespace():
    """Other verbs expect models without regimes, and name the namespace of those with them."""
    verbs: tuple[Any, ...] = (rd.kalman_smoother, rd.extended_smoother)
    for verb in verbs:
        with raises_with(
            TypeError, "expects a StateSpaceModel, got SwitchingModel", "retrodict.switching"
        ):
            verb(linear(2, 1, 1), jnp.zeros((3, 1)))
