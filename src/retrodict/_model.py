"""State-space models: a prior, a transition and an emission."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._kernels import (
    AbstractKernel,
    AbstractLinearGaussianKernel,
    Distribution,
    LinearGaussianKernel,
    NonlinearGaussianKernel,
    VaryingLinearGaussianKernel,
)
from retrodict._laws import Diagonal, Gaussian, scale_diagonal
from retrodict._parameters import AbstractParameter, AbstractWhole, Positive, PositiveTril, unwrap
from retrodict._series import Series, prepare_inputs, prepare_series
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import as_real_array, check_count, check_key, check_rows, is_concrete


class StateSpaceModel(AbstractWhole):
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
        prior: χ, the law of x_0 before y_0 is seen; a `Gaussian`, or anything with `log_prob` and
            `sample` over vectors of shape `(state,)`.
        transition: m, a kernel from states to states.
        emission: g, a kernel from states to observations.
    """

    prior: Any
    transition: Any
    emission: Any

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
        return _state_shape(unwrap(self))[0]

    @property
    def takes_input(self) -> bool:
        """Whether the transition or the emission reads inputs."""
        model = unwrap(self)
        return model.transition.takes_input or model.emission.takes_input

    @property
    def is_linear_gaussian(self) -> bool:
        """Whether prior and kernels are linear and Gaussian, so that the posterior is known."""
        return is_linear_gaussian(unwrap(self))

    def simulate(
        self, key: PRNGKey, num_times: int, *, inputs: Any = None
    ) -> tuple[Float[Array, "time state"], Float[Array, "time obs"]]:
        """Draws a path of states and its observations.

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
        """The joint density log p(x_{0:n-1}, y_{0:n-1}), of the entries of y that were seen.

        Args:
            xs: a path, of shape `(time, state)`.
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was seen.
            inputs: inputs of shape `(time, input)`, if a kernel takes them.
            length: how many rows exist; the rest contributes exactly zero.
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
        x = _read(model.transition, "sample", step_key, x, u=u)
        return x, x

    later = None if us is None else us[1:]
    _, xs = jax.lax.scan(move, x_0, (jax.random.split(path_key, num_times - 1), later))
    xs = jnp.concatenate([x_0[None], xs])
    keys = jax.random.split(emission_key, num_times)
    ys = jax.vmap(lambda k, x, u: _read(model.emission, "sample", k, x, u=u))(keys, xs, us)
    return xs, ys


@eqx.filter_jit
def _log_joint(model: StateSpaceModel, xs: Float[Array, "time state"], series: Series) -> Scalar:
    exists = series.exists()
    if exists is not None:
        # Padding may hold anything, NaN included; repeating x_0 keeps densities finite.
        xs = jnp.where(exists[:, None], xs, xs[0])
    emission = jax.vmap(lambda x, y, u, m: _read(model.emission, "log_prob", x, y, u=u, mask=m))(
        xs, series.ys, series.inputs, series.mask
    )
    later = None if series.inputs is None else series.inputs[1:]
    transition = jax.vmap(
        lambda before, after, u: _read(model.transition, "log_prob", before, after, u=u)
    )(xs[:-1], xs[1:], later)
    if exists is not None:
        emission = jnp.where(exists, emission, 0.0)
        transition = jnp.where(exists[1:], transition, 0.0)
    initial = jnp.sum(jnp.asarray(model.prior.log_prob(xs[0])))
    return initial + jnp.sum(emission) + jnp.sum(transition)


def prepare_data(
    model: StateSpaceModel, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None
) -> Series:
    """Checks one series against an unwrapped model: its inputs, and the width of its rows."""
    series = prepare_series(
        ys, mask=mask, inputs=inputs, length=length, takes_input=model.takes_input
    )
    dtype = series.ys.dtype
    x = jax.ShapeDtypeStruct(_state_shape(model), dtype)
    u = None if series.inputs is None else jax.ShapeDtypeStruct(series.inputs.shape[1:], dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    jax.eval_shape(lambda k, x, u: _read(model.transition, "sample", k, x, u=u), key, x, u)
    width = jax.eval_shape(lambda k, x, u: _read(model.emission, "sample", k, x, u=u), key, x, u)
    _check_parameters_of_inputs(model, series)
    if width.shape != series.ys.shape[1:]:
        raise ValueError(
            f"The model's emission has shape {width.shape}, so that ys must have"
            f" {width.shape[0]} columns, got {series.ys.shape[1]}."
        )
    return series


def _check_parameters_of_inputs(model: StateSpaceModel, series: Series) -> None:
    """Evaluate kernels that follow the input at one row, where their constructors see values.

    Compiled programs evaluate them at traced inputs, where a covariance that was returned for a
    scale cannot be refused.
    """
    if series.inputs is None or not is_concrete(series.inputs):
        return
    length = series.num_times if series.length is None else series.length
    rows = int(length) if is_concrete(length) else 1
    if isinstance(model.emission, VaryingLinearGaussianKernel):
        model.emission.at(series.inputs[0])
    if isinstance(model.transition, VaryingLinearGaussianKernel) and rows > 1:
        model.transition.at(series.inputs[1])


def check_densities(
    model: StateSpaceModel,
    owner: str,
    parts: Sequence[str] = ("prior", "transition", "emission"),
) -> None:
    """Refuses Gaussian parts of an unwrapped model whose scale is singular, where it is known."""
    for name in parts:
        part = getattr(model, name)
        if not isinstance(part, (Gaussian, LinearGaussianKernel, NonlinearGaussianKernel)):
            continue
        pivots = scale_diagonal(part.scale_tril)
        if is_concrete(pivots) and np.any(np.asarray(pivots) == 0):
            raise ValueError(
                f"{owner} expects a {name} with a density, got a singular scale with diagonal"
                f" {np.asarray(pivots)}. Give every coordinate some noise, if small; for exact"
                " smoothing with singular noise use kalman_smoother."
            )


def is_linear_gaussian(model: StateSpaceModel) -> bool:
    """Whether an unwrapped model has a Gaussian prior and linear-Gaussian kernels."""
    kernels = (model.transition, model.emission)
    return isinstance(model.prior, Gaussian) and all(
        isinstance(kernel, AbstractLinearGaussianKernel) for kernel in kernels
    )


def learnable(model: StateSpaceModel) -> StateSpaceModel:
    """The model with its Gaussian scales as parameters that stay positive while they are learned.

    What is a parameter already, `Frozen` ones included, is left as it is.
    """
    parts = (model.prior, model.transition, model.emission)
    return StateSpaceModel(*(_learnable_part(part) for part in parts))


def _learnable_part(part: Any) -> Any:
    if not isinstance(part, (Gaussian, LinearGaussianKernel, NonlinearGaussianKernel)):
        return part
    return eqx.tree_at(
        lambda p: p.scale_tril,
        part,
        _learnable_scale(part.scale_tril),
        is_leaf=lambda leaf: leaf is part.scale_tril,
    )


def _learnable_scale(scale: Any) -> Any:
    held = scale.std if isinstance(scale, Diagonal) else scale
    if isinstance(held, AbstractParameter):
        return scale
    pivots = scale_diagonal(scale)
    if is_concrete(pivots) and np.any(np.asarray(pivots) == 0):
        # A singular scale is learned as it is. The derivative in a column of zeros is zero, so that
        # its rank cannot grow.
        return scale
    if isinstance(scale, Diagonal):
        return Diagonal(Positive(jnp.abs(held)))
    return PositiveTril(scale)


def prepare_path(xs: Any, state_dim: int, num_times: int) -> Float[Array, "time state"]:
    """A path of states as an array, refused unless it has one row a time step."""
    array = as_real_array(xs, "xs")
    check_rows(array, "xs", "state", "jax.vmap(chain.log_prob)(xs)")
    if array.shape != (num_times, state_dim):
        raise ValueError(
            f"xs must have shape (time, state) = ({num_times}, {state_dim}), got {array.shape}."
        )
    return array


def _read(kernel: AbstractKernel, method: str, *args: Any, u: Array | None, **kwargs: Any) -> Array:
    """Calls a kernel with the input only if it takes one."""
    return getattr(kernel, method)(*args, u=u if kernel.takes_input else None, **kwargs)


def _state_shape(model: StateSpaceModel) -> tuple[int, ...]:
    return jax.eval_shape(model.prior.sample, jax.eval_shape(lambda: jax.random.key(0))).shape


def _check_dimensions(model: StateSpaceModel) -> None:
    """Refuses kernels that do not fit the prior; those that take inputs are not known yet."""
    if any(
        not eqx.is_array(leaf) and not callable(leaf) and not isinstance(leaf, (int, float, bool))
        for leaf in jax.tree.leaves(model)
    ):
        return  # placeholders of a transformation, not arrays
    shape = _state_shape(model)
    if len(shape) != 1:
        raise ValueError(
            f"StateSpaceModel expects a prior over vectors of shape (state,), got shape {shape}."
        )
    x = jax.ShapeDtypeStruct(shape, jnp.result_type(float))
    key = jax.eval_shape(lambda: jax.random.key(0))
    for name, kernel in (("transition", model.transition), ("emission", model.emission)):
        if kernel.takes_input:
            continue
        try:
            drawn = jax.eval_shape(kernel.sample, key, x).shape
        except TypeError as error:
            raise ValueError(
                f"StateSpaceModel has a prior over {shape[0]} coordinates, which its {name} does"
                f" not accept: {error}"
            ) from error
        if name == "transition" and drawn != shape:
            raise ValueError(
                f"StateSpaceModel has a prior over {shape[0]} coordinates, so that its transition"
                f" must return shape {shape}, got {drawn}."
            )
        if name == "emission" and len(drawn) != 1:
            raise ValueError(
                "StateSpaceModel expects an emission over vectors of shape (obs,), got shape"
                f" {drawn}. Return a vector even for a single observation."
            )
