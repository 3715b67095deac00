"""The log densities of one row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._families import Row
from retrodict._model import StateSpaceModel
from retrodict._types import Scalar, State
from retrodict.online.sensitivity import Reading


def log_initial(model: StateSpaceModel, x: State) -> Scalar:
    """Return the log density log χ(x_0)."""
    return jnp.sum(jnp.asarray(model.prior.log_prob(x)))


def log_emission(model: StateSpaceModel, x: State, row: Row) -> Scalar:
    """Return the log density log g(x_k, y_k) of the observed entries."""
    kernel = model.emission
    return kernel.log_prob(x, row.y, row.u, row.seen)


def log_transition(model: StateSpaceModel, before: State, x: State, row: Row) -> Scalar:
    """Return the log density log m(x_{k-1}, x_k)."""
    kernel = model.transition
    return kernel.log_prob(before, x, row.u)


def first_terms(
    reading: Reading, xs: Float[Array, "sample state"]
) -> tuple[Float[Array, "sample"], Float[Array, "sample parameter"]]:
    """Return log χ g_0 of the first row at some states, and its derivative in θ."""
    _, model = reading.parts.whole

    def joint(model: StateSpaceModel, x: State) -> Scalar:
        return log_initial(model, x) + log_emission(model, x, reading.row)

    slopes = jax.vmap(lambda x: reading.gradient(lambda family, model, read: joint(model, x)))(xs)
    return jax.vmap(lambda x: joint(model, x))(xs), slopes
