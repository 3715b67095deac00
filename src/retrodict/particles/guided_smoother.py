"""The guided smoother: a chain, corrected by particles."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from retrodict._chains import AbstractKernelChain
from retrodict._expectations import check_model, series_of_chain
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key
from retrodict.particles.backward_samplers import (
    AbstractBackwardSampler,
    MCMCBackward,
    check_sampler,
)
from retrodict.particles.guided_passes import Guide, run_backward
from retrodict.particles.guided_posterior import GuidedPosterior
from retrodict.particles.path_posterior import path_summary, trace_paths
from retrodict.particles.resampling import Scheme, check_scheme, check_threshold, resample
from retrodict.particles.status import FINE, refuse_failure, status_of

_MOVES = MCMCBackward()


def guided_smoother(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractKernelChain,
    ys: Any,
    num_particles: int = 1000,
    num_samples: int | None = None,
    *,
    forward: AbstractBackwardSampler = _MOVES,
    resampling: Scheme = "systematic",
    threshold: float = 0.5,
    strict: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> GuidedPosterior:
    """Draw paths given the whole series: a chain, corrected by particles.

    Particles move backward in time with the kernels of the chain as proposals, and paths are drawn
    forward through them. The result converges to the posterior as particles are added, for any
    chain whose laws have mass wherever the posterior has. A chain that is nearly right needs few
    particles. If the chain is the posterior, all weights are equal and the evidence is exact.

    Weights cannot reveal states that are never drawn. Pass `defensive_mixture(chain, wide, share)`
    if the chain may miss part of the posterior: it was trained for few steps, it has one mode where
    the posterior may have two, or the effective sample size of the result falls to a few particles.
    If only its kernels are too narrow, pass `defensive_mixture(chain, None, share)`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.5 * jnp.ones(1))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> chain = rd.extended_smoother(model, ys).chain
        >>> posterior = rd.guided_smoother(jax.random.key(1), model, chain, ys, num_particles=100)
        >>> posterior.samples.shape
        (100, 5, 1)

    Args:
        key: a typed key.
        model: the model; all of its parts must have densities.
        chain: a chain of the series with filtering laws and backward kernels, such as that of a
            linearised or an amortised smoother.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_particles: the number of particles.
        num_samples: the number of paths; by default that of the particles.
        forward: the sampler of the particles of paths: `MCMCBackward()`, whose moves start at the
            true ancestors and cost as much as the particles themselves; `ExactBackward()` and
            `RejectionBackward()`, whose paths share fewer particles under an inaccurate chain; or
            `Genealogy()`.
        resampling: `"systematic"`, `"stratified"`, `"residual"` or `"multinomial"`.
        threshold: particles are resampled once the effective sample size is below this share of
            them; 1 to do so at every step.
        strict: whether to raise an error if the run fails; inside `jax.jit` only the status of the
            result is set.
        mask: true where an entry was observed; `True` if all entries were.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; by default that of the chain. Beyond it paths are
            constant.

    Returns:
        Paths, moments and diagnostics.

    Raises:
        ValueError: if data, model, chain and options do not match, or rejection has no bound.
        FloatingPointError: if the run fails and `strict`; it names the time step.
    """
    owner = "guided_smoother"
    check_key(key, owner)
    check_sampler(forward, owner)
    num_particles = check_count(num_particles, "num_particles")
    num_samples = num_particles if num_samples is None else check_count(num_samples, "num_samples")
    if not isinstance(chain, AbstractKernelChain):
        hint = " Pass its .chain." if hasattr(chain, "chain") else ""
        raise TypeError(
            f"{owner} expects a chain with filtering laws and backward kernels, such as a"
            f" LinearGaussianChain, got {type(chain).__name__}.{hint}"
        )
    check_scheme(resampling)
    model = unwrap(model)
    check_model(model, chain, owner)
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs, length=length)
    guide = Guide(model, chain, resampling, check_threshold(threshold), num_particles)
    posterior = _guided(guide, forward, key, series, num_samples)
    refuse_failure(owner, posterior.status, posterior.status_time, strict)
    return posterior


@eqx.filter_jit
def _guided(
    guide: Guide,
    forward: AbstractBackwardSampler,
    key: PRNGKey,
    series: Series,
    num_samples: int,
) -> GuidedPosterior:
    run_key, first_key, path_key = jax.random.split(key, 3)
    clouds = run_backward(guide, run_key, series)
    steps = clouds.steps
    first = resample("systematic", first_key, jnp.exp(steps.log_weights[0]), num_samples)
    data = series.rows
    later = jax.tree.map(
        lambda leaf: leaf[1:], (steps.particles, clouds.path_log_weights, data, series.exists())
    )
    rows = (*later[:2], steps.ancestors[:-1], *later[2:])
    start = (first, steps.particles[0][first])
    indices = trace_paths(guide.model.transition, forward, path_key, start, rows, forward=True)
    indices = jnp.concatenate([first[None], indices])
    status, turns = status_of(clouds.impossible[::-1], clouds.undefined[::-1])
    time = jnp.where(status == FINE, -1, series.num_times - 1 - turns)
    return GuidedPosterior(
        particles=steps.particles,
        log_weights=steps.log_weights,
        ancestors=steps.ancestors,
        log_evidence=clouds.log_evidence,
        ess=steps.ess,
        data=data,
        length=series.length,
        resampling=guide.resampling,
        **path_summary(steps.particles, indices, status, time),
    )
