"""The gains of the Kalman smoother, parallel in time: prefix sums under an associative operator.

See Särkkä and García-Fernández (2021). An element holds the covariance part of the law of x_k given
x_j and y_{j+1:k}, N(A x_j + b, C), and of the likelihood of y_{j+1:k} in x_j, exp(ηᵀx − ½ xᵀJx).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._exact.gains import Gains, TransitionArrays, without_padding
from retrodict._model import repeat_last_row
from retrodict._numerics import (
    SETTLED_ROWS,
    condition_standard,
    linalg,
    lower_factor,
    predict_scale,
    prefix_scan,
    repeated_last,
    reverse_scale,
    scales_agree,
)
from retrodict.distributed import Parallel, mesh_of, prepended


class Element(NamedTuple):
    """One element of the scan, or a batch of them with a leading axis."""

    weight: Float[Array, "*time d d"]
    covariance: Float[Array, "*time d d"]
    curvature: Float[Array, "*time d d"]


def combine(first: Element, second: Element) -> Element:
    """Return the element of the union of two adjacent time intervals."""
    mm = linalg.matmul
    inverse = _inverse_of_one_plus(first.covariance, second.curvature)
    onward = mm(second.weight, inverse)
    back = mm(inverse, first.weight).T
    covariance = mm(mm(onward, first.covariance), second.weight.T) + second.covariance
    curvature = mm(back, mm(second.curvature, first.weight)) + first.curvature
    return Element(
        mm(onward, first.weight),
        0.5 * (covariance + covariance.T),
        0.5 * (curvature + curvature.T),
    )


@jax.custom_jvp
def _inverse_of_one_plus(
    covariance: Float[Array, "d d"], curvature: Float[Array, "d d"]
) -> Float[Array, "d d"]:
    """Return X = (I + C J)⁻¹ = I − S (I + SᵀJS)⁻¹ SᵀJ with C = S Sᵀ.

    The matrix I + SᵀJS of the linear system is at least the identity. One Newton step
    X (2I − (I + C J) X) corrects rounding errors. The derivative is that of the inverse. It also
    holds if C is singular, where the Cholesky factor is not differentiable.
    """
    eye = jnp.eye(covariance.shape[0], dtype=covariance.dtype)
    scale = linalg.semidefinite_cholesky(covariance)
    half = linalg.matmul(scale.T, curvature)
    root = linalg.cholesky(eye + linalg.matmul(half, scale))
    solved = linalg.solve_triangular(root, linalg.solve_triangular(root, half), transpose=True)
    guess = eye - linalg.matmul(scale, solved)
    system = eye + linalg.matmul(covariance, curvature)
    return linalg.matmul(guess, 2.0 * eye - linalg.matmul(system, guess))


@_inverse_of_one_plus.defjvp
def _inverse_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]):
    inverse = _inverse_of_one_plus(*primals)
    change = linalg.matmul(tangents[0], primals[1]) + linalg.matmul(primals[0], tangents[1])
    return inverse, -linalg.matmul(linalg.matmul(inverse, change), inverse)


def parallel_gains(
    prior: Float[Array, "state noise"],
    transition: TransitionArrays,
    design: Float[Array, "*time whitened state"],
    exists: Bool[Array, "time"] | None,
    count: int,
    parallel: Parallel,
) -> Gains:
    """Compute the gains in O(log n) depth; for arguments see `sequential_gains`.

    If the model is constant in time and its gains have settled after `SETTLED_ROWS` rows, the last
    of them are repeated. On several devices all rows are computed.
    """
    all_rows = partial(_gains_of_rows, prior, transition, design, exists)
    constant = transition.weight.ndim == transition.scale.ndim == design.ndim == 2
    on_one_device = exists is None and mesh_of(parallel) is None
    if not (constant and on_one_device and count > 2 * SETTLED_ROWS):
        return all_rows(count, parallel)
    head = all_rows(SETTLED_ROWS, parallel)
    # A drift that passes is at most an eighth of a rounding per row: a loop would not resolve it.
    settled = scales_agree(head.scale[SETTLED_ROWS // 2], head.scale[-1], roundings=64)
    return lax.cond(
        settled,
        lambda: jax.tree.map(
            lambda leaf: repeated_last(leaf, count - SETTLED_ROWS) if leaf.ndim else leaf, head
        ),
        lambda: all_rows(count, parallel),
    )


def _gains_of_rows(
    prior: Float[Array, "state noise"],
    transition: TransitionArrays,
    design: Float[Array, "*time whitened state"],
    exists: Bool[Array, "time"] | None,
    count: int,
    parallel: Parallel,
) -> Gains:
    """Compute the gains of all rows.

    The scan computes covariances at all times. One step of the sequential filter from each time to
    the next, all times in parallel, then computes factors and gains. This step contracts rounding
    errors of the scan as a filter contracts its prior.
    """
    design = over_time(design, 3, count)
    weight, noise = (
        over_time(transition.weight, 3, count - 1),
        over_time(transition.scale, 3, count - 1),
    )
    product = jax.vmap(linalg.matmul)
    predicted = lower_factor(prior)
    start = condition_standard(linalg.matmul(design[0], predicted))
    first = linalg.matmul(predicted, start.shrinkage)
    elements = _elements(weight, noise, design[1:])
    neutral = _neutral_element(first)
    if exists is not None:
        elements = jax.tree.map(
            lambda leaf, identity: jnp.where(exists[1:, None, None], leaf, identity),
            elements,
            neutral,
        )
    zero = jnp.zeros_like(first)
    elements = prepended(Element(zero, linalg.outer_gram(first), zero), elements, parallel)
    covariances = prefix_scan(combine, elements, neutral, parallel=parallel).covariance
    before = jax.vmap(linalg.semidefinite_cholesky)(covariances[:-1])
    predictions, directions = predict_scale(before, weight, noise)
    conditioning = condition_standard(product(design[1:], predictions))
    reversal = reverse_scale(before, weight, noise, predictions, directions, conditioning)
    scales, gain, whitener = prepended(
        (first, linalg.matmul(predicted, start.gain), start.whitener),
        (
            product(predictions, conditioning.shrinkage),
            product(predictions, conditioning.gain),
            conditioning.whitener,
        ),
        parallel,
    )
    if exists is not None:
        scales = repeat_last_row(scales, exists)
    resolved = _same_widths(before, scales[:-1])
    return Gains(scales, gain, whitener, without_padding(reversal, exists), resolved)


def _elements(
    weight: Float[Array, "time d d"],
    noise: Float[Array, "time d k"],
    design: Float[Array, "time p d"],
) -> Element:
    """Return the elements of single steps: the law of the noise conditioned on the observation."""
    product, transpose = jax.vmap(linalg.matmul), lambda a: jnp.swapaxes(a, -1, -2)
    lower = lower_factor(noise)
    conditioning = condition_standard(product(design, lower))
    gain = product(product(lower, conditioning.gain), design)
    scale = product(lower, conditioning.shrinkage)
    whitened = product(product(conditioning.whitener, design), weight)
    return Element(
        weight - product(gain, weight),
        product(scale, transpose(scale)),
        product(transpose(whitened), whitened),
    )


def _neutral_element(like: Float[Array, "d d"]) -> Element:
    """Return the neutral element: an identity transition without an observation."""
    zero = jnp.zeros_like(like)
    return Element(jnp.eye(like.shape[0], dtype=like.dtype), zero, zero)


def _same_widths(
    before: Float[Array, "time d d"], after: Float[Array, "time d d"]
) -> Bool[Array, ""]:
    """Return whether covariances and the step that follows them give the same widths.

    Both are scales of the same laws. Where a direction is narrower than covariances represent, they
    differ. Directions at the level of rounding errors have no density in either form.
    """
    eps = jnp.finfo(after.dtype).eps
    pivots = [jnp.diagonal(scale, axis1=-2, axis2=-1) for scale in (before, after)]
    rows = jnp.sqrt(jnp.sum(after**2, axis=-1))
    larger = jnp.maximum(*pivots)
    agree = jnp.abs(pivots[0] - pivots[1]) <= 1e-2 * larger
    return jnp.all(agree | (larger <= 1e3 * eps * rows))


def over_time(array: Array, rank: int, count: int) -> Array:
    """Return the array if it has this rank, else `count` copies of it along a new first axis."""
    return array if array.ndim == rank else jnp.broadcast_to(array, (count, *array.shape))
