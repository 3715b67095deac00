"""Switching models: a finite regime that selects the kernels of a state-space model."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key, is_concrete, known_values
from retrodict._model import (
    AbstractKernel,
    AbstractLinearGaussianKernel,
    AbstractModel,
    AbstractParameter,
    DistributionKernel,
    Gaussian,
    Series,
    StateSpaceModel,
    check_densities,
    prepare_batch,
    prepare_inputs,
    prepare_path,
    prepare_series,
    scale_diagonal,
    shape_of_draw,
    unwrap,
)
from retrodict.switching.regimes import AbstractRegimes

T = TypeVar("T")

PARTS = ("prior", "transition", "emission")
"""The parts that regimes select."""


def _as_parts(value: Any) -> Any:
    """Convert a list of parts, one per regime, to a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else value


class SwitchingModel(AbstractModel):
    """A state-space model whose kernels are selected by a finite regime z_k.

    p(z_0) χ_{z_0}(x_0) g_{z_0}(x_0, y_0) ∏_{k≥1} p(z_k | z_{k-1}, x_{k-1}) m_{z_k}(x_{k-1}, x_k)
    g_{z_k}(x_k, y_k)

    Without a prior and a transition there is no continuous state, and the model is a hidden Markov
    model with K states. Its emissions are laws, one per regime; or kernels, which then receive the
    last `num_lags` observations, latest first, in place of the state. The first `num_lags` rows are
    conditioned on and have no density.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[
        ...         rd.LinearGaussianKernel(0.9 * eye, zero, 0.1 * eye),
        ...         rd.LinearGaussianKernel(0.9 * eye, zero, eye),
        ...     ],
        ...     emission=rd.LinearGaussianKernel(eye, zero, 0.1 * eye),
        ... )
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> zs.shape, xs.shape, ys.shape
        ((5,), (5, 1), (5, 1))
        >>> hidden_markov = rd.switching.SwitchingModel(
        ...     model.regimes, emission=[rd.Gaussian(zero, eye), rd.Gaussian(zero + 3, eye)]
        ... )
        >>> hidden_markov.state_dim
        0

    Args:
        regimes: the law of the regimes.
        emission: g, a kernel, or a list with one kernel per regime; without a state, laws or
            kernels of lagged observations.
        prior: χ, a law, or a list with one law per regime.
        transition: m, a kernel, or a list with one kernel per regime.
        num_lags: the number of observations that emissions without a state receive.
    """

    regimes: Any
    emission: Any = eqx.field(converter=_as_parts)  # pyright: ignore
    prior: Any = eqx.field(default=None, converter=_as_parts)  # pyright: ignore
    transition: Any = eqx.field(default=None, converter=_as_parts)  # pyright: ignore
    num_lags: int = eqx.field(static=True, default=0)

    def __check_init__(self) -> None:
        if not isinstance(self.regimes, (AbstractRegimes, AbstractParameter)):
            raise TypeError(
                "SwitchingModel expects `regimes` to be a law of regimes such as"
                f" retrodict.switching.Regimes, got {type(self.regimes).__name__}."
            )
        if (self.prior is None) != (self.transition is None):
            given, missing = ("prior", "transition")[:: -1 if self.prior is None else 1]
            raise ValueError(
                f"SwitchingModel has a {given} and no {missing}: give both, or neither for a hidden"
                " Markov model."
            )
        if self.prior is not None and self.num_lags:
            raise ValueError(
                "`num_lags` is for emissions without a continuous state; add lags to the state."
            )
        check_count(self.num_lags + 1, "num_lags + 1")
        _check_parts(unwrap(self))

    @property
    def num_regimes(self) -> int:
        """The number K of regimes."""
        return unwrap(self.regimes).num_regimes

    @property
    def state_dim(self) -> int:
        """The dimension of the continuous state; 0 for a hidden Markov model."""
        prior = unwrap(self).prior
        return 0 if prior is None else shape_of_draw(of_regime(prior, 0))[0]

    @property
    def is_finite(self) -> bool:
        """Whether there is no continuous state, so that the posterior is exact."""
        return self.prior is None

    @property
    def takes_input(self) -> bool:
        """Whether regimes, transition or emission take inputs."""
        model = unwrap(self)
        kernels = (*each(model.transition), *each(model.emission))
        return model.regimes.takes_input or any(getattr(k, "takes_input", False) for k in kernels)

    @property
    def is_conditionally_linear_gaussian(self) -> bool:
        """Whether the model is linear and Gaussian once the regimes are known."""
        model = unwrap(self)
        kernels = (*each(model.transition), *each(model.emission))
        return (
            not model.is_finite
            and not model.regimes.takes_state
            and all(isinstance(law, Gaussian) for law in each(model.prior))
            and all(isinstance(kernel, AbstractLinearGaussianKernel) for kernel in kernels)
        )

    def series(
        self, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
    ) -> Series:
        """Return validated data; the arguments are those of `StateSpaceModel.series`."""
        return prepare_switching(unwrap(self), ys, mask=mask, inputs=inputs, length=length)

    def batch(self, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None) -> Series:
        """Return several validated series; the arguments are those of `series`, with a batch."""
        return prepare_switching_batch(unwrap(self), ys, mask=mask, inputs=inputs, length=length)

    def simulate(
        self, key: PRNGKey, num_times: int, *, inputs: Any = None
    ) -> tuple[Int[Array, "time"], Float[Array, "time state"], Float[Array, "time obs"]]:
        """Draw a path of regimes and states, and its observations.

        Args:
            key: a typed key.
            num_times: the number n of rows.
            inputs: inputs of shape `(time, input)`, if the model takes them.

        Returns:
            `zs` of shape `(time,)`, `xs` of shape `(time, state)` and `ys` of shape `(time, obs)`.
            Lagged observations before the first row are zero.
        """
        check_key(key, "simulate")
        num_times = check_count(num_times, "num_times")
        model = unwrap(self)
        us = prepare_inputs(inputs, num_times, model.takes_input)
        return _simulate(model, key, num_times, us)

    def log_joint(
        self,
        zs: Any,
        xs: Any,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> Scalar:
        """Return the joint log density log p(z_{0:n-1}, x_{0:n-1}, y_{0:n-1}).

        Args:
            zs: a path of regimes, integers of shape `(time,)`.
            xs: a path of states, of shape `(time, state)`; `None` without a continuous state.
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was observed.
            inputs: inputs of shape `(time, input)`, if the model takes them.
            length: the number of rows that exist; the rest contributes exactly zero.
        """
        model = unwrap(self)
        series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
        zs = prepare_regimes(zs, model.num_regimes, series.num_times)
        xs = prepare_states(xs, model.state_dim, zs, series.ys.dtype)
        return path_log_joint(model, zs, xs, series)


def require_state(model: Any, owner: str) -> None:
    """Refuse anything but a switching model with a continuous state."""
    require_switching(model, owner)
    if model.is_finite:
        raise TypeError(
            f"{owner} expects a model with a continuous state. For a hidden Markov model,"
            " forward_backward is exact."
        )


def require_finite(model: Any, owner: str) -> None:
    """Refuse anything but a switching model without a continuous state."""
    require_switching(model, owner)
    if not model.is_finite:
        raise TypeError(
            f"{owner} expects a model without a continuous state. Use gpb2_smoother or"
            " rao_blackwellised_smoother."
        )


def require_switching(model: Any, owner: str) -> None:
    """Refuse anything but a switching model."""
    if not isinstance(model, SwitchingModel):
        raise TypeError(f"{owner} expects a SwitchingModel, got {type(model).__name__}.")


def each(part: Any) -> tuple[Any, ...]:
    """Return the parts of all regimes, or the one that they share; nothing for `None`."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def of_regime(part: Any, j: int) -> Any:
    """Return the part of one regime."""
    return part[j] if isinstance(part, tuple) else part


def by_regime(model: SwitchingModel) -> list[StateSpaceModel]:
    """Return the state-space model of each regime, as if it never changed."""
    models = []
    for j in range(model.num_regimes):
        parts = {name: of_regime(getattr(model, name), j) for name in PARTS}
        try:
            models.append(StateSpaceModel(**parts))
        except ValueError as error:
            raise ValueError(f"The model of regime {j} is invalid: {error}") from error
    return models


def over_regimes(part: Any, num_regimes: int, fn: Callable[..., T], *arrays: Any) -> T:
    """Return fn(part of a regime, arrays of the regime), stacked over the regimes.

    Parts of the same structure are evaluated under one `vmap`, so that the program does not grow
    with the number of regimes.

    Args:
        part: a part that all regimes share, or one per regime.
        num_regimes: the number of regimes.
        fn: a function of a part and of the entries of the arrays.
        *arrays: pytrees of arrays with a leading axis `regime`.
    """
    if not isinstance(part, tuple):
        if arrays:
            return jax.vmap(lambda *rows: fn(part, *rows))(*arrays)
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_regimes, *jnp.shape(leaf))), fn(part)
        )
    stacked = _stacked(part)
    if stacked is not None:
        return eqx.filter_vmap(fn)(stacked, *arrays)
    rows = [jax.tree.map(lambda leaf, j=j: leaf[j], arrays) for j in range(num_regimes)]
    values = [fn(one, *row) for one, row in zip(part, rows, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)


def _stacked(parts: Sequence[Any]) -> Any:
    """Return one part whose arrays have a leading axis `regime`; `None` if structures differ."""
    arrays, rest = zip(*(eqx.partition(part, eqx.is_array) for part in parts), strict=True)
    alike = all(bool(eqx.tree_equal(other, rest[0])) for other in rest[1:]) and all(
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), other)
        == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arrays[0])
        for other in arrays[1:]
    )
    if not alike or not jax.tree.leaves(arrays[0]):
        return None
    return eqx.combine(jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays), rest[0])


def prior_log_probs(model: SwitchingModel, x: Float[Array, "state"]) -> Float[Array, "regime"]:
    """Return log χ_j(x) of every regime j."""
    return over_regimes(
        model.prior, model.num_regimes, lambda law: jnp.sum(jnp.asarray(law.log_prob(x)))
    )


def transition_log_probs(
    model: SwitchingModel,
    before: Float[Array, "state"],
    x: Float[Array, "state"],
    u: Float[Array, "input"] | None,
) -> Float[Array, "regime"]:
    """Return log m_j(x_{k-1}, x_k) of every regime j."""
    return over_regimes(
        model.transition, model.num_regimes, lambda kernel: kernel.log_prob(before, x, u)
    )


def log_transitions(model: SwitchingModel, series: Series) -> Float[Array, "step regime regime"]:
    """Return log p(z_k = j | z_{k-1} = i) of every step, for regimes that ignore the state."""
    count, steps = model.num_regimes, series.num_times - 1
    if series.inputs is None or not model.regimes.takes_input:
        return jnp.broadcast_to(model.regimes.log_transition(), (steps, count, count))
    return jax.vmap(lambda u: model.regimes.log_transition(u=u))(series.inputs[1:])


def emission_log_probs(
    model: SwitchingModel, x: Float[Array, "state"], row: Series
) -> Float[Array, "regime"]:
    """Return log g_j(x_k, y_k) of every regime j, of the observed entries of one row.

    Args:
        model: an unwrapped model.
        x: the state, or the lagged observations of a model without one.
        row: the row; its arrays have no axis `time`.
    """

    def log_prob(part: Any) -> Scalar:
        if isinstance(part, AbstractKernel):
            return part.log_prob(x, row.ys, row.inputs, row.mask)
        if isinstance(part, Gaussian) and row.mask is not None:
            return part.masked_log_prob(row.ys, row.mask.astype(row.ys.dtype))
        # A law is a kernel that ignores its state.
        return DistributionKernel(lambda _: part).log_prob(x, row.ys, None, row.mask)

    return over_regimes(model.emission, model.num_regimes, log_prob)


def emission_table(model: SwitchingModel, series: Series) -> Float[Array, "time regime"]:
    """Return log g_j(y_k) of all rows of a model without a continuous state.

    Rows that do not exist, and the first `num_lags` rows, are zero.
    """
    lags = lagged(series.ys, model.num_lags)
    table = jax.vmap(lambda x, row: emission_log_probs(model, x, row))(lags, series.rows)
    counted = jnp.arange(series.num_times) >= model.num_lags
    exists = series.exists()
    if exists is not None:
        counted &= exists
    return jnp.where(counted[:, None], table, 0.0)


def lagged(ys: Float[Array, "time obs"], num_lags: int) -> Float[Array, "time lags"]:
    """Return the last observations before each row, latest first; zero before the first row."""
    n, obs_dim = ys.shape
    padded = jnp.concatenate([jnp.zeros((num_lags, obs_dim), ys.dtype), ys])
    columns = [padded[num_lags - lag : num_lags - lag + n] for lag in range(1, num_lags + 1)]
    return jnp.concatenate(columns, axis=1) if columns else jnp.zeros((n, 0), ys.dtype)


@eqx.filter_jit
def _simulate(model: SwitchingModel, key: PRNGKey, num_times: int, us: Array | None) -> Any:
    first_key, path_key = jax.random.split(key)
    count, obs_dim = model.num_regimes, obs_dim_of(model, us)
    dtype = jnp.result_type(float) if us is None else us.dtype
    regime_key, prior_key, emission_key = jax.random.split(first_key, 3)
    z = jax.random.categorical(regime_key, model.regimes.log_initial())
    x = jnp.zeros(0, dtype)
    if not model.is_finite:
        draws = over_regimes(model.prior, count, lambda law: jnp.asarray(law.sample(prior_key)))
        x = draws[z]

    def emit(key: PRNGKey, z: Array, x: Array, lags: Array, u: Array | None) -> Array:
        def draw(part: Any) -> Array:
            if isinstance(part, AbstractKernel):
                return part.sample(key, lags if model.is_finite else x, u)
            return jnp.asarray(part.sample(key)).astype(dtype)

        return over_regimes(model.emission, count, draw)[z]

    lags = jnp.zeros(model.num_lags * obs_dim, dtype)
    y = emit(emission_key, z, x, lags, None if us is None else us[0])

    def move(state: tuple, at: tuple) -> tuple[tuple, tuple]:
        (z, x, lags), (key, u) = state, at
        regime_key, state_key, emission_key = jax.random.split(key, 3)
        log_rows = model.regimes.log_transition(x, u)
        z = jax.random.categorical(regime_key, log_rows[z])
        if not model.is_finite:
            draws = over_regimes(
                model.transition, count, lambda kernel: kernel.sample(state_key, x, u)
            )
            x = draws[z]
        y = emit(emission_key, z, x, lags, u)
        lags = jnp.concatenate([y, lags])[: lags.shape[0]]
        return (z, x, lags), (z, x, y)

    later = None if us is None else us[1:]
    start = (z, x, jnp.concatenate([y, lags])[: lags.shape[0]])
    _, rest = lax.scan(move, start, (jax.random.split(path_key, num_times - 1), later))
    return jax.tree.map(lambda head, tail: jnp.concatenate([head[None], tail]), (z, x, y), rest)


@eqx.filter_jit
def path_log_joint(
    model: SwitchingModel,
    zs: Int[Array, "time"],
    xs: Float[Array, "time state"],
    series: Series,
) -> Scalar:
    """Return log p(z, x, y) of an unwrapped model and a prepared series."""
    exists = series.exists()
    if exists is not None:
        # Padding may hold anything, NaN included; repeating x_0 keeps densities finite.
        zs, xs = jnp.where(exists, zs, zs[0]), jnp.where(exists[:, None], xs, xs[0])
    later = None if series.inputs is None else series.inputs[1:]

    def move(z: Array, before: Array, z_next: Array, x: Array, u: Array | None) -> Scalar:
        total = model.regimes.log_transition(before, u)[z, z_next]
        if not model.is_finite:
            total = total + transition_log_probs(model, before, x, u)[z_next]
        return total

    moves = jax.vmap(move)(zs[:-1], xs[:-1], zs[1:], xs[1:], later)
    if model.is_finite:
        table = emission_table(model, series)
    else:
        table = jax.vmap(lambda x, row: emission_log_probs(model, x, row))(xs, series.rows)
    emitted = jnp.take_along_axis(table, zs[:, None], axis=1)[:, 0]
    if exists is not None:
        moves, emitted = jnp.where(exists[1:], moves, 0.0), jnp.where(exists, emitted, 0.0)
    initial = model.regimes.log_initial()[zs[0]]
    if not model.is_finite:
        initial = initial + prior_log_probs(model, xs[0])[zs[0]]
    return initial + jnp.sum(moves) + jnp.sum(emitted)


def prepare_switching(
    model: SwitchingModel, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
) -> Series:
    """Validate one series against an unwrapped model."""
    options = {"mask": mask, "inputs": inputs, "length": length}
    series = prepare_series(ys, **options, takes_input=model.takes_input)
    _check_series(model, series)
    return series


def prepare_switching_batch(
    model: SwitchingModel, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
) -> Series:
    """Validate a batch of series against an unwrapped model."""
    options = {"mask": mask, "inputs": inputs, "length": length}
    batch = prepare_batch(ys, **options, takes_input=model.takes_input)
    _check_series(model, batch)
    return batch


def _check_series(model: SwitchingModel, series: Series) -> None:
    """Refuse data with the wrong number of columns, and gaps before rows that need lags."""
    obs_dim = obs_dim_of(model, series.inputs)
    if series.ys.shape[-1] != obs_dim:
        raise ValueError(
            f"ys must have {obs_dim} columns for this model, got {series.ys.shape[-1]}."
        )
    if not model.is_finite:
        for one in by_regime(model):
            check_densities(one, "A switching model", ("transition", "emission"))
    if not model.num_lags:
        return
    if series.ys.shape[-2] <= model.num_lags:
        raise ValueError(
            f"ys must have more rows than the {model.num_lags} lags of the model, got"
            f" {series.ys.shape[-2]}."
        )
    mask = None if series.mask is None else known_values(series.mask)
    if mask is None:
        return
    gaps = ~mask
    if series.length is not None and is_concrete(series.length):
        rows = np.arange(mask.shape[-2])
        gaps &= (rows < np.asarray(series.length)[..., None])[..., None]
    if gaps.any():
        raise ValueError(
            "A model of lagged observations needs every row: fill in the missing values, or use a"
            " model with a continuous state, which handles gaps."
        )


def prepare_regimes(zs: Any, num_regimes: int, num_times: int) -> Int[Array, "time"]:
    """Convert a path of regimes to an integer array; refuse other shapes, types and values."""
    array = jnp.asarray(zs)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"zs must hold integers, the regimes, got dtype {array.dtype}.")
    if array.shape != (num_times,):
        raise ValueError(f"zs must have shape (time,) = ({num_times},), got {array.shape}.")
    values = known_values(array)
    if values is not None and values.size and not 0 <= values.min() <= values.max() < num_regimes:
        raise ValueError(
            f"zs must hold regimes from 0 to {num_regimes - 1}, got {values.min()} to"
            f" {values.max()}."
        )
    return array


def prepare_states(
    xs: Any, state_dim: int, zs: Int[Array, "time"], dtype: Any
) -> Float[Array, "time state"]:
    """Convert a path of states that accompanies a path of regimes."""
    if state_dim:
        return prepare_path(xs, state_dim, zs.shape[0])
    if xs is not None and jnp.size(xs):
        raise ValueError(f"The model has no continuous state: pass xs=None, got {jnp.shape(xs)}.")
    return jnp.zeros((zs.shape[0], 0), dtype)


def obs_dim_of(model: SwitchingModel, inputs: Float[Array, "*time input"] | None) -> int:
    """Return the dimension of observations, from the emission of the first regime."""
    dtype = jnp.result_type(float)
    part = of_regime(model.emission, 0)
    if not isinstance(part, AbstractKernel):
        return shape_of_draw(part)[0]
    if isinstance(part, AbstractLinearGaussianKernel) and inputs is None:
        return part.at(None).bias.shape[0]
    if model.num_lags:
        # The lags have as many columns as the emission returns, which its noise shows.
        return scale_diagonal(unwrap(part).scale_tril).shape[0]  # pyright: ignore
    u = None if inputs is None else jax.ShapeDtypeStruct(inputs.shape[-1:], inputs.dtype)
    return shape_of_draw(part, jax.ShapeDtypeStruct((model.state_dim,), dtype), u)[0]


def _check_parts(model: SwitchingModel) -> None:
    """Refuse parts of the wrong type, number or dimension."""
    count = model.num_regimes
    for name in PARTS:
        part = getattr(model, name)
        if isinstance(part, tuple) and len(part) != count:
            raise ValueError(
                f"SwitchingModel has {count} regimes, so that a list of {name}s must have {count}"
                f" entries, got {len(part)}."
            )
        for one in each(part):
            _check_type(model, name, one)
    if model.is_finite:
        return
    by_regime(model)
    if any(not _is_value(leaf) for leaf in jax.tree.leaves(model)):
        return  # placeholders of a transformation, not arrays
    x = jax.ShapeDtypeStruct((model.state_dim,), jnp.result_type(float))
    _check_equal("priors", [shape_of_draw(law) for law in each(model.prior)])
    without_input = [kernel for kernel in each(model.emission) if not kernel.takes_input]
    _check_equal("emissions", [shape_of_draw(kernel, x) for kernel in without_input])


def _check_equal(name: str, shapes: list[tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1:
        raise ValueError(
            f"SwitchingModel expects {name} of one shape in all regimes, got {shapes}."
        )


def _check_type(model: SwitchingModel, name: str, part: Any) -> None:
    kernel_only = name == "transition" or (name == "emission" and not model.is_finite)
    if kernel_only and not isinstance(part, AbstractKernel):
        raise TypeError(
            f"SwitchingModel expects kernels as its {name}, got {type(part).__name__}. Wrap a"
            " function in NonlinearGaussianKernel or DistributionKernel."
        )
    has_law = hasattr(part, "log_prob") and hasattr(part, "sample")
    if not kernel_only and not has_law:
        raise TypeError(
            f"SwitchingModel expects laws with log_prob and sample as its {name}, got"
            f" {type(part).__name__}."
        )


def _is_value(leaf: Any) -> bool:
    return eqx.is_array(leaf) or callable(leaf) or isinstance(leaf, (int, float, bool))
