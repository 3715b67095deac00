"""Forward–backward for a batch of series, in probabilities and side by side.

Arrays have the axes (regime, series), so that each operation on a regime runs over all series at
once. Probabilities take one exponential per row and regime, before the recursion. They underflow
where a regime is excluded by more than half of the exponents of the floating type; the batch is
then filtered in logarithms instead.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._model import Series, unwrap
from retrodict.switching.forward_backward import smooth_regimes
from retrodict.switching.model import (
    SwitchingModel,
    emission_table,
    prepare_switching_batch,
    require_finite,
)

FEW = 12
"""Products with the transition matrix are written out for up to this many regimes."""


class RegimeProbabilities(eqx.Module):
    """Probabilities of the regimes of several series.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.markov_autoregression(2)
        >>> result = rd.switching.forward_backward_batch(model, jnp.zeros((3, 5, 1)))
        >>> result.log_evidence.shape, result.filtered.shape
        ((3,), (3, 5, 2))

    Attributes:
        log_evidence: log p(y_{0:n-1}).
        filtered: P(z_k = j | y_{0:k}).
        smoothed: P(z_k = j | y_{0:n-1}).
    """

    log_evidence: Float[Array, "batch"]
    filtered: Float[Array, "batch time regime"]
    smoothed: Float[Array, "batch time regime"]


def forward_backward_batch(
    model: SwitchingModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> RegimeProbabilities:
    """Compute evidence, filtering and smoothing probabilities of many series.

    The results are those of `forward_backward` under `jax.vmap`, which also returns chains, in
    less time. Do not call it under `jax.vmap`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 1.0)],
        ... )
        >>> batch = jnp.array([[[0.0], [0.0]], [[2.0], [3.0]]])
        >>> result = rd.switching.forward_backward_batch(model, batch)
        >>> jnp.argmax(result.smoothed, axis=-1).tolist()
        [[0, 0], [1, 1]]

    Args:
        model: a model without a continuous state.
        ys: observations, of shape `(batch, time, obs)`; NaN where missing.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.
    """
    require_finite(model, "forward_backward_batch")
    model = unwrap(model)
    batch = prepare_switching_batch(model, ys, mask=mask, inputs=inputs, length=length)
    return smooth_regimes_of_all(model, batch)


@eqx.filter_jit
def smooth_regimes_of_all(model: SwitchingModel, batch: Series) -> RegimeProbabilities:
    """Smooth a prepared batch, in probabilities if none underflows."""
    if model.regimes.takes_input:
        return _in_logarithms(model, batch)
    matrix = jnp.exp(model.regimes.log_transition())
    table = jnp.moveaxis(jax.vmap(lambda series: emission_table(model, series))(batch), 0, -1)
    exists = None
    if batch.length is not None:
        exists = jax.vmap(lambda series: series.exists(), out_axes=-1)(batch)
    filtered, predicted, evidence, smallest = _filter(
        jnp.exp(model.regimes.log_initial()), matrix, table, exists
    )
    least = jnp.sqrt(jnp.finfo(table.dtype).tiny)
    smallest = jnp.minimum(smallest, jnp.min(jnp.where(matrix > 0, matrix, 1.0)))

    def in_probabilities() -> RegimeProbabilities:
        smoothed = _smooth(matrix, filtered, predicted, exists)
        return RegimeProbabilities(
            evidence, jnp.moveaxis(filtered, -1, 0), jnp.moveaxis(smoothed, -1, 0)
        )

    return lax.cond(smallest > least, in_probabilities, lambda: _in_logarithms(model, batch))


def _in_logarithms(model: SwitchingModel, batch: Series) -> RegimeProbabilities:
    def one(series: Series) -> tuple[Array, Array, Array]:
        posterior = smooth_regimes(model, series)
        smoothed = posterior.chain.marginals().probabilities
        return posterior.log_evidence, posterior.chain.filtered, smoothed

    return RegimeProbabilities(*jax.vmap(one)(batch))


def _transposed_product(
    matrix: Float[Array, "regime regime"], law: Float[Array, "regime series"]
) -> Float[Array, "regime series"]:
    """Return Aᵀ p of every series; written out for few regimes."""
    count = matrix.shape[0]
    if count > FEW:
        return jnp.matmul(matrix.T, law, precision="highest")
    total = matrix[0][:, None] * law[0][None]
    for i in range(1, count):
        total = total + matrix[i][:, None] * law[i][None]
    return total


def _filter(
    initial: Float[Array, "regime"],
    matrix: Float[Array, "regime regime"],
    table: Float[Array, "time regime series"],
    exists: Bool[Array, "time series"] | None,
) -> tuple[Array, Array, Array, Array]:
    """Return filtered and predicted probabilities, the evidence, and the smallest probability."""
    largest = lax.stop_gradient(jnp.max(table, axis=1))
    likelihoods = jnp.exp(table - largest[:, None])

    def update(predicted: Array, likelihood: Array) -> tuple[Array, Array, Array]:
        joint = predicted * likelihood
        total = jnp.sum(joint, axis=0)
        law = joint / total[None]
        # Regimes that cannot be reached have probability zero in any arithmetic.
        smallest = jnp.min(jnp.where(predicted > 0, law, 1.0), axis=0)
        return law, total, smallest

    def step(state: tuple, at: tuple) -> tuple[tuple, tuple]:
        (law, smallest), (likelihood, real) = state, at
        predicted = _transposed_product(matrix, law)
        new, total, least = update(predicted, likelihood)
        if real is not None:
            new, total = jnp.where(real[None], new, law), jnp.where(real, total, 1.0)
            least = jnp.where(real, least, 1.0)
        return (new, jnp.minimum(smallest, least)), (new, predicted, total)

    start = jnp.broadcast_to(initial[:, None], likelihoods[0].shape)
    first, total, smallest = update(start, likelihoods[0])
    later = None if exists is None else exists[1:]
    state, (laws, predicted, totals) = lax.scan(step, (first, smallest), (likelihoods[1:], later))
    laws, totals = jnp.concatenate([first[None], laws]), jnp.concatenate([total[None], totals])
    # Rows that do not exist have a table of zeros, and so a largest entry of zero.
    evidence = jnp.sum(jnp.log(totals) + largest, axis=0)
    return laws, predicted, evidence, jnp.min(state[1])


def _smooth(
    matrix: Float[Array, "regime regime"],
    filtered: Float[Array, "time regime series"],
    predicted: Float[Array, "step regime series"],
    exists: Bool[Array, "time series"] | None,
) -> Float[Array, "time regime series"]:
    """Return p_k A (s_{k+1} / (Aᵀ p_k)) for all times, backward from the last."""

    def back(later: Array, at: tuple) -> tuple[Array, Array]:
        law, ahead, real = at
        possible = ahead > 0
        ratio = jnp.where(possible, later / jnp.where(possible, ahead, 1.0), 0.0)
        earlier = law * _transposed_product(matrix.T, ratio)
        if real is not None:
            earlier = jnp.where(real[None], earlier, later)
        return earlier, earlier

    rows = (filtered[:-1], predicted, None if exists is None else exists[1:])
    _, earlier = lax.scan(back, filtered[-1], rows, reverse=True)
    return jnp.concatenate([earlier, filtered[-1:]])
