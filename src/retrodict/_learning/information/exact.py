"""The observed information of a linear-Gaussian model, by two derivatives of its log-evidence."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._exact import log_evidence_of
from retrodict._learning.coordinates import Coordinates
from retrodict._model import StateSpaceModel
from retrodict._numerics import UNROLLED, in_parts
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import Scalar

DIRECTIONS = 16
"""The number of directions in which a gradient is differentiated at once."""

SERIES_AT_ONCE = 8
"""The number of series that are differentiated at once."""

MANY = 500_000
"""The number of rows times directions from which on a program is compiled with optimisation."""

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options for programs that run once: half the compilation time, and several times slower."""


def exact_information(
    coordinates: Coordinates, batch: Series
) -> tuple[Float[Array, "parameter"], Float[Array, "parameter parameter"]]:
    """Return the gradient of log p_θ(y), summed over the series, and minus its Hessian."""
    if not batch.ys.shape[0]:  # a process may hold no series
        theta = coordinates.theta()
        return jnp.zeros_like(theta), jnp.zeros((theta.size, theta.size), theta.dtype)
    work = batch.ys.shape[0] * batch.ys.shape[1] * len(coordinates.names)
    if jax.default_backend() == "cpu" and coordinates.model.state_dim > UNROLLED:
        return by_differences(coordinates, batch, log_evidence_of)
    quick = work < MANY and jax.default_backend() == "cpu"
    return (_compiled_quickly if quick else _compiled)(coordinates, batch)


def _information(
    coordinates: Coordinates, batch: Series
) -> tuple[Float[Array, "parameter"], Float[Array, "parameter parameter"]]:
    theta = coordinates.theta()

    def one(series: Series) -> tuple[Array, Array]:
        def log_evidence(theta: Array) -> Scalar:
            return log_evidence_of(unwrap(coordinates.model_at(theta)), series)

        def along(direction: Array) -> tuple[Array, Array]:
            return jax.jvp(jax.grad(log_evidence), (theta,), (direction,))

        basis = jnp.eye(theta.shape[0], dtype=theta.dtype)
        gradients, columns = in_parts(along, basis, DIRECTIONS)
        return gradients[0], -columns

    scores, information = in_parts(one, batch, SERIES_AT_ONCE)
    return jnp.sum(scores, axis=0), jnp.sum(information, axis=0)


@eqx.filter_jit
def by_differences(
    coordinates: Coordinates,
    batch: Series,
    evidence: Callable[[StateSpaceModel, Series], Scalar],
) -> tuple[Float[Array, "parameter"], Float[Array, "parameter parameter"]]:
    """Return the same by central differences of exact gradients, to eight digits in float64.

    This is for states whose factors are computed by LAPACK: a second derivative contains two such
    calls in parallel, each waits for threads of one pool, and on two cores they deadlock (observed
    with jaxlib 0.10.2). It is also for evidences other than that of the Kalman filter, whose second
    derivatives would store all steps of a series at once.

    Args:
        coordinates: the parameters.
        batch: the series.
        evidence: the log-evidence of an unwrapped model and a series.
    """
    theta = coordinates.theta()
    step = jnp.finfo(theta.dtype).eps ** (1 / 3) * jnp.maximum(1.0, jnp.abs(theta))

    def gradient(at: Array) -> Array:
        def log_evidence(theta: Array, series: Series) -> Scalar:
            return evidence(unwrap(coordinates.model_at(theta)), series)

        each = jax.lax.map(lambda series: jax.grad(log_evidence)(at, series), batch)
        return jnp.sum(each, axis=0)

    offsets = jnp.diag(step)
    points = jnp.concatenate([theta[None], theta[None] + offsets, theta[None] - offsets])
    score, *sides = jnp.split(jax.lax.map(gradient, points), [1, 1 + theta.shape[0]])
    hessian = (sides[0] - sides[1]) / (2.0 * step[:, None])
    return score[0], -0.5 * (hessian + hessian.T)


_compiled = eqx.filter_jit(_information)
_compiled_quickly = eqx.filter_jit(_information, compiler_options=QUICKLY)  # pyright: ignore[reportCallIssue]
