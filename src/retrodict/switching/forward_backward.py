"""Exact smoothing of hidden Markov models by the forward–backward algorithm."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._model import Series, unwrap
from retrodict.switching.chain import Mixture, Moves, SwitchingChain
from retrodict.switching.gaussian_sum import SwitchingPosterior
from retrodict.switching.model import (
    SwitchingModel,
    emission_table,
    log_transitions,
    prepare_switching,
    require_finite,
)


def forward_backward(
    model: SwitchingModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> SwitchingPosterior:
    """Compute the exact posterior of a hidden Markov model.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 1.0)],
        ... )
        >>> posterior = rd.switching.forward_backward(model, jnp.array([[0.0], [2.0], [3.0]]))
        >>> posterior.chain.marginals().regimes.tolist()
        [1, 1, 1]

    Args:
        model: a model without a continuous state.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the rest is padding.
    """
    require_finite(model, "forward_backward")
    model = unwrap(model)
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    return smooth_regimes(model, series)


@eqx.filter_jit
def smooth_regimes(model: SwitchingModel, series: Series) -> SwitchingPosterior:
    """Run the forward algorithm of an unwrapped model over a prepared series."""
    table, matrices = emission_table(model, series), log_transitions(model, series)
    exists = series.exists()

    def normalised(joint: Float[Array, "regime"]) -> tuple[Array, Array]:
        increment = jax.nn.logsumexp(joint)
        return joint - increment, increment

    def step(log_law: Array, at: tuple) -> tuple[Array, tuple]:
        matrix, row, real = at
        new, increment = normalised(jax.nn.logsumexp(log_law[:, None] + matrix, axis=0) + row)
        if real is not None:
            new, increment = jnp.where(real, new, log_law), jnp.where(real, increment, 0.0)
        return new, (new, increment)

    first, increment = normalised(model.regimes.log_initial() + table[0])
    later = None if exists is None else exists[1:]
    _, (rest, increments) = lax.scan(step, first, (matrices, table[1:], later))
    log_laws = jnp.concatenate([first[None], rest])
    increments = jnp.concatenate([increment[None], increments])
    chain = finite_chain(log_laws, matrices, series.length)
    return SwitchingPosterior(chain, jnp.sum(increments), increments)


def finite_chain(
    log_laws: Float[Array, "time regime"],
    log_transition: Float[Array, "time-1 regime regime"],
    length: Any,
) -> SwitchingChain:
    """Return the chain of filtering probabilities and transitions, without a continuous state."""
    n, count = log_laws.shape
    empty = jnp.zeros((n, count, 0), log_laws.dtype)
    square = jnp.zeros((n, count, 0, 0), log_laws.dtype)
    laws = Mixture(log_laws, empty, square, jnp.broadcast_to(jnp.arange(count), (n, count)))
    no_bias = jnp.zeros((n - 1, 1, count, 0), log_laws.dtype)
    no_matrix = jnp.zeros((n - 1, 1, count, 0, 0), log_laws.dtype)
    return SwitchingChain(laws, Moves(log_transition, no_matrix, no_bias, no_matrix), length)
