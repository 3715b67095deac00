"""Particles that move backward in time by the kernels of a chain, and paths drawn forward.

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
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._chains import AbstractKernelChain
from retrodict._expectations import fill_padding
from retrodict._model import StateSpaceModel
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict.particles.cloud import Step, frozen_where, select, summed, weighed
from retrodict.particles.resampling import Scheme


class Clouds(NamedTuple):
    """The result of the pass backward in time.

    Attributes:
        steps: particles, weights and ancestors of each time.
        path_log_weights: the normalised weights W_k g_k / q_k, by which paths are drawn forward.
        log_evidence: the logarithm of the estimated mass of γ_0.
        impossible: whether no particle has a positive weight after the row of each time.
        undefined: whether the log weight of some particle is NaN or +∞ after it.
    """

    steps: Step
    path_log_weights: Float[Array, "time particle"]
    log_evidence: Scalar
    impossible: Bool[Array, "time"]
    undefined: Bool[Array, "time"]


class Guide(eqx.Module):
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
        self,
        xs: Float[Array, "particle state"],
        log_laws: Float[Array, "particle"],
        data: Series,
    ) -> Float[Array, "particle"]:
        """Return log g_k − log q_k of particles; −∞ where q_k, and so γ_k, has no mass."""
        kernel = self.model.emission
        u = data.inputs
        emitted = jax.vmap(lambda x: kernel.log_prob(x, data.ys, u, data.mask))(xs)
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


def run_backward(guide: Guide, key: PRNGKey, series: Series) -> Clouds:
    """Move particles from the end of a prepared series to time 0."""
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
    equal = jnp.full(guide.num_particles, -math.log(guide.num_particles), dtype)
    start = weighed(first, equal, jnp.arange(guide.num_particles))
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
        new = frozen_where(real, weighed(xs, log_weights.astype(dtype), ancestors), cloud)
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
    final = weighed(steps.particles[0], log_weights, steps.ancestors[0])
    clouds = jax.tree.map(lambda leaf, row: leaf.at[0].set(row), steps, final)
    # A step to time k-1 reads the row of time k, and the last one that of time 0.
    impossible, undefined = (
        jnp.concatenate([last[None], flags[:-1]])
        for last, flags in (
            (final.impossible, steps.impossible),
            (final.undefined, steps.undefined),
        )
    )
    log_evidence = jnp.sum(steps.increment) + final.increment
    lifted = jax.vmap(weighed)(clouds.particles, clouds.log_weights + all_lifts, clouds.ancestors)
    return Clouds(clouds, lifted.log_weights, log_evidence, impossible, undefined)
