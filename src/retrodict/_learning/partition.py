"""The partition of (family, model) into learned and fixed leaves."""

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from retrodict._model import AbstractModel, Frozen, unwrap

Learn = Literal["family", "model", "both"]

CHOICES = {"family": (True, False), "model": (False, True), "both": (True, True)}
"""Whether family and model are learned, by the name of the choice."""


class Parts(NamedTuple):
    """A pair (family, model), partitioned into learned and fixed leaves.

    Attributes:
        parameters: the pair with `None` for all fixed leaves.
        fixed: the pair with `None` for all learned leaves.
    """

    parameters: PyTree
    fixed: PyTree

    @property
    def whole(self) -> tuple[Any, Any]:
        """The family and the model, in plain arrays."""
        return unwrap(eqx.combine(self.parameters, self.fixed))

    @property
    def vector(self) -> Float[Array, "parameter"]:
        """The parameters as one vector, those of the family first."""
        return ravel_pytree(self.parameters)[0]

    @property
    def num_family(self) -> int:
        """The number of entries of the vector that belong to the family."""
        return ravel_pytree(self.parameters[0])[0].shape[0]

    @property
    def dtype(self) -> Any:
        """The floating type of the parameters."""
        return jnp.result_type(*jax.tree.leaves(self.parameters))

    def unravel(self, vector: Float[Array, "parameter"]) -> PyTree:
        """Return a vector in the structure of the parameters."""
        return ravel_pytree(self.parameters)[1](vector)

    def at(self, vector: Float[Array, "parameter"]) -> tuple[Any, Any]:
        """Return the family and the model at a vector of parameters, in plain arrays."""
        return Parts(self.unravel(vector), self.fixed).whole


def partition(family: Any, model: AbstractModel, learn: Learn | PyTree, owner: str) -> Parts:
    """Partition a family and a model into learned and fixed leaves.

    `Frozen` parts stay fixed. Scales of a model that is learned by name stay positive.

    Args:
        family: a family, or `None` where only the model is learned.
        model: the model.
        learn: `"family"`, `"model"`, `"both"`, or a pytree of booleans over (family, model).
        owner: the name of the caller, for messages.
    """
    chosen: Any = learn
    if isinstance(learn, str):
        if learn not in CHOICES:
            raise ValueError(
                f"{owner} expects `learn` to be 'family', 'model', 'both' or a pytree of booleans"
                f" over (family, model), got {learn!r}."
            )
        chosen = CHOICES[learn]
        model = model if learn == "family" else model.learnable()
    pair = (family, model)
    try:
        moving = jax.tree.map(
            lambda keep, part: jax.tree.map(lambda leaf: bool(keep) and leaf, part),
            chosen,
            is_learnable(pair),
        )
    except ValueError as error:
        raise ValueError(
            f"{owner} expects `learn` to be a pytree of booleans of the structure of (family,"
            " model), or of the top of it. If `fit` prepares the family, call family.prepare(model,"
            f" ys) first, and pass Optimisation(prepare=False). {error}"
        ) from error
    return Parts(*eqx.partition(pair, moving))


def is_learnable(tree: PyTree) -> PyTree:
    """Return true at each array that can be learned: of a floating type, and not `Frozen`."""

    def at(node: Any) -> Any:
        if isinstance(node, Frozen):
            return jax.tree.map(lambda _: False, node)
        return eqx.is_inexact_array(node)

    return jax.tree.map(at, tree, is_leaf=lambda node: isinstance(node, Frozen))
