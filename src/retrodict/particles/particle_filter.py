"""Particle filters."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, Scalar, check_key
from retrodict._model import Series, StateSpaceModel, prepare_data, unwrap
from retrodict.particles.cloud import Filter, Step, keep_where_padding
from retrodict.particles.moments import (
    AbstractWeightedStates,
    check_single,
    log_evidence_error,
    num_lineages,
    refuse_failure,
    status_of,
    weighted_quantile,
)
from retrodict.particles.proposal import AbstractProposal, Lookahead
from retrodict.particles.resampling import Scheme


class ParticleFilterPosterior(AbstractWeightedStates):
    """The filtering laws p(x_k | y_{0:k}) as weighted particles.

    Attributes:
        particles: of shape `(time, particle, state)`.
        log_weights: normalised log weights of each time.
        ancestors: the index at the time before from which each particle descends.
        log_evidence: an estimate of log p(y_{0:n-1}); its exponential is unbiased.
        log_evidence_increments: estimates of log p(y_k | y_{0:k-1}), zero where there is no row.
        ess: effective sample sizes 1/Σ w², before resampling.
        status: 0 if fine; 1 if no particle explains an observation, 2 if a weight is undefined.
        status_time: the first time at which it was not fine; −1 if there is none.
        length: the number of rows that exist, or `None` if all of them do.
        resampling: the resampling scheme.
    """

    particles: Float[Array, "time particle state"]
    log_weights: Float[Array, "time particle"]
    ancestors: Int[Array, "time particle"]
    log_evidence: Scalar
    log_evidence_increments: Float[Array, "time"]
    ess: Float[Array, "time"]
    status: Int[Array, ""]
    status_time: Int[Array, ""]
    length: Int[Array, ""] | None
    resampling: Scheme = eqx.field(static=True)

    def _weighted(
        self,
    ) -> tuple[Float[Array, "time particle state"], Float[Array, "time particle"]]:
        check_single(self.particles)
        return self.particles, self.log_weights

    @property
    def num_ancestors(self) -> Int[Array, "time"]:
        """The number of particles of each time with offspring at the last one."""
        check_single(self.particles)
        return num_lineages(self.ancestors)

    def quantile(self, probability: float) -> Float[Array, "time state"]:
        """Return the quantile of each coordinate under the filtering laws.

        Args:
            probability: between 0 and 1.
        """
        return weighted_quantile(*self._weighted(), probability)

    def log_evidence_standard_error(self, lag: int = 20) -> Scalar:
        """Return the standard error of `log_evidence`, estimated from this run.

        The error of resampling and moving at time p is estimated from the shares that the particles
        of time p have in the weights of time p + lag: the variance is the sum over p of the
        contribution of generation p to the sum of squared shares. A longer lag is less biased for
        models that forget slowly, and more variable once few ancestors are left.

        Args:
            lag: the number of steps after which shares are compared.
        """
        return log_evidence_error(self, lag)


def particle_filter(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    num_particles: int = 1000,
    *,
    proposal: AbstractProposal | None = None,
    lookahead: Lookahead | None = None,
    resampling: Scheme = "systematic",
    threshold: float = 0.5,
    strict: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> ParticleFilterPosterior:
    """Estimate filtering laws and the evidence by weighted particles.

    Particles move by the model's transition (a bootstrap filter) or by a proposal (a guided one);
    with a `lookahead` they are resampled by an estimate of the likelihood of the next row (an
    auxiliary filter).

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.1 * jnp.ones(1))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> rd.particle_filter(jax.random.key(1), model, ys, num_particles=100).mean.shape
        (5, 1)

    Args:
        key: a typed key.
        model: the model.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_particles: the number of particles.
        proposal: the laws from which states are drawn, such as `Guided` or `ChainProposal`; `None`
            for the model's prior and transition.
        lookahead: `lookahead(x, data)`, a log weight in place of log p(y_k | x_{k-1} = x), such as
            `mean_lookahead(model)`; `None` for none.
        resampling: `"systematic"`, `"stratified"`, `"residual"` or `"multinomial"`.
        threshold: the filter resamples once the effective sample size is below this share of the
            particles; 1 to do so at every step.
        strict: whether to raise an error if no particle explains an observation, or a weight is
            undefined; inside `jax.jit` only the status of the result is set.
        mask: true where an entry was observed; `True` if all entries were.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; the rest is padding.

    Returns:
        Particles, weights and the estimated evidence.

    Raises:
        ValueError: if data, model and options do not match.
        FloatingPointError: if the filter fails and `strict`; it names the time step.
    """
    check_key(key, "particle_filter")
    forward_filter = Filter(
        unwrap(model), proposal, lookahead, resampling, threshold, num_particles
    )
    series = prepare_data(forward_filter.model, ys, mask=mask, inputs=inputs, length=length)
    posterior = run_filter(forward_filter, key, series)
    refuse_failure("particle_filter", posterior.status, posterior.status_time, strict)
    return posterior


@eqx.filter_jit
def run_filter(forward_filter: Any, key: PRNGKey, series: Series) -> ParticleFilterPosterior:
    """Run a `Filter` or `TemperedFilter` over a prepared series."""
    steps = (
        None if forward_filter.proposal is None else jax.tree.leaves(forward_filter.proposal.steps)
    )
    if steps and steps[0].shape[0] != series.num_times:
        raise ValueError(
            f"The proposal was made for {steps[0].shape[0]} rows, and ys has {series.num_times}."
        )
    data = series.rows
    exists, n = series.exists(), series.num_times
    proposal_rows = None if forward_filter.proposal is None else forward_filter.proposal.steps
    start_key, noise_key, select_key = jax.random.split(key, 3)
    first = forward_filter.start(start_key, jax.tree.map(lambda leaf: leaf[0], data))
    draw = partial(forward_filter.noise, dtype=first.particles.dtype)
    # The states of all times are stored, so that their noise may be drawn at once.
    noise = jax.vmap(draw)(jax.random.split(noise_key, n - 1))
    keys = jax.random.split(select_key, n - 1)

    def move(cloud: Any, at: tuple) -> tuple[Any, Step]:
        key, noise, row, step, exists = at
        new = keep_where_padding(exists, forward_filter.move(cloud, key, noise, row, step), cloud)
        return (new.particles, new.log_weights), new

    later = jax.tree.map(lambda leaf: leaf[1:], (data, proposal_rows, exists))
    cloud = (first.particles, first.log_weights)
    _, rest = lax.scan(move, cloud, (keys, noise, *later))
    steps = jax.tree.map(lambda head, tail: jnp.concatenate([head[None], tail]), first, rest)
    status, time = status_of(steps.impossible, steps.undefined)
    return ParticleFilterPosterior(
        steps.particles,
        steps.log_weights,
        steps.ancestors,
        jnp.sum(steps.increment),
        steps.increment,
        steps.ess,
        status,
        time,
        series.length,
        forward_filter.resampling,
    )
