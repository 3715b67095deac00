"""Markov-switching means, variances and autoregressions."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._arrays import as_real_array, check_count
from retrodict._model import (
    AbstractParameter,
    Diagonal,
    Frozen,
    LinearGaussianKernel,
    Positive,
    unwrap,
)
from retrodict.switching.histories import RegimeHistories
from retrodict.switching.model import Stacked, SwitchingModel

Form = Literal["mean", "intercept", "none"]
"""Whether the level of a regime is a mean, an intercept, or zero."""

STAY = 0.9
"""The probability to stay in a regime at the start of learning."""

SPREAD = 1.0
"""Levels start evenly spaced over this many standard deviations on both sides of the mean."""


class AutoregressiveEmission(AbstractParameter):
    """Emissions of an autoregression whose parameters switch, one per history of regimes.

    In the mean-adjusted form of Hamilton (1989)

        y_k = μ_{z_k} + Σ_l φ_{l, z_k} (y_{k-l} − μ_{z_{k-l}}) + σ_{z_k} ε_k,

    and with an intercept y_k = c_{z_k} + Σ_l φ_{l, z_k} y_{k-l} + σ_{z_k} ε_k. Arrays with one
    entry in place of K are shared by the regimes.

    Attributes:
        levels: means μ or intercepts c, of shape `(K,)` or `(1,)`.
        coefficients: φ, of shape `(K, p)` or `(1, p)`.
        std: σ, of shape `(K,)` or `(1,)`.
        histories: the regimes of each state, the latest first.
        is_mean_adjusted: whether levels are means.
    """

    levels: Any
    coefficients: Any
    std: Any
    histories: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    is_mean_adjusted: bool = eqx.field(static=True)

    @property
    def value(self) -> Stacked:
        """The kernels of all states, in the last p observations."""
        digits = np.array(self.histories)
        levels, coefficients, std = (
            unwrap(part) for part in (self.levels, self.coefficients, self.std)
        )

        def of(array: Array, regimes: np.ndarray) -> Array:
            return array[regimes if array.shape[0] > 1 else np.zeros_like(regimes)]

        weights, bias = of(coefficients, digits[:, 0]), of(levels, digits[:, 0])
        if self.is_mean_adjusted:
            bias = bias - jnp.sum(weights * of(levels, digits[:, 1:]), axis=1)
        build = jax.vmap(lambda w, b, s: LinearGaussianKernel(w[None], b[None], Diagonal(s[None])))
        return Stacked(build(weights, bias, of(std, digits[:, 0])))

    def permuted(self, order: Int[np.ndarray, "regime"]) -> "AutoregressiveEmission":
        """Return the emission with its regimes in another order."""

        def taken(value: Any) -> Any:
            # Unconstrained arrays inside of parameters have the same axis `regime`.
            return jax.tree.map(lambda leaf: leaf[order] if leaf.shape[0] > 1 else leaf, value)

        return AutoregressiveEmission(
            taken(self.levels),
            taken(self.coefficients),
            taken(self.std),
            self.histories,
            self.is_mean_adjusted,
        )


def markov_autoregression(
    num_regimes: int,
    *,
    order: int = 0,
    form: Form = "mean",
    switching_coefficients: bool = False,
    switching_scale: bool = False,
    ys: Any = None,
) -> SwitchingModel:
    """Build a Markov-switching autoregression of one series.

    With `form="mean"` it is the mean-adjusted autoregression of Hamilton (1989). Its density
    depends on the regimes of the last p rows, so that the model has K^(p+1) states;
    `base_probabilities` returns the probabilities of the K regimes. With `form="intercept"`, or
    without lags, it has K states. With `form="none"` the level is zero, and only coefficients and
    scales switch. The regimes start in their stationary law. The first p rows are conditioned on.

    Example:
        >>> import retrodict as rd
        >>> hamilton = rd.switching.markov_autoregression(2, order=4)
        >>> hamilton.num_regimes, hamilton.num_lags
        (32, 4)
        >>> volatility = rd.switching.markov_autoregression(3, form="none", switching_scale=True)
        >>> volatility.num_regimes
        3

    Args:
        num_regimes: the number K of regimes.
        order: the number p of lags.
        form: whether the level of a regime is a mean, an intercept, or zero.
        switching_coefficients: whether each regime has its own coefficients.
        switching_scale: whether each regime has its own standard deviation.
        ys: observations of shape `(time, 1)` or `(time,)` from which starting values are taken:
            a regression on the lags, with levels and scales spread around its estimates. By default
            the series is taken to have mean 0 and standard deviation 1.
    """
    count, order = check_count(num_regimes, "num_regimes"), check_count(order + 1, "order + 1") - 1
    if form not in ("mean", "intercept", "none"):
        raise ValueError(f"`form` must be 'mean', 'intercept' or 'none', got {form!r}.")
    if switching_coefficients and not order:
        raise ValueError("`switching_coefficients` needs an `order` of at least 1, got 0.")
    if form == "none" and count > 1 and not (switching_scale or switching_coefficients):
        raise ValueError(
            "Nothing switches with form='none': pass switching_scale=True, or"
            " switching_coefficients=True with an order."
        )
    mean, coefficients, noise = _pooled(ys, order, form)
    stay = np.log(STAY * max(count - 1, 1) / (1 - STAY))
    regimes = RegimeHistories(stay * jnp.eye(count), order if form == "mean" else 0)
    grid = np.linspace(-SPREAD, SPREAD, count) if count > 1 else np.zeros(1)
    std = noise * np.exp(grid if switching_scale else np.zeros(1))
    emission = AutoregressiveEmission(
        _levels(form, mean, noise * grid, coefficients),
        jnp.asarray(np.tile(coefficients, (count if switching_coefficients else 1, 1))),
        Positive(std),
        tuple(map(tuple, regimes.digits.tolist())),
        form == "mean",
    )
    return SwitchingModel(regimes, emission=emission, num_lags=order)


def _levels(form: Form, mean: float, spread: np.ndarray, coefficients: np.ndarray) -> Any:
    """Return the starting levels; zero and fixed without a level."""
    if form == "none":
        return Frozen(jnp.zeros(1))
    share = 1.0 if form == "mean" else 1.0 - coefficients.sum()
    return jnp.asarray(mean * share + spread)


def _pooled(ys: Any, order: int, form: Form) -> tuple[float, Float[np.ndarray, "lag"], float]:
    """Return mean, coefficients and noise of an autoregression without regimes."""
    if ys is None:
        return 0.0, np.zeros(order), 1.0
    array = np.asarray(as_real_array(ys, "ys", missing=True), float)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != 1):
        raise ValueError(f"ys must have shape (time, 1) or (time,), got {array.shape}.")
    values = array.reshape(-1)
    if np.sum(np.isfinite(values)) < 2:
        raise ValueError("ys must hold at least two observed values to take starting values from.")
    mean = 0.0 if form == "none" else float(np.nanmean(values))
    centred = values - mean
    rows = np.stack([centred[order - lag : len(centred) - lag] for lag in range(order + 1)], axis=1)
    rows = rows[np.all(np.isfinite(rows), axis=1)]
    if len(rows) <= order + 1:
        coefficients, residuals = np.zeros(order), centred[np.isfinite(centred)]
    else:
        coefficients = np.linalg.lstsq(rows[:, 1:], rows[:, 0], rcond=None)[0]
        residuals = rows[:, 0] - rows[:, 1:] @ coefficients
    return mean, coefficients, float(np.std(residuals)) or 1.0
