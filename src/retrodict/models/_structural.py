"""Structural time series: levels, trends, seasons and autoregressions, all linear Gaussian."""

from typing import Any

import numpy as np

from retrodict._arrays import check_count
from retrodict._model import StateSpaceModel, StationaryCoefficients
from retrodict.models._equations import (
    Lagged,
    Structural,
    diffuse,
    kernel_of,
    mean_reverting,
    observed,
    positive,
    real,
    stationary_unless,
)
from retrodict.models._registry import ready
from retrodict.models._start import (
    PRIOR_WIDTH,
    Sample,
    autocorrelation,
    centre,
    differences,
    first,
    reverting,
    spread,
)


def start_structural(model: StateSpaceModel, sample: Sample) -> dict[str, Any]:
    """Return starting values of level, slope and season: scales from differences in time."""
    equation: Any = model.transition.fn
    step = sample.step
    moves, levels = spread(differences(sample.ys)), first(sample.ys)
    # Half of the variance of a difference is attributed to the level, a quarter to each noise.
    values: dict[str, Any] = {
        "level_scale": np.sqrt(0.5 / step) * moves,
        "obs_scale": 0.5 * moves,
    }
    if equation.slope_scale is not None:
        values["slope_scale"] = 0.05 / step * moves
    if equation.seasonal_scale is not None:
        values["seasonal_scale"] = 0.1 / np.sqrt(step) * moves
    width = model.state_dim // len(levels)
    values["prior.mean"] = np.kron(levels, np.eye(1, width)[0])
    values["prior.scale_tril.std"] = np.repeat(PRIOR_WIDTH * spread(sample.ys), width)
    return values


def start_autoregressive(model: StateSpaceModel, sample: Sample) -> dict[str, Any]:
    """Return starting values of an autoregression from mean, spread and autocorrelation."""
    means, spreads = centre(sample.ys), spread(sample.ys)
    correlations = autocorrelation(sample.ys)
    values: dict[str, Any] = {"obs_scale": 0.3 * spreads}
    others = model.state_dim // len(means) - 1
    if not others:
        return values | reverting(means, spreads, correlations, sample.step)
    return values | {
        "mean": means,
        "coefficients": np.pad(correlations[:, None], ((0, 0), (0, others))),
        "scale": spreads * np.sqrt(1 - correlations**2),
    }


@ready("a random walk, observed with noise", start_structural)
def local_level(
    *,
    obs_dim: int = 1,
    irregular: bool = False,
    level_scale: Any = 1.0,
    obs_scale: Any = 1.0,
    prior_mean: Any = 0.0,
    prior_scale: Any = 1e3,
) -> StateSpaceModel:
    """Build a random walk observed with noise, one per column.

        x_t = x_{t-1} + level_scale η_t,    y_t = x_t + obs_scale ε_t

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.local_level(level_scale=0.5)
        >>> {name: value.tolist() for name, value in rd.models.named_parameters(model).items()}
        {'level_scale': [0.5], 'obs_scale': [1.0]}

    Args:
        obs_dim: the number of columns.
        irregular: whether times are irregular; the variance of a step is then Δ level_scale², and
            Δ is the first input.
        level_scale: the starting value of the scale of steps of the level.
        obs_scale: the starting value of the scale of the observation noise.
        prior_mean: the mean of the first level; not learned.
        prior_scale: its scale, wide but finite; not learned.
    """
    obs_dim = check_count(obs_dim, "obs_dim")
    equation = Structural(positive(level_scale, obs_dim), kind="local_level", continuous=irregular)
    prior = diffuse(prior_mean, prior_scale, obs_dim)
    return observed(prior, kernel_of(equation, irregular), obs_scale, obs_dim, [1])


@ready("a level with a slope, both random walks", start_structural)
def local_trend(
    *,
    obs_dim: int = 1,
    irregular: bool = False,
    level_scale: Any = 1.0,
    slope_scale: Any = 0.1,
    obs_scale: Any = 1.0,
    prior_mean: Any = 0.0,
    prior_scale: Any = 1e3,
) -> StateSpaceModel:
    """Build a local linear trend, with state (level, slope).

        level_t = level_{t-1} + slope_{t-1} + level_scale η_t
        slope_t = slope_{t-1} + slope_scale ζ_t
        y_t = level_t + obs_scale ε_t

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.local_trend(slope_scale=0.05)
        >>> rd.models.state_names(model)
        ['level', 'slope']
        >>> sorted(rd.models.named_parameters(model))
        ['level_scale', 'obs_scale', 'slope_scale']

    Args:
        obs_dim: the number of columns, each with its own level and slope.
        irregular: whether times are irregular. The model is then in continuous time: the variances
            of both noises grow with the step Δ, the first input, and the noise of the slope is
            integrated into the level.
        level_scale: the starting value of the scale of steps of the level.
        slope_scale: the starting value of the scale of steps of the slope.
        obs_scale: the starting value of the scale of the observation noise.
        prior_mean: the mean of the first state, one number or one per coordinate; not learned.
        prior_scale: its scale, wide but finite; not learned.
    """
    obs_dim = check_count(obs_dim, "obs_dim")
    scales = positive(level_scale, obs_dim), positive(slope_scale, obs_dim)
    equation = Structural(*scales, kind="local_trend", continuous=irregular)
    prior = diffuse(prior_mean, prior_scale, 2 * obs_dim)
    return observed(prior, kernel_of(equation, irregular), obs_scale, obs_dim, [1, 0])


@ready("a level, an optional slope, and a season", start_structural)
def seasonal(
    *,
    period: int = 12,
    harmonics: int = 0,
    slope: bool = False,
    obs_dim: int = 1,
    irregular: bool = False,
    level_scale: Any = 1.0,
    slope_scale: Any = 0.1,
    seasonal_scale: Any = 0.1,
    obs_scale: Any = 1.0,
    prior_mean: Any = 0.0,
    prior_scale: Any = 1e3,
) -> StateSpaceModel:
    """Build a level, an optional slope and a season: the basic structural model.

        season_t = −Σ_{j=1}^{period-1} season_{t-j} + seasonal_scale ω_t
        y_t = level_t + season_t + obs_scale ε_t

    The state of a column is (level, slope, season_t, ..., season_{t-period+2}); the earlier
    seasons get a thousandth of the seasonal noise, so that the transition has a density. With
    `harmonics=h` the season is a sum of h cycles of two coordinates each, which is smaller for long
    periods, and exact.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.seasonal(period=4, slope=True)
        >>> rd.models.state_names(model)
        ['level', 'slope', 'season', 'season_lag1', 'season_lag2']

    Args:
        period: the number of steps of a season.
        harmonics: the number of cycles, at most half the period; 0 for one effect per step.
        slope: whether the level has a slope.
        obs_dim: the number of columns.
        irregular: whether times are irregular, which requires harmonics.
        level_scale: the starting value of the scale of steps of the level.
        slope_scale: the starting value of the scale of steps of the slope.
        seasonal_scale: the starting value of the scale of changes of the season.
        obs_scale: the starting value of the scale of the observation noise.
        prior_mean: the mean of the first state; not learned.
        prior_scale: its scale, wide but finite; not learned.
    """
    obs_dim = check_count(obs_dim, "obs_dim")
    if period < 2:
        raise ValueError(f"`period` must be at least 2 steps, got {period}.")
    if not 0 <= harmonics <= period // 2:
        raise ValueError(
            f"`harmonics` must be between 0 and {period // 2} for a period of {period} steps, got"
            f" {harmonics}."
        )
    if irregular and not harmonics:
        raise ValueError(
            "`harmonics` must be at least 1 for irregular times, which have no effects of single"
            " steps."
        )
    equation = Structural(
        positive(level_scale, obs_dim),
        positive(slope_scale, obs_dim) if slope else None,
        positive(seasonal_scale, obs_dim),
        kind="seasonal",
        period=period,
        harmonics=harmonics,
        continuous=irregular,
    )
    # A cycle is observed at its first coordinate, the season of single steps at the current one.
    season = [1, 0] * harmonics if harmonics else [1] + [0] * (period - 2)
    row = [1, 0, *season] if slope else [1, *season]
    prior = diffuse(prior_mean, prior_scale, obs_dim * len(row))
    return observed(prior, kernel_of(equation, irregular), obs_scale, obs_dim, row)


@ready("an autoregression around a mean, observed with noise", start_autoregressive)
def autoregressive(
    *,
    order: int = 1,
    obs_dim: int = 1,
    irregular: bool = False,
    mean: Any = 0.0,
    persistence: Any = 0.5,
    scale: Any = 1.0,
    obs_scale: Any = 0.1,
    prior_mean: Any = None,
    prior_scale: Any = None,
) -> StateSpaceModel:
    """Build an autoregression around a mean, observed with noise.

        x_t = mean + Σ_{i=1}^p φ_i (x_{t-i} − mean) + scale η_t,    y_t = x_t + obs_scale ε_t

    For p = 1, φ is called `persistence` and is between −1 and 1. For more lags the state is
    (x_t, ..., x_{t-p+1}), the φ are called `coefficients` and start as (persistence, 0, ..., 0);
    they are parametrised by partial autocorrelations, so that the autoregression stays stationary.
    The lags get a thousandth of the noise, so that the transition has a density.

    The first state has the stationary law of the autoregression. It has no parameters and
    follows those of the autoregression during learning.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.autoregressive(persistence=0.6, scale=0.8)
        >>> round(float(rd.unwrap(model).prior.std[0]), 6)  # 0.8 / √(1 − 0.6²)
        1.0

    Args:
        order: p.
        obs_dim: the number of columns, each with its own parameters.
        irregular: whether times are irregular, for p = 1: an Ornstein–Uhlenbeck process, with
            persistence^Δ over a step Δ, the first input, and a persistence between 0 and 1.
        mean: the starting value of the mean.
        persistence: the starting value of φ_1.
        scale: the starting value of the scale of the innovations.
        obs_scale: the starting value of the scale of the observation noise.
        prior_mean: the mean of a fixed Gaussian law of the first state.
        prior_scale: the scale of that law, with independent coordinates. If only one of the two is
            passed, the other is that of the stationary law at the starting values.
    """
    obs_dim, order = check_count(obs_dim, "obs_dim"), check_count(order, "order")
    if order > 1 and irregular:
        raise ValueError(f"`order` must be 1 for irregular times, got {order}.")
    if order == 1:
        values = (mean, persistence, scale)
        equation = mean_reverting("autoregressive", values, obs_dim, irregular)
    else:
        start = real(0.0, obs_dim, order).at[:, 0].set(real(persistence, obs_dim))
        coefficients = StationaryCoefficients(start)
        equation = Lagged(real(mean, obs_dim), coefficients, positive(scale, obs_dim))
    prior = stationary_unless(prior_mean, prior_scale, equation, obs_dim * order)
    row = [1] + [0] * (order - 1)
    return observed(prior, kernel_of(equation, irregular), obs_scale, obs_dim, row)
