"""The posterior of a stream: filtered and lagged laws, the lower bound and functionals."""

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from retrodict._arrays import PRNGKey
from retrodict._expectations import AbstractFunctional, Recursive
from retrodict._families import AbstractFamily
from retrodict._model import Series, StateSpaceModel, prepare_data, unwrap
from retrodict.online.exact import ExactRecursion, check_exact
from retrodict.online.fixed_lag import (
    AbstractLagOutput,
    FixedLag,
    LagOutput,
    LagRows,
    LagState,
    advance_lag,
    factor_shapes,
)
from retrodict.online.gradient import check_kinds
from retrodict.online.quantities import Quantities, RowFactors, Sums, kahan_add
from retrodict.online.samples import SampledRecursion, WeightedSamples, backward_law
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


class RunningState(eqx.Module):
    """The state of a `RunningPosterior`: arrays whose size does not grow.

    Attributes:
        lag: the family's state, the last filtering law and the last backward kernels.
        statistics: the statistics T_k, each less its expectation.
        totals: the expectations E_{q_k} T_k, one per replicate if there are replicates.
        residues: the rounding errors of the totals.
        key: the key from which the noise of each row is derived; `None` if nothing is drawn.
    """

    lag: LagState
    statistics: Any
    totals: Any
    residues: Any
    key: Any


class RunningOutput(AbstractLagOutput):
    """The output after row k of a stream, with a leading axis `time` for several rows.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}.
        smoothed: the moments of x_{k-lag} given y_{0:k}; those of x_0 while k < lag.
        row: the row that `smoothed` belongs to, max(k − lag, 0).
        ready: whether k ≥ lag.
        elbo: the lower bound of log p(y_{0:k}), in nats; `None` without a model.
        elbo_increment: what row k added to the bound.
        elbo_standard_error: the standard error of `elbo`: zero if exact, NaN if unavailable.
        values: E_q[H(x_{0:k})] of each functional given y_{0:k}, by name.
        standard_errors: the standard errors of `values`.
        ess: the mean effective number of draws per backward kernel; `None` for exact recursions,
            NaN if not all draws were weighted.
        skipped: whether row k was read as missing, since it made a result non-finite.
    """

    elbo: Any
    elbo_increment: Any
    elbo_standard_error: Any
    values: dict[str, PyTree]
    standard_errors: dict[str, PyTree]
    ess: Any


class RunningPosterior(AbstractStream[RunningState, RunningOutput]):
    """Filtered and lagged laws, lower bound and smoothed functionals along a stream.

    All statistics obey one recursion, T_0 = h_0 and

        T_k(x_k) = E_{q_{k-1|k}(x_k, ·)}[T_{k-1}(X_{k-1}) + h_k(X_{k-1}, x_k)],

    and E_{q_k} T_k is what `expectation` or `elbo` gives for the chain of all rows up to k. For the
    lower bound

        h_0 = log χ(x_0) g_0(x_0) − log q_0(x_0),
        h_k = log m(x_{k-1}, x_k) g_k(x_k) + log q_{k-1}(x_{k-1}) − log q_k(x_k)
              − log q_{k-1|k}(x_k, x_{k-1}).

    T_k is quadratic and computed exactly if the terms are quadratic in the states and the kernels
    are linear Gaussian (`Recursive()`). Otherwise it is approximated at draws
    (`WeightedSamples(num_samples)`). The noise of row k depends on the key and k alone. A row is
    skipped, with zeros for its `data`, if it makes a result non-finite, for example if the square
    of an observation overflows.

    With a model the output has the running evidence lower bound as `elbo`. For laws and kernels
    that do not come from a family, apply `Recursive().init` and `update` to `LogJoint(model)`, and
    add the entropies of the backward kernels and of the last law.

    The argument `data` of `init`, `update` and `scan` is a mapping from names of functionals to
    what they read. Functionals that are not named read the observation, as `LogJoint` and `Score`
    do.

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
        family: a family with linear-Gaussian kernels, or a family that draws samples.
        model: the model of the lower bound; `None` to leave the bound out.
        functionals: additive functionals by name.
        lag: the number of rows that a smoothed row waits for; 0 for filtering laws alone.
        method: `Recursive()`, the default, or `WeightedSamples(num_samples)`, which accepts any
            family, model and functional.
    """

    _takes_data: ClassVar[bool] = True
    lagged: FixedLag
    quantities: Quantities
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
            raise ValueError(f"lag must be a non-negative integer, got {lag!r}.")
        if not isinstance(method, (Recursive, WeightedSamples, type(None))):
            raise TypeError(
                "RunningPosterior expects the method Recursive() or WeightedSamples(num_samples),"
                f" got {type(method).__name__}."
            )
        paths = {"num_samples": method.num_samples} if isinstance(method, WeightedSamples) else {}
        # With lag=0 the smoothed law is dead code, which the compiler removes.
        self.lagged, self.lag = FixedLag(family, max(lag, 1), **paths), lag
        named = {} if functionals is None else dict(functionals)
        for name, functional in named.items():
            if not isinstance(name, str) or not isinstance(functional, AbstractFunctional):
                raise TypeError(
                    "RunningPosterior expects functionals by name, such as {'sum': StateSum()}, got"
                    f" {type(functional).__name__} under {name!r}."
                )
        self.quantities = Quantities(model, named)
        self.method = Recursive() if method is None else method
        if model is not None:
            check_kinds(family, model, "RunningPosterior")
            inputs = jnp.zeros((1, family.input_dim)) if family.input_dim else None
            prepare_data(unwrap(model), jnp.zeros((1, family.obs_dim)), mask=True, inputs=inputs)
        if isinstance(self.method, Recursive):
            check_exact(family, Quantities(unwrap(model), named))

    def flush(self, state: RunningState) -> LagRows:
        """Return the last `lag` rows, given all rows that were read, as `FixedLag.flush` does."""
        if self.lag == 0:
            raise ValueError("flush returns rows that wait for later ones; with lag=0 none do.")
        return self.lagged.flush(state.lag)

    def _start(self, key: PRNGKey | None, data: PyTree) -> RunningState:
        lag_key, method_key = None, None
        if self.lagged.draws or isinstance(self.method, WeightedSamples):
            lag_key, method_key = jax.random.split(require_key(self, key))
        family: Any = unwrap(self.lagged.family)
        factor, row = factor_shapes(family, float_type(self.lagged.family))

        def begin(factor: Any, row: Series) -> tuple[Any, Sums]:
            at = RowFactors(factor.law, factor.law, factor.kernel, self._rows(row, data))
            return self._recursion(family).start(at, jax.random.key(0))[:2]

        statistics, totals = zeros_like_shapes(jax.eval_shape(begin, factor, row))
        residues = jax.tree.map(jnp.zeros_like, totals)
        return RunningState(self.lagged.init(lag_key), statistics, totals, residues, method_key)

    @property
    def _checked_against(self) -> AbstractFamily:
        return self.lagged.family

    def _advance(
        self, state: RunningState, series: Series, data: PyTree
    ) -> tuple[RunningState, RunningOutput]:
        # No quadratic function of an observation is finite if its square overflows.
        squares = jnp.square(series.ys.astype(float_type(self.lagged.family)))
        overflowing = ~jnp.all(jnp.isfinite(squares), axis=1)
        return skip_nonfinite(self._try, state, series, data, overflowing)

    def _recursion(self, family: Any) -> ExactRecursion | SampledRecursion:
        # Functionals unwrap what they hold themselves.
        quantities = Quantities(unwrap(self.quantities.model), self.quantities.functionals)
        if isinstance(self.method, WeightedSamples):
            return SampledRecursion(self.method, backward_law(family), quantities)
        return ExactRecursion(quantities)

    def _rows(self, series: Series, data: PyTree) -> Sums:
        """Return what the bound and each functional read."""
        named = {} if data is None else dict(data)
        if unknown := sorted(set(named) - set(self.quantities.functionals)):
            known = ", ".join(sorted(self.quantities.functionals)) or "none"
            raise ValueError(
                f"data must be keyed by the names of functionals ({known}), got {unknown}."
            )
        rows = {name: named.get(name, series) for name in self.quantities.functionals}
        return Sums(None if self.quantities.model is None else series, rows)

    def _try(
        self, state: RunningState, series: Series, data: PyTree
    ) -> tuple[RunningState, RunningOutput, Bool[Array, "time"]]:
        """Read rows, and return the next state, the outputs, and whether they are finite."""
        recursion = self._recursion(unwrap(self.lagged.family))
        lag, out, factor = advance_lag(self.lagged, state.lag, series)
        times = state.lag.num_read + jnp.arange(series.num_times)
        exists: Any = series.exists()
        data = self._rows(cast(series, factor.law.mean.dtype).rows, data)

        def move(carry: tuple, row: tuple) -> tuple[tuple, tuple]:
            before, statistics, totals, residues = carry
            law, step, data, time, real = row
            at = RowFactors(before, law, step, data)
            key: Any = None
            if state.key is not None:
                key = jax.random.fold_in(state.key, time.astype(jnp.uint32))
            statistics, increments, ess = lax.cond(
                time == 0,
                lambda: recursion.start(at, key),
                lambda: recursion.advance(statistics, at, key),
            )
            after = (law, statistics, *kahan_add(totals, residues, increments))
            after = choose(real, after, carry)
            return after, (after[2], increments, ess)

        start = (state.lag.law, state.statistics, state.totals, state.residues)
        rows = (factor.law, factor.kernel, data, times, exists)
        (_, statistics, *sums), (totals, increments, ess) = lax.scan(move, start, rows)
        finite = finite_rows(
            (factor.law, out.smoothed.mean, out.smoothed.covariance, totals, increments)
        )
        estimates, errors = jax.vmap(recursion.estimate)(totals)
        increment = jax.vmap(recursion.estimate)(increments)[0].elbo
        estimates, errors, increment, ess = nan_where_absent(
            exists, (estimates, errors, increment, ess)
        )
        if self.lag == 0:
            out = LagOutput(out.filtered, out.filtered, times, exists, out.skipped)
        output = RunningOutput(
            **vars(out),
            elbo=estimates.elbo,
            elbo_increment=increment,
            elbo_standard_error=errors.elbo,
            values=estimates.values,
            standard_errors=errors.values,
            ess=ess,
        )
        return RunningState(lag, statistics, sums[0], sums[1], state.key), output, finite
