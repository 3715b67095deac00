"""Truncated backpropagation: the gradient of the last rows, from a fixed state."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._expectations import AbstractEstimator, elbo_of_series
from retrodict._families import AbstractFactorFamily, Factor, Row, factors
from retrodict._laws import Gaussian, dense_scale
from retrodict._learning import default_estimator
from retrodict._model import StateSpaceModel
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count
from retrodict.online.gradient import AbstractRecursiveGradient, RowGradient, check_has_family
from retrodict.online.parts import Parts, dtype_of


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

    Args:
        window: the number of rows to backpropagate through.
        estimator: the estimator of the ELBO; by default that of `fit`.
        every: the number of rows between gradients; with `every=window` each row is used once.
    """

    window: int = eqx.field(static=True)
    estimator: AbstractEstimator | None
    every: int = eqx.field(static=True)

    def __init__(self, window: int, estimator: AbstractEstimator | None = None, *, every: int = 1):
        self.window = check_count(window, "window")
        self.every = check_count(every, "every")
        if estimator is not None and not isinstance(estimator, AbstractEstimator):
            raise TypeError(
                "TruncatedBackprop expects an estimator, such as BackwardSampling(1), got"
                f" {type(estimator).__name__}."
            )
        self.estimator = estimator

    def check(self, parts: Parts) -> None:
        """Raise if there is no family."""
        check_has_family(parts, "TruncatedBackprop")

    def init(self, parts: Parts) -> TruncatedState:
        """Return the state before the first row."""
        family, _ = parts.whole
        dtype, count = dtype_of(parts.parameters), self.window + 1
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
        oldest = _where(full, _advanced(family, state.oldest, first), state.oldest)
        latest = _where(state.num_read > 0, _advanced(family, state.latest, newest), state.latest)
        rows = jax.tree.map(
            lambda old, new: jnp.where(full, jnp.roll(old, -1, axis=0), old).at[place].set(new),
            state.rows,
            row,
        )
        return TruncatedState(rows, oldest, state.latest, latest, state.num_read + 1)

    def _elbo(self, parts: Parts, state: TruncatedState, key: PRNGKey) -> Scalar:
        """Return the ELBO of the stream, or its increment over the window once rows have left."""
        family, model = parts.whole
        length = jnp.minimum(state.num_read, self.window + 1)
        window = Window(state.oldest, state.rows, length, state.num_read <= self.window + 1)
        return _value(family, model, window, self._estimator(family, model), key)[0]

    def _last_pair(
        self, parts: Parts, state: TruncatedState, key: PRNGKey
    ) -> tuple[Scalar, Factor]:
        """Return the ELBO increment of the last row over the last two states, and its factors."""
        family, model = parts.whole
        first = state.num_read == 1
        begin = jnp.clip(state.num_read - 2, 0, self.window - 1)
        rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, begin, 2), state.rows)
        length = jnp.where(first, 1, 2)
        window = Window(state.previous, rows, length, first)
        value, read = _value(family, model, window, self._estimator(family, model), key)
        return value, jax.tree.map(lambda leaf: leaf[length - 1], read)

    def _estimator(self, family: AbstractFactorFamily, model: StateSpaceModel) -> AbstractEstimator:
        return default_estimator(family, model) if self.estimator is None else self.estimator


class Window(NamedTuple):
    """Some rows of a stream, and the state before them.

    Attributes:
        before: the family's state before the first row.
        rows: the rows.
        length: the number of rows that exist.
        from_start: whether the first row is the first of the stream. If not, its law is the prior
            of the rows after it.
    """

    before: PyTree
    rows: Row
    length: Int[Array, ""]
    from_start: Bool[Array, ""]


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


def _value(
    family: AbstractFactorFamily,
    model: StateSpaceModel,
    window: Window,
    estimator: AbstractEstimator,
    key: PRNGKey,
) -> tuple[Scalar, Factor]:
    """Return the ELBO of rows from the start, or its increment over all but the first; and factors.

    The increment is the ELBO of the other rows with the law of the first row as prior, which is
    exact if that law is. The prior and the state before it are held fixed.
    """
    rows, start = window.rows, window.from_start
    before = _where(start, family.init(), lax.stop_gradient(window.before))
    exists = jnp.arange(rows.y.shape[0]) < window.length
    read, _ = factors(family, before, rows, exists)
    past = lax.stop_gradient(jax.tree.map(lambda leaf: leaf[0], read.law))
    local = StateSpaceModel(_either(start, model.prior, past), model.transition, model.emission)
    seen = exists[:, None] if rows.seen is None else rows.seen & exists[:, None]
    series = Series(rows.y, seen.at[0].set(seen[0] & start), rows.u, window.length)
    chain = family.assemble(read, exists, window.length)
    return elbo_of_series(local, chain, series, estimator, key).value, read


def _either(first: Bool[Array, ""], one: Any, other: Any) -> Any:
    if isinstance(one, Gaussian) and isinstance(other, Gaussian):
        # A Gaussian has expectations in closed form.
        pairs = [(law.mean, dense_scale(law.scale_tril)) for law in (one, other)]
        return Gaussian(*_where(first, *pairs))
    return EitherLaw(first, one, other)


def _advanced(family: AbstractFactorFamily, state: PyTree, row: Row) -> PyTree:
    return family.advance(state, family.embed(row))


def _where(condition: Array, one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
