"""The observed information of a linear-Gaussian model, by two derivatives of its log-evidence."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._information.coordinates import Coordinates, in_parts
from retrodict._kalman import smooth_series
from retrodict._mask import Series
from retrodict._parameters import unwrap
from retrodict._types import Scalar

DIRECTIONS = 16
"""In how many directions a gradient is differentiated at once."""

SERIES_AT_ONCE = 8
"""How many series are held at once."""


@eqx.filter_jit
def exact_information(
    coordinates: Coordinates, batch: Series
) -> tuple[Float[Array, "parameter"], Float[Array, "parameter parameter"]]:
    """The gradient of log p_θ(y), summed over the series, and minus its Hessian."""
    theta = coordinates.theta()

    def one(series: Series) -> tuple[Array, Array]:
        def log_evidence(theta: Array) -> Scalar:
            return smooth_series(unwrap(coordinates.model_at(theta)), series, False).log_evidence

        def along(direction: Array) -> tuple[Array, Array]:
            return jax.jvp(jax.grad(log_evidence), (theta,), (direction,))

        basis = jnp.eye(theta.shape[0], dtype=theta.dtype)
        gradients, columns = in_parts(along, basis, DIRECTIONS)
        return gradients[0], -columns

    scores, information = in_parts(one, batch, SERIES_AT_ONCE)
    return jnp.sum(scores, axis=0), jnp.sum(information, axis=0)
