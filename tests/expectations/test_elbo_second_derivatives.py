"""Second derivatives against central differences of gradients, in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from linear_models import linear_model
from nonlinear_models import nonlinear_emission_model, nonlinear_kernel

import retrodict as rd

STEP = 1e-5
THETA = jnp.array([0.8, -1.0, -1.5])
FAMILIES = {
    "conjugate": lambda key: rd.ConjugateFamily(key, 1, 1, width=4),
    "gated": lambda key: rd.GatedFamily(key, 1, 1),
    "recurrent": lambda key: rd.RecurrentFamily(key, 1, 1),
}


def nonlinear(theta: Any) -> rd.StateSpaceModel:
    return replace(
        nonlinear_emission_model(jnp.tanh, jnp.exp(theta[2])),
        transition=nonlinear_kernel(lambda x: theta[0] * jnp.sin(x), jnp.exp(theta[1])),
    )


def linear(theta: Any) -> rd.StateSpaceModel:
    return linear_model(
        2,
        weight=jnp.array([[0.0, 0.1], [0.0, 0.5]]).at[0, 0].set(theta[0]),
        noise=jnp.exp(theta[1]),
        design=jnp.array([[1.0, 0.3]]),
        error=jnp.exp(theta[2]),
    )


YS = nonlinear(THETA).simulate(jax.random.key(0), 5)[1]
GRID = rd.Grid(jnp.array([-5.0]), jnp.array([5.0]), 120)


def chain(theta: Any) -> rd.LinearGaussianChain:
    return rd.kalman_smoother(linear(theta), YS).chain


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "extended": lambda theta: rd.extended_smoother(nonlinear(theta), YS).log_evidence,
    "unscented": lambda theta: rd.unscented_smoother(nonlinear(theta), YS).log_evidence,
    "iterated": lambda theta: rd.iterated_smoother(nonlinear(theta), YS).log_evidence,
    "grid": lambda theta: rd.grid_smoother(nonlinear(theta), YS, GRID).log_evidence,
    "entropy": lambda theta: chain(theta).entropy(),
    "log_prob": lambda theta: chain(theta).log_prob(jnp.ones((5, 2))),
    "marginals": lambda theta: jnp.sum(chain(theta).marginals().covariance),
    "expectation": lambda theta: jnp.sum(rd.expectation(chain(theta), rd.StateSum()) ** 2),
}


def check(function: Callable[[Any], Any], at: Any) -> None:
    leaves, tree = jax.tree.flatten(at)
    rng = np.random.default_rng(0)
    direction = jax.tree.unflatten(tree, [jnp.asarray(rng.normal(size=a.shape)) for a in leaves])
    gradient = jax.jit(jax.grad(function))

    def moved(step: float) -> Any:
        return jax.tree.map(lambda a, b: a + step * b, at, direction)

    exact = jax.jit(lambda x: jax.jvp(jax.grad(function), (x,), (direction,))[1])(at)
    ends = [jax.flatten_util.ravel_pytree(gradient(moved(s)))[0] for s in (STEP, -STEP)]
    difference = (ends[0] - ends[1]) / (2 * STEP)
    flat = jax.flatten_util.ravel_pytree(exact)[0]
    assert jnp.linalg.norm(flat - difference) < 1e-7 * jnp.linalg.norm(difference)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_hessians_in_model_parameters_equal_finite_differences(name: str):
    check(FUNCTIONS[name], THETA)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_hessians_of_elbo_in_family_equal_finite_differences(name: str):
    model = nonlinear(THETA)
    family = FAMILIES[name](jax.random.key(1)).prepare(model, YS)

    def is_frozen(node: Any) -> bool:
        return isinstance(node, rd.Frozen)

    moving, fixed = eqx.partition(
        family,
        jax.tree.map(
            lambda node: False if is_frozen(node) else eqx.is_inexact_array(node),
            family,
            is_leaf=is_frozen,
        ),
        is_leaf=is_frozen,
    )

    def bound(parameters: Any) -> Any:
        posterior = eqx.combine(parameters, fixed, is_leaf=is_frozen).infer(YS)
        return rd.elbo(model, posterior, YS, estimator=rd.Quadrature(8))

    check(bound, moving)
