"""The streaming protocol: `init`, `update` and `scan` over an explicit state."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from retrodict._arrays import PRNGKey, check_key, where_rows
from retrodict._families import AbstractFamily, prepare_for, prepare_row
from retrodict._model import (
    Series,
    StateSpaceModel,
    convert_row,
    prepare_data,
    prepare_data_row,
    prepare_rows,
)
from retrodict._numerics import linalg

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")


class AbstractStream(eqx.Module, Generic[S, T]):
    """A computation that follows a stream of rows in memory that does not grow.

    `init` returns the state before the first row, `update` reads one row, and `scan` reads many
    rows in one compiled program. All three are pure functions of an explicit state, and can be
    transformed by `jax.jit` and `jax.vmap`. Every stream satisfies the same contract:

    - The result does not depend on how the stream is cut into calls of `update` and `scan`, up to
      rounding: chunks of different sizes are different compiled programs. Streams that read rows
      in a loop (`OnlineLearner`, `LaggedLearner`, `OnlineSmoother`) give the same bits if all
      chunks are padded to one size.
    - A state that was stored by `save` and restored by `load` continues the stream.
    - A row that would make a result non-finite is read as missing and reported as `skipped`.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> def last_output(stream: rd.online.AbstractStream, ys):
        ...     state = stream.init()
        ...     for y in ys:
        ...         state, output = stream.update(state, y)
        ...     return output
        >>> stream = rd.online.FixedLag(rd.KalmanFamily(rd.models.local_level()), lag=1)
        >>> output = last_output(stream, jnp.array([[1.0], [2.0], [4.0]]))
        >>> int(output.row), output.smoothed.mean.shape
        (1, (1,))
    """

    _takes_data: ClassVar[bool] = False
    """Whether the stream has functionals, which read `data`."""

    @abstractmethod
    def _start(self, key: PRNGKey | None, data: PyTree) -> S:
        """Return the state before the first row."""

    @property
    @abstractmethod
    def _checked_against(self) -> AbstractFamily | StateSpaceModel:
        """The family or unwrapped model whose dimensions rows must have."""

    @abstractmethod
    def _advance(self, state: S, series: Series, data: PyTree) -> tuple[S, T]:
        """Read the existing rows of a `complete` series; called inside `jax.jit`."""

    def init(self, key: PRNGKey | None = None, *, data: PyTree = None) -> S:
        """Return the state before the first row.

        Args:
            key: a typed key, for streams that draw samples.
            data: one row of the data that functionals read, as `update` takes it; only its shapes
                are used. `None` if functionals read the observations.
        """
        return self._start(key, self._checked(data))

    def update(
        self, state: S, y: Any, *, mask: Any = None, inputs: Any = None, data: PyTree = None
    ) -> tuple[S, T]:
        """Read one row.

        Args:
            state: the state that `init`, `update` or `scan` returned.
            y: the observation, of shape `(obs,)`; NaN where an entry is missing.
            mask: true where an entry was observed.
            inputs: the input of the row, of shape `(input,)`, if the model takes inputs.
            data: the row of the data that functionals read; `None` for the observation.

        Returns:
            The next state, and the output for this row.
        """
        y, inputs = convert_row(y, mask, inputs)
        return self._update(state, y, inputs, self._checked(data))

    def scan(
        self,
        state: S,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
        data: PyTree = None,
    ) -> tuple[S, T]:
        """Read many rows in one compiled program, which is faster than one `update` per row.

        Args:
            state: the state that `init`, `update` or `scan` returned.
            ys: observations, of shape `(time, obs)`; NaN where an entry is missing.
            mask: true where an entry was observed.
            inputs: inputs, of shape `(time, input)`, if the model takes inputs.
            length: the number of rows that exist. Pad the last chunk to the size of the others to
                avoid a compilation. A traced length out of range makes all rows NaN, which streams
                with an output `skipped` skip.
            data: the data that functionals read, with one row per time step; `None` for the
                observations.

        Returns:
            The next state, and the output for each row with a leading axis `time`; NaN from
            `length` on.
        """
        options = {"mask": mask, "inputs": inputs, "length": length}
        reference = self._checked_against
        if isinstance(reference, StateSpaceModel):
            series = prepare_data(reference, ys, **options)
        else:
            series = prepare_for(reference, ys, **options)
        data = prepare_rows(self._checked(data), series.num_times)
        return self._scan(state, complete(series), data)

    @eqx.filter_jit
    def _update(self, state: S, y: Array, inputs: Array | None, data: PyTree) -> tuple[S, T]:
        reference = self._checked_against
        if isinstance(reference, StateSpaceModel):
            row = prepare_data_row(reference, y, mask=None, inputs=inputs)
        else:
            row = prepare_row(reference, y, mask=None, inputs=inputs)
        series, data = jax.tree.map(lambda leaf: leaf[None], (row, data))
        state, out = self._advance(state, complete(series), data)
        return state, jax.tree.map(lambda leaf: leaf[0], out)

    @eqx.filter_jit
    def _scan(self, state: S, series: Series, data: PyTree) -> tuple[S, T]:
        return self._advance(state, series, data)

    def _checked(self, data: PyTree) -> PyTree:
        if data is not None and not self._takes_data:
            raise ValueError(f"{type(self).__name__} follows no functional: leave data out.")
        return jax.tree.map(jnp.asarray, data)


def require_key(stream: AbstractStream, key: Any) -> PRNGKey:
    """Return the key of a stream that draws samples, or raise if it is missing."""
    if key is None:
        raise ValueError(
            f"This {type(stream).__name__} draws samples: init needs a key, as from"
            " jax.random.key(0)."
        )
    check_key(key, f"{type(stream).__name__}.init")
    return key


def complete(series: Series) -> Series:
    """Return the series with a mask and a length.

    Chunks with and without missing entries and padding are then read by one program.
    """
    mask = jnp.ones(series.ys.shape, bool) if series.mask is None else series.mask
    length = jnp.asarray(series.num_times if series.length is None else series.length)
    return Series(series.ys, mask, series.inputs, length)


def read_in_loop(
    read: Callable[[S, R], tuple[S, T]], state: S, rows: R, length: Any
) -> tuple[S, T]:
    """Read rows one after another, with one program for all rows of a chunk and thus equal bits.

    Args:
        read: a function of the state and one row that returns the next state and an output.
        state: the state before the first row.
        rows: a pytree whose arrays have a leading axis `time`.
        length: the number of rows that exist. Later rows output NaN.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    if count == 1:
        # XLA removes a loop of one step, and then rounds differently from a longer loop. Fences
        # keep the number of steps and the use of the outputs from changing the program of a row.
        twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), rows)
        state, twice, length = linalg.fence((state, twice, length))
        state, out = linalg.fence(read_in_loop(read, state, twice, length))
        return state, jax.tree.map(lambda leaf: leaf[:1], out)
    first = jax.tree.map(lambda leaf: leaf[0], rows)
    unknown = jax.tree.map(_unknown, jax.eval_shape(lambda: read(state, first)[1]))

    def move(state: S, at: tuple) -> tuple[S, T]:
        row, k = at
        return lax.cond(k < length, lambda: read(state, row), lambda: (state, unknown))

    return lax.scan(move, state, (rows, jnp.arange(count)))


def _unknown(shape: jax.ShapeDtypeStruct) -> Array:
    inexact = jnp.issubdtype(shape.dtype, jnp.inexact)
    return jnp.full(shape.shape, jnp.nan if inexact else 0, shape.dtype)


def skip_nonfinite(
    advance: Callable[[S, Series, Any], tuple[S, T, Bool[Array, "time"]]],
    state: S,
    series: Series,
    data: PyTree,
    skipped: Bool[Array, "time"] | None = None,
    *,
    check_state: bool = True,
) -> tuple[S, T]:
    """Read rows, treating each row that makes a result non-finite as missing.

    All rows are read at once. While a result is non-finite, the first row that causes it is marked
    as missing and all rows are read again: one more pass per such row. Whether a row is marked
    depends on the rows before it alone, and not on how a stream is cut into chunks.

    Args:
        advance: a function of the state, rows and data that returns the next state, an output per
            row, and whether the results of each row are finite.
        state: the state before the rows.
        series: the rows, as a `complete` series.
        data: a pytree with one row per time step, set to zero where a row is skipped.
        skipped: rows to treat as missing from the start.
        check_state: whether the next state must be finite too.

    Returns:
        The next state, and the outputs, whose `skipped` is set.
    """
    n, index = series.num_times, jnp.arange(series.num_times)
    length: Any = series.length
    exists: Any = series.exists()

    def read(carry: tuple) -> tuple:
        skipped = carry[1]

        def unless_skipped(leaf: Array) -> Array:
            return where_rows(~skipped, leaf, jnp.zeros_like(leaf))

        ys, mask, values = jax.tree.map(unless_skipped, (series.ys, series.mask, data))
        after, out, finite = advance(state, Series(ys, mask, series.inputs, length), values)
        if check_state:
            finite = finite & (all_finite(after) | (index != length - 1))
        finite = finite | ~exists
        first = jnp.argmin(finite)
        again = ~finite[first] & ~skipped[first]
        return again, skipped | ((index == first) & again), after, out

    skipped = jnp.zeros(n, bool) if skipped is None else skipped & exists
    start = (jnp.ones((), bool), skipped, state)
    zeros = zeros_like_shapes(jax.eval_shape(lambda: read(start)[3]))
    _, skipped, state, out = lax.while_loop(lambda carry: carry[0], read, (*start, zeros))
    return state, eqx.tree_at(lambda output: output.skipped, out, skipped)


def finite_rows(tree: PyTree) -> Bool[Array, "time"]:
    """Return whether all numbers of a tree are finite, for each entry of its leading axis."""
    return jax.vmap(all_finite)(eqx.filter(tree, eqx.is_inexact_array))


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Return whether all floating-point numbers of a tree are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def choose(condition: Bool[Array, ""], one: T, other: T) -> T:
    """Return one of two trees, depending on a traced condition."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def zeros_like_shapes(tree: PyTree) -> PyTree:
    """Return zeros of the shapes that `jax.eval_shape` gave."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def nan_where_absent(exists: Bool[Array, "time"], tree: T) -> T:
    """Replace rows that do not exist by NaN."""
    return jax.tree.map(lambda leaf: where_rows(exists, leaf, jnp.nan), tree)


def float_type(tree: PyTree) -> Any:
    """Return the floating type of the arrays of a tree."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return jnp.result_type(*leaves) if leaves else jnp.result_type(float)


def cast(series: Series, dtype: Any) -> Series:
    """Convert observations and inputs to a floating type."""
    inputs = None if series.inputs is None else series.inputs.astype(dtype)
    return Series(series.ys.astype(dtype), series.mask, inputs, series.length)
