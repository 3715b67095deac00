"""Names of the coordinates of states and of the entries of parameters."""

import re
from collections.abc import Sequence

from retrodict._model import unwrap
from retrodict.models._by_regime import NUM_AXES, TRANSITION, SwitchingWalk
from retrodict.models._equations import (
    AbstractColumns,
    AbstractEquation,
    ConstantVelocity,
    Lagged,
    MeanReverting,
    Model,
    Structural,
    equation_of,
)
from retrodict.switching import SwitchingModel, num_base_regimes

LATENT = {
    "stochastic_volatility": "log_variance",
    "poisson_counts": "log_rate",
    "negative_binomial_counts": "log_rate",
    "binomial_counts": "log_odds",
}
"""Names of first coordinates that are not in the unit of their column."""


def state_names(model: Model, columns: Sequence[str] = ("y",)) -> list[str]:
    """Return a name for each coordinate of the state.

    Coordinates of ready models have descriptive names, after the name of their column if there are
    several columns; others are numbered.

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
    equation = equation_of(model)
    names: list[str] = []
    if isinstance(equation, AbstractColumns):
        parts = _parts(equation)
        alone = len(columns) == 1
        names = [part if alone else f"{column}_{part}" for column in columns for part in parts]
    elif isinstance(equation, SwitchingWalk):
        names = ["level"] if len(columns) == 1 else [f"{column}_level" for column in columns]
    elif isinstance(equation, ConstantVelocity):
        # The columns of a sensor are not positions.
        axes = ("x", "y") if equation.kind == "range_bearing" else tuple(columns)
        names = [f"{axis}_{part}" for part in ("position", "velocity") for axis in axes]
    count = model.state_dim
    if len(names) != count:
        names = [f"state{i}" for i in range(count)]
    # Tables may hold both a state and a column of this name.
    return [f"{name}_state" if name in columns else name for name in names]


MEMORY = re.compile(r"(season|signal)_lag\d+")


def is_memory(model: Model) -> list[bool]:
    """Return, for each coordinate of the state, whether it only holds an earlier value of another.

    Such coordinates reduce a model of several lags to one lag: the seasons of the last rows in
    `seasonal`, the earlier values in `autoregressive`. Other models have none.

    Example:
        >>> import retrodict as rd
        >>> rd.models.is_memory(rd.models.seasonal(period=4))
        [False, False, True, True]

    Args:
        model: any model.
    """
    equation = equation_of(model)
    parts = _parts(equation) if isinstance(equation, AbstractColumns) else []
    if not parts or model.state_dim % len(parts):
        return [False] * model.state_dim
    return [MEMORY.fullmatch(part) is not None for part in parts] * (model.state_dim // len(parts))


NOT_BY_COLUMN = ("dynamics", "state_scale")
"""Parameters of ready models that belong to states, not to columns."""


def entry_name(model: Model, name: str, index: tuple[int, ...], columns: Sequence[str]) -> str:
    """Return the name of one entry of a parameter, by the column or the state that it belongs to.

    Entries of other than ready models are named by their index.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.seasonal(period=4, obs_dim=2)
        >>> rd.models.entry_name(model, "level_scale", (1,), ["infl", "gdp"])
        'level_scale[gdp]'
        >>> rd.models.entry_name(model, "prior.mean", (1,), ["infl", "gdp"])
        'prior.mean[infl_season]'

    Args:
        model: any model.
        name: a name of `named_parameters`.
        index: the place of the entry in the parameter; empty if it is a single number.
        columns: the names of the observed columns.
    """
    if not index:
        return name
    words = [str(entry) for entry in index]
    if isinstance(model, SwitchingModel):
        words = _by_regime(model, name, index, columns)
    elif isinstance(equation_of(model), AbstractEquation):
        if name.startswith("prior.") and len(index) == 1:
            words = [state_names(model, columns)[index[0]]]
        elif "." not in name and name not in NOT_BY_COLUMN and index[0] < len(columns):
            words[0] = columns[index[0]]
    return f"{name}[{','.join(words)}]"


def regime_names(model: SwitchingModel) -> list[str]:
    """Return the names of the regimes, which tables, parameters and pictures use."""
    return [f"regime_{j}" for j in range(1, num_base_regimes(model) + 1)]


def _by_regime(
    model: SwitchingModel, name: str, index: tuple[int, ...], columns: Sequence[str]
) -> list[str]:
    """Return the words for the index of an entry: by regime, by column, then by number."""
    regimes, words = regime_names(model), [str(entry) for entry in index]
    if name == TRANSITION:
        return [regimes[entry] for entry in index]
    if name.startswith("prior.") and len(index) == 1:
        return [state_names(model, columns)[index[0]]]
    if name not in NUM_AXES:
        return words
    switches = len(index) > NUM_AXES[name]
    if switches:
        words[0] = regimes[index[0]]
    if index[switches] < len(columns):
        words[switches] = columns[index[switches]]
    return words


def _parts(equation: AbstractEquation) -> list[str]:
    """Return the names of the coordinates of one column."""
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
        order = unwrap(equation.coefficients).shape[1]
        return ["signal", *(f"signal_lag{i}" for i in range(1, order))]
    return []
