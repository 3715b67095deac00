"""A posterior that follows a stream: filtered and lagged laws, the lower bound and functionals."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from retrodict._expectations import AbstractFunctional, Recursive
from retrodict._families import AbstractFamily, AbstractSampledFamily, Row, check_fits, prepare_row
from retrodict._model import StateSpaceModel, check_densities, prepare_data
from retrodict._parameters import unwrap
from retrodict._series import Series, convert_row
from retrodict._types import PRNGKey
from retrodict._validate import check_key
from retrodict.online.exact import ExactRecursion, refuse_unless_exact
from retrodict.online.fixed_lag import (
    FixedLag,
    LagMoments,
    LagOutput,
    LagRows,
    LagState,
    advance_rows,
    chunk_for,
    factor_shapes,
    finite_rows,
    float_type,
    skip_nonfinite,
)
from retrodict.online.followed import Arrival, Followed, Sums, add_up, zeros_like_shapes
from retrodict.online.samples import SampledRecursion, WeightedSamples
from retrodict.online.weights import backward_law


class RunningState(eqx.Module):
    """What a `RunningPosterior` carries from one row to the next, of a size that does not grow.

    Attributes:
        lag: the family's state, the last filtering law and the last backward kernels.
        statistics: the statistics T_k, each less its expectation.
        totals: the expectations E_{q_k} T_k, of each replicate if there are any.
        residues: what rounding has left out of the totals.
        key: the key that the noise of each row is made from; `None` if nothing is drawn.
    """

    lag: LagState
    statistics: Any
    totals: Any
    residues: Any
    key: Any


class RunningOutput(eqx.Module):
    """What is known after row k of a stream; along a leading axis `time` after many of them.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}.
        smoothed: the moments of x_{k-lag} given y_{0:k}; those of x_0 before that many have come.
        row: the row that `smoothed` is of, k − lag or 0.
        ready: whether k has come to the lag.
        elbo: the lower bound of log p(y_{0:k}), in nats; `None` without a model.
        elbo_increment: what row k added to it.
        elbo_standard_error: of `elbo`: zero if it is exact, NaN if it is not known.
        values: E_q[H(x_{0:k})] of each functional given y_{0:k}, by name.
        standard_errors: of the values, likewise.
        ess: the effective number of draws that stand for one backward kernel, on average; `None`
            if none do, NaN if they were not all weighed.
        skipped: whether row k was read as a missing one, since something non-finite followed from
            it.
    """

    filtered: LagMoments
    smoothed: LagMoments
    row: Int[Array, "..."]
    ready: Bool[Array, "..."]
    elbo: Any
    elbo_increment: Any
    elbo_standard_error: Any
    values: dict[str, PyTree]
    standard_errors: dict[str, PyTree]
    ess: Any
    skipped: Bool[Array, "..."]


class RunningPosterior(eqx.Module):
    """The posterior of a stream: laws, lower bound and smoothed functionals, row after row.

    What is followed obeys one recursion, T_0 = h_0 and

        T_k(x_k) = E_{q_{k-1|k}(x_k, ·)}[T_{k-1}(X_{k-1}) + h_k(X_{k-1}, x_k)],

    and E_{q_k} T_k is what `expectation` or `elbo` would give for the chain of all rows up to k;
    for the lower bound

        h_0 = log χ(x_0) g_0(x_0) − log q_0(x_0),
        h_k = log m(x_{k-1}, x_k) g_k(x_k) + log q_{k-1}(x_{k-1}) − log q_k(x_k)
              − log q_{k-1|k}(x_k, x_{k-1}).

    T_k is quadratic, and followed exactly, if terms are quadratic in the states and kernels linear
    Gaussian (`Recursive()`); otherwise it is carried by draws (`WeightedSamples(num_samples)`).
    Cost and memory do not grow with the stream. The noise of row k is made from the key and k
    alone: however a stream is cut into chunks, stored with `save` and gone on with, its rows come
    out the same. A row from which something non-finite follows, such as an observation whose square
    overflows, is read as a missing one, with zeros for its `data`, and reported as `skipped`.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> running = rd.online.RunningPosterior(
        ...     rd.KalmanFamily(model), model, functionals={"sum": rd.StateSum()}
        ... )
        >>> state = running.init()
        >>> for y in jnp.ones((5, 1)):
        ...     state, out = running.update(state, y)
        >>> exact = rd.kalman_smoother(model, jnp.ones((5, 1)))
        >>> bool(jnp.isclose(out.elbo, exact.log_evidence, rtol=1e-4))
        True
        >>> out.values["sum"].shape
        (1,)

    Args:
        family: a family with linear-Gaussian kernels, or one that draws.
        model: the model of the lower bound; `None` to leave the bound out.
        functionals: additive functionals by name.
        lag: how many rows a smoothed row waits for; 0 if filtering laws are enough.
        method: `Recursive()`, the default, or `WeightedSamples(num_samples)`, which any family,
            model and functional allows.
    """

    lagged: FixedLag
    followed: Followed
    method: Recursive | WeightedSamples
    lag: int = eqx.field(static=True)

    def __init__(
        self,
        family: AbstractFamily,
        model: StateSpaceModel | None = None,
        *,
        functionals: Mapping[str, AbstractFunctional] | None = None,
        lag: int = 0,
        method: Recursive | WeightedSamples | None = None,
    ):
        if isinstance(lag, bool) or not isinstance(lag, int) or lag < 0:
            raise ValueError(f"lag must be an integer that is not negative, got {lag!r}.")
        if not isinstance(method, (Recursive, WeightedSamples, type(None))):
            raise TypeError(
                "RunningPosterior expects the method Recursive() or WeightedSamples(num_samples),"
                f" got {type(method).__name__}."
            )
        paths = {"num_samples": method.num_samples} if isinstance(method, WeightedSamples) else {}
        # The lag of a posterior that is only filtered costs nothing: nobody reads it.
        self.lagged, self.lag = FixedLag(family, max(lag, 1), **paths), lag
        self.followed = Followed(model, _checked(functionals))
        self.method = Recursive() if method is None else method
        if model is not None:
            _check_model(family, model)
        if isinstance(self.method, Recursive):
            refuse_unless_exact(family, _unwrapped(self.followed))

    def init(
        self, key: PRNGKey | None = None, *, data: Mapping[str, PyTree] | None = None
    ) -> RunningState:
        """The state before anything was read.

        Args:
            key: a typed key, for methods and families that draw.
            data: rows of what functionals read other than observations, for their shapes: as
                `update` takes them.
        """
        own = None
        if self._draws:
            if key is None:
                raise ValueError(
                    "WeightedSamples draws: init needs a key, as from jax.random.key(0)."
                )
            check_key(key, "RunningPosterior.init")
            key, own = jax.random.split(key)
        family: Any = unwrap(self.lagged.family)
        read, row = factor_shapes(family, float_type(self.lagged.family))

        def begin(read: Any, row: Row) -> tuple[Any, Sums]:
            seen = Series(row.y, row.seen, row.u)
            at = Arrival(read.law, read.law, read.kernel, seen, self._rows(seen, data))
            return _recursion(self, family).start(at, jax.random.key(0))[:2]

        shapes = jax.eval_shape(begin, read, row)
        statistics, totals = zeros_like_shapes(shapes)
        residues = jax.tree.map(jnp.zeros_like, totals)
        return RunningState(self.lagged.init(key), statistics, totals, residues, own)

    def update(
        self,
        state: RunningState,
        y: Any,
        *,
        mask: Any = None,
        u: Any = None,
        data: Mapping[str, PyTree] | None = None,
    ) -> tuple[RunningState, RunningOutput]:
        """Reads one row.

        Args:
            state: what `init` or the previous call returned.
            y: the observation, of shape `(obs,)`; NaN where an entry is missing.
            mask: true where an entry was seen.
            u: the input, of shape `(input,)`, if the family takes one.
            data: what functionals read at this row, by their names; those that are not named read
                the observation, as `LogJoint` and `Score` do.

        Returns:
            The next state, and what is known now.
        """
        y, u = convert_row(y, mask, u)
        return _update(self, state, y, u, self._named(data))

    def scan(
        self,
        state: RunningState,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
        data: Mapping[str, PyTree] | None = None,
    ) -> tuple[RunningState, RunningOutput]:
        """Reads many rows in one compiled program: quicker than one `update` each.

        Args:
            state: what `init` or the previous call returned.
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was seen.
            inputs: inputs of shape `(time, input)`, if the family takes them.
            length: how many of the rows exist. A last chunk that is padded to the size of the
                others is not compiled anew.
            data: what functionals read, by their names, with one row a time step.

        Returns:
            The next state, and what was known after each row; NaN from `length` on.
        """
        rows, count = chunk_for(self.lagged.family, ys, mask=mask, inputs=inputs, length=length)
        return _scan(self, state, rows, count, self._named(data))

    def flush(self, state: RunningState) -> LagRows:
        """The last `lag` rows, given all that was read: what `update` has not given yet."""
        if self.lag == 0:
            raise ValueError("flush gives the rows that wait for others, and with lag=0 none do.")
        return self.lagged.flush(state.lag)

    @property
    def _draws(self) -> bool:
        sampled = isinstance(self.lagged.family, AbstractSampledFamily)
        return sampled or isinstance(self.method, WeightedSamples)

    def _named(self, data: Mapping[str, PyTree] | None) -> dict[str, PyTree]:
        data = {} if data is None else dict(data)
        if unknown := sorted(set(data) - set(self.followed.functionals)):
            known = ", ".join(sorted(self.followed.functionals)) or "none"
            raise ValueError(
                f"data is given by the names of functionals, which are {known}; got {unknown}."
            )
        return data

    def _rows(self, seen: Series, data: Mapping[str, PyTree] | None) -> dict[str, PyTree]:
        given = self._named(data)
        return {name: given.get(name, seen) for name in self.followed.functionals}


def _recursion(running: RunningPosterior, family: Any) -> ExactRecursion | SampledRecursion:
    followed = _unwrapped(running.followed)
    if isinstance(running.method, WeightedSamples):
        return SampledRecursion(running.method, backward_law(family), followed)
    return ExactRecursion(followed)


def _unwrapped(followed: Followed) -> Followed:
    """With an unwrapped model; functionals unwrap what they hold themselves."""
    return Followed(unwrap(followed.model), followed.functionals)


@eqx.filter_jit
def _update(
    running: RunningPosterior, state: RunningState, y: Array, u: Array | None, data: Any
) -> tuple[RunningState, RunningOutput]:
    row = prepare_row(running.lagged.family, y, mask=None, u=u)
    rows, data = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (row, data))
    state, out = _advance_finite(running, state, rows, None, data)
    return state, jax.tree.map(lambda leaf: leaf[0], out)


@eqx.filter_jit
def _scan(
    running: RunningPosterior, state: RunningState, rows: Row, count: Int[Array, ""], data: Any
) -> tuple[RunningState, RunningOutput]:
    return _advance_finite(running, state, rows, count, data)


def _advance_finite(
    running: RunningPosterior,
    state: RunningState,
    rows: Row,
    count: Int[Array, ""] | None,
    data: dict[str, PyTree],
) -> tuple[RunningState, RunningOutput]:
    """Reads rows, and those from which something non-finite follows as missing ones."""
    # Nothing quadratic can be made of an observation whose square overflows.
    squares = jnp.square(rows.y.astype(float_type(running.lagged.family)))
    overflowing = ~jnp.all(jnp.isfinite(squares), axis=1)
    state, out, skipped = skip_nonfinite(
        lambda state, rows, data: _advance(running, state, rows, count, data),
        state,
        rows,
        data,
        count,
        overflowing,
    )
    return state, eqx.tree_at(lambda o: o.skipped, out, skipped)


def _advance(
    running: RunningPosterior,
    state: RunningState,
    rows: Row,
    count: Int[Array, ""] | None,
    data: dict[str, PyTree],
) -> tuple[RunningState, RunningOutput, Bool[Array, "time"]]:
    """Reads rows of which the first `count` exist; all of them if it is `None`.

    Returns:
        The next state, what is known after each row, and whether that is finite.
    """
    recursion = _recursion(running, unwrap(running.lagged.family))
    lag, out, read = advance_rows(running.lagged, state.lag, rows, count)
    index = jnp.arange(rows.y.shape[0])
    times, exists = state.lag.num_read + index, None if count is None else index < count
    dtype = read.law.mean.dtype
    u = None if rows.u is None else rows.u.astype(dtype)
    seen = Series(rows.y.astype(dtype), rows.seen, u)

    def move(carry: tuple, row: tuple) -> tuple[tuple, tuple]:
        before, statistics, totals, residues = carry
        law, step, seen, data, time, real = row
        at = Arrival(before, law, step, seen, data)
        key: Any = None
        if state.key is not None:
            key = jax.random.fold_in(state.key, time.astype(jnp.uint32))
        statistics, increments, ess = lax.cond(
            time == 0,
            lambda: recursion.start(at, key),
            lambda: recursion.advance(statistics, at, key),
        )
        after = (law, statistics, *add_up(totals, residues, increments))
        if real is not None:
            after = jax.tree.map(lambda new, old: jnp.where(real, new, old), after, carry)
        return after, (after[2], increments, ess)

    start = (state.lag.law, state.statistics, state.totals, state.residues)
    arriving = (read.law, read.kernel, seen, running._rows(seen, data), times, exists)
    (_, statistics, totals, residues), (sums, increments, ess) = lax.scan(move, start, arriving)
    kept = RunningState(lag, statistics, totals, residues, state.key)
    smoothed = (out.smoothed.mean, out.smoothed.covariance)
    fine = finite_rows((read.law, smoothed, sums, increments))
    return kept, _output(running, recursion, out, times, exists, sums, increments, ess), fine


def _output(
    running: RunningPosterior,
    recursion: ExactRecursion | SampledRecursion,
    out: LagOutput,
    times: Int[Array, "time"],
    exists: Bool[Array, "time"] | None,
    totals: Sums,
    increments: Sums,
    ess: Any,
) -> RunningOutput:
    estimates, errors = jax.vmap(recursion.estimate)(totals)
    found = (estimates, errors, jax.vmap(recursion.estimate)(increments)[0].elbo, ess)
    ready, smoothed, row = out.ready, out.smoothed, out.row
    if running.lag == 0:
        ready = jnp.ones(times.shape, bool) if exists is None else exists
        smoothed, row = out.filtered, times
    if exists is not None:

        def known(leaf: Array) -> Array:
            return jnp.where(exists.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.nan)

        found = jax.tree.map(known, found)
    estimates, errors, increment, ess = found
    return RunningOutput(
        out.filtered,
        smoothed,
        row,
        ready,
        estimates.elbo,
        increment,
        errors.elbo,
        estimates.values,
        errors.values,
        ess,
        out.skipped,
    )


def _checked(functionals: Mapping[str, AbstractFunctional] | None) -> dict[str, AbstractFunctional]:
    named = {} if functionals is None else dict(functionals)
    for name, functional in named.items():
        if not isinstance(name, str) or not isinstance(functional, AbstractFunctional):
            raise TypeError(
                "RunningPosterior expects functionals by name, such as {'sum': StateSum()}, got"
                f" {type(functional).__name__} under {name!r}."
            )
    return named


def _check_model(family: AbstractFamily, model: Any) -> None:
    """Refuses a model that does not fit the family or has no density."""
    if not isinstance(model, StateSpaceModel):
        raise TypeError(f"RunningPosterior expects a StateSpaceModel, got {type(model).__name__}.")
    check_fits(family, model)
    plain = unwrap(model)
    check_densities(plain, "RunningPosterior")
    inputs = jnp.zeros((1, family.input_dim)) if family.input_dim else None
    prepare_data(plain, jnp.zeros((1, family.obs_dim)), mask=True, inputs=inputs)
