"""A particle filter with tempered observations.

Under a sharp sensor, none of a thousand draws of the transition explains the next observation, and
a bootstrap filter degenerates to the few nearest ones. Here the law of time k moves from the
prediction to the filtering law through

    p_φ(x_{k-1}, x_k) ∝ p(x_{k-1} | y_{0:k-1}) m(x_{k-1}, x_k) g(x_k, y_k)^φ,    0 = φ_0 < … < 1,

with steps in φ that keep half of the effective sample size, and Metropolis moves of x_k at each of
them (Herbst and Schorfheide 2019). All modes that the prediction reaches are followed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from retrodict._arrays import PRNGKey, Scalar
from retrodict._model import Series, StateSpaceModel
from retrodict.particles.backward_samplers import ExactBackward
from retrodict.particles.cloud import Cloud, Step, draw_first, normalise_weights, summed
from retrodict.particles.ffbsi import ParticlePosterior, run_smoother
from retrodict.particles.resampling import Ancestors, Particles, Scheme, Weights, resample

MIN_ESS = 0.5
"""The share of the effective sample size that a step in the temperature keeps."""

NUM_MOVES = 4
"""The number of Metropolis moves per particle and temperature."""

MAX_STAGES = 60
"""The largest number of temperatures per row: each halves the sample, so that 60 cover 40 nats."""

NUM_HALVINGS = 30
"""The number of bisections for the next temperature."""

MIN_STEP = 1e-9
"""The smallest step in the temperature."""

JUMPS = 0.2
"""The share of moves by the whole difference of two particles, which may lead to another mode."""


class _Stage(NamedTuple):
    """Particles at a temperature.

    Attributes:
        phi: the temperature.
        befores: x_{k-1} of each particle.
        xs: x_k of each particle.
        log_g: its log-likelihood.
        ancestors: the index at time k-1.
        total: the increment of the log-evidence so far.
        num_stages: the number of stages so far.
    """

    phi: Scalar
    befores: Particles
    xs: Particles
    log_g: Weights
    ancestors: Ancestors
    total: Scalar
    num_stages: Int[Array, ""]


class TemperedFilter(eqx.Module):
    """A particle filter whose steps are tempered; `run_filter` runs it as it does a `Filter`.

    Attributes:
        model: an unwrapped model; its prior and transition must have densities.
        num_particles: the number of particles.
    """

    model: StateSpaceModel
    num_particles: int = eqx.field(static=True)
    proposal: None = eqx.field(static=True, default=None)
    resampling: Scheme = eqx.field(static=True, default="systematic")

    def noise(self, key: PRNGKey, dtype: Any) -> Array:
        """Draw the keys of one step."""
        return jax.random.split(key, self.num_particles)

    def start(self, key: PRNGKey, data: Series) -> Step:
        """Draw particles at time 0."""
        prior, (draw_key, key) = self.model.prior, jax.random.split(key)
        xs = draw_first(prior, draw_key, self.num_particles, data)
        return self._temper(key, xs, xs, data, lambda _, x: summed(prior.log_prob(x)))

    def move(self, cloud: Cloud, key: PRNGKey, noise: Array, data: Series, step: Any) -> Step:
        """Move particles to time k. All weights are equal before and after."""
        befores, kernel = cloud[0], self.model.transition
        u = data.inputs
        xs = jax.vmap(lambda x, key: jnp.asarray(kernel.sample(key, x, u)))(befores, noise)
        xs = xs.astype(befores.dtype)
        return self._temper(key, befores, xs, data, lambda x, z: kernel.log_prob(x, z, u))

    def _temper(
        self,
        key: PRNGKey,
        befores: Particles,
        xs: Particles,
        data: Series,
        log_move: Callable[[Array, Array], Scalar],
    ) -> Step:
        kernel, count = self.model.emission, self.num_particles
        u = data.inputs

        def log_emission(x: Array) -> Scalar:
            value = kernel.log_prob(x, data.ys, u, data.mask)
            return jnp.where(jnp.isnan(value) | (value == jnp.inf), -jnp.inf, value)

        def unfinished(stage: _Stage) -> Array:
            possible = jnp.isfinite(stage.total)
            return (stage.phi < 1.0) & (stage.num_stages < MAX_STAGES) & possible

        def advance(stage: _Stage) -> _Stage:
            phi = _next_temperature(stage.phi, stage.log_g)
            logs = _scaled(phi - stage.phi, stage.log_g)
            total = jax.nn.logsumexp(logs)
            weights = jnp.exp(logs - jnp.where(jnp.isfinite(total), total, 0.0))
            select_key, move_key = jax.random.split(jax.random.fold_in(key, stage.num_stages))
            chosen = resample("systematic", select_key, weights, count)
            befores, xs, log_g, ancestors = (leaf[chosen] for leaf in stage[1:5])
            total, num_stages = stage.total + total - math.log(count), stage.num_stages + 1
            stage = _Stage(phi, befores, xs, log_g, ancestors, total, num_stages)
            return _moved(move_key, stage, log_move, log_emission)

        log_g = jax.vmap(log_emission)(xs)
        zero = jnp.zeros((), xs.dtype)
        places = jnp.arange(count, dtype=jnp.int32)
        first = _Stage(zero, befores, xs, log_g, places, zero, jnp.zeros((), jnp.int32))
        last = lax.while_loop(unfinished, advance, first)
        failed = ~((last.phi >= 1.0) & jnp.isfinite(last.total))
        increment = jnp.where(failed, -jnp.inf, last.total)
        step = normalise_weights(last.xs, jnp.zeros(count, xs.dtype), last.ancestors)
        return step._replace(increment=increment, impossible=failed)


def tempered_smoother(
    key: PRNGKey, model: StateSpaceModel, series: Series, num_particles: int
) -> ParticlePosterior:
    """Draw paths given the whole series through the particles of a tempered filter.

    Args:
        key: a typed key.
        model: an unwrapped model; its prior and transition must have densities.
        series: a prepared series.
        num_particles: the number of particles, and of paths.
    """
    forward_filter = TemperedFilter(model, num_particles)
    return run_smoother(forward_filter, ExactBackward(), key, series, num_particles)


def _scaled(factor: Scalar, logs: Weights) -> Weights:
    """Return the product, −∞ where the second factor is, even if the first is zero."""
    return jnp.where(logs == -jnp.inf, -jnp.inf, factor * jnp.where(logs == -jnp.inf, 0.0, logs))


def _next_temperature(phi: Scalar, log_g: Weights) -> Scalar:
    """Return the largest temperature that keeps the share `MIN_ESS` of the sample size."""

    def share(step: Scalar) -> Scalar:
        weights = jax.nn.softmax(_scaled(step, log_g))
        return 1.0 / (log_g.shape[0] * jnp.sum(weights**2))

    # Particles that are impossible at any temperature are lost at the first step in any case.
    least = MIN_ESS * jnp.mean(log_g > -jnp.inf)

    def halve(_: Any, ends: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        low, high = ends
        middle = jnp.exp(0.5 * (jnp.log(low) + jnp.log(high)))
        enough = share(middle) >= least
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    remaining = 1.0 - phi
    smallest = jnp.minimum(jnp.asarray(MIN_STEP, phi.dtype), remaining)
    low, _ = lax.fori_loop(0, NUM_HALVINGS, halve, (smallest, remaining))
    return jnp.where(share(remaining) >= least, 1.0, jnp.minimum(phi + low, 1.0))


def _moved(
    key: PRNGKey,
    stage: _Stage,
    log_move: Callable[[Array, Array], Scalar],
    log_emission: Callable[[Array], Scalar],
) -> _Stage:
    """Make Metropolis moves by scaled differences of two other particles (ter Braak 2006).

    Differences of particles within a mode have its width, and differences between modes lead from
    one to the other: nothing has to be tuned. They are those of the cloud before the moves.
    """
    cloud, phi, (count, dim) = stage.xs, stage.phi, stage.xs.shape
    widest = 2.38 / math.sqrt(2 * dim)

    def attempt(state: tuple, key: PRNGKey) -> tuple[tuple, None]:
        xs, log_g, log_m = state
        pair_key, size_key, jump_key, accept_key = jax.random.split(key, 4)
        first, second = jax.random.randint(pair_key, (2, count), 0, count)
        sizes = widest * jnp.exp(-3.0 * jax.random.uniform(size_key, (count,), xs.dtype))
        jumps = jax.random.bernoulli(jump_key, JUMPS, (count,))
        sizes = jnp.where(jumps, 1.0, sizes)
        proposals = xs + sizes[:, None] * (cloud[first] - cloud[second])
        new_g = jax.vmap(log_emission)(proposals)
        new_m = jax.vmap(log_move)(stage.befores, proposals)
        ratio = new_m + _scaled(phi, new_g) - log_m - _scaled(phi, log_g)
        level = jnp.log(jax.random.uniform(accept_key, (count,), xs.dtype))
        accepted = level < ratio
        return (
            jnp.where(accepted[:, None], proposals, xs),
            jnp.where(accepted, new_g, log_g),
            jnp.where(accepted, new_m, log_m),
        ), None

    log_m = jax.vmap(log_move)(stage.befores, cloud).astype(cloud.dtype)
    start = (cloud, stage.log_g.astype(cloud.dtype), log_m)
    (xs, log_g, _), _ = lax.scan(attempt, start, jax.random.split(key, NUM_MOVES))
    return stage._replace(xs=xs, log_g=log_g)
