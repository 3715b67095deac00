"""Fixed-lag smoothing of a stream: each row is smoothed with a number of rows that follow it.

A backward kernel does not depend on later observations. The law of x_{k-L} given y_{0:k} is
therefore q_k pushed back through the last L kernels, and only these have to be stored.
"""

from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._arrays import PRNGKey, check_count, is_concrete
from retrodict._expectations import (
    BackwardSampling,
    ClosedForm,
    Marginals,
    marginals,
    moments_over_paths,
)
from retrodict._families import (
    AbstractFamily,
    AbstractLinearGaussianFamily,
    AbstractSampledFamily,
    Factor,
    factors,
    read_row,
)
from retrodict._model import LinearGaussianKernel, Series, unwrap
from retrodict._numerics import linalg
from retrodict.online.stream import (
    AbstractStream,
    cast,
    choose,
    finite_rows,
    float_type,
    nan_where_absent,
    require_key,
    skip_nonfinite,
    zeros_like_shapes,
)

Affine: TypeAlias = tuple[Array, ...]
"""The weight, the bias and the noise covariance of an affine map with Gaussian noise."""


class LagRows(eqx.Module):
    """Smoothed rows of a stream.

    Attributes:
        smoothed: the moments of the states of these rows, given all rows that were read.
        row: the indices of the rows in the stream, counted from 0.
        ready: whether the row is final: it exists, and `lag` rows follow it or the stream has
            ended.
    """

    smoothed: Marginals
    row: Int[Array, "..."]
    ready: Bool[Array, "..."]


class AbstractLagOutput(eqx.Module):
    """What all outputs of a fixed lag contain; see `LagOutput`."""

    filtered: Marginals
    smoothed: Marginals
    row: Int[Array, "..."]
    ready: Bool[Array, "..."]
    skipped: Bool[Array, "..."]


class LagOutput(AbstractLagOutput):
    """The output after row k of a stream, with a leading axis `time` for several rows.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}.
        smoothed: the moments of x_{k-lag} given y_{0:k}; those of x_0 while k < lag.
        row: the row that `smoothed` belongs to, max(k − lag, 0).
        ready: whether k ≥ lag.
        skipped: whether row k was read as missing, since it made a result non-finite.
    """


class LagState(eqx.Module):
    """The state of a `FixedLag`: arrays whose size does not grow.

    Attributes:
        family: the state of the family.
        law: the last filtering law.
        steps: the last `lag` backward kernels, the newest at the end.
        num_read: the number of rows that were read.
        key: the key from which the noise of each row is derived; `None` if nothing is drawn.
    """

    family: PyTree
    law: Any
    steps: PyTree
    num_read: Int[Array, "..."]
    key: Any


class FixedLag(AbstractStream[LagState, LagOutput]):
    """The filtered law of row k and the smoothed law of row k − lag, along a stream.

    The smoothed law at k − lag is the marginal that `family.infer` gives for all rows so far, at a
    cost and in a memory that do not grow with the stream. Linear-Gaussian kernels are composed in
    closed form, in windows of 2, 4, 8, … rows. For other families paths are drawn, and their
    conditional moments are averaged; the noise of row k depends on the key and k alone.

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
        family: a family with linear-Gaussian kernels, or a family that draws samples.
        lag: the number of rows that a smoothed row waits for.
        num_samples: the number of paths to draw per row, for families that draw samples.
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

    def flush(self, state: LagState) -> LagRows:
        """Return the last `lag` rows, given all rows that were read, in the order of time.

        If fewer than `lag` rows were read, the first entries do not exist: they are not `ready`,
        their `row` is negative and their moments are NaN.
        """
        if is_concrete(state.num_read) and state.num_read.ndim == 0 and state.num_read == 0:
            raise ValueError("flush returns the last rows of a stream, and no row was read yet.")
        return _flush(self, state)

    def _start(self, key: PRNGKey | None, data: PyTree) -> LagState:
        family = unwrap(self.family)
        factor = zeros_like_shapes(factor_shapes(family, float_type(self.family))[0])
        steps = factor.kernel
        if not self.draws:
            steps = _identity_like(steps)
        steps = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.lag, *leaf.shape)), steps)
        key = require_key(self, key) if self.draws else None
        return LagState(family.init(), factor.law, steps, jnp.zeros((), jnp.result_type(int)), key)

    @property
    def _checked_against(self) -> AbstractFamily:
        return self.family

    def _advance(self, state: LagState, series: Series, data: PyTree) -> tuple[LagState, LagOutput]:
        def advance(
            state: LagState, series: Series, data: None
        ) -> tuple[LagState, LagOutput, Bool[Array, "time"]]:
            state, out, factor = advance_lag(self, state, series)
            moments = (out.smoothed.mean, out.smoothed.covariance)
            return state, out, finite_rows((factor.law, moments))

        return skip_nonfinite(advance, state, series, None)

    @property
    def draws(self) -> bool:
        """Whether paths are drawn, so that `init` needs a key."""
        return isinstance(self.family, AbstractSampledFamily)


def factor_shapes(family: Any, dtype: Any) -> tuple[Factor, Series]:
    """Return the shapes of the factors of one row of an unwrapped family, and of the row."""

    def read() -> tuple[Factor, Series]:
        inputs = jnp.zeros(family.input_dim, dtype) if family.input_dim else None
        row = Series(jnp.zeros(family.obs_dim, dtype), jnp.ones(family.obs_dim, bool), inputs)
        return read_row(family, family.init(), row)[1], row

    return jax.eval_shape(read)


def _identity_like(kernel: LinearGaussianKernel) -> LinearGaussianKernel:
    """Return the identity kernel, which stands for the missing kernel before the first row."""
    eye = jnp.eye(kernel.bias.shape[0], dtype=kernel.bias.dtype)
    return LinearGaussianKernel(eye, jnp.zeros_like(kernel.bias), jnp.zeros_like(eye))


def advance_lag(
    lagged: FixedLag, state: LagState, series: Series
) -> tuple[LagState, LagOutput, Factor]:
    """Read the rows of a `complete` series; called inside `jax.jit`.

    Returns:
        The next state, the outputs, and the factors q_k and q_{k-1|k} of each row. The kernel of
        the first row of a stream has no meaning.
    """
    family: Any = unwrap(lagged.family)
    series = cast(series, float_type(lagged.family))
    n, lag = series.num_times, lagged.lag
    count: Any = series.length
    exists: Any = series.exists()
    factor, after = factors(family, state.family, series)
    kernels, times = factor.kernel, state.num_read + jnp.arange(n)
    if isinstance(kernels, LinearGaussianKernel):
        kernels = jax.vmap(lambda first, kernel: choose(first, _identity_like(kernel), kernel))(
            times == 0, kernels
        )
    steps = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), state.steps, kernels)
    if isinstance(steps, LinearGaussianKernel):
        smoothed = _pushed_back(steps, factor.law, lag)
    else:

        def at_row(at: tuple[Array, Any, Array]) -> Marginals:
            index, law, time = at
            window = jax.tree.map(
                lambda leaf: lax.dynamic_slice_in_dim(leaf, index, lag + 1), steps
            )
            key = jax.random.fold_in(state.key, time.astype(jnp.uint32))
            # Before row `lag` the first kernels have no meaning: row 0 is later in the window.
            first = jnp.maximum(lag - time, 0)
            return moments_of_paths(family, window, law, lagged.num_samples, key, first)

        smoothed = lax.map(at_row, (jnp.arange(n), factor.law, times))
    filtered = Marginals.exact(factor.law.mean, factor.law.covariance)
    filtered, smoothed = nan_where_absent(exists, (filtered, smoothed))
    ready = (times >= lag) & exists
    next_state = LagState(
        after,
        jax.tree.map(lambda leaf: leaf[count - 1], factor.law),
        jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, count, lag), steps),
        state.num_read + count,
        state.key,
    )
    row, skipped = jnp.maximum(times - lag, 0), jnp.zeros(n, bool)
    return next_state, LagOutput(filtered, smoothed, row, ready, skipped), factor


def _pushed_back(kernels: LinearGaussianKernel, laws: Any, lag: int) -> Marginals:
    """Push the law of each row back through the `lag` kernels that end with its own.

    Windows of kernels are composed for all rows at once: a window of 2w kernels from two of w, and
    that of `lag` from the powers of two that sum to it. Windows are aligned at their last kernel.
    """
    power: Affine = (kernels.weight, kernels.bias, jax.vmap(linalg.outer_gram)(kernels.scale_tril))
    width, window, covered = 1, power, 0
    while True:
        if lag & width:
            window = _join(window, power, covered) if covered else power
            covered += width
        if 2 * width > lag:
            break
        power, width = _join(power, power, width), 2 * width
    # The first window ends before the first of the rows.
    window = tuple(leaf[-laws.mean.shape[0] :] for leaf in window)
    return Marginals.exact(*jax.vmap(push_forward)(window, laws.mean, laws.covariance))


def push_forward(
    kernel: Affine, mean: Float[Array, "d"], covariance: Float[Array, "d d"]
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """Return the moments of w x + b + ε with Cov ε = noise, for x of these moments."""
    weight, bias, noise = kernel
    moved = linalg.matmul(linalg.matmul(weight, covariance), weight.T)
    return linalg.matvec(weight, mean) + bias, moved + noise


def _join(later: Affine, earlier: Affine, width: int) -> Affine:
    """Compose each kernel of `later`, `width` rows wide, with the `earlier` one that ends before.

    Both hold one entry per last kernel, with the newest at the end.
    """
    end = earlier[0].shape[0] - width
    count = min(later[0].shape[0], end)
    later = tuple(leaf[-count:] for leaf in later)
    earlier = tuple(leaf[end - count : end] for leaf in earlier)

    def compose(later: Affine, earlier: Affine) -> Affine:
        weight, bias, noise = later
        return linalg.matmul(earlier[0], weight), *push_forward(earlier, bias, noise)

    return linalg.fence(jax.vmap(compose)(later, earlier))


def _chain(family: Any, steps: PyTree, law: Any) -> Any:
    """Return the chain of all kernels but the first that ends with a law, the only one it uses."""
    num_times = jax.tree.leaves(steps)[0].shape[0]
    laws = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_times, *leaf.shape)), law)
    return family.assemble(Factor(laws, steps), None)


def moments_of_paths(
    family: Any, steps: PyTree, law: Any, num_samples: int, key: PRNGKey, first: Any = 0
) -> Marginals:
    """Average the conditional moments of one state over paths drawn back from a law.

    Args:
        family: an unwrapped family that draws samples.
        steps: the backward kernels, the newest at the end; the first one is not used.
        law: the law of the state after the last kernel.
        num_samples: the number of paths.
        key: a typed key.
        first: the index of the state on the path.
    """
    chain = _chain(family, steps, law)
    noise = jax.random.normal(key, (num_samples, chain.num_times, chain.noise_dim), law.mean.dtype)
    trace = chain.trace(noise)
    means, covariances = (
        lax.dynamic_slice_in_dim(leaf, first, 1, axis=1)[:, None]
        for leaf in (trace.means, trace.covariances)
    )
    moments = moments_over_paths(means, covariances, jnp.ones((num_samples, 1), means.dtype))
    return jax.tree.map(lambda leaf: leaf[0], moments)


@eqx.filter_jit
def _flush(lagged: FixedLag, state: LagState) -> LagRows:
    chain, key = _chain(unwrap(lagged.family), state.steps, state.law), None
    if lagged.draws:
        # A separate key: the paths of the last update used that of its row.
        key = jax.random.fold_in(jax.random.fold_in(state.key, 0), state.num_read.astype("uint32"))
    estimator = BackwardSampling(lagged.num_samples) if lagged.draws else ClosedForm()
    moments = marginals(chain, estimator=estimator, key=key)
    rows = state.num_read - lagged.lag + jnp.arange(lagged.lag)
    return LagRows(nan_where_absent(rows >= 0, moments), rows, rows >= 0)
