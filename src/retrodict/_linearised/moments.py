"""Mean and covariance of conditional laws, which is all that linearisation asks of a kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._kernels import (
    AbstractGaussianKernel,
    AbstractKernel,
    AbstractLinearGaussianKernel,
    NonlinearGaussianKernel,
)
from retrodict._laws import Gaussian, dense_scale
from retrodict._model import StateSpaceModel
from retrodict._numerics import linalg
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._validate import is_concrete


class Moments(NamedTuple):
    """The mean of a law and a lower factor of its covariance."""

    mean: Float[Array, "out"]
    scale: Float[Array, "out out"]


def law_moments(law: Any, dtype: Any) -> Moments:
    """The moments of a law: a `Gaussian`, or whatever has a mean and a covariance.

    Distributions of numpyro have `mean` and, if their entries are dependent, `covariance_matrix`;
    otherwise `variance`, which is all there is to know if entries are independent.

    Raises:
        TypeError: if the law does not say what its moments are.
    """
    if isinstance(law, Gaussian):
        law = unwrap(law)
        return Moments(law.mean.astype(dtype), dense_scale(law.scale_tril).astype(dtype))
    name = type(law).__name__
    # numpyro's to_event(1) declares independent entries one event, and keeps them underneath.
    while hasattr(law, "reinterpreted_batch_ndims"):
        law = law.base_dist
    mean = _read(law, "mean")
    if mean is None or mean.ndim != 1:
        raise TypeError(
            f"A law is linearised through its mean and covariance, and {name} does not have"
            " a mean of shape (out,). Give it the properties `mean` and `variance`, or"
            " `covariance_matrix` if its entries are dependent; or use ffbsi, or grid_smoother"
            " (state dimension 1 or 2)."
        )
    covariance, variance = _read(law, "covariance_matrix"), _read(law, "variance")
    if variance is not None and variance.shape != mean.shape:
        variance = None
    if covariance is None:
        if variance is None:
            raise TypeError(
                f"A law is linearised through its mean and covariance, and {name} has a mean but"
                " neither `covariance_matrix` nor a `variance` of the same shape. Add one of them;"
                " or use ffbsi, or grid_smoother (state dimension 1 or 2)."
            )
        if _density_shape(law, mean) != mean.shape:
            raise TypeError(
                f"A law is linearised through its mean and covariance. {name} has one density for"
                " all entries, which may depend on each other, and only a `variance` for each."
                " Give it a `covariance_matrix`."
            )
        covariance = jnp.diag(variance)
    return Moments(mean.astype(dtype), _factor(covariance, variance).astype(dtype))


def _factor(covariance: Array, variance: Array | None) -> Array:
    """A lower factor of a covariance.

    Where variances are known they prevail: what numpyro calls the covariance matrix of a Student
    law is that of its scale, to which its covariance is proportional.
    """
    factor, finite = linalg.cholesky(covariance), jnp.all(jnp.isfinite(covariance))
    if variance is not None:
        ratio = variance * linalg.safe_reciprocal(jnp.diagonal(covariance))
        factor = linalg.safe_sqrt(ratio)[:, None] * factor
        finite = finite & jnp.all(jnp.isfinite(variance))
    # A pivot that is no number passes for zero in `linalg`, and would be taken for certainty.
    return jnp.where(finite, factor, jnp.nan)


def conditional_moments(kernel: AbstractKernel, x: Array, u: Array | None) -> Moments:
    """The moments of a kernel's law given the state and, if it takes one, the input."""
    return law_moments(kernel.law(x, u), x.dtype)


def has_constant_scale(kernel: AbstractKernel) -> bool:
    """Whether the covariance of a kernel's law is known not to depend on the state."""
    return isinstance(kernel, (AbstractLinearGaussianKernel, NonlinearGaussianKernel))


def check_moments(model: StateSpaceModel, series: Series) -> None:
    """Refuses a prior or kernel without finite moments, before anything is compiled.

    Values are looked at where the prior has its mean, if they are known.
    """
    dtype, prior = series.ys.dtype, None
    u = None if series.inputs is None else series.inputs[0]
    for name in ("prior", "transition", "emission"):
        part = getattr(model, name)
        if isinstance(part, (Gaussian, AbstractGaussianKernel)):
            continue
        try:
            prior = law_moments(model.prior, dtype) if prior is None else prior
            found = prior if name == "prior" else conditional_moments(part, prior.mean, u)
        except TypeError as error:
            raise TypeError(f"The model's {name} cannot be linearised. {error}") from error
        if any(is_concrete(leaf) and not np.all(np.isfinite(leaf)) for leaf in found):
            raise ValueError(
                f"The model's {name} cannot be linearised: at the mean of the prior its own mean or"
                " covariance is not finite, as for a Cauchy law, or a Student law with two degrees"
                " of freedom or fewer. Use ffbsi, or grid_smoother (state dimension 1 or 2)."
            )


def seen_entries(model: StateSpaceModel, series: Series) -> Array | None:
    """What of each row enters the update: all or nothing if entries share one density."""
    if series.mask is None or isinstance(model.emission, AbstractGaussianKernel):
        return series.mask
    dtype = series.ys.dtype
    x = jax.ShapeDtypeStruct((model.state_dim,), dtype)
    y = jax.ShapeDtypeStruct(series.ys.shape[1:], dtype)
    u = None if series.inputs is None else jax.ShapeDtypeStruct(series.inputs.shape[1:], dtype)

    def density(x: Array, y: Array, u: Array | None) -> Array:
        law: Any = model.emission.law(x, u)
        return jnp.asarray(law.log_prob(y))

    if jax.eval_shape(density, x, y, u).shape == y.shape:
        return series.mask
    return jnp.broadcast_to(jnp.all(series.mask, axis=1, keepdims=True), series.mask.shape)


def _read(law: Any, name: str) -> Array | None:
    """A property of a law, `None` if it has none: numpyro raises where a moment is not written."""
    try:
        value = getattr(law, name)
    except (AttributeError, NotImplementedError):
        return None
    return jnp.asarray(value)


def _density_shape(law: Any, value: Array) -> tuple[int, ...]:
    return jax.eval_shape(lambda v: jnp.asarray(law.log_prob(v)), value).shape
