"""What is followed along a stream: the lower bound, and smoothed functionals by their names."""

from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from retrodict._expectations import AbstractFunctional
from retrodict._model import StateSpaceModel
from retrodict._series import Series

T = TypeVar("T")


class Followed(eqx.Module):
    """What the statistics T_k are of.

    Attributes:
        model: the model of the lower bound, unwrapped; `None` if the bound is not followed.
        functionals: additive functionals by name.
    """

    model: StateSpaceModel | None
    functionals: dict[str, AbstractFunctional]


class Arrival(NamedTuple):
    """What one row of a stream brings.

    Attributes:
        before: the filtering law q_{k-1}; it has no meaning at the first row.
        law: the filtering law q_k.
        step: the parameters of the backward kernel q_{k-1|k}; without meaning at the first row.
        seen: the row itself.
        data: the row that each functional reads.
    """

    before: Any
    law: Any
    step: PyTree
    seen: Series
    data: dict[str, PyTree]


class Sums(NamedTuple):
    """One number or pytree for each thing that is followed.

    Attributes:
        elbo: of the lower bound; `None` if it is not followed.
        values: of the functionals, by name.
    """

    elbo: Any
    values: dict[str, PyTree]


def zeros_like_shapes(tree: PyTree) -> PyTree:
    """Zeros of the shapes that `jax.eval_shape` gave."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def add_up(total: T, residue: T, increment: T) -> tuple[T, T]:
    """The sum of a stream of increments and what rounding has left out of it (Kahan).

    In single precision a plain sum of a million increments of one nat would be off by dozens.
    """

    def add(s: Array, r: Array, x: Array) -> tuple[Array, Array]:
        x = x.astype(s.dtype) - r
        t = s + x
        return t, (t - s) - x

    leaves, structure = jax.tree.flatten(total)
    residues, increments = structure.flatten_up_to(residue), structure.flatten_up_to(increment)
    added = [add(*each) for each in zip(leaves, residues, increments, strict=True)]
    sums, rests = ([pair[i] for pair in added] for i in (0, 1))
    return jax.tree.unflatten(structure, sums), jax.tree.unflatten(structure, rests)
