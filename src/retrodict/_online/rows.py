"""The log densities that one row adds to that of a path."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from retrodict._family import AbstractFactorFamily
from retrodict._family._base import Row
from retrodict._model import StateSpaceModel
from retrodict._types import Scalar, State


def log_initial(model: StateSpaceModel, x: State) -> Scalar:
    """The density log χ(x_0)."""
    return jnp.sum(jnp.asarray(model.prior.log_prob(x)))


def log_emission(model: StateSpaceModel, x: State, row: Row) -> Scalar:
    """The density log g(x_k, y_k) of what was seen."""
    kernel = model.emission
    return kernel.log_prob(x, row.y, row.u if kernel.takes_input else None, row.seen)


def log_transition(model: StateSpaceModel, before: State, x: State, row: Row) -> Scalar:
    """The density log m(x_{k-1}, x_k)."""
    kernel = model.transition
    return kernel.log_prob(before, x, row.u if kernel.takes_input else None)


def zeros_of_law(family: AbstractFactorFamily, dtype: Any) -> PyTree:
    """Zeros of the shapes of a filtering law."""

    def read() -> PyTree:
        u = jnp.zeros(family.input_dim, dtype) if family.input_dim else None
        row = Row(jnp.zeros(family.obs_dim, dtype), jnp.ones(family.obs_dim, bool), u)
        before, embedded = family.init(), family.embed(row)
        return family.read(before, family.advance(before, embedded), embedded).law

    shapes = jax.eval_shape(read)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
