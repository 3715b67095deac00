"""The quantities that a running posterior computes: the lower bound and named functionals."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from retrodict._expectations import AbstractFunctional, LogJoint
from retrodict._model import StateSpaceModel

T = TypeVar("T")


class Quantities(eqx.Module):
    """The lower bound and functionals whose statistics T_k are computed.

    Attributes:
        model: the model of the lower bound, unwrapped; `None` to leave the bound out.
        functionals: additive functionals by name.
    """

    model: StateSpaceModel | None
    functionals: dict[str, AbstractFunctional]

    def map(self, fn: Callable[..., PyTree], *sums: "Sums") -> "Sums":
        """Apply a function to each functional; that of the bound is the log joint density.

        Args:
            fn: called with a functional, and its entry of each of the sums.
            sums: one entry per functional.
        """
        bound = None if self.model is None else LogJoint(self.model)
        return jax.tree.map(
            fn,
            Sums(bound, self.functionals),
            *sums,
            is_leaf=lambda node: isinstance(node, AbstractFunctional),
        )


class RowFactors(NamedTuple):
    """One row of a stream and its factors.

    Attributes:
        before: the filtering law q_{k-1}; it has no meaning at the first row.
        law: the filtering law q_k.
        step: the parameters of the backward kernel q_{k-1|k}; without meaning at the first row.
        data: the row that each functional reads; the bound reads the observation.
    """

    before: Any
    law: Any
    step: PyTree
    data: "Sums"


class Sums(NamedTuple):
    """One number or pytree per computed quantity.

    Attributes:
        elbo: that of the lower bound; `None` if it is left out.
        values: those of the functionals, by name.
    """

    elbo: Any
    values: dict[str, PyTree]

    def less(self, density: Array) -> "Sums":
        """Subtract a log density of the chain from the entry of the bound, if there is one."""
        return self if self.elbo is None else self._replace(elbo=self.elbo - density)


def kahan_add(total: T, residue: T, increment: T) -> tuple[T, T]:
    """Add an increment to a running total, with Kahan's compensation for rounding.

    In single precision a plain sum of a million increments of one nat would be off by dozens.

    Returns:
        The new total, and the rounding error that it leaves out.
    """
    added = jax.tree.map(lambda r, x: x.astype(r.dtype) - r, residue, increment)
    after = jax.tree.map(jnp.add, total, added)
    return after, jax.tree.map(lambda t, s, x: (t - s) - x, after, total, added)
