"""Status codes of particle methods, which pass through `jax.jit`, and their messages."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from retrodict._expectations import AbstractFunctional
from retrodict._validate import is_concrete

FINE, IMPOSSIBLE, UNDEFINED, DEGENERATE = 0, 1, 2, 3

FEW = 10
"""The least number of particles at each time through which paths must go."""

_WORDS = {
    IMPOSSIBLE: "no particle has a positive weight at time {time}: the observation there is"
    " impossible, or so unlikely that all weights vanish, under every state that was drawn. Check"
    " that row, use more particles, or a proposal that uses the data",
    UNDEFINED: "the log weight of some particle is NaN or +inf at time {time}. Check that the"
    " densities of the model (and of the proposal) are finite there",
    DEGENERATE: f"paths go through fewer than {FEW} particles at time {{time}}. Use more particles,"
    " or a proposal that uses the data",
}


def status_words(status: Any, time: Any) -> str:
    """Describe a status that is not fine."""
    return _WORDS[int(np.asarray(status))].format(time=int(np.asarray(time)))


def status_of(
    impossible: Bool[Array, "time"], undefined: Bool[Array, "time"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the status of a filter, and the first time at which it was not fine."""
    codes = jnp.where(undefined, UNDEFINED, jnp.where(impossible, IMPOSSIBLE, FINE))
    time = jnp.argmax(codes != FINE)
    return codes[time], jnp.where(codes[time] == FINE, -1, time)


def refuse_failure(owner: str, status: Any, time: Any, strict: bool) -> None:
    """Raise an error if a filter failed and its status is known, as outside of `jax.jit`."""
    if strict and is_concrete(status) and int(np.asarray(status)) in (IMPOSSIBLE, UNDEFINED):
        raise FloatingPointError(
            f"{owner}: {status_words(status, time)}. Pass strict=False to get the result with its"
            " status instead."
        )


def check_single(particles: Array) -> None:
    """Refuse particles of a batch of series, whose axes would be misread."""
    if particles.ndim != 3:
        raise ValueError(
            f"This result holds a batch of series: its particles have shape {particles.shape},"
            " where one series has (time, particle, state). Read it under jax.vmap, for example"
            " jax.vmap(lambda posterior: posterior.mean)(posteriors)."
        )


def check_functional(functional: Any) -> None:
    """Refuse an object that is not a functional."""
    if not isinstance(functional, AbstractFunctional):
        raise TypeError(
            "expectation expects a functional, such as StateSum() or AdditiveFunctional(fn), got"
            f" {type(functional).__name__}."
        )
