"""The learnable parameters of a model as one vector of unconstrained numbers."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._learning.partition import is_learnable
from retrodict._model import (
    UNBOUNDED,
    AbstractConstrained,
    AbstractParameter,
    PositiveTril,
    StationaryCoefficients,
)


class ModelCoordinates(eqx.Module):
    """The map from a vector θ to a model, whose other leaves are fixed.

    Attributes:
        model: the model, with scales as parameters that stay positive.
        places: for each floating array of the model, which of its entries are learned.
        names: the name of each coordinate of θ, such as `"transition.weight[0,0]"`.
        edges: the ends of the domain of each parameter, (0, ∞) for a scale.
    """

    model: Any
    places: tuple[Int[Array, "_"], ...]
    names: tuple[str, ...] = eqx.field(static=True)
    edges: tuple[tuple[float, float], ...] = eqx.field(static=True)

    @property
    def is_scale(self) -> Bool[np.ndarray, "parameter"]:
        """Which parameters are scales."""
        return np.array([edge == (0.0, math.inf) for edge in self.edges], bool)

    def theta(self) -> Float[Array, "parameter"]:
        """Return the coordinates of the model."""
        return _coordinates(eqx.filter(self.model, eqx.is_inexact_array), self.places)

    def model_at(self, theta: Float[Array, "parameter"]) -> Any:
        """Return the model with these coordinates."""
        arrays = eqx.filter(self.model, eqx.is_inexact_array)
        leaves, structure = jax.tree.flatten(arrays)
        moved, start = [], 0
        for leaf, place in zip(leaves, self.places, strict=True):
            part = theta[start : start + place.shape[0]].astype(leaf.dtype)
            moved.append(leaf.ravel().at[place].set(part).reshape(leaf.shape))
            start += place.shape[0]
        return eqx.combine(jax.tree.unflatten(structure, moved), self.model)

    def moved(self, theta: Float[Array, "parameter"]) -> "ModelCoordinates":
        """Return the same coordinates for the model at θ."""
        return ModelCoordinates(self.model_at(theta), self.places, self.names, self.edges)

    def beside(
        self, theta: Float[Array, "parameter"], step: Float[Array, "parameter"]
    ) -> Float[Array, "parameter"]:
        """Return θ plus a step, which scales take in their logarithm: units do not matter."""
        scale = jax.nn.softplus(theta)
        moved = scale * jnp.exp(step * jax.nn.sigmoid(theta) / scale)
        raw = moved + jnp.log(-jnp.expm1(-moved))
        # A zero step of a scale that underflows would give NaN.
        return jnp.where(self.is_scale & (step != 0), raw, theta + step)

    def values_at(self, theta: Float[Array, "parameter"]) -> dict[str, PyTree]:
        """Return the values of the learned parameters, each in its domain, by name."""
        nodes = jax.tree_util.tree_leaves_with_path(self.model_at(theta), is_leaf=_is_parameter)
        return {
            _name(path): node.value if _is_parameter(node) else node
            for path, node in nodes
            if any(np.any(leaf) for leaf in jax.tree.leaves(_learned_entries(node)))
        }


@jax.jit
def _coordinates(arrays: PyTree, places: tuple[Array, ...]) -> Float[Array, "parameter"]:
    leaves = jax.tree.leaves(arrays)
    return jnp.concatenate([leaf.ravel()[at] for leaf, at in zip(leaves, places, strict=True)])


def coordinates_of(model: Any) -> ModelCoordinates:
    """Return the coordinates of the parameters that `fit` and `fit_evidence` learn."""
    model = model.learnable()
    moving = jax.tree.leaves(_learned_entries(model))
    leaves = jax.tree_util.tree_leaves_with_path(model)
    owners = dict(jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_constrained))
    places, names, edges = [], [], []
    for (path, leaf), chosen in zip(leaves, moving, strict=True):
        if not eqx.is_inexact_array(leaf):
            continue
        place = np.flatnonzero(chosen)
        places.append(jnp.asarray(place))
        owner = owners.get(path[:-1])
        # Partial autocorrelations are not the coefficients that are computed from them.
        has_own_name = owner is None or isinstance(owner, StationaryCoefficients)
        name = _name(path) if has_own_name else _name(path[:-1])
        for entry in np.argwhere(chosen).tolist():
            names.append(name + (f"[{','.join(map(str, entry))}]" if entry else ""))
            edges.append(UNBOUNDED if owner is None else owner.domain(tuple(entry)))
    return ModelCoordinates(model, tuple(places), tuple(names), tuple(edges))


def _learned_entries(tree: PyTree) -> PyTree:
    """Return a pytree of booleans of the same structure: the entries that are learned."""

    def at(node: Any, learned: PyTree) -> PyTree:
        if isinstance(node, PositiveTril):
            # The parameter ignores the entries above the diagonal.
            return jax.tree.map(lambda leaf, ok: np.tril(np.full(leaf.shape, ok)), node, learned)
        return np.full(np.shape(node), learned)

    return jax.tree.map(
        at, tree, is_learnable(tree), is_leaf=lambda node: isinstance(node, PositiveTril)
    )


def _is_constrained(node: Any) -> bool:
    return isinstance(node, AbstractConstrained)


def _is_parameter(node: Any) -> bool:
    return isinstance(node, AbstractParameter)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path).removeprefix(".")
