"""Truncated backpropagation: the gradient of the last rows, from a fixed state."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count
from retrodict._expectations import AbstractEstimator
from retrodict._families import AbstractFactorFamily, read_row
from retrodict._learning import default_estimator, elbo_of_rows
from retrodict._model import Series
from retrodict.online.gradient import (
    AbstractRecursiveGradient,
    Parts,
    RowGradient,
    check_has_family,
)
from retrodict.online.stream import choose


class TruncatedState(eqx.Module):
    """The state of `TruncatedBackprop`.

    Attributes:
        rows: the last `window` + 1 rows, oldest first, and the number of them that were read.
        oldest: the family's state before the first of them.
        previous: the family's state before the last row but one.
        latest: the family's state before the last row.
        num_read: the number of rows that were read.
    """

    rows: Series
    oldest: PyTree
    previous: PyTree
    latest: PyTree
    num_read: Int[Array, ""]


class TruncatedBackprop(AbstractRecursiveGradient):
    """Backpropagation through the last rows of a stream, the baseline of recurrent learning.

    It differentiates the increment of the ELBO over the last `window` rows, whose prior is the
    filtering law before them; that law and its state are held fixed. Series of at most `window` + 1
    rows are not truncated: the increment is the ELBO, and its gradient is exact. A learner ascends
    the gradient divided by the number of rows of the window. `elbo_increment` is computed over the
    last two states alone, which is exact where the chain is.

    Example:
        >>> import jax, jax.numpy as jnp, optax, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> family, gradient = rd.KalmanFamily(model), rd.online.TruncatedBackprop(window=2)
        >>> learner = rd.online.OnlineLearner(family, model, gradient, optax.adam(0.01))
        >>> state, rows = learner.scan(learner.init(jax.random.key(0)), ys)
        >>> rows.elbo_increment.shape
        (3,)

    Args:
        window: the number of rows to backpropagate through.
        estimator: the estimator of the ELBO; by default that of `fit`.
        every: the number of rows between gradients; with `every=window` each row is used once.
    """

    window: int = eqx.field(static=True)
    estimator: AbstractEstimator | None = None
    every: int = eqx.field(static=True, default=1, kw_only=True)

    def __check_init__(self) -> None:
        check_count(self.window, "window")
        check_count(self.every, "every")
        if not isinstance(self.estimator, AbstractEstimator | None):
            raise TypeError(
                "TruncatedBackprop expects an estimator, such as BackwardSampling(1), got"
                f" {type(self.estimator).__name__}."
            )

    def check(self, parts: Parts) -> None:
        """Raise if there is no family."""
        check_has_family(parts, "TruncatedBackprop")

    def init(self, parts: Parts) -> TruncatedState:
        """Return the state before the first row."""
        family, _ = parts.whole
        dtype, count = parts.dtype, self.window + 1
        none, start = jnp.zeros((), jnp.result_type(int)), family.init()
        rows = Series(
            jnp.zeros((count, family.obs_dim), dtype),
            jnp.zeros((count, family.obs_dim), bool),
            jnp.zeros((count, family.input_dim), dtype) if family.input_dim else None,
            none,
        )
        return TruncatedState(rows, start, start, start, none)

    def update(
        self, parts: Parts, state: TruncatedState, row: Series, key: PRNGKey
    ) -> tuple[TruncatedState, RowGradient]:
        """Add a row to the window, and backpropagate through the window if a gradient is due."""
        family, _ = parts.whole
        after = self._read(family, state, row)
        due = after.num_read % self.every == 0
        key, pair_key = jax.random.split(key)

        def differentiate() -> PyTree:
            return jax.grad(lambda moved: self._elbo(Parts(moved, parts.fixed), after, key))(
                parts.parameters
            )

        gradient = lax.cond(
            due, differentiate, lambda: jax.tree.map(jnp.zeros_like, parts.parameters)
        )
        length: Any = after.rows.length
        num_rows = jnp.where(after.num_read > self.window + 1, self.window, length)
        increment = self._last_increment(parts, after, pair_key)
        before = choose(after.num_read == 1, family.init(), after.latest)
        _, factor = read_row(family, before, row)
        mean = jax.tree.map(lambda leaf: leaf / num_rows.astype(leaf.dtype), gradient)
        return after, RowGradient(increment, gradient, mean, due, factor)

    def mark_rows_missing(self, state: TruncatedState) -> TruncatedState:
        """Return the state with all rows of the window marked as missing."""
        rows = dataclasses.replace(state.rows, mask=jnp.zeros(state.rows.ys.shape, bool))
        return eqx.tree_at(lambda s: s.rows, state, rows)

    def _read(
        self, family: AbstractFactorFamily, state: TruncatedState, row: Series
    ) -> TruncatedState:
        """Return the window one row later."""
        full = state.num_read > self.window
        place = jnp.minimum(state.num_read, self.window)
        stored: Any = state.rows.rows
        newest = stored.at(jnp.clip(state.num_read, 1, self.window + 1) - 1)

        def advanced(when: Array, state: PyTree, row: Series) -> PyTree:
            return choose(when, family.advance(state, family.embed(row)), state)

        oldest = advanced(full, state.oldest, stored.at(0))
        latest = advanced(state.num_read > 0, state.latest, newest)
        rows = jax.tree.map(
            lambda old, new: jnp.where(full, jnp.roll(old, -1, axis=0), old).at[place].set(new),
            stored,
            row,
        )
        rows = dataclasses.replace(rows, length=place + 1)
        return TruncatedState(rows, oldest, state.latest, latest, state.num_read + 1)

    def _elbo(self, parts: Parts, state: TruncatedState, key: PRNGKey) -> Scalar:
        """Return the ELBO of the stream, or its increment over the window once rows have left."""
        from_start = state.num_read <= self.window + 1
        return self._value(parts, state.oldest, state.rows, from_start, key)

    def _last_increment(self, parts: Parts, state: TruncatedState, key: PRNGKey) -> Scalar:
        """Return the ELBO increment of the last row over the last two states."""
        first = state.num_read == 1
        begin = jnp.clip(state.num_read - 2, 0, self.window - 1)
        rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, begin, 2), state.rows.rows)
        rows = dataclasses.replace(rows, length=jnp.where(first, 1, 2))
        return self._value(parts, state.previous, rows, first, key)

    def _value(
        self, parts: Parts, before: PyTree, rows: Series, from_start: Bool[Array, ""], key: PRNGKey
    ) -> Scalar:
        """Return `elbo_of_rows`, with the state before the first row held fixed."""
        family, model = parts.whole
        estimator = default_estimator(family, model) if self.estimator is None else self.estimator
        before = choose(from_start, family.init(), lax.stop_gradient(before))
        elbo = elbo_of_rows(
            model, family, rows, estimator, key, state=before, from_start=from_start
        )
        return elbo.value
