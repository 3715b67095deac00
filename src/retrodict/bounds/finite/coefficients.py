"""Distances between laws on a finite space, and contraction coefficients of kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._types import Scalar


def total_variation(p: Float[Array, "*shape"], q: Float[Array, "*shape"]) -> Scalar:
    """Return TV(p, q) = ½ Σ |p - q|, between 0 and 1; the c_k of H1 are twice as much.

    Args:
        p: probabilities, of any shape: a table is the law of a pair.
        q: probabilities, of the same shape.
    """
    return jnp.minimum(0.5 * jnp.sum(jnp.abs(p - q)), 1.0)


def divergences(p: Array, q: Array) -> Array:
    """Return KL(p ‖ q) of laws in the last axis, accurate also where the two are close.

    Summed as Σ q [(1 + d) log(1 + d) - d] with d = p/q - 1: no term is negative, so that no
    terms cancel.
    """
    safe = jnp.where(q > 0, q, 1.0)
    d = (p - q) / safe
    # The series is used near 0 only; elsewhere the formula is accurate.
    near = jnp.abs(d) < 1e-3
    series = d * d * (0.5 - d / 6 + d * d / 12)
    far = jnp.where(d > -1, (1.0 + d) * jnp.log1p(jnp.where(d > -1, d, 0.0)), 0.0) - d
    terms = q * jnp.where(near, series, far)
    return jnp.sum(jnp.where(q > 0, terms, jnp.where(p > 0, jnp.inf, 0.0)), axis=-1)


def oscillation(h: Float[Array, "*shape"]) -> Scalar:
    """Return the oscillation osc(h) = max h - min h of a function, given by its values."""
    return jnp.max(h) - jnp.min(h)


def dobrushin(kernel: Float[Array, "from to"]) -> Scalar:
    """Return the Dobrushin coefficient of a Markov kernel, its contraction of oscillations.

        δ(K) = max_{x, x'} TV(K(x, ·), K(x', ·)),   osc(K f) ≤ δ(K) osc(f)

    Args:
        kernel: K(x, y), each row summing to 1.
    """

    # One row against all others at a time: a table of all pairs of rows would have S³ entries.
    def farthest(row: Array) -> Array:
        return jnp.max(jnp.sum(jnp.abs(kernel - row[None, :]), axis=1))

    return jnp.minimum(0.5 * jnp.max(jax.lax.map(farthest, kernel)), 1.0)


def birkhoff(transition: Float[Array, "from to"]) -> tuple[Scalar, Scalar]:
    """Return the contraction ϑ = tanh(Δ/4) of a transition and the ratio B, of Lemma 3.

        Δ = log max m(x, y) m(x', y') / (m(x', y) m(x, y')),   B = max m(x, y) / m(x', y)

    ϑ bounds the Dobrushin coefficients of every forward and backward smoothing kernel of this
    transition, and B the ratio β_k(x) / β_k(x'), whatever the observations. A state that is reached
    from some states and not from others makes Δ and B infinite and ϑ = 1; a state that is reached
    from no state does not count.

    Args:
        transition: m(x, y), of any scale.

    Returns:
        ϑ and B.
    """
    reached = jnp.any(transition > 0, axis=0)
    forbidden = jnp.any(reached & jnp.any(transition <= 0, axis=0))
    log = jnp.log(jnp.where(transition > 0, transition, 1.0))

    def widest(row: Array) -> Array:
        ratio = log - row[None, :]
        high = jnp.max(jnp.where(reached[None, :], ratio, -jnp.inf), axis=1)
        low = jnp.min(jnp.where(reached[None, :], ratio, jnp.inf), axis=1)
        return jnp.max(high - low)

    diameter = jnp.max(jax.lax.map(widest, log))
    spread = jnp.max(jnp.where(reached, jnp.max(log, axis=0) - jnp.min(log, axis=0), 0.0))
    theta = jnp.where(forbidden, 1.0, jnp.tanh(0.25 * diameter))
    return theta, jnp.where(forbidden, jnp.inf, jnp.exp(spread))


def tilted_distance(ratio: Float[Array, "*m"], distance: Float[Array, "*m"]) -> Float[Array, "*m"]:
    """Return the largest distance of two laws after both are reweighted (Lemma 2).

        TV(βP / Pβ, βP' / P'β) ≤ I(B, ε) = B ε / (1 + (B - 1) ε),   B ≥ max β / min β, ε = TV(P, P')

    Args:
        ratio: B, which may be infinite.
        distance: ε.
    """
    # Divided by B, so that an infinite ratio gives 1 and not a NaN.
    denominator = (1.0 - distance) / ratio + distance
    return jnp.where(distance > 0, distance / jnp.where(distance > 0, denominator, 1.0), 0.0)
