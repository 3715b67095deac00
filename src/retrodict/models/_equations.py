"""Linear equations of states, as functions of the step of time.

An equation is a module whose fields are its natural parameters. `at(step)` returns the
linear-Gaussian kernel of a step of that length. `Regular` is the kernel at unit steps; for
irregular steps a `VaryingLinearGaussianKernel` calls the equation, with the step as first input.
"""

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import check_finite
from retrodict._model import (
    AbstractKernel,
    AbstractParameter,
    AbstractTied,
    Bounded,
    Diagonal,
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    Positive,
    StateSpaceModel,
    VaryingLinearGaussianKernel,
    partial_autocorrelations,
    unwrap,
)
from retrodict.switching import SwitchingModel

MODELS = (StateSpaceModel, SwitchingModel)
"""The models that can be named, fitted and stored."""

Model: TypeAlias = Any
"""One of `MODELS`; a caller knows which one it asked for, so that types do not distinguish them."""

LAG_NOISE = 1e-3
"""The noise of coordinates that hold earlier values, relative to the noise of those values.

In theory they have none, and the transition no density. Variances change by about its square.
"""

LEVERAGE_SHARE = math.sqrt(0.9)
"""The correlation c of the innovation of a log variance with the coordinate z before it."""

SHORTEST_STEP = 1e-6
"""The shortest step of time: at zero, scales would have infinite derivatives."""


class AbstractNamed(eqx.Module):
    """Module whose fields are natural parameters, named after the fields."""


class AbstractEquation(AbstractNamed):
    """The kernel x ↦ N(w x + b, s sᵀ) of a step of time, as a function of its length."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The name of the ready model."""
            ...
    else:
        kind: eqx.AbstractVar[str]

    @abstractmethod
    def at(self, step: Any) -> tuple[Any, Any, Any]:
        """Return the weight, bias and scale of a step of this length."""

    def stationary(self) -> Gaussian:
        """Compute the stationary law of the state; most equations have none."""
        raise TypeError(f"{type(self).__name__} has no stationary law.")

    def __call__(self, u: Float[Array, "input"]) -> tuple[Any, Any, Any]:
        """Return `at` of the first input, for `VaryingLinearGaussianKernel`."""
        return self.at(jnp.maximum(u[0], SHORTEST_STEP))


class Regular(AbstractParameter):
    """Parameter whose value is the kernel of an equation at unit steps.

    Args:
        fn: the equation.
    """

    fn: AbstractEquation

    @property
    def value(self) -> LinearGaussianKernel:
        """The kernel."""
        return LinearGaussianKernel(*_at_unit_step(self.fn))


# Jitted, as is the stationary law: outside of a compiled program, every operation would be compiled
# by itself.
@eqx.filter_jit
def _at_unit_step(equation: AbstractEquation) -> tuple[Any, Any, Any]:
    return unwrap(equation).at(jnp.ones(()))


class Stationary(AbstractTied):
    """Prior whose value is the stationary law of the transition of the model.

    It follows the parameters of the transition during learning.
    """

    def value_in(self, whole: Any) -> Gaussian:
        """Compute the law from the equation of the model's transition."""
        return _stationary_law(whole.transition)


def _stationary_law(transition: Any) -> Gaussian:
    if isinstance(transition, Frozen):
        return jax.tree.map(jax.lax.stop_gradient, _stationary_law(transition.tree))
    equation = getattr(transition, "fn", None)
    if not isinstance(equation, AbstractEquation):
        raise TypeError(
            "A stationary prior expects the transition of a ready model, got"
            f" {type(transition).__name__}. Unwrap the model before replacing its transition, or"
            " give it a Gaussian prior."
        )
    return _stationary_law_of(equation)


@eqx.filter_jit
def _stationary_law_of(equation: AbstractEquation) -> Gaussian:
    return unwrap(equation).stationary()


def kernel_of(equation: AbstractEquation, irregular: bool) -> AbstractKernel | Regular:
    """Return the kernel of an equation: at unit steps, or with the step as the first input."""
    return VaryingLinearGaussianKernel(equation) if irregular else Regular(equation)


def equation_of(model: Model) -> AbstractNamed | None:
    """Return the equation of a ready model, with its name as `kind`; `None` for other models.

    It is that of the transition or, without a continuous state, of the emission.
    """
    part = model.emission if model.transition is None else model.transition
    equation = getattr(part, "fn", None)
    return equation if isinstance(equation, AbstractNamed) else None


class AbstractColumns(AbstractEquation):
    """Independent equations of one form, one per observed column.

    Parameters have a leading axis for the columns; the state is that of the first column, then that
    of the second, and so on.
    """

    @abstractmethod
    def column(self, step: Any) -> tuple[Array, Array, Array]:
        """Return the weight, bias and lower factor of one column; its parameters lack the axis."""

    def stationary_column(self) -> tuple[Array, Array]:
        """Compute the mean and the lower factor of the stationary law of one column."""
        raise TypeError(f"{type(self).__name__} has no stationary law.")

    def stationary(self) -> Gaussian:
        """Compute the stationary law of all columns side by side."""
        means, scales = jax.vmap(lambda equation: equation.stationary_column())(self)
        return Gaussian(means.reshape(-1), block_diagonal(scales))

    def at(self, step: Any) -> tuple[Array, Array, Array]:
        """Return the kernel of all columns side by side."""
        weights, biases, scales = jax.vmap(lambda equation: equation.column(step))(self)
        return block_diagonal(weights), biases.reshape(-1), block_diagonal(scales)


class Structural(AbstractColumns):
    """Level, slope and season of each column.

        level_t = level_{t-1} + slope_{t-1} + level_scale ε
        slope_t = slope_{t-1} + slope_scale ε
        season_t = −Σ_{j=1}^{period-1} season_{t-j} + seasonal_scale ε

    With `harmonics=h` the season is a sum of h cycles of frequencies 2πj / period, each a pair that
    rotates and whose two coordinates move with noise seasonal_scale. With `continuous=True` noises
    are those of Brownian motions over a step Δ, that of the slope integrated into the level.

    Attributes:
        level_scale: scales, of shape `(obs,)`.
        slope_scale: the same, or `None` if there is no slope.
        seasonal_scale: the same, or `None` if there is no season.
    """

    level_scale: Any
    slope_scale: Any = None
    seasonal_scale: Any = None
    kind: str = eqx.field(static=True, default="local_level")  # pyright: ignore
    period: int = eqx.field(static=True, default=0)
    harmonics: int = eqx.field(static=True, default=0)
    continuous: bool = eqx.field(static=True, default=False)

    def column(self, step: Any) -> tuple[Array, Array, Array]:
        """Return the kernel of the level, the slope and the season of a column."""
        parts = [self._trend(step)]
        if self.seasonal_scale is not None:
            parts.append(self._cycles(step) if self.harmonics else self._dummies())
        weight, scale = (
            jax.scipy.linalg.block_diag(*blocks) for blocks in zip(*parts, strict=True)
        )
        return weight, jnp.zeros(weight.shape[0]), scale

    def _trend(self, step: Any) -> tuple[Array, Array]:
        if self.slope_scale is None:
            return jnp.ones((1, 1)), (jnp.sqrt(step) * self.level_scale).reshape(1, 1)
        weight = jnp.eye(2).at[0, 1].set(step)
        if not self.continuous:
            return weight, jnp.diag(jnp.stack([self.level_scale, self.slope_scale]))
        slope = self.slope_scale**2
        return weight, _factor(
            step * self.level_scale**2 + step**3 / 3 * slope, step**2 / 2 * slope, step * slope
        )

    def _dummies(self) -> tuple[Array, Array]:
        size = self.period - 1
        weight = jnp.eye(size, k=-1).at[0].set(-1.0)
        return weight, jnp.diag(self.seasonal_scale * lag_noise(size))

    def _cycles(self, step: Any) -> tuple[Array, Array]:
        angles = 2 * np.pi / self.period * np.arange(1, self.harmonics + 1) * step
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        turns = jnp.stack([jnp.stack([cos, sin], -1), jnp.stack([-sin, cos], -1)], -2)
        scale = self.seasonal_scale * jnp.sqrt(step) * jnp.eye(2 * self.harmonics)
        return block_diagonal(turns), scale


class MeanReverting(AbstractColumns):
    """An AR(1) process per column.

        x_t = mean + persistence (x_{t-1} − mean) + scale η_t

    With `continuous=True` the persistence over a step Δ is persistence^Δ, and the noise that of the
    Ornstein–Uhlenbeck process with these values at unit steps. With `augmented=True` each column
    has a second coordinate z_t, independent N(0, 1) at every time, which determines part of the
    next innovation: η_t = c z_{t-1} + √(1 − c²) ζ_t with c = `LEVERAGE_SHARE`.

    Attributes:
        mean: means, of shape `(obs,)`.
        persistence: the same.
        scale: the same.
    """

    mean: Any
    persistence: Any
    scale: Any
    kind: str = eqx.field(static=True, default="autoregressive")  # pyright: ignore
    augmented: bool = eqx.field(static=True, default=False)
    continuous: bool = eqx.field(static=True, default=False)

    def column(self, step: Any) -> tuple[Array, Array, Array]:
        """Return the kernel of one coordinate, or of two of which the second is z."""
        if self.augmented:
            c = LEVERAGE_SHARE
            weight = jnp.array([[1.0, 0.0], [0.0, 0.0]]) * self.persistence
            weight = weight.at[0, 1].set(c * self.scale)
            bias = jnp.stack([self.mean * (1 - self.persistence), jnp.zeros_like(self.mean)])
            noise = jnp.stack([self.scale * math.sqrt(1 - c**2), jnp.ones_like(self.scale)])
            return weight, bias, jnp.diag(noise)
        weight, scale = self.persistence, self.scale
        if self.continuous:
            log = jnp.log(self.persistence)
            weight = jnp.exp(step * log)
            scale = self.scale * jnp.sqrt(jnp.expm1(2 * step * log) / jnp.expm1(2 * log))
        bias = self.mean * (1 - weight)
        return weight.reshape(1, 1), bias.reshape(1), scale.reshape(1, 1)

    def stationary_column(self) -> tuple[Array, Array]:
        """Return N(mean, scale² / (1 − persistence²)), the same for steps of any length.

        The second coordinate, if there is one, is independent of the first at the same time.
        """
        std = self.scale / jnp.sqrt((1 - self.persistence) * (1 + self.persistence))
        if not self.augmented:
            return self.mean.reshape(1), std.reshape(1, 1)
        mean = jnp.stack([self.mean, jnp.zeros_like(self.mean)])
        return mean, jnp.diag(jnp.stack([std, jnp.ones_like(std)]))


def mean_reverting(
    kind: str, values: Any, obs_dim: int, irregular: bool, augmented: bool = False
) -> MeanReverting:
    """Return an AR(1) process per column, whose persistence is positive for irregular times.

    Args:
        kind: the name of the ready model.
        values: the mean, the persistence and the scale, each for all columns or one per column.
        obs_dim: the number of columns.
        irregular: whether times are irregular.
        augmented: whether each column has a second coordinate.
    """
    mean, persistence, scale = values
    phi = Bounded(real(persistence, obs_dim), 0.0 if irregular else -1.0, 1.0)
    mean, scale = real(mean, obs_dim), positive(scale, obs_dim)
    return MeanReverting(mean, phi, scale, kind, augmented, irregular)


class Lagged(AbstractColumns):
    """An AR(p) process per column, in companion form.

        x_t = mean + Σ_{i=1}^p coefficients_i (x_{t-i} − mean) + scale η_t

    The state is (x_t, ..., x_{t-p+1}); earlier values get noise `LAG_NOISE` scale.

    Attributes:
        mean: means, of shape `(obs,)`.
        coefficients: coefficients, of shape `(obs, p)`.
        scale: scales, of shape `(obs,)`.
    """

    mean: Any
    coefficients: Any
    scale: Any
    kind: str = eqx.field(static=True, default="autoregressive")  # pyright: ignore

    def column(self, step: Any) -> tuple[Array, Array, Array]:
        """Return the kernel of the current value and p − 1 earlier ones."""
        order = self.coefficients.shape[0]
        weight = jnp.eye(order, k=-1).at[0].set(self.coefficients)
        bias = jnp.zeros(order).at[0].set(self.mean * (1 - jnp.sum(self.coefficients)))
        return weight, bias, jnp.diag(self.scale * lag_noise(order))

    def stationary_column(self) -> tuple[Array, Array]:
        """Return the law of p consecutive values of the autoregression, without `LAG_NOISE`.

        With partial autocorrelations r_k, the best prediction of a value from k neighbours has the
        coefficients a^(k) of the autoregression of order k and the error variance

            v_k = scale² / ∏_{j>k} (1 − r_j²).

        The errors e_k = z_k − Σ_j a_j^(k) z_{k-j} of values z_0, z_1, ... in their order in time
        are uncorrelated. They solve a unit lower-triangular system, and its inverse times √v_k is
        the Cholesky factor. Reversed in time, the process has the same law, so the same factor
        applies to the state, whose first coordinate is the latest. No covariance is factored, so
        that the result is accurate for roots close to the unit circle.
        """
        order = self.coefficients.shape[0]
        partial = partial_autocorrelations(self.coefficients)
        least = 4.0 * order * jnp.finfo(partial.dtype).eps
        shrink = jnp.maximum((1 - partial) * (1 + partial), least)
        # log v_k relative to scale², from the last order down.
        above = jnp.cumsum(jnp.log(shrink[::-1]))[::-1]
        std = self.scale * jnp.exp(-0.5 * above)
        rows, prediction = [], []
        for k in range(order):
            # x_k = Σ_j a_j x_{k-j} + e_k, and earlier x are sums of earlier errors.
            row = jnp.zeros(order, std.dtype).at[k].set(1.0)
            for a, earlier in zip(prediction, rows[::-1], strict=True):
                row = row + a * earlier
            rows.append(row)
            r = partial[k]
            prediction = [a - r * b for a, b in zip(prediction, prediction[::-1], strict=True)] + [
                r
            ]
        return jnp.full(order, self.mean), jnp.stack(rows) * std[None]


class ConstantVelocity(AbstractEquation):
    """Nearly constant velocity: positions and velocities, (p_1, ..., p_dim, v_1, ..., v_dim).

    Velocities are Brownian motions, and positions their integrals: over a step Δ the noise of a
    pair (p, v) has covariance velocity_scale² [[Δ³/3, Δ²/2], [Δ²/2, Δ]], of full rank.

    Attributes:
        velocity_scale: the scale, the same for all directions.
    """

    velocity_scale: Any
    kind: str = eqx.field(static=True, default="constant_velocity")  # pyright: ignore
    dim: int = eqx.field(static=True, default=2)

    def at(self, step: Any) -> tuple[Array, Array, Array]:
        """Return the kernel: positions move by velocities."""
        step = jnp.asarray(step)
        eye = jnp.eye(self.dim)
        weight = jnp.kron(jnp.eye(2).at[0, 1].set(step), eye)
        factor = self.velocity_scale * _factor(step**3 / 3, step**2 / 2, step)
        return weight, jnp.zeros(2 * self.dim), jnp.kron(factor, eye)


class LinearDynamics(AbstractEquation):
    """The equation x_t = dynamics x_{t-1} + state_scale η_t.

    Attributes:
        dynamics: the weight, of shape `(state, state)`.
        state_scale: scales, of shape `(state,)`.
    """

    dynamics: Any
    state_scale: Any
    kind: str = eqx.field(static=True, default="neural_decoder")  # pyright: ignore

    def at(self, step: Any) -> tuple[Array, Array, Diagonal]:
        """Return the same kernel for every step."""
        return self.dynamics, jnp.zeros_like(self.state_scale), Diagonal(self.state_scale)


class Observed(AbstractEquation):
    """Observations y_t = loading x_t + obs_scale ε_t.

    Attributes:
        obs_scale: scales, of shape `(obs,)`.
        loading: the weight, of shape `(obs, state)`, as nested tuples; not learned.
    """

    obs_scale: Any
    loading: tuple[tuple[float, ...], ...] = eqx.field(static=True)
    kind: str = eqx.field(static=True, default="")  # pyright: ignore

    def at(self, step: Any) -> tuple[Array, Array, Diagonal]:
        """Return the same kernel for every step."""
        loading = jnp.asarray(self.loading, self.obs_scale.dtype)
        return loading, jnp.zeros_like(self.obs_scale), Diagonal(self.obs_scale)


def observed(
    prior: Any, transition: Any, obs_scale: Any, obs_dim: int, loading: Any
) -> StateSpaceModel:
    """Return the model of a state that is observed as N(loading x, obs_scale²).

    Args:
        prior: the law of the first state.
        transition: the kernel of the state.
        obs_scale: the scale of the noise, one per column or one for all.
        obs_dim: the number of columns.
        loading: the weight, of shape `(obs, state)`, or that of one column for all of them.
    """
    loading = np.asarray(loading, float)
    if loading.ndim == 1:
        loading = np.kron(np.eye(obs_dim), loading[None])
    rows = tuple(tuple(float(entry) for entry in line) for line in loading)
    emission = Regular(Observed(positive(obs_scale, obs_dim), rows))
    return StateSpaceModel(prior, transition, emission)


def diffuse(mean: Any, scale: Any, state_dim: int) -> Frozen:
    """Return a fixed Gaussian prior with independent coordinates."""
    scale = Positive(np.broadcast_to(np.asarray(scale, float), (state_dim,)))
    return Frozen(Gaussian(real(mean, state_dim), Diagonal(scale)))


def stationary_unless(mean: Any, scale: Any, start: Any, state_dim: int) -> Stationary | Frozen:
    """Return the stationary law, or a fixed Gaussian if a mean or a scale is passed.

    Args:
        mean: the mean of the prior, or `None`.
        scale: its scale, or `None`.
        start: the equation, whose stationary law replaces a mean or scale of `None`.
        state_dim: the dimension of the state.
    """
    if mean is None and scale is None:
        return Stationary()
    law = unwrap(start).stationary()
    return diffuse(
        law.mean if mean is None else mean, law.std if scale is None else scale, state_dim
    )


def real(value: Any, *shape: int) -> Array:
    """Return an unconstrained array of this shape."""
    array = jnp.asarray(value, jnp.result_type(float))
    check_finite(array, "The starting value of a parameter")
    return jnp.broadcast_to(array, shape)


def positive(value: Any, *shape: int) -> Positive:
    """Return a positive array of this shape."""
    return Positive(real(value, *shape))


def numpyro_distributions() -> Any:
    """Import the distributions of numpyro, which only models of counts need."""
    try:
        import numpyro.distributions as distributions
    except ImportError as error:
        raise ImportError(
            "Models of counts use the distributions of numpyro: pip install 'retrodict[numpyro]'."
        ) from error
    return distributions


def lag_noise(size: int) -> np.ndarray:
    """Return the relative noise of a coordinate and of its earlier values."""
    return np.concatenate([np.ones(1), np.full(size - 1, LAG_NOISE)])


def block_diagonal(blocks: Float[Array, "count r c"]) -> Float[Array, "rows columns"]:
    """Return a block-diagonal matrix of blocks of one shape."""
    count, rows, columns = blocks.shape
    place = np.arange(count)
    spread = jnp.zeros((count, rows, count, columns), blocks.dtype)
    spread = spread.at[place, :, place, :].set(blocks)
    return spread.reshape(count * rows, count * columns)


def _factor(first: Array, cross: Array, second: Array) -> Float[Array, "2 2"]:
    """Return the lower Cholesky factor of [[first, cross], [cross, second]]."""
    pivot = jnp.sqrt(first)
    below = cross / pivot
    rest = jnp.sqrt(second - below**2)
    return jnp.stack([jnp.stack([pivot, jnp.zeros_like(pivot)]), jnp.stack([below, rest])])
