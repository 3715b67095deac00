"""Step sizes for learning along a stream."""

from typing import Any

import jax.numpy as jnp
import optax

from retrodict._arrays import Scalar


def robbins_monro(rate: float, exponent: float = 0.6, warmup: int = 0) -> optax.Schedule:
    """Return step sizes rate · n^{−exponent}, whose sum diverges and whose squares are summable.

    With exponents in (½, 1] the estimate forgets its start and averages the noise, and converges.
    Use a constant step for parameters that drift.

    Example:
        >>> import retrodict as rd
        >>> schedule = rd.online.robbins_monro(1.0, exponent=1.0)
        >>> [round(float(schedule(step)), 3) for step in (0, 1, 3)]
        [1.0, 0.5, 0.25]

    Args:
        rate: the largest step size.
        exponent: the rate at which steps shrink.
        warmup: steps during which the size grows linearly to `rate`, before it shrinks.

    Returns:
        An optax schedule, for example for `optax.sgd` or `optax.adam`.
    """
    if not rate > 0:
        raise ValueError(f"robbins_monro expects a positive rate, got {rate}.")
    if not 0.5 < exponent <= 1.0:
        raise ValueError(
            f"robbins_monro expects an exponent in (0.5, 1], got {exponent}: below it the noise"
            " does not average out, above it the steps shrink before the estimate converges."
        )
    if warmup < 0:
        raise ValueError(f"robbins_monro expects a warmup of at least 0 steps, got {warmup}.")

    def schedule(count: Any) -> Scalar:
        step = jnp.asarray(count, jnp.result_type(float)) + 1.0
        shrunk = rate * jnp.maximum(step - warmup, 1.0) ** -exponent
        return shrunk * jnp.minimum(step / warmup, 1.0) if warmup else shrunk

    return schedule
