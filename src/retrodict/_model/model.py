"""State-space models: a prior, a transition and an emission."""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import (
    PRNGKey,
    Scalar,
    as_real_array,
    check_count,
    check_key,
    check_rows,
    is_concrete,
    known_values,
)
from retrodict._model.gaussian import Diagonal, Gaussian, scale_diagonal
from retrodict._model.gaussian_kernel import (
    AbstractLinearGaussianKernel,
    LinearGaussianKernel,
    NonlinearGaussianKernel,
    VaryingLinearGaussianKernel,
)
from retrodict._model.kernel import AbstractKernel, Distribution
from retrodict._model.parameters import (
    AbstractParameter,
    AbstractWhole,
    Positive,
    PositiveTril,
    check_lower,
    unwrap,
)
from retrodict._model.series import (
    Series,
    check_columns,
    prepare_batch,
    prepare_inputs,
    prepare_row,
    prepare_series,
)
from retrodict.distributed import is_multi_process, to_hosts

M = TypeVar("M", bound="AbstractModel")


class AbstractModel(AbstractWhole):
    """A joint law of hidden variables and of series, from which `fit` learns.

    It has fields `prior`, `transition` and `emission`.
    """

    @property
    @abstractmethod
    def state_dim(self) -> int:
        """The dimension of the state."""

    @property
    @abstractmethod
    def takes_input(self) -> bool:
        """Whether a part of the model takes inputs."""

    @abstractmethod
    def series(
        self, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
    ) -> Series:
        """Return one series, checked against the model."""

    @abstractmethod
    def batch(self, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None) -> Series:
        """Return several series, checked against the model, with a leading axis `batch`."""

    def learnable(self: M) -> M:
        """Return the model with its Gaussian scales as parameters that stay positive in training.

        Existing parameters, `Frozen` ones included, are left unchanged.
        """
        parts = {}
        for name in ("prior", "transition", "emission"):
            part = getattr(self, name)
            several = isinstance(part, tuple)
            parts[name] = tuple(map(_learnable_part, part)) if several else _learnable_part(part)
        return dataclasses.replace(self, **parts)


class StateSpaceModel(AbstractModel):
    """The joint law χ(x_0) g(x_0, y_0) ∏_{k≥1} m(x_{k-1}, x_k) g(x_k, y_k).

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.1 * jnp.ones(1))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> xs.shape, ys.shape
        ((5, 1), (5, 1))

    Args:
        prior: χ, the law of x_0 before y_0 is observed; a `Gaussian`, or any object with `log_prob`
            and `sample` over vectors of shape `(state,)`.
        transition: m, a kernel from states to states.
        emission: g, a kernel from states to observations.
    """

    prior: Any  # pyright: ignore
    transition: Any  # pyright: ignore
    emission: Any  # pyright: ignore

    def __check_init__(self) -> None:
        for name in ("transition", "emission"):
            kernel = getattr(self, name)
            if not isinstance(kernel, (AbstractKernel, AbstractParameter)):
                raise TypeError(
                    f"StateSpaceModel expects a kernel as its {name}, got {type(kernel).__name__}."
                    " Wrap a function in NonlinearGaussianKernel or DistributionKernel."
                )
        if not isinstance(self.prior, (Distribution, AbstractParameter)):
            raise TypeError(
                "StateSpaceModel expects a prior with log_prob and sample, such as Gaussian, got"
                f" {type(self.prior).__name__}."
            )
        _check_dimensions(unwrap(self))

    @property
    def state_dim(self) -> int:
        """The dimension of the state."""
        return shape_of_draw(unwrap(self).prior)[0]

    @property
    def takes_input(self) -> bool:
        """Whether the transition or the emission takes inputs."""
        model = unwrap(self)
        return model.transition.takes_input or model.emission.takes_input

    @property
    def is_linear_gaussian(self) -> bool:
        """Whether prior and kernels are linear and Gaussian, so that the posterior is too."""
        return is_linear_gaussian(unwrap(self))

    def series(
        self, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
    ) -> Series:
        """Return validated data: the `data` of `LogJoint`, `Score` and your own functionals.

        Args:
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was observed.
            inputs: inputs of shape `(time, input)`, if a kernel takes them.
            length: the number of rows that exist.

        Raises:
            ValueError: if shapes do not fit the model, or values are infinite.
            TypeError: if an array has the wrong type.
        """
        return prepare_data(unwrap(self), ys, mask=mask, inputs=inputs, length=length)

    def batch(self, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None) -> Series:
        """Return several validated series; the arguments are those of `series`, with a batch."""
        return prepare_data_batch(unwrap(self), ys, mask=mask, inputs=inputs, length=length)

    def simulate(
        self, key: PRNGKey, num_times: int, *, inputs: Any = None
    ) -> tuple[Float[Array, "time state"], Float[Array, "time obs"]]:
        """Draw a path of states and its observations.

        Args:
            key: a typed key.
            num_times: the number n of rows.
            inputs: inputs of shape `(time, input)`, if a kernel takes them.

        Returns:
            `xs` of shape `(time, state)` and `ys` of shape `(time, obs)`.
        """
        check_key(key, "simulate")
        num_times = check_count(num_times, "num_times")
        model = unwrap(self)
        us = prepare_inputs(inputs, num_times, model.takes_input)
        return _simulate(model, key, num_times, us)

    def log_joint(
        self,
        xs: Any,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> Scalar:
        """Return the joint log density log p(x_{0:n-1}, y_{0:n-1}) of the observed entries of y.

        Args:
            xs: a path, of shape `(time, state)`.
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was observed.
            inputs: inputs of shape `(time, input)`, if a kernel takes them.
            length: the number of rows that exist; the rest contributes exactly zero.
        """
        model = unwrap(self)
        series = prepare_data(model, ys, mask=mask, inputs=inputs, length=length)
        xs = prepare_path(xs, model.state_dim, series.num_times)
        return _log_joint(model, xs, series)


@eqx.filter_jit
def _simulate(
    model: StateSpaceModel, key: PRNGKey, num_times: int, us: Float[Array, "time input"] | None
) -> tuple[Float[Array, "time state"], Float[Array, "time obs"]]:
    prior_key, path_key, emission_key = jax.random.split(key, 3)
    x_0 = jnp.asarray(model.prior.sample(prior_key))

    def move(x: Array, step: tuple[Array, Array | None]) -> tuple[Array, Array]:
        step_key, u = step
        x = model.transition.sample(step_key, x, u)
        return x, x

    later = None if us is None else us[1:]
    _, xs = jax.lax.scan(move, x_0, (jax.random.split(path_key, num_times - 1), later))
    xs = jnp.concatenate([x_0[None], xs])
    keys = jax.random.split(emission_key, num_times)
    ys = jax.vmap(model.emission.sample)(keys, xs, us)
    return xs, ys


@eqx.filter_jit
def _log_joint(model: StateSpaceModel, xs: Float[Array, "time state"], series: Series) -> Scalar:
    exists = series.exists()
    if exists is not None:
        # Padding may hold anything, NaN included; repeating x_0 keeps densities finite.
        xs = jnp.where(exists[:, None], xs, xs[0])
    emission = jax.vmap(model.emission.log_prob)(xs, series.ys, series.inputs, series.mask)
    later = None if series.inputs is None else series.inputs[1:]
    transition = jax.vmap(model.transition.log_prob)(xs[:-1], xs[1:], later)
    if exists is not None:
        emission = jnp.where(exists, emission, 0.0)
        transition = jnp.where(exists[1:], transition, 0.0)
    initial = jnp.sum(jnp.asarray(model.prior.log_prob(xs[0])))
    return initial + jnp.sum(emission) + jnp.sum(transition)


def prepare_data(
    model: StateSpaceModel, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
) -> Series:
    """Validate one series against an unwrapped model."""
    expected = _expected_inputs(model)
    series = prepare_series(ys, mask=mask, inputs=inputs, length=length, **expected)
    check_columns(series.ys, "ys", _obs_dim(model, series.inputs))
    _check_scales(model, series.inputs, series.length)
    return series


def prepare_data_batch(
    model: StateSpaceModel, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
) -> Series:
    """Validate a batch of series against an unwrapped model."""
    expected = _expected_inputs(model)
    batch = prepare_batch(ys, mask=mask, inputs=inputs, length=length, **expected)
    check_columns(batch.ys, "ys", _obs_dim(model, batch.inputs))
    first = None, None
    if batch.inputs is not None:
        first = jax.tree.map(lambda leaf: leaf[0], (batch.inputs, batch.length))
    _check_scales(model, *(to_hosts(first) if is_multi_process(first) else first))
    return batch


def prepare_data_row(model: StateSpaceModel, y: Any, *, mask: Any, inputs: Any) -> Series:
    """Validate one row of a stream against an unwrapped model."""
    row = prepare_row(y, mask=mask, inputs=inputs, **_expected_inputs(model))
    check_columns(row.ys, "y", _obs_dim(model, row.inputs))
    return row


def _expected_inputs(model: StateSpaceModel) -> dict[str, Any]:
    """Return whether the model takes inputs, and how many if a linear kernel shows it."""
    require_model(model, "This function")
    kernels = (model.transition, model.emission)
    linear = [k for k in kernels if isinstance(k, LinearGaussianKernel) and k.takes_input]
    input_dim = linear[0].input_weight.shape[1] if linear else None
    return {"takes_input": model.takes_input, "input_dim": input_dim}


def _obs_dim(model: StateSpaceModel, inputs: Float[Array, "*time input"] | None) -> int:
    """Return the dimension of observations, from the shapes of the kernels at one input."""
    x = jax.ShapeDtypeStruct(shape_of_draw(model.prior), jnp.result_type(float))
    u = None if inputs is None else jax.ShapeDtypeStruct(inputs.shape[-1:], inputs.dtype)
    shape_of_draw(model.transition, x, u)
    return shape_of_draw(model.emission, x, u)[0]


def _check_scales(
    model: StateSpaceModel, inputs: Float[Array, "time input"] | None, length: Any
) -> None:
    """Refuse known scales that are not lower triangular.

    Constructors check them too, but `equinox.tree_at` does not call these. Kernels whose parameters
    depend on the input are evaluated at one row of known values: compiled programs evaluate them at
    traced inputs, where a covariance in place of a scale cannot be refused.
    """
    for part in (model.prior, model.transition, model.emission):
        scale = getattr(part, "scale_tril", None)
        if isinstance(part, (Gaussian, NonlinearGaussianKernel)) and eqx.is_array(scale):
            check_lower("scale_tril", scale)
    if inputs is None or not is_concrete(inputs):
        return
    length = inputs.shape[0] if length is None else length
    rows = int(length) if is_concrete(length) else 1
    if isinstance(model.emission, VaryingLinearGaussianKernel):
        model.emission.at(inputs[0])
    if isinstance(model.transition, VaryingLinearGaussianKernel) and rows > 1:
        model.transition.at(inputs[1])


def check_densities(
    model: StateSpaceModel,
    owner: str,
    parts: Sequence[str] = ("prior", "transition", "emission"),
) -> None:
    """Refuse Gaussian parts of an unwrapped model whose known scale is singular."""
    for name in parts:
        part = getattr(model, name)
        if not isinstance(part, (Gaussian, LinearGaussianKernel, NonlinearGaussianKernel)):
            continue
        pivots = known_values(scale_diagonal(part.scale_tril))
        if pivots is not None and np.any(pivots == 0):
            article = "an" if name == "emission" else "a"
            raise ValueError(
                f"{owner} expects {article} {name} with a density, got a singular scale with"
                f" diagonal {pivots}. Give every coordinate some noise, if small; of a"
                " singular prior or transition, kalman_smoother gives the exact posterior."
            )


def require_model(model: Any, owner: str) -> None:
    """Refuse anything but a state-space model."""
    if not isinstance(model, StateSpaceModel):
        with_regimes = " Verbs for models with regimes are in retrodict.switching."
        hint = with_regimes if isinstance(model, AbstractModel) else ""
        raise TypeError(f"{owner} expects a StateSpaceModel, got {type(model).__name__}.{hint}")


def is_linear_gaussian(model: StateSpaceModel) -> bool:
    """Return whether an unwrapped model has a Gaussian prior and linear-Gaussian kernels."""
    kernels = (model.transition, model.emission)
    return isinstance(model.prior, Gaussian) and all(
        isinstance(kernel, AbstractLinearGaussianKernel) for kernel in kernels
    )


def _learnable_part(part: Any) -> Any:
    """Return a law or a kernel with its Gaussian scale as a parameter that stays positive."""
    if not isinstance(part, (Gaussian, LinearGaussianKernel, NonlinearGaussianKernel)):
        return part
    return eqx.tree_at(
        lambda p: p.scale_tril,
        part,
        _learnable_scale(part.scale_tril),
        is_leaf=lambda leaf: leaf is part.scale_tril,
    )


def _learnable_scale(scale: Any) -> Any:
    array = scale.std if isinstance(scale, Diagonal) else scale
    if isinstance(array, AbstractParameter):
        return scale
    pivots = known_values(scale_diagonal(scale))
    if pivots is not None and np.any(pivots == 0):
        # A singular scale stays unconstrained. The derivative in a column of zeros is zero, so that
        # its rank cannot grow.
        return scale
    if isinstance(scale, Diagonal):
        return Diagonal(Positive(jnp.abs(array)))
    return PositiveTril(scale)


def prepare_path(xs: Any, state_dim: int, num_times: int) -> Float[Array, "time state"]:
    """Convert a path of states to an array; refuse one without one row per time step."""
    array = as_real_array(xs, "xs")
    check_rows(array, "xs", "state", "jax.vmap(chain.log_prob)(xs)")
    if array.shape != (num_times, state_dim):
        raise ValueError(
            f"xs must have shape (time, state) = ({num_times}, {state_dim}), got {array.shape}."
        )
    return array


def shape_of_draw(part: Any, *arguments: Any) -> tuple[int, ...]:
    """Return the shape of a draw from a law, or from a kernel given a state and an input."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(part.sample, key, *arguments).shape


def _check_dimensions(model: StateSpaceModel) -> None:
    """Refuse kernels that do not fit the prior, except those that take inputs of unknown shape."""
    if any(
        not eqx.is_array(leaf) and not callable(leaf) and not isinstance(leaf, (int, float, bool))
        for leaf in jax.tree.leaves(model)
    ):
        return  # placeholders of a transformation, not arrays
    shape = shape_of_draw(model.prior)
    if len(shape) != 1:
        raise ValueError(
            f"StateSpaceModel expects a prior over vectors of shape (state,), got shape {shape}."
        )
    prior = f"StateSpaceModel has a prior over {shape[0]} coordinates"
    x = jax.ShapeDtypeStruct(shape, jnp.result_type(float))
    for name in ("transition", "emission"):
        kernel = getattr(model, name)
        if kernel.takes_input:
            continue
        try:
            out = shape_of_draw(kernel, x)
        except TypeError as error:
            raise ValueError(f"{prior}, which its {name} does not accept: {error}") from error
        if name == "transition" and out != shape:
            raise ValueError(
                f"{prior}, so that its transition must return shape {shape}, got {out}."
            )
        if name == "emission" and len(out) != 1:
            raise ValueError(
                "StateSpaceModel expects an emission over vectors of shape (obs,), got shape"
                f" {out}. Return a vector even for a single observation."
            )
