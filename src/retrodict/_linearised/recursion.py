"""One filter pass over a series, linearised at its own laws or at given laws, and its iteration."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._chains import LinearGaussianChain
from retrodict._exact import TransitionArrays, backward_gains, backward_kernels, reduce_rows, whiten
from retrodict._linearised.moments import conditional_moments, has_constant_scale, law_moments
from retrodict._linearised.rules import AbstractRule, Affine
from retrodict._model import (
    AbstractKernel,
    AbstractLinearGaussianKernel,
    Gaussian,
    Series,
    StateSpaceModel,
    dense_scale,
)
from retrodict._numerics import GaussianLaw, condition, law_of, linalg, predict


class Pass(eqx.Module):
    """The results of one filter pass.

    Attributes:
        predicted: the law of each state given the earlier rows.
        laws: the filtering laws.
        transition: the linearised transitions into times 1, …, n-1.
        data: the linearised, whitened emissions.
        increments: log density of each row given the earlier ones, under the linearised model.
        squared: squares of the whitened innovations, eᵀ S⁻¹ e.
    """

    predicted: GaussianLaw
    laws: GaussianLaw
    transition: TransitionArrays
    data: "WhitenedEmission"
    increments: Float[Array, "time"]
    squared: Float[Array, "time"]

    def chain(self, series: Series) -> LinearGaussianChain:
        """Return the chain of the filtering laws and the reversed linearised transitions."""
        design, value, _ = self.data
        reversal = backward_gains(self.laws.scale, self.transition, design[1:], series.exists())
        predicted = self.predicted.mean
        innovation = value - jax.vmap(linalg.matvec)(design, predicted)
        exists = series.exists()
        if exists is not None:
            moved = jnp.where(exists[1:, None], predicted[1:], self.laws.mean[:-1])
            predicted = jnp.concatenate([predicted[:1], moved])
        kernels, standard = backward_kernels(reversal, self.laws.mean, predicted, innovation)
        laws = jax.vmap(Gaussian)(self.laws.mean, self.laws.scale)
        return LinearGaussianChain(laws, kernels, series.length, standard)


class WhitenedEmission(NamedTuple):
    """A linearised, whitened emission value = design x + ε, and a constant of its log density."""

    design: Float[Array, "*time whitened state"]
    value: Float[Array, "*time whitened"]
    constant: Float[Array, "*time"]


class Row(NamedTuple):
    """The inputs of the filter at one time.

    Attributes:
        emission: the data of the update.
        transition: the data of the transition out of this time.
        exists: whether the row exists; `None` if all rows do.
    """

    emission: Any
    transition: Any
    exists: Any


def linearised_filter(model: StateSpaceModel, series: Series, rule: AbstractRule) -> Pass:
    """Run the filter that linearises emissions at predictions and transitions at filtering laws."""

    def emission(law: GaussianLaw, row: Row) -> WhitenedEmission:
        y, mask, u = row.emission
        return whiten_emission(linearise(model.emission, rule, law, u), y, mask)

    def transition(law: GaussianLaw, row: Row) -> Affine:
        return linearise(model.transition, rule, law, row.transition)

    data = (series.ys, series.mask, series.inputs)
    rows = Row(data, _outgoing_inputs(series.inputs), series.exists())
    return _filter(_prior(model, series), rows, emission, transition)


def filter_along(
    model: StateSpaceModel, series: Series, rule: AbstractRule, nominal: Gaussian
) -> Pass:
    """Run the filter of the model linearised at the nominal laws, for all times at once."""
    laws = jax.vmap(law_of)(nominal.mean, nominal.scale_tril)
    emissions = jax.vmap(
        lambda law, y, mask, u: whiten_emission(linearise(model.emission, rule, law, u), y, mask)
    )(laws, series.ys, series.mask, series.inputs)
    transitions = jax.vmap(lambda law, u: linearise(model.transition, rule, law, u))(
        laws, _outgoing_inputs(series.inputs)
    )
    rows = Row(emissions, transitions, series.exists())
    return _filter(
        _prior(model, series), rows, lambda _, row: row.emission, lambda _, row: row.transition
    )


def _outgoing_inputs(inputs: Array | None) -> Array | None:
    """Return the input of the transition out of each time; the last one is an unused copy."""
    return None if inputs is None else jnp.concatenate([inputs[1:], inputs[-1:]])


def linearise(
    kernel: AbstractKernel, rule: AbstractRule, law: GaussianLaw, u: Array | None
) -> Affine:
    """Linearise a kernel near a law; return a linear-Gaussian kernel unchanged."""
    if isinstance(kernel, AbstractLinearGaussianKernel):
        fixed = kernel.at(u)
        dtype = law.mean.dtype
        return Affine(
            fixed.weight.astype(dtype),
            fixed.bias.astype(dtype),
            dense_scale(fixed.scale_tril).astype(dtype),
        )
    return rule.linearise(
        lambda x: conditional_moments(kernel, x, u),
        law,
        constant_scale=has_constant_scale(kernel),
    )


def _prior(model: StateSpaceModel, series: Series) -> GaussianLaw:
    arrays = jax.tree.leaves(eqx.filter(model.prior, eqx.is_inexact_array))
    dtype = jnp.result_type(series.ys.dtype, *arrays)
    return law_of(*law_moments(model.prior, dtype))


def whiten_emission(affine: Affine, y: Array, mask: Array | None) -> WhitenedEmission:
    """Return a linearised emission of one row with unit noise, in at most d + 1 entries."""
    residual = y.astype(affine.bias.dtype) - affine.bias
    design, value, constant = whiten(affine.weight, affine.scale, residual, mask)
    return WhitenedEmission(*reduce_rows(design, value), constant)


def _filter(
    prior: GaussianLaw,
    rows: Row,
    emission: Callable[[GaussianLaw, Row], WhitenedEmission],
    transition: Callable[[GaussianLaw, Row], Affine],
) -> Pass:
    """Run a Kalman filter whose emissions and transitions are functions of the current law and row.

    Each step updates and then predicts, so that both are compiled once. The prediction beyond the
    last row is dropped.
    """

    def advance(state: tuple[GaussianLaw, GaussianLaw], row: Row) -> tuple[tuple, tuple]:
        predicted, before = state
        emitted = emission(predicted, row)
        law, innovation = condition(predicted, emitted.design, emitted.value)
        if row.exists is not None:
            law = jax.tree.map(lambda new, old: jnp.where(row.exists, new, old), law, before)
        affine = TransitionArrays(*transition(law, row))
        after = predict(law, *affine)
        increment = innovation.log_prob + emitted.constant
        square = innovation.square
        return (after, law), (predicted, law, emitted, increment, square, affine)

    # The first row always exists, so the initial value of `before` is never used.
    _, (predicted, laws, data, increments, squared, transitions) = lax.scan(
        advance, (prior, prior), rows
    )
    transitions = jax.tree.map(lambda leaf: leaf[:-1], transitions)
    return Pass(predicted, laws, transitions, data, increments, squared)


def iterate(
    model: StateSpaceModel,
    series: Series,
    rule: AbstractRule,
    start: Pass,
    num_iterations: int,
    damping: Scalar,
) -> tuple[Pass, LinearGaussianChain, Float[Array, "iteration"]]:
    """Linearise repeatedly along the smoothed marginals of the previous pass.

    Returns:
        The last pass, its chain, and the largest distance per iteration between a smoothed mean and
        the mean at which the model was linearised, in standard deviations.
    """
    chain = start.chain(series)
    state = (chain.marginals(), start, chain)
    return _repeat(model, series, rule, state, num_iterations, damping)


def iterate_from(
    model: StateSpaceModel,
    series: Series,
    rule: AbstractRule,
    nominal: Gaussian,
    num_iterations: int,
    damping: Scalar,
) -> LinearGaussianChain:
    """Linearise at the nominal laws, iterate as `iterate` does, and return the last chain."""
    first = filter_along(model, series, rule, nominal)
    state = (nominal, first, first.chain(series))
    return _repeat(model, series, rule, state, num_iterations, damping)[1]


def _repeat(
    model: StateSpaceModel,
    series: Series,
    rule: AbstractRule,
    state: tuple[Gaussian, Pass, LinearGaussianChain],
    num_iterations: int,
    damping: Scalar,
) -> tuple[Pass, LinearGaussianChain, Float[Array, "iteration"]]:
    """Iterate from a state of nominal laws, a pass and its chain."""

    def iteration(state: tuple, _: None) -> tuple[tuple, Scalar]:
        nominal = state[0]
        new_pass = filter_along(model, series, rule, nominal)
        chain = new_pass.chain(series)
        smoothed = chain.marginals()
        mean = smoothed.mean + damping * (nominal.mean - smoothed.mean)
        after = jax.vmap(Gaussian)(mean, smoothed.scale_tril)
        return (after, new_pass, chain), _largest_move(nominal, smoothed, series.exists())

    (_, last_pass, chain), changes = lax.scan(iteration, state, None, length=num_iterations)
    return last_pass, chain, changes


def _largest_move(before: Gaussian, after: Gaussian, exists: Array | None) -> Scalar:
    moves = jnp.abs(after.mean - before.mean) * linalg.safe_reciprocal(after.std)
    if exists is not None:
        moves = jnp.where(exists[:, None], moves, 0.0)
    return jnp.max(moves)
