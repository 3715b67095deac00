"""Reduction of the N K successors of N particles to N, without bias of any weight."""

import math
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, Scalar
from retrodict.particles import Scheme, check_scheme, cumulative, resample

Reduction: TypeAlias = Literal["optimal"] | Scheme
"""How N of the N K successors are kept."""

Successors: TypeAlias = Float[Array, "particle regime"]
"""Log weights of the successors of all particles."""


def check_reduction(resampling: str) -> None:
    """Refuse an unknown reduction."""
    if resampling == "optimal":
        return
    try:
        check_scheme(resampling)
    except ValueError as error:
        names = ", ".join(repr(name) for name in ("optimal", *get_args(Scheme)))
        raise ValueError(f"resampling must be one of {names}, got {resampling!r}.") from error


def effective_size(log_weights: Float[Array, "..."]) -> Scalar:
    """Return the effective sample size 1/Σ W²."""
    return 1.0 / jnp.sum(jnp.exp(2.0 * log_weights))


def reduce_successors(
    key: PRNGKey, log_weights: Successors, resampling: Reduction, threshold: float
) -> tuple[Int[Array, "particle"], Int[Array, "particle"], Float[Array, "particle"]]:
    """Return the particle and the regime of N of the N K successors, and their log weights.

    Successors are ordered by their regime first, and hence by the latest regimes of their path.
    Neighbours then have similar laws of x_k, and systematic positions are spread over all laws.
    Ordered by particle first, the weights have the period K: if those of the successors of one
    particle sum to about 1/N, the same regime is drawn for all particles.
    """
    count = log_weights.shape[0]
    flat = log_weights.T.reshape(-1)

    def split(places: Array, log_kept: Array) -> tuple[Array, Array, Array]:
        places = places.astype(jnp.int32)
        return places % count, places // count, log_kept

    if resampling == "optimal":
        return split(*keep_optimally(key, flat, count))
    scheme: Scheme = resampling

    def renewed() -> tuple[Array, Array, Array]:
        equal = jnp.full(count, -math.log(count), flat.dtype)
        return split(resample(scheme, key, jnp.exp(flat), count), equal)

    def continued() -> tuple[Array, Array, Array]:
        regimes = jax.random.categorical(key, log_weights, axis=1).astype(jnp.int32)
        return jnp.arange(count, dtype=jnp.int32), regimes, jax.nn.logsumexp(log_weights, axis=1)

    return lax.cond(effective_size(log_weights) < threshold * count, renewed, continued)


def keep_optimally(
    key: PRNGKey, log_weights: Float[Array, "entry"], num_kept: int
) -> tuple[Int[Array, "kept"], Float[Array, "kept"]]:
    """Keep distinct entries without bias: each weight keeps its expectation (Fearnhead, Clifford).

    Entries of weight w ≥ c are kept as they are, and others with probability w/c and the weight c,
    by systematic sampling, where c solves Σ min(1, w/c) = N. If no more than N weights are
    positive, all of them are kept.

    Args:
        key: a typed key.
        log_weights: normalised log weights.
        num_kept: the number N of entries to keep.

    Returns:
        The indices, in increasing order, and their log weights. Unused places at the end have no
        weight.
    """
    weights = jnp.exp(log_weights)
    level = _level(weights, num_kept)
    heavy = (weights >= level) & (weights > 0)
    rest = jnp.where(heavy, 0.0, weights)
    num_rest = num_kept - jnp.sum(heavy)
    sums = cumulative(rest)
    total = jnp.where(sums[-1] > 0, sums[-1], 1.0)
    u = jax.random.uniform(key, (), weights.dtype)
    # The number of the positions i + u below the end of each entry.
    below = jnp.clip(jnp.ceil(num_rest * (sums / total) - u), 0, num_rest)
    drawn = (jnp.diff(below, prepend=0.0) > 0) & (rest > 0)
    kept = heavy | drawn
    (places,) = jnp.nonzero(kept, size=num_kept, fill_value=0)
    log_kept = jnp.where(heavy, log_weights, jnp.log(level))[places]
    used = jnp.arange(num_kept) < jnp.sum(kept)
    log_kept = jnp.where(used, log_kept, -jnp.inf)
    return places, log_kept - jax.nn.logsumexp(log_kept)


def _level(weights: Float[Array, "entry"], num_kept: int) -> Scalar:
    """Return the c with Σ min(1, w/c) = N; zero if no more than N weights are positive.

    From above, c ← Σ_{w<c} w / (N − #{w ≥ c}) decreases to the solution. The number of weights at
    or above c increases, so that it ends.
    """

    def heavy(level: Scalar) -> Array:
        return (weights >= level) & (weights > 0)

    def lower(state: tuple) -> tuple:
        level, _, count = state
        rest = jnp.sum(jnp.where(heavy(level), 0.0, weights))
        room = jnp.maximum(num_kept - count, 1).astype(weights.dtype)
        level = jnp.where(count < num_kept, rest / room, 0.0)
        return level, count, jnp.sum(heavy(level))

    level = jnp.sum(weights) / num_kept
    start = (level, jnp.zeros((), int), jnp.sum(heavy(level)))
    return lax.while_loop(lambda state: state[2] > state[1], lower, start)[0]
