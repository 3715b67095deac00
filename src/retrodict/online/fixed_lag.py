"""A live posterior with a fixed lag: each row smoothed by a number of rows that followed it.

A backward kernel does not depend on what comes after it. The law of x_{k-L} given y_{0:k} is
therefore q_k pushed back through the last L kernels, which is all that has to be kept.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._chains import LinearGaussianChain, SampledChain
from retrodict._expectations import BackwardSampling, ClosedForm, marginals, moments_over_paths
from retrodict._families import (
    AbstractFamily,
    AbstractLinearGaussianFamily,
    AbstractSampledFamily,
    Factor,
    Row,
    factors,
    prepare_for,
    prepare_row,
    rows_of,
)
from retrodict._kernels import LinearGaussianKernel
from retrodict._numerics import linalg
from retrodict._parameters import unwrap
from retrodict._series import convert_row
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key, is_concrete

S = TypeVar("S")
T = TypeVar("T")


class LagMoments(eqx.Module):
    """Means and covariances of states; along a leading axis `time` where they are of many rows.

    Attributes:
        mean: of shape `(state,)`.
        covariance: of shape `(state, state)`.
        mean_standard_error: of the shape of `mean`; zero if it is exact.
        covariance_standard_error: of the shape of `covariance`; zero if it is exact.
    """

    mean: Float[Array, "... state"]
    covariance: Float[Array, "... state state"]
    mean_standard_error: Float[Array, "... state"]
    covariance_standard_error: Float[Array, "... state state"]


class LagRows(eqx.Module):
    """Smoothed rows of a stream.

    Attributes:
        smoothed: the moments of the states of these rows, given all that was read.
        row: which rows of the stream they are, counted from 0.
        ready: whether the row is due: it exists, and has the whole lag behind it or the stream has
            ended.
    """

    smoothed: LagMoments
    row: Int[Array, "..."]
    ready: Bool[Array, "..."]


class LagOutput(eqx.Module):
    """What is known after row k of a stream; along a leading axis `time` after many of them.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}.
        smoothed: the moments of x_{k-lag} given y_{0:k}; those of x_0 before that many have come.
        row: the row that `smoothed` is of, k − lag or 0.
        ready: whether k has come to the lag.
        skipped: whether row k was read as a missing one, since something non-finite followed from
            it.
    """

    filtered: LagMoments
    smoothed: LagMoments
    row: Int[Array, "..."]
    ready: Bool[Array, "..."]
    skipped: Bool[Array, "..."]


class LagState(eqx.Module):
    """What a `FixedLag` carries from one row to the next: arrays of a size that does not grow.

    Attributes:
        family: the state of the family.
        law: the last filtering law.
        steps: the last `lag` backward kernels, the newest at the end.
        num_read: how many rows were read.
        key: the key that the noise of each row is made from; `None` if nothing is drawn.
    """

    family: PyTree
    law: Any
    steps: PyTree
    num_read: Int[Array, "..."]
    key: Any


class FixedLag(eqx.Module):
    """The posterior of a live stream: what the rows up to k say of the state at k and at k − lag.

    The smoothed law at k − lag is the marginal that `family.infer` of all rows so far would give,
    at a cost and a memory that do not grow with the stream. Kernels that are linear Gaussian are
    composed in closed form, windows of 2, 4, 8, … at a time; from others paths are drawn, and their
    conditional moments averaged. The noise of row k is made from the key and k alone. However a
    stream is cut into chunks, stored with `save` and gone on with, its rows come out the same. A
    row from which something non-finite follows is read as a missing one, and reported as `skipped`.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> live = rd.online.FixedLag(rd.KalmanFamily(model), lag=2)
        >>> state = live.init()
        >>> for y in jnp.ones((5, 1)):
        ...     state, out = live.update(state, y)
        >>> int(out.row), bool(out.ready), out.smoothed.mean.shape
        (2, True, (1,))
        >>> live.flush(state).row.tolist()
        [3, 4]

    Args:
        family: a family with linear-Gaussian kernels, or one that draws.
        lag: how many rows a smoothed row waits for.
        num_samples: how many paths to draw at each row, for families that draw.
    """

    family: AbstractFamily
    lag: int = eqx.field(static=True)
    num_samples: int = eqx.field(static=True, default=256)

    def __check_init__(self) -> None:
        if not isinstance(self.family, (AbstractLinearGaussianFamily, AbstractSampledFamily)):
            raise TypeError(
                "FixedLag expects a family, such as KalmanFamily(model) or GatedFamily(...), got"
                f" {type(self.family).__name__}."
            )
        check_count(self.lag, "lag")
        check_count(self.num_samples, "num_samples")

    def init(self, key: PRNGKey | None = None) -> LagState:
        """The state before anything was read.

        Args:
            key: a typed key, for families that draw.
        """
        if not self._draws:
            key = None
        elif key is None:
            raise ValueError(
                f"{type(self.family).__name__} draws paths: init needs a key, as from"
                " jax.random.key(0)."
            )
        else:
            check_key(key, "FixedLag.init")
        family = unwrap(self.family)
        start = family.init()
        read, _ = factor_shapes(family, float_type(self.family))

        def zeros(leaf: Any, *shape: int) -> Array:
            return jnp.zeros((*shape, *leaf.shape), leaf.dtype)

        law = jax.tree.map(zeros, read.law)
        steps = jax.tree.map(lambda leaf: zeros(leaf, self.lag), read.kernel)
        if not self._draws:
            steps = jax.vmap(_identity_like)(steps)
        return LagState(start, law, steps, jnp.zeros((), jnp.result_type(int)), key)

    def update(
        self, state: LagState, y: Any, *, mask: Any = None, u: Any = None
    ) -> tuple[LagState, LagOutput]:
        """Reads one row.

        Args:
            state: what `init` or the previous call returned.
            y: the observation, of shape `(obs,)`; NaN where an entry is missing.
            mask: true where an entry was seen.
            u: the input, of shape `(input,)`, if the family takes one.

        Returns:
            The next state, and what is known now.
        """
        y, u = convert_row(y, mask, u)
        return _update(self, state, y, u)

    def scan(
        self, state: LagState, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
    ) -> tuple[LagState, LagOutput]:
        """Reads many rows in one compiled program: quicker than one `update` each.

        Args:
            state: what `init` or the previous call returned.
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was seen.
            inputs: inputs of shape `(time, input)`, if the family takes them.
            length: how many of the rows exist. A last chunk that is padded to the size of the
                others is not compiled anew.

        Returns:
            The next state, and what was known after each row; NaN from `length` on.
        """
        rows, count = chunk_for(self.family, ys, mask=mask, inputs=inputs, length=length)
        return _scan(self, state, rows, count)

    def flush(self, state: LagState) -> LagRows:
        """The last `lag` rows, given all that was read: what `update` has not given yet.

        Rows are in order of time. If fewer than `lag` were read, the first of them do not exist:
        they are not `ready`, their `row` is negative and their moments are NaN.
        """
        if is_concrete(state.num_read) and state.num_read.ndim == 0 and state.num_read == 0:
            raise ValueError("flush gives the rows that were read last, and none was.")
        return _flush(self, state)

    @property
    def _draws(self) -> bool:
        return isinstance(self.family, AbstractSampledFamily)


def float_type(family: AbstractFamily) -> Any:
    """The floating type of a family."""
    leaves = jax.tree.leaves(eqx.filter(family, eqx.is_inexact_array))
    return jnp.result_type(*leaves) if leaves else jnp.result_type(float)


def factor_shapes(family: Any, dtype: Any) -> tuple[Factor, Row]:
    """The shapes of the factors of one row of an unwrapped family, and of the row."""

    def read() -> tuple[Factor, Row]:
        u = jnp.zeros(family.input_dim, dtype) if family.input_dim else None
        row = Row(jnp.zeros(family.obs_dim, dtype), jnp.ones(family.obs_dim, bool), u)
        before, embedded = family.init(), family.embed(row)
        return family.read(before, family.advance(before, embedded), embedded), row

    return jax.eval_shape(read)


def _identity_like(kernel: LinearGaussianKernel) -> LinearGaussianKernel:
    """The kernel that stays where it is: nothing came before the first row."""
    eye = jnp.eye(kernel.bias.shape[0], dtype=kernel.bias.dtype)
    return LinearGaussianKernel(eye, jnp.zeros_like(kernel.bias), jnp.zeros_like(eye))


def chunk_for(
    family: AbstractFamily, ys: Any, *, mask: Any, inputs: Any, length: Any
) -> tuple[Row, Int[Array, ""]]:
    """The rows of a chunk of a stream, and how many of them exist."""
    series = prepare_for(family, ys, mask=mask, inputs=inputs, length=length)
    rows = rows_of(series)
    if rows.seen is None:
        # One program for chunks with and without missing entries.
        rows = rows._replace(seen=jnp.ones(rows.y.shape, bool))
    return rows, jnp.asarray(series.num_times if series.length is None else series.length)


@eqx.filter_jit
def _update(
    lagged: FixedLag, state: LagState, y: Array, u: Array | None
) -> tuple[LagState, LagOutput]:
    row = prepare_row(lagged.family, y, mask=None, u=u)
    rows = jax.tree.map(lambda leaf: leaf[None], row)
    state, out = _advance(lagged, state, rows, None)
    return state, jax.tree.map(lambda leaf: leaf[0], out)


@eqx.filter_jit
def _scan(
    lagged: FixedLag, state: LagState, rows: Row, count: Int[Array, ""]
) -> tuple[LagState, LagOutput]:
    return _advance(lagged, state, rows, count)


def _advance(
    lagged: FixedLag, state: LagState, rows: Row, count: Int[Array, ""] | None
) -> tuple[LagState, LagOutput]:
    def advance(
        state: LagState, rows: Row, data: None
    ) -> tuple[LagState, LagOutput, Bool[Array, "time"]]:
        state, out, read = advance_rows(lagged, state, rows, count)
        return state, out, finite_rows((read.law, out.smoothed.mean, out.smoothed.covariance))

    nothing = jnp.zeros(rows.y.shape[0], bool)
    state, out, skipped = skip_nonfinite(advance, state, rows, None, count, nothing)
    return state, eqx.tree_at(lambda o: o.skipped, out, skipped)


def finite_rows(tree: PyTree) -> Bool[Array, "time"]:
    """Whether all numbers of a tree are finite, for each entry of its leading axis."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]
    fine = [jnp.all(jnp.isfinite(leaf.reshape(leaf.shape[0], -1)), axis=1) for leaf in leaves]
    return jnp.all(jnp.stack(fine), axis=0)


def skip_nonfinite(
    advance: Callable[[S, Row, Any], tuple[S, T, Bool[Array, "time"]]],
    state: S,
    rows: Row,
    data: PyTree,
    count: Int[Array, ""] | None,
    skipped: Bool[Array, "time"],
) -> tuple[S, T, Bool[Array, "time"]]:
    """Read rows, and those from which something non-finite follows as missing ones.

    All rows are read at once. While something is not finite, the first row that it follows from is
    marked as missing, and all of them are read again: one more pass per such row. Whether a row is
    marked depends on what came before it alone, and not on how a stream is cut into chunks.

    Args:
        advance: a function of the state, rows and data that returns the next state, an output for
            each row, and whether what follows from each row is finite.
        state: the state before the rows.
        rows: the rows.
        data: a pytree with one row per time step, which is zero where a row is missing.
        count: how many rows exist; `None` for all of them.
        skipped: rows that are missing from the start.

    Returns:
        The next state, the outputs, and whether each row was read as a missing one.
    """
    n = rows.y.shape[0]
    index, last = jnp.arange(n), (n if count is None else count) - 1
    exists = index <= last
    seen = jnp.ones(rows.y.shape, bool) if rows.seen is None else rows.seen

    def read(carry: tuple) -> tuple:
        skipped = carry[1]

        def unless_skipped(leaf: Array) -> Array:
            return jnp.where(skipped.reshape(n, *[1] * (leaf.ndim - 1)), jnp.zeros_like(leaf), leaf)

        cleared = Row(unless_skipped(rows.y), unless_skipped(seen), rows.u)
        after, out, fine = advance(state, cleared, jax.tree.map(unless_skipped, data))
        whole = finite_rows(jax.tree.map(lambda leaf: leaf[None], _floats(after)))[0]
        fine = (fine & (whole | (index != last))) | ~exists
        first = jnp.argmin(fine)
        again = ~fine[first] & ~skipped[first]
        return again, skipped | ((index == first) & again), after, out

    start = (jnp.ones((), bool), skipped & exists, state)
    shapes = jax.eval_shape(lambda: read(start)[3])
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    _, skipped, state, out = lax.while_loop(lambda carry: carry[0], read, (*start, nothing))
    return state, out, skipped


def _floats(tree: PyTree) -> PyTree:
    return eqx.filter(tree, eqx.is_inexact_array)


def advance_rows(
    lagged: FixedLag, state: LagState, rows: Row, count: Int[Array, ""] | None
) -> tuple[LagState, LagOutput, Factor]:
    """Reads rows of which the first `count` exist; all of them if it is `None`.

    To be called inside `jax.jit`. Beside the state and the output it returns the factors q_k and
    q_{k-1|k} of each row; the kernel of the first row of a stream has no meaning.
    """
    family: Any = unwrap(lagged.family)
    dtype = float_type(lagged.family)
    u = None if rows.u is None else rows.u.astype(dtype)
    rows = Row(rows.y.astype(dtype), rows.seen, u)
    n, lag = rows.y.shape[0], lagged.lag
    index = jnp.arange(n)
    exists = None if count is None else index < count
    read, after = factors(family, state.family, rows, exists)
    kernels = read.kernel
    if isinstance(kernels, LinearGaussianKernel):
        first = state.num_read + index == 0
        kernels = jax.vmap(_identity_where)(first, kernels)
    steps = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), state.steps, kernels)
    read_now = n if count is None else count
    times = state.num_read + index
    if isinstance(steps, LinearGaussianKernel):
        smoothed = _pushed_back(steps, read.law.mean, read.law.covariance, lag)
    else:
        smoothed = _walked_back(lagged, family.shared(), steps, read.law, times, state.key)
    filtered = exact_moments(read.law.mean, read.law.covariance)
    ready = times >= lag
    if exists is not None:
        ready = ready & exists
        filtered, smoothed = _nan_unless(exists, (filtered, smoothed))
    kept = LagState(
        after,
        jax.tree.map(lambda leaf: leaf[read_now - 1], read.law),
        jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, read_now, lag), steps),
        state.num_read + read_now,
        state.key,
    )
    row, skipped = jnp.maximum(times - lag, 0), jnp.zeros(n, bool)
    return kept, LagOutput(filtered, smoothed, row, ready, skipped), read


def _identity_where(first: Array, kernel: LinearGaussianKernel) -> LinearGaussianKernel:
    return jax.tree.map(lambda i, k: jnp.where(first, i, k), _identity_like(kernel), kernel)


def _pushed_back(
    kernels: LinearGaussianKernel,
    means: Float[Array, "time state"],
    covariances: Float[Array, "time state state"],
    lag: int,
) -> LagMoments:
    """The laws N(m, P) of each row, through the `lag` kernels that end with that row's own.

    Windows of kernels are composed for all rows at once: those of 2w from two of w, and that of
    `lag` from the powers of two it is the sum of. All windows are aligned at their last kernel.
    """
    spreads = jax.vmap(linalg.outer_gram)(kernels.scale_tril)
    power: tuple[Array, ...] = (kernels.weight, kernels.bias, spreads)
    width, window, covered = 1, None, 0
    while True:
        if lag & width:
            window = power if window is None else _join(window, power, covered)
            covered += width
        if 2 * width > lag:
            break
        power, width = _join(power, power, width), 2 * width
    if window is None:
        raise ValueError(f"lag must be at least 1, got {lag}.")
    # The first window ends before the first of the rows.
    gains, offsets, spreads = (leaf[-means.shape[0] :] for leaf in window)

    def push(gain: Array, offset: Array, spread: Array, mean: Array, covariance: Array) -> tuple:
        moved = linalg.matmul(linalg.matmul(gain, covariance), gain.T)
        return linalg.matvec(gain, mean) + offset, moved + spread

    return exact_moments(*jax.vmap(push)(gains, offsets, spreads, means, covariances))


def _join(
    later: tuple[Array, ...], earlier: tuple[Array, ...], width: int
) -> tuple[Float[Array, "time state state"], Float[Array, "time state"], Array]:
    """The kernels `later`, each `width` rows wide, followed by the `earlier` that end before them.

    Both hold a row for each last kernel, with the newest at the end.
    """
    count = min(later[0].shape[0], earlier[0].shape[0] - width)
    later = tuple(leaf[-count:] for leaf in later)
    end = earlier[0].shape[0] - width
    earlier = tuple(leaf[end - count : end] for leaf in earlier)

    def compose(g1: Array, c1: Array, s1: Array, g2: Array, c2: Array, s2: Array) -> tuple:
        spread = linalg.matmul(linalg.matmul(g2, s1), g2.T) + s2
        return linalg.matmul(g2, g1), linalg.matvec(g2, c1) + c2, spread

    return linalg.fence(jax.vmap(compose)(*later, *earlier))


def _walked_back(
    lagged: FixedLag, shared: Any, steps: PyTree, laws: Any, times: Int[Array, "time"], key: Any
) -> LagMoments:
    """Moments over paths that are drawn from each row's law, and back through its last kernels."""
    lag = lagged.lag

    def walk(at: tuple[Array, Any, Array]) -> LagMoments:
        index, law, time = at
        window = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index + 1, lag), steps)
        chain = _chain(shared, window, law, lag)
        shape = (lagged.num_samples, lag + 1, chain.noise_dim)
        row_key = jax.random.fold_in(key, time.astype(jnp.uint32))
        trace = chain.trace(jax.random.normal(row_key, shape, law.mean.dtype))
        # Before row `lag` the first kernels have no meaning: row 0 stands later in the window.
        first = jnp.maximum(lag - time, 0)
        means = lax.dynamic_slice_in_dim(trace.means, first, 1, axis=1)
        covariances = lax.dynamic_slice_in_dim(trace.covariances, first, 1, axis=1)
        weights = jnp.ones((lagged.num_samples, 1), means.dtype)
        found = moments_over_paths(means[:, None], covariances[:, None], weights)
        return LagMoments(
            found.mean[0],
            found.covariance[0],
            found.mean_standard_error[0],
            found.covariance_standard_error[0],
        )

    return lax.map(walk, (jnp.arange(times.shape[0]), laws, times))


def _chain(shared: Any, steps: PyTree, law: Any, num_steps: int) -> SampledChain:
    """The chain that ends with this law; nobody reads the laws before it."""
    laws = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_steps + 1, *leaf.shape)), law)
    return SampledChain(laws, shared, steps)


@eqx.filter_jit
def _flush(lagged: FixedLag, state: LagState) -> LagRows:
    family: Any = unwrap(lagged.family)
    lag = lagged.lag
    steps = jax.tree.map(lambda leaf: leaf[1:], state.steps)
    if isinstance(steps, LinearGaussianKernel):
        laws = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (lag, *leaf.shape)), state.law)
        found = marginals(LinearGaussianChain(laws, steps), estimator=ClosedForm())
    else:
        chain = _chain(family.shared(), steps, state.law, lag - 1)
        # A key of its own: the paths of the last update have used that of its row.
        key = jax.random.fold_in(jax.random.fold_in(state.key, 0), state.num_read.astype("uint32"))
        found = marginals(chain, estimator=BackwardSampling(lagged.num_samples), key=key)
    rows = state.num_read - lag + jnp.arange(lag)
    moments = LagMoments(
        found.mean,
        found.covariance,
        found.mean_standard_error,
        found.covariance_standard_error,
    )
    return LagRows(_nan_unless(rows >= 0, moments), rows, rows >= 0)


def exact_moments(mean: Array, covariance: Array) -> LagMoments:
    """Moments without an error."""
    return LagMoments(mean, covariance, jnp.zeros_like(mean), jnp.zeros_like(covariance))


def _nan_unless(exists: Bool[Array, "time"], tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jnp.where(exists.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.nan), tree
    )
