"""The quantities that a running posterior computes: the lower bound and named functionals."""

from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from retrodict._expectations import AbstractFunctional
from retrodict._model import StateSpaceModel
from retrodict._series import Series

T = TypeVar("T")


class Followed(eqx.Module):
    """The lower bound and functionals whose statistics T_k are computed.

    Attributes:
        model: the model of the lower bound, unwrapped; `None` to leave the bound out.
        functionals: additive functionals by name.
    """

    model: StateSpaceModel | None
    functionals: dict[str, AbstractFunctional]


class Arrival(NamedTuple):
    """One row of a stream and its factors.

    Attributes:
        before: the filtering law q_{k-1}; it has no meaning at the first row.
        law: the filtering law q_k.
        step: the parameters of the backward kernel q_{k-1|k}; without meaning at the first row.
        seen: the observation, its mask and its input.
        data: the row that each functional reads.
    """

    before: Any
    law: Any
    step: PyTree
    seen: Series
    data: dict[str, PyTree]


class Sums(NamedTuple):
    """One number or pytree per computed quantity.

    Attributes:
        elbo: that of the lower bound; `None` if it is left out.
        values: those of the functionals, by name.
    """

    elbo: Any
    values: dict[str, PyTree]


def kahan_add(total: T, residue: T, increment: T) -> tuple[T, T]:
    """Add an increment to a running total, with Kahan's compensation for rounding.

    In single precision a plain sum of a million increments of one nat would be off by dozens.

    Returns:
        The new total, and the rounding error that it leaves out.
    """

    def add(s: Array, r: Array, x: Array) -> tuple[Array, Array]:
        x = x.astype(s.dtype) - r
        t = s + x
        return t, (t - s) - x

    leaves, structure = jax.tree.flatten(total)
    others = (structure.flatten_up_to(tree) for tree in (residue, increment))
    pairs = [add(*each) for each in zip(leaves, *others, strict=True)]
    sums, residues = ([pair[i] for pair in pairs] for i in (0, 1))
    return jax.tree.unflatten(structure, sums), jax.tree.unflatten(structure, residues)
