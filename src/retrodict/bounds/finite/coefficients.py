"""Distances between laws on a finite space, contraction of kernels, and oscillations."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict.bounds.lipschitz import decayed_sums


def total_variation(p: Float[Array, "*shape"], q: Float[Array, "*shape"]) -> Scalar:
    """Return TV(p, q) = ½ Σ |p - q|, between 0 and 1; the c_k of H1 are twice as much.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> float(rd.bounds.total_variation(jnp.array([0.5, 0.5]), jnp.array([0.75, 0.25])))
        0.25

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

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> kernel = jnp.array([[0.75, 0.25], [0.25, 0.75]])
        >>> float(rd.bounds.dobrushin(kernel))
        0.5

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
    log_range = jnp.max(jnp.where(reached, jnp.max(log, axis=0) - jnp.min(log, axis=0), 0.0))
    theta = jnp.where(forbidden, 1.0, jnp.tanh(0.25 * diameter))
    return theta, jnp.where(forbidden, jnp.inf, jnp.exp(log_range))


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


class IncrementSizes(NamedTuple):
    """Sizes of the increments h_k(x, y): osc h_k, sup_y osc h_k(·, y), sup_x osc h_k(x, ·)."""

    both: Float[Array, "pair"]
    first: Float[Array, "pair"]
    second: Float[Array, "pair"]


def sizes_of(functional: Float[Array, "pair state state"]) -> IncrementSizes:
    """Return the three sizes of every increment."""

    def along(axis: int) -> Array:
        width = jnp.max(functional, axis=axis) - jnp.min(functional, axis=axis)
        return jnp.max(width, axis=1)

    return IncrementSizes(jax.vmap(oscillation)(functional), along(1), along(2))


def past_oscillations(contraction: Array, sizes: IncrementSizes) -> Float[Array, "time"]:
    """Return the constants u_j ≥ osc E_q[Σ_{i<j} h_i | x_j = ·] of S2, by Lemma 1.

    u_0 = 0,   u_{j+1} = δ_j u_j + min(osc h_j, o2_j + δ_j o1_j)
    """
    terms = jnp.minimum(sizes.both, sizes.second + contraction * sizes.first)
    return decayed_sums(contraction, jnp.concatenate([jnp.zeros_like(terms[:1]), terms]))


def future_oscillations(contraction: Array, sizes: IncrementSizes) -> Float[Array, "time"]:
    """Return the constants v_j ≥ osc E_φ[Σ_{i≥j} h_i | x_j = ·] of S2: u_j with time reversed.

    v_{n-1} = 0,   v_j = δ_j v_{j+1} + min(osc h_j, o1_j + δ_j o2_j)
    """
    swapped = IncrementSizes(sizes.both[::-1], sizes.second[::-1], sizes.first[::-1])
    return past_oscillations(contraction[::-1], swapped)[::-1]


def past_sums(
    kernels: Float[Array, "pair state state"], functional: Float[Array, "pair state state"]
) -> Float[Array, "time state"]:
    """Return U_0 = 0, U_{j+1}(y) = Σ_x K_j(y, x) [U_j(x) + h_j(x, y)], K_j backward in time."""

    def step(value: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        kernel, h = row
        value = jnp.sum(kernel * (value[:, None] + h).T, axis=1)
        return value, value

    zero = jnp.zeros_like(kernels[0, 0])
    _, values = jax.lax.scan(step, zero, (kernels, functional))
    return jnp.concatenate([zero[None], values])


def future_sums(
    kernels: Float[Array, "pair state state"], functional: Float[Array, "pair state state"]
) -> Float[Array, "time state"]:
    """Return V_{n-1} = 0, V_j(x) = Σ_y K_j(x, y) [h_j(x, y) + V_{j+1}(y)]: U, time reversed."""
    return past_sums(kernels[::-1], jnp.swapaxes(functional, 1, 2)[::-1])[::-1]
