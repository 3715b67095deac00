"""Exact smoothing of hidden Markov models by the forward–backward algorithm."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._model import Series, unwrap
from retrodict._numerics import prefix_scan
from retrodict.switching.chain import SwitchingChain
from retrodict.switching.gaussian_sum import SwitchingPosterior
from retrodict.switching.mixture import Mixture, Moves
from retrodict.switching.model import (
    SwitchingModel,
    emission_table,
    log_transitions,
    prepare_switching,
    require_finite,
)

NEVER = -1e30
"""The log probability of an impossible move in the neutral matrix: finite, for its derivatives."""


def forward_backward(
    model: SwitchingModel,
    ys: Any,
    *,
    parallel: bool = False,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> SwitchingPosterior:
    """Compute the exact posterior of a hidden Markov model.

    Call it under `jax.vmap` for a batch: `jax.vmap(lambda ys: forward_backward(model, ys))(batch)`.

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
        parallel: whether to filter in O(log n) rounds, by an associative scan over time, which
            takes K times as many operations: for long series on an accelerator.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the rest is padding.
    """
    require_finite(model, "forward_backward")
    model = unwrap(model)
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    return smooth_regimes(model, series, parallel)


@eqx.filter_jit
def smooth_regimes(
    model: SwitchingModel, series: Series, parallel: bool = False
) -> SwitchingPosterior:
    """Run the forward algorithm of an unwrapped model over a prepared series."""
    table, matrices = emission_table(model, series), log_transitions(model, series)
    first = model.regimes.log_initial() + table[0]
    exists = series.exists()
    later = None if exists is None else exists[1:]
    if parallel:
        log_laws = _parallel_scan(first, matrices, table[1:], later)
        increments = _increments(first, log_laws, matrices, table[1:])
    else:
        shared = None if model.regimes.takes_input else model.regimes.log_transition()
        log_laws, increments = _sequential_scan(first, shared, matrices, table[1:], later)
    if exists is not None:
        increments = jnp.where(exists, increments, 0.0)
    chain = finite_chain(log_laws, matrices, series.length)
    return SwitchingPosterior(chain, jnp.sum(increments), increments)


def _sequential_scan(
    first: Float[Array, "regime"],
    shared: Float[Array, "regime regime"] | None,
    matrices: Float[Array, "step regime regime"],
    table: Float[Array, "step regime"],
    exists: Bool[Array, "step"] | None,
) -> tuple[Float[Array, "time regime"], Float[Array, "time"]]:
    """Return the filtering log probabilities and the evidence of each row, row by row.

    In the scan a law is shifted to a maximum of zero. All laws are normalised together afterwards,
    outside of the sequential part: with the shift c_k and the sum s_k of the shifted law, the
    evidence of row k is c_k + log s_k − log s_{k-1}.
    """

    def shifted(law: Float[Array, "regime"]) -> tuple[Array, Array]:
        shift = lax.stop_gradient(jnp.max(law))
        return law - shift, shift

    def step(law: Array, at: tuple) -> tuple[Array, tuple]:
        matrix, row, real = at
        matrix = fixed if matrix is None else matrix
        new, shift = shifted(_predicted(law, *matrix) + row)
        if real is not None:
            new = jnp.where(real, new, law)
        return new, (new, shift)

    fixed: Any = None if shared is None else (shared, jnp.exp(shared))
    varying = None if shared is not None else (matrices, jnp.exp(matrices))
    start, shift = shifted(first)
    _, (rest, shifts) = lax.scan(step, start, (varying, table, exists))
    laws = jnp.concatenate([start[None], rest])
    log_sums = jax.nn.logsumexp(laws, axis=1)
    before = jnp.concatenate([jnp.zeros_like(log_sums[:1]), log_sums[:-1]])
    increments = jnp.concatenate([shift[None], shifts]) + log_sums - before
    return laws - log_sums[:, None], increments


def _predicted(
    log_law: Float[Array, "regime"],
    matrix: Float[Array, "regime regime"],
    probabilities: Float[Array, "regime regime"],
) -> Float[Array, "regime"]:
    """Return log Σ_i exp(l_i + A_ij) for a law whose largest entry is about zero.

    With exp(A) at hand this takes K exponentials in place of K². Where the sum underflows, because
    all ways into a regime are improbable, its largest term replaces it.
    """
    sums = jnp.sum(jnp.exp(log_law)[:, None] * probabilities, axis=0)
    info = jnp.finfo(sums.dtype)
    precise = sums > info.tiny / info.eps
    largest = jnp.max(log_law[:, None] + matrix, axis=0)
    return jnp.where(precise, jnp.log(jnp.where(precise, sums, 1.0)), largest)


def _parallel_scan(
    first: Float[Array, "regime"],
    matrices: Float[Array, "step regime regime"],
    table: Float[Array, "step regime"],
    exists: Bool[Array, "step"] | None,
) -> Float[Array, "time regime"]:
    """Return the filtering log probabilities of all times, in O(log n) rounds."""
    count = first.shape[0]
    neutral = jnp.where(jnp.eye(count, dtype=bool), 0.0, NEVER).astype(first.dtype)
    steps = matrices + table[:, None, :]
    if exists is not None:
        steps = jnp.where(exists[:, None, None], steps, neutral)

    def compose(before: Array, after: Array) -> Array:
        product = jax.nn.logsumexp(before[:, :, None] + after[None, :, :], axis=1)
        return product - lax.stop_gradient(jnp.max(product))

    # All rows of the first matrix are the first law, and so are those of all products.
    start = jnp.broadcast_to(first - lax.stop_gradient(jnp.max(first)), (1, count, count))
    products = prefix_scan(compose, jnp.concatenate([start, steps]), neutral)
    return jax.nn.log_softmax(products[:, 0])


def _increments(
    first: Float[Array, "regime"],
    log_laws: Float[Array, "time regime"],
    matrices: Float[Array, "step regime regime"],
    table: Float[Array, "step regime"],
) -> Float[Array, "time"]:
    """Return log p(y_k | y_{0:k-1}) of all times from the filtering laws."""
    predicted = jax.vmap(_predicted)(log_laws[:-1], matrices, jnp.exp(matrices))
    return jax.nn.logsumexp(jnp.concatenate([first[None], predicted + table]), axis=1)


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
