"""Samplers of the FFBSi weights: draw the particle of time k-1 that precedes a state of time k."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from retrodict._arrays import PRNGKey, check_count
from retrodict.particles.backward_weights import BackwardWeights, by_products, squared_distance
from retrodict.particles.power_of_two import LOG2_E, power_of_two
from retrodict.particles.resampling import (
    Particles,
    Weights,
    cumulative,
    inverse,
    lattice,
    uniforms,
)

Indices: TypeAlias = Int[Array, "sample"]
Samples: TypeAlias = Float[Array, "sample state"]
Shares: TypeAlias = Float[Array, "sample"]
MoveBits: TypeAlias = UInt32[Array, "2 move sample"]

FAN = 16
"""The number of particles, and then of groups, that are summed into one group."""

MAX_TILE = 2**22
"""The largest number of group sums in memory; more paths are processed in chunks."""

REST = 64
"""The number of rejected paths that the exact sampler draws at once."""


class AbstractBackwardSampler(eqx.Module):
    """A sampler of the backward kernel.

    Example:
        Exact draws, with a matrix of all weights in memory:

        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> class Dense(rd.particles.AbstractBackwardSampler):
        ...     def draw(self, key, pairs, log_weights, xs, ancestors):
        ...         log2_weights = pairs.log2_weights(log_weights / jnp.log(2.0), pairs.prepare(xs))
        ...         indices = jax.random.categorical(key, jnp.log(2.0) * log2_weights, axis=0)
        ...         return indices.astype(ancestors.dtype)
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> rd.ffbsi(jax.random.key(0), model, ys, 100, 50, backward=Dense()).samples.shape
        (50, 3, 1)
    """

    @abstractmethod
    def draw(
        self,
        key: PRNGKey,
        pairs: BackwardWeights,
        log_weights: Weights,
        xs: Samples,
        ancestors: Indices,
    ) -> Indices:
        """Draw one index per state.

        Args:
            key: a typed key.
            pairs: the transition from the particles of time k-1; reversed, that to the particles
                of time k from states of time k-1.
            log_weights: the normalised log weights of the particles.
            xs: the states.
            ancestors: the particles from which these states descend.
        """


class ExactBackward(AbstractBackwardSampler):
    """An exact sampler that weighs every particle for every path.

    It evaluates N·M densities per step, and holds N·M/16 values in memory.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> backward = rd.particles.ExactBackward()
        >>> rd.ffbsi(jax.random.key(0), model, ys, 100, 50, backward=backward).samples.shape
        (50, 3, 1)
    """

    def draw(
        self,
        key: PRNGKey,
        pairs: BackwardWeights,
        log_weights: Weights,
        xs: Samples,
        ancestors: Indices,
    ) -> Indices:
        """Draw independently from the backward kernel."""
        shares = jax.random.uniform(key, (xs.shape[0],), xs.dtype)
        prepared = pairs.prepare(xs)
        log_weights = LOG2_E * log_weights
        count, num_paths = log_weights.shape[0], xs.shape[0]
        # Only group sums are in memory where distances fuse into them.
        share = FAN if pairs.whitened and not by_products(pairs.particles) else 1
        chunk = max(1, MAX_TILE * share // count)

        def draw_chunk(rows: tuple[Array, Array, Array]) -> Array:
            prepared, shares, ancestors = rows
            if pairs.whitened:
                return _by_distance(pairs.particles, log_weights, prepared, shares, ancestors)
            return _by_matrix(pairs.log2_weights(log_weights, prepared), shares, ancestors)

        rows = (prepared, shares, ancestors)
        return draw_chunk(rows) if num_paths <= chunk else _in_chunks(draw_chunk, rows, chunk)


class MCMCBackward(AbstractBackwardSampler):
    """A sampler by a few Metropolis moves from the true ancestor, at linear cost (Dau and Chopin).

    A move proposes particle i with probability w_{k-1}^i and accepts it with the ratio of
    transition densities. The start is a draw from the law that the moves leave invariant, given the
    filter's past, so that the samples are consistent after any number of moves. With more moves,
    paths share fewer particles.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> backward = rd.particles.MCMCBackward(num_moves=3)
        >>> rd.ffbsi(jax.random.key(0), model, ys, 100, 50, backward=backward).samples.shape
        (50, 3, 1)

    Args:
        num_moves: the number of moves.
    """

    num_moves: int = eqx.field(static=True, default=2)

    def __check_init__(self) -> None:
        check_count(self.num_moves, "num_moves")

    def draw(
        self,
        key: PRNGKey,
        pairs: BackwardWeights,
        log_weights: Weights,
        xs: Samples,
        ancestors: Indices,
    ) -> Indices:
        """Return the ancestors after the moves."""
        return self.move(self.bits(key, xs.shape[0]), pairs, log_weights, xs, ancestors)

    def bits(self, key: PRNGKey, num_paths: int) -> MoveBits:
        """Draw the random bits of all moves of a step."""
        return jax.random.bits(key, (2, self.num_moves, num_paths), jnp.uint32)

    def move(
        self,
        bits: MoveBits,
        pairs: BackwardWeights,
        log_weights: Weights,
        xs: Samples,
        ancestors: Indices,
    ) -> Indices:
        """Return the ancestors after the moves with given random bits."""
        sums = cumulative(jnp.exp(log_weights))
        prepared = pairs.prepare(xs)
        at, value = ancestors, pairs.each(ancestors, prepared)
        # Proposals do not depend on the current particle: those of all moves are drawn at once.
        positions, levels = lattice(bits, xs.dtype)
        proposals = inverse(sums, positions)
        news = jax.vmap(pairs.each, in_axes=(0, None))(proposals, prepared)
        # Logarithms are compared: XLA repeats a polynomial such as `power_of_two` for each use of
        # its result, and so for each further move.
        for proposed, new, log2_level in zip(proposals, news, jnp.log2(levels), strict=True):
            accepted = log2_level < new - value
            at = jnp.where(accepted, proposed, at)
            value = jnp.where(accepted, new, value)
        return at


class RejectionBackward(AbstractBackwardSampler):
    """A sampler by rejection from the filter's weights, with exact draws for rejected paths.

    The draws have the exact law, as those of `ExactBackward`. Where the transition density is a
    large share of its bound, the cost is linear in the number of paths.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> backward = rd.particles.RejectionBackward(max_trials=4)
        >>> rd.ffbsi(jax.random.key(0), model, ys, 100, 50, backward=backward).samples.shape
        (50, 3, 1)

    Args:
        max_trials: the number of trials before the remaining paths are drawn exactly.
        log_bound: an upper bound of log m, for transitions that are not Gaussian with one scale.
    """

    max_trials: int = eqx.field(static=True, default=8)
    log_bound: float | None = None

    def __check_init__(self) -> None:
        check_count(self.max_trials, "max_trials")

    def draw(
        self,
        key: PRNGKey,
        pairs: BackwardWeights,
        log_weights: Weights,
        xs: Samples,
        ancestors: Indices,
    ) -> Indices:
        """Draw independently from the backward kernel."""
        bound = 0.0 if pairs.whitened else self.log_bound
        if bound is None:
            raise ValueError(
                "Rejection needs an upper bound of the transition density, which a"
                f" {type(pairs.kernel).__name__} does not give. Pass"
                " RejectionBackward(log_bound=...), or use MCMCBackward() or ExactBackward()."
            )
        bound = LOG2_E * bound
        prepared, count = pairs.prepare(xs), xs.shape[0]
        sums = cumulative(jnp.exp(log_weights))
        trial_key, rest_key = jax.random.split(key)

        def unfinished(state: tuple[Array, Array, Array]) -> Array:
            trial, _, open_paths = state
            return (trial < self.max_trials) & jnp.any(open_paths)

        def attempt(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            trial, chosen, open_paths = state
            first, second = jax.random.split(jax.random.fold_in(trial_key, trial))
            proposed = inverse(sums, uniforms(first, (count,), sums.dtype))
            level = uniforms(second, (count,), xs.dtype)
            ratio = power_of_two(pairs.each(proposed, prepared) - bound)
            taken = open_paths & (level < ratio)
            return trial + 1, jnp.where(taken, proposed, chosen), open_paths & ~taken

        start = (jnp.zeros((), jnp.int32), ancestors, jnp.ones(count, bool))
        _, chosen, open_paths = lax.while_loop(unfinished, attempt, start)

        def finish(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            turn, chosen, open_paths = state
            places = jnp.nonzero(open_paths, size=min(REST, count), fill_value=count)[0]
            rows = jnp.minimum(places, count - 1)
            exact = ExactBackward().draw(
                jax.random.fold_in(rest_key, turn), pairs, log_weights, xs[rows], ancestors[rows]
            )
            return (
                turn + 1,
                chosen.at[places].set(exact, mode="drop"),
                open_paths.at[places].set(False, mode="drop"),
            )

        start = (jnp.zeros((), jnp.int32), chosen, open_paths)
        return lax.while_loop(lambda state: jnp.any(state[2]), finish, start)[1]


class Genealogy(AbstractBackwardSampler):
    """A sampler that returns the ancestors: paths of the filter, which coalesce in the past.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> backward = rd.particles.Genealogy()
        >>> rd.ffbsi(jax.random.key(0), model, ys, 100, 50, backward=backward).samples.shape
        (50, 3, 1)
    """

    def draw(
        self,
        key: PRNGKey,
        pairs: BackwardWeights,
        log_weights: Weights,
        xs: Samples,
        ancestors: Indices,
    ) -> Indices:
        """Return the ancestors."""
        return ancestors


def draws_by_step(
    sampler: AbstractBackwardSampler, keys: Key[Array, "step"], num_paths: int
) -> tuple[Callable[..., Indices], PyTree]:
    """Return a function that draws as `sampler.draw` does, and its first argument for each step.

    A scan over 1,000 paths takes most of its time to generate random bits, by many small operations
    per step. They do not depend on the paths, so that they can be generated for all steps at once.
    """
    if isinstance(sampler, MCMCBackward):
        return sampler.move, jax.vmap(lambda key: sampler.bits(key, num_paths))(keys)
    return sampler.draw, keys


def check_sampler(sampler: Any, owner: str) -> None:
    """Refuse an object that is not a backward sampler."""
    if not isinstance(sampler, AbstractBackwardSampler):
        raise TypeError(
            f"{owner} expects a backward sampler, such as ExactBackward() or MCMCBackward(), got"
            f" {type(sampler).__name__}."
        )


def _by_distance(
    befores: Particles, log_weights: Weights, prepared: Samples, shares: Shares, ancestors: Indices
) -> Indices:
    """Draw exactly where log₂ m is minus a squared distance, without a table of all pairs.

    Weights are summed in groups of `FAN` inside one fused loop, groups in groups of groups. A draw
    descends from the top, and weighs the particles of its last group again. Weights are relative to
    that of the path's ancestor, whose density is positive by construction, so that they neither all
    underflow nor overflow: they are at most `top` above it.
    """
    limit = 0.5 * jnp.finfo(prepared.dtype).maxexp
    top = jnp.max(log_weights)
    ancestral = log_weights[ancestors] - jnp.sum((befores[ancestors] - prepared) ** 2, axis=-1)
    shift = jnp.maximum(ancestral, top - limit)
    count, d = befores.shape
    num_groups = -(-count // FAN)
    missing = num_groups * FAN - count
    grouped = jnp.pad(befores, ((0, missing), (0, 0)), mode="edge").reshape(num_groups, FAN, d)
    in_groups = jnp.pad(log_weights, (0, missing), constant_values=-jnp.inf)
    in_groups = in_groups.reshape(num_groups, FAN)
    sums = jnp.zeros((num_groups, prepared.shape[0]), prepared.dtype)
    all_distances = squared_distance(grouped, prepared) if by_products(grouped) else None
    for j in range(FAN):
        distance = (
            squared_distance(grouped[:, j], prepared)
            if all_distances is None
            else all_distances[:, j]
        )
        sums = sums + power_of_two(in_groups[:, j, None] - distance - shift[None])
    group, rest = descend(sums, shares)
    members = jnp.moveaxis(grouped[group], 0, 1)
    distances = jnp.sum((members - prepared[None]) ** 2, axis=-1)
    weights = power_of_two(in_groups[group].T - distances - shift[None])
    place, _ = _pick(weights, rest)
    chosen = jnp.minimum(group * FAN + place, count - 1)
    # A state so far from every particle that all weights vanish keeps its ancestor: in single
    # precision that is some 15 standard deviations of the noise, in double 40.
    return jnp.where(rest >= 0, chosen, ancestors).astype(ancestors.dtype)


def _by_matrix(
    log_weights: Float[Array, "particle sample"], shares: Shares, ancestors: Indices
) -> Indices:
    """Draw exactly from the unnormalised log₂ weights of all pairs."""
    top = jnp.max(log_weights, axis=0)
    weights = power_of_two(log_weights - jnp.where(jnp.isfinite(top), top, 0.0)[None])
    chosen, rest = descend(weights, shares)
    return jnp.where(rest >= 0, chosen, ancestors).astype(ancestors.dtype)


def descend(weights: Float[Array, "entry sample"], shares: Shares) -> tuple[Indices, Shares]:
    """Return the entry at a given share of each column's sum, and the remainder within that entry.

    Sums of sums are built up to a few groups, and searched from the top. The remainder is −1 for a
    column whose weights are all zero.
    """
    levels = [weights]
    while levels[-1].shape[0] > FAN:
        below = levels[-1]
        num_groups = -(-below.shape[0] // FAN)
        padded = jnp.pad(below, ((0, num_groups * FAN - below.shape[0]), (0, 0)))
        levels.append(jnp.sum(padded.reshape(num_groups, FAN, -1), axis=1))
    total = jnp.sum(levels[-1], axis=0)
    place, rest = _pick(levels[-1], shares * total)
    columns = jnp.arange(weights.shape[1])
    for level in reversed(levels[:-1]):
        rows = place[None, :] * FAN + jnp.arange(FAN)[:, None]
        inside = rows < level.shape[0]
        values = level[jnp.minimum(rows, level.shape[0] - 1), columns[None, :]]
        chosen, rest = _pick(jnp.where(inside, values, 0.0), rest)
        place = place * FAN + chosen
    return place, jnp.where(total > 0, rest, -1.0)


def _pick(weights: Float[Array, "entry sample"], rest: Shares) -> tuple[Indices, Shares]:
    """Return the entry that contains a given partial sum of each column, and the remainder in it.

    If rounding puts the partial sum past the end, the entry is the last one with weight.
    """
    place = jnp.zeros(rest.shape, jnp.int32)
    before = jnp.zeros_like(rest)
    running = jnp.zeros_like(rest)
    for j in range(weights.shape[0]):
        here = (weights[j] > 0) & (rest >= running)
        place = jnp.where(here, j, place)
        before = jnp.where(here, running, before)
        running = running + weights[j]
    return place, jnp.maximum(rest - before, 0.0)


def _in_chunks(fn: Any, arrays: tuple[Array, ...], chunk: int) -> Array:
    """Apply a function to chunks of the leading axis in turn."""
    count = arrays[0].shape[0]
    num_chunks = -(-count // chunk)

    def split(array: Array) -> Array:
        padding = [(0, num_chunks * chunk - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding, mode="edge").reshape(num_chunks, chunk, *array.shape[1:])

    return lax.map(fn, tuple(split(array) for array in arrays)).reshape(-1)[:count]
