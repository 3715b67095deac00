"""Gaussian steps on covariances: cheaper than steps on scales, where covariances are precise.

A covariance has an error of ε times the square of the coordinates from which it is computed. Narrow
directions are lost in it: after precise observations, and where states nearly depend on each other.
`factor_if_precise` finds out from the result whether this has happened.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._numerics import linalg
from retrodict._numerics.standard import narrowness


def propagate(
    covariance: Float[Array, "d d"], weight: Float[Array, "e d"], noise: Float[Array, "e k"]
) -> Float[Array, "e e"]:
    """Return w P wᵀ + s sᵀ."""
    return linalg.matmul(linalg.matmul(weight, covariance), weight.T) + linalg.outer_gram(noise)


def condition_covariance(
    covariance: Float[Array, "d d"], design: Float[Array, "p d"]
) -> Float[Array, "d d"]:
    """Return P − P Hᵀ (H P Hᵀ + I)⁻¹ H P, of x given H x + ε with standard normal ε."""
    products = linalg.matmul(design, covariance)
    eye = jnp.eye(design.shape[0], dtype=design.dtype)
    root = linalg.cholesky(linalg.matmul(products, design.T) + eye)
    whitened = linalg.solve_triangular(root, products)
    return covariance - linalg.matmul(whitened.T, whitened)


def factor_if_precise(
    before: Float[Array, "time d d"],
    weight: Float[Array, "*steps e d"],
    noise: Float[Array, "*rows e k"],
    after: Float[Array, "time e e"],
) -> tuple[Float[Array, "time e e"], Bool[Array, ""]]:
    """Factor covariances, and return whether each step is precise to ε^(3/4) in every direction.

    The terms of (w P wᵀ + s sᵀ)_ii are at most t_i = (Σ_j |w_ij| √P_jj)² + (s sᵀ)_ii, so that the
    covariance after a step has errors of ε √(t_i t_j). Its narrowest direction has at least the
    share `narrowness` of its coordinates. Errors of earlier steps do not grow relative to the
    covariances, but add up as long as a filter does not forget.

    Args:
        before: the covariances before each step.
        weight: w, of each step or of all.
        noise: s, of each step or of all.
        after: the covariances after each step.
    """
    scales = jnp.tril(lax.linalg.cholesky(after, symmetrize_input=False))
    variances, kept = (jnp.diagonal(p, axis1=-2, axis2=-1) for p in (before, after))
    weights, noises = (
        jnp.broadcast_to(jnp.abs(part), (len(after), *part.shape[-2:])) for part in (weight, noise)
    )
    terms = jax.vmap(linalg.matvec)(weights, jnp.sqrt(variances)) ** 2
    shares = jnp.min(kept / (terms + jnp.sum(noises**2, axis=-1)), axis=-1)
    return scales, jnp.all(shares * narrowness(scales) > linalg.smallest_share(after.dtype))
