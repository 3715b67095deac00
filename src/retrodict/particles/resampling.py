"""Resampling schemes.

Each scheme draws `num_draws` indices whose expected counts are proportional to the weights, in
increasing order. With all of them the estimate of the evidence is unbiased.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from retrodict._arrays import PRNGKey

Particles: TypeAlias = Float[Array, "particle state"]
Weights: TypeAlias = Float[Array, "particle"]
Ancestors: TypeAlias = Int[Array, "particle"]
Draws: TypeAlias = Int[Array, "draw"]

Scheme: TypeAlias = Literal["systematic", "stratified", "residual", "multinomial"]
"""One uniform for all, one in each stratum, deterministic parts first, or independent draws."""

Resampler: TypeAlias = Callable[..., Draws]

_ROW = 32
"""The length of the rows in which a long vector is summed."""


def check_scheme(scheme: str) -> None:
    """Refuse an unknown scheme."""
    if scheme not in get_args(Scheme):
        names = ", ".join(repr(name) for name in get_args(Scheme))
        raise ValueError(f"resampling must be one of {names}, got {scheme!r}.")


def check_threshold(threshold: float) -> None:
    """Refuse a threshold outside of (0, 1]."""
    if not 0 < threshold <= 1:
        raise ValueError(f"`threshold` must be in (0, 1], got {threshold}.")


def resample(scheme: Scheme, key: PRNGKey, weights: Weights, num_draws: int) -> Draws:
    """Draw indices by one of the schemes, in increasing order.

    Args:
        scheme: which one.
        key: a typed key.
        weights: positive numbers, not all zero; they need not sum to one.
        num_draws: the number of indices.
    """
    return _SCHEMES[scheme](key, weights, num_draws)


def systematic(key: PRNGKey, weights: Weights, num_draws: int) -> Draws:
    """Draw at positions (i + u)/M with one uniform u for all."""
    u = jax.random.uniform(key, (), weights.dtype)
    sums = cumulative(weights)
    # Offspring are counted from the number of positions below each cumulative weight, without a
    # search.
    before = jnp.ceil(num_draws * (sums / sums[-1]) - u)
    return _from_counts(jnp.clip(before, 0, num_draws), num_draws)


def stratified(key: PRNGKey, weights: Weights, num_draws: int) -> Draws:
    """Draw at positions (i + u_i)/M with one uniform u_i per stratum."""
    u = jax.random.uniform(key, (num_draws,), weights.dtype)
    return inverse(cumulative(weights), (jnp.arange(num_draws) + u) / num_draws)


def multinomial(key: PRNGKey, weights: Weights, num_draws: int) -> Draws:
    """Draw at independent positions, in order, as normalised sums of exponential variables."""
    gaps = cumulative(jax.random.exponential(key, (num_draws + 1,), weights.dtype))
    return inverse(cumulative(weights), gaps[:-1] / gaps[-1])


def residual(key: PRNGKey, weights: Weights, num_draws: int) -> Draws:
    """Copy each particle ⌊M w⌋ times, and draw the rest independently from the remainders."""
    expected = num_draws * weights / jnp.sum(weights)
    # An integer that rounding has left just below itself counts as an integer.
    copies = jnp.floor(expected * (1.0 + 8.0 * jnp.finfo(weights.dtype).eps))
    fixed = cumulative(copies)
    rest = jnp.maximum(expected - copies, 0.0)
    # Without a remainder the draws are not used.
    draws = multinomial(key, jnp.where(jnp.sum(rest) > 0, rest, weights), num_draws)
    slots = jnp.arange(num_draws)
    num_fixed = jnp.round(fixed[-1]).astype(slots.dtype)
    # A prefix of ordered draws would favour low indices: permute them.
    key = jax.random.fold_in(key, 1)
    draws = jax.random.permutation(key, draws)
    copied = _from_counts(jnp.clip(jnp.round(fixed), 0, num_draws), num_draws)
    return jnp.sort(jnp.where(slots < num_fixed, copied, draws[slots - num_fixed]))


_SCHEMES: dict[str, Resampler] = {
    "systematic": systematic,
    "stratified": stratified,
    "residual": residual,
    "multinomial": multinomial,
}


def uniforms(key: PRNGKey, shape: tuple[int, ...], dtype: Any) -> Float[Array, "..."]:
    """Draw uniform variables on a lattice of 2⁻³² (2⁻²³ in single precision), inside (0, 1).

    They take half the bits, and half the time, of `jax.random.uniform` in double precision. No
    probability changes by more than the spacing of the lattice.
    """
    return lattice(jax.random.bits(key, shape, jnp.uint32), dtype)


def lattice(bits: UInt32[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Return the points of the lattice of `uniforms` that random bits stand for."""
    num_bits = 32 if dtype == jnp.float64 else 23
    return ((bits >> (32 - num_bits)).astype(dtype) + 0.5) * 2.0**-num_bits


def inverse(sums: Weights, positions: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return the first index whose share of the cumulative weights exceeds each position."""
    # Below the total, the first sum that exceeds a position is that of a particle with weight.
    total = sums[-1]
    values = jnp.minimum(positions * total, jnp.nextafter(total, jnp.zeros_like(total)))
    # A search by halves, as `jnp.searchsorted`, whose checks of bounds take half of its time.
    num_halvings = (sums.shape[0] - 1).bit_length()
    padded = jnp.pad(sums, (0, 2**num_halvings - sums.shape[0]), constant_values=jnp.inf)

    def halve(i: Array, index: Array) -> Array:
        step = jnp.int32(2**num_halvings) >> (i + 1)
        last = padded.at[index + step - 1].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )
        return index + jnp.where(last <= values, step, 0)

    start = jnp.zeros(values.shape, jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_halvings), halve, start)


def cumulative(values: Float[Array, "entry"]) -> Float[Array, "entry"]:
    """Return cumulative sums, within rows and then over rows: two small products."""
    n = values.shape[0]
    num_rows = -(-n // _ROW)
    rows = jnp.pad(values, (0, num_rows * _ROW - n)).reshape(num_rows, _ROW)
    upper = jnp.triu(jnp.ones((_ROW, _ROW), values.dtype))
    within = jnp.matmul(rows, upper, precision="highest")
    before = jnp.cumsum(within[:, -1]) - within[:, -1]
    sums = (within + before[:, None]).reshape(-1)[:n]
    # Rounding may make a sum smaller than the one before it, or larger where zero is added. The
    # associative scan takes half the time of `lax.cummax` on CPU.
    sums = jnp.where(values > 0, sums, -jnp.inf)
    return jnp.maximum(jax.lax.associative_scan(jnp.maximum, sums), 0.0)


def _from_counts(before: Weights, num_draws: int) -> Draws:
    """Return the index at each slot, from the number of slots before the end of each particle."""
    marks = jnp.zeros(num_draws, jnp.int32).at[before.astype(jnp.int32)].add(1, mode="drop")
    return jnp.minimum(jnp.cumsum(marks, dtype=jnp.int32), before.shape[0] - 1)
