"""Starting values from data."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import raises_with

import retrodict as rd

switching = rd.switching


def drifting(num_columns: int = 3, emission: object = None) -> rd.switching.SwitchingModel:
    """Two regimes that pull the state towards -2 and 2."""
    eye, zero = jnp.eye(1), jnp.zeros(1)
    noise = rd.Diagonal(0.3 * jnp.ones(num_columns))
    weight = jnp.linspace(1.0, 2.0, num_columns)[:, None]
    if emission is None:
        emission = rd.LinearGaussianKernel(weight, jnp.zeros(num_columns), noise)
    return switching.SwitchingModel(
        switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.05, 0.95]]),
        prior=rd.Gaussian(zero, eye),
        transition=[
            rd.LinearGaussianKernel(0.8 * eye, zero + level, 0.2 * eye) for level in (-0.5, 0.5)
        ],
        emission=emission,
    )


@pytest.fixture(scope="module")
def simulated():
    return drifting().simulate(jax.random.key(0), 300)


def accuracy(model: rd.switching.SwitchingModel, zs: jax.Array, ys: jax.Array) -> float:
    regimes = switching.gpb2_smoother(model, ys).chain.marginals(jax.random.key(1)).regimes
    count = model.num_regimes
    return max(
        float(np.mean(np.asarray(order)[np.asarray(regimes)] == np.asarray(zs)))
        for order in itertools.permutations(range(count))
    )


def test_regimes_of_simulated_data_are_found(simulated):
    zs, _, ys = simulated
    blank = eqx.tree_at(
        lambda m: [k.bias for k in m.transition], drifting(), [jnp.zeros(1), jnp.zeros(1)]
    )
    start = switching.initialise(jax.random.key(2), blank, ys)
    truth = accuracy(drifting(), zs, ys)
    assert accuracy(start, zs, ys) > truth - 0.05
    assert switching.gpb2_smoother(start, ys).log_evidence > (
        switching.gpb2_smoother(blank, ys).log_evidence
    )


@pytest.mark.slow
def test_gaps_batches_padding_and_frozen_emissions(simulated):
    zs, _, ys = simulated
    ys = ys.at[100:110].set(jnp.nan)
    batch = jnp.stack([ys[:150], ys[150:]])
    length = jnp.array([150, 140])
    fixed = rd.Frozen(drifting().emission)
    model = drifting(emission=fixed)
    start = switching.initialise(jax.random.key(2), model, batch, length=length)
    assert start.emission is fixed
    assert accuracy(start, zs, ys) > accuracy(drifting(), zs, ys) - 0.05
    garbage = batch.at[1, 140:].set(1e5)
    again = switching.initialise(jax.random.key(2), model, garbage, length=length)
    assert eqx.tree_equal(start, again)


@pytest.mark.slow
def test_a_few_rows_give_finite_values(simulated):
    _, _, ys = simulated
    start = switching.initialise(jax.random.key(1), drifting(), ys[:3], num_restarts=2)
    assert jnp.isfinite(switching.gpb2_smoother(start, ys[:3]).log_evidence)
    same = switching.initialise(jax.random.key(1), drifting(), ys[:1])
    assert eqx.tree_equal(same, drifting())


@pytest.mark.slow
def test_fewer_columns_than_states_use_lags():
    model = switching.SwitchingModel(
        switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.05, 0.95]]),
        prior=rd.Gaussian(jnp.zeros(2), jnp.eye(2)),
        transition=[
            rd.LinearGaussianKernel(s * jnp.eye(2), jnp.zeros(2), jnp.eye(2)) for s in (0.5, 0.9)
        ],
        emission=rd.LinearGaussianKernel(jnp.ones((1, 2)), jnp.zeros(1), jnp.eye(1)),
    )
    zs, xs, ys = model.simulate(jax.random.key(0), 60)
    start = switching.initialise(jax.random.key(1), model, ys)
    assert jnp.isfinite(switching.gpb2_smoother(start, ys).log_evidence)


@pytest.mark.slow
def test_regimes_that_differ_in_the_emission_are_found():
    eye, zero = jnp.eye(1), jnp.zeros(1)
    model = switching.SwitchingModel(
        switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.05, 0.95]]),
        prior=rd.Gaussian(zero, eye),
        transition=rd.LinearGaussianKernel(0.9 * eye, zero, 0.5 * eye),
        emission=[
            rd.LinearGaussianKernel(jnp.ones((2, 1)), jnp.array([b, -b]), 0.2 * jnp.eye(2))
            for b in (-1.0, 1.0)
        ],
    )
    zs, _, ys = model.simulate(jax.random.key(0), 200)
    start = switching.initialise(jax.random.key(1), model, ys)
    assert accuracy(start, zs, ys) > 0.9


def test_misuse_is_refused(simulated):
    _, _, ys = simulated
    nonlinear = drifting(
        emission=rd.NonlinearGaussianKernel(lambda x: jnp.repeat(x, 3), rd.Diagonal(jnp.ones(3)))
    )
    with raises_with(TypeError, "LinearGaussianKernel as each emission", "NonlinearGaussian"):
        switching.initialise(jax.random.key(0), nonlinear, ys)
    with raises_with(ValueError, "observed entries"):
        switching.initialise(jax.random.key(0), drifting(), jnp.full((5, 3), jnp.nan))
