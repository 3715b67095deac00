"""Weighted multinomial logistic regression by damped Newton steps."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._numerics import linalg

RIDGE = 1e-5
"""The precision of the normal prior of coefficients, for features of unit variance."""

NUM_STEPS = 12
"""The number of Newton steps."""

STEP_SIZES = (1.0, 0.5, 0.1, 0.01, 0.0)
"""The fractions of a Newton step that are compared; the best one is taken."""


class LogisticRows(NamedTuple):
    """Rows of a multinomial regression of a class on features.

    Attributes:
        features: φ, with one row per observation.
        weights: the weight of each class in each row; a class that was observed once has weight 1.
    """

    features: Float[Array, "row feature"]
    weights: Float[Array, "row class"]


@eqx.filter_jit
def multinomial_regression(
    rows: LogisticRows, start: Float[Array, "class feature"]
) -> Float[Array, "class feature"]:
    """Maximise Σ_rj w_rj log softmax(θ φ_r)_j − λ/2 ‖θ‖² over θ.

    The objective is concave. The penalty keeps θ finite where the classes are separable. It holds
    for features of unit root mean square, which makes it independent of units.

    Args:
        rows: features and weights.
        start: θ at which the steps begin.
    """
    total = jnp.sum(rows.weights, axis=1)
    square = jnp.sum(total[:, None] * rows.features**2, axis=0) / jnp.sum(total)
    scale = jnp.where(square > 0, jnp.sqrt(square), 1.0)
    features, num_features = rows.features / scale[None, :], rows.features.shape[1]
    count = rows.weights.shape[1]

    def objective(theta: Array) -> Scalar:
        logs = jax.nn.log_softmax(linalg.matmul(features, theta.T), axis=1)
        return jnp.sum(rows.weights * logs) - 0.5 * RIDGE * jnp.sum(theta**2)

    def step(theta: Array, _: None) -> tuple[Array, None]:
        probabilities = jax.nn.softmax(linalg.matmul(features, theta.T), axis=1)
        residuals = rows.weights - total[:, None] * probabilities
        slope = linalg.matmul(residuals.T, features) - RIDGE * theta
        curvature = _curvature(features, probabilities, total)
        flat = curvature.reshape(count * num_features, count * num_features)
        # Adding a vector to θ of all classes changes nothing: the damping also stands for rounding.
        damping = RIDGE + 10 * jnp.finfo(flat.dtype).eps * jnp.trace(flat)
        flat = flat + damping * jnp.eye(flat.shape[0], dtype=flat.dtype)
        direction = jnp.linalg.solve(flat, slope.reshape(-1)).reshape(theta.shape)
        options = jnp.stack([theta + size * direction for size in STEP_SIZES])
        values = jnp.nan_to_num(lax.map(objective, options), nan=-jnp.inf)
        return options[jnp.argmax(values)], None

    theta, _ = lax.scan(step, start * scale[None, :], None, length=NUM_STEPS)
    return theta / scale[None, :]


def _curvature(
    features: Float[Array, "row feature"],
    probabilities: Float[Array, "row class"],
    total: Float[Array, "row"],
) -> Float[Array, "class feature class feature"]:
    """Return Σ_r w_r (diag p − p pᵀ)_jl φ φᵀ, one pair of classes at a time to save memory."""
    count = probabilities.shape[1]
    eye = jnp.eye(count, dtype=features.dtype)

    def pair(index: Array) -> Array:
        j, other = index // count, index % count
        p, q = jnp.take(probabilities, j, axis=1), jnp.take(probabilities, other, axis=1)
        weights = total * p * (eye[j, other] - q)
        return linalg.matmul((weights[:, None] * features).T, features)

    blocks = lax.map(pair, jnp.arange(count * count))
    shape = (count, count, features.shape[1], features.shape[1])
    return jnp.transpose(blocks.reshape(shape), (0, 2, 1, 3))
