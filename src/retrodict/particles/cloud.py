"""Weighted particles at one time, and one step of a particle filter."""

import math
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count
from retrodict._model import AbstractGaussianKernel, Series, StateSpaceModel, check_densities
from retrodict.particles.proposal import AbstractProposal, Lookahead
from retrodict.particles.resampling import (
    Ancestors,
    Particles,
    Scheme,
    Weights,
    check_scheme,
    check_threshold,
    resample,
)

Cloud: TypeAlias = tuple[Particles, Weights]
"""Particles and their normalised log weights."""


class Step(NamedTuple):
    """The result of one step of a filter.

    Attributes:
        particles: x_k of each particle.
        log_weights: normalised log weights of the filtering law.
        ancestors: the index at time k-1 from which each particle descends; its own index at time 0.
        increment: an estimate of log p(y_k | y_{0:k-1}).
        ess: the effective sample size 1/Σ w².
        impossible: whether no particle has a positive weight.
        undefined: whether the log weight of some particle is NaN or +∞.
    """

    particles: Float[Array, "*time particle state"]
    log_weights: Float[Array, "*time particle"]
    ancestors: Int[Array, "*time particle"]
    increment: Float[Array, "*time"]
    ess: Float[Array, "*time"]
    impossible: Bool[Array, "*time"]
    undefined: Bool[Array, "*time"]


class Filter(eqx.Module):
    """A particle filter: its step at time 0 and at each later time.

    Attributes:
        model: an unwrapped model.
        proposal: the laws from which states are drawn; `None` for the model's prior and transition.
        lookahead: the log weights by which an auxiliary filter resamples; `None` for none.
        resampling: the scheme.
        threshold: the effective sample size, as a share of the particles, below which the filter
            resamples.
        num_particles: the number of particles.
    """

    model: StateSpaceModel
    proposal: AbstractProposal | None
    lookahead: Lookahead | None
    resampling: Scheme = eqx.field(static=True)
    threshold: float = eqx.field(static=True)
    num_particles: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        check_count(self.num_particles, "num_particles")
        check_scheme(self.resampling)
        check_threshold(self.threshold)
        parts = ("emission",) if self.proposal is None else ("prior", "transition", "emission")
        check_densities(self.model, "A particle filter", parts)
        if not isinstance(self.proposal, AbstractProposal | None):
            raise TypeError(
                "proposal must be a proposal, such as Guided(initial, move), got"
                f" {type(self.proposal).__name__}."
            )
        if self.lookahead is not None and not callable(self.lookahead):
            raise TypeError(
                f"lookahead must be a function of (x, data), got {type(self.lookahead).__name__}."
            )

    def noise(self, key: PRNGKey, dtype: Any) -> PyTree:
        """Draw the randomness of one move of all particles.

        A Gaussian transition uses one block of normal variables, which is several times faster
        than one key per particle.
        """
        if self.proposal is None and isinstance(self.model.transition, AbstractGaussianKernel):
            return jax.random.normal(key, (self.num_particles, self.model.state_dim), dtype)
        return jax.random.split(key, self.num_particles)

    def start(self, key: PRNGKey, data: Series) -> Step:
        """Draw and weigh particles at time 0."""
        model = self.model
        law = model.prior if self.proposal is None else self.proposal.initial(data)
        particles = draw_first(law, key, self.num_particles, data)
        log_weights = self._log_emission(particles, data)
        if self.proposal is not None:
            log_weights = log_weights + jax.vmap(
                lambda x: summed(model.prior.log_prob(x)) - summed(law.log_prob(x))
            )(particles)
        return normalise_weights(particles, log_weights - math.log(self.num_particles))

    def move(self, cloud: Cloud, key: PRNGKey, noise: PyTree, data: Series, step: PyTree) -> Step:
        """Resample particles if needed, move them to time k, and weigh them.

        Args:
            cloud: particles at time k-1.
            key: a typed key, for resampling.
            noise: the result of `noise`.
            data: the row of time k.
            step: the row of the proposal's steps.
        """
        particles, log_weights = cloud
        # A model in single precision must not narrow particles in double precision.
        kinds = (particles.dtype, log_weights.dtype)
        ahead = None
        if self.lookahead is not None:
            ahead = jax.vmap(lambda x: self.lookahead(x, data))(particles)  # pyright: ignore
            # A particle with a tiny lookahead may still explain the data, and must stay possible.
            top = jnp.max(ahead)
            ahead = jnp.where(jnp.isfinite(top), jnp.maximum(ahead, top - 30.0), 0.0)
        ancestors, log_weights = select(self.resampling, self.threshold, log_weights, key, ahead)
        befores = particles[ancestors]
        particles, ratio = self._propose(befores, noise, data, step)
        particles = particles.astype(kinds[0])
        log_weights = log_weights + self._log_emission(particles, data) + ratio
        return normalise_weights(particles, log_weights.astype(kinds[1]), ancestors)

    def _propose(
        self, befores: Particles, noise: PyTree, data: Series, step: Any
    ) -> tuple[Particles, Weights]:
        """Draw x_k; return it and the log ratio of transition and proposal."""
        kernel, proposal, u = self.model.transition, self.proposal, data.inputs

        def one(before: Array, noise: Any) -> tuple[Array, Scalar]:
            if proposal is None:
                if isinstance(kernel, AbstractGaussianKernel):
                    return kernel.law(before, u).from_noise(noise), jnp.zeros(())
                return kernel.sample(noise, before, u), jnp.zeros(())
            law = proposal.move(before, data, step)
            x = jnp.asarray(law.sample(noise)).astype(before.dtype)
            return x, kernel.log_prob(before, x, u) - summed(law.log_prob(x))

        return jax.vmap(one)(befores, noise)

    def _log_emission(self, particles: Particles, data: Series) -> Weights:
        log_prob = self.model.emission.log_prob
        return jax.vmap(lambda x: log_prob(x, data.ys, data.inputs, data.mask))(particles)


def draw_first(law: Any, key: PRNGKey, num_particles: int, data: Series) -> Particles:
    """Draw the states of time 0, in the wider of the types of the law and of the data."""
    keys = jax.random.split(key, num_particles)
    particles = jax.vmap(lambda key: jnp.asarray(law.sample(key)))(keys)
    return particles.astype(jnp.result_type(particles.dtype, data.ys.dtype))


def select(
    scheme: Scheme,
    threshold: float,
    log_weights: Weights,
    key: PRNGKey,
    ahead: Weights | None = None,
) -> tuple[Ancestors, Weights]:
    """Resample if the effective sample size is small; return ancestors and their log weights.

    Args:
        scheme: the resampling scheme.
        threshold: the share of the particles below which the effective sample size is small.
        log_weights: normalised log weights.
        key: a typed key.
        ahead: additional log weights for resampling; `None` for none.
    """
    count = log_weights.shape[0]
    first_stage, correction = log_weights, jnp.zeros_like(log_weights)
    if ahead is not None:
        total = jax.nn.logsumexp(log_weights + ahead)
        first_stage, correction = log_weights + ahead - total, total - ahead
    weights = jnp.exp(first_stage)

    def renewed() -> tuple[Array, Array]:
        chosen = resample(scheme, key, weights, count)
        return chosen, correction[chosen] - math.log(count)

    def unchanged() -> tuple[Array, Array]:
        return jnp.arange(count, dtype=jnp.int32), log_weights

    if threshold >= 1.0:
        return renewed()
    few = 1.0 / jnp.sum(weights**2) < threshold * count
    return lax.cond(few, renewed, unchanged)


def normalise_weights(
    particles: Particles, log_weights: Weights, ancestors: Ancestors | None = None
) -> Step:
    """Normalise weights; if none is positive they become equal, and `impossible` is set.

    At the first time visited, particles are their own ancestors.
    """
    if ancestors is None:
        ancestors = jnp.arange(particles.shape[0])
    undefined = jnp.isnan(log_weights) | (log_weights == jnp.inf)
    log_weights = jnp.where(undefined, -jnp.inf, log_weights)
    total = jax.nn.logsumexp(log_weights)
    impossible = total == -jnp.inf
    equal = -math.log(log_weights.shape[0])
    log_weights = jnp.where(impossible, equal, log_weights - jnp.where(impossible, 0.0, total))
    return Step(
        particles,
        log_weights,
        ancestors.astype(jnp.int32),
        total,
        1.0 / jnp.sum(jnp.exp(2.0 * log_weights)),
        impossible,
        jnp.any(undefined),
    )


def summed(log_prob: Any) -> Scalar:
    """Sum a log density over the independent entries of a distribution."""
    return jnp.sum(jnp.asarray(log_prob))


def keep_where_padding(exists: Bool[Array, ""] | None, new: Step, cloud: Cloud) -> Step:
    """Return the step, or a no-op at a row that does not exist."""
    if exists is None:
        return new
    zero = jnp.zeros_like(new.increment)
    stays = normalise_weights(*cloud)._replace(log_weights=cloud[1], increment=zero)
    return jax.tree.map(lambda a, b: jnp.where(exists, a, b), new, stays)
