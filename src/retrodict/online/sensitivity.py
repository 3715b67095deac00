"""Gradients of the ELBO on draws, with the derivative of a family's state in its parameters.

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

from retrodict._arrays import Scalar
from retrodict._families import Factor, read_row
from retrodict._model import Series, StateSpaceModel
from retrodict._numerics import linalg
from retrodict.online.gradient import Parts, RowGradient

StateDerivative = Literal["exact", "none"]


class StateWithJacobian(eqx.Module):
    """The state of a family, and its derivative.

    Attributes:
        state: a_k.
        jacobian: J_k, with one row per number of the state and one column per parameter of the
            family.
    """

    state: PyTree
    jacobian: Float[Array, "entries parameter"]


def initial_state(parts: Parts) -> StateWithJacobian:
    """Return the state before the first row, and its derivative."""

    def start(vector: Array) -> Array:
        return _numbers(parts.at(vector)[0].init())[0]

    jacobian = jax.jacrev(start)(parts.vector)[:, : parts.num_family]
    return StateWithJacobian(parts.whole[0].init(), jacobian)


class DifferentiableRow(eqx.Module):
    """One row, read by a family whose parameters may vary.

    Functions of (family, model, factor) are differentiated in the parameters both directly and
    through the states before and after the row.

    Attributes:
        parts: the family and the model.
        before: the state before the row.
        after: the state after the row.
        row: the row.
        factor: the law and the kernel of the row.
    """

    parts: Parts
    before: StateWithJacobian
    after: StateWithJacobian
    row: Series
    factor: Factor

    def __init__(
        self, parts: Parts, before: StateWithJacobian, row: Series, sensitivity: StateDerivative
    ):
        """Advance the state by a row.

        Args:
            parts: the family and the model.
            before: the state and derivative before the row.
            row: the row.
            sensitivity: `"exact"`, or `"none"` to treat the state before the row as a constant.
        """
        self.parts, self.before, self.row = parts, before, row
        entries, state_of = _numbers(before.state)
        family, _ = parts.whole
        after, self.factor = read_row(family, before.state, row)

        def move(vector: Array, entries: Array) -> Array:
            family, _ = parts.at(vector)
            return _numbers(family.advance(state_of(entries), family.embed(row)))[0]

        # One backward pass per number of the state: there are fewer of them than parameters.
        moved, pull = jax.vjp(move, parts.vector, entries)
        direct, through = jax.vmap(pull)(jnp.eye(moved.shape[0], dtype=moved.dtype))
        jacobian = direct[:, : parts.num_family]
        if sensitivity == "exact":
            jacobian = jacobian + linalg.matmul(through, before.jacobian)
        self.after = StateWithJacobian(after, jacobian)

    def gradient(
        self, fn: Callable[[Any, StateSpaceModel, Factor], Array]
    ) -> Float[Array, "parameter"]:
        """Return the total derivative of a scalar function in the parameters."""
        old_entries, old_state = _numbers(self.before.state)
        new_entries, new_state = _numbers(self.after.state)

        def value(vector: Array, old: Array, new: Array) -> Array:
            family, model = self.parts.at(vector)
            factor = family.read(old_state(old), new_state(new), family.embed(self.row))
            return fn(family, model, factor)

        direct, of_old, of_new = jax.grad(value, argnums=(0, 1, 2))(
            self.parts.vector, old_entries, new_entries
        )
        through = linalg.matvec(self.before.jacobian.T, of_old)
        through = through + linalg.matvec(self.after.jacobian.T, of_new)
        return direct.at[: self.parts.num_family].add(through)

    def log_emission(self, model: StateSpaceModel, x: Float[Array, "state"]) -> Scalar:
        """Return log g(x_k, y_k) of the observed entries."""
        return model.emission.log_prob(x, self.row.ys, self.row.inputs, self.row.mask)

    def first_terms(
        self, xs: Float[Array, "sample state"]
    ) -> tuple[Float[Array, "sample"], Float[Array, "sample parameter"]]:
        """Return log χ g_0 of the first row at some states, and its derivative in θ."""

        def joint(model: StateSpaceModel, x: Array) -> Scalar:
            initial = jnp.sum(jnp.asarray(model.prior.log_prob(x)))
            return initial + self.log_emission(model, x)

        def slope(x: Array) -> Float[Array, "parameter"]:
            return self.gradient(lambda family, model, factor: joint(model, x))

        _, model = self.parts.whole
        return jax.vmap(lambda x: joint(model, x))(xs), jax.vmap(slope)(xs)

    def row_gradient(
        self, increment: Scalar, total: Array, mean: Array, terminal: Array, before: Array
    ) -> RowGradient:
        """Return the gradient at this row.

        Args:
            increment: what the row added to the ELBO.
            total: the gradient of the statistic at fixed q_k, summed over the rows.
            mean: what the row added to `total`.
            terminal: the part of the gradient that comes from moving q_k.
            before: that of q_{k-1}.
        """
        return RowGradient(
            increment,
            self.parts.unravel(total + terminal),
            self.parts.unravel(mean + terminal - before),
            jnp.ones((), bool),
            self.factor,
        )


def _numbers(state: PyTree) -> tuple[Float[Array, "entries"], Callable[[Array], PyTree]]:
    """Return the floating-point numbers of a state as one vector, and the inverse map."""
    moving, rest = eqx.partition(state, eqx.is_inexact_array)
    entries, unravel = ravel_pytree(moving)
    return entries, lambda entries: eqx.combine(unravel(entries), rest)


def check_sensitivity(sensitivity: Any, owner: str) -> None:
    """Raise unless the name is known."""
    if sensitivity not in ("exact", "none"):
        raise ValueError(f"{owner} expects sensitivity 'exact' or 'none', got {sensitivity!r}.")
