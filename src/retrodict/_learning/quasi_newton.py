"""L-BFGS on the host, for exact losses that are costly to compile and cheap to evaluate.

The loss of a state-space model has several minima: a scale may converge to zero, where the loss is
flat, although a larger scale explains the data far better together with others. The search
therefore starts from several points, takes a few steps from each, and continues with the best.
Scales that end at zero are restarted from the interior. All of it uses one compiled program.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._arrays import Scalar
from retrodict._learning.coordinates import ModelCoordinates, coordinates_of
from retrodict._learning.train import TrainingStatus
from retrodict._model import UNBOUNDED
from retrodict.distributed import to_hosts

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

ROUNDING = 10.0
"""A step is progress if it lowers the loss by more than this many rounding errors of the loss."""

NO_GAIN = 1e-7
"""A step is progress if it lowers the whole loss by more than this, in nats."""

SETTLED = 1e-5
"""A restarted descent continues if it lowered the whole loss by this much, in nats."""

SMALL = 0.1
"""A scale below this fraction of the largest scale may be converging to zero."""

SCREENING_STEPS = 8
"""Each start takes this many steps before the best two continue."""

RESTART_STEPS = 12
"""A restart from the interior takes this many steps before it is compared."""

MAX_ROUNDS = 3
"""Parameters at an edge are restarted at most this many times."""

APART = 30.0
"""A start lowers all scales but one by this factor."""

NEGLIGIBLE = 0.5
"""A scale is at the edge of zero if a tenfold scale costs at most this, in nats."""

NOTICEABLE = 0.02
"""A raised scale is in the interior if it costs more than this per row, in nats."""

LOWEST = 1e-4
"""A scale is raised to this fraction of the largest scale at least."""

LOGIT = 2.0
"""Bounded parameters start at this logistic coordinate, on both sides of the middle."""

MAX_PROBES = 40
"""Up to this number, free parameters are probed one by one."""


class Minimum(NamedTuple):
    """The result of `minimise`.

    Attributes:
        parameters: the best parameters.
        value: their loss.
        losses: the loss after each step that led to them.
        num_skipped: the number of points with a non-finite loss or gradient.
        status: `"converged"` if no step decreases the loss, `"finished"` if all steps were taken,
            `"stopped early"` if the line search failed before that, and `"diverged"` if the loss or
            its squared gradient is non-finite at the start.
    """

    parameters: PyTree
    value: float
    losses: Float[np.ndarray, "step"]
    num_skipped: int
    status: TrainingStatus


def minimise(
    loss: Callable[[PyTree, PyTree], Scalar],
    model: Any,
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
    search = _Search(loss, model, data, share, show)
    z = search.start()
    value, slope = search(z)
    if search.skipped:
        parameters = eqx.filter(model, eqx.is_inexact_array)
        return Minimum(parameters, float("inf"), np.zeros(0), 1, "diverged")
    search.unit = search.units(z, slope)
    z = np.where(search.is_free, z / search.unit, z)
    best, several = _Descent(z, value, [], "finished"), num_starts != 1
    if several and num_steps > SCREENING_STEPS:
        starts = [z, *search.starts(z, value)][:num_starts]
        screened = sorted((search.descend(each, SCREENING_STEPS) for each in starts), key=LOSS)
        again = [search.descend(each.z, SCREENING_STEPS).after(each) for each in screened[:2]]
        best = min(again, key=LOSS)
    best = search.converge(best, num_steps)
    for _ in range(MAX_ROUNDS if several and best.status == "converged" else 0):
        raised = search.away_from_edges(best.z, best.value)
        together = [np.max(raised, axis=0)] if len(raised) > 1 else []
        tried = [search.descend(each, RESTART_STEPS) for each in [*together, *raised]]
        winner = min(tried, key=LOSS, default=best)
        if winner.value >= best.value - 1e-3 * share:
            break
        best = search.converge(winner, num_steps)
    parameters, losses = search.restore(best.z), np.asarray(best.losses)
    return Minimum(parameters, best.value, losses, search.skipped, best.status)


class _Descent(NamedTuple):
    """The end of a descent: a point, its loss, the losses that led to it, and the status."""

    z: Float[np.ndarray, "parameter"]
    value: float
    losses: list[float]
    status: TrainingStatus

    def after(self, before: "_Descent") -> "_Descent":
        """Return the same with an earlier descent in front; the earlier point if it is better."""
        if before.value < self.value:
            return before._replace(status=self.status)
        return self._replace(losses=before.losses + self.losses)


LOSS = attrgetter("value")
"""The key by which descents are compared."""


class _Search:
    """A loss on the host as a function of coordinates z without units, and moves between points.

    A scale v has the coordinate log v, so that a change of units is a shift. A bounded parameter
    keeps its logistic coordinate. Other entries are multiples of a unit, determined by probing.

    Attributes:
        is_scale: which parameters are scales.
        is_free: which parameters are neither scales nor bounded.
        unit: the unit of each free entry.
        skipped: the number of points with a non-finite loss or gradient.
    """

    def __init__(
        self,
        loss: Callable[[PyTree, PyTree], Scalar],
        model: Any,
        data: PyTree,
        share: float,
        show: Callable[[int, float], None] | None,
    ):
        self._loss, self._data, self._share, self._show = loss, data, share, show
        coordinates = self._coordinates = coordinates_of(model)
        self._dtype = coordinates.theta().dtype
        self._precision = ROUNDING * float(jnp.finfo(self._dtype).eps)
        self.is_scale = coordinates.is_scale
        self.is_free = np.array([edge == UNBOUNDED for edge in coordinates.edges], bool)
        # The index of the array of each parameter, and its index along the last axis of it.
        places = [np.asarray(place) for place in coordinates.places]
        self._array = np.repeat(np.arange(len(places)), [place.size for place in places])
        leaves = jax.tree.leaves(eqx.filter(coordinates.model, eqx.is_inexact_array))
        widths = [leaf.shape[-1] if leaf.ndim else 1 for leaf in leaves]
        rows = [place % width for place, width in zip(places, widths, strict=True)]
        self._row = np.concatenate([*rows, np.zeros(0)]).astype(int)
        self.unit = np.ones(len(self._array))
        self._largest, self.skipped = 0.0, 0

    def start(self) -> Float[np.ndarray, "parameter"]:
        """Return the coordinates of the model, with units of 1."""
        theta = np.asarray(self._coordinates.theta(), np.float64)
        # log softplus(θ), which is θ itself far to the left.
        log_scale = np.where(
            theta < -30.0, theta, np.log(np.logaddexp(0.0, np.maximum(theta, -30.0)))
        )
        return np.where(self.is_scale, log_scale, theta)

    def restore(self, z: np.ndarray) -> PyTree:
        """Return the floating arrays of the model at some coordinates."""
        return _parameters(self._coordinates, jnp.asarray(z), jnp.asarray(self.unit))

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        at, unit = (jnp.asarray(part, self._dtype) for part in (z, self.unit))
        result = to_hosts(_evaluate(self._loss, self._coordinates, at, unit, self._data))
        value, slope = float(result[0]), np.asarray(result[1], np.float64)
        # L-BFGS takes products of gradients: where they overflow, it returns NaN or its start.
        with np.errstate(over="ignore", invalid="ignore"):
            products = slope @ slope
        if np.isfinite(value) and np.isfinite(products):
            self._largest = max(self._largest, abs(value))
            return value, slope
        # A large finite value, from which the line search can interpolate its way back.
        self.skipped += 1
        return 1e3 * (1.0 + self._largest), np.zeros_like(slope)

    def descend(self, z: np.ndarray, most: int) -> _Descent:
        """Take at most `most` steps of L-BFGS."""
        from scipy.optimize import minimize  # here, since this import takes 0.2 s

        losses: list[float] = []

        def after(intermediate_result: "OptimizeResult") -> None:
            losses.append(float(intermediate_result.fun))
            if self._show is not None:
                self._show(len(losses), losses[-1])

        # scipy compares the gain of a step with the loss, and at least with 1.
        size = max(1.0, self._largest)
        options = {
            "maxiter": most,
            "maxfun": 20 * most,
            "ftol": max(self._precision, NO_GAIN * self._share / size),
            "gtol": 0.0,
        }
        result = minimize(self, z, jac=True, method="L-BFGS-B", callback=after, options=options)
        steepest = float(np.max(np.abs(result.jac), initial=0.0))
        # Coordinates have no units: a gradient g leaves a gain of about g².
        is_end = result.success or steepest**2 < max(self._precision, NO_GAIN * self._share)
        status: TrainingStatus = (
            "finished" if len(losses) >= most else "converged" if is_end else "stopped early"
        )
        return _Descent(result.x, float(result.fun), losses, status)

    def converge(self, descent: _Descent, num_steps: int) -> _Descent:
        """Descend to convergence, and further if L-BFGS is slow along a scale that goes to zero."""
        for _ in range(MAX_ROUNDS):
            left = num_steps - len(descent.losses)
            if left < 1:
                return descent
            before = descent.value
            descent = self.descend(descent.z, left).after(descent)
            lower = self._with_smaller_scales(descent)
            slow = lower.value < descent.value or before - descent.value >= SETTLED * self._share
            if descent.status != "converged" or not slow:
                return descent
            descent = lower
        return descent

    def units(self, z: np.ndarray, slope: np.ndarray) -> Float[np.ndarray, "parameter"]:
        """Return the step of each free entry that changes the loss by about ½: 1 / √curvature.

        Curvatures are differences of gradients over a step that changes the loss by about 1.
        """
        unit = np.ones(len(z))
        for direction in self._directions(slope):
            along = float(slope @ direction)
            step = 1.0 / abs(along) if along else float(np.max(np.abs(z * direction))) or 1.0
            curvature = 0.0
            for _ in range(8):
                skipped = self.skipped
                moved = self(z + step * direction)[1]
                if self.skipped > skipped or not np.isfinite(step):
                    self.skipped = skipped
                    step = 1e-3 * step if np.isfinite(step) else 1.0
                    continue
                curvature = float((moved - slope) @ direction) / step
                if abs(curvature) ** 0.5 * step <= 2.0:  # the square of a step may overflow
                    break
                step = (2.0 / abs(curvature)) ** 0.5
            size = abs(curvature) ** -0.5 if curvature else step
            unit[direction != 0] = size if np.isfinite(size) and size > 0 else 1.0
        return unit

    def _directions(self, slope: np.ndarray) -> list[np.ndarray]:
        """Return the directions to probe: each free entry, or the gradient of arrays if many."""
        free = np.flatnonzero(self.is_free)
        if len(free) <= MAX_PROBES:
            return list(np.eye(len(slope))[free])
        slope = np.where(slope == 0, 1.0, slope)
        along = [np.where(inside, slope, 0.0) for inside in self._by_array(self.is_free)]
        return [each / np.linalg.norm(each) for each in along]

    def _by_array(self, parameters: Bool[np.ndarray, "parameter"]) -> list[np.ndarray]:
        """Return some parameters array by array, as masks."""
        arrays = np.unique(self._array[parameters])
        return [parameters & (self._array == array) for array in arrays]

    def starts(self, z: np.ndarray, value: float) -> list[np.ndarray]:
        """Return starts in which one scale is large, or a bounded parameter is off its middle."""
        raised = self.away_from_edges(z, value)
        centre = np.max([z, *raised], axis=0)
        starts = [centre] if raised else []
        scales = self._by_array(self.is_scale)
        for large in scales if len(scales) > 1 else ():
            starts.append(np.where(self.is_scale & ~large, centre - np.log(APART), centre))
        for inside in self._by_array(~self.is_scale & ~self.is_free):
            for side in (LOGIT, -LOGIT):
                # Move the first of the partial autocorrelations.
                starts.append(np.where(inside, np.where(self._row == 0, side, 0.0), centre))
        return starts

    def _small(self, z: np.ndarray) -> list[np.ndarray]:
        """Return, array by array, the scales that may be converging to zero."""
        largest = np.max(z, initial=-np.inf, where=self.is_scale)
        return self._by_array(self.is_scale & (z < largest + np.log(SMALL)))

    def _with_smaller_scales(self, descent: _Descent) -> _Descent:
        """Return the same point with small scales much smaller, as far as that is better."""
        lowered = descent
        for inside in self._small(descent.z):
            at = np.where(inside, lowered.z - np.log(APART), lowered.z)
            if (moved := self(at)[0]) < lowered.value:
                lowered = lowered._replace(z=at, value=moved)
        return lowered

    def away_from_edges(self, z: np.ndarray, value: float) -> list[np.ndarray]:
        """Return, for each array with scales at the edge of zero, the point with these raised.

        They are raised to where the loss begins to rise, which depends on the data alone.
        """
        points = []
        for inside in self._small(z):
            tenfold = np.where(inside, z + np.log(10.0), z)
            if self(tenfold)[0] - value > NEGLIGIBLE * self._share:
                continue
            lowest = np.max(z[self.is_scale]) + np.log(LOWEST)
            at = np.where(inside, np.maximum(z, lowest), z)
            for _ in range(12):
                if self(at)[0] - value > max(NOTICEABLE, 2.0 * self._share):
                    break
                at = np.where(inside, at + np.log(10.0), at)
            points.append(at)
        return points


@eqx.filter_jit
def _parameters(
    coordinates: ModelCoordinates, z: Float[Array, "parameter"], unit: Float[Array, "parameter"]
) -> PyTree:
    """Return the floating arrays of the model at the coordinates z of `_Search`."""
    log_scale = jnp.where(coordinates.is_scale, z, 0.0)
    # log(exp(v) − 1) of v = exp(z), which is z itself where v is below rounding.
    scale = jnp.exp(jnp.maximum(log_scale, -30.0))
    theta = jnp.where(log_scale < -30.0, log_scale, scale + jnp.log(-jnp.expm1(-scale)))
    theta = jnp.where(coordinates.is_scale, theta, z * unit)
    return eqx.filter(coordinates.model_at(theta), eqx.is_inexact_array)


@eqx.filter_jit
def _evaluate(
    loss: Callable[[PyTree, PyTree], Scalar],
    coordinates: ModelCoordinates,
    z: Float[Array, "parameter"],
    unit: Float[Array, "parameter"],
    data: PyTree,
) -> tuple[Scalar, Float[Array, "parameter"]]:
    """Return the loss at some coordinates and its gradient.

    The model is an argument and not a constant, so that a program is reused for other values.
    """
    return jax.value_and_grad(lambda z: loss(_parameters(coordinates, z, unit), data))(z)
