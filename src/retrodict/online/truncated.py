"""Truncated backpropagation: the gradient of the last rows, from a fixed state."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count
from retrodict._expectations import AbstractEstimator, elbo_of_series
from retrodict._families import AbstractFactorFamily, Factor, Row, factors
from retrodict._learning import default_estimator
from retrodict._model import Gaussian, Series, StateSpaceModel, dense_scale
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
        rows: the last `window` + 1 rows, oldest first.
        oldest: the family's state before the first of them.
        previous: the family's state before the last row but one.
        latest: the family's state before the last row.
        num_read: the number of rows that were read.
    """

    rows: Row
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
        rows = Row(
            jnp.zeros((count, family.obs_dim), dtype),
            jnp.zeros((count, family.obs_dim), bool),
            jnp.zeros((count, family.input_dim), dtype) if family.input_dim else None,
        )
        start = family.init()
        return TruncatedState(rows, start, start, start, jnp.zeros((), jnp.result_type(int)))

    def update(
        self, parts: Parts, state: TruncatedState, row: Row, key: PRNGKey
    ) -> tuple[TruncatedState, RowGradient]:
        """Add a row to the window, and backpropagate through the window if a gradient is due."""
        after = self._read(parts.whole[0], state, row)
        due = after.num_read % self.every == 0
        key, pair_key = jax.random.split(key)

        def differentiate() -> PyTree:
            return jax.grad(lambda moved: self._elbo(Parts(moved, parts.fixed), after, key))(
                parts.parameters
            )

        gradient = lax.cond(
            due, differentiate, lambda: jax.tree.map(jnp.zeros_like, parts.parameters)
        )
        num_rows = jnp.minimum(after.num_read, self.window + 1)
        num_rows = jnp.where(after.num_read > self.window + 1, self.window, num_rows)
        increment, factor = self._last_pair(parts, after, pair_key)
        mean = jax.tree.map(lambda leaf: leaf / num_rows.astype(leaf.dtype), gradient)
        return after, RowGradient(increment, gradient, mean, due, factor)

    def unseen(self, state: TruncatedState) -> TruncatedState:
        """Return the state with all rows of the window marked as missing."""
        rows = state.rows._replace(seen=jnp.zeros(state.rows.y.shape, bool))
        return eqx.tree_at(lambda s: s.rows, state, rows)

    def _read(
        self, family: AbstractFactorFamily, state: TruncatedState, row: Row
    ) -> TruncatedState:
        """Return the window one row later."""
        full = state.num_read > self.window
        place = jnp.minimum(state.num_read, self.window)
        first = jax.tree.map(lambda leaf: leaf[0], state.rows)
        newest = jax.tree.map(
            lambda leaf: leaf[jnp.clip(state.num_read, 1, self.window + 1) - 1], state.rows
        )

        def advanced(when: Array, state: PyTree, row: Row) -> PyTree:
            return choose(when, family.advance(state, family.embed(row)), state)

        oldest = advanced(full, state.oldest, first)
        latest = advanced(state.num_read > 0, state.latest, newest)
        rows = jax.tree.map(
            lambda old, new: jnp.where(full, jnp.roll(old, -1, axis=0), old).at[place].set(new),
            state.rows,
            row,
        )
        return TruncatedState(rows, oldest, state.latest, latest, state.num_read + 1)

    def _elbo(self, parts: Parts, state: TruncatedState, key: PRNGKey) -> Scalar:
        """Return the ELBO of the stream, or its increment over the window once rows have left."""
        length = jnp.minimum(state.num_read, self.window + 1)
        from_start = state.num_read <= self.window + 1
        return self._value(parts, state.oldest, state.rows, length, from_start, key)[0]

    def _last_pair(
        self, parts: Parts, state: TruncatedState, key: PRNGKey
    ) -> tuple[Scalar, Factor]:
        """Return the ELBO increment of the last row over the last two states, and its factors."""
        first = state.num_read == 1
        begin = jnp.clip(state.num_read - 2, 0, self.window - 1)
        rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, begin, 2), state.rows)
        length = jnp.where(first, 1, 2)
        value, read = self._value(parts, state.previous, rows, length, first, key)
        return value, jax.tree.map(lambda leaf: leaf[length - 1], read)

    def _value(
        self,
        parts: Parts,
        before: PyTree,
        rows: Row,
        length: Int[Array, ""],
        from_start: Bool[Array, ""],
        key: PRNGKey,
    ) -> tuple[Scalar, Factor]:
        """Return the ELBO of rows from the start, or its increment over all but the first row.

        The increment is the ELBO of the other rows with the law of the first row as prior, which is
        exact if that law is. The prior and the state before it are held fixed.

        Args:
            parts: the family and the model.
            before: the family's state before the first row.
            rows: the rows.
            length: the number of rows that exist.
            from_start: whether the first row is the first of the stream.
            key: a typed key.

        Returns:
            The value, and the factors of the rows.
        """
        family, model = parts.whole
        estimator = default_estimator(family, model) if self.estimator is None else self.estimator
        before = choose(from_start, family.init(), lax.stop_gradient(before))
        exists = jnp.arange(rows.y.shape[0]) < length
        read, _ = factors(family, before, rows, exists)
        past = lax.stop_gradient(jax.tree.map(lambda leaf: leaf[0], read.law))
        prior = _either(from_start, model.prior, past)
        local = StateSpaceModel(prior, model.transition, model.emission)
        observed: Any = rows.seen
        observed = observed & exists[:, None]
        series = Series(rows.y, observed.at[0].set(observed[0] & from_start), rows.u, length)
        chain = family.assemble(read, exists, length)
        return elbo_of_series(local, chain, series, estimator, key).value, read


class EitherLaw(eqx.Module):
    """One of two laws, selected at run time."""

    first: Bool[Array, ""]
    one: Any
    other: Any

    def log_prob(self, x: Float[Array, "state"]) -> Scalar:
        """Return the log density of the selected law."""
        one = jnp.sum(jnp.asarray(self.one.log_prob(x)))
        return jnp.where(self.first, one, self.other.log_prob(x))

    def sample(self, key: PRNGKey) -> Float[Array, "state"]:
        """Draw from the selected law."""
        return jnp.where(self.first, self.one.sample(key), self.other.sample(key))


def _either(first: Bool[Array, ""], one: Any, other: Any) -> Any:
    if isinstance(one, Gaussian) and isinstance(other, Gaussian):
        # A Gaussian has expectations in closed form.
        pairs = [(law.mean, dense_scale(law.scale_tril)) for law in (one, other)]
        return Gaussian(*choose(first, *pairs))
    return EitherLaw(first, one, other)
