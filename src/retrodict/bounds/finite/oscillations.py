"""Oscillations of an additive functional, propagated forward and backward in time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict.bounds.finite.coefficients import oscillation


class Spread(NamedTuple):
    """Sizes of the increments h_k(x, y): osc h_k, sup_y osc h_k(·, y), sup_x osc h_k(x, ·)."""

    both: Float[Array, "pair"]
    first: Float[Array, "pair"]
    second: Float[Array, "pair"]


def spread_of(functional: Float[Array, "pair state state"]) -> Spread:
    """Return the three sizes of every increment."""

    def along(axis: int) -> Array:
        width = jnp.max(functional, axis=axis) - jnp.min(functional, axis=axis)
        return jnp.max(width, axis=1)

    return Spread(jax.vmap(oscillation)(functional), along(1), along(2))


def past_oscillations(contraction: Array, spread: Spread) -> Float[Array, "time"]:
    """Return the constants u_j ≥ osc E_q[Σ_{i<j} h_i | x_j = ·] of S2, by Lemma 1.

    u_0 = 0,   u_{j+1} = δ_j u_j + min(osc h_j, o2_j + δ_j o1_j)
    """

    def step(u: Array, row: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        delta, both, first, second = row
        u = delta * u + jnp.minimum(both, second + delta * first)
        return u, u

    zero = jnp.zeros_like(contraction[0])
    _, us = jax.lax.scan(step, zero, (contraction, spread.both, spread.first, spread.second))
    return jnp.concatenate([zero[None], us])


def future_oscillations(contraction: Array, spread: Spread) -> Float[Array, "time"]:
    """Return the constants v_j ≥ osc E_φ[Σ_{i≥j} h_i | x_j = ·] of S2: u_j with time reversed.

    v_{n-1} = 0,   v_j = δ_j v_{j+1} + min(osc h_j, o1_j + δ_j o2_j)
    """
    swapped = Spread(spread.both[::-1], spread.second[::-1], spread.first[::-1])
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
