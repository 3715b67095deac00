"""Resampling: which particles have offspring, and how many.

Each scheme draws `num_draws` indices whose expected counts are proportional to the weights, in
increasing order. All of them leave the estimate of the evidence unbiased.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._types import PRNGKey

Scheme: TypeAlias = Literal["systematic", "stratified", "residual", "multinomial"]
"""One uniform for all, one in each stratum, deterministic parts first, or independent draws."""

Resampler: TypeAlias = Callable[..., Int[Array, "draw"]]

_ROW = 32
"""The length of the rows in which a long vector is summed up."""


def check_scheme(scheme: str) -> None:
    """Refuses the name of no scheme."""
    if scheme not in get_args(Scheme):
        names = ", ".join(repr(name) for name in get_args(Scheme))
        raise ValueError(f"resampling must be one of {names}, got {scheme!r}.")


def check_threshold(threshold: float) -> float:
    """The share of the particles below which a filter resamples, refused unless in (0, 1]."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], got {threshold}.")
    return float(threshold)


def resample(
    scheme: Scheme, key: PRNGKey, weights: Float[Array, "particle"], num_draws: int
) -> Int[Array, "draw"]:
    """Indices drawn by one of the schemes, in increasing order.

    Args:
        scheme: which one.
        key: a typed key.
        weights: positive numbers, not all zero; they need not sum to one.
        num_draws: how many indices.
    """
    return _SCHEMES[scheme](key, weights, num_draws)


def systematic(
    key: PRNGKey, weights: Float[Array, "particle"], num_draws: int
) -> Int[Array, "draw"]:
    """Positions (i + u)/M with one uniform u for all."""
    u = jax.random.uniform(key, (), weights.dtype)
    sums = cumulative(weights)
    # The number of positions below each cumulative weight, from which offspring are counted: the
    # positions need not be searched for.
    before = jnp.ceil(num_draws * (sums / sums[-1]) - u)
    return _from_counts(jnp.clip(before, 0, num_draws), num_draws)


def stratified(
    key: PRNGKey, weights: Float[Array, "particle"], num_draws: int
) -> Int[Array, "draw"]:
    """Positions (i + u_i)/M with a uniform u_i of its own in each stratum."""
    u = jax.random.uniform(key, (num_draws,), weights.dtype)
    return inverse(cumulative(weights), (jnp.arange(num_draws) + u) / num_draws)


def multinomial(
    key: PRNGKey, weights: Float[Array, "particle"], num_draws: int
) -> Int[Array, "draw"]:
    """Independent positions, drawn in order as normalised sums of exponential variables."""
    gaps = cumulative(jax.random.exponential(key, (num_draws + 1,), weights.dtype))
    return inverse(cumulative(weights), gaps[:-1] / gaps[-1])


def residual(key: PRNGKey, weights: Float[Array, "particle"], num_draws: int) -> Int[Array, "draw"]:
    """⌊M w⌋ copies of each particle, and independent draws from what remains."""
    expected = num_draws * weights / jnp.sum(weights)
    # A whole number that rounding has left just below itself is still whole.
    copies = jnp.floor(expected * (1.0 + 8.0 * jnp.finfo(weights.dtype).eps))
    fixed = cumulative(copies)
    rest = jnp.maximum(expected - copies, 0.0)
    # Weights that leave no remainder have nothing to draw from; their draws are not looked at.
    drawn = multinomial(key, jnp.where(jnp.sum(rest) > 0, rest, weights), num_draws)
    slots = jnp.arange(num_draws)
    num_fixed = jnp.round(fixed[-1]).astype(slots.dtype)
    # An unordered subset of ordered draws would favour low indices: they are spread evenly.
    key = jax.random.fold_in(key, 1)
    drawn = jax.random.permutation(key, drawn)
    copied = _from_counts(jnp.clip(jnp.round(fixed), 0, num_draws), num_draws)
    return jnp.sort(jnp.where(slots < num_fixed, copied, drawn[slots - num_fixed]))


_SCHEMES: dict[str, Resampler] = {
    "systematic": systematic,
    "stratified": stratified,
    "residual": residual,
    "multinomial": multinomial,
}


def uniforms(key: PRNGKey, shape: tuple[int, ...], dtype: Any) -> Float[Array, "..."]:
    """Uniform variables on a lattice of 2⁻³² (2⁻²³ in single precision), inside (0, 1).

    They take half the bits, and half the time, of `jax.random.uniform` in double precision. No
    probability moves by more than the spacing of the lattice.
    """
    bits = jax.random.bits(key, shape, jnp.uint32)
    kept = 32 if dtype == jnp.float64 else 23
    return ((bits >> (32 - kept)).astype(dtype) + 0.5) * 2.0**-kept


def independent(
    key: PRNGKey, sums: Float[Array, "particle"], shape: tuple[int, ...]
) -> Int[Array, "..."]:
    """Independent indices of any shape and in no order, from cumulative weights."""
    return inverse(sums, uniforms(key, shape, sums.dtype))


def inverse(
    sums: Float[Array, "particle"], positions: Float[Array, "*shape"]
) -> Int[Array, "*shape"]:
    """The first index whose share of the cumulative weights exceeds each position in [0, 1]."""
    # Below the total, the first sum that exceeds a position is that of a particle with weight.
    total = sums[-1]
    values = jnp.minimum(positions * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.searchsorted(sums, values, side="right").astype(jnp.int32)


def cumulative(values: Float[Array, "entry"]) -> Float[Array, "entry"]:
    """Cumulative sums, within rows and then over rows: two small products on CPU and GPU."""
    n = values.shape[0]
    num_rows = -(-n // _ROW)
    rows = jnp.pad(values, (0, num_rows * _ROW - n)).reshape(num_rows, _ROW)
    upper = jnp.triu(jnp.ones((_ROW, _ROW), values.dtype))
    within = jnp.matmul(rows, upper, precision="highest")
    before = jnp.cumsum(within[:, -1]) - within[:, -1]
    sums = (within + before[:, None]).reshape(-1)[:n]
    # Rounding may make a sum fall short of the one before it, or grow where nothing is added.
    return jnp.maximum(jax.lax.cummax(jnp.where(values > 0, sums, -jnp.inf)), 0.0)


def _from_counts(before: Float[Array, "particle"], num_draws: int) -> Int[Array, "draw"]:
    """The index at each of the slots, from how many slots lie before the end of each particle."""
    marks = jnp.zeros(num_draws, before.dtype).at[before.astype(jnp.int32)].add(1.0, mode="drop")
    found = jnp.round(cumulative(marks)).astype(jnp.int32)
    return jnp.minimum(found, before.shape[0] - 1)
