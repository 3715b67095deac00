"""The guided smoother: a chain, corrected by particles."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from retrodict._chains import AbstractKernelChain
from retrodict._expectations import Observations, check_model, series_of_chain
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
from retrodict.particles.ffbsi import FEW
from retrodict.particles.guided_passes import Guide, forward_indices, run_backward
from retrodict.particles.guided_posterior import GuidedPosterior
from retrodict.particles.moments import num_distinct
from retrodict.particles.resampling import Scheme, check_scheme, check_threshold, resample
from retrodict.particles.status import DEGENERATE, FINE, refuse_failure, status_of

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
    """Paths given the whole series: a chain, corrected by particles.

    Particles run backward in time with the kernels of the chain as proposals, and paths are drawn
    forward through them. The result converges to the posterior as particles are added, whatever the
    chain, if its laws have mass wherever the posterior has; a chain that is nearly right makes it
    right with few particles, since they are drawn where the whole series says. If the chain is the
    posterior, all weights are equal and the evidence is exact.

    Weights do not tell of states that are never drawn. Pass `covered(chain, wide, share)` where the
    chain may have left something out: it was hardly trained, has one mode where the posterior may
    have two, or an effective sample size of the result falls to a few particles. If only its
    kernels are too narrow and its filtering laws are not, pass `covered(chain, None, share)`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.5 * jnp.ones(1))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> chain = rd.extended_smoother(model, ys).chain
        >>> found = rd.guided_smoother(jax.random.key(1), model, chain, ys, num_particles=100)
        >>> found.samples.shape
        (100, 5, 1)

    Args:
        key: a typed key.
        model: the model; all of its parts must have densities.
        chain: a chain of the series with filtering laws and backward kernels, such as a linearised
            or an amortised smoother's; `covered` by a wide law if it may be elsewhere.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_particles: how many particles.
        num_samples: how many paths to draw; as many as particles by default.
        forward: how the particles of paths are drawn: `MCMCBackward()`, whose moves start at the
            true ancestors, which a good chain leaves distinct, and cost no more than the particles
            themselves; `ExactBackward()` and `RejectionBackward()`, whose paths share fewer
            particles under a chain that is far off; or `Genealogy()`.
        resampling: `"systematic"`, `"stratified"`, `"residual"` or `"multinomial"`.
        threshold: particles are resampled once the effective sample size is below this share of
            them; 1 to do so at every step.
        strict: whether to raise an error if the run fails; inside `jax.jit` the status in the
            result says so.
        mask: true where an entry was seen; `True` alone promises that everything was.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: how many rows exist; that of the chain if it is left out. Beyond it paths stay
            where they are.

    Returns:
        Paths, moments and diagnostics.

    Raises:
        ValueError: if data, model, chain and options do not fit, or rejection has no bound.
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
    found = _guided(guide, forward, key, series, num_samples)
    refuse_failure(owner, found.status, found.status_time, strict)
    return found


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
    data = Observations(series.ys, series.mask, series.inputs)
    first = resample("systematic", first_key, jnp.exp(steps.log_weights[0]), num_samples)
    indices = forward_indices(guide.model, forward, path_key, clouds, data, series.exists(), first)
    samples = jax.vmap(lambda cloud, places: cloud[places], out_axes=1)(steps.particles, indices)
    counts = jax.vmap(lambda row: num_distinct(row, guide.num_particles))(indices)
    status, turns = status_of(clouds.impossible[::-1], clouds.undefined[::-1])
    time = jnp.where(status == FINE, -1, series.num_times - 1 - turns)
    fewest = jnp.argmin(counts)
    degenerate = (status == FINE) & (counts[fewest] < FEW)
    return GuidedPosterior(
        samples,
        indices,
        steps.particles,
        steps.log_weights,
        steps.ancestors,
        clouds.log_evidence,
        steps.ess,
        data,
        counts,
        jnp.where(degenerate, DEGENERATE, status),
        jnp.where(degenerate, fewest, time),
        series.length,
        guide.resampling,
    )
