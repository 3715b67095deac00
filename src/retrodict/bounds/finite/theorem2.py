"""Theorem 2, which replaces Proposition 3.1 of the paper, and the proposition as printed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._types import Scalar
from retrodict.bounds.finite.oscillations import Spread
from retrodict.bounds.finite.quantities import FiniteQuantities


def sigma_ratio(quantities: FiniteQuantities) -> Scalar:
    """Return r = σ₊ / σ₋, infinite where H2 fails."""
    low = quantities.sigma_minus
    return jnp.where(low > 0, quantities.sigma_plus / jnp.where(low > 0, low, 1.0), jnp.inf)


def _scaled(values: Array, ratio: Scalar) -> Array:
    """Return the values times the ratio; infinite if it is, where 0 · ∞ would be NaN."""
    infinite = jnp.isinf(ratio)
    return jnp.where(infinite, jnp.inf, jnp.where(infinite, 1.0, ratio) * values)


class DiscountedSums(NamedTuple):
    """Discounted sums of the c_m of H1, one per increment k.

    Attributes:
        before: Σ_{m≤k} ρ^{k-m} c_m.
        after: Σ_{m≥k+2} ρ^{m-k-2} c_m.
    """

    before: Float[Array, "pair"]
    after: Float[Array, "pair"]


def discounted_sums(h1: Float[Array, "time"], rho: Scalar) -> DiscountedSums:
    """Compute both sums for all increments in one scan."""

    def step(total: Array, value: Array) -> tuple[Array, Array]:
        total = rho * total + value
        return total, total

    # The last constant enters the second sum first, with time reversed; nothing is after the last
    # increment but one.
    rows = jnp.stack([h1[:-1], jnp.concatenate([jnp.zeros_like(h1[:1]), h1[:1:-1]])], axis=1)
    _, sums = jax.lax.scan(step, jnp.zeros_like(rows[0]), rows)
    return DiscountedSums(sums[:, 0], sums[::-1, 1])


def theorem2_terms(
    h1: Array, ratio: Scalar, rho: Scalar, sums: DiscountedSums, spread: Spread
) -> Array:
    """Return the terms of Theorem 2, under H1 and H2, one per increment.

        (r / 2) osc(h_k) [Σ_{m≤k} ρ^{k-m} c_m + c_{k+1} + Σ_{m≥k+2} ρ^{m-k-2} c_m],   r = σ₊/σ₋

    An increment that depends on x_k only gains a factor ρ in the last sum, one that depends on
    x_{k+1} only gains one in the first. ρ is 1 - 1/r, or the smaller (r - 1) / (r + 1).
    """
    before = sums.before * jnp.where(spread.first > 0, 1.0, rho)
    after = sums.after * jnp.where(spread.second > 0, 1.0, rho)
    return _scaled(0.5 * spread.both * (before + h1[1:] + after), ratio)


def printed_proposition_terms(
    h1: Array, ratio: Scalar, rho: Scalar, sums: DiscountedSums, functional: Array
) -> Array:
    """Return the terms of Proposition 3.1 as printed, which do not sum to a bound if ρ < ½.

    2 r ‖h_k‖ [c_0 + Σ_{1≤m≤k} ρ^{k-m+1} c_m + c_{k+1} + Σ_{m≥k+2} ρ^{m-k-1} c_m], ρ = 1 - 1/r.
    """
    norms = jnp.max(jnp.abs(functional), axis=(1, 2))
    start = h1[0] * rho ** jnp.arange(len(norms))
    before = h1[0] + rho * (sums.before - start)
    return _scaled(2.0 * norms * (before + h1[1:] + rho * sums.after), ratio)


def final_display(h1: Array, ratio: Scalar, functional: Array) -> Scalar:
    """Return 4 r (1 + ρ / (1 - ρ)) c₊ h_∞ (n - 1), ρ = 1 - 1/r, so that the constant is 4 r²."""
    total = jnp.max(h1) * jnp.max(jnp.abs(functional)) * functional.shape[0]
    return _scaled(4.0 * total, ratio**2)
