"""Forward filtering, backward sampling (FFBSi)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._model import StateSpaceModel, check_densities
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key
from retrodict.particles.backward_samplers import (
    AbstractBackwardSampler,
    ExactBackward,
    Genealogy,
    check_sampler,
)
from retrodict.particles.cloud import Filter
from retrodict.particles.particle_filter import ParticleFilterPosterior, prepare_filter, run_filter
from retrodict.particles.path_posterior import AbstractPathPosterior, path_summary, trace_paths
from retrodict.particles.proposal import AbstractProposal, Lookahead
from retrodict.particles.resampling import Scheme, resample
from retrodict.particles.status import refuse_failure

_EXACT = ExactBackward()


class ParticlePosterior(AbstractPathPosterior):
    """Paths drawn from a particle approximation of the law of the states given the whole series.

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
    def cloud(self) -> Float[Array, "time particle state"]:
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
    num_particles = check_count(num_particles, "num_particles")
    num_samples = num_particles if num_samples is None else check_count(num_samples, "num_samples")
    machine, series = prepare_filter(
        model,
        ys,
        num_particles,
        proposal,
        lookahead,
        resampling,
        threshold,
        {"mask": mask, "inputs": inputs, "length": length},
    )
    if not isinstance(backward, Genealogy):
        check_densities(machine.model, "Backward sampling", ("transition",))
    posterior = _ffbsi(machine, backward, key, series, num_samples)
    refuse_failure("ffbsi", posterior.status, posterior.status_time, strict)
    return posterior


@eqx.filter_jit
def _ffbsi(
    machine: Filter,
    backward: AbstractBackwardSampler,
    key: PRNGKey,
    series: Series,
    num_samples: int,
) -> ParticlePosterior:
    return run_smoother(machine, backward, key, series, num_samples)


def run_smoother(
    machine: Any,
    backward: AbstractBackwardSampler,
    key: PRNGKey,
    series: Series,
    num_samples: int,
) -> ParticlePosterior:
    """Run a filter over a prepared series and draw paths backward; call it inside `jax.jit`."""
    filter_key, last_key, path_key = jax.random.split(key, 3)
    filtered = run_filter(machine, filter_key, series)
    data = series.rows
    weights = jnp.exp(filtered.log_weights[-1])
    last = resample("systematic", last_key, weights, num_samples)
    later = jax.tree.map(lambda leaf: leaf[1:], (filtered.ancestors, data, series.exists()))
    rows = (filtered.particles[:-1], filtered.log_weights[:-1], *later)
    start = (last, filtered.particles[-1][last])
    indices = trace_paths(machine.model.transition, backward, path_key, start, rows)
    indices = jnp.concatenate([indices, last[None]])
    summary = path_summary(filtered.particles, indices, filtered.status, filtered.status_time)
    return ParticlePosterior(filtered=filtered, data=data, **summary)
