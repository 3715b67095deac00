"""The Kalman smoother: the backward chain of a linear-Gaussian model given a series."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from retrodict._arrays import Scalar, check_finite, is_concrete, known_values
from retrodict._chains import LinearGaussianChain
from retrodict._exact.gains import Prior, TransitionArrays
from retrodict._exact.kalman_filter import Filtered, kalman_filter
from retrodict._exact.whiten import Whitened, whiten
from retrodict._model import (
    AbstractLinearGaussianKernel,
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    dense_scale,
    prepare_data,
    require_model,
    scale_diagonal,
    unwrap,
)
from retrodict.distributed import Parallel, laid_out


class KalmanPosterior(eqx.Module):
    """The exact posterior of a linear-Gaussian model.

    Attributes:
        chain: the law of the whole path given the series, a backward chain.
        log_evidence: log p(y_{0:n-1}) of the observed entries.
    """

    chain: LinearGaussianChain
    log_evidence: Scalar


def kalman_smoother(
    model: StateSpaceModel,
    ys: Any,
    *,
    parallel: Parallel = False,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> KalmanPosterior:
    """Smooth a series exactly under a linear-Gaussian model.

    Covariances and gains do not depend on the observed values. They are computed first, forward in
    time on factors of the covariances, and only until they no longer change: in a model that is
    constant in time this takes few steps, and again a few after each gap. Means are an affine
    recursion. The transition noise and the prior may be singular; the emission noise must have a
    density. For many series use `kalman_smoother_batch`.

    Derivatives in every parameter are exact, by `jax.grad` or `jax.hessian`; `jax.jvp` of the
    result raises a `TypeError`. The derivative of `log_evidence` alone is computed in closed form
    by one backward pass, also for singular models. Derivatives of the chain need predicted
    covariances of full rank: a backward kernel has no derivative in a parameter that moves the
    state out of the line or plane on which it stays, and derivatives of its moments are then
    wrong. If a row has more than d + 1 entries, the log-evidence can be differentiated twice and
    the chain once; higher derivatives raise a `TypeError`.

    Smoothing uses standard coordinates z_k of the filtering laws, x_k = m_k + S_k z_k, in which
    backward gains are at most one. Singular, narrow and decaying directions of the state are
    therefore exact to rounding. `chain.log_prob` divides by their widths, so that its error is the
    rounding error divided by the width. Two limits remain. `chain.kernels`, the kernels between
    states, omit directions narrower than ε^(1/3) relative to the coordinates, about 6e-6 in float64
    and 5e-3 in float32. With `parallel=True` all results omit them: marginals have errors of about
    that width, and `chain.log_prob` and `chain.entropy` are NaN.

    Means are stored in the units of the state. If states or observations are much larger than the
    noise, such as the first states under a wide prior, their differences lose digits. With six
    states, one sensor and a ratio of 1e4, smoothed means in float32 were off by up to 0.1 posterior
    standard deviations, and with 1e5 by up to 6; their covariances were right. A wide prior alone
    does no harm. Where values are known, a ratio above 1e4 of observations to their noise causes a
    warning. Subtract a level from the data, or use float64, which has nine digits more.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=50)
        >>> exact = rd.kalman_smoother(model, ys)
        >>> exact.chain.marginals().mean.shape
        (50, 1)

    Args:
        model: a model with a `Gaussian` prior and linear-Gaussian kernels.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        parallel: whether to run in O(log n) depth, for long series on accelerators. The parallel
            form computes covariances, the sequential form their factors. Prior scale, noise levels
            and the widths of the state must then be within three orders of magnitude of each other
            in float32 and within six in float64. Outside of jit, a wider prior raises a
            `ValueError`. A `time_mesh` distributes the rows over several devices.
        mask: true where an entry was observed; a single `True` declares all entries observed.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; the other rows are padding.

    Returns:
        The chain and the log-evidence.

    Raises:
        TypeError: if the model is not linear Gaussian.
        ValueError: if shapes do not match, or the emission scale is singular.
    """
    model = unwrap(model)
    check_linear_gaussian(model, "kalman_smoother")
    series = prepare_data(model, ys, mask=mask, inputs=inputs, length=length)
    check_values(model, series, parallel, "kalman_smoother")
    return smooth_series(model, series, parallel)


MAX_RATIO = 1e4
"""The largest ratio of observations to their noise in float32 without a warning."""


@eqx.filter_jit
def smooth_series(model: StateSpaceModel, series: Series, parallel: Parallel) -> KalmanPosterior:
    """Return the posterior of an unwrapped, validated model given a validated series."""
    series = laid_out(series, parallel)
    filtered, log_evidence = _filtered(model, series, parallel)
    kernels, standard = filtered.backward_kernels()
    laws = jax.vmap(Gaussian)(filtered.mean, filtered.gains.scale)
    chain = LinearGaussianChain(laws, kernels, series.length, standard, filtered.gains.resolved)
    return KalmanPosterior(chain, log_evidence)


@eqx.filter_jit
def log_evidence_of(model: StateSpaceModel, series: Series) -> Scalar:
    """Return the log-evidence of an unwrapped, validated model given a validated series.

    Backward kernels are not computed. As dead code the compiler would remove them, but only after
    they were traced and, under differentiation, traced again with their derivatives.
    """
    return _filtered(model, series, False)[-1]


def _filtered(
    model: StateSpaceModel, series: Series, parallel: Parallel
) -> tuple[Filtered, Scalar]:
    """Return the filter's output and the log-evidence."""
    prior = Prior(model.prior.mean, dense_scale(model.prior.scale_tril))
    transition = _transition_arrays(model.transition, series)
    data, constant = _whitened_data(model.emission, series)
    filtered, log_prob = kalman_filter(prior, transition, data, series.exists(), parallel)
    return filtered, log_prob + constant


def _transition_arrays(kernel: AbstractLinearGaussianKernel, series: Series) -> TransitionArrays:
    """Return the transition parameters, with a time axis only if they depend on the input."""

    def at(u: Array | None) -> TransitionArrays:
        fixed = kernel.at(u)
        return TransitionArrays(fixed.weight, fixed.bias, dense_scale(fixed.scale_tril))

    if not kernel.takes_input:
        return at(None)
    moving = jax.vmap(at)(jnp.asarray(series.inputs)[1:])
    if isinstance(kernel, LinearGaussianKernel):
        return TransitionArrays(kernel.weight, moving.bias, dense_scale(kernel.scale_tril))
    return moving


def _whitened_data(kernel: AbstractLinearGaussianKernel, series: Series) -> tuple[Whitened, Scalar]:
    """Return the whitened observations and the constant of their log density.

    The design has a time axis only if it depends on inputs or a mask.
    """

    def one(kernel: LinearGaussianKernel, y: Array, mask: Array | None):
        return whiten(kernel.weight, kernel.scale_tril, y - kernel.bias, mask)

    if isinstance(kernel, LinearGaussianKernel) and series.mask is None:
        shift = jnp.zeros_like(series.ys)
        if kernel.input_weight is not None:
            shift = jax.vmap(lambda u: kernel.at(u).bias - kernel.bias)(series.inputs)
        residuals = series.ys - shift - kernel.bias[None]
        design, value, constant = whiten(kernel.weight, kernel.scale_tril, residuals.T, None)
        return Whitened(design, value.T), constant * series.num_times

    if kernel.takes_input:
        rows = jax.vmap(lambda u, y, m: one(kernel.at(u), y, m))
        design, value, constants = rows(series.inputs, series.ys, series.mask)
    else:
        rows = jax.vmap(lambda y, m: one(kernel.at(None), y, m))
        design, value, constants = rows(series.ys, series.mask)
    return Whitened(design, value), jnp.sum(constants)


def check_linear_gaussian(model: StateSpaceModel, owner: str) -> None:
    """Raise a `TypeError` that names the function `owner` unless the model is linear Gaussian."""
    require_model(model, owner)
    if not isinstance(model.prior, Gaussian):
        raise TypeError(f"{owner} expects a Gaussian prior, got {type(model.prior).__name__}.")
    for name in ("transition", "emission"):
        kernel = getattr(model, name)
        if not isinstance(kernel, AbstractLinearGaussianKernel):
            raise TypeError(
                f"{owner} expects a linear-Gaussian {name}, got {type(kernel).__name__}."
                " For other models use grid_smoother (state dimension 1 or 2)."
            )


def check_values(model: StateSpaceModel, series: Series, parallel: Parallel, owner: str) -> None:
    """Raise a `ValueError` for concrete values that can only give NaN, or not in parallel."""
    if parallel:
        _check_width(model)
    for name in ("prior", "transition", "emission"):
        part = getattr(model, name)
        for leaf in jax.tree.leaves(eqx.filter(part, eqx.is_inexact_array)):
            check_finite(leaf, f"The {name}'s parameters")
    kernel = model.emission
    if isinstance(kernel, LinearGaussianKernel):
        pivots = scale_diagonal(kernel.scale_tril)
    else:
        pivots = _pivots_by_row(kernel, series.inputs)
    if is_concrete(pivots) and np.any(np.asarray(pivots) <= 0):
        raise ValueError(
            f"{owner} expects an emission scale with a positive diagonal, got diagonal"
            f" {np.asarray(pivots)}. An observation without noise has no density: add a small"
            " amount of noise."
        )
    _warn_of_lost_digits(model, series, owner)


def _warn_of_lost_digits(model: StateSpaceModel, series: Series, owner: str) -> None:
    """Warn if float32 visibly rounds known observations, which are much larger than their noise.

    The errors of smoothed means are this rounding error, times a factor of up to some hundreds if
    few rows determine the state.
    """
    kernel = model.emission
    if not isinstance(kernel, LinearGaussianKernel) or kernel.takes_input:
        return
    arrays = (series.ys, kernel.bias, scale_diagonal(kernel.scale_tril))
    ys, bias, pivots = map(known_values, arrays)
    if ys is None or bias is None or pivots is None or ys.dtype != np.float32:
        return
    with np.errstate(over="ignore"):
        ratios = np.abs(ys - bias) / pivots
    if series.mask is not None:
        ratios = np.where(np.asarray(series.mask), ratios, 0.0)
    ratio = float(np.max(ratios))
    if ratio > MAX_RATIO:
        warnings.warn(
            f"{owner}: the observations are up to {ratio:.0e} times as large as their noise, and"
            " float32 rounds them: smoothed means may be off by a posterior standard deviation or"
            " more. Subtract a level from the data, or use float64:"
            ' jax.config.update("jax_enable_x64", True).',
            stacklevel=4,
        )


def _check_width(model: StateSpaceModel) -> None:
    """Raise a `ValueError` for a concrete prior that is too wide for covariances.

    In units of the observation noise, a prior of width w causes an error of about ε w² in the
    log-evidence.
    """
    kernels = (model.transition, model.emission)
    if not all(isinstance(kernel, LinearGaussianKernel) for kernel in kernels):
        return
    if not all(is_concrete(leaf) for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)):
        return
    with jax.ensure_compile_time_eval():  # the model may be a constant of a function under jit
        scale = np.asarray(dense_scale(model.prior.scale_tril))
        noise = np.asarray(dense_scale(model.emission.scale_tril))
    design = np.linalg.solve(np.tril(noise), np.asarray(model.emission.weight))
    reach = max(
        np.abs(design @ scale).max(),
        np.abs(design @ np.asarray(model.transition.weight) @ scale).max(),
    )
    eps = jnp.finfo(scale.dtype).eps
    if eps * reach**2 > 0.1:
        raise ValueError(
            f"parallel=True forms covariances, which in {scale.dtype} cannot represent a prior that"
            f" is {reach:.0e} times as wide as the observation noise. Use parallel=False, or a"
            " narrower prior."
        )


@eqx.filter_jit
def _pivots_by_row(kernel: AbstractLinearGaussianKernel, inputs: Array | None) -> Array:
    if inputs is None or not kernel.takes_input:
        return scale_diagonal(kernel.at(None).scale_tril)
    rows = inputs.reshape(-1, inputs.shape[-1])  # of one series, or of a batch
    return jax.vmap(lambda u: scale_diagonal(kernel.at(u).scale_tril))(rows)
