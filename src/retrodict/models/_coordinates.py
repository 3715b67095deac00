"""What the coordinates of a state are, in a word each."""

from collections.abc import Sequence

from retrodict._model import StateSpaceModel
from retrodict.models._equations import (
    AbstractColumns,
    AbstractEquation,
    ConstantVelocity,
    Lagged,
    MeanReverting,
    Structural,
)

LATENT = {
    "stochastic_volatility": "log_variance",
    "poisson_counts": "log_rate",
    "negative_binomial_counts": "log_rate",
    "binomial_counts": "log_odds",
}
"""What the first coordinate of a column is called, where it is in another unit."""


def state_names(model: StateSpaceModel, columns: Sequence[str] = ("y",)) -> list[str]:
    """A name for each coordinate of the state.

    Those of ready models say what they are, with the name of their column before it where there are
    several; others are numbered.

    Example:
        >>> import retrodict as rd
        >>> rd.models.state_names(rd.models.local_trend())
        ['level', 'slope']
        >>> rd.models.state_names(rd.models.stochastic_volatility(obs_dim=2), ["GBP", "EUR"])
        ['GBP_log_variance', 'EUR_log_variance']

    Args:
        model: any model.
        columns: the names of the observed columns.
    """
    equation = getattr(model.transition, "fn", None)
    names: list[str] = []
    if isinstance(equation, AbstractColumns):
        parts = _parts(equation)
        alone = len(columns) == 1
        names = [part if alone else f"{column}_{part}" for column in columns for part in parts]
    elif isinstance(equation, ConstantVelocity):
        # A sensor does not see positions, so that its columns do not name them.
        axes = ("x", "y") if equation.kind == "range_bearing" else tuple(columns)
        names = [f"{axis}_{part}" for part in ("position", "velocity") for axis in axes]
    count = model.state_dim
    if len(names) != count:
        names = [f"state{i}" for i in range(count)]
    # A column of that name is another thing, and both stand in one table.
    return [f"{name}_state" if name in columns else name for name in names]


def _parts(equation: AbstractEquation) -> list[str]:
    """The coordinates of one column."""
    first = LATENT.get(equation.kind)
    if isinstance(equation, Structural):
        parts = [first or "level"]
        if equation.slope_scale is not None:
            parts.append("slope")
        if equation.seasonal_scale is not None and equation.harmonics:
            cycles = range(1, equation.harmonics + 1)
            parts += [f"cycle{i}_{part}" for i in cycles for part in ("cos", "sin")]
        elif equation.seasonal_scale is not None:
            parts += ["season", *(f"season_lag{i}" for i in range(1, equation.period - 1))]
        return parts
    if isinstance(equation, MeanReverting):
        return [first or "signal", *(["shock"] if equation.augmented else [])]
    if isinstance(equation, Lagged):
        order = equation.coefficients.shape[1]
        return ["signal", *(f"signal_lag{i}" for i in range(1, order))]
    return []
