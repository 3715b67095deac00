"""The Rao-Blackwellised particle smoother: regimes by particles, states by Kalman filters.

A particle is a path of regimes z_{0:k}, of which the filter stores the weight and the law
N(m, P) of x_k given the path and y_{0:k}. At each row every particle has K successors. Their
weights are known in closed form,

    W_ij ∝ w_i p(z_k = j | z_{k-1}^i) p(y_k | z_{0:k-1}^i, z_k = j, y_{0:k-1}),

and the sum of the unnormalised ones estimates p(y_k | y_{0:k-1}). N of the N K successors are kept.
The optimal reduction (Fearnhead and Clifford 2003) keeps each with probability min(1, W_ij/c), with
the weight max(W_ij, c), where c is such that N are kept on average. It keeps every path of regimes
as long as there are at most N, and never keeps two copies of one path.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._linearised import Taylor, law_moments, linearise, whiten_emission
from retrodict._model import Series, unwrap
from retrodict._numerics import GaussianLaw, condition, law_of, predict
from retrodict.particles import check_threshold, refuse_failure, status_of
from retrodict.switching.chain import SwitchingChain, SwitchingMarginals, sampled_marginals
from retrodict.switching.enumeration import smooth_given_regimes
from retrodict.switching.mixture import Mixture, Moves
from retrodict.switching.model import (
    SwitchingModel,
    over_regimes,
    prepare_switching,
    require_state,
)
from retrodict.switching.reduction import (
    Reduction,
    Successors,
    check_reduction,
    effective_size,
    reduce_successors,
)


class RaoBlackwellisedPosterior(eqx.Module):
    """The result of `rao_blackwellised_smoother`.

    Attributes:
        chain: the law of the paths of regimes and states, with one component per particle.
        zs: sampled paths of regimes, of shape `(sample, time)`.
        xs: sampled paths of states, of shape `(sample, time, state)`.
        marginals: smoothed moments. Those of the states are averages of Kalman smoothers given the
            sampled regimes.
        log_evidence: an estimate of log p(y); its exponential is unbiased.
        log_evidence_increments: estimates of log p(y_k | y_{0:k-1}), zero where there is no row.
        ess: effective sample sizes 1/Σ W² of the successors, before N of them are kept.
        status: 0 if fine; 1 if no particle explains an observation, 2 if a weight is undefined.
        status_time: the first time at which it was not fine; −1 if there is none.
    """

    chain: SwitchingChain
    zs: Int[Array, "sample time"]
    xs: Float[Array, "sample time state"]
    marginals: SwitchingMarginals
    log_evidence: Scalar
    log_evidence_increments: Float[Array, "time"]
    ess: Float[Array, "time"]
    status: Int[Array, ""]
    status_time: Int[Array, ""]


def rao_blackwellised_smoother(
    key: PRNGKey,
    model: SwitchingModel,
    ys: Any,
    *,
    num_particles: int = 1000,
    num_samples: int = 100,
    resampling: Reduction = "optimal",
    threshold: float = 0.5,
    strict: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> RaoBlackwellisedPosterior:
    """Smooth by a particle filter over regimes with a Kalman filter per particle.

    It converges to the exact posterior as the number of particles grows. With at least K^n
    particles and the optimal reduction, filtering laws and the evidence are exact. The spread of
    `log_evidence` over several keys is its standard error.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in (0.1, 1.0)],
        ...     emission=rd.LinearGaussianKernel(eye, zero, 0.1 * eye),
        ... )
        >>> ys = jnp.array([[0.0], [2.0], [0.5]])
        >>> posterior = rd.switching.rao_blackwellised_smoother(jax.random.key(0), model, ys)
        >>> posterior.marginals.regimes.tolist()
        [1, 1, 1]

    Args:
        key: a typed key.
        model: a model that is linear and Gaussian given its regimes.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_particles: the number N of particles.
        num_samples: the number of paths that are drawn backward, for the smoothed moments.
        resampling: `"optimal"`, which keeps distinct successors; or `"systematic"`, `"stratified"`,
            `"residual"` or `"multinomial"`, which draw N of the N K successors.
        threshold: for all schemes except the optimal one: they draw once the effective sample size
            is below this share of the particles. Otherwise each particle keeps one of its
            successors.
        strict: whether to raise an error if no particle explains an observation, or a weight is
            undefined; inside `jax.jit` only the status of the result is set.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the rest is padding.

    Returns:
        The chain, sampled paths, smoothed moments and the estimated evidence.

    Raises:
        TypeError: if the model is not linear and Gaussian given its regimes.
        FloatingPointError: if the filter fails and `strict`; it names the time step.
    """
    owner = "rao_blackwellised_smoother"
    check_key(key, owner)
    require_state(model, owner)
    model = unwrap(model)
    if not model.is_conditionally_linear_gaussian:
        raise TypeError(
            f"{owner} expects a model that is linear and Gaussian given its regimes, with regimes"
            " that do not depend on the state. Use gpb2_smoother, which linearises, or"
            " grid_smoother for one or two states."
        )
    counts = check_count(num_particles, "num_particles"), check_count(num_samples, "num_samples")
    check_reduction(resampling)
    check_threshold(threshold)
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    posterior = _smooth(model, series, key, *counts, resampling, threshold)
    refuse_failure(owner, posterior.status, posterior.status_time, strict)
    return posterior


class _Rows(NamedTuple):
    """What the filter reads at each row, for every regime.

    Attributes:
        design: of the whitened emission value = design x + ε.
        value: of the whitened emission.
        constant: of its log density.
        log_transition: log p(z_{k+1} | z_k), with one row per earlier regime.
        weight: F of the transition out of this row.
        bias: b of this transition.
        scale: the lower factor of its covariance.
    """

    design: Float[Array, "time regime whitened state"]
    value: Float[Array, "time regime whitened"]
    constant: Float[Array, "time regime"]
    log_transition: Float[Array, "time regime regime"]
    weight: Float[Array, "time regime state state"]
    bias: Float[Array, "time regime state"]
    scale: Float[Array, "time regime state state"]


class _Step(NamedTuple):
    """The filter's results at one row, or stacked over rows."""

    laws: Mixture
    increment: Float[Array, "*time"]
    ess: Float[Array, "*time"]
    impossible: Array
    undefined: Array


class _Predicted(NamedTuple):
    """The successors of all particles before their row is observed."""

    log_weights: Successors
    laws: GaussianLaw


@eqx.filter_jit
def _smooth(
    model: SwitchingModel,
    series: Series,
    key: PRNGKey,
    num_particles: int,
    num_samples: int,
    resampling: Reduction,
    threshold: float,
) -> RaoBlackwellisedPosterior:
    filter_key, path_key = jax.random.split(key)
    rows = _rows_of(model, series)
    steps = _filter(model, series, rows, filter_key, num_particles, resampling, threshold)
    moves = _moves(rows, steps.laws.regimes)
    chain = SwitchingChain(steps.laws, moves, series.length)
    trace = chain.trace(path_key, num_samples)
    _, means, covariances = lax.map(
        lambda zs: smooth_given_regimes(model, series, zs), trace.zs, batch_size=256
    )
    marginals = sampled_marginals(chain, trace._replace(means=means, covariances=covariances))
    status, time = status_of(steps.impossible, steps.undefined)
    return RaoBlackwellisedPosterior(
        chain,
        trace.zs,
        trace.xs,
        marginals,
        jnp.sum(steps.increment),
        steps.increment,
        steps.ess,
        status,
        time,
    )


def _rows_of(model: SwitchingModel, series: Series) -> _Rows:
    """Evaluate emissions and transitions of all rows; the last transition is not used."""
    count, inputs = model.num_regimes, series.inputs
    dtype = jnp.result_type(series.ys.dtype, float)
    empty = jnp.zeros(model.state_dim, dtype)
    # The law at which a linear kernel would be linearised determines the data type only.
    law = GaussianLaw(empty, jnp.zeros((model.state_dim,) * 2, dtype))

    def of_row(row: Series, u: Array | None) -> _Rows:
        def emission(kernel: Any) -> Any:
            return whiten_emission(linearise(kernel, Taylor(), law, row.inputs), row.ys, row.mask)

        def transition(kernel: Any) -> Any:
            return linearise(kernel, Taylor(), law, u)

        matrix = model.regimes.log_transition(u=u if model.regimes.takes_input else None)
        design, value, constant = over_regimes(model.emission, count, emission)
        weight, bias, scale = over_regimes(model.transition, count, transition)
        return _Rows(design, value, constant, matrix, weight, bias, scale)

    outgoing = None if inputs is None else jnp.concatenate([inputs[1:], inputs[-1:]])
    return jax.vmap(of_row)(series.rows, outgoing)


def _moves(rows: _Rows, regimes: Int[Array, "time particle"]) -> Moves:
    log_probabilities = jax.vmap(lambda matrix, here: matrix[here])(
        rows.log_transition[:-1], regimes[:-1]
    )
    weights, biases, scales = (leaf[:-1, None] for leaf in (rows.weight, rows.bias, rows.scale))
    return Moves(log_probabilities, weights, biases, scales)


def _filter(
    model: SwitchingModel,
    series: Series,
    rows: _Rows,
    key: PRNGKey,
    num_particles: int,
    resampling: Reduction,
    threshold: float,
) -> _Step:
    """Run the filter; every row updates and then predicts, so that both are compiled once."""
    exists = series.exists()

    def advance(state: tuple, at: tuple) -> tuple[tuple, _Step]:
        predicted, last = state
        row, key, real = at
        step = _update(predicted, row, key, resampling, threshold)
        new = _predict(step.laws, row)
        if real is None:
            return (new, None), step
        idle = _Step(last, *(jnp.zeros_like(leaf) for leaf in step[1:3]), False, False)  # pyright: ignore
        idle = idle._replace(ess=effective_size(last.log_weights))
        step, new = jax.tree.map(lambda a, b: jnp.where(real, a, b), (step, new), (idle, predicted))
        return (new, step.laws), step

    start = _prior(model, num_particles, rows.value.dtype)
    keys = jax.random.split(key, series.num_times)
    blank = None if exists is None else _blank(num_particles, model.state_dim, rows.value.dtype)
    return lax.scan(advance, (start, blank), (rows, keys, exists))[1]


def _prior(model: SwitchingModel, num_particles: int, dtype: Any) -> _Predicted:
    """Return the prior as the successors of the first particle; all others have no weight."""
    means, scales = over_regimes(
        model.prior, model.num_regimes, lambda law: law_of(*law_moments(law, dtype))
    )
    first = jnp.arange(num_particles) == 0
    log_weights = jnp.where(first[:, None], model.regimes.log_initial()[None], -jnp.inf)
    laws = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (num_particles, *leaf.shape)),
        GaussianLaw(means, scales),
    )
    return _Predicted(log_weights.astype(dtype), laws)


def _blank(num_particles: int, dim: int, dtype: Any) -> Mixture:
    """Return laws that are replaced at the first row."""
    return Mixture(
        jnp.zeros(num_particles, dtype),
        jnp.zeros((num_particles, dim), dtype),
        jnp.zeros((num_particles, dim, dim), dtype),
        jnp.zeros(num_particles, jnp.int32),
    )


def _update(
    predicted: _Predicted, row: _Rows, key: PRNGKey, resampling: Reduction, threshold: float
) -> _Step:
    """Weigh all successors by their row, and keep as many as there are particles."""

    def one(law: GaussianLaw, design: Array, value: Array) -> tuple[GaussianLaw, Array]:
        law, innovation = condition(law, design, value)
        return law, innovation.log_prob

    over_particles = jax.vmap(jax.vmap(one), in_axes=(0, None, None))
    laws, log_likelihoods = over_particles(predicted.laws, row.design, row.value)
    joint = predicted.log_weights + (log_likelihoods + row.constant[None])
    undefined = jnp.isnan(joint) | (joint == jnp.inf)
    joint = jnp.where(undefined, -jnp.inf, joint)
    increment = jax.nn.logsumexp(joint)
    impossible = increment == -jnp.inf
    # After a failure all successors have equal weights; the status reports it.
    log_weights = jnp.where(impossible, -math.log(joint.size), joint - increment)
    particles, regimes, log_kept = reduce_successors(key, log_weights, resampling, threshold)
    means, scales = (leaf[particles, regimes] for leaf in laws)
    mixture = Mixture(log_kept, means, scales, regimes)
    return _Step(mixture, increment, effective_size(log_weights), impossible, jnp.any(undefined))


def _predict(laws: Mixture, row: _Rows) -> _Predicted:
    """Return the successors of all particles before the next row is observed."""
    over_particles = jax.vmap(jax.vmap(predict, in_axes=(None, 0, 0, 0)), (0, None, None, None))
    sources = GaussianLaw(laws.means, laws.scale_trils)
    log_weights = laws.log_weights[:, None] + row.log_transition[laws.regimes]
    return _Predicted(log_weights, over_particles(sources, row.weight, row.bias, row.scale))
