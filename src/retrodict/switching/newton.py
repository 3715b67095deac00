"""The M-step of hidden Markov models without a closed form, by damped Newton steps.

Parameters that tie regimes or rows, such as those of a mean-adjusted autoregression, leave no
regression to solve. There are few of them, so that the Hessian of the expected log joint density is
cheap beside the E-step.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._learning import ModelCoordinates
from retrodict._model import Series, unwrap
from retrodict._numerics import linalg
from retrodict.switching.model import SwitchingModel, emission_table, log_transitions

MAX_PARAMETERS = 300
"""The largest number of parameters for which a Hessian is computed."""

NUM_STEPS = 1
"""The number of Newton steps per M-step: the next E-step changes the target anyway."""

NUM_HALVINGS = 12
"""A Newton step is halved up to this many times, and left out if none of them is better."""

FLAT = 1e-6
"""Curvatures below this fraction of the largest one count as this fraction of it."""


def check_size(coordinates: ModelCoordinates) -> None:
    """Refuse a Hessian of more parameters than is reasonable."""
    count = len(coordinates.names)
    if count > MAX_PARAMETERS:
        raise ValueError(
            f"The M-step of this model has no closed form, and {count} parameters are too many for"
            f" Newton steps (at most {MAX_PARAMETERS}). Use switching.fit_evidence."
        )


@eqx.filter_jit
def newton_steps(
    coordinates: ModelCoordinates,
    batch: Series,
    probabilities: Float[Array, "batch time regime"],
    pairs: Float[Array, "batch step regime regime"],
) -> ModelCoordinates:
    """Raise the expected log joint density by a few damped Newton steps; it never decreases.

    Args:
        coordinates: the parameters of the model.
        batch: the series.
        probabilities: P(z_k = j), zero where there is no row.
        pairs: P(z_{k-1} = i, z_k = j), zero where there is no row.
    """
    scale = 1.0 / jnp.sum(probabilities)

    def loss(theta: Float[Array, "parameter"]) -> Scalar:
        model = unwrap(coordinates.model_at(theta))
        return -scale * expected_log_joint(model, batch, probabilities, pairs)

    def step(theta: Array, _: Any) -> tuple[Array, None]:
        slope, curvature = jax.grad(loss)(theta), jax.hessian(loss)(theta)
        values, vectors = jnp.linalg.eigh(0.5 * (curvature + curvature.T))
        sizes = jnp.abs(values)
        sizes = jnp.maximum(sizes, FLAT * jnp.max(sizes))
        move = -linalg.matvec(vectors, linalg.matvec(vectors.T, slope) / sizes)
        shares = jnp.append(0.5 ** jnp.arange(NUM_HALVINGS), 0.0).astype(theta.dtype)
        losses = jax.lax.map(lambda share: loss(theta + share * move), shares)
        best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
        # A step of zero leaves the parameters, whatever the move holds.
        return jnp.where(shares[best] > 0, theta + shares[best] * move, theta), None

    theta, _ = jax.lax.scan(step, coordinates.theta(), None, length=NUM_STEPS)
    return coordinates.moved(theta)


def expected_log_joint(
    model: SwitchingModel,
    batch: Series,
    probabilities: Float[Array, "batch time regime"],
    pairs: Float[Array, "batch step regime regime"],
) -> Scalar:
    """Return E[log p(z, y)] of an unwrapped model under given laws of the regimes."""

    def one(series: Series, probability: Array, pair: Array) -> Scalar:
        initial = jnp.sum(probability[0] * model.regimes.log_initial())
        if model.regimes.takes_input:
            moves = jnp.sum(pair * log_transitions(model, series))
        else:
            moves = jnp.sum(jnp.sum(pair, axis=0) * model.regimes.log_transition())
        return initial + moves + jnp.sum(probability * emission_table(model, series))

    return jnp.sum(jax.vmap(one)(batch, probabilities, pairs))
