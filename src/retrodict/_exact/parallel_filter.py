"""The Kalman filter, parallel in time: prefix sums under an associative operator.

See Särkkä and García-Fernández (2021). An element holds the law of x_k given x_j and y_{j+1:k},
N(A x_j + b, C), and the likelihood of y_{j+1:k} in x_j, exp(ηᵀx − ½ xᵀJx) up to a constant.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._exact.kalman_filter import (
    Filtered,
    Prior,
    Transition,
    Whitened,
    over_time,
    read,
    repeat_over_time,
)
from retrodict._numerics import Factored, condition, linalg, prefix_scan, propagate
from retrodict._series import repeat_last_row
from retrodict._types import Scalar
from retrodict.distributed import Parallel, prepended


class Element(NamedTuple):
    """One element of the scan, or a batch of them with a leading axis."""

    weight: Float[Array, "*time d d"]
    bias: Float[Array, "*time d"]
    covariance: Float[Array, "*time d d"]
    slope: Float[Array, "*time d"]
    curvature: Float[Array, "*time d d"]


def combine(first: Element, second: Element) -> Element:
    """Return the element of the union of two adjacent time intervals."""
    mm, mv = linalg.matmul, linalg.matvec
    inverse = _inverse_of_one_plus(first.covariance, second.curvature)
    onward = mm(second.weight, inverse)
    back = mm(inverse, first.weight).T
    covariance = mm(mm(onward, first.covariance), second.weight.T) + second.covariance
    curvature = mm(back, mm(second.curvature, first.weight)) + first.curvature
    return Element(
        mm(onward, first.weight),
        mv(onward, first.bias + mv(first.covariance, second.slope)) + second.bias,
        0.5 * (covariance + covariance.T),
        mv(back, second.slope - mv(second.curvature, first.bias)) + first.slope,
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


def filter_laws_in_parallel(
    prior: Prior,
    transition: Transition,
    data: Whitened,
    exists: Bool[Array, "time"] | None,
    parallel: Parallel = True,
) -> tuple[Filtered, Scalar]:
    """Return the filtering laws and the log density of the whitened values, in O(log n) depth.

    The scan computes means and covariances at all times. One step of the sequential filter from
    each time to the next, all times in parallel, then computes factors, innovations and the log
    density. This step contracts rounding errors of the scan as a filter contracts its prior.
    """
    steps = data.value.shape[0] - 1
    design = repeat_over_time(data.design, 3, steps + 1)
    first, innovations = condition(Factored.from_scale(*prior), design[0], data.value[0])
    if steps == 0:
        return Filtered(jax.tree.map(lambda leaf: leaf[None], first)), innovations.log_prob()
    weight, bias, scale = over_time(transition, steps)
    elements = jax.vmap(_element)(weight, bias, scale, design[1:], data.value[1:])
    if exists is not None:
        elements = jax.tree.map(
            lambda leaf, identity: jnp.where(
                exists[1:].reshape(-1, *[1] * (leaf.ndim - 1)), leaf, identity
            ),
            elements,
            _neutral_element(first.dim, bias.dtype),
        )
    zero_vector, zero_matrix = jnp.zeros_like(bias[0]), jnp.zeros_like(weight[0])
    start = Element(
        zero_matrix, first.mean, linalg.outer_gram(first.scale_tril), zero_vector, zero_matrix
    )
    neutral = _neutral_element(first.dim, bias.dtype)
    summed = prefix_scan(combine, prepended(start, elements, parallel), neutral, parallel=parallel)
    before = jax.vmap(
        lambda mean, covariance: Factored.from_scale(mean, linalg.semidefinite_cholesky(covariance))
    )(summed.bias[:-1], summed.covariance[:-1])
    predicted = jax.vmap(propagate)(before, weight, bias, scale)
    after, later = jax.vmap(condition)(predicted, design[1:], data.value[1:])
    laws, innovations = prepended((first, innovations), (after, later), parallel)
    if exists is not None:
        laws = repeat_last_row(laws, exists)
    return Filtered(laws), innovations.log_prob()


def _element(
    weight: Float[Array, "d d"],
    bias: Float[Array, "d"],
    scale: Float[Array, "d noise"],
    design: Float[Array, "whitened d"],
    value: Float[Array, "whitened"],
) -> Element:
    """Return the element of one time step: the law of the noise conditioned on the observation."""
    reading = read(Factored.from_scale(bias, scale), design, value)
    return Element(
        linalg.matmul(reading.carry, weight),
        reading.law.mean,
        linalg.outer_gram(reading.law.scale_tril),
        linalg.matvec(weight.T, reading.slope),
        linalg.matmul(weight.T, linalg.matmul(reading.curvature, weight)),
    )


def _neutral_element(d: int, dtype: jnp.dtype) -> Element:
    """Return the neutral element: an identity transition without an observation."""
    vector, matrix = jnp.zeros(d, dtype), jnp.zeros((d, d), dtype)
    return Element(jnp.eye(d, dtype=dtype), vector, matrix, vector, matrix)
