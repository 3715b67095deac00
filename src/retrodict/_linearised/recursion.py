"""One pass over a series: a filter that linearises on its way, or along laws that are given."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._chains import LinearGaussianChain
from retrodict._exact import Filtered, Transition, Whitened, backward_kernels, reduce_rows, whiten
from retrodict._kernels import AbstractKernel, AbstractLinearGaussianKernel
from retrodict._laws import Gaussian, dense_scale
from retrodict._linearised.moments import conditional_moments, has_constant_scale, law_moments
from retrodict._linearised.rules import AbstractRule, Affine
from retrodict._model import StateSpaceModel
from retrodict._numerics import Factored, condition, linalg, predict
from retrodict._series import Series
from retrodict._types import Scalar


class Pass(eqx.Module):
    """What one pass leaves behind.

    Attributes:
        predicted: the laws of each state given the rows before.
        laws: the filtering laws.
        transition: the linearised transitions into times 1, …, n-1.
        data: the linearised emissions, whitened: value_k = design_k x_k + ε.
        directions: see `Filtered`.
        increments: log densities of each row given those before, under the linearised model.
        squared: squares of the whitened innovations, eᵀ S⁻¹ e.
    """

    predicted: Factored
    laws: Factored
    transition: Transition
    data: Whitened
    directions: Float[Array, "steps state state_plus_noise"]
    increments: Float[Array, "time"]
    squared: Float[Array, "time"]

    def chain(self, series: Series) -> LinearGaussianChain:
        """The filtering laws, and the linearised transitions reversed under them."""
        later = jax.tree.map(lambda leaf: leaf[1:], self.predicted)
        filtered = Filtered(self.laws, later, self.directions)
        kernels, standard = backward_kernels(
            filtered, self.transition, self.data.reduced(), series.exists()
        )
        laws = jax.vmap(Gaussian)(self.laws.mean, self.laws.scale_tril)
        return LinearGaussianChain(laws, kernels, series.length, standard)


class Seen(NamedTuple):
    """An emission linearised and whitened: value = design x + ε, and a constant of its density."""

    design: Float[Array, "*time whitened state"]
    value: Float[Array, "*time whitened"]
    constant: Float[Array, "*time"]


class Row(NamedTuple):
    """What the filter reads at one time; `move` is what the transition out of it needs."""

    see: Any
    move: Any
    exists: Any


def linearised_filter(model: StateSpaceModel, series: Series, rule: AbstractRule) -> Pass:
    """The filter that linearises the emission at its prediction, and the transition at its law."""

    def see(law: Factored, row: Row) -> Seen:
        y, mask, u = row.see
        return _whiten(linearise(model.emission, rule, law, u), y, mask)

    def move(law: Factored, row: Row) -> Affine:
        return linearise(model.transition, rule, law, row.move)

    seen = (series.ys, series.mask, series.inputs)
    rows = Row(seen, _leaving(series.inputs), series.exists())
    return _filter(_prior(model, series), rows, see, move)


def filter_along(
    model: StateSpaceModel, series: Series, rule: AbstractRule, nominal: Gaussian
) -> Pass:
    """The filter of the model that is linearised at the given laws, all of them at once."""
    laws = jax.vmap(Factored.from_scale)(nominal.mean, nominal.scale_tril)
    seen = jax.vmap(
        lambda law, y, mask, u: _whiten(linearise(model.emission, rule, law, u), y, mask)
    )(laws, series.ys, series.mask, series.inputs)
    moves = jax.vmap(lambda law, u: linearise(model.transition, rule, law, u))(
        laws, _leaving(series.inputs)
    )
    rows = Row(seen, moves, series.exists())
    return _filter(_prior(model, series), rows, lambda _, row: row.see, lambda _, row: row.move)


def _leaving(inputs: Array | None) -> Array | None:
    """The input of the transition that leaves each time; any, for the last, which is not used."""
    return None if inputs is None else jnp.concatenate([inputs[1:], inputs[-1:]])


def linearise(kernel: AbstractKernel, rule: AbstractRule, law: Factored, u: Array | None) -> Affine:
    """The kernel as a linear-Gaussian one near a law; as it is, if it is linear already."""
    if isinstance(kernel, AbstractLinearGaussianKernel):
        fixed = kernel.at(u)
        dtype = law.columns.dtype
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


def _prior(model: StateSpaceModel, series: Series) -> Factored:
    arrays = jax.tree.leaves(eqx.filter(model.prior, eqx.is_inexact_array))
    dtype = jnp.result_type(series.ys.dtype, *arrays)
    return Factored.from_scale(*law_moments(model.prior, dtype))


def _whiten(affine: Affine, y: Array, mask: Array | None) -> Seen:
    residual = y.astype(affine.bias.dtype) - affine.bias
    design, value, constant = whiten(affine.weight, affine.scale, residual, mask)
    return Seen(*reduce_rows(design, value), constant)


def _filter(
    prior: Factored,
    rows: Row,
    see: Callable[[Factored, Row], Seen],
    move: Callable[[Factored, Row], Affine],
) -> Pass:
    """Updates by `see` and predicts by `move`, each given the law at hand and a row.

    One step updates and then predicts, so that it is compiled once; what is predicted beyond the
    last row is dropped.
    """

    def advance(state: tuple[Factored, Factored], row: Row) -> tuple[tuple, tuple]:
        predicted, before = state
        design, value, constant = see(predicted, row)
        law, found = condition(predicted, design, value)
        if row.exists is not None:
            law = jax.tree.map(lambda new, old: jnp.where(row.exists, new, old), law, before)
        squared = jnp.sum(found.gains**2 * found.variances)
        transition = Transition(*move(law, row))
        after, directions = predict(law, *transition)
        data, increment = Whitened(design, value), found.log_prob() + constant
        return (after, law), (predicted, law, data, increment, squared, transition, directions)

    # The first row exists: what stands for the law before it is never taken.
    _, (predicted, laws, data, increments, squared, *moves) = lax.scan(
        advance, (prior, prior), rows
    )
    transition, directions = jax.tree.map(lambda leaf: leaf[:-1], moves)
    return Pass(predicted, laws, transition, data, directions, increments, squared)


def iterate(
    model: StateSpaceModel,
    series: Series,
    rule: AbstractRule,
    start: Pass,
    num_iterations: int,
    damping: Scalar,
) -> tuple[Pass, LinearGaussianChain, Float[Array, "iteration"]]:
    """Linearises along the smoothed marginals of the pass before, again and again.

    Returns:
        The last pass and its chain, and how far each pass moved the smoothed means from where it
        was linearised, in standard deviations, where that was farthest.
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
    """Linearise along given laws first, and then as `iterate` does; return the last chain."""
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
    """Iterate from laws to linearise at, a pass and its chain."""

    def again(state: tuple, _: None) -> tuple[tuple, Scalar]:
        nominal = state[0]
        found = filter_along(model, series, rule, nominal)
        chain = found.chain(series)
        smoothed = chain.marginals()
        mean = smoothed.mean + damping * (nominal.mean - smoothed.mean)
        after = jax.vmap(Gaussian)(mean, smoothed.scale_tril)
        return (after, found, chain), _largest_move(nominal, smoothed, series.exists())

    (_, found, chain), changes = lax.scan(again, state, None, length=num_iterations)
    return found, chain, changes


def _largest_move(before: Gaussian, after: Gaussian, exists: Array | None) -> Scalar:
    moves = jnp.abs(after.mean - before.mean) * linalg.safe_reciprocal(after.std)
    if exists is not None:
        moves = jnp.where(exists[:, None], moves, 0.0)
    return jnp.max(moves)
