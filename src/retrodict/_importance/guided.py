"""Particles that run backward in time by the kernels of a chain, and paths drawn forward.

With the filtering laws q_k and the backward kernels q_{k-1|k} of the chain, the targets of the run
are, for k ≥ 1,

    γ_k(x_{k:n-1}) = q_k(x_k) ∏_{j>k} m(x_{j-1}, x_j) g_j(x_j),

and at k = 0 the law of x_0 before the data and its emission, χ g_0, stand for q_0: γ_0 is the joint
density of the model, and its mass the evidence. A particle x_k moves to x_{k-1} ~ q_{k-1|k}(x_k, ·)
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
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._chain import AbstractKernelChain
from retrodict._elbo import check_model, series_of_chain
from retrodict._estimator import fill_padding
from retrodict._functional import AbstractFunctional, Observations, input_of
from retrodict._mask import Series
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._particle import AbstractBackwardSampler, Genealogy, MCMCBackward
from retrodict._particle.backward import check_sampler
from retrodict._particle.cloud import Step, frozen_where, select, summed, weighed
from retrodict._particle.diagnosis import (
    DEGENERATE,
    FINE,
    check_data,
    check_single,
    refuse_failure,
    status_of,
)
from retrodict._particle.moments import (
    log_evidence_variance,
    num_distinct,
    path_moments,
    path_variance,
)
from retrodict._particle.pairs import Pairs
from retrodict._particle.resampling import Scheme, check_scheme, check_threshold, resample
from retrodict._particle.smoother import FEW, value_along
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key

_MOVES = MCMCBackward()


class GuidedPosterior(eqx.Module):
    """Paths given the whole series, drawn through particles that a chain has guided.

    Attributes:
        samples: paths, of shape `(sample, time, state)`; all have the same weight.
        indices: the particle through which each path goes, of shape `(time, sample)`.
        particles: of shape `(time, particle, state)`.
        log_weights: normalised log weights W_k of each time; those of time 0 are for the smoothed
            law, those of a later time for a law in which the chain stands for all that came before.
        ancestors: the index at the time after that each particle descends from.
        log_evidence: an estimate of log p(y_{0:n-1}); its exponential is unbiased.
        ess: effective sample sizes 1/Σ w² of the particles, before resampling; how well the chain
            fits.
        data: what was observed, for functionals that read it.
        num_distinct: through how many particles the paths go, at each time.
        status: 0 if fine; 1 if no particle explains an observation, 2 if a weight is undefined, 3
            if at some time the paths go through fewer than 10 particles.
        status_time: the time of the status, the first that the run came to; −1 if it is fine.
        length: how many rows exist, or `None` if all of them do.
        resampling: the scheme by which particles were resampled.
    """

    samples: Float[Array, "sample time state"]
    indices: Int[Array, "time sample"]
    particles: Float[Array, "time particle state"]
    log_weights: Float[Array, "time particle"]
    ancestors: Int[Array, "time particle"]
    log_evidence: Scalar
    ess: Float[Array, "time"]
    data: Observations
    num_distinct: Int[Array, "time"]
    status: Int[Array, ""]
    status_time: Int[Array, ""]
    length: Int[Array, ""] | None
    resampling: Scheme = eqx.field(static=True)

    @property
    def mean(self) -> Float[Array, "time state"]:
        """The smoothed means."""
        check_single(self.particles)
        return path_moments(self.samples)[0]

    @property
    def covariance(self) -> Float[Array, "time state state"]:
        """The smoothed covariances."""
        check_single(self.particles)
        return path_moments(self.samples)[1]

    def quantile(self, probability: float) -> Float[Array, "time state"]:
        """The quantile of each coordinate of the smoothed states.

        Args:
            probability: between 0 and 1.
        """
        if not 0 <= probability <= 1:
            raise ValueError(f"quantile expects a probability between 0 and 1, got {probability}.")
        check_single(self.particles)
        return jnp.quantile(self.samples, probability, axis=0)

    def log_evidence_standard_error(self, lag: int = 20) -> Scalar:
        """The standard error of `log_evidence`, estimated from this one run.

        It is read off how unequally the particles of a generation share the weights some steps on,
        as for a filter: see `ParticleFilterPosterior.log_evidence_standard_error`.

        Args:
            lag: how many steps on, which is to say earlier, shares are looked at.
        """
        lag = check_count(lag, "lag")
        check_single(self.particles)
        independent = self.resampling == "multinomial"
        order = self.ancestors[::-1], self.log_weights[::-1]
        return jnp.sqrt(log_evidence_variance(*order, lag, independent))

    def expectation(
        self, functional: AbstractFunctional, data: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """The expectation of an additive functional, and its standard error from this one run.

        Seen from the end of the series this is forward filtering, backward sampling, and the
        standard error is that of `ParticlePosterior.expectation`: it counts the paths and the
        particles, leaves out the bias, of order 1/N, and takes particles to be resampled at every
        step. A chain that fits makes the run resample seldom: the standard error is then too large.

        Args:
            functional: what to take the expectation of.
            data: a pytree with one row a time step; `None` for the observations.

        Returns:
            The pair (value, standard error), pytrees as the functional has them.
        """
        if not isinstance(functional, AbstractFunctional):
            raise TypeError(
                "expectation expects a functional, such as StateSum() or AdditiveFunctional(fn),"
                f" got {type(functional).__name__}."
            )
        check_single(self.particles)
        if data is not None:
            check_data(data, self.samples.shape[1], "expectation")
        return _expectation(self, functional, self.data if data is None else data)


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
    guide = _Guide(model, chain, resampling, check_threshold(threshold), num_particles)
    found = _guided(guide, forward, key, series, num_samples)
    refuse_failure(owner, found.status, found.status_time, strict)
    return found


class _Clouds(NamedTuple):
    """What the run backward in time leaves.

    Attributes:
        steps: particles, weights and ancestors of each time, the last in time first drawn.
        lifts: log g_k − log q_k of each particle.
        log_evidence: the logarithm of the estimated mass of γ_0.
        impossible: whether no particle has a positive weight once the row of each time counts.
        undefined: whether the log weight of some particle is NaN or +∞ then.
    """

    steps: Step
    lifts: Float[Array, "time particle"]
    log_evidence: Scalar
    impossible: Bool[Array, "time"]
    undefined: Bool[Array, "time"]


class _Guide(eqx.Module):
    """A run backward in time, as what happens at the end and at each earlier time.

    Attributes:
        model: an unwrapped model.
        chain: where particles are drawn from.
        resampling: the scheme.
        threshold: the share of the particles below which the effective sample size makes the run
            resample.
        num_particles: how many particles.
    """

    model: StateSpaceModel
    chain: AbstractKernelChain
    resampling: Scheme = eqx.field(static=True)
    threshold: float = eqx.field(static=True)
    num_particles: int = eqx.field(static=True)

    def noise(self, key: PRNGKey, steps: PyTree, dtype: Any) -> Float[Array, "particle e"]:
        """Standard normal numbers with which all particles move once."""
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), steps)
        x = jnp.zeros(self.chain.state_dim, dtype)
        size = self.chain.kernel_law(blank, x).noise_dim
        return jax.random.normal(key, (self.num_particles, size), dtype)

    def lift(
        self,
        xs: Float[Array, "particle state"],
        log_laws: Float[Array, "particle"],
        data: Observations,
    ) -> Float[Array, "particle"]:
        """The values log g_k − log q_k of particles; −∞ where q_k, and so γ_k, has no mass."""
        kernel = self.model.emission
        u = input_of(kernel, data)
        emitted = jax.vmap(lambda x: kernel.log_prob(x, data.ys, u, data.mask))(xs)
        inside = log_laws > -jnp.inf
        return jnp.where(inside, emitted - jnp.where(inside, log_laws, 0.0), -jnp.inf)

    def propose(
        self, after: Float[Array, "state"], noise: Float[Array, "e"], step: PyTree, law: Any, u: Any
    ) -> tuple[Float[Array, "state"], Scalar, Scalar]:
        """A draw x of time k-1, its log q_{k-1}, and log m − log of the density it was drawn by."""
        kernel = self.chain.kernel_law(step, after)
        x = kernel.from_noise(noise).astype(after.dtype)
        log_law, log_proposal = summed(law.log_prob(x)), summed(kernel.log_prob(x))
        return x, log_law, self.model.transition.log_prob(x, after, u) - log_proposal


def _run(guide: _Guide, key: PRNGKey, series: Series) -> _Clouds:
    """The run over a prepared series, from its end to time 0."""
    exists, n, chain = series.exists(), series.num_times, guide.chain
    data = Observations(series.ys, series.mask, series.inputs)
    later = None if exists is None else exists[1:]
    # The kernels of padding are degenerate, and their densities infinite.
    laws, steps = fill_padding(chain.laws, exists), fill_padding(chain.steps, later)
    end = n - 1 if series.length is None else series.length - 1
    last_law, last_row = jax.tree.map(lambda leaf: leaf[end], (laws, data))
    start_key, noise_key, select_key = jax.random.split(key, 3)
    dtype = jnp.result_type(series.ys.dtype, *jax.tree.leaves(laws))
    shape = (guide.num_particles, last_law.noise_dim)
    first = jax.vmap(last_law.from_noise)(jax.random.normal(start_key, shape, dtype)).astype(dtype)
    equal = jnp.full(guide.num_particles, -math.log(guide.num_particles), dtype)
    start = weighed(first, equal, jnp.arange(guide.num_particles))
    log_laws = jax.vmap(lambda x: summed(last_law.log_prob(x)))(first)
    lifts = guide.lift(first, log_laws, last_row).astype(dtype)
    # Drawn by time, so that padding changes nothing that exists.
    noise = jax.vmap(lambda key: guide.noise(key, steps, dtype))(jax.random.split(noise_key, n - 1))

    def back(state: tuple, at: tuple) -> tuple[tuple, tuple]:
        cloud, lifts = state
        key, noise, step, law, row, after, real = at
        u = input_of(guide.model.transition, after)
        ancestors, log_weights = select(guide.resampling, guide.threshold, cloud[1], key)
        xs, log_laws, ratios = jax.vmap(lambda x, e: guide.propose(x, e, step, law, u))(
            cloud[0][ancestors], noise
        )
        log_weights = log_weights + lifts[ancestors] + log_laws + ratios
        new = frozen_where(real, weighed(xs, log_weights.astype(dtype), ancestors), cloud)
        found = guide.lift(xs, log_laws, row).astype(dtype)
        lifts = found if real is None else jnp.where(real, found, lifts)
        return ((new.particles, new.log_weights), lifts), (new, lifts)

    keys = jax.random.split(select_key, n - 1)
    earlier = jax.tree.map(lambda leaf: leaf[:-1], (laws, data))
    rows = (keys, noise, steps, *earlier, jax.tree.map(lambda leaf: leaf[1:], data), later)
    state = ((start.particles, start.log_weights), lifts)
    _, rest = lax.scan(back, state, rows, reverse=True)
    found, all_lifts = jax.tree.map(
        lambda head, tail: jnp.concatenate([head, tail[None]]), rest, (start, lifts)
    )
    # At time 0 the law of x_0 before the data stands for the chain's.
    priors = jax.vmap(lambda x: summed(guide.model.prior.log_prob(x)))(found.particles[0])
    log_weights = (found.log_weights[0] + priors + all_lifts[0]).astype(dtype)
    final = weighed(found.particles[0], log_weights, found.ancestors[0])
    clouds = jax.tree.map(lambda leaf, row: leaf.at[0].set(row), found, final)
    # A step to time k-1 brings in the row of time k, and the last one that of time 0.
    impossible, undefined = (
        jnp.concatenate([last[None], flags[:-1]])
        for last, flags in (
            (final.impossible, found.impossible),
            (final.undefined, found.undefined),
        )
    )
    log_evidence = jnp.sum(found.increment) + final.increment
    return _Clouds(clouds, all_lifts, log_evidence, impossible, undefined)


@eqx.filter_jit
def _guided(
    guide: _Guide,
    forward: AbstractBackwardSampler,
    key: PRNGKey,
    series: Series,
    num_samples: int,
) -> GuidedPosterior:
    run_key, first_key, path_key = jax.random.split(key, 3)
    clouds = _run(guide, run_key, series)
    steps = clouds.steps
    data = Observations(series.ys, series.mask, series.inputs)
    first = resample("systematic", first_key, jnp.exp(steps.log_weights[0]), num_samples)
    indices = _forward_indices(guide.model, forward, path_key, clouds, data, series.exists(), first)
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


def _forward_indices(
    model: StateSpaceModel,
    forward: AbstractBackwardSampler,
    key: PRNGKey,
    clouds: _Clouds,
    data: Observations,
    exists: Bool[Array, "time"] | None,
    first: Int[Array, "sample"],
) -> Int[Array, "time sample"]:
    """The particle of each path at each time."""
    kernel, steps = model.transition, clouds.steps
    n = steps.particles.shape[0]

    def forth(state: tuple[Array, Array], at: tuple) -> tuple[tuple[Array, Array], Array]:
        places, xs = state
        key, parents, particles, log_weights, lifts, row, real = at
        ancestors = parents[places]
        if isinstance(forward, Genealogy):
            chosen = ancestors
        else:
            pairs = Pairs.of(kernel, input_of(kernel, row), particles, reverse=True)
            lifted = weighed(particles, log_weights + lifts, parents).log_weights
            chosen = forward.draw(key, pairs, lifted, xs, ancestors)
        if real is not None:
            chosen = jnp.where(real, chosen, places)
        return (chosen, particles[chosen]), chosen

    later = jax.tree.map(
        lambda leaf: leaf[1:], (steps.particles, steps.log_weights, clouds.lifts, data, exists)
    )
    keys = jax.random.split(key, n - 1)
    start = (first, steps.particles[0][first])
    _, indices = lax.scan(forth, start, (keys, steps.ancestors[:-1], *later))
    return jnp.concatenate([first[None], indices])


@eqx.filter_jit
def _expectation(
    posterior: GuidedPosterior, functional: AbstractFunctional, data: PyTree
) -> tuple[PyTree, PyTree]:
    n, num_particles = posterior.particles.shape[:2]
    exists = None if posterior.length is None else jnp.arange(n) < posterior.length
    values = jax.vmap(lambda path: value_along(functional, path, data, exists))(posterior.samples)
    variances = path_variance(values, posterior.indices, num_particles, exists)
    return (
        jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), values),
        jax.tree.map(jnp.sqrt, variances),
    )
