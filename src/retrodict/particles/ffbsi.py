"""Paths drawn through particles: forward filtering, backward sampling (FFBSi)."""

import math
from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._expectations import AbstractFunctional, add
from retrodict._model import (
    AbstractKernel,
    Series,
    StateSpaceModel,
    check_densities,
    prepare_data,
    prepare_rows,
    unwrap,
)
from retrodict.particles.backward_samplers import (
    AbstractBackwardSampler,
    ExactBackward,
    Genealogy,
    check_sampler,
    draws_by_step,
)
from retrodict.particles.backward_weights import BackwardWeights
from retrodict.particles.cloud import Filter
from retrodict.particles.moments import (
    DEGENERATE,
    FEW,
    FINE,
    AbstractWeightedStates,
    check_functional,
    check_probability,
    check_single,
    num_distinct,
    refuse_failure,
)
from retrodict.particles.particle_filter import ParticleFilterPosterior, run_filter
from retrodict.particles.proposal import AbstractProposal, Lookahead
from retrodict.particles.resampling import Scheme, resample


class AbstractPathPosterior(AbstractWeightedStates):
    """Paths of equal weight that were drawn through the particles of each time."""

    samples: eqx.AbstractVar[Float[Array, "sample time state"]]
    indices: eqx.AbstractVar[Int[Array, "time sample"]]
    data: eqx.AbstractVar[Series]
    length: eqx.AbstractVar[Int[Array, ""] | None]

    @property
    @abstractmethod
    def cloud(self) -> Float[Array, "*batch time particle state"]:
        """The particles through which the paths go."""

    def _weighted(self) -> tuple[Float[Array, "time sample state"], Float[Array, "time sample"]]:
        check_single(self.cloud)
        states = jnp.swapaxes(self.samples, 0, 1)
        count = self.samples.shape[0]
        return states, jnp.full(states.shape[:2], -math.log(count), states.dtype)

    def quantile(self, probability: float) -> Float[Array, "time state"]:
        """Return the quantile of each coordinate of the smoothed states.

        Args:
            probability: between 0 and 1.
        """
        check_single(self.cloud)
        check_probability(probability)
        return jnp.quantile(self.samples, probability, axis=0)

    def expectation(
        self, functional: AbstractFunctional, data: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """Return the expectation of an additive functional, and its standard error.

        The standard error is estimated from this run. It counts the paths and the particles: the
        contribution of generation p is estimated from paths that go through the same particle at
        time p. It excludes the bias, of order 1/N, and assumes multinomial resampling at every
        step; other schemes, and a run that resamples rarely, have smaller errors.

        Args:
            functional: the functional.
            data: a pytree with one row per time step; `None` for the observations.

        Returns:
            The pair (value, standard error), pytrees with the structure of the functional.
        """
        check_functional(functional)
        check_single(self.cloud)
        data = self.data if data is None else prepare_rows(data, self.samples.shape[1])
        return self._expectation(functional, data)

    @eqx.filter_jit
    def _expectation(self, functional: AbstractFunctional, data: PyTree) -> tuple[PyTree, PyTree]:
        exists = existing_rows(self.samples, self.length)
        values = path_values(functional, self.samples, data, exists)
        variances = path_variance(values, self.indices, self.cloud.shape[1], exists)
        means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), values)
        return means, jax.tree.map(jnp.sqrt, variances)


def draw_paths(
    kernel: AbstractKernel,
    sampler: AbstractBackwardSampler,
    keys: list[PRNGKey],
    clouds: Any,
    series: Series,
    num_samples: int,
    status: tuple[Array, Array],
    forward_log_weights: Float[Array, "time particle"] | None = None,
) -> dict[str, Any]:
    """Draw the particle of each path at each time, from one end of the series to the other.

    Args:
        kernel: the transition.
        sampler: how particles are drawn.
        keys: two typed keys: for the first time visited, and for the other times.
        clouds: `particles`, `log_weights` and `ancestors` of a filter that ran the other way.
        series: the series.
        num_samples: the number of paths.
        status: the status of the filter, and its time.
        forward_log_weights: if the filter ran backward in time, the normalised log weights by which
            paths are drawn forward, except at time 0; `None` if it ran forward.

    Returns:
        The fields of a path posterior that follow from the drawn particles.
    """
    particles, log_weights = clouds.particles, clouds.log_weights
    forward = forward_log_weights is not None
    begin, visited, parents = -1, slice(None, -1), slice(1, None)
    if forward:
        begin, visited, parents = 0, parents, visited
    start = resample("systematic", keys[0], jnp.exp(log_weights[begin]), num_samples)

    def step(state: tuple[Array, Array], row: tuple) -> tuple[tuple[Array, Array], Array]:
        places, xs = state
        random, particles, log_weights, ancestors, data, exists = row
        pairs = BackwardWeights.of(kernel, data.inputs, particles, reverse=forward)
        chosen = draw(random, pairs, log_weights, xs, ancestors[places])
        if exists is not None:
            chosen = jnp.where(exists, chosen, places)
        return (chosen, particles[chosen]), chosen

    step_keys = jax.random.split(keys[1], particles.shape[0] - 1)
    draw, randomness = draws_by_step(sampler, step_keys, num_samples)
    rows = (
        randomness,
        particles[visited],
        (log_weights if forward_log_weights is None else forward_log_weights)[visited],
        clouds.ancestors[parents],
        *jax.tree.map(lambda leaf: leaf[1:], (series.rows, series.exists())),
    )
    state = (start, particles[begin][start])
    _, rest = lax.scan(step, state, rows, reverse=not forward)
    indices = jnp.concatenate([start[None], rest] if forward else [rest, start[None]])
    counts = jax.vmap(lambda row: num_distinct(row, particles.shape[1]))(indices)
    fewest = jnp.argmin(counts)
    degenerate = (status[0] == FINE) & (counts[fewest] < FEW)
    return {
        "samples": jax.vmap(lambda xs, row: xs[row], out_axes=1)(particles, indices),
        "indices": indices,
        "data": series.rows,
        "num_distinct": counts,
        "status": jnp.where(degenerate, DEGENERATE, status[0]),
        "status_time": jnp.where(degenerate, fewest, status[1]),
    }


def path_values(
    functional: AbstractFunctional,
    samples: Float[Array, "sample time state"],
    data: PyTree,
    exists: Bool[Array, "time"] | None,
) -> PyTree:
    """Return the values of a functional along paths, over the rows that exist."""
    later = jax.tree.map(lambda leaf: leaf[1:], (data, exists))

    def along(path: Float[Array, "time state"]) -> PyTree:
        first = functional.initial(path[0], jax.tree.map(lambda leaf: leaf[0], data))
        return lax.scan(more, first, (path[:-1], path[1:], *later))[0]

    def more(total: PyTree, at: tuple) -> tuple[PyTree, None]:
        before, x, row, real = at
        value = functional.increment(before, x, row)
        if real is not None:
            value = jax.tree.map(lambda leaf: jnp.where(real, leaf, 0), value)
        return add([total, value]), None

    return jax.vmap(along)(samples)


def existing_rows(
    samples: Float[Array, "sample time state"], length: Int[Array, ""] | None
) -> Bool[Array, "time"] | None:
    """Return which rows of paths exist; `None` if all of them do."""
    return None if length is None else jnp.arange(samples.shape[1]) < length


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


_EXACT = ExactBackward()


class ParticlePosterior(AbstractPathPosterior):
    """Paths drawn from a particle approximation of the law of the states given the whole series.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.1 * jnp.ones(1))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> posterior = rd.ffbsi(jax.random.key(1), model, ys, num_particles=100, num_samples=50)
        >>> posterior.mean.shape, posterior.ess.shape
        ((5, 1), (5,))

    Attributes:
        samples: paths, of shape `(sample, time, state)`; all have the same weight.
        indices: the particle through which each path goes, of shape `(time, sample)`.
        filtered: the filter that the paths were drawn from.
        data: the observations, for functionals that read them.
        num_distinct: the number of particles through which the paths go, at each time.
        status: that of the filter, or 3 if at some time the paths go through fewer than 10
            particles: the result at that time then depends on a few draws.
        status_time: the time of the status; −1 if it is fine.
    """

    samples: Float[Array, "sample time state"]
    indices: Int[Array, "time sample"]
    filtered: ParticleFilterPosterior
    data: Series
    num_distinct: Int[Array, "time"]
    status: Int[Array, ""]
    status_time: Int[Array, ""]

    @property
    def cloud(self) -> Float[Array, "*batch time particle state"]:
        """The particles of the filter."""
        return self.filtered.particles

    @property
    def log_evidence(self) -> Scalar:
        """The filter's estimate of log p(y_{0:n-1}); its exponential is unbiased."""
        return self.filtered.log_evidence

    @property
    def ess(self) -> Float[Array, "time"]:
        """The filter's effective sample size at each time."""
        return self.filtered.ess

    @property
    def length(self) -> Int[Array, ""] | None:  # pyright: ignore
        """The number of rows that exist, or `None` if all of them do."""
        return self.filtered.length


def ffbsi(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    num_particles: int = 1000,
    num_samples: int | None = None,
    *,
    backward: AbstractBackwardSampler = _EXACT,
    proposal: AbstractProposal | None = None,
    lookahead: Lookahead | None = None,
    resampling: Scheme = "systematic",
    threshold: float = 0.5,
    strict: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> ParticlePosterior:
    """Draw paths given the whole series: a particle filter, then backward sampling.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.1 * jnp.ones(1))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> posterior = rd.ffbsi(jax.random.key(1), model, ys, num_particles=100, num_samples=50)
        >>> posterior.samples.shape
        (50, 5, 1)

    Args:
        key: a typed key.
        model: the model; its transition must have a density.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_particles: the number of particles of the filter.
        num_samples: the number of paths; by default that of the particles.
        backward: the backward sampler: `ExactBackward()`, `RejectionBackward()` with the same law
            and often cheaper, `MCMCBackward()` of linear cost, or `Genealogy()`.
        proposal: the laws from which the filter draws states; `None` for the model's prior and
            transition.
        lookahead: log weights by which an auxiliary filter resamples; `None` for none.
        resampling: `"systematic"`, `"stratified"`, `"residual"` or `"multinomial"`.
        threshold: the filter resamples once the effective sample size is below this share of the
            particles; 1 to do so at every step.
        strict: whether to raise an error if the filter fails; inside `jax.jit` only the status of
            the result is set.
        mask: true where an entry was observed; `True` if all entries were.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; beyond it paths are constant.

    Returns:
        Paths, moments and diagnostics.

    Raises:
        ValueError: if data, model and options do not match, or rejection has no bound.
        FloatingPointError: if the filter fails and `strict`; it names the time step.
    """
    check_key(key, "ffbsi")
    check_sampler(backward, "ffbsi")
    forward_filter = Filter(
        unwrap(model), proposal, lookahead, resampling, threshold, num_particles
    )
    num_samples = check_count(num_particles if num_samples is None else num_samples, "num_samples")
    series = prepare_data(forward_filter.model, ys, mask=mask, inputs=inputs, length=length)
    if not isinstance(backward, Genealogy):
        check_densities(forward_filter.model, "Backward sampling", ("transition",))
    posterior = run_smoother(forward_filter, backward, key, series, num_samples)
    refuse_failure("ffbsi", posterior.status, posterior.status_time, strict)
    return posterior


@eqx.filter_jit
def run_smoother(
    forward_filter: Any,
    backward: AbstractBackwardSampler,
    key: PRNGKey,
    series: Series,
    num_samples: int,
) -> ParticlePosterior:
    """Run a filter over a prepared series, and draw paths backward."""
    filter_key, *keys = jax.random.split(key, 3)
    filtered = run_filter(forward_filter, filter_key, series)
    status, kernel = (filtered.status, filtered.status_time), forward_filter.model.transition
    paths = draw_paths(kernel, backward, keys, filtered, series, num_samples, status)
    return ParticlePosterior(filtered=filtered, **paths)
