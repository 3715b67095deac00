"""Paths drawn through particles: the part that all particle smoothers share."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from retrodict._expectations import AbstractFunctional
from retrodict._kernels import AbstractKernel
from retrodict._series import Series, prepare_rows
from retrodict._types import PRNGKey
from retrodict.particles.backward_samplers import AbstractBackwardSampler
from retrodict.particles.backward_weights import Pairs
from retrodict.particles.moments import num_distinct, path_expectation, path_moments, path_quantile
from retrodict.particles.status import (
    DEGENERATE,
    FEW,
    FINE,
    check_functional,
    check_single,
)


class AbstractPathPosterior(eqx.Module):
    """Paths of equal weight that were drawn through the particles of each time."""

    samples: eqx.AbstractVar[Float[Array, "sample time state"]]
    indices: eqx.AbstractVar[Int[Array, "time sample"]]
    data: eqx.AbstractVar[Series]
    length: eqx.AbstractVar[Int[Array, ""] | None]

    @property
    @abstractmethod
    def cloud(self) -> Float[Array, "time particle state"]:
        """The particles through which the paths go."""

    @property
    def mean(self) -> Float[Array, "time state"]:
        """The smoothed means."""
        check_single(self.cloud)
        return path_moments(self.samples)[0]

    @property
    def covariance(self) -> Float[Array, "time state state"]:
        """The smoothed covariances."""
        check_single(self.cloud)
        return path_moments(self.samples)[1]

    def quantile(self, probability: float) -> Float[Array, "time state"]:
        """Return the quantile of each coordinate of the smoothed states.

        Args:
            probability: between 0 and 1.
        """
        check_single(self.cloud)
        return path_quantile(self.samples, probability)

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
        count = self.cloud.shape[1]
        return path_expectation(functional, self.samples, self.indices, count, data, self.length)


def trace_paths(
    kernel: AbstractKernel,
    sampler: AbstractBackwardSampler,
    key: PRNGKey,
    start: tuple[Int[Array, "sample"], Float[Array, "sample state"]],
    rows: tuple,
    *,
    forward: bool = False,
) -> Int[Array, "pair sample"]:
    """Draw the particle of each path at each time, from one end of the series to the other.

    Args:
        kernel: the transition.
        sampler: how particles are drawn.
        key: a typed key.
        start: the particles of the paths at the first time visited, and their states.
        rows: per further time, in order of time: particles, normalised log weights, the particle
            from which each particle of the time visited before descends, the data of the
            transition, and whether it exists (or `None`).
        forward: whether paths are drawn forward in time.
    """

    def step(state: tuple[Array, Array], row: tuple) -> tuple[tuple[Array, Array], Array]:
        places, xs = state
        key, particles, log_weights, parents, data, exists = row
        pairs = Pairs.of(kernel, data.inputs, particles, reverse=forward)
        chosen = sampler.draw(key, pairs, log_weights, xs, parents[places])
        if exists is not None:
            chosen = jnp.where(exists, chosen, places)
        return (chosen, particles[chosen]), chosen

    keys = jax.random.split(key, rows[0].shape[0])
    return lax.scan(step, start, (keys, *rows), reverse=not forward)[1]


def path_summary(
    particles: Float[Array, "time particle state"],
    indices: Int[Array, "time sample"],
    status: Int[Array, ""],
    status_time: Int[Array, ""],
) -> dict[str, Any]:
    """Return the fields of a path posterior that follow from the drawn particles."""
    counts = jax.vmap(lambda row: num_distinct(row, particles.shape[1]))(indices)
    fewest = jnp.argmin(counts)
    degenerate = (status == FINE) & (counts[fewest] < FEW)
    return {
        "samples": jax.vmap(lambda xs, row: xs[row], out_axes=1)(particles, indices),
        "indices": indices,
        "num_distinct": counts,
        "status": jnp.where(degenerate, DEGENERATE, status),
        "status_time": jnp.where(degenerate, fewest, status_time),
    }
