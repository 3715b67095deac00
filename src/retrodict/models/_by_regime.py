"""Laws per regime as functions of named parameters, and the order of regimes.

Parameters that switch have a leading axis `regime`; parameters that all regimes share do not have
it. Each parameter is stored and named once.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import as_real_array, known_values
from retrodict._model import (
    AbstractConstrained,
    AbstractParameter,
    Diagonal,
    Gaussian,
    LinearGaussianKernel,
    unwrap,
)
from retrodict.models._equations import AbstractNamed, numpyro_distributions
from retrodict.models._parameters import named_parameters, with_parameters
from retrodict.switching import RegimeHistories, SwitchingModel

TRANSITION = "transition"
"""The name of the parameter with two axes `regime`."""

NUM_AXES = {
    "mean": 1,
    "intercept": 1,
    "rate": 1,
    "drift": 1,
    "level_scale": 1,
    "scale": 1,
    "obs_scale": 1,
    "coefficients": 2,
}
"""The parameters that may switch, and the number of their axes besides `regime`."""


class TransitionProbabilities(AbstractConstrained):
    """A matrix whose rows are probabilities, by logits relative to the diagonal.

    Args:
        value: probabilities between 0 and 1, of shape `(regime, regime)`, one row per earlier
            regime.
    """

    raw: Float[Array, "regime others"]

    def __init__(self, value: Any):
        value = as_real_array(value, "TransitionProbabilities")
        values = known_values(value)
        if value.ndim != 2 or value.shape[0] != value.shape[1]:
            raise ValueError(
                f"TransitionProbabilities expects a square matrix, got shape {value.shape}."
            )
        if values is not None and not (
            np.all(values > 0) and np.allclose(values.sum(axis=1), 1, atol=1e-6)
        ):
            raise ValueError(
                "TransitionProbabilities expects positive rows that sum to 1, got"
                f" {values.tolist()}."
            )
        count = value.shape[0]
        logits = jnp.log(value) - jnp.log(jnp.diagonal(value))[:, None]
        self.raw = logits[~np.eye(count, dtype=bool)].reshape(count, count - 1)

    @property
    def value(self) -> Float[Array, "regime regime"]:
        """The probabilities."""
        count = self.raw.shape[0]
        logits = jnp.zeros((count, count), self.raw.dtype)
        logits = logits.at[~np.eye(count, dtype=bool)].set(self.raw.ravel())
        return jax.nn.softmax(logits, axis=1)

    def domain(self, index: tuple[int, ...]) -> tuple[float, float]:
        """Return the interval of probabilities."""
        return 0.0, 1.0


class StationaryRegimes(AbstractParameter, AbstractNamed):
    """Parameter whose value is a chain of regimes that starts in its stationary law.

    Attributes:
        transition: of shape `(regime, regime)`, one row per earlier regime.
        order: the number of earlier regimes that rows depend on.
    """

    transition: Any
    order: int = eqx.field(static=True, default=0)

    @property
    def value(self) -> RegimeHistories:
        """The law of the regimes."""
        matrix = unwrap(self.transition)
        tiny = jnp.finfo(matrix.dtype).tiny  # logs stay finite where a probability underflows
        return RegimeHistories(jnp.log(jnp.maximum(matrix, tiny)), self.order)


def num_base_regimes(model: SwitchingModel) -> int:
    """Return the number of regimes, without the histories that lagged means need."""
    regimes = unwrap(model).regimes
    is_history = isinstance(regimes, RegimeHistories)
    return regimes.num_base_regimes if is_history else regimes.num_regimes


class AbstractByRegime(AbstractNamed):
    """Laws of all regimes as a function of named parameters."""

    if TYPE_CHECKING:

        @property
        def num_regimes(self) -> int:
            """The number K of regimes."""
            ...
    else:
        num_regimes: eqx.AbstractVar[int]

    @abstractmethod
    def parts(self) -> tuple[Any, ...]:
        """Return one law or kernel per regime; the parameters are unwrapped."""

    def spread_out(self, value: Array, num_axes: int) -> Array:
        """Return a parameter with an axis `regime`, whether it switches or not.

        Args:
            value: the parameter.
            num_axes: the number of its other axes.
        """
        shape = value.shape[value.ndim - num_axes :]
        return jnp.broadcast_to(value, (self.num_regimes, *shape))


class ByRegime(AbstractParameter):
    """Parameter whose value is one law or kernel per regime.

    Args:
        fn: the laws as a function of named parameters.
    """

    fn: AbstractByRegime

    @property
    def value(self) -> tuple[Any, ...]:
        """The laws or kernels."""
        return _parts_of(self.fn)


@eqx.filter_jit
def _parts_of(equation: AbstractByRegime) -> tuple[Any, ...]:
    return unwrap(equation).parts()


class SwitchingNormal(AbstractByRegime):
    """Normal laws per regime, around a mean, an intercept or an autoregression.

        y_t = mean_{z_t} + scale_{z_t} ε_t
              + Σ_{i=1}^p coefficients_{z_t,i} (y_{t-i} − mean_{z_{t-i}})

    With an intercept in place of the mean, lags are not centred.

    Attributes:
        mean: means, of shape `(regime, obs)`, or `(obs,)` if all regimes share them; or `None`.
        intercept: intercepts, of shape `(regime, obs)`, in place of the means; or `None`.
        scale: scales, of shape `(regime, obs)` or `(obs,)`.
        coefficients: of shape `(regime, obs, lag)` or `(obs, lag)`; `None` without lags.
        num_regimes: the number K of regimes.
        histories: the regimes of each state of the chain, the latest first.
        kind: the name of the ready model.
    """

    mean: Any
    intercept: Any
    scale: Any
    coefficients: Any
    num_regimes: int = eqx.field(static=True)  # pyright: ignore
    histories: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    kind: str = eqx.field(static=True)

    def parts(self) -> tuple[Any, ...]:
        """Return one law per state of the chain, or one kernel of the lagged observations."""
        level = self.intercept if self.mean is None else self.mean
        levels, scales = self.spread_out(level, 1), self.spread_out(self.scale, 1)
        if self.coefficients is None:
            return tuple(
                Gaussian(mean, Diagonal(scale)) for mean, scale in zip(levels, scales, strict=True)
            )
        lags = self.spread_out(self.coefficients, 2)
        return tuple(self._kernel(levels, scales, lags, history) for history in self.histories)

    def _kernel(
        self, levels: Array, scales: Array, lags: Array, history: tuple[int, ...]
    ) -> LinearGaussianKernel:
        """Return the kernel of the regimes of a row and, with means that switch, those before."""
        now, earlier = history[0], np.array(history[1:], int)
        lag = lags[now]
        # Lags are ordered by lag, then by column.
        weight = jnp.concatenate([jnp.diag(lag[:, i]) for i in range(lag.shape[1])], axis=1)
        bias = levels[now]
        if self.mean is not None:
            before = levels[earlier].T if earlier.size else levels[now][:, None]
            bias = bias - jnp.sum(lag * before, axis=1)
        return LinearGaussianKernel(weight, bias, Diagonal(scales[now]))


class SwitchingPoisson(AbstractByRegime):
    """Poisson laws per regime.

    Attributes:
        rate: rates, of shape `(regime, obs)`.
        num_regimes: the number K of regimes.
        kind: the name of the ready model.
    """

    rate: Any
    num_regimes: int = eqx.field(static=True)  # pyright: ignore
    kind: str = eqx.field(static=True, default="hmm")

    def parts(self) -> tuple[Any, ...]:
        """Return one Poisson law per regime."""
        return tuple(numpyro_distributions().Poisson(rate) for rate in self.rate)


class SwitchingWalk(AbstractByRegime):
    """Random walks per regime, x_t = x_{t-1} + drift_z + level_scale_z η_t.

    Attributes:
        level_scale: scales, of shape `(regime, obs)`, or `(obs,)` if all regimes share them.
        drift: drifts, of shape `(regime, obs)`; `None` without drift.
        num_regimes: the number K of regimes.
        kind: the name of the ready model.
    """

    level_scale: Any
    drift: Any
    num_regimes: int = eqx.field(static=True)  # pyright: ignore
    kind: str = eqx.field(static=True, default="switching_level")

    def parts(self) -> tuple[Any, ...]:
        """Return one kernel per regime."""
        scales = self.spread_out(self.level_scale, 1)
        drifts = jnp.zeros_like(scales) if self.drift is None else self.drift
        return _shifts(drifts, scales)


class SwitchingNoise(AbstractByRegime):
    """Observations y_t = x_t + obs_scale_z ε_t.

    Attributes:
        obs_scale: scales, of shape `(regime, obs)`, or `(obs,)` if all regimes share them.
        num_regimes: the number K of regimes.
    """

    obs_scale: Any
    num_regimes: int = eqx.field(static=True)  # pyright: ignore

    def parts(self) -> tuple[Any, ...]:
        """Return one kernel per regime."""
        scales = self.spread_out(self.obs_scale, 1)
        return _shifts(jnp.zeros_like(scales), scales)


def _shifts(biases: Array, scales: Array) -> tuple[LinearGaussianKernel, ...]:
    """Return the kernels N(x + b, s²) of all regimes."""
    eye = jnp.eye(scales.shape[1], dtype=scales.dtype)
    return tuple(
        LinearGaussianKernel(eye, bias, Diagonal(scale))
        for bias, scale in zip(biases, scales, strict=True)
    )


def canonical_order(model: SwitchingModel) -> np.ndarray | None:
    """Return the regimes of a ready model in canonical order; `None` for other models.

    They are sorted by the first of these that switches: means, intercepts, rates, drifts, scales,
    the sums of coefficients.
    """
    values = named_parameters(model, fixed=True)
    if TRANSITION not in values:
        return None
    count = num_base_regimes(model)
    for name, num_axes in NUM_AXES.items():
        if name in values and values[name].ndim == num_axes + 1:
            entries = np.asarray(values[name])
            keys = entries.sum(axis=-1)[:, 0] if num_axes == 2 else entries[:, 0]
            return np.argsort(keys, kind="stable")
    return np.arange(count)


def with_regimes(model: SwitchingModel, order: Any) -> Any:
    """Return a ready model with its regimes in another order.

    Args:
        model: the model.
        order: the present index of each regime of the result.
    """
    order = np.asarray(order)
    values = named_parameters(model, fixed=True)
    moved = {
        name: values[name][order]
        for name, num_axes in NUM_AXES.items()
        if name in values and values[name].ndim == num_axes + 1
    }
    return with_parameters(model, moved | {TRANSITION: values[TRANSITION][order][:, order]})
