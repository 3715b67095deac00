"""Tracking: nearly constant velocity, observed as positions or as range and bearing."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, check_count
from retrodict._model import (
    LOG_2PI,
    AbstractParameter,
    Diagonal,
    DistributionKernel,
    NonlinearGaussianKernel,
    StateSpaceModel,
    unwrap,
)
from retrodict.models._equations import (
    AbstractNamed,
    ConstantVelocity,
    diffuse,
    kernel_of,
    observed,
    positive,
)
from retrodict.models._registry import ready
from retrodict.models._start import PRIOR_WIDTH, Sample, differences, first, spread


def start_velocity(model: StateSpaceModel, sample: Sample) -> dict[str, Any]:
    """Return starting values for observed positions: scales from second differences."""
    speeds = spread(differences(sample.ys)) / sample.step
    widths = np.concatenate([spread(sample.ys), speeds])
    return _moving(sample.ys, sample.step) | {
        "obs_scale": 0.3 * spread(differences(sample.ys, 2)),
        "prior.scale_tril.std": PRIOR_WIDTH * widths,
    }


def start_range_bearing(model: StateSpaceModel, sample: Sample) -> dict[str, Any]:
    """Return starting values for range and bearing, from the positions that they determine."""
    emission: Any = model.emission
    sensor = np.asarray((emission.fn.fn if hasattr(emission.fn, "fn") else emission.fn).sensor)
    ranges, bearings = sample.ys[..., 0], sample.ys[..., 1]
    places = sensor + np.stack([ranges * np.cos(bearings), ranges * np.sin(bearings)], axis=-1)
    moves = differences(sample.ys, 2)
    moves[..., 1] = np.angle(np.exp(1j * moves[..., 1]))
    of_range, of_bearing = spread(moves)
    return _moving(places, sample.step) | {
        "range_scale": 0.3 * of_range,
        "bearing_scale": min(0.3 * of_bearing, 0.3),
        "prior.scale_tril.std": np.tile(spread(places), 2),
    }


def _moving(places: np.ndarray, step: float) -> dict[str, Any]:
    begin = first(places)
    return {
        # A second difference of positions moves by about the velocity's step, times Δ^{3/2}.
        "velocity_scale": 0.5 * float(np.mean(spread(differences(places, 2)))) / step**1.5,
        "prior.mean": np.concatenate([begin, np.zeros_like(begin)]),
    }


@ready("a target with nearly constant velocity, its position observed with noise", start_velocity)
def constant_velocity(
    *,
    dim: int = 2,
    irregular: bool = False,
    velocity_scale: Any = 1.0,
    obs_scale: Any = 1.0,
    prior_mean: Any = 0.0,
    prior_scale: Any = 1e3,
) -> StateSpaceModel:
    """Build a target with nearly constant velocity, whose position is observed with noise.

    The state is (p_1, ..., p_dim, v_1, ..., v_dim). Velocities are Brownian motions and positions
    their integrals, so that over a step Δ the noise of a pair (p, v) has full rank:

        Q = velocity_scale² [[Δ³/3, Δ²/2], [Δ²/2, Δ]],    y_t = p_t + obs_scale ε_t

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.constant_velocity(dim=2, obs_scale=0.5)
        >>> rd.models.state_names(model, ["x", "y"])
        ['x_position', 'y_position', 'x_velocity', 'y_velocity']
        >>> sorted(rd.models.named_parameters(model))
        ['obs_scale', 'velocity_scale']

    Args:
        dim: the dimension of the space, which is the number of columns.
        irregular: whether times are irregular; Δ is then the first input, and otherwise 1.
        velocity_scale: the starting value of the scale of steps of the velocity.
        obs_scale: the starting value of the scale of the noise.
        prior_mean: the mean of the first state; not learned.
        prior_scale: its scale, wide but finite; not learned.
    """
    dim = check_count(dim, "dim")
    equation = ConstantVelocity(positive(velocity_scale), kind="constant_velocity", dim=dim)
    prior = diffuse(prior_mean, prior_scale, 2 * dim)
    return observed(prior, kernel_of(equation, irregular), obs_scale, dim, np.eye(dim, 2 * dim))


class RangeBearingLaw(eqx.Module):
    """A range and a bearing with independent Gaussian noise, the bearing's residual wrapped.

    The density of a bearing is that of its residual taken to (−π, π], which integrates to one up to
    the mass that a Gaussian has beyond π: less than 1e-9 for noise below 0.5.

    Attributes:
        mean: (range, bearing).
        std: the standard deviations of the noise.
    """

    mean: Float[Array, "2"]
    std: Float[Array, "2"]

    @property
    def variance(self) -> Float[Array, "2"]:
        """The variances, for linearised smoothers."""
        return self.std**2

    def log_prob(self, value: Float[Array, "2"]) -> Float[Array, "2"]:
        """Return the log densities of range and bearing."""
        residual = value - self.mean
        residual = jnp.stack([residual[0], wrapped(residual[1])]) / self.std
        return -0.5 * (residual**2 + LOG_2PI) - jnp.log(self.std)

    def sample(self, key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape 2"]:
        """Draw a range, and a bearing in (−π, π]."""
        noise = jax.random.normal(key, (*sample_shape, 2), self.mean.dtype)
        shape = (1,) * len(sample_shape) + (2,)
        values = self.mean.reshape(shape) + self.std.reshape(shape) * noise
        return jnp.stack([values[..., 0], wrapped(values[..., 1])], axis=-1)


class RangeAndBearing(eqx.Module):
    """The function x ↦ (‖p − sensor‖, the angle of p − sensor) of the position p = (x_0, x_1).

    Attributes:
        sensor: the position of the sensor.
    """

    sensor: tuple[float, float] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "4"]) -> Float[Array, "2"]:
        """Return the range, and the bearing in (−π, π] from the first axis to the second."""
        across, along = x[0] - self.sensor[0], x[1] - self.sensor[1]
        return jnp.stack([jnp.sqrt(across**2 + along**2), jnp.arctan2(along, across)])


class WrappedRangeBearing(AbstractNamed):
    """The law of range and bearing given the state, as a `DistributionKernel` calls it.

    Attributes:
        range_scale: the noise of the range.
        bearing_scale: the noise of the bearing, in radians.
        fn: the noiseless values.
    """

    range_scale: Any
    bearing_scale: Any
    fn: RangeAndBearing

    def __call__(self, x: Float[Array, "4"]) -> RangeBearingLaw:
        """Return the law at a state."""
        return RangeBearingLaw(self.fn(x), jnp.stack([self.range_scale, self.bearing_scale]))


class RangeBearingStd(AbstractNamed, AbstractParameter):
    """Parameter whose value is the vector (range_scale, bearing_scale).

    Attributes:
        range_scale: the noise of the range.
        bearing_scale: the noise of the bearing, in radians.
    """

    range_scale: Any
    bearing_scale: Any

    @property
    def value(self) -> Float[Array, "2"]:
        """The vector."""
        return jnp.stack([unwrap(self.range_scale), unwrap(self.bearing_scale)])


@ready(
    "a target in the plane, observed by a sensor as range and bearing",
    start_range_bearing,
    obs_dim=2,
)
def range_bearing(
    *,
    sensor: Sequence[float] = (0.0, 0.0),
    wrap: bool = True,
    irregular: bool = False,
    velocity_scale: Any = 0.1,
    range_scale: Any = 0.1,
    bearing_scale: Any = 0.01,
    prior_mean: Any = (1.0, 0.0, 0.0, 0.0),
    prior_scale: Any = 10.0,
) -> StateSpaceModel:
    """Build a target in the plane, observed by a sensor as range and bearing.

        y_t = (‖p_t − sensor‖ + range_scale ε_t,  angle(p_t − sensor) + bearing_scale ε'_t)

    The state is (p_x, p_y, v_x, v_y), as in `constant_velocity`. Bearings are in radians, counted
    from the first axis towards the second. With `wrap=True` the residual of a bearing is taken to
    (−π, π], so that 359° and 1° are two degrees apart. Linearised smoothers ignore this, and need a
    target that does not cross the half-line behind the sensor; particle smoothers do not.
    With `wrap=False` the emission is a `NonlinearGaussianKernel`, for bearings that were unwrapped
    or stay on one side.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.range_bearing(sensor=(-1.0, 0.0), prior_mean=(1.0, 1.0, 0.0, 0.1))
        >>> sorted(rd.models.named_parameters(model))
        ['bearing_scale', 'range_scale', 'velocity_scale']

    Args:
        sensor: the position of the sensor, two numbers.
        wrap: whether residuals of bearings are wrapped.
        irregular: whether times are irregular; the step is then the first input.
        velocity_scale: the starting value of the scale of steps of the velocity.
        range_scale: the starting value of the noise of the range.
        bearing_scale: the starting value of the noise of the bearing, which should be below 0.5.
        prior_mean: the mean of the first state, away from the sensor; not learned.
        prior_scale: its scale; not learned.
    """
    position = tuple(float(entry) for entry in sensor)
    if len(position) != 2:
        raise ValueError(f"`sensor` must have two coordinates, got {sensor}.")
    fn, scales = RangeAndBearing(position), (positive(range_scale), positive(bearing_scale))
    equation = ConstantVelocity(positive(velocity_scale), kind="range_bearing", dim=2)
    if wrap:
        emission = DistributionKernel(WrappedRangeBearing(*scales, fn))
    else:
        emission = NonlinearGaussianKernel(fn, Diagonal(RangeBearingStd(*scales)))
    prior = diffuse(prior_mean, prior_scale, 4)
    return StateSpaceModel(prior, kernel_of(equation, irregular), emission)


def wrapped(angle: Array) -> Array:
    """Return the angle in (−π, π]."""
    return np.pi - jnp.mod(np.pi - angle, 2 * np.pi)
