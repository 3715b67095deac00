"""Expectation-maximisation of switching models with a continuous state."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_close, raises_with

import retrodict as rd

switching = rd.switching


def kernel(weight: float, bias: float, scale: float) -> rd.LinearGaussianKernel:
    return rd.LinearGaussianKernel(weight * jnp.eye(1), jnp.full(1, bias), scale * jnp.eye(1))


def two_regimes(**parts: object) -> rd.switching.SwitchingModel:
    options = {
        "regimes": switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]]),
        "prior": rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        "transition": [kernel(0.8, -0.5, 0.2), kernel(0.8, 0.6, 0.4)],
        "emission": rd.Frozen(kernel(1.0, 0.0, 0.2)),
    }
    return switching.SwitchingModel(**{**options, **parts})


def one_regime(emission: rd.LinearGaussianKernel) -> tuple:
    """The same model without regimes, and with one."""
    parts = {
        "prior": rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        "transition": kernel(0.5, 0.1, 1.0),
        "emission": emission,
    }
    regimes = switching.Regimes.from_probabilities([1.0], [[1.0]])
    listed = {**parts, "transition": [parts["transition"]], "emission": [parts["emission"]]}
    return rd.StateSpaceModel(**parts), switching.SwitchingModel(regimes, **listed)


@pytest.fixture(scope="module")
def simulated():
    return two_regimes().simulate(jax.random.key(0), 400)


def test_one_regime_equals_exact_em():
    emission = rd.LinearGaussianKernel(jnp.ones((2, 1)), jnp.zeros(2), rd.Diagonal(jnp.ones(2)))
    plain, model = one_regime(emission)
    ys = jnp.stack([plain.simulate(jax.random.key(s), 30)[1] for s in range(2)])
    ys = ys.at[1, 5:8].set(jnp.nan)
    options = {"length": jnp.array([30, 20]), "num_iterations": 4}
    exact = rd.em(jax.random.key(0), plain, ys, **options, tolerance=0.0)
    result = switching.em(jax.random.key(0), model, ys, **options, num_samples=2)
    assert_close(result.history[:4], exact.history, 1e-9)
    expected, actual = rd.unwrap(exact.model), rd.unwrap(result.model)
    assert_close(actual.transition[0].weight, expected.transition.weight, 1e-8)
    assert_close(actual.transition[0].scale_tril, expected.transition.scale_tril, 1e-8)
    assert_close(actual.emission[0].weight, expected.emission.weight, 1e-8)
    assert_close(actual.emission[0].scale_tril.std, expected.emission.scale_tril.std, 1e-8)
    assert_close(actual.prior.covariance, expected.prior.covariance, 1e-8)


@pytest.mark.slow
def test_parameters_are_recovered_and_the_evidence_rises(simulated):
    zs, xs, ys = simulated
    start = two_regimes(transition=[kernel(0.5, -0.1, 0.5), kernel(0.5, 0.1, 0.5)])
    result = switching.em(
        jax.random.key(1), start, ys, num_iterations=30, num_starts=2, num_samples=20
    )
    # One row is 1/400 of the evidence; twenty paths leave an error of about a nat.
    assert np.all(np.diff(result.history) > -2.0 / 400)
    truth = two_regimes()
    assert result.start_values.shape == (2,)
    assert_close(result.start_values.max(), result.log_evidence)
    reference = float(switching.gpb2_smoother(truth, ys).log_evidence) / 400
    assert np.max(result.history) > reference - 1.0 / 400
    errors = [
        max(
            float(jnp.abs(new.weight - old.weight)[0, 0]) + float(jnp.abs(new.bias - old.bias)[0])
            for new, old in zip(
                (result.model.transition[j] for j in order), truth.transition, strict=True
            )
        )
        for order in itertools.permutations(range(2))
    ]
    assert min(errors) < 0.25
    assert result.status in ("converged", "finished")
    assert result.issues == ()


@pytest.mark.slow
def test_masked_entries_and_padding_have_no_effect(simulated):
    _, _, ys = simulated
    ys = ys[:40]
    mask = jnp.ones((40, 1), bool).at[10:15].set(False)
    options: dict[str, Any] = {"num_iterations": 2, "num_samples": 4, "length": 30}
    one = switching.em(jax.random.key(0), two_regimes(), ys, mask=mask, **options)
    garbage = jnp.where(mask, ys, 1e4).at[30:].set(-1e4)
    other = switching.em(jax.random.key(0), two_regimes(), garbage, mask=mask, **options)
    assert eqx.tree_equal(one.model, other.model)
    gap = switching.em(jax.random.key(0), two_regimes(), jnp.where(mask, ys, jnp.nan), **options)
    assert eqx.tree_equal(one.model, gap.model)


@pytest.mark.slow
def test_padded_series_equal_cut_series():
    plain, model = one_regime(kernel(1.0, 0.0, 0.5))
    _, ys = plain.simulate(jax.random.key(3), 30)
    options: dict[str, Any] = {"num_iterations": 2, "num_samples": 2}
    padded = switching.em(jax.random.key(0), model, ys, length=20, **options)
    cut = switching.em(jax.random.key(0), model, ys[:20], **options)
    assert_close(padded.history, cut.history, 1e-10)
    assert_close(padded.model.transition[0].weight, cut.model.transition[0].weight, 1e-9)


@pytest.mark.slow
def test_shared_parts_stay_shared_and_frozen_parts_stay(simulated):
    _, _, ys = simulated
    shared = kernel(0.9, 0.0, 0.3)
    frozen = rd.Frozen(switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]))
    emissions = [kernel(1.0, -1.0, 0.3), rd.Frozen(kernel(1.0, 1.0, 0.3))]
    model = two_regimes(regimes=frozen, transition=shared, emission=emissions)
    result = switching.em(jax.random.key(0), model, ys[:60], num_iterations=3, num_samples=4)
    assert isinstance(result.model.transition, rd.LinearGaussianKernel)
    assert result.model.regimes is frozen
    assert result.model.emission[1] is emissions[1]
    assert not eqx.tree_equal(result.model.emission[0], emissions[0])


@pytest.mark.slow
def test_columns_with_gaps_of_their_own():
    """A column that is never observed with the other keeps the moments of its own rows."""
    emission = rd.LinearGaussianKernel(jnp.ones((2, 1)), jnp.zeros(2), rd.Diagonal(jnp.ones(2)))
    plain, model = one_regime(emission)
    _, ys = plain.simulate(jax.random.key(0), 30)
    ys = ys.at[::2, 0].set(jnp.nan).at[1::2, 1].set(jnp.nan)
    fixed = eqx.tree_at(
        lambda m: (m.transition, m.prior),
        model,
        ((rd.Frozen(model.transition[0]),), rd.Frozen(model.prior)),
    )
    result = switching.em(jax.random.key(0), fixed, ys, num_iterations=1, num_samples=2)
    laws = rd.kalman_smoother(plain, ys).chain.marginals()
    learned = rd.unwrap(result.model).emission[0]
    for column, rows in ((0, slice(1, None, 2)), (1, slice(0, None, 2))):
        x, y = np.asarray(laws.mean)[rows, 0], np.asarray(ys)[rows, column]
        variance = np.asarray(laws.covariance)[rows, 0, 0].mean()
        slope = np.cov(x, y, bias=True)[0, 1] / (x.var() + variance)
        assert_close(learned.weight[column, 0], slope, 1e-8)
        assert_close(learned.bias[column], y.mean() - slope * x.mean(), 1e-8)
    dense = two_regimes(
        emission=rd.LinearGaussianKernel(jnp.ones((2, 1)), jnp.zeros(2), jnp.eye(2))
    )
    with raises_with(ValueError, "partly missing rows"):
        switching.em(jax.random.key(0), dense, ys, num_iterations=1, num_samples=2)


@pytest.mark.slow
def test_a_regime_without_data_is_restarted(simulated):
    _, _, ys = simulated
    # The second regime can never be entered at the start.
    regimes = switching.Regimes.from_probabilities([1.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])
    model = two_regimes(regimes=regimes, transition=[kernel(0.8, 0.0, 0.5), kernel(0.0, 0.0, 1.0)])
    result = switching.em(jax.random.key(0), model, ys, num_iterations=25, num_samples=10)
    assert result.issues == ()
    chain = switching.gpb2_smoother(result.model, ys).chain
    probabilities = chain.marginals(jax.random.key(1)).probabilities
    assert np.min(probabilities.sum(axis=0)) > 20
    assert np.max(result.history) > result.history[0] + 0.01


@pytest.mark.slow
def test_more_regimes_than_the_data_support_are_reported(simulated):
    _, _, ys = simulated
    model = two_regimes(
        regimes=switching.Regimes(jnp.zeros(4), jnp.zeros((4, 4))),
        transition=[kernel(0.8, level, 0.3) for level in (-0.6, -0.2, 0.2, 0.6)],
    )
    result = switching.em(jax.random.key(0), model, ys[:6], num_iterations=6, num_samples=4)
    assert "use fewer regimes" in result.issues[0]
    assert np.all(np.isfinite(result.history))


@pytest.mark.slow
def test_noise_stays_above_its_floor():
    model = one_regime(kernel(1.0, 0.0, 0.1))[1]
    ys = jnp.linspace(0.0, 1.0, 30)[:, None]
    result = switching.em(jax.random.key(0), model, ys, num_iterations=30, num_samples=2)
    assert np.all(np.isfinite(result.history))
    assert float(result.model.transition[0].scale_tril[0, 0]) > 1e-5


@pytest.mark.slow
def test_recurrent_regimes_are_learned():
    # The regime is the sign of the state before.
    weight = jnp.array([[-10.0], [10.0]])
    regimes = switching.Regimes(jnp.zeros(2), jnp.zeros((1, 2)), weight)
    model = two_regimes(regimes=regimes, transition=[kernel(0.5, 1.5, 0.5), kernel(0.5, -1.5, 0.5)])
    _, _, ys = model.simulate(jax.random.key(0), 200)
    start = two_regimes(
        regimes=switching.Regimes(jnp.zeros(2), jnp.zeros((1, 2)), jnp.zeros((2, 1))),
        transition=[kernel(0.5, 1.0, 0.7), kernel(0.5, -1.0, 0.7)],
    )
    result = switching.em(jax.random.key(0), start, ys, num_iterations=15, num_samples=5)
    learned = result.model.regimes
    assert learned.transition_logits.shape == (1, 2)
    assert float(learned.state_weight[1, 0] - learned.state_weight[0, 0]) > 4.0
    assert np.max(result.history) > result.history[0] + 0.1


def test_misuse_is_refused(simulated):
    _, _, ys = simulated
    key = jax.random.key(0)
    nonlinear = two_regimes(emission=rd.NonlinearGaussianKernel(jnp.sin, rd.Diagonal(jnp.ones(1))))
    with raises_with(TypeError, "linear-Gaussian kernels", "fit_evidence"):
        switching.em(key, nonlinear, ys)
    with raises_with(TypeError, "SwitchingModel", "StateSpaceModel"):
        switching.em(key, one_regime(kernel(1.0, 0.0, 1.0))[0], ys)
    with raises_with(ValueError, "observed entries"):
        switching.em(key, two_regimes(), jnp.full((5, 1), jnp.nan))
    partly = two_regimes(
        regimes=switching.Regimes(
            rd.Frozen(jnp.zeros(2)), rd.Frozen(jnp.zeros((2, 2))), jnp.ones((2, 1))
        )
    )
    with raises_with(ValueError, "frozen in part"):
        switching.em(key, partly, ys[:10], num_iterations=1, num_samples=2)
