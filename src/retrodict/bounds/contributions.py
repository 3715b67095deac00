"""Contributions of each time to the expectation of a functional, with flattened entries."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from retrodict._chains import LinearGaussianChain
from retrodict._exact import GridPosterior
from retrodict._expectations import AbstractFunctional, AbstractPairTerm


def _flattened(function: Callable[..., PyTree]) -> Callable[..., Float[Array, "entry"]]:
    """Return h_0 or h_k with its value as one vector, of the type of the state."""
    return lambda x, *rest: ravel_pytree(function(x, *rest))[0].astype(x.dtype)


def _row(data: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], data)


@eqx.filter_jit
def in_closed_form(
    chain: LinearGaussianChain, functional: AbstractFunctional, data: PyTree
) -> Float[Array, "time entry"]:
    """Return E_q h_k for every k, for a quadratic functional.

    The expectation of a quadratic function f of z ~ N(m, s sᵀ) is f(m) + ½ tr(sᵀ ∇²f s).
    """
    d, pairs = chain.state_dim, chain.pairwise()
    initial, increment = _flattened(functional.initial), _flattened(functional.increment)

    def expected(f: Callable[[Array], Array], mean: Array, scale: Array) -> Array:
        hessian = jax.hessian(f)(mean)
        traces = jnp.einsum("ik,eij,jk->e", scale, hessian, scale, precision="highest")
        return f(mean) + 0.5 * traces

    def at_pair(mean: Array, scale: Array, row: PyTree) -> Array:
        return expected(lambda pair: increment(pair[:d], pair[d:], row), mean, scale)

    first = _row(data, 0)
    start = expected(lambda x: initial(x, first), pairs.mean[0, :d], pairs.scale_tril[0, :d])
    later = jax.vmap(at_pair)(pairs.mean, pairs.scale_tril, _row(data, slice(1, None)))
    return jnp.concatenate([start[None], later])


@eqx.filter_jit
def along_paths(
    functional: AbstractFunctional, paths: Float[Array, "sample time state"], data: PyTree
) -> Float[Array, "sample time entry"]:
    """Return h_k along every path."""
    initial, increment = _flattened(functional.initial), _flattened(functional.increment)

    def one(path: Array) -> Array:
        later = jax.vmap(increment)(path[:-1], path[1:], _row(data, slice(1, None)))
        return jnp.concatenate([initial(path[0], _row(data, 0))[None], later])

    return jax.vmap(one)(paths)


def is_quadratic(functional: AbstractFunctional) -> bool:
    """Return whether a functional is a polynomial of degree at most two in the states."""
    return all(term.quadratic for term in functional.terms())


def has_pairs(functional: AbstractFunctional) -> bool:
    """Return whether a functional depends on neighbouring states together."""
    return any(isinstance(term, AbstractPairTerm) for term in functional.terms())


@eqx.filter_jit
def values_at_points(
    functional: AbstractFunctional,
    points: Float[Array, "point state"],
    data: PyTree,
    num_times: int,
) -> Float[Array, "time point entry"]:
    """Return h_k at every point, for a functional without pairs."""
    initial, increment = _flattened(functional.initial), _flattened(functional.increment)

    def at_time(row: PyTree) -> Array:
        return jax.vmap(lambda x: increment(x, x, row))(points)

    first = _row(data, 0)
    start = jax.vmap(lambda x: initial(x, first))(points)
    if data is None:
        later = jnp.repeat(at_time(None)[None], num_times - 1, axis=0)
    else:
        later = jax.lax.map(at_time, _row(data, slice(1, None)))
    return jnp.concatenate([start[None], later])


def on_grid(
    posterior: GridPosterior, functional: AbstractFunctional, data: PyTree
) -> Float[Array, "time entry"]:
    """Return E[h_k | y] on a grid for every k."""
    points, weights = posterior.points, posterior.weights
    if not has_pairs(functional):
        values = values_at_points(functional, points, data, weights.shape[0])
        return jnp.einsum("tp,tpe->te", weights, values, precision="highest")
    first = _row(data, 0)
    initial = jax.vmap(lambda x: _flattened(functional.initial)(x, first))(points)
    start = jnp.matmul(weights[0], initial, precision="highest")
    later = posterior.expectation_pairwise(_flattened(functional.increment), data)
    return jnp.concatenate([start[None], later])
