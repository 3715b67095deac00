"""How the state of a family depends on its parameters, carried along with it.

The state a_k = f_λ(a_{k-1}, y_k) depends on λ through all rows. Its derivative follows

    J_k = ∂_a f · J_{k-1} + ∂_λ f,

called real-time recurrent learning: exact, at the price of a matrix as large as the state times
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
        jacobian: J_k, a row for each number of the state and a column for each parameter of the
            family.
    """

    state: PyTree
    jacobian: Float[Array, "entries parameter"]


class Numbers(eqx.Module):
    """The floating numbers of a state as one vector, and the way back."""

    values: Float[Array, "entries"]
    rest: PyTree
    unravel: Callable[[Array], PyTree]

    @classmethod
    def of(cls, state: PyTree) -> "Numbers":
        """Takes a state apart: what is counted in it has no derivative."""
        moving, rest = eqx.partition(state, eqx.is_inexact_array)
        values, unravel = ravel_pytree(moving)
        return cls(values, rest, unravel)

    def state(self, values: Array) -> PyTree:
        """The state with these numbers."""
        return eqx.combine(self.unravel(values), self.rest)


def follow(parts: Parts) -> Followed:
    """The state before anything was read, and its derivative."""
    vector = as_vector(parts.parameters)

    def start(values: Array) -> Array:
        return Numbers.of(_pair(parts, vector, values)[0].init()).values

    jacobian = jax.jacrev(start)(vector.values)[:, : vector.num_family]
    return Followed(parts.whole[0].init(), jacobian)


def advanced(parts: Parts, before: Followed, row: Row, sensitivity: Sensitivity) -> Followed:
    """The state one row later, and its derivative.

    Args:
        parts: the family and the model.
        before: the state and derivative before the row.
        row: the row.
        sensitivity: `"exact"`, or `"none"` to take the state before the row for a constant.
    """
    vector, numbers = as_vector(parts.parameters), Numbers.of(before.state)
    family, _ = parts.whole
    after = family.advance(before.state, family.embed(row))

    def move(values: Array, entries: Array) -> Array:
        family, _ = _pair(parts, vector, values)
        return Numbers.of(family.advance(numbers.state(entries), family.embed(row))).values

    # One backward pass for each number of the state: there are fewer of them than of parameters.
    moved, pull = jax.vjp(move, vector.values, numbers.values)
    direct, through = jax.vmap(pull)(jnp.eye(moved.shape[0], dtype=moved.dtype))
    jacobian = direct[:, : vector.num_family]
    if sensitivity == "exact":
        jacobian = jacobian + linalg.matmul(through, before.jacobian)
    return Followed(after, jacobian)


class Reading(eqx.Module):
    """The factors of a row as a function of all that they depend on.

    Functions of (family, model, factor) are differentiated in the parameters both directly and
    through the states before and after the row.
    """

    parts: Parts
    before: Followed
    after: Followed
    row: Row

    def factor(self) -> Factor:
        """The law and the kernel of the row."""
        family, _ = self.parts.whole
        return family.read(self.before.state, self.after.state, family.embed(self.row))

    def gradient(
        self, fn: Callable[[Any, StateSpaceModel, Factor], Array]
    ) -> Float[Array, "parameter"]:
        """The total derivative of a number in the parameters."""
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
    """The family and the model at parameters given as a vector."""
    return Parts(vector.unravel(values), parts.fixed).whole


def check_sensitivity(sensitivity: Any, owner: str) -> None:
    """Refuses unknown names."""
    if sensitivity not in ("exact", "none"):
        raise ValueError(f"{owner} expects sensitivity 'exact' or 'none', got {sensitivity!r}.")
