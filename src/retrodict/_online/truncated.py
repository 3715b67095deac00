"""Truncated backpropagation: the gradient of the last rows, from a state that is held fixed."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from retrodict._elbo import elbo_of_series
from retrodict._estimator import AbstractEstimator
from retrodict._family import AbstractFactorFamily, Factor, factors, infer_series
from retrodict._family._base import Row
from retrodict._fit.variational import default_estimator
from retrodict._mask import Series
from retrodict._model import StateSpaceModel
from retrodict._online.gradient import AbstractRecursiveGradient, RowGradient, check_has_family
from retrodict._online.parts import Parts, dtype_of
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count


class TruncatedState(eqx.Module):
    """What `TruncatedBackprop` carries from one row to the next.

    Attributes:
        rows: the last `window` + 1 rows, oldest first.
        oldest: the family's state before the first of them.
        previous: the family's state before the last row but one.
        latest: the family's state before the last row.
        num_read: how many rows were read.
    """

    rows: Row
    oldest: PyTree
    previous: PyTree
    latest: PyTree
    num_read: Int[Array, ""]


class TruncatedBackprop(AbstractRecursiveGradient):
    """Backpropagation through the last rows of a stream, the baseline of recurrent learning.

    What it differentiates is the increment of the ELBO over the last `window` rows, whose prior is
    the filtering law before them; that law and the state behind it are held fixed. As long as all
    rows of the stream are kept, it is the ELBO itself, and its gradient is exact: for series of at
    most `window` + 1 rows nothing is truncated. What a learner ascends is the window's gradient
    over the number of its rows. `elbo_increment` is taken over the last two states alone, which is
    exact where the chain is.

    Args:
        window: how many rows to go back.
        estimator: how the ELBO is taken; by default that of `fit`.
        every: how many rows pass from one gradient to the next; with `every=window` each row is
            gone over once.
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
        """Refuses a missing family."""
        check_has_family(parts, "TruncatedBackprop")

    def init(self, parts: Parts) -> TruncatedState:
        """The state before anything was read."""
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
        """Puts a row into the window, and backpropagates through it if it is its turn."""
        family, model = parts.whole
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
        num_rows = jnp.minimum(after.num_read, self.window + 1)
        num_rows = jnp.where(after.num_read > self.window + 1, self.window, num_rows)
        estimator = self._estimator(family, model)
        increment, factor = _last_pair(family, model, after, row, estimator, pair_key)
        mean = jax.tree.map(lambda leaf: leaf / num_rows.astype(leaf.dtype), gradient)
        return after, RowGradient(increment, gradient, mean, due, factor)

    def _read(
        self, family: AbstractFactorFamily, state: TruncatedState, row: Row
    ) -> TruncatedState:
        """The window one row later."""
        full = state.num_read > self.window
        place = jnp.minimum(state.num_read, self.window)
        first = jax.tree.map(lambda leaf: leaf[0], state.rows)
        newest = jax.tree.map(
            lambda leaf: leaf[jnp.clip(state.num_read, 1, self.window + 1) - 1], state.rows
        )
        oldest = _where(full, _advanced(family, state.oldest, first), state.oldest)
        latest = _where(state.num_read > 0, _advanced(family, state.latest, newest), state.latest)
        rows = jax.tree.map(
            lambda kept, new: jnp.where(full, jnp.roll(kept, -1, axis=0), kept).at[place].set(new),
            state.rows,
            row,
        )
        return TruncatedState(rows, oldest, state.latest, latest, state.num_read + 1)

    def _elbo(self, parts: Parts, state: TruncatedState, key: PRNGKey) -> Scalar:
        """The ELBO of the stream, or its increment over the window once rows have left."""
        family, model = parts.whole
        estimator = self._estimator(family, model)
        return lax.cond(
            state.num_read > self.window + 1,
            lambda: _of_window(family, model, state.oldest, state.rows, estimator, key)[0],
            lambda: _of_start(family, model, state.rows, state.num_read, estimator, key),
        )

    def _estimator(self, family: AbstractFactorFamily, model: StateSpaceModel) -> AbstractEstimator:
        return default_estimator(family, model) if self.estimator is None else self.estimator


def _of_start(
    family: AbstractFactorFamily,
    model: StateSpaceModel,
    rows: Row,
    length: Int[Array, ""],
    estimator: AbstractEstimator,
    key: PRNGKey,
) -> Scalar:
    """The ELBO of rows that begin with the first of the stream."""
    series = Series(rows.y, rows.seen, rows.u, length)
    return elbo_of_series(model, infer_series(family, series), series, estimator, key).value


def _of_window(
    family: AbstractFactorFamily,
    model: StateSpaceModel,
    before: PyTree,
    rows: Row,
    estimator: AbstractEstimator,
    key: PRNGKey,
) -> tuple[Scalar, Factor]:
    """The increment of the ELBO over all rows but the first, and the factors of the last.

    If the law of the first row were exact, the increment would be the ELBO of the others under it
    as a prior. That prior is held fixed.
    """
    read, _ = factors(family, lax.stop_gradient(before), rows, None)
    chain = family.assemble(read, None, None)
    prior = lax.stop_gradient(jax.tree.map(lambda leaf: leaf[0], read.law))
    local = StateSpaceModel(prior, model.transition, model.emission)
    seen = jnp.ones(rows.y.shape, bool) if rows.seen is None else rows.seen
    series = Series(rows.y, seen.at[0].set(False), rows.u, None)
    value = elbo_of_series(local, chain, series, estimator, key).value
    return value, jax.tree.map(lambda leaf: leaf[-1], read)


def _last_pair(
    family: AbstractFactorFamily,
    model: StateSpaceModel,
    state: TruncatedState,
    row: Row,
    estimator: AbstractEstimator,
    key: PRNGKey,
) -> tuple[Scalar, Factor]:
    """What the last row added to the ELBO, over its state and the one before it; its factors."""
    place = jnp.minimum(state.num_read, state.rows.y.shape[0]) - 1

    def first() -> tuple[Scalar, Factor]:
        rows = jax.tree.map(lambda leaf: leaf[None], row)
        read, _ = factors(family, state.latest, rows, None)
        value = _of_start(family, model, rows, jnp.ones((), state.num_read.dtype), estimator, key)
        return value, jax.tree.map(lambda leaf: leaf[0], read)

    def later() -> tuple[Scalar, Factor]:
        rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, place - 1, 2), state.rows)
        return _of_window(family, model, state.previous, rows, estimator, key)

    return lax.cond(state.num_read == 1, first, later)


def _advanced(family: AbstractFactorFamily, state: PyTree, row: Row) -> PyTree:
    return family.advance(state, family.embed(row))


def _where(condition: Array, one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
