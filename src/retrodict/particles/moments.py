"""Moments, quantiles and variance estimates from weighted particles and from paths."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._expectations import AbstractFunctional, add
from retrodict._numerics import linalg
from retrodict._types import Scalar


def weighted_moments(
    particles: Float[Array, "time particle state"], log_weights: Float[Array, "time particle"]
) -> tuple[Float[Array, "time state"], Float[Array, "time state state"]]:
    """Compute means and covariances at each time."""
    weights = jnp.exp(log_weights)
    mean = jnp.einsum("tp,tps->ts", weights, particles, precision="highest")
    centred = particles - mean[:, None]
    covariance = jnp.einsum("tp,tpa,tpb->tab", weights, centred, centred, precision="highest")
    return mean, covariance


def weighted_quantile(
    particles: Float[Array, "time particle state"],
    log_weights: Float[Array, "time particle"],
    probability: float,
) -> Float[Array, "time state"]:
    """Return the least value with at least this probability at or below it, per coordinate."""
    _check_probability(probability)

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


def log_evidence_variance(
    ancestors: Int[Array, "time particle"],
    log_weights: Float[Array, "time particle"],
    lag: int,
    independent: bool,
) -> Scalar:
    """Estimate the variance of the log-evidence; see `ParticleFilterPosterior`.

    With D_p(i) the weight at time e = min(p + lag, n-1) of the descendants of particle i of time p,
    generation p adds Σ_i D_p(i)² − Σ_i D_{p+1}(i)², both at the same time e, and the last
    generation adds Σ_i w_i² − 1/N. If offspring are drawn independently, shares differ by chance
    even between equal particles: that part, (1 − Σ_i D_p(i)²)/(N − 1), is subtracted (Lee and
    Whiteley 2018).

    Args:
        ancestors: the index of each particle at the time before.
        log_weights: normalised log weights.
        lag: the number of steps after which shares are compared.
        independent: whether resampling is multinomial.
    """
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
        if not independent or count == 1:
            return added
        renewed = jnp.any(ancestors[jnp.minimum(time + 1, n - 1)] != start)
        return added - jnp.where(renewed & ~last, (1.0 - total) / (count - 1), 0.0)

    added = lax.map(lambda at: of_generation(*at), (jnp.arange(n), ends))
    return jnp.maximum(jnp.sum(added), 0.0)


def path_moments(
    samples: Float[Array, "sample time state"],
) -> tuple[Float[Array, "time state"], Float[Array, "time state state"]]:
    """Compute means and covariances of paths at each time."""
    mean = jnp.mean(samples, axis=0)
    centred = jnp.swapaxes(samples - mean[None], 0, 1)
    covariance = jax.vmap(lambda c: linalg.matmul(c.T, c))(centred) / samples.shape[0]
    return mean, covariance


def path_quantile(
    samples: Float[Array, "sample time state"], probability: float
) -> Float[Array, "time state"]:
    """Return the quantile of each coordinate of paths of equal weight, at each time."""
    _check_probability(probability)
    return jnp.quantile(samples, probability, axis=0)


def _check_probability(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"`probability` must be between 0 and 1, got {probability}.")


@eqx.filter_jit
def path_expectation(
    functional: AbstractFunctional,
    samples: Float[Array, "sample time state"],
    indices: Int[Array, "time sample"],
    num_particles: int,
    data: PyTree,
    length: Int[Array, ""] | None,
) -> tuple[PyTree, PyTree]:
    """Return the mean of a functional over paths through particles, and its standard error.

    Args:
        functional: the functional.
        samples: paths of equal weight.
        indices: the particle through which each path goes at each time.
        num_particles: the number of particles.
        data: a pytree with one row per time step.
        length: the number of rows that exist; `None` if all of them do.
    """
    values = path_values(functional, samples, data, length)
    variances = path_variance(values, indices, num_particles, _exists(samples, length))
    return (
        jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), values),
        jax.tree.map(jnp.sqrt, variances),
    )


def path_values(
    functional: AbstractFunctional,
    samples: Float[Array, "sample time state"],
    data: PyTree,
    length: Int[Array, ""] | None,
) -> PyTree:
    """Return the values of a functional along paths, over the rows that exist."""
    exists = _exists(samples, length)
    return jax.vmap(lambda path: _value_along(functional, path, data, exists))(samples)


def _exists(
    samples: Float[Array, "sample time state"], length: Int[Array, ""] | None
) -> Bool[Array, "time"] | None:
    return None if length is None else jnp.arange(samples.shape[1]) < length


def _value_along(
    functional: AbstractFunctional,
    path: Float[Array, "time state"],
    data: PyTree,
    exists: Bool[Array, "time"] | None,
) -> PyTree:
    """Return the value of a functional along one path, over the rows that exist."""
    first = functional.initial(path[0], jax.tree.map(lambda leaf: leaf[0], data))

    def more(total: PyTree, at: tuple) -> tuple[PyTree, None]:
        before, x, row, real = at
        value = functional.increment(before, x, row)
        if real is not None:
            value = jax.tree.map(lambda leaf: jnp.where(real, leaf, 0), value)
        return add([total, value]), None

    later = jax.tree.map(lambda leaf: leaf[1:], (data, exists))
    return lax.scan(more, first, (path[:-1], path[1:], *later))[0]


def path_variance(
    values: PyTree,
    indices: Int[Array, "time sample"],
    num_particles: int,
    exists: Bool[Array, "time"] | None,
) -> PyTree:
    """Estimate the variance of the mean of a functional over backward paths, from one run.

    Given the filter, paths are independent draws, which adds s²/M. The contribution of the filter's
    particles is estimated from paths that share one: with c the centred values, generation p adds

        Σ_{a ≠ b, same particle at time p} c_a c_b / M²,

    an unbiased estimate of the sum over its particles of squared influences on the mean.

    Args:
        values: a pytree with a leading axis `sample`.
        indices: the particle through which each path goes at each time.
        num_particles: the number of particles.
        exists: which times exist; `None` if all of them do.
    """

    def one(leaf: Array) -> Array:
        count = leaf.shape[0]
        flat = leaf.reshape(count, -1)
        centred = flat - jnp.mean(flat, axis=0, keepdims=True)
        squares = jnp.sum(centred**2, axis=0)

        def at_time(total: Array, at: tuple[Array, Array | None]) -> tuple[Array, None]:
            places, real = at
            sums = jnp.zeros((num_particles, flat.shape[1]), flat.dtype).at[places].add(centred)
            added = jnp.sum(sums**2, axis=0) - squares
            return total + (added if real is None else jnp.where(real, added, 0.0)), None

        shared, _ = lax.scan(at_time, jnp.zeros_like(squares), (indices, exists))
        alone = squares / (count * (count - 1)) if count > 1 else jnp.full_like(squares, jnp.nan)
        return (jnp.maximum(shared, 0.0) / count**2 + alone).reshape(leaf.shape[1:])

    return jax.tree.map(one, values)
