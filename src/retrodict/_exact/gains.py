"""The part of the Kalman smoother that does not depend on the data: covariances and gains.

The gains depend on the parameters and on the mask. Series with the same mask share them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._numerics import (
    BATCH_SIZE,
    QuickStep,
    Reversal,
    condition_covariance,
    condition_standard,
    factor_if_precise,
    in_batches,
    linalg,
    lower_factor,
    predict_scale,
    predicted_factor,
    propagate,
    reverse_scale,
    scales_agree,
    settling_scan,
    shrinkage_of,
)


class Prior(NamedTuple):
    """The law N(mean, scale scaleᵀ) of x_0."""

    mean: Float[Array, "state"]
    scale: Float[Array, "state noise"]


class TransitionArrays(NamedTuple):
    """The transition x_k = weight x_{k-1} + bias + scale ε.

    Each array may have a leading axis `time-1`.
    """

    weight: Float[Array, "*time state state"]
    bias: Float[Array, "*time state"]
    scale: Float[Array, "*time state noise"]


class Gains(NamedTuple):
    """The scales and gains of a filter and of its backward kernels.

    Attributes:
        scale: S_k, the scale of the filtering law of x_k.
        gain: K_k, with filtering mean a_k + K_k (v_k − H_k a_k) for the predicted mean a_k.
        whitener: W_k, with W_k (v_k − H_k a_k) standard normal.
        reversal: the backward kernels.
        resolved: whether the computation resolved every direction of the filtering laws. If not,
            their density is unknown. `None` if all directions are resolved by construction.
    """

    scale: Float[Array, "time state state"]
    gain: Float[Array, "time state whitened"]
    whitener: Float[Array, "time whitened whitened"]
    reversal: Reversal
    resolved: Bool[Array, ""] | None = None


def sequential_gains(
    prior: Float[Array, "state noise"],
    transition: TransitionArrays,
    design: Float[Array, "*time whitened state"],
    exists: Bool[Array, "time"] | None,
    count: int,
) -> Gains:
    """Compute the gains one time step after another, until they no longer change.

    Args:
        prior: the scale of x_0.
        transition: the transition; its bias is not used.
        design: the whitened, reduced design.
        exists: which rows exist; `None` if all of them do.
        count: the number of rows n.
    """
    fixed, varying = split_constant((transition.weight, transition.scale, design), (2, 2, 2))
    later_designs = None if varying[2] is None else varying[2][1:]
    real = None if exists is None else exists[1:]
    predicted = lower_factor(prior)
    first_design = design[0] if design.ndim == 3 else design
    conditioning = condition_standard(linalg.matmul(first_design, predicted))
    scale = linalg.matmul(predicted, conditioning.shrinkage)
    gain = linalg.matmul(predicted, conditioning.gain)
    first = (scale, gain, conditioning.whitener)
    rows = (*varying[:2], later_designs, real)
    *later, reversal = settling_scan(
        _advance,
        scales_agree,
        fixed,
        scale,
        rows,
        count - 1,
        finish=_gains_of_steps,
        quick=_BY_COVARIANCES if scale.shape[0] > linalg.UNROLLED else None,
    )
    scales, gains, whiteners = (
        jnp.concatenate([one[None], rest]) for one, rest in zip(first, later, strict=True)
    )
    return Gains(scales, gains, whiteners, without_padding(reversal, exists))


def backward_gains(
    scales: Float[Array, "time state state"],
    transition: TransitionArrays,
    designs: Float[Array, "steps whitened state"],
    exists: Bool[Array, "time"] | None,
) -> Reversal:
    """Return the backward kernels of filtering laws whose transitions and designs vary in time.

    Args:
        scales: the scales of the filtering laws.
        transition: the transitions into rows 1, …, n-1.
        designs: the whitened designs of these rows.
        exists: which rows exist; `None` if all of them do.
    """
    rows = (transition.weight, transition.scale, designs, None)
    fixed = (None, None, None)
    *_, reversal = in_batches(
        lambda batch: _gains_of_steps(fixed, *batch), (rows, scales[:-1], scales[1:]), BATCH_SIZE
    )
    return without_padding(reversal, exists)


def _advance(fixed: tuple, scale: Array, row: tuple) -> Array:
    """Return the filtering scale S_k from S_{k-1}."""
    *varying, exists = row
    weight, noise, design = _join(fixed, tuple(varying))
    predicted = predicted_factor(scale, weight, noise)
    after = linalg.matmul(predicted, shrinkage_of(linalg.matmul(design, predicted)))
    return after if exists is None else jnp.where(exists, after, scale)


def _advance_covariance(fixed: tuple, covariance: Array, row: tuple) -> Array:
    """Return the filtering covariance S_k S_kᵀ from that of the row before."""
    *varying, exists = row
    weight, noise, design = _join(fixed, tuple(varying))
    after = condition_covariance(propagate(covariance, weight, noise), design)
    return after if exists is None else jnp.where(exists, after, covariance)


def _read_scales(fixed: tuple, rows: tuple, before: Array, after: Array) -> tuple[Array, Array]:
    """Return the filtering scales, and whether the filtering covariances are precise."""
    *varying, exists = rows
    weight, noise, _ = _join(fixed, tuple(varying))
    if exists is not None:  # a row of padding takes no step
        weight = jnp.where(exists[:, None, None], weight, jnp.eye(after.shape[-1]))
    return factor_if_precise(before, weight, noise, after)


_BY_COVARIANCES = QuickStep(linalg.outer_gram, _advance_covariance, _read_scales)


def _gains_of_steps(
    fixed: tuple, rows: tuple, before: Array, after: Array
) -> tuple[Array, Array, Array, Reversal]:
    """Return the filtering scales, gains and whiteners of a batch of steps, and the reversals."""
    *varying, _ = rows
    weight, noise, design = (
        _repeated(constant, each, len(before))
        for constant, each in zip(fixed, varying, strict=True)
    )
    product = jax.vmap(linalg.matmul)
    predicted, directions = predict_scale(before, weight, noise)
    conditioning = condition_standard(product(design, predicted))
    gain = product(predicted, conditioning.gain)
    reversal = reverse_scale(before, weight, noise, predicted, directions, conditioning)
    return after, gain, conditioning.whitener, reversal


def _repeated(constant: Array | None, varying: Any, count: int) -> Array:
    """Return the rows that vary, or copies of the constant that stands in their place."""
    return varying if constant is None else jnp.broadcast_to(constant, (count, *constant.shape))


def without_padding(reversal: Reversal, exists: Bool[Array, "time"] | None) -> Reversal:
    """Return identity kernels in place of those into rows that do not exist."""
    if exists is None:
        return reversal
    eye = jnp.eye(reversal.gain.shape[-1], dtype=reversal.gain.dtype)
    identity = Reversal(eye, jnp.zeros_like(reversal.response[0]), 0 * eye, eye, 0 * eye)
    return jax.tree.map(
        lambda leaf, neutral: jnp.where(exists[1:, None, None], leaf, neutral), reversal, identity
    )


def split_constant(arrays: tuple, ranks: tuple[int, ...]) -> tuple[tuple, tuple]:
    """Split arrays into those that are constant in time and those that vary; `None` elsewhere."""
    varies = [array.ndim > rank for array, rank in zip(arrays, ranks, strict=True)]
    fixed = tuple(None if v else array for v, array in zip(varies, arrays, strict=True))
    varying = tuple(array if v else None for v, array in zip(varies, arrays, strict=True))
    return fixed, varying


def _join(fixed: tuple, varying: tuple) -> tuple:
    return tuple(b if a is None else a for a, b in zip(fixed, varying, strict=True))
