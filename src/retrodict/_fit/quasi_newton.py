"""L-BFGS on the host, for exact losses that are costly to compile and cheap to evaluate."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree
from scipy.optimize import OptimizeResult, minimize

from retrodict._devices import to_hosts
from retrodict._train import Status
from retrodict._types import Scalar

ROUNDING = 10.0
"""From how many rounding errors of the loss on a step counts as progress."""


class Minimum(NamedTuple):
    """Where `minimise` ended.

    Attributes:
        parameters: the best that were seen.
        value: the loss there.
        losses: the loss after each step.
        num_skipped: at how many points loss or gradient was not finite.
        status: how it ended.
    """

    parameters: PyTree
    value: float
    losses: Float[np.ndarray, "step"]
    num_skipped: int
    status: Status


def minimise(
    loss: Callable[[PyTree, PyTree], Scalar],
    parameters: PyTree,
    data: PyTree,
    *,
    num_steps: int,
    show: Callable[[int, float], None] | None = None,
) -> Minimum:
    """Descends a loss by L-BFGS until it no longer falls.

    `optax.lbfgs` has the loss and its gradient three times in one program, which takes three times
    as long to compile; here they are compiled once, and each evaluation visits Python.

    Args:
        loss: `loss(parameters, data)`.
        parameters: where to start, a pytree of floating arrays.
        data: what the loss reads.
        num_steps: how many steps to take at most.
        show: called after each step with its number and the loss.
    """
    flat, restore = ravel_pytree(parameters)

    @eqx.filter_jit
    def evaluated(flat: Float[Array, "parameter"], data: PyTree) -> tuple[Array, Array]:
        return jax.value_and_grad(lambda flat: loss(restore(flat), data))(flat)

    losses: list[float] = []
    largest, skipped = 0.0, 0

    def target(at: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal largest, skipped
        value, slope = to_hosts(evaluated(jnp.asarray(at, flat.dtype), data))
        found, slope = float(value), np.asarray(slope, np.float64)
        if np.isfinite(found) and np.all(np.isfinite(slope)):
            largest = max(largest, abs(found))
            return found, slope
        # A wall, finite so that the search along the line can interpolate its way back from it.
        skipped += 1
        return 1e3 * (1.0 + largest), np.zeros_like(slope)

    def after(intermediate_result: OptimizeResult) -> None:
        losses.append(float(intermediate_result.fun))
        if show is not None:
            show(len(losses), losses[-1])

    start = np.asarray(flat, np.float64)
    if not np.isfinite(float(evaluated(flat, data)[0])):
        return Minimum(parameters, float("inf"), np.zeros(0), 1, "diverged")
    precision = ROUNDING * float(jnp.finfo(flat.dtype).eps)
    options = {"maxiter": num_steps, "maxfun": 20 * num_steps, "ftol": precision, "gtol": 0.0}
    found = minimize(target, start, jac=True, method="L-BFGS-B", callback=after, options=options)
    return Minimum(
        restore(jnp.asarray(found.x, flat.dtype)),
        float(found.fun),
        np.asarray(losses),
        skipped,
        "finished" if len(losses) >= num_steps else "stopped early",
    )
