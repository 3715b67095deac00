"""Distances between laws, or upper bounds of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import erf
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._model import Gaussian, kl_divergence
from retrodict._numerics import linalg


def gaussian_distance(p: Gaussian, q: Gaussian) -> Scalar:
    """Return W₁ of two Gaussian laws in one dimension, W₂ ≥ W₁ in more."""
    return _folded(p, q) if p.dim == 1 else bures(p, q)


def _folded(p: Gaussian, q: Gaussian) -> Scalar:
    """Return W₁ = E|Δm + Δs Z|, Z standard normal: both laws are increasing functions of one Z."""
    shift = jnp.abs(p.mean[0] - q.mean[0])
    spread = jnp.abs(jnp.abs(p.scale_tril[0, 0]) - jnp.abs(q.scale_tril[0, 0]))
    ratio = shift / jnp.where(spread > 0, spread, 1.0)
    folded = spread * np.sqrt(2 / np.pi) * jnp.exp(-0.5 * ratio**2)
    return jnp.where(spread > 0, folded + shift * erf(ratio / np.sqrt(2)), shift)


def bures(p: Gaussian, q: Gaussian) -> Scalar:
    """Return W₂, with W₂² = ‖Δm‖² + min ‖s_p − s_q U‖² over the rotations U.

    The minimum is at U = V Wᵀ where s_qᵀs_p = V D Wᵀ; this form has no difference of
    traces that cancels, and any U would give an upper bound.
    """
    spread = root_distance(p.scale_tril, q.scale_tril)
    return jnp.sqrt(jnp.sum((p.mean - q.mean) ** 2) + spread**2)


def root_distance(s: Float[Array, "d d"], t: Float[Array, "d d"]) -> Scalar:
    """Return the least ‖s − t U‖ over rotations U: W₂ of two centred Gaussian laws."""
    left, _, right = jnp.linalg.svd(linalg.matmul(t.T, s))
    rotation = jnp.matmul(left, right, precision=lax.Precision.HIGHEST)
    return jnp.linalg.norm(s - linalg.matmul(t, rotation))


def twice_total_variation(p: Gaussian, q: Gaussian) -> Scalar:
    """Return an upper bound of 2 TV = ∫|p − q|, by Pinsker: (2 KL(p ‖ q))^½, at most 2."""
    return jnp.minimum(2.0, jnp.sqrt(2.0 * jnp.maximum(kl_divergence(p, q), 0.0)))


def interval_distance(
    p: Float[Array, "point"], q: Float[Array, "point"], spacing: Float[Array, ""]
) -> Scalar:
    """Return W₁ of two laws on equally spaced points: ∫|F_p − F_q|, F the cumulative sums."""
    return spacing * jnp.sum(jnp.abs(jnp.cumsum(p - q)))


def table_distance(
    p: Float[Array, "a b"], q: Float[Array, "a b"], spacing: Float[Array, "2"]
) -> Scalar:
    """Return an upper bound of W₁ on a rectangular mesh: the cost of moving coordinates in turn.

    The first coordinate is coupled in increasing order and then, given both, the second one (a
    Knothe–Rosenblatt coupling), which costs at most the sum of the two moves. Either coordinate may
    go first; the smaller cost is returned.
    """
    return jnp.minimum(
        _in_turn(p, q, spacing[0], spacing[1]), _in_turn(p.T, q.T, spacing[1], spacing[0])
    )


def _in_turn(p: Array, q: Array, first: Array, second: Array) -> Scalar:
    mass_p, mass_q = jnp.sum(p, axis=1), jnp.sum(q, axis=1)
    top_p, top_q = jnp.cumsum(mass_p), jnp.cumsum(mass_q)
    # The increasing coupling is constant between two neighbouring levels of either distribution.
    levels = jnp.sort(jnp.concatenate([jnp.zeros(1, p.dtype), top_p, top_q]))
    widths, middles = jnp.diff(levels), 0.5 * (levels[1:] + levels[:-1])
    last = p.shape[0] - 1
    i = jnp.minimum(jnp.searchsorted(top_p, middles), last)
    j = jnp.minimum(jnp.searchsorted(top_q, middles), last)

    def conditional_cost(i: Array, j: Array) -> Array:
        here = p[i] / jnp.where(mass_p[i] > 0, mass_p[i], 1.0)
        there = q[j] / jnp.where(mass_q[j] > 0, mass_q[j], 1.0)
        return interval_distance(here, there, second)

    costs = lax.map(lambda pair: conditional_cost(*pair), (i, j), batch_size=64)
    return interval_distance(mass_p, mass_q, first) + jnp.sum(widths * costs)


def empirical_distance(xs: Float[Array, "sample"], zs: Float[Array, "sample"]) -> Scalar:
    """Return W₁ of two samples of one size, coupled in increasing order."""
    return jnp.mean(jnp.abs(jnp.sort(xs) - jnp.sort(zs)))


def sample_moments(xs: Float[Array, "sample d"]) -> Gaussian:
    """Return the Gaussian law with the mean and the covariance of a sample."""
    mean = jnp.mean(xs, axis=0)
    centred = (xs - mean[None, :]) / np.sqrt(xs.shape[0])
    covariance = jnp.matmul(centred.T, centred, precision=lax.Precision.HIGHEST)
    return Gaussian(mean, linalg.semidefinite_cholesky(covariance))


def spectral_norm(a: Float[Array, "r c"]) -> Scalar:
    """Return the largest singular value."""
    if a.shape == (1, 1):
        return jnp.abs(a[0, 0])
    return jnp.linalg.norm(a, ord=2)


norms = jax.vmap(spectral_norm)
