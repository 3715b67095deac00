"""L-BFGS on the host, for exact losses that are costly to compile and cheap to evaluate.

The loss of a state-space model has several minima: a scale may be driven to zero, where the loss is
flat, although a larger one explains the data far better together with others. So the search starts
from several points, follows each for a few steps, and goes on with the best; and what ends at the
edge of zero is started again from the interior. All of it uses one compiled program.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree
from scipy.optimize import OptimizeResult, minimize

from retrodict._learning.train import Status
from retrodict._model import StateSpaceModel
from retrodict._parameters import (
    AbstractParameter,
    Bounded,
    Frozen,
    Positive,
    PositiveTril,
    StationaryCoefficients,
)
from retrodict._types import Scalar
from retrodict.distributed import to_hosts

ROUNDING = 10.0
"""From how many rounding errors of the loss on a step counts as progress."""

NO_GAIN = 1e-7
"""A step that gains less than this, in units of the whole loss, is no progress either."""

SETTLED = 1e-5
"""A descent that was begun anew and gains less than this, in nats, is at its end."""

SMALL = 0.1
"""Scales below this share of the largest may be on their way to the edge of zero."""

SCREENING_STEPS = 8
"""Steps from each start before the best goes on."""

RESTART_STEPS = 12
"""Steps from the interior before a restart is given up."""

MOST_ROUNDS = 3
"""How often parameters at an edge are started again."""

APART = 30.0
"""By which factor a start sets the other scales below the one that it lets explain the data."""

UNFELT = 0.5
"""A scale that may be ten times as large at a cost below this is at the edge of zero."""

FELT = 0.02
"""A scale is of the size of the interior where it costs this much per unit of the loss's share."""

LEAST = 1e-4
"""From which share of the largest on scales are raised to find where the loss rises."""

LOGIT = 2.0
"""Starts of bounded parameters, on either side of the middle, on the logistic scale."""

MOST_PROBES = 40
"""Up to how many parameters without a natural unit are probed one by one."""


class Minimum(NamedTuple):
    """Where `minimise` ended.

    Attributes:
        parameters: the best that were found.
        value: the loss there.
        losses: the loss after each step on the way there.
        num_skipped: at how many points loss or gradient was not finite.
        status: how it ended: `"converged"` if no step makes the loss smaller, `"finished"` if all
            steps were taken, `"stopped early"` if the search along a line failed before that, and
            `"diverged"` if the loss is not finite at the start.
    """

    parameters: PyTree
    value: float
    losses: Float[np.ndarray, "step"]
    num_skipped: int
    status: Status


class Chart(eqx.Module):
    """The learned entries of parameters as one vector z, in coordinates without units.

    A scale v has the coordinate log v, so that other units of the data shift it; what is bounded
    keeps its logistic coordinate; other entries are multiples of `unit`, which is found by probing.

    Attributes:
        flat: all parameters as one vector.
        place: which entries of it are learned.
        is_scale: which of those are scales.
        is_free: which of those are neither scales nor bounded.
        array: the number of the array that each belongs to.
        row: the place of each in its array, counted along the last axis.
        unit: one for each, 1 but for free entries.
    """

    flat: Float[Array, "entry"]
    place: Int[np.ndarray, "parameter"]
    is_scale: Bool[np.ndarray, "parameter"]
    is_free: Bool[np.ndarray, "parameter"]
    array: Int[np.ndarray, "parameter"]
    row: Int[np.ndarray, "parameter"]

    def start(self) -> Float[np.ndarray, "parameter"]:
        """The coordinates of the parameters themselves, with units of 1."""
        raw = np.asarray(self.flat, np.float64)[self.place]
        # log softplus(raw), which is raw itself far to the left.
        log_scale = np.where(raw < -30.0, raw, np.log(np.logaddexp(0.0, np.maximum(raw, -30.0))))
        return np.where(self.is_scale, log_scale, raw)

    def entries(
        self,
        flat: Float[Array, "entry"],
        z: Float[Array, "parameter"],
        unit: Float[Array, "parameter"],
    ) -> Float[Array, "entry"]:
        """All parameters as one vector, with those that are learned at these coordinates."""
        log_scale = jnp.where(self.is_scale, z, 0.0)
        # log(exp(v) − 1) of v = exp(z), which is z itself where v is below rounding.
        scale = jnp.exp(jnp.maximum(log_scale, -30.0))
        raw = jnp.where(log_scale < -30.0, log_scale, scale + jnp.log(-jnp.expm1(-scale)))
        moved = jnp.where(self.is_scale, raw, z * unit)
        return flat.at[self.place].set(moved.astype(flat.dtype))


def chart_of(model: StateSpaceModel) -> Chart:
    """The chart of all floating arrays of a model that are not frozen."""
    constrained = (Positive, PositiveTril, Bounded, StationaryCoefficients)
    is_leaf = lambda node: isinstance(node, (Frozen, *constrained))  # noqa: E731
    kinds: list[np.ndarray] = []

    def kind(node: object, leaf: Array) -> np.ndarray:
        """0 for what is not learned, 1 for scales, 2 for what is bounded, 3 for all else."""
        if isinstance(node, Frozen):
            return np.zeros(leaf.shape, int)
        if isinstance(node, PositiveTril):
            return np.tril(np.full(leaf.shape, 3), -1) + np.eye(leaf.shape[0], dtype=int)
        code = 1 if isinstance(node, Positive) else 2 if isinstance(node, AbstractParameter) else 3
        return np.full(leaf.shape, code)

    for node in jax.tree.leaves(model, is_leaf=is_leaf):
        kinds += [kind(node, x) for x in jax.tree.leaves(node) if eqx.is_inexact_array(x)]
    flat = ravel_pytree(eqx.filter(model, eqx.is_inexact_array))[0]
    code = np.concatenate([each.ravel() for each in kinds]) if kinds else np.zeros(0, int)
    array = np.repeat(np.arange(len(kinds)), [each.size for each in kinds])
    row = [np.arange(each.size) % each.shape[-1] if each.ndim else np.zeros(1) for each in kinds]
    place = np.flatnonzero(code)
    return Chart(
        flat,
        place,
        code[place] == 1,
        code[place] == 3,
        array[place],
        np.concatenate(row)[place].astype(int) if kinds else np.zeros(0, int),
    )


class _Descent(NamedTuple):
    """A point, its loss, the losses on the way and whether L-BFGS ended by itself."""

    z: Float[np.ndarray, "parameter"]
    value: float
    losses: list[float]
    status: Status

    def after(self, before: "_Descent") -> "_Descent":
        """The same with the way before it; the earlier point if that was better."""
        if before.value < self.value:
            return before._replace(status=self.status)
        return self._replace(losses=before.losses + self.losses)


class _Loss:
    """A loss as a function of coordinates on the host, which counts what is not finite."""

    def __init__(
        self,
        loss: Callable[[PyTree, PyTree], Scalar],
        parameters: PyTree,
        chart: Chart,
        data: PyTree,
    ):
        flat, restore = ravel_pytree(parameters)

        @eqx.filter_jit
        def evaluated(flat: Array, z: Array, unit: Array, data: PyTree) -> tuple[Array, Array]:
            # An argument and not a constant: programs are found again for other values.
            return jax.value_and_grad(lambda z: loss(restore(chart.entries(flat, z, unit)), data))(
                z
            )

        self._evaluated = lambda z, unit: evaluated(flat, z, unit, data)
        self._dtype = flat.dtype
        self.restore = lambda z: restore(
            chart.entries(flat, jnp.asarray(z), jnp.asarray(self.unit))
        )
        self.unit = np.ones(len(chart.place))
        self.largest, self.skipped = 0.0, 0

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        at, unit = (jnp.asarray(part, self._dtype) for part in (z, self.unit))
        value, slope = to_hosts(self._evaluated(at, unit))
        found, slope = float(value), np.asarray(slope, np.float64)
        if np.isfinite(found) and np.all(np.isfinite(slope)):
            self.largest = max(self.largest, abs(found))
            return found, slope
        # A wall, finite so that the search along the line can interpolate its way back from it.
        self.skipped += 1
        return 1e3 * (1.0 + self.largest), np.zeros_like(slope)


def minimise(
    loss: Callable[[PyTree, PyTree], Scalar],
    model: StateSpaceModel,
    data: PyTree,
    *,
    num_steps: int,
    share: float = 1.0,
    num_starts: int | None = None,
    show: Callable[[int, float], None] | None = None,
) -> Minimum:
    """Descends a loss by L-BFGS until it no longer falls, from several starts.

    `optax.lbfgs` has the loss and its gradient three times in one program, which takes three times
    as long to compile; here they are compiled once, and each evaluation visits Python.

    Args:
        loss: `loss(parameters, data)`.
        model: the model whose floating arrays are the parameters, with scales as parameters that
            stay positive; the first start.
        data: what the loss reads.
        num_steps: how many steps to take at most on the way that ends best.
        share: what one nat of the whole loss is in units of the loss.
        num_starts: from how many starts; by default two or three for each array.
        show: called after each step with its number and the loss.
    """
    parameters = eqx.filter(model, eqx.is_inexact_array)
    chart = chart_of(model)
    target = _Loss(loss, parameters, chart, data)
    z = chart.start()
    value, slope = target(z)
    if target.skipped:
        return Minimum(parameters, float("inf"), np.zeros(0), 1, "diverged")
    precision = ROUNDING * float(jnp.finfo(chart.flat.dtype).eps)

    def descend(z: np.ndarray, most: int) -> _Descent:
        losses: list[float] = []

        def after(intermediate_result: OptimizeResult) -> None:
            losses.append(float(intermediate_result.fun))
            if show is not None:
                show(len(losses), losses[-1])

        # scipy compares the gain of a step with the loss, and at least with 1.
        size = max(1.0, target.largest)
        options = {
            "maxiter": most,
            "maxfun": 20 * most,
            "ftol": max(precision, NO_GAIN * share / size),
            "gtol": 0.0,
        }
        found = minimize(target, z, jac=True, method="L-BFGS-B", callback=after, options=options)
        is_end = found.success or float(np.max(np.abs(found.jac), initial=0.0)) < precision**0.5
        status: Status = (
            "finished" if len(losses) >= most else "converged" if is_end else "stopped early"
        )
        return _Descent(found.x, float(found.fun), losses, status)

    target.unit = _units(target, chart, z, slope)
    z = np.where(chart.is_free, z / target.unit, z)
    best = _Descent(z, value, [], "finished")
    if num_starts != 1 and num_steps > SCREENING_STEPS:
        starts = [z, *_starts(target, chart, z, value, share)][:num_starts]
        screened = sorted((descend(start, SCREENING_STEPS) for start in starts), key=_by_value)
        again = [descend(each.z, SCREENING_STEPS).after(each) for each in screened[:2]]
        best = min(again, key=_by_value)

    def settle(found: _Descent) -> _Descent:
        """Descend to the end, and beyond where L-BFGS creeps along a scale that goes to zero."""
        for _ in range(MOST_ROUNDS):
            left = num_steps - len(found.losses)
            if left < 1:
                return found
            before = found.value
            found = descend(found.z, left).after(found)
            lower = _lowered(target, chart, found.z, found.value)
            if found.status != "converged" or (lower is None and before - found.value < enough):
                return found
            found = found if lower is None else found._replace(z=lower[0], value=lower[1])
        return found

    enough = SETTLED * share
    best = settle(best)
    for _ in range(MOST_ROUNDS if num_starts != 1 and best.status == "converged" else 0):
        tried = [
            descend(start, RESTART_STEPS)
            for start in _from_interior(target, chart, best.z, best.value, share)
        ]
        winner = min(tried, key=_by_value, default=best)
        if winner.value >= best.value - 1e-3 * share:
            break
        best = settle(winner)
    return Minimum(
        target.restore(best.z), best.value, np.asarray(best.losses), target.skipped, best.status
    )


def _by_value(descent: _Descent) -> float:
    return descent.value


def _units(
    target: _Loss, chart: Chart, z: np.ndarray, slope: np.ndarray
) -> Float[np.ndarray, "parameter"]:
    """The size of a step of each free entry that changes the loss by about ½: 1 / √curvature.

    Curvatures are differences of gradients, over a step that costs about 1.
    """
    unit = np.ones(len(z))
    for direction in _directions(chart, slope):
        along = float(slope @ direction)
        step = 1.0 / abs(along) if along else float(np.max(np.abs(z * direction))) or 1.0
        curvature = 0.0
        for _ in range(8):
            skipped = target.skipped
            moved = target(z + step * direction)[1]
            if target.skipped > skipped or not np.isfinite(step):
                target.skipped = skipped
                step = 1e-3 * step if np.isfinite(step) else 1.0
                continue
            curvature = float((moved - slope) @ direction) / step
            if abs(curvature) * step**2 <= 4.0:
                break
            step = (2.0 / abs(curvature)) ** 0.5
        size = abs(curvature) ** -0.5 if curvature else step
        unit[direction != 0] = size if np.isfinite(size) and size > 0 else 1.0
    return unit


def _directions(chart: Chart, slope: np.ndarray) -> Iterator[np.ndarray]:
    """Along which free entries are probed: each, or if there are many each array's gradient."""
    free = np.flatnonzero(chart.is_free)
    if len(free) <= MOST_PROBES:
        yield from np.eye(len(slope))[free]
        return
    for array in np.unique(chart.array[free]):
        inside = chart.is_free & (chart.array == array)
        along = np.where(inside, np.where(slope == 0, 1.0, slope), 0.0)
        yield along / np.linalg.norm(along)


def _starts(
    target: _Loss, chart: Chart, z: np.ndarray, value: float, share: float
) -> list[np.ndarray]:
    """Starts that each let another scale explain the data, and that bend what is bounded."""
    centre = z
    for raised in _raised(target, chart, z, value, share):
        centre = np.maximum(centre, raised)
    starts = [] if centre is z else [centre]
    scales = np.unique(chart.array[chart.is_scale])
    for array in scales if len(scales) > 1 else ():
        others = chart.is_scale & (chart.array != array)
        starts.append(np.where(others, centre - np.log(APART), centre))
    bounded = ~chart.is_scale & ~chart.is_free
    for array in np.unique(chart.array[bounded]):
        inside = bounded & (chart.array == array)
        for side in (LOGIT, -LOGIT):
            # Of the partial autocorrelations of lags, the first.
            starts.append(np.where(inside, np.where(chart.row == 0, side, 0.0), centre))
    return starts


def _from_interior(
    target: _Loss, chart: Chart, z: np.ndarray, value: float, share: float
) -> Sequence[np.ndarray]:
    """The point with scales that are at the edge of zero raised: all of them, and one by one."""
    raised = _raised(target, chart, z, value, share)
    if len(raised) < 2:
        return raised
    return [np.max(raised, axis=0), *raised]


def _lowered(
    target: _Loss, chart: Chart, z: np.ndarray, value: float
) -> tuple[np.ndarray, float] | None:
    """The point with small scales much smaller, if that is better, and its loss."""
    if not chart.is_scale.any():
        return None
    found, least = None, value
    small = chart.is_scale & (z < np.max(z[chart.is_scale]) + np.log(SMALL))
    for array in np.unique(chart.array[small]):
        inside = small & (chart.array == array)
        base = z if found is None else found
        at = np.where(inside, base - np.log(APART), base)
        if (moved := target(at)[0]) < least:
            found, least = at, moved
    return None if found is None else (found, least)


def _raised(
    target: _Loss, chart: Chart, z: np.ndarray, value: float, share: float
) -> list[np.ndarray]:
    """For each array of scales with some at the edge of zero, the point with those raised.

    They are raised to where the loss begins to rise, which is a size of the data's own.
    """
    if not chart.is_scale.any():
        return []
    largest = np.max(z[chart.is_scale])
    small = chart.is_scale & (z < largest + np.log(SMALL))
    found = []
    for array in np.unique(chart.array[small]):
        inside = small & (chart.array == array)
        if target(np.where(inside, z + np.log(10.0), z))[0] - value > UNFELT * share:
            continue
        at = np.where(inside, np.maximum(z, largest + np.log(LEAST)), z)
        for _ in range(12):
            if target(at)[0] - value > max(FELT, 2.0 * share):
                break
            at = np.where(inside, at + np.log(10.0), at)
        found.append(at)
    return found
