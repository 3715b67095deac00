"""What went wrong on the way, in numbers that pass through `jax.jit`, and in words."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from retrodict._expectations import AbstractFunctional
from retrodict._validate import is_concrete

FINE, IMPOSSIBLE, UNDEFINED, DEGENERATE = 0, 1, 2, 3

_WORDS = {
    IMPOSSIBLE: "no particle has a positive weight at time {time}: the observation there is"
    " impossible, or so unlikely that all weights vanish, under every state that was drawn. Check"
    " that row, use more particles, or a proposal that looks at the data",
    UNDEFINED: "the log weight of some particle is NaN or +inf at time {time}. Check that the"
    " densities of the model (and of the proposal) are finite there",
}


def status_of(
    impossible: Bool[Array, "time"], undefined: Bool[Array, "time"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The status of a filter, and the time at which it was first not fine."""
    codes = jnp.where(undefined, UNDEFINED, jnp.where(impossible, IMPOSSIBLE, FINE))
    time = jnp.argmax(codes != FINE)
    return codes[time], jnp.where(codes[time] == FINE, -1, time)


def refuse_failure(owner: str, status: Any, time: Any, strict: bool) -> None:
    """Raises if a filter failed and its status is known, which it is outside of `jax.jit`."""
    if not strict or not is_concrete(status):
        return
    code, at = int(np.asarray(status)), int(np.asarray(time))
    if code in _WORDS:
        raise FloatingPointError(
            f"{owner}: {_WORDS[code].format(time=at)}. Pass strict=False to get the result with its"
            " status instead."
        )


def check_single(particles: Array) -> None:
    """Refuses particles of a batch of series, whose axes would be mistaken for others."""
    if particles.ndim != 3:
        raise ValueError(
            f"This result holds a batch of series: its particles have shape {particles.shape},"
            " where one series has (time, particle, state). Read it under jax.vmap, for example"
            " jax.vmap(lambda found: found.mean)(founds)."
        )


def check_functional(functional: Any) -> None:
    """Refuses what is no functional."""
    if not isinstance(functional, AbstractFunctional):
        raise TypeError(
            "expectation expects a functional, such as StateSum() or AdditiveFunctional(fn), got"
            f" {type(functional).__name__}."
        )
