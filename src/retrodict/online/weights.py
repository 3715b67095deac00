"""Samples of one filtering law, weighted as draws of the backward kernel to it.

Draws ξ^j of q_{k-1} represent the kernel q_{k-1|k}(x, ·) with the weights

    w_j(x) = q_{k-1|k}(x, ξ^j) / q_{k-1}(ξ^j),

for E_{q_{k-1}}[w(x) f] = E_{q_{k-1|k}(x, ·)}[f]. The mean of w_j(x) f(ξ^j) is unbiased; divided by
the mean of the weights, which has expectation one, it is consistent and usually less variable.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jaxtyping import Array, Float, PyTree

from retrodict._families import AbstractFamily, AbstractSampledFamily
from retrodict._kernels import LinearGaussianKernel
from retrodict._laws import LOG_2PI, scale_log_det, scale_solve
from retrodict.particles import squared_distance

BackwardLaw: TypeAlias = Callable[[PyTree, Array], Any]
"""The law q_{k-1|k}(x, ·) from the parameters of its row and the state x."""


def backward_law(family: AbstractFamily) -> BackwardLaw:
    """Return the backward kernels of a family as a function of the step of `read` and of x_k.

    Args:
        family: an unwrapped family.
    """
    if isinstance(family, AbstractSampledFamily):
        return family.shared().law
    return _linear_gaussian


def _linear_gaussian(step: LinearGaussianKernel, x: Float[Array, "state"]) -> Any:
    return step.law(x, None)


def log_weights(
    law_of: BackwardLaw,
    before: Any,
    step: PyTree,
    xs: Float[Array, "now state"],
    befores: Float[Array, "before state"],
) -> Float[Array, "now before"]:
    """Return log q_{k-1|k}(x_k^i, x_{k-1}^j) − log q_{k-1}(x_{k-1}^j) of all pairs.

    They are not normalised: the mean of exp(·) over draws x_{k-1}^j of q_{k-1} has expectation one.

    Args:
        law_of: the backward kernels, from `backward_law`.
        before: the filtering law q_{k-1}.
        step: the parameters of the kernel q_{k-1|k}.
        xs: states of time k.
        befores: states of time k-1.
    """
    log_before = jax.vmap(before.log_prob)(befores)
    if isinstance(step, LinearGaussianKernel):
        return _log_densities(step, xs, befores) - log_before[None]
    return jax.vmap(lambda x: jax.vmap(law_of(step, x).log_prob)(befores) - log_before)(xs)


def _log_densities(
    kernel: LinearGaussianKernel,
    xs: Float[Array, "now state"],
    befores: Float[Array, "before state"],
) -> Float[Array, "now before"]:
    """Return the log densities of all pairs under one scale, as distances of whitened states."""
    scale = kernel.scale_tril
    means = jax.vmap(lambda x: scale_solve(scale, kernel.law(x, None).mean))(xs)
    whitened = jax.vmap(lambda x: scale_solve(scale, x))(befores)
    constant = 0.5 * xs.shape[1] * LOG_2PI + scale_log_det(scale)
    return -0.5 * squared_distance(means, whitened) - constant
