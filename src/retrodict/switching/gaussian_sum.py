"""Gaussian-sum smoothers: one Gaussian per regime, merged by moments at every step.

GPB2 (the generalised pseudo-Bayes filter of order two, and Kim's filter) updates every pair of an
earlier and a later regime, and merges the K² results into K. The interacting multiple models (IMM)
merge before the update, which needs K updates. Both are exact but for the merge. The chain that
they return reverses the moves from the filtering laws in closed form, and merges nothing further.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._linearised import (
    AbstractRule,
    AbstractSigmaPoints,
    Cubature,
    GaussHermite,
    Taylor,
    law_moments,
    linearise,
    whiten_emission,
)
from retrodict._model import AbstractLinearGaussianKernel, Series, unwrap
from retrodict._numerics import GaussianLaw, condition, law_of, linalg, predict
from retrodict.switching.chain import SwitchingChain
from retrodict.switching.mixture import Mixture, Moves
from retrodict.switching.model import (
    SwitchingModel,
    each,
    over_regimes,
    prepare_switching,
    require_state,
)

Merge = Literal["after", "before"]
"""Whether regimes are merged after the update (GPB2) or before the prediction (IMM)."""

WIDENING = 0.05
"""The part of its former covariance that a state keeps when the next regime informs it."""

Update = Callable[[GaussianLaw], tuple[GaussianLaw, Array]]
"""A map from predicted laws, with axes (source, regime), to updated laws and log likelihoods."""


class SwitchingPosterior(eqx.Module):
    """The result of a smoother of a switching model.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 3.0)],
        ... )
        >>> posterior = rd.switching.forward_backward(model, jnp.array([[0.1], [2.5]]))
        >>> posterior.log_evidence_increments.shape, posterior.chain.num_times
        ((2,), 2)

    Attributes:
        chain: the law of the paths of regimes and states.
        log_evidence: log p(y); approximate unless the smoother is exact.
        log_evidence_increments: log p(y_k | y_{0:k-1}), zero where there is no row.
    """

    chain: SwitchingChain
    log_evidence: Scalar
    log_evidence_increments: Float[Array, "time"]


def gpb2_smoother(
    model: SwitchingModel,
    ys: Any,
    *,
    rule: AbstractRule | None = None,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> SwitchingPosterior:
    """Smooth by the generalised pseudo-Bayes filter of order two, also known as Kim's filter.

    For models that are linear and Gaussian given the regimes, the only approximation is the merge
    of K² Gaussians into K at every step. Other kernels are linearised at the laws of each regime,
    and the probabilities of regimes that depend on the state are averaged over the points of the
    rule, with the moments of the state given the next regime. Under `Taylor()` they are those at
    the mean, and the regime does not inform the state before it.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in (0.1, 1.0)],
        ...     emission=rd.LinearGaussianKernel(eye, zero, 0.1 * eye),
        ... )
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=20)
        >>> posterior = rd.switching.gpb2_smoother(model, ys)
        >>> posterior.chain.marginals(jax.random.key(1)).probabilities.shape
        (20, 2)

    Args:
        model: the model, with a continuous state.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        rule: how nonlinear kernels are linearised, and the points for recurrent regimes. By default
            `Taylor()`; for recurrent regimes `GaussHermite(5)` up to two states, and `Cubature()`
            for more.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the rest is padding.
    """
    return _smoother("gpb2_smoother", model, ys, "after", rule, mask, inputs, length)


def imm_smoother(
    model: SwitchingModel,
    ys: Any,
    *,
    rule: AbstractRule | None = None,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> SwitchingPosterior:
    """Smooth by interacting multiple models, with K updates per step where GPB2 has K².

    Args and result are those of `gpb2_smoother`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in (0.1, 1.0)],
        ...     emission=rd.LinearGaussianKernel(eye, zero, 0.1 * eye),
        ... )
        >>> rd.switching.imm_smoother(model, jnp.zeros((20, 1))).chain.filtered.shape
        (20, 2)
    """
    return _smoother("imm_smoother", model, ys, "before", rule, mask, inputs, length)


def _smoother(
    owner: str,
    model: SwitchingModel,
    ys: Any,
    merge: Merge,
    rule: AbstractRule | None,
    mask: Any,
    inputs: Any,
    length: Any,
) -> SwitchingPosterior:
    require_state(model, owner)
    model = unwrap(model)
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    return smooth_by_merging(model, series, merge, default_rule(model) if rule is None else rule)


def default_rule(model: SwitchingModel) -> AbstractRule:
    """Return Taylor's rule; for regimes that depend on the state, a rule with points."""
    if not model.regimes.takes_state:
        return Taylor()
    return GaussHermite(5) if model.state_dim <= 2 else Cubature()


@eqx.filter_jit
def smooth_by_merging(
    model: SwitchingModel, series: Series, merge: Merge, rule: AbstractRule
) -> SwitchingPosterior:
    """Run a Gaussian-sum filter of an unwrapped model over a prepared series."""
    exists = series.exists()

    def update(row: Series) -> Update:
        return emission_update(model, rule, row)

    prior = prior_laws(model, jnp.result_type(series.ys.dtype, float))
    at = lambda index: jax.tree.map(lambda leaf: leaf[index], series.rows)  # noqa: E731
    start = GaussianLaw(prior.means[None], prior.scale_trils[None])
    first, increment = updated(prior.log_weights[None], start, update(at(0)))

    def step(laws: Mixture, at: tuple) -> tuple[Mixture, tuple]:
        row, real = at
        moves = moves_of(model, rule, laws, row.inputs)
        new, increment = filter_step(laws, moves, update(row), merge)
        if real is not None:
            new = jax.tree.map(lambda leaf, old: jnp.where(real, leaf, old), new, laws)
            increment = jnp.where(real, increment, 0.0)
        return new, (new, moves, increment)

    later = (at(slice(1, None)), None if exists is None else exists[1:])
    _, (rest, moves, increments) = lax.scan(step, first, later)
    laws = jax.tree.map(lambda head, tail: jnp.concatenate([head[None], tail]), first, rest)
    increments = jnp.concatenate([increment[None], increments])
    chain = SwitchingChain(laws, moves, series.length)
    return SwitchingPosterior(chain, jnp.sum(increments), increments)


def prior_laws(model: Any, dtype: Any) -> Mixture:
    """Return the prior of regimes and states, with one component per regime.

    Args:
        model: an unwrapped model, or anything with `regimes` and `prior`.
        dtype: the type of the laws.
    """
    count = model.regimes.num_regimes
    means, scales = over_regimes(model.prior, count, lambda law: law_of(*law_moments(law, dtype)))
    return Mixture(model.regimes.log_initial().astype(dtype), means, scales, jnp.arange(count))


def emission_update(model: SwitchingModel, rule: AbstractRule, row: Series) -> Update:
    """Return the update of predicted laws by one row, with emissions linearised at these laws."""

    def of_regime(kernel: Any, law: GaussianLaw) -> tuple[GaussianLaw, Array]:
        def one(law: GaussianLaw) -> tuple[GaussianLaw, Array]:
            emission = linearise(kernel, rule, law, row.inputs)
            emitted = whiten_emission(emission, row.ys, row.mask)
            law, innovation = condition(law, emitted.design, emitted.value)
            return law, innovation.log_prob + emitted.constant

        return jax.vmap(one)(law)

    def of_all(laws: GaussianLaw) -> tuple[GaussianLaw, Array]:
        by_regime = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), laws)
        changed = over_regimes(model.emission, model.num_regimes, of_regime, by_regime)
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), changed)

    return of_all


def moves_of(
    model: Any, rule: AbstractRule, laws: Mixture, u: Float[Array, "input"] | None
) -> Moves:
    """Return the moves of the components of one time, linearised at their laws.

    Args:
        model: an unwrapped model, or anything with `regimes` and `transition`.
        rule: how nonlinear transitions are linearised.
        laws: the filtering law of one time.
        u: the input of the next time.
    """

    def of_component(mean: Array, scale: Array) -> Any:
        law = GaussianLaw(mean, scale)
        return over_regimes(
            model.transition,
            model.regimes.num_regimes,
            lambda kernel: linearise(kernel, rule, law, u),
        )

    sources = (laws.means, laws.scale_trils)
    if all(isinstance(kernel, AbstractLinearGaussianKernel) for kernel in each(model.transition)):
        sources = jax.tree.map(lambda leaf: leaf[:1], sources)
    weights, biases, scales = jax.vmap(of_component)(*sources)
    log_probabilities, origins = regime_moves(model, rule, laws, u)
    return Moves(log_probabilities, weights, biases, scales, origins)


def regime_moves(
    model: Any, rule: AbstractRule, laws: Mixture, u: Float[Array, "input"] | None
) -> tuple[Float[Array, "component regime"], GaussianLaw | None]:
    """Return the log probabilities of the next regime, and the law of the state given it.

    The joint law of a component's state x and of the next regime j is N(x; m, P) p(j | x). Under a
    rule with points x_n of weights w_n, with v_nj = w_n p(j | x_n),

        p(j) = Σ_n v_nj,    E[x | j] = Σ_n v_nj x_n / p(j),    Cov[x | j] likewise.

    A few points may leave all weight to one of them, so that a part `WIDENING` of P is mixed into
    the covariance; it changes nothing if the regime does not depend on x. Without points the
    probabilities are those at m, and the law of x is unchanged.
    """
    if not (model.regimes.takes_state and isinstance(rule, AbstractSigmaPoints)):
        at_mean = jax.vmap(lambda mean, z: model.regimes.log_transition(mean, u)[z])
        return at_mean(laws.means, laws.regimes), None
    points = rule.points(laws.means.shape[1])
    # Points of negative weight are left out, so that the result is a distribution.
    nodes = jnp.asarray(points.nodes, laws.means.dtype)
    weights = jnp.maximum(jnp.asarray(points.weights, nodes.dtype), 0.0)[:, None]

    def of_component(mean: Array, scale: Array, z: Array) -> tuple[Array, GaussianLaw]:
        xs = mean[None] + linalg.matmul(nodes, scale.T)
        log_rows = jax.vmap(lambda x: model.regimes.log_transition(x, u)[z])(xs)
        total = jax.nn.logsumexp(log_rows, axis=0, b=weights)
        shares = weights * jnp.exp(log_rows - total[None])

        def given(share: Array) -> GaussianLaw:
            centre = jnp.sum(share[:, None] * xs, axis=0)
            spread = jnp.sqrt((1.0 - WIDENING) * share)[:, None] * (xs - centre[None])
            columns = jnp.concatenate([spread.T, math.sqrt(WIDENING) * scale], axis=1)
            return law_of(centre, columns)

        return jax.nn.log_softmax(total), jax.vmap(given, in_axes=1)(shares)

    return jax.vmap(of_component)(laws.means, laws.scale_trils, laws.regimes)


def filter_step(
    laws: Mixture, moves: Moves, update: Update, merge: Merge
) -> tuple[Mixture, Scalar]:
    """Move the filtering laws of one time to the next, with one component per regime.

    Returns:
        The filtering laws of the next time, and log p(y_k | y_{0:k-1}).
    """
    if merge == "before":
        weights = laws.log_weights[:, None] + moves.log_probabilities
        sources, axis = moves.sources(laws)
        # The law of the earlier state given that the later regime is j, merged over components.
        by_regime = None if axis is None else 1
        mixed = jax.vmap(merge_laws, in_axes=(1, by_regime))(weights, sources)
        kernels = (moves.weights, moves.biases, moves.scale_trils)
        at_mean = tuple(jnp.mean(leaf, axis=0) for leaf in kernels)
        predicted = jax.vmap(predict)(mixed, *at_mean)
        predicted = jax.tree.map(lambda leaf: leaf[None], predicted)
        weights = jax.nn.logsumexp(weights, axis=0)[None]
    else:
        weights, predicted = predict_pairs(laws, moves)
    return updated(weights, predicted, update)


def predict_pairs(laws: Mixture, moves: Moves) -> tuple[Float[Array, "source regime"], GaussianLaw]:
    """Return the log weights and the predicted laws of all pairs of a component and a regime."""
    sources, axis = moves.sources(laws)
    kernels = tuple(
        jnp.broadcast_to(leaf, (laws.means.shape[0], *leaf.shape[1:]))
        for leaf in (moves.weights, moves.biases, moves.scale_trils)
    )
    to_regimes = jax.vmap(predict, in_axes=(axis, 0, 0, 0))
    predicted = jax.vmap(to_regimes)(sources, *kernels)
    return laws.log_weights[:, None] + moves.log_probabilities, predicted


def updated(
    log_weights: Float[Array, "source regime"], predicted: GaussianLaw, update: Update
) -> tuple[Mixture, Scalar]:
    """Update predicted laws, and merge those of each regime."""
    laws, likelihoods = update(predicted)
    joint = log_weights + likelihoods
    increment = jax.nn.logsumexp(joint)
    merged = jax.vmap(merge_laws, in_axes=1)(joint, laws)
    weights = jax.nn.logsumexp(joint, axis=0) - increment
    regimes = jnp.arange(joint.shape[1])
    return Mixture(weights, merged.mean, merged.scale, regimes), increment


def merge_laws(log_weights: Float[Array, "source"], laws: GaussianLaw) -> GaussianLaw:
    """Return the Gaussian with the mean and the covariance of a mixture.

    The covariance is a sum of Gram matrices. Their columns are triangularised together, so that
    nothing is subtracted.
    """
    log_weights = jax.nn.log_softmax(log_weights)
    if laws.mean.shape[0] == 1:
        return GaussianLaw(laws.mean[0], laws.scale[0])
    mean = jnp.sum(jnp.exp(log_weights)[:, None] * laws.mean, axis=0)
    roots = jnp.exp(0.5 * log_weights)
    spreads = jnp.concatenate([laws.scale, (laws.mean - mean[None])[..., None]], axis=-1)
    columns = jnp.moveaxis(roots[:, None, None] * spreads, 0, 1)
    return law_of(mean, columns.reshape(mean.shape[0], -1))
