"""The derivative of a family's state in its parameters, updated with the state.

The state a_k = f_λ(a_{k-1}, y_k) depends on λ through all rows. Its derivative follows

    J_k = ∂_a f · J_{k-1} + ∂_λ f,

called real-time recurrent learning: exact, at the cost of a matrix of the size of the state times
the parameters.
"""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from retrodict._families import Factor, Row
from retrodict._model import StateSpaceModel
from retrodict._numerics import linalg
from retrodict.online.parts import Parts, Vector, as_vector

Sensitivity = Literal["exact", "none"]


class Followed(eqx.Module):
    """The state of a family, and its derivative.

    Attributes:
        state: a_k.
        jacobian: J_k, with one row per number of the state and one column per parameter of the
            family.
    """

    state: PyTree
    jacobian: Float[Array, "entries parameter"]


class Numbers(eqx.Module):
    """The floating-point numbers of a state as one vector, and the inverse map."""

    values: Float[Array, "entries"]
    rest: PyTree
    unravel: Callable[[Array], PyTree]

    @classmethod
    def of(cls, state: PyTree) -> "Numbers":
        """Split a state into floating-point numbers and the rest, which has no derivative."""
        moving, rest = eqx.partition(state, eqx.is_inexact_array)
        values, unravel = ravel_pytree(moving)
        return cls(values, rest, unravel)

    def state(self, values: Array) -> PyTree:
        """Return the state with these numbers."""
        return eqx.combine(self.unravel(values), self.rest)


def follow(parts: Parts) -> Followed:
    """Return the state before the first row, and its derivative."""
    vector = as_vector(parts.parameters)

    def start(values: Array) -> Array:
        return Numbers.of(_pair(parts, vector, values)[0].init()).values

    jacobian = jax.jacrev(start)(vector.values)[:, : vector.num_family]
    return Followed(parts.whole[0].init(), jacobian)


def advanced(parts: Parts, before: Followed, row: Row, sensitivity: Sensitivity) -> Followed:
    """Return the state one row later, and its derivative.

    Args:
        parts: the family and the model.
        before: the state and derivative before the row.
        row: the row.
        sensitivity: `"exact"`, or `"none"` to treat the state before the row as a constant.
    """
    vector, numbers = as_vector(parts.parameters), Numbers.of(before.state)
    family, _ = parts.whole
    after = family.advance(before.state, family.embed(row))

    def move(values: Array, entries: Array) -> Array:
        family, _ = _pair(parts, vector, values)
        return Numbers.of(family.advance(numbers.state(entries), family.embed(row))).values

    # One backward pass per number of the state: there are fewer of them than parameters.
    moved, pull = jax.vjp(move, vector.values, numbers.values)
    direct, through = jax.vmap(pull)(jnp.eye(moved.shape[0], dtype=moved.dtype))
    jacobian = direct[:, : vector.num_family]
    if sensitivity == "exact":
        jacobian = jacobian + linalg.matmul(through, before.jacobian)
    return Followed(after, jacobian)


class Reading(eqx.Module):
    """The factors of a row as a function of parameters and states.

    Functions of (family, model, factor) are differentiated in the parameters both directly and
    through the states before and after the row.
    """

    parts: Parts
    before: Followed
    after: Followed
    row: Row

    def factor(self) -> Factor:
        """Return the law and the kernel of the row."""
        family, _ = self.parts.whole
        return family.read(self.before.state, self.after.state, family.embed(self.row))

    def gradient(
        self, fn: Callable[[Any, StateSpaceModel, Factor], Array]
    ) -> Float[Array, "parameter"]:
        """Return the total derivative of a scalar function in the parameters."""
        vector = as_vector(self.parts.parameters)
        old, new = Numbers.of(self.before.state), Numbers.of(self.after.state)

        def value(values: Array, before: Array, after: Array) -> Array:
            family, model = _pair(self.parts, vector, values)
            read = family.read(old.state(before), new.state(after), family.embed(self.row))
            return fn(family, model, read)

        direct, of_old, of_new = jax.grad(value, argnums=(0, 1, 2))(
            vector.values, old.values, new.values
        )
        through = linalg.matvec(self.before.jacobian.T, of_old)
        through = through + linalg.matvec(self.after.jacobian.T, of_new)
        return direct.at[: vector.num_family].add(through)


def _pair(parts: Parts, vector: Vector, values: Array) -> tuple[Any, StateSpaceModel]:
    """Return the family and the model at a vector of parameters."""
    return Parts(vector.unravel(values), parts.fixed).whole


def check_sensitivity(sensitivity: Any, owner: str) -> None:
    """Raise unless the name is known."""
    if sensitivity not in ("exact", "none"):
        raise ValueError(f"{owner} expects sensitivity 'exact' or 'none', got {sensitivity!r}.")
