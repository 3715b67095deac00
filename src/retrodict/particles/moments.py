"""Moments and diagnostics of weighted states, and status codes, which pass through `jax.jit`."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from retrodict._arrays import Scalar, check_count, is_concrete
from retrodict._expectations import AbstractFunctional

FINE, IMPOSSIBLE, UNDEFINED, DEGENERATE = 0, 1, 2, 3

FEW = 10
"""The least number of particles at each time through which paths must go."""

_WORDS = {
    IMPOSSIBLE: "no particle has a positive weight at time {time}: the observation there is"
    " impossible, or so unlikely that all weights vanish, under every state that was drawn. Check"
    " that row, use more particles, or a proposal that uses the data",
    UNDEFINED: "the log weight of some particle is NaN or +inf at time {time}. Check that the"
    " densities of the model (and of the proposal) are finite there",
    DEGENERATE: f"paths go through fewer than {FEW} particles at time {{time}}. Use more particles,"
    " or a proposal that uses the data",
}


def status_words(status: Any, time: Any) -> str:
    """Describe a status that is not fine."""
    return _WORDS[int(np.asarray(status))].format(time=int(np.asarray(time)))


def status_of(
    impossible: Bool[Array, "time"], undefined: Bool[Array, "time"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the status of a filter, and the first time at which it was not fine."""
    codes = jnp.where(undefined, UNDEFINED, jnp.where(impossible, IMPOSSIBLE, FINE))
    time = jnp.argmax(codes != FINE)
    return codes[time], jnp.where(codes[time] == FINE, -1, time)


def refuse_failure(owner: str, status: Any, time: Any, strict: bool) -> None:
    """Raise an error if a filter failed and its status is known, as outside of `jax.jit`."""
    if strict and is_concrete(status) and int(np.asarray(status)) in (IMPOSSIBLE, UNDEFINED):
        raise FloatingPointError(
            f"{owner}: {status_words(status, time)}. Pass strict=False to get the result with its"
            " status instead."
        )


def check_single(particles: Array) -> None:
    """Refuse particles of a batch of series, whose axes would be misread."""
    if particles.ndim != 3:
        raise ValueError(
            f"This result holds a batch of series: its particles have shape {particles.shape},"
            " where one series has (time, particle, state). Read it under jax.vmap, for example"
            " jax.vmap(lambda posterior: posterior.mean)(posteriors)."
        )


def check_functional(functional: Any, owner: str = "expectation") -> None:
    """Refuse an object that is not a functional."""
    if not isinstance(functional, AbstractFunctional):
        raise TypeError(
            f"{owner} expects a functional, such as StateSum() or AdditiveFunctional(fn), got"
            f" {type(functional).__name__}."
        )


class AbstractWeightedStates(eqx.Module):
    """A law of the states of each time, as weighted states."""

    @abstractmethod
    def _weighted(
        self,
    ) -> tuple[Float[Array, "time particle state"], Float[Array, "time particle"]]:
        """Return the states of each time, and their normalised log weights."""

    @property
    def mean(self) -> Float[Array, "time state"]:
        """The means."""
        states, log_weights = self._weighted()
        return jnp.einsum("tp,tps->ts", jnp.exp(log_weights), states, precision="highest")

    @property
    def covariance(self) -> Float[Array, "time state state"]:
        """The covariances."""
        states, log_weights = self._weighted()
        centred = states - self.mean[:, None]
        return jnp.einsum(
            "tp,tpa,tpb->tab", jnp.exp(log_weights), centred, centred, precision="highest"
        )


def weighted_quantile(
    particles: Float[Array, "time particle state"],
    log_weights: Float[Array, "time particle"],
    probability: float,
) -> Float[Array, "time state"]:
    """Return the least value with at least this probability at or below it, per coordinate."""
    check_probability(probability)

    def one(values: Array, weights: Array) -> Array:
        order = jnp.argsort(values)
        sums = jnp.cumsum(weights[order])
        place = jnp.searchsorted(sums, probability * sums[-1], side="left")
        return values[order][jnp.minimum(place, values.shape[0] - 1)]

    per_coordinate = jax.vmap(one, in_axes=(1, None))
    return jax.vmap(per_coordinate)(particles, jnp.exp(log_weights))


def num_lineages(ancestors: Int[Array, "time particle"]) -> Int[Array, "time"]:
    """Count the particles of each time that have offspring at the last time."""
    count = ancestors.shape[1]
    here = jnp.arange(count, dtype=ancestors.dtype)

    def back(places: Array, parents: Array) -> tuple[Array, Array]:
        return parents[places], num_distinct(places, count)

    places, counts = lax.scan(back, here, ancestors[1:], reverse=True)
    return jnp.concatenate([num_distinct(places, count)[None], counts])


def num_distinct(indices: Int[Array, "entry"], count: int) -> Int[Array, ""]:
    """Count the distinct indices below `count`."""
    return jnp.sum(jnp.zeros(count, jnp.int32).at[indices].set(1))


def log_evidence_error(posterior: Any, lag: int, order: slice = slice(None)) -> Scalar:
    """Return the standard error of a log-evidence, estimated from the clouds of one run.

    With D_p(i) the weight at time e = min(p + lag, n-1) of the descendants of particle i of time p,
    generation p adds Σ_i D_p(i)² − Σ_i D_{p+1}(i)² to the variance, both at the same time e, and
    the last generation adds Σ_i w_i² − 1/N. If offspring are drawn independently, shares differ by
    chance even between equal particles: that part, (1 − Σ_i D_p(i)²)/(N − 1), is subtracted (Lee
    and Whiteley 2018).

    Args:
        posterior: clouds, with `particles`, `log_weights`, `ancestors` and `resampling`.
        lag: the number of steps after which shares are compared.
        order: the order in which times were visited.
    """
    lag = check_count(lag, "lag")
    check_single(posterior.particles)
    ancestors, log_weights = posterior.ancestors[order], posterior.log_weights[order]
    n, count = log_weights.shape
    lag = min(lag, n - 1)
    ends = jnp.minimum(jnp.arange(n) + lag, n - 1)

    def of_generation(time: Array, end: Array) -> Array:
        """Return the contribution of the generation of `time`, from shares at `end`."""

        def back(k: Array, places: tuple[Array, Array]) -> tuple[Array, Array]:
            here, later = places
            at = end - k
            return ancestors[at][here], here

        start = jnp.arange(count, dtype=ancestors.dtype)
        here, later = lax.fori_loop(0, end - time, back, (start, start))
        weights = jnp.exp(log_weights[end])

        def squares(places: Array) -> Array:
            return jnp.sum(jnp.zeros(count, weights.dtype).at[places].add(weights) ** 2)

        total, last = squares(here), end == time
        added = total - jnp.where(last, 1.0 / count, squares(later))
        if posterior.resampling != "multinomial" or count == 1:
            return added
        renewed = jnp.any(ancestors[jnp.minimum(time + 1, n - 1)] != start)
        return added - jnp.where(renewed & ~last, (1.0 - total) / (count - 1), 0.0)

    added = lax.map(lambda at: of_generation(*at), (jnp.arange(n), ends))
    return jnp.sqrt(jnp.maximum(jnp.sum(added), 0.0))


def check_probability(probability: float) -> None:
    """Refuse a number outside of [0, 1]."""
    if not 0 <= probability <= 1:
        raise ValueError(f"`probability` must be between 0 and 1, got {probability}.")
