"""L-BFGS on the host, for exact losses that are costly to compile and cheap to evaluate.

The loss of a state-space model has several minima: a scale may converge to zero, where the loss is
flat, although a larger scale explains the data far better together with others. The search
therefore starts from several points, takes a few steps from each, and continues with the best.
Scales that end at zero are restarted from the interior. All of it uses one compiled program.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree
from scipy.optimize import OptimizeResult, minimize

from retrodict._learning.coordinates import Coordinates, coordinates_of
from retrodict._learning.train import Status
from retrodict._model import StateSpaceModel
from retrodict._types import Scalar
from retrodict.distributed import to_hosts

ROUNDING = 10.0
"""The number of rounding errors of the loss from which on a step is progress."""

NO_GAIN = 1e-7
"""The gain of a step, in nats of the whole loss, from which on it is progress."""

SETTLED = 1e-5
"""The gain in nats from which on a restarted descent continues."""

SMALL = 0.1
"""The fraction of the largest scale below which a scale may be converging to zero."""

SCREENING_STEPS = 8
"""The number of steps from each start before the best continues."""

RESTART_STEPS = 12
"""The number of steps of a restart from the interior."""

MAX_ROUNDS = 3
"""The number of rounds of restarts of parameters at an edge."""

APART = 30.0
"""The factor by which a start lowers all scales but one."""

NEGLIGIBLE = 0.5
"""The cost in nats of a tenfold scale below which the scale is at the edge of zero."""

NOTICEABLE = 0.02
"""The cost per row at which a raised scale is in the interior."""

LOWEST = 1e-4
"""The fraction of the largest scale from which on small scales are raised."""

LOGIT = 2.0
"""The logistic coordinate of the starts of bounded parameters, on both sides of the middle."""

MAX_PROBES = 40
"""The largest number of free parameters that are probed one by one."""


class Minimum(NamedTuple):
    """The result of `minimise`.

    Attributes:
        parameters: the best parameters.
        value: their loss.
        losses: the loss after each step that led to them.
        num_skipped: the number of points with a non-finite loss or gradient.
        status: `"converged"` if no step decreases the loss, `"finished"` if all steps were taken,
            `"stopped early"` if the line search failed before that, and `"diverged"` if the loss is
            non-finite at the start.
    """

    parameters: PyTree
    value: float
    losses: Float[np.ndarray, "step"]
    num_skipped: int
    status: Status


class Chart(eqx.Module):
    """The learned parameters as a vector z of coordinates without units.

    A scale v has the coordinate log v, so that a change of units is a shift. A bounded parameter
    keeps its logistic coordinate. Other entries are multiples of a unit, determined by probing.

    Attributes:
        coordinates: the learned parameters as an unconstrained vector θ.
        is_scale: which parameters are scales.
        is_free: which parameters are neither scales nor bounded.
        array: the index of the array of each parameter.
        row: the index of each parameter along the last axis of its array.
    """

    coordinates: Coordinates
    is_scale: Bool[np.ndarray, "parameter"]
    is_free: Bool[np.ndarray, "parameter"]
    array: Int[np.ndarray, "parameter"]
    row: Int[np.ndarray, "parameter"]

    def start(self) -> Float[np.ndarray, "parameter"]:
        """Return the coordinates of the model, with units of 1."""
        theta = np.asarray(self.coordinates.theta(), np.float64)
        # log softplus(θ), which is θ itself far to the left.
        log_scale = np.where(
            theta < -30.0, theta, np.log(np.logaddexp(0.0, np.maximum(theta, -30.0)))
        )
        return np.where(self.is_scale, log_scale, theta)

    def parameters(self, z: Float[Array, "parameter"], unit: Float[Array, "parameter"]) -> PyTree:
        """Return the floating arrays of the model at these coordinates."""
        log_scale = jnp.where(self.is_scale, z, 0.0)
        # log(exp(v) − 1) of v = exp(z), which is z itself where v is below rounding.
        scale = jnp.exp(jnp.maximum(log_scale, -30.0))
        theta = jnp.where(log_scale < -30.0, log_scale, scale + jnp.log(-jnp.expm1(-scale)))
        theta = jnp.where(self.is_scale, theta, z * unit)
        return eqx.filter(self.coordinates.model_at(theta), eqx.is_inexact_array)


def chart_of(model: StateSpaceModel) -> Chart:
    """Return the chart of the parameters that `fit_evidence` learns."""
    coordinates = coordinates_of(model)
    places = [np.asarray(place) for place in coordinates.places]
    leaves = jax.tree.leaves(eqx.filter(coordinates.model, eqx.is_inexact_array))
    widths = [leaf.shape[-1] if leaf.ndim else 1 for leaf in leaves]
    rows = [place % width for place, width in zip(places, widths, strict=True)]
    return Chart(
        coordinates,
        np.array([edge == (0.0, None) for edge in coordinates.edges], bool),
        np.array([edge == (None, None) for edge in coordinates.edges], bool),
        np.repeat(np.arange(len(places)), [place.size for place in places]),
        np.concatenate([*rows, np.zeros(0)]).astype(int),
    )


@eqx.filter_jit
def _evaluate(
    loss: Callable[[PyTree, PyTree], Scalar], chart: Chart, z: Array, unit: Array, data: PyTree
) -> tuple[Scalar, Float[Array, "parameter"]]:
    """Return the loss at some coordinates and its gradient.

    The chart is an argument and not a constant, so that a program is reused for other values.
    """
    return jax.value_and_grad(lambda z: loss(chart.parameters(z, unit), data))(z)


class _Descent(NamedTuple):
    """The end of a descent: a point, its loss, the losses that led to it, and the status."""

    z: Float[np.ndarray, "parameter"]
    value: float
    losses: list[float]
    status: Status

    def after(self, before: "_Descent") -> "_Descent":
        """Return the same with an earlier descent in front; the earlier point if it is better."""
        if before.value < self.value:
            return before._replace(status=self.status)
        return self._replace(losses=before.losses + self.losses)


class _Loss:
    """A loss as a function of coordinates on the host, which counts non-finite values."""

    def __init__(self, loss: Callable[[PyTree, PyTree], Scalar], chart: Chart, data: PyTree):
        self._loss, self._chart, self._data = loss, chart, data
        self.dtype = chart.coordinates.theta().dtype
        self.unit = np.ones(len(chart.is_scale))
        self.largest, self.skipped = 0.0, 0

    def restore(self, z: np.ndarray) -> PyTree:
        """Return the floating arrays of the model at some coordinates."""
        return self._chart.parameters(jnp.asarray(z), jnp.asarray(self.unit))

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        at, unit = (jnp.asarray(part, self.dtype) for part in (z, self.unit))
        result = to_hosts(_evaluate(self._loss, self._chart, at, unit, self._data))
        value, slope = float(result[0]), np.asarray(result[1], np.float64)
        if np.isfinite(value) and np.all(np.isfinite(slope)):
            self.largest = max(self.largest, abs(value))
            return value, slope
        # A large finite value, from which the line search can interpolate its way back.
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
    """Minimise a loss by L-BFGS until convergence, from several starts.

    `optax.lbfgs` contains the loss and its gradient three times in one program, which takes three
    times as long to compile. Here they are compiled once, and called from Python.

    Args:
        loss: `loss(parameters, data)`.
        model: the model whose floating arrays are the parameters, with positive scales as
            parameters; the first start.
        data: the data of the loss.
        num_steps: the largest number of steps of the best descent.
        share: the value of one nat of the whole loss, in units of the loss.
        num_starts: the number of starts; by default two or three per array.
        show: called after each step with its number and the loss.
    """
    chart = chart_of(model)
    target = _Loss(loss, chart, data)
    z = chart.start()
    value, slope = target(z)
    if target.skipped:
        parameters = eqx.filter(model, eqx.is_inexact_array)
        return Minimum(parameters, float("inf"), np.zeros(0), 1, "diverged")
    precision = ROUNDING * float(jnp.finfo(target.dtype).eps)

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
        result = minimize(target, z, jac=True, method="L-BFGS-B", callback=after, options=options)
        is_end = result.success or float(np.max(np.abs(result.jac), initial=0.0)) < precision**0.5
        status: Status = (
            "finished" if len(losses) >= most else "converged" if is_end else "stopped early"
        )
        return _Descent(result.x, float(result.fun), losses, status)

    target.unit = _units(target, chart, z, slope)
    z = np.where(chart.is_free, z / target.unit, z)
    best = _Descent(z, value, [], "finished")
    if num_starts != 1 and num_steps > SCREENING_STEPS:
        starts = [z, *_starts(target, chart, z, value, share)][:num_starts]
        screened = sorted((descend(start, SCREENING_STEPS) for start in starts), key=_by_value)
        again = [descend(each.z, SCREENING_STEPS).after(each) for each in screened[:2]]
        best = min(again, key=_by_value)

    def settle(descent: _Descent) -> _Descent:
        """Descend to convergence, and further if L-BFGS is slow along a scale that goes to zero."""
        for _ in range(MAX_ROUNDS):
            left = num_steps - len(descent.losses)
            if left < 1:
                return descent
            before = descent.value
            descent = descend(descent.z, left).after(descent)
            lower = _lowered(target, chart, descent.z, descent.value)
            if descent.status != "converged" or (lower is None and before - descent.value < enough):
                return descent
            descent = descent if lower is None else descent._replace(z=lower[0], value=lower[1])
        return descent

    enough = SETTLED * share
    best = settle(best)
    for _ in range(MAX_ROUNDS if num_starts != 1 and best.status == "converged" else 0):
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
    """Return the step of each free entry that changes the loss by about ½: 1 / √curvature.

    Curvatures are differences of gradients over a step that changes the loss by about 1.
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
    """Yield the directions to probe: each free entry, or the gradient of each array if many."""
    free = np.flatnonzero(chart.is_free)
    if len(free) <= MAX_PROBES:
        yield from np.eye(len(slope))[free]
        return
    for array in np.unique(chart.array[free]):
        inside = chart.is_free & (chart.array == array)
        along = np.where(inside, np.where(slope == 0, 1.0, slope), 0.0)
        yield along / np.linalg.norm(along)


def _starts(
    target: _Loss, chart: Chart, z: np.ndarray, value: float, share: float
) -> list[np.ndarray]:
    """Return starts in which one scale is large, or a bounded parameter is off its middle."""
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
            # Move the first of the partial autocorrelations.
            starts.append(np.where(inside, np.where(chart.row == 0, side, 0.0), centre))
    return starts


def _from_interior(
    target: _Loss, chart: Chart, z: np.ndarray, value: float, share: float
) -> Sequence[np.ndarray]:
    """Return the point with scales at the edge of zero raised: all of them, and one by one."""
    raised = _raised(target, chart, z, value, share)
    if len(raised) < 2:
        return raised
    return [np.max(raised, axis=0), *raised]


def _lowered(
    target: _Loss, chart: Chart, z: np.ndarray, value: float
) -> tuple[np.ndarray, float] | None:
    """Return the point with small scales much smaller and its loss, if that is better."""
    if not chart.is_scale.any():
        return None
    lowered, least = None, value
    small = chart.is_scale & (z < np.max(z[chart.is_scale]) + np.log(SMALL))
    for array in np.unique(chart.array[small]):
        inside = small & (chart.array == array)
        base = z if lowered is None else lowered
        at = np.where(inside, base - np.log(APART), base)
        if (moved := target(at)[0]) < least:
            lowered, least = at, moved
    return None if lowered is None else (lowered, least)


def _raised(
    target: _Loss, chart: Chart, z: np.ndarray, value: float, share: float
) -> list[np.ndarray]:
    """Return, for each array with scales at the edge of zero, the point with these raised.

    They are raised to where the loss begins to rise, which depends on the data alone.
    """
    if not chart.is_scale.any():
        return []
    largest = np.max(z[chart.is_scale])
    small = chart.is_scale & (z < largest + np.log(SMALL))
    points = []
    for array in np.unique(chart.array[small]):
        inside = small & (chart.array == array)
        if target(np.where(inside, z + np.log(10.0), z))[0] - value > NEGLIGIBLE * share:
            continue
        at = np.where(inside, np.maximum(z, largest + np.log(LOWEST)), z)
        for _ in range(12):
            if target(at)[0] - value > max(NOTICEABLE, 2.0 * share):
                break
            at = np.where(inside, at + np.log(10.0), at)
        points.append(at)
    return points
