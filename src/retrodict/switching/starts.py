"""Random starts for learning switching models.

If the emission can be regressed, each regime starts from a window of the data. All other parameters
are moved at random, by as much as changes the evidence noticeably.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, Scalar
from retrodict._learning import ModelCoordinates, coordinates_of
from retrodict._model import Series, unwrap
from retrodict.switching.evidence import smooth_any
from retrodict.switching.model import SwitchingModel

LARGEST = 3.0
"""Logits and the logarithms of scales move by this many units at most."""

SIZE = 1.0
"""Parameters move by a normal draw of this many units."""


def random_starts(
    key: PRNGKey, model: SwitchingModel, batch: Series, count: int
) -> list[SwitchingModel]:
    """Return models whose parameters are moved at random from those of a model.

    Parameters are learned in unconstrained coordinates. The unit of a coordinate is the move that
    changes the log-evidence per row by about ½, from its curvature at the model.

    Args:
        key: a typed key.
        model: the model to start from, with its parameters wrapped.
        batch: the data.
        count: the number of starts.
    """
    if count < 1:
        return []
    coordinates = coordinates_of(model)
    theta = coordinates.theta()
    if not theta.size:
        return [model] * count
    # A chance move first, since regimes that start equal have no slope that separates them.
    units = _units(coordinates, batch)
    noise = SIZE * jax.random.normal(key, (count, theta.shape[0]), theta.dtype)
    return [coordinates.model_at(theta + units * row) for row in noise]


@eqx.filter_jit
def _units(coordinates: ModelCoordinates, batch: Series) -> Float[Array, "parameter"]:
    """Return 1 / √curvature of the log-evidence per row along each coordinate."""
    rows = batch.ys.shape[0] * batch.ys.shape[1]

    def loss(theta: Float[Array, "parameter"]) -> Scalar:
        model = unwrap(coordinates.model_at(theta))
        return -jnp.sum(jax.vmap(lambda s: smooth_any(model, s).log_evidence)(batch)) / rows

    theta = coordinates.theta()
    slope = jax.grad(loss)
    count = theta.shape[0]
    step = 1e-3 * jnp.maximum(jnp.abs(theta), 1.0)
    directions = jnp.eye(count, dtype=theta.dtype) * step[:, None]
    moved = jax.lax.map(lambda move: slope(theta + move) - slope(theta - move), directions)
    curvature = jnp.abs(jnp.diagonal(moved)) / (2.0 * step)
    units = 1.0 / jnp.sqrt(jnp.maximum(curvature, 1e-12))
    pairs = zip(coordinates.names, coordinates.edges, strict=True)
    bounded = jnp.asarray([_is_relative(name) or math.isfinite(end) for name, (_, end) in pairs])
    bounded = bounded | jnp.asarray(coordinates.is_scale)
    units = jnp.where(bounded, jnp.minimum(units, LARGEST), units)
    # Coordinates without effect on the evidence, such as forbidden transitions, stay.
    return jnp.where(curvature > 1e-10, units, 0.0)


def _is_relative(name: str) -> bool:
    """Return whether a coordinate is a logit, whose unit does not depend on that of the data."""
    return "logits" in name
