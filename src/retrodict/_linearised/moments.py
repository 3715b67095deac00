"""Means and covariances of conditional laws, the only inputs that linearisation needs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from retrodict._arrays import is_concrete
from retrodict._model import (
    AbstractGaussianKernel,
    AbstractKernel,
    AbstractLinearGaussianKernel,
    Gaussian,
    NonlinearGaussianKernel,
    Series,
    StateSpaceModel,
    dense_scale,
    unwrap,
)
from retrodict._numerics import GaussianLaw, linalg

OTHER_SMOOTHERS = "ffbsi, or grid_smoother (state dimension 1 or 2)"
"""The smoothers that do not linearise, for messages."""


def law_moments(law: Any, dtype: Any) -> GaussianLaw:
    """Return the moments of a `Gaussian`, or of any law with a mean and a covariance.

    A numpyro distribution has `mean` and, if its entries are dependent, `covariance_matrix`;
    otherwise it has `variance`, which determines the covariance of independent entries.

    Raises:
        TypeError: if the law does not define its mean or its covariance.
    """
    if isinstance(law, Gaussian):
        law = unwrap(law)
        return GaussianLaw(law.mean.astype(dtype), dense_scale(law.scale_tril).astype(dtype))
    name = type(law).__name__
    # numpyro's to_event(1) wraps independent entries as one event; unwrap the base distribution.
    while hasattr(law, "reinterpreted_batch_ndims"):
        law = law.base_dist
    mean = _read(law, "mean")
    needs = "Linearisation needs the mean and covariance of a law"
    if mean is None or mean.ndim != 1:
        raise TypeError(
            f"{needs}, and {name} does not have a mean of shape (out,). Define the properties"
            " `mean` and `variance`, or `covariance_matrix` if the entries are dependent; or use"
            f" {OTHER_SMOOTHERS}."
        )
    covariance, variance = _read(law, "covariance_matrix"), _read(law, "variance")
    if variance is not None and variance.shape != mean.shape:
        variance = None
    if covariance is None:
        if variance is None:
            raise TypeError(
                f"{needs}, and {name} has a mean but neither `covariance_matrix` nor a `variance`"
                f" of the same shape. Add one of them; or use {OTHER_SMOOTHERS}."
            )
        if _density_shape(lambda: law, mean) != mean.shape:
            raise TypeError(
                f"{needs}. {name} has one density for all entries, so they may be dependent, but it"
                " only has a `variance` per entry. Define a `covariance_matrix`."
            )
        covariance = jnp.diag(variance)
    return GaussianLaw(mean.astype(dtype), _factor(covariance, variance).astype(dtype))


def _factor(covariance: Array, variance: Array | None) -> Array:
    """Return a lower factor of a covariance, rescaled to the variances if there are any.

    The `covariance_matrix` of numpyro's Student law is the square of its scale, which is only
    proportional to the covariance.
    """
    factor, finite = linalg.cholesky(covariance), jnp.all(jnp.isfinite(covariance))
    if variance is not None:
        ratio = variance * linalg.safe_reciprocal(jnp.diagonal(covariance))
        factor = linalg.safe_sqrt(ratio)[:, None] * factor
        finite = finite & jnp.all(jnp.isfinite(variance))
    # `linalg` treats a NaN pivot as zero, which would mean a variance of zero.
    return jnp.where(finite, factor, jnp.nan)


def conditional_moments(kernel: AbstractKernel, x: Array, u: Array | None) -> GaussianLaw:
    """Return the moments of a kernel's law given the state and, if it takes one, the input."""
    return law_moments(kernel.law(x, u), x.dtype)


def has_constant_scale(kernel: AbstractKernel) -> bool:
    """Return whether the covariance of a kernel's law is known to be independent of the state."""
    return isinstance(kernel, (AbstractLinearGaussianKernel, NonlinearGaussianKernel))


def check_moments(model: StateSpaceModel, series: Series) -> None:
    """Check that the prior and kernels have finite moments, before anything is compiled.

    Concrete values are checked at the mean of the prior.

    Raises:
        TypeError: if the prior or a kernel does not define its mean or its covariance.
        ValueError: if a moment is not finite.
    """
    dtype, prior = series.ys.dtype, None
    u = None if series.inputs is None else series.inputs[0]
    for name in ("prior", "transition", "emission"):
        part = getattr(model, name)
        if isinstance(part, (Gaussian, AbstractGaussianKernel)):
            continue
        try:
            prior = law_moments(model.prior, dtype) if prior is None else prior
            moments = prior if name == "prior" else conditional_moments(part, prior.mean, u)
        except TypeError as error:
            raise TypeError(f"The model's {name} cannot be linearised. {error}") from error
        if any(is_concrete(leaf) and not np.all(np.isfinite(leaf)) for leaf in moments):
            raise ValueError(
                f"The model's {name} cannot be linearised: its mean or covariance, evaluated at the"
                " mean of the prior, is not finite, as for a Cauchy law or a Student law with at"
                f" most two degrees of freedom. Use {OTHER_SMOOTHERS}."
            )


def mask_rows(model: StateSpaceModel, series: Series) -> Series:
    """Mask incomplete rows as a whole if the entries of a row share one density."""
    if series.mask is None or isinstance(model.emission, AbstractGaussianKernel):
        return series
    x, y = jnp.zeros(model.state_dim, series.ys.dtype), series.ys[0]
    u = None if series.inputs is None else series.inputs[0]
    if _density_shape(lambda: model.emission.law(x, u), y) == y.shape:
        return series
    complete = jnp.all(series.mask, axis=1, keepdims=True)
    mask = jnp.broadcast_to(complete, series.mask.shape)
    return Series(series.ys, mask, series.inputs, series.length)


def _read(law: Any, name: str) -> Array | None:
    """Return a property of a law; `None` if absent or, as numpyro may do, not implemented."""
    try:
        value = getattr(law, name)
    except (AttributeError, NotImplementedError):
        return None
    return jnp.asarray(value)


def _density_shape(law: Callable[[], Any], value: Array) -> tuple[int, ...]:
    """Return the shape of the log density of a value, without evaluating the law."""
    return jax.eval_shape(lambda v: jnp.asarray(law().log_prob(v)), value).shape
