"""Contributions of each time to the expectation of a functional."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from retrodict._chains import LinearGaussianChain
from retrodict._exact import GridPosterior
from retrodict._expectations import (
    AbstractFunctional,
    AbstractInitialTerm,
    AbstractPairTerm,
    AbstractStateTerm,
    AbstractTerm,
    ClosedForm,
    InitialTerm,
    PairTerm,
    StateTerm,
    add,
    estimate,
)


class _Weighted(AbstractFunctional):
    """A functional whose term of time k is multiplied by a weight: its data is (data, weights)."""

    functional: AbstractFunctional

    def terms(self) -> tuple[AbstractTerm, ...]:
        return tuple(_weighted(term) for term in self.functional.terms())


def _weighted(term: Any) -> AbstractTerm:
    kinds = {AbstractPairTerm: PairTerm, AbstractInitialTerm: InitialTerm}
    kind = next((new for old, new in kinds.items() if isinstance(term, old)), StateTerm)
    return kind(_WeightedFunction(term), term.quadratic, term.name)


class _WeightedFunction(eqx.Module):
    """The function of a term, times the weight beside the row of data."""

    term: Callable[..., PyTree]

    def __call__(self, *arguments: Any) -> PyTree:
        *states, (data, weight) = arguments
        return jax.tree.map(lambda leaf: weight * leaf, self.term(*states, data))


@eqx.filter_jit
def closed_form_contributions(
    chain: LinearGaussianChain, functional: AbstractFunctional, data: PyTree
) -> Float[Array, "time entry"]:
    """Return E_q h_k for every k, for a quadratic functional with flattened entries.

    The expectation is linear in the weights of the times, so that the derivative in a weight is the
    contribution of its time.
    """

    def total(weights: Float[Array, "time"]) -> Array:
        value = estimate(chain, _Weighted(functional), (data, weights), ClosedForm(), None).value
        return ravel_pytree(value)[0]

    ones = jnp.ones(chain.num_times, chain.laws.mean.dtype)
    return jax.jacrev(total)(ones).T


@eqx.filter_jit
def along_paths(
    functional: AbstractFunctional, paths: Float[Array, "sample time state"], data: PyTree
) -> Float[Array, "sample time entry"]:
    """Return h_k along every path, with flattened entries."""
    first = jax.tree.map(lambda leaf: leaf[0], data)
    rest = jax.tree.map(lambda leaf: leaf[1:], data)

    def flat(value: PyTree) -> Array:
        return ravel_pytree(value)[0]

    def one(path: Array) -> Array:
        initial = flat(functional.initial(path[0], first))
        later = jax.vmap(lambda before, x, row: flat(functional.increment(before, x, row)))(
            path[:-1], path[1:], rest
        )
        return jnp.concatenate([initial[None], later])

    return jax.vmap(one)(paths)


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
    """Return h_k at every point, for a functional without pairs, with flattened entries."""
    terms: list[Any] = list(functional.terms())
    state = [term for term in terms if isinstance(term, AbstractStateTerm)]
    initial = [term for term in terms if isinstance(term, AbstractInitialTerm)]

    def value(chosen: list[Any], x: Array, row: PyTree) -> Array:
        return ravel_pytree(add([term(x, row) for term in chosen]))[0].astype(points.dtype)

    def at(chosen: list[Any], row: PyTree) -> Array:
        return jax.vmap(lambda x: value(chosen, x, row))(points)

    first = jax.tree.map(lambda leaf: leaf[0], data)
    if not state:
        start = at(initial, first)
        rest = jnp.zeros((num_times - 1, *start.shape), start.dtype)
        return jnp.concatenate([start[None], rest])
    every = jax.lax.map(lambda row: at(state, row), data) if data is not None else None
    if every is None:
        constant = at(state, None)
        every = jnp.broadcast_to(constant[None], (num_times, *constant.shape))
    return every.at[0].add(at(initial, first)) if initial else every


def grid_contributions(
    posterior: GridPosterior, functional: AbstractFunctional, data: PyTree
) -> Float[Array, "time entry"]:
    """Return E[h_k | y] on a grid for every k, with flattened entries."""
    n, points = posterior.weights.shape[0], posterior.points
    if not has_pairs(functional):
        values = values_at_points(functional, points, data, n)
        return jnp.einsum("tp,tpe->te", posterior.weights, values, precision="highest")
    first = jax.tree.map(lambda leaf: leaf[0], data)
    initial = jax.vmap(lambda x: ravel_pytree(functional.initial(x, first))[0])(points)
    start = jnp.matmul(posterior.weights[0], initial, precision="highest")

    def increment(before: Array, x: Array, *row: PyTree) -> Array:
        return ravel_pytree(functional.increment(before, x, *row))[0]

    return jnp.concatenate([start[None], posterior.expectation_pairwise(increment, data)])
