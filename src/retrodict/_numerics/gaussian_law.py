"""Gaussian laws N(m, S Sᵀ), and the three steps of exact inference: predict, condition, reverse.

The steps apply `standard.py` to one law and its data. S may be singular, and so may the noise of a
transition. Families whose laws all have a density use the steps of `nonsingular_law.py`, which are
faster under `vmap` and in derivatives.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._numerics import linalg
from retrodict._numerics.standard import (
    condition_on,
    lower_factor,
    predicted_factor,
    reverse_states,
)


class GaussianLaw(NamedTuple):
    """The law N(mean, scale scaleᵀ), with a lower-triangular scale."""

    mean: Float[Array, "*time d"]
    scale: Float[Array, "*time d d"]


class Innovation(NamedTuple):
    """The innovation r = v − H m of an observation, given the law N(m, S Sᵀ) of the state.

    Attributes:
        log_prob: the log density of the observation, without −½ log 2π per entry.
        square: rᵀ (H S Sᵀ Hᵀ + I)⁻¹ r.
    """

    log_prob: Scalar
    square: Scalar


def law_of(mean: Float[Array, "d"], scale: Float[Array, "d k"]) -> GaussianLaw:
    """Return the law N(mean, scale scaleᵀ) for any scale with d rows."""
    return GaussianLaw(mean, lower_factor(scale))


def predict(
    law: GaussianLaw,
    weight: Float[Array, "e d"],
    bias: Float[Array, "e"],
    noise: Float[Array, "e k"],
) -> GaussianLaw:
    """Return the law of w x + b + s ε."""
    scale = predicted_factor(law.scale, weight, noise)
    return GaussianLaw(linalg.matvec(weight, law.mean) + bias, scale)


def condition(
    law: GaussianLaw, design: Float[Array, "p d"], value: Float[Array, "p"]
) -> tuple[GaussianLaw, Innovation]:
    """Return the law of x given value = design x + ε with standard normal ε, and the innovation.

    A row of zeros with value zero is a no-op and represents a missing entry.
    """
    residual = value - linalg.matvec(design, law.mean)
    shift, shrinkage, white, pivots = condition_on(linalg.matmul(design, law.scale), residual)
    mean = law.mean + linalg.matvec(law.scale, shift)
    square = jnp.sum(white**2)
    innovation = Innovation(jnp.sum(jnp.log(pivots)) - 0.5 * square, square)
    return GaussianLaw(mean, linalg.matmul(law.scale, shrinkage)), innovation


def reverse(
    law: GaussianLaw,
    weight: Float[Array, "d d"],
    bias: Float[Array, "d"],
    noise: Float[Array, "d k"],
) -> tuple[Float[Array, "d d"], Float[Array, "d"], Float[Array, "d d"]]:
    """Return the backward kernel of x given z = w x + b + s ε.

    Returns:
        The gain G and the lower factor of `reverse_states`, with the offset m − G (w m + b) between
        them.
    """
    gain, scale = reverse_states(law.scale, weight, noise)
    moved = linalg.matvec(weight, law.mean) + bias
    return gain, law.mean - linalg.matvec(gain, moved), scale
