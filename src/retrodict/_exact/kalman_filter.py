"""The Kalman filter on plain arrays: means and log density, given the gains, and their derivative.

`gains.py` computes what does not depend on the data. Given the gains, the filtering means are an
affine recursion, and everything else is one product per row.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._arrays import Scalar, where_rows
from retrodict._exact.gains import Gains, Prior, TransitionArrays, sequential_gains
from retrodict._exact.parallel_gains import over_time, parallel_gains
from retrodict._exact.whiten import Reduced, Whitened, row_basis
from retrodict._model import LinearGaussianKernel
from retrodict._numerics import (
    Reversal,
    StandardKernel,
    affine_scan,
    affine_suffix_scan,
    curvatures_agree,
    linalg,
    settling_scan,
)
from retrodict.distributed import Parallel, appended, prepended


class Filtered(NamedTuple):
    """The output of a filter.

    Attributes:
        gains: the scales and gains.
        mean: the filtering means m_k.
        predicted: the predicted means a_k.
        innovation: r_k = v_k − H_k a_k, of the reduced rows.
        slope: see `Reduced`.
    """

    gains: Gains
    mean: Float[Array, "time state"]
    predicted: Float[Array, "time state"]
    innovation: Float[Array, "time whitened"]
    slope: Float[Array, "time state"] | None

    def backward_kernels(self) -> tuple[LinearGaussianKernel, StandardKernel]:
        """Return the backward kernels between states and between their standard coordinates."""
        kernels, standard = backward_kernels(
            self.gains.reversal, self.mean, self.predicted, self.innovation
        )
        if self.slope is None:
            return kernels, standard
        # The part of a row out of the span of its design moves e by M Mᵀ Bᵀ c, with B M = S.
        apply, transpose = jax.vmap(linalg.matvec), partial(jnp.swapaxes, axis1=-1, axis2=-2)
        shifts = apply(transpose(self.gains.scale[1:]), self.slope[1:])
        return kernels, standard._replace(offset=standard.offset + apply(standard.gain, shifts))


def kalman_filter(
    prior: Prior,
    transition: TransitionArrays,
    data: Whitened,
    exists: Bool[Array, "time"] | None,
    parallel: Parallel = False,
) -> tuple[Filtered, Scalar]:
    """Return the filtering laws, the backward gains and the log density of the whitened values.

    The log density alone is differentiated by `score`, in closed form, and its Hessian is exact. If
    other outputs are differentiated as well, the filter itself is differentiated.
    """
    return _with_closed_form_score(parallel)(prior, transition, data, exists)


def filter_laws(
    prior: Prior,
    transition: TransitionArrays,
    data: Whitened,
    exists: Bool[Array, "time"] | None,
    parallel: Parallel,
) -> tuple[Float[Array, "time state"], Float[Array, "time state state"]]:
    """Return the means and the scales of the filtering laws."""
    filtered, _ = _run(prior, transition, data, exists, parallel)
    return filtered.mean, filtered.gains.scale


def _run(
    prior: Prior,
    transition: TransitionArrays,
    data: Whitened,
    exists: Bool[Array, "time"] | None,
    parallel: Parallel,
) -> tuple[Filtered, Scalar]:
    count, reduced = data.value.shape[0], data.reduced()
    compute = partial(parallel_gains, parallel=parallel) if parallel else sequential_gains
    gains = compute(prior.scale, transition, reduced.design, exists, count)
    return _filter_means(prior.mean, transition, reduced, exists, gains, parallel)


def _filter_means(
    start: Float[Array, "state"],
    transition: TransitionArrays,
    data: Reduced,
    exists: Bool[Array, "time"] | None,
    gains: Gains,
    parallel: Parallel,
) -> tuple[Filtered, Scalar]:
    """Compute m_k = a_k + K_k (v_k − H_k a_k), a_k = w m_{k-1} + b, and the log density."""
    count = data.value.shape[0]
    first_design = data.design[0] if data.design.ndim == 3 else data.design
    design = data.design[1:] if data.design.ndim == 3 else data.design
    weight = transition.weight
    bias = over_time(transition.bias, 2, count - 1)
    first_innovation = data.value[0] - linalg.matvec(first_design, start)
    first = start + linalg.matvec(gains.gain[0], first_innovation)
    shift = None
    if data.slope is not None:
        shift = _apply(gains.scale, _apply(jnp.swapaxes(gains.scale, -1, -2), data.slope))
        first, shift = first + shift[0], shift[1:]
    later = None if exists is None else exists[1:]
    updates = Updates(weight, bias, gains.gain[1:], design, data.value[1:], shift, later)
    if parallel:
        means = _means_in_parallel(updates, first, parallel)
    else:
        means = jnp.concatenate([first[None], _later_means(updates, first)])
    moved = _apply(weight, means[:-1]) + bias
    if exists is not None:
        moved = jnp.where(exists[1:, None], moved, means[:-1])
    predicted = prepended(start, moved, parallel)
    innovation = data.value - _apply(data.design, predicted)
    white = _apply(gains.whitener, innovation)
    pivots = jnp.diagonal(gains.whitener, axis1=-2, axis2=-1)
    log_prob = jnp.sum(jnp.log(pivots)) - 0.5 * jnp.sum(white**2)
    if data.slope is not None and data.squares is not None:
        log_prob = log_prob + jnp.sum(data.slope * means) - 0.5 * jnp.sum(data.squares)
    return Filtered(gains, means, predicted, innovation, data.slope), log_prob


def _apply(matrices: Float[Array, "*time r c"], xs: Float[Array, "time c"]) -> Array:
    """Multiply the vector of each row by its matrix, or by the one that all rows share."""
    return jax.vmap(linalg.matvec, in_axes=(0 if matrices.ndim == 3 else None, 0))(matrices, xs)


class Updates(NamedTuple):
    """The recursion of filtering means from row 1 on; weight and design may be constant."""

    weight: Float[Array, "*steps state state"]
    bias: Float[Array, "steps state"]
    gain: Float[Array, "steps state whitened"]
    design: Float[Array, "*steps whitened state"]
    value: Float[Array, "steps whitened"]
    shift: Float[Array, "steps state"] | None
    exists: Bool[Array, "steps"] | None


def _later_means(updates: Updates, first: Float[Array, "state"]) -> Float[Array, "steps state"]:
    """Return all filtering means but the first, one time step after another.

    The gain multiplies the innovation. In the equal form (I − K H) w m + K v, the terms K H w m and
    K v cancel to the small product of K and the innovation. In the first rows after a wide prior
    this costs all digits of float32.
    """
    d = first.shape[0]
    weight, bias, gain, design, value, shift, exists = updates
    value = value - _apply(design, bias)
    fixed: Any = None
    varying: Any = None
    if weight.ndim == design.ndim == 2:
        fixed = jnp.concatenate([weight, linalg.matmul(design, weight)])
    else:
        weight, design = (over_time(part, 3, len(value)) for part in (weight, design))
        varying = jnp.concatenate([weight, jax.vmap(linalg.matmul)(design, weight)], axis=1)

    def step(mean: Array, row: tuple) -> tuple[Array, Array]:
        maps, bias, gain, value, shift, exists = row
        moved = linalg.matvec(fixed if maps is None else maps, mean)  # w m and H w m
        after = moved[:d] + bias + linalg.matvec(gain, value - moved[d:])
        after = after if shift is None else after + shift
        after = after if exists is None else jnp.where(exists, after, mean)
        return after, after

    return jax.lax.scan(step, first, (varying, bias, gain, value, shift, exists))[1]


def _means_in_parallel(
    updates: Updates, first: Float[Array, "state"], parallel: Parallel
) -> Float[Array, "time state"]:
    """Compose the affine maps m_k = (I − K_k H_k) w m_{k-1} + g_k."""
    weight, bias, gain, design, value, shift, exists = updates
    weight, design = (over_time(part, 3, len(value)) for part in (weight, design))
    apply, product = jax.vmap(linalg.matvec), jax.vmap(linalg.matmul)
    drives = bias + apply(gain, value - apply(design, bias))
    drives = drives if shift is None else drives + shift
    responses = weight - product(gain, product(design, weight))
    if exists is not None:
        eye = jnp.eye(first.shape[0], dtype=first.dtype)
        responses = jnp.where(exists[:, None, None], responses, eye)
        drives = jnp.where(exists[:, None], drives, 0.0)
    return prepended(first, affine_scan(responses, drives, first, parallel=parallel), parallel)


def _with_closed_form_score(parallel: Parallel):
    """Return `_run` with the derivative of `kalman_filter`."""
    zero = jax.custom_derivatives.SymbolicZero

    def is_zero(leaf: object) -> bool:
        return isinstance(leaf, zero)

    run = partial(_run, parallel=parallel)
    filtered = jax.custom_vjp(run)

    def forward(*primals):
        arguments = jax.tree.map(lambda primal: primal.value, primals)
        outputs, log_prob = run(*arguments)
        return (outputs, log_prob), (arguments, outputs)

    def backward(residuals, cotangents):
        (prior, transition, data, exists), outputs = residuals
        outputs_bar, log_prob_bar = cotangents
        if all(is_zero(leaf) for leaf in jax.tree.leaves(outputs_bar, is_leaf=is_zero)):
            scores = score(prior, transition, data, exists, outputs, parallel=parallel)
            if is_zero(log_prob_bar):
                log_prob_bar = jnp.zeros((), outputs.mean.dtype)
            return (*jax.tree.map(lambda leaf: leaf * log_prob_bar, scores), None)
        dense = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if is_zero(leaf) else leaf,
            cotangents,
            is_leaf=is_zero,
        )
        differentiated = partial(run, exists=exists)
        _, pull = jax.vjp(differentiated, prior, transition, data)
        return (*pull(dense), None)

    filtered.defvjp(forward, backward, symbolic_zeros=True)
    return filtered


def score(
    prior: Prior,
    transition: TransitionArrays,
    data: Whitened,
    exists: Bool[Array, "time"] | None,
    filtered: Filtered,
    *,
    parallel: Parallel = False,
) -> tuple[Prior, TransitionArrays, Whitened]:
    """Compute the gradient of the log density in every argument, by one backward pass.

    Let r_k and N_k be the derivative and the curvature of the log density of y_{k:} in the
    predicted mean at time k. With Ψ_k the map from a predicted mean to the next one,

        r_k = j_k + Ψ_kᵀ r_{k+1},   N_k = J_k + Ψ_kᵀ N_{k+1} Ψ_k.

    The derivative in a predicted covariance is ½ (r rᵀ − N). The chain rule through w m + b and
    w P wᵀ + s sᵀ gives the other derivatives (Koopman and Shephard 1992). No inverse of a state
    covariance is needed, so that the noise and the prior may be singular. N and the covariances do
    not depend on the data.
    """
    count, reduced = data.value.shape[0], data.reduced()
    gains, means, _, innovation, _ = filtered
    product, apply = jax.vmap(linalg.matmul), jax.vmap(linalg.matvec)
    transpose = partial(jnp.swapaxes, axis1=-1, axis2=-2)
    weight = over_time(transition.weight, 3, count - 1)
    scale = over_time(transition.scale, 3, count - 1)
    design = over_time(reduced.design, 3, count)
    d = means.shape[1]
    zero_vector, zero_matrix = jnp.zeros(d, means.dtype), jnp.zeros((d, d), means.dtype)
    if exists is not None:
        weight = jnp.where(exists[1:, None, None], weight, jnp.eye(d, dtype=weight.dtype))
        scale = jnp.where(exists[1:, None, None], scale, 0.0)

    # S⁻¹ r, which equals y − H m at the filtering mean, and the terms j and J of one row.
    residual = apply(transpose(gains.whitener), apply(gains.whitener, innovation))
    slope = apply(transpose(design), residual)
    if reduced.slope is not None:
        slope = slope + reduced.slope - _carried_back(design, gains.gain, reduced.slope)
    whitened = product(gains.whitener, design)
    curvature = product(transpose(whitened), whitened)
    propagated_weight = weight - product(product(weight, gains.gain[:-1]), design[:-1])
    onward = appended(transpose(propagated_weight), zero_matrix, parallel)
    if parallel:
        r, big_n = affine_suffix_scan(onward, slope, curvature, parallel)
    else:
        r = affine_scan(onward, slope, zero_vector, reverse=True)
        big_n = settling_scan(
            _add_curvature,
            curvatures_agree,
            None,
            zero_matrix,
            (onward, curvature),
            count,
            reverse=True,
        )
    outer = r[:, :, None] * r[:, None, :] - big_n

    covariance = product(gains.scale, transpose(gains.scale))
    weight_bar = r[1:, :, None] * means[:-1, None, :] + product(
        outer[1:], product(weight, covariance[:-1])
    )
    transition_bar = TransitionArrays(weight_bar, r[1:], product(outer[1:], scale))
    if exists is not None:
        transition_bar = jax.tree.map(
            lambda leaf: where_rows(exists[1:], leaf, 0.0), transition_bar
        )
    # Smoothed moments, from the filtering law and the derivatives of the later log density.
    r_after = appended(apply(transpose(weight), r[1:]), zero_vector, parallel)
    n_after = appended(
        product(transpose(weight), product(big_n[1:], weight)), zero_matrix, parallel
    )
    mean = means + apply(covariance, r_after)
    # With unit noise H P = Kᵀ after conditioning, so that H times the smoothed covariance needs
    # no difference of covariances.
    gain = transpose(gains.gain)
    misfit = residual - apply(gain, r_after if reduced.slope is None else r_after + reduced.slope)
    shrinkage = product(n_after, covariance)
    design_covariance = gain - product(gain, shrinkage)
    if reduced.slope is not None:
        smoothed = covariance - product(covariance, shrinkage)
        at_all_entries = jax.vmap(
            _at_all_entries, in_axes=(0 if data.design.ndim == 3 else None, 0)
        )
        misfit, design_covariance = at_all_entries(
            data.design, (data.value, mean, smoothed, misfit, design_covariance)
        )
    design_bar = misfit[:, :, None] * mean[:, None, :] - design_covariance
    return (
        Prior(r[0], linalg.matmul(outer[0], prior.scale)),
        TransitionArrays(
            *(_reduce(bar, leaf) for bar, leaf in zip(transition_bar, transition, strict=True))
        ),
        Whitened(_reduce(design_bar, data.design), -misfit),
    )


def _carried_back(design: Array, gain: Array, slope: Array) -> Array:
    """Return Hᵀ Kᵀ c for each row."""
    apply, transpose = jax.vmap(linalg.matvec), partial(jnp.swapaxes, axis1=-1, axis2=-2)
    return apply(transpose(design), apply(transpose(gain), slope))


def _add_curvature(fixed: None, big_n: Array, row: tuple[Array, Array]) -> Array:
    adjoint, curvature = row
    return linalg.matmul(linalg.matmul(adjoint, big_n), adjoint.T) + curvature


def _at_all_entries(
    design: Float[Array, "obs state"], row: tuple[Array, Array, Array, Array, Array]
) -> tuple[Float[Array, "obs"], Float[Array, "obs state"]]:
    """Return v − H m and H P for all entries of a row, given those of its reduced entries.

    With the basis B of `reduce_rows`, v − H m = Bᵀ (B v − B H m) + (I − BᵀB)(v − H m). This holds
    for any B, so that B may be a constant.
    """
    value, mean, covariance, misfit, design_covariance = row
    basis = jax.lax.stop_gradient(row_basis(design.T))

    def for_all_entries(
        reduced: Float[Array, "c k"], full: Float[Array, "obs k"]
    ) -> Float[Array, "obs k"]:
        return full + linalg.matmul(basis.T, reduced - linalg.matmul(basis, full))

    full_misfit = value - linalg.matvec(design, mean)
    return (
        for_all_entries(misfit[:, None], full_misfit[:, None])[:, 0],
        for_all_entries(design_covariance, linalg.matmul(design, covariance)),
    )


def _reduce(bar: Array, leaf: Array) -> Array:
    """Sum a derivative over time if its primal `leaf` is constant in time."""
    return bar if bar.ndim == leaf.ndim else jnp.sum(bar, axis=0)


def backward_kernels(
    reversal: Reversal,
    mean: Float[Array, "time state"],
    predicted: Float[Array, "time state"],
    innovation: Float[Array, "time whitened"],
) -> tuple[LinearGaussianKernel, StandardKernel]:
    """Return the backward kernels between states and between their standard coordinates.

    Args:
        reversal: the gains of the kernels.
        mean: the filtering means.
        predicted: the predicted means.
        innovation: the innovations.
    """
    apply = jax.vmap(linalg.matvec)
    offset = mean[:-1] - apply(reversal.state_gain, predicted[1:])
    kernels = jax.vmap(LinearGaussianKernel)(reversal.state_gain, offset, reversal.state_scale)
    response = apply(reversal.response, innovation[1:])
    return kernels, StandardKernel(reversal.gain, response, reversal.scale)
