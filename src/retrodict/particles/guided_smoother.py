"""The guided smoother: a chain, corrected by particles.

Particles move backward in time by the kernels of a chain, and paths are drawn forward.

With the filtering laws q_k and the backward kernels q_{k-1|k} of the chain, the targets of the run
are, for k ≥ 1,

    γ_k(x_{k:n-1}) = q_k(x_k) ∏_{j>k} m(x_{j-1}, x_j) g_j(x_j),

and at k = 0 the prior and the emission, χ g_0, replace q_0: γ_0 is the joint density of the model,
and its mass the evidence. A particle x_k moves to x_{k-1} ~ q_{k-1|k}(x_k, ·)
with the weight

    q_{k-1}(x_{k-1}) m(x_{k-1}, x_k) g_k(x_k) / (q_k(x_k) q_{k-1|k}(x_k, x_{k-1})),

which is constant if the chain is the exact posterior. The marginal law of x_k under γ_k is
q_k(x_k) β_k(x_k), with the density β_k of the later observations given x_k, while under the
posterior x_k given x_{k-1} has a density in proportion to m(x_{k-1}, x_k) g_k(x_k) β_k(x_k). Paths
are therefore drawn forward: with the weights W_k of the cloud for γ_k, particle i of time k follows
x_{k-1} with a probability in proportion to

    W_k^i g_k(x_k^i) / q_k(x_k^i) · m(x_{k-1}, x_k^i).
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._chains import AbstractKernelChain
from retrodict._expectations import check_model, series_of_chain
from retrodict._model import Series, StateSpaceModel, fill_padding, unwrap
from retrodict.particles.backward_samplers import (
    AbstractBackwardSampler,
    MCMCBackward,
    check_sampler,
)
from retrodict.particles.cloud import Step, keep_where_padding, normalise_weights, select, summed
from retrodict.particles.ffbsi import AbstractPathPosterior, draw_paths
from retrodict.particles.moments import FINE, log_evidence_error, refuse_failure, status_of
from retrodict.particles.resampling import Scheme, check_scheme, check_threshold

_MOVES = MCMCBackward()


class GuidedPosterior(AbstractPathPosterior):
    """Paths given the whole series, drawn through particles that a chain proposed.

    Attributes:
        samples: paths, of shape `(sample, time, state)`; all have the same weight.
        indices: the particle through which each path goes, of shape `(time, sample)`.
        particles: of shape `(time, particle, state)`.
        log_weights: normalised log weights W_k of each time; those of time 0 are for the smoothed
            law, those of a later time for a law in which the chain replaces the past.
        ancestors: the index at the time after that each particle descends from.
        log_evidence: an estimate of log p(y_{0:n-1}); its exponential is unbiased.
        ess: effective sample sizes 1/Σ w² of the particles, before resampling; large if the chain
            fits.
        data: the observations, for functionals that read them.
        num_distinct: the number of particles through which the paths go, at each time.
        status: 0 if fine; 1 if no particle explains an observation, 2 if a weight is undefined, 3
            if at some time the paths go through fewer than 10 particles.
        status_time: the time of the status, the first that the run visited; −1 if it is fine.
        length: the number of rows that exist, or `None` if all of them do.
        resampling: the resampling scheme.
    """

    samples: Float[Array, "sample time state"]
    indices: Int[Array, "time sample"]
    particles: Float[Array, "time particle state"]
    log_weights: Float[Array, "time particle"]
    ancestors: Int[Array, "time particle"]
    log_evidence: Scalar
    ess: Float[Array, "time"]
    data: Series
    num_distinct: Int[Array, "time"]
    status: Int[Array, ""]
    status_time: Int[Array, ""]
    length: Int[Array, ""] | None
    resampling: Scheme = eqx.field(static=True)

    @property
    def cloud(self) -> Float[Array, "*batch time particle state"]:
        """The particles."""
        return self.particles

    def log_evidence_standard_error(self, lag: int = 20) -> Scalar:
        """Return the standard error of `log_evidence`, estimated from this run.

        See `ParticleFilterPosterior.log_evidence_standard_error`.

        Args:
            lag: the number of steps, backward in time, after which weights are compared.
        """
        return log_evidence_error(self, lag, slice(None, None, -1))


class _Guide(eqx.Module):
    """A particle method that moves backward in time.

    Attributes:
        model: an unwrapped model.
        chain: the chain that proposes particles.
        resampling: the scheme.
        threshold: the effective sample size, as a share of the particles, below which particles are
            resampled.
        num_particles: the number of particles.
    """

    model: StateSpaceModel
    chain: AbstractKernelChain
    resampling: Scheme = eqx.field(static=True)
    threshold: float = eqx.field(static=True)
    num_particles: int = eqx.field(static=True)

    def noise(self, key: PRNGKey, steps: PyTree, dtype: Any) -> Float[Array, "particle e"]:
        """Draw the standard normal numbers of one move of all particles."""
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), steps)
        x = jnp.zeros(self.chain.state_dim, dtype)
        size = self.chain.kernel_law(blank, x).noise_dim
        return jax.random.normal(key, (self.num_particles, size), dtype)

    def lift(
        self, xs: Float[Array, "particle state"], log_laws: Float[Array, "particle"], data: Series
    ) -> Float[Array, "particle"]:
        """Return log g_k − log q_k of particles; −∞ where q_k, and so γ_k, has no mass."""
        log_prob = self.model.emission.log_prob
        emitted = jax.vmap(lambda x: log_prob(x, data.ys, data.inputs, data.mask))(xs)
        inside = log_laws > -jnp.inf
        return jnp.where(inside, emitted - jnp.where(inside, log_laws, 0.0), -jnp.inf)

    def propose(
        self, after: Float[Array, "state"], noise: Float[Array, "e"], step: PyTree, law: Any, u: Any
    ) -> tuple[Float[Array, "state"], Scalar, Scalar]:
        """Draw x of time k-1; return it, log q_{k-1}, and log m minus the log proposal density."""
        kernel = self.chain.kernel_law(step, after)
        x = kernel.from_noise(noise).astype(after.dtype)
        log_law, log_proposal = summed(law.log_prob(x)), summed(kernel.log_prob(x))
        return x, log_law, self.model.transition.log_prob(x, after, u) - log_proposal


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
    num_samples = check_count(num_particles if num_samples is None else num_samples, "num_samples")
    if not isinstance(chain, AbstractKernelChain):
        hint = " Pass its .chain." if hasattr(chain, "chain") else ""
        raise TypeError(
            f"{owner} expects a chain with filtering laws and backward kernels, such as a"
            f" LinearGaussianChain, got {type(chain).__name__}.{hint}"
        )
    check_scheme(resampling)
    check_threshold(threshold)
    model = unwrap(model)
    check_model(model, chain, owner)
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs, length=length)
    guide = _Guide(model, chain, resampling, threshold, num_particles)
    posterior = _guided(guide, forward, key, series, num_samples)
    refuse_failure(owner, posterior.status, posterior.status_time, strict)
    return posterior


@eqx.filter_jit
def _guided(
    guide: _Guide, forward: AbstractBackwardSampler, key: PRNGKey, series: Series, num_samples: int
) -> GuidedPosterior:
    run_key, *keys = jax.random.split(key, 3)
    steps, path_log_weights = _run_backward(guide, run_key, series)
    status, turns = status_of(steps.impossible[::-1], steps.undefined[::-1])
    time = jnp.where(status == FINE, -1, series.num_times - 1 - turns)
    status, kernel = (status, time), guide.model.transition
    paths = draw_paths(kernel, forward, keys, steps, series, num_samples, status, path_log_weights)
    return GuidedPosterior(
        particles=steps.particles,
        log_weights=steps.log_weights,
        ancestors=steps.ancestors,
        log_evidence=jnp.sum(steps.increment),
        ess=steps.ess,
        length=series.length,
        resampling=guide.resampling,
        **paths,
    )


def _run_backward(
    guide: _Guide, key: PRNGKey, series: Series
) -> tuple[Step, Float[Array, "time particle"]]:
    """Move particles from the end of a prepared series to time 0.

    Returns:
        The steps by time, and the normalised log weights of W_k g_k / q_k, by which paths are drawn
        forward. A step is counted at the time whose row it reads: the step to k-1 reads the row of
        k, and the last one that of time 0.
    """
    exists, n, chain = series.exists(), series.num_times, guide.chain
    data = series.rows
    later = None if exists is None else exists[1:]
    # The kernels of padding are degenerate, and their densities infinite.
    laws, steps = fill_padding(chain.laws, exists), fill_padding(chain.steps, later)
    end = n - 1 if series.length is None else series.length - 1
    last_law, last_row = jax.tree.map(lambda leaf: leaf[end], (laws, data))
    start_key, noise_key, select_key = jax.random.split(key, 3)
    dtype = jnp.result_type(series.ys.dtype, *jax.tree.leaves(laws))
    shape = (guide.num_particles, last_law.noise_dim)
    first = jax.vmap(last_law.from_noise)(jax.random.normal(start_key, shape, dtype)).astype(dtype)
    start = normalise_weights(
        first, jnp.full(guide.num_particles, -math.log(guide.num_particles), dtype)
    )
    log_laws = jax.vmap(lambda x: summed(last_law.log_prob(x)))(first)
    lifts = guide.lift(first, log_laws, last_row).astype(dtype)
    # Drawn by time, so that padding changes nothing that exists.
    noise = jax.vmap(lambda key: guide.noise(key, steps, dtype))(jax.random.split(noise_key, n - 1))

    def back(state: tuple, at: tuple) -> tuple[tuple, tuple]:
        cloud, lifts = state
        key, noise, step, law, row, after, real = at
        u = after.inputs
        ancestors, log_weights = select(guide.resampling, guide.threshold, cloud[1], key)
        xs, log_laws, ratios = jax.vmap(lambda x, e: guide.propose(x, e, step, law, u))(
            cloud[0][ancestors], noise
        )
        log_weights = log_weights + lifts[ancestors] + log_laws + ratios
        new = keep_where_padding(
            real, normalise_weights(xs, log_weights.astype(dtype), ancestors), cloud
        )
        new_lifts = guide.lift(xs, log_laws, row).astype(dtype)
        lifts = new_lifts if real is None else jnp.where(real, new_lifts, lifts)
        return ((new.particles, new.log_weights), lifts), (new, lifts)

    keys = jax.random.split(select_key, n - 1)
    earlier = jax.tree.map(lambda leaf: leaf[:-1], (laws, data))
    rows = (keys, noise, steps, *earlier, jax.tree.map(lambda leaf: leaf[1:], data), later)
    state = ((start.particles, start.log_weights), lifts)
    _, rest = lax.scan(back, state, rows, reverse=True)
    steps, all_lifts = jax.tree.map(
        lambda head, tail: jnp.concatenate([head, tail[None]]), rest, (start, lifts)
    )
    # At time 0 the prior replaces the law of the chain.
    priors = jax.vmap(lambda x: summed(guide.model.prior.log_prob(x)))(steps.particles[0])
    log_weights = (steps.log_weights[0] + priors + all_lifts[0]).astype(dtype)
    final = normalise_weights(steps.particles[0], log_weights, steps.ancestors[0])
    clouds = jax.tree.map(lambda leaf, row: leaf.at[0].set(row), steps, final)
    increment, impossible, undefined = (
        jnp.concatenate([last[None], by_time[:-1]])
        for last, by_time in (
            (final.increment, steps.increment),
            (final.impossible, steps.impossible),
            (final.undefined, steps.undefined),
        )
    )
    clouds = clouds._replace(increment=increment, impossible=impossible, undefined=undefined)
    lifted = jax.vmap(normalise_weights)(clouds.particles, clouds.log_weights + all_lifts)
    return clouds, lifted.log_weights
