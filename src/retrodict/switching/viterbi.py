"""The most probable path of regimes of a hidden Markov model (Viterbi 1967)."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from retrodict._arrays import Scalar
from retrodict._model import Series, unwrap
from retrodict.switching.model import (
    SwitchingModel,
    emission_table,
    log_transitions,
    prepare_switching,
    require_finite,
)


def most_probable_path(
    model: SwitchingModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> tuple[Int[Array, "time"], Scalar]:
    """Compute the path of regimes that maximises p(z_{0:n-1} | y_{0:n-1}).

    It differs from the path of the most probable regime of each time, which may contain forbidden
    transitions.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 4.0)],
        ... )
        >>> path, log_joint = rd.switching.most_probable_path(model, jnp.array([[0.0], [4.0]]))
        >>> path.tolist()
        [0, 1]

    Args:
        model: a model without a continuous state.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the path repeats its last regime in the rest.

    Returns:
        The path, of shape `(time,)`, and its log joint density log p(z, y).
    """
    require_finite(model, "most_probable_path")
    model = unwrap(model)
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    return _most_probable_path(model, series)


@eqx.filter_jit
def _most_probable_path(model: SwitchingModel, series: Series) -> tuple[Int[Array, "time"], Scalar]:
    table, exists = emission_table(model, series), series.exists()
    count = model.num_regimes

    def forward(best: Array, at: tuple) -> tuple[Array, Array]:
        matrix, row, real = at
        totals = best[:, None] + matrix
        new, origins = jnp.max(totals, axis=0) + row, jnp.argmax(totals, axis=0)
        if real is not None:
            new = jnp.where(real, new, best)
            origins = jnp.where(real, origins, jnp.arange(count))
        return new, origins

    def back(z: Array, origins: Array) -> tuple[Array, Array]:
        return origins[z], origins[z]

    first = model.regimes.log_initial() + table[0]
    later = None if exists is None else exists[1:]
    rows = (log_transitions(model, series), table[1:], later)
    best, origins = lax.scan(forward, first, rows)
    end = jnp.argmax(best)
    _, path = lax.scan(back, end, origins, reverse=True)
    return jnp.concatenate([path, end[None]]), best[end]
