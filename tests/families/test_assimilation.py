"""The assimilation family against exact posteriors, a grid, and data with outliers."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from linear_models import linear_model, random_model

import retrodict as rd
from retrodict._numerics.nonsingular_law import _inverse_of_lower

N = 12


def silent(family: rd.AssimilationFamily) -> rd.AssimilationFamily:
    """The family with networks that emit exactly zero."""
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf) if eqx.is_inexact_array(leaf) else leaf, family.networks
    )
    return eqx.tree_at(lambda f: f.networks, family, zeros)


def walk(emission: rd.AbstractKernel, fn=lambda x: 0.95 * x) -> rd.StateSpaceModel:
    eye = jnp.eye(1)
    return rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(1), 0.3 * eye), rd.NonlinearGaussianKernel(fn, 0.3 * eye), emission
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_looks", [1, 2])
def test_zero_corrections_give_exact_posterior_of_linear_model(num_looks: int):
    """With dense noise, missing entries and inputs: an expected slope says all of a square."""
    model = random_model(np.random.default_rng(3), 2, 3, 2)
    inputs = np.random.default_rng(4).normal(size=(N, 2))
    ys = np.array(model.simulate(jax.random.key(5), N, inputs=inputs)[1])
    ys[1], ys[4, 0] = np.nan, np.nan
    family = silent(rd.AssimilationFamily(jax.random.key(0), model, num_looks=num_looks))
    got = family.infer(ys, inputs=inputs).marginals()
    exact = rd.kalman_smoother(model, ys, inputs=inputs).chain.marginals()
    np.testing.assert_allclose(got.mean, exact.mean, atol=1e-9)
    np.testing.assert_allclose(got.covariance, exact.covariance, atol=1e-9)


@pytest.mark.slow
def test_an_outlier_is_not_followed():
    """Under a Student law the untrained filter is near the grid's, and far off none at all.

    The prediction is no wider than the noise: where it is, the exact law has two modes.
    """
    model = walk(rd.DistributionKernel(lambda x: dist.StudentT(2.0, x, 0.3)))
    ys = np.array(model.simulate(jax.random.key(1), N)[1])
    ys[6] = 1e3
    family = silent(rd.AssimilationFamily(jax.random.key(0), model, num_looks=4))
    got = family.infer(ys)
    exact = rd.grid_smoother(model, ys, rd.Grid(jnp.array([-6.0]), jnp.array([6.0]), 400))
    std = np.sqrt(np.asarray(exact.covariance)[:, 0, 0])
    assert np.max(np.abs(got.marginals().mean - exact.mean)[:, 0] / std) < 0.35
    blind = ys.copy()
    blind[6] = np.nan
    without = family.infer(blind).laws.mean[6]
    np.testing.assert_allclose(got.laws.mean[6], without, atol=0.01)


def test_predictor_replaces_uninformative_location():
    """Of a stochastic volatility the location says nothing; its logarithm of the scale does."""
    model = walk(rd.DistributionKernel(lambda x: dist.Normal(0.0 * x, jnp.exp(x / 2))))
    ys = np.array(model.simulate(jax.random.key(1), N)[1])
    blind = silent(rd.AssimilationFamily(jax.random.key(0), model, num_looks=3))
    family = silent(
        rd.AssimilationFamily(jax.random.key(0), model, num_looks=3, predictor=lambda x: x)
    )
    exact = rd.grid_smoother(model, ys, rd.Grid(jnp.array([-7.0]), jnp.array([7.0]), 400))
    std = np.sqrt(np.asarray(exact.covariance)[:, 0, 0])
    errors = [
        np.max(np.abs(f.infer(ys).marginals().mean - exact.mean)[:, 0] / std)
        for f in (family, blind)
    ]
    assert errors[0] < 0.2
    assert errors[0] < 0.5 * errors[1]


def test_prepare_replaces_the_model_of_the_family():
    one, two = (random_model(np.random.default_rng(seed), 2, 3, 0) for seed in (3, 4))
    family = rd.AssimilationFamily(jax.random.key(0), one)
    other = family.prepare(two, np.zeros((N, 3)))
    assert isinstance(other.model, rd.Frozen)
    np.testing.assert_array_equal(
        other.model.value.transition.weight, rd.unwrap(two).transition.weight
    )


def test_redraw_changes_only_the_networks():
    family = rd.AssimilationFamily(jax.random.key(0), random_model(np.random.default_rng(3), 1, 1))
    other = family.redraw(jax.random.key(1))
    assert np.any(other.networks[0].layers[0].weight != family.networks[0].layers[0].weight)
    np.testing.assert_array_equal(other.spread.raw, family.spread.raw)


@pytest.mark.usefixtures("untyped")
def test_unsupported_models_are_refused():
    key, make = jax.random.key(0), rd.AssimilationFamily
    with pytest.raises(TypeError, match="expects a StateSpaceModel, got int"):
        make(key, 3)  # pyright: ignore
    with pytest.raises(TypeError, match="one typed key"):
        make(0, walk(rd.DistributionKernel(dist.Poisson)))  # pyright: ignore
    law = rd.DistributionKernel(lambda x: dist.Laplace(x, 1.0))
    with pytest.raises(TypeError, match="transition with Gaussian noise, got .*DistributionKernel"):
        make(key, replace(linear_model(), transition=law, emission=law))
    joint = rd.DistributionKernel(
        lambda x: dist.MultivariateStudentT(3.0, jnp.concatenate([x, x]), jnp.eye(2))
    )
    with pytest.raises(ValueError, match=r"log_prob has shape \(2,\), got \(\)"):
        make(key, walk(joint))


@pytest.mark.parametrize("count", [32, 33, 71])
def test_inverse_of_lower_factor_is_exact(count: int):
    lower = np.tril(np.random.default_rng(count).normal(size=(count, count)))
    lower[np.diag_indices(count)] = 3.0 + np.abs(np.diag(lower))
    inverse = _inverse_of_lower(jnp.asarray(lower))
    np.testing.assert_allclose(inverse @ lower, np.eye(count), atol=1e-10)
    assert not np.any(np.triu(inverse, 1))
