"""The partition of a family and a model into learned and fixed arrays."""

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from retrodict._families import AbstractFactorFamily, check_fits
from retrodict._model import StateSpaceModel, check_densities, learnable
from retrodict._parameters import Frozen, unwrap

Learn = Literal["family", "model", "both"]


class Parts(NamedTuple):
    """A pair (family, model), partitioned into learned and fixed leaves.

    Attributes:
        parameters: the pair with `None` for all fixed leaves.
        fixed: the pair with `None` for all learned leaves.
    """

    parameters: PyTree
    fixed: PyTree

    @property
    def whole(self) -> tuple[Any, StateSpaceModel]:
        """The family and the model, in plain arrays."""
        return unwrap(eqx.combine(self.parameters, self.fixed))


def parts_of(
    family: AbstractFactorFamily | None,
    model: StateSpaceModel,
    learn: Learn | PyTree,
    owner: str,
) -> Parts:
    """Partition a family and a model into learned and fixed leaves.

    `Frozen` parts stay fixed. Scales of a model that is learned by name stay positive.

    Args:
        family: a family, or `None` where only the model is learned.
        model: the model.
        learn: `"family"`, `"model"`, `"both"`, or a pytree of booleans over (family, model).
        owner: the name of the caller, for messages.
    """
    _check_kinds(family, model, owner)
    by_name = isinstance(learn, str)
    if by_name and learn not in ("family", "model", "both"):
        raise ValueError(
            f"{owner} expects learn 'family', 'model', 'both' or a pytree of booleans over (family,"
            f" model), got {learn!r}."
        )
    if by_name and learn != "family":
        model = learnable(model)
    pair = (family, model)
    if by_name:
        chosen: Any = {"family": (True, False), "model": (False, True), "both": (True, True)}[learn]
    else:
        chosen = learn
    try:
        moving = jax.tree.map(
            lambda keep, part: jax.tree.map(lambda arrays: bool(keep) and arrays, _arrays(part)),
            chosen,
            pair,
        )
    except ValueError as error:
        raise ValueError(
            f"{owner} expects learn to be a pytree of booleans of the structure of (family, model),"
            " or of the top of it. " + str(error)
        ) from error
    parts = Parts(*eqx.partition(pair, moving))
    if not jax.tree.leaves(parts.parameters):
        raise ValueError(
            f"{owner} has nothing to learn: learn={learn!r} selects no floating-point array."
        )
    return parts


def _arrays(part: Any) -> PyTree:
    """Return true at each array that can be learned: of a floating type, and not `Frozen`."""

    def may_move(leaf: Any) -> Any:
        if isinstance(leaf, Frozen):
            return jax.tree.map(lambda _: False, leaf)
        return eqx.is_inexact_array(leaf)

    return jax.tree.map(may_move, part, is_leaf=lambda leaf: isinstance(leaf, Frozen))


def _check_kinds(family: Any, model: Any, owner: str) -> None:
    if family is not None and not isinstance(family, AbstractFactorFamily):
        raise TypeError(
            f"{owner} expects a family, such as GatedFamily(...), got {type(family).__name__}."
        )
    if not isinstance(model, StateSpaceModel):
        raise TypeError(f"{owner} expects a StateSpaceModel, got {type(model).__name__}.")
    if family is not None:
        check_fits(family, model)
    check_densities(unwrap(model), owner)


class Vector(NamedTuple):
    """Parameters as one vector, those of the family first.

    Attributes:
        values: the vector.
        num_family: the number of entries that belong to the family.
        unravel: the inverse map to the pytree.
    """

    values: Float[Array, "parameter"]
    num_family: int
    unravel: Any


def as_vector(parameters: PyTree) -> Vector:
    """Flatten the parameters (family, model) into one vector."""
    of_family, _ = ravel_pytree(parameters[0])
    values, unravel = ravel_pytree(parameters)
    return Vector(values, of_family.shape[0], unravel)


def dtype_of(parameters: PyTree) -> Any:
    """Return the floating type of the parameters."""
    return jnp.result_type(*jax.tree.leaves(parameters))
