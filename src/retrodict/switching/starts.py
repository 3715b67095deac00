"""Random starts for learning switching models."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, Scalar
from retrodict._learning import ModelCoordinates, coordinates_of
from retrodict._model import Series, unwrap
from retrodict.switching.evidence import smooth_any
from retrodict.switching.finite_moments import regime_moments
from retrodict.switching.model import SwitchingModel
from retrodict.switching.newton import MAX_PARAMETERS, newton_steps

LARGEST = 3.0
"""Logits and the logarithms of scales move by this many units at most."""

SIZE = 1.0
"""Parameters move by a normal draw of this many units."""

NUM_CANDIDATES = 24
"""Each start is the best of this many candidates."""

ROUNDS = ((6, 6), (14, 1))
"""Numbers of iterations of EM, and of candidates that continue after them."""


def random_starts(
    key: PRNGKey, model: SwitchingModel, batch: Series, count: int
) -> list[SwitchingModel]:
    """Return models whose parameters are moved at random from those of a model.

    Parameters are learned in unconstrained coordinates. The unit of a coordinate is the move that
    changes the log-evidence per row by about ½, from its curvature at the model. Each start is the
    best of several candidates after a few iterations of EM (Biernacki, Celeux and Govaert 2003);
    of a model with a continuous state, the best without iterations.

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
    units = _units(coordinates, batch)
    noise = jax.random.normal(key, (count, NUM_CANDIDATES, theta.shape[0]), theta.dtype)
    small = model.is_finite and theta.shape[0] <= MAX_PARAMETERS
    rounds = ROUNDS if small else ((0, 1),)
    candidates = theta[None, None] + SIZE * units[None, None] * noise
    return [coordinates.model_at(_best(coordinates, each, batch, rounds)) for each in candidates]


@eqx.filter_jit
def _best(
    coordinates: ModelCoordinates,
    candidates: Float[Array, "candidate parameter"],
    batch: Series,
    rounds: tuple[tuple[int, int], ...],
) -> Float[Array, "parameter"]:
    """Return the candidate that is best after some iterations of EM; few of them get the later."""

    def iterate(theta: Array, _: None) -> tuple[Array, None]:
        at = coordinates.moved(theta)
        moments = regime_moments(unwrap(at.model), batch)[0]
        new = newton_steps(at, batch, moments.probabilities, moments.pairs).theta()
        return jnp.where(jnp.all(jnp.isfinite(new)), new, theta), None

    def improved(theta: Array, num_iterations: int) -> tuple[Array, Array]:
        if num_iterations:
            theta, _ = jax.lax.scan(iterate, theta, None, length=num_iterations)
        value = _evidence(unwrap(coordinates.model_at(theta)), batch)
        return theta, jnp.where(jnp.isfinite(value), value, -jnp.inf)

    for num_iterations, count in rounds:
        candidates, values = jax.vmap(lambda theta, i=num_iterations: improved(theta, i))(
            candidates
        )
        candidates = candidates[jax.lax.top_k(values, count)[1]]
    return candidates[0]


def _evidence(model: SwitchingModel, batch: Series) -> Scalar:
    return jnp.sum(jax.vmap(lambda series: smooth_any(model, series).log_evidence)(batch))


@eqx.filter_jit
def _units(coordinates: ModelCoordinates, batch: Series) -> Float[Array, "parameter"]:
    """Return 1 / √curvature of the log-evidence per row along each coordinate."""
    rows = batch.ys.shape[0] * batch.ys.shape[1]

    def loss(theta: Float[Array, "parameter"]) -> Scalar:
        return -_evidence(unwrap(coordinates.model_at(theta)), batch) / rows

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
