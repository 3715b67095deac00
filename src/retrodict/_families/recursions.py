"""The recurrence of families whose state is a Gaussian law that has a density."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from retrodict._exact import Prior, TransitionArrays, Whitened, filter_laws
from retrodict._model import Gaussian, LinearGaussianKernel
from retrodict._numerics import (
    gram,
    inverse_cholesky,
    inverse_of_upper_factor,
    linalg,
    nonsingular_law,
    shared_product,
)
from retrodict.distributed import Parallel


class GaussianState(NamedTuple):
    """The state of a family whose recurrence is a Gaussian law.

    Attributes:
        mean: m, the mean of q_k; of the prior before the first row.
        scale: s, its lower Cholesky factor.
        num_read: the number of rows that were read.
    """

    mean: Float[Array, "*time d"]
    scale: Float[Array, "*time d d"]
    num_read: Int[Array, "*time"]


def prior_state(prior: Gaussian) -> GaussianState:
    """Return the state before the first row."""
    return GaussianState(prior.mean, prior.scale_tril, jnp.zeros((), jnp.int32))


def predicted(
    state: GaussianState, kernel: LinearGaussianKernel
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """Return the law of the next state: the prior at the first row, its image later on.

    Returns:
        Its mean, and the lower factor of its covariance.
    """
    mean, covariance = _predicted_moments(state, kernel)
    return mean, linalg.cholesky(covariance)


def predicted_whitener(
    state: GaussianState, kernel: LinearGaussianKernel
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """Return the law of the next state as its mean and the lower k with kᵀk its precision."""
    mean, covariance = _predicted_moments(state, kernel)
    return mean, inverse_cholesky(covariance)


def _predicted_moments(
    state: GaussianState, kernel: LinearGaussianKernel
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """Return the moments of w x + b + q ε for x of law N(m, s sᵀ); those of x at the first row."""
    first = state.num_read == 0
    mean = jnp.where(first, state.mean, linalg.matvec(kernel.weight, state.mean) + kernel.bias)
    moved = shared_product(kernel.weight, state.scale)
    moved = jnp.where(first, state.scale, moved)
    noise = jnp.where(first, 0.0, linalg.outer_gram(kernel.scale_tril))
    return mean, gram(moved) + noise


def from_natural(
    precision_mean: Float[Array, "d"], *roots: Float[Array, "d d"]
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """Return the mean and lower factor of the law with Λ = Σ r rᵀ, from Λ m and the roots r."""
    scale = inverse_of_upper_factor(gram(*roots))
    return linalg.matvec(scale, linalg.matvec(scale.T, precision_mean)), scale


def reverse(
    mean: Float[Array, "d"], scale: Float[Array, "d d"], kernel: LinearGaussianKernel
) -> tuple[Float[Array, "d d"], Float[Array, "d"], Float[Array, "d d"]]:
    """Return the gain, the offset and the scale of a transition reversed under N(m, s sᵀ)."""
    return nonsingular_law.reverse(mean, scale, kernel.weight, kernel.bias, kernel.scale_tril)


def filtered_in_parallel(
    prior: GaussianState,
    kernel: LinearGaussianKernel,
    design: Float[Array, "time p d"],
    value: Float[Array, "time p"],
    exists: Bool[Array, "time"] | None,
    parallel: Parallel,
) -> GaussianState:
    """Return the states after every row by an associative scan.

    Args:
        prior: the state before the first row.
        kernel: the transition, the same at all times or with a row for each; the first is not used.
        design: h of each row.
        value: the observed value of h x + ε of each row.
        exists: which rows exist.
        parallel: a mesh to run over several devices; `True` for one.
    """
    varies = kernel.bias.ndim == 2
    arrays = (kernel.weight, kernel.bias, kernel.scale_tril)
    transition = TransitionArrays(*(leaf[1:] if varies else leaf for leaf in arrays))
    means, scales = filter_laws(
        Prior(prior.mean, prior.scale), transition, Whitened(design, value), exists, parallel
    )
    counts = jnp.arange(1, value.shape[0] + 1, dtype=prior.num_read.dtype)
    return GaussianState(means, scales, counts)
