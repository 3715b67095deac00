"""The ready models by name: constructors, options and starting values."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from retrodict._errors import Argument, ModelError, guess, nearest
from retrodict._model import StateSpaceModel
from retrodict._types import PRNGKey
from retrodict.models._counts import (
    binomial_counts,
    negative_binomial_counts,
    poisson_counts,
    start_counts,
)
from retrodict.models._equations import AbstractEquation
from retrodict.models._neural import neural_decoder, start_neural
from retrodict.models._parameters import is_fixed, with_parameters
from retrodict.models._start import Sample, sample_of
from retrodict.models._structural import (
    autoregressive,
    local_level,
    local_trend,
    seasonal,
    start_autoregressive,
    start_structural,
)
from retrodict.models._tracking import (
    constant_velocity,
    range_bearing,
    start_range_bearing,
    start_velocity,
)
from retrodict.models._volatility import start_volatility, stochastic_volatility

MOST_STATES = 2000
"""The largest state dimension that an option may request: matrices are dense."""


class Option(NamedTuple):
    """An option of a ready model.

    Attributes:
        kind: the type of its value: `bool`, `int`, `float`, or `list` for a list of numbers.
        default: the default value.
        help: one line.
    """

    kind: type
    default: Any
    help: str


OPTION_HELP = {
    "irregular": "whether times are irregular, with the step as the first input",
    "period": "the number of steps of a season",
    "harmonics": "the number of cycles of the season; 0 for one effect per step",
    "slope": "whether the level has a slope",
    "order": "the number of lags",
    "leverage": "whether returns move the next variance",
    "walk": "a random walk instead of an AR(1) process",
    "exposure": "whether exposures are the last input",
    "total_count": "the number of trials; 0 if it is the last input",
    "sensor": "the position of the sensor, two numbers",
    "wrap": "whether residuals of bearings are wrapped",
    "latent_dim": "the dimension of the state",
    "width": "the number of units per hidden layer",
    "depth": "the number of hidden layers",
}
"""The arguments of constructors that are options, with their help."""


class ReadyModel(NamedTuple):
    """A ready model.

    Attributes:
        constructor: the function of `retrodict.models`.
        description: one line.
        starts: a function of a model and a `Sample` that returns starting values by name.
        obs_dim: the number of columns, if it is fixed.
    """

    constructor: Callable[..., StateSpaceModel]
    description: str
    starts: Callable[[StateSpaceModel, Sample], dict[str, Any]]
    obs_dim: int | None = None

    @property
    def name(self) -> str:
        """The name of the model, which is that of its constructor."""
        return self.constructor.__name__

    @property
    def options(self) -> dict[str, Option]:
        """The options by name, with types and defaults from the signature of the constructor."""
        options = {}
        for name, parameter in inspect.signature(self.constructor).parameters.items():
            if name in OPTION_HELP:
                kind = type(parameter.default)
                kind = list if kind is tuple else kind
                options[name] = Option(kind, parameter.default, OPTION_HELP[name])
        return options

    def build(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        obs_dim: int = 1,
        key: PRNGKey | None = None,
    ) -> StateSpaceModel:
        """Build the model with these options.

        Args:
            options: values by name; defaults for the others.
            obs_dim: the number of columns of the data.
            key: a typed key, for models with random weights.

        Raises:
            ModelError: if an option is unknown, a value is invalid, or the columns do not fit.
        """
        chosen = check_options(self, options or {})
        if self.obs_dim not in (None, obs_dim):
            raise ModelError(f"{self.name} is a model of {self.obs_dim} columns, got {obs_dim}.")
        accepted = inspect.signature(self.constructor).parameters
        chosen |= {name: obs_dim for name in ("obs_dim", "dim") if name in accepted}
        if "key" in accepted:
            if key is None:
                raise ModelError(f"{self.name} has random initial weights: pass ", Argument("key"))
            chosen["key"] = key
        try:
            return self.constructor(**chosen)
        except ValueError as error:
            raise ModelError(error) from error

    def inputs(self, options: Mapping[str, Any]) -> list[str]:
        """Return the inputs that the model reads with these options, in order and in words."""
        chosen = {name: option.default for name, option in self.options.items()} | dict(options)
        wanted = {
            "the length of the step": chosen.get("irregular"),
            "the exposure": chosen.get("exposure"),
            "the number of trials": chosen.get("total_count") == 0,
        }
        return [name for name, is_read in wanted.items() if is_read]

    def start(
        self,
        model: StateSpaceModel,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> StateSpaceModel:
        """Return the model with starting values from data: see `start_from`."""
        values = self.starts(model, sample_of(ys, mask, inputs, length))
        # Parameters that the user fixed stay. Priors are fixed by construction and follow the data.
        free = {
            name: value
            for name, value in values.items()
            if name.startswith("prior.") or not is_fixed(model, name)
        }
        return with_parameters(model, free)


READY: dict[str, ReadyModel] = {
    ready.name: ready
    for ready in (
        ReadyModel(local_level, "a random walk, observed with noise", start_structural),
        ReadyModel(local_trend, "a level with a slope, both random walks", start_structural),
        ReadyModel(seasonal, "a level, an optional slope, and a season", start_structural),
        ReadyModel(
            autoregressive,
            "an autoregression around a mean, observed with noise",
            start_autoregressive,
        ),
        ReadyModel(
            stochastic_volatility,
            "returns whose log variance is an AR(1) process",
            start_volatility,
        ),
        ReadyModel(poisson_counts, "Poisson counts with a latent log rate", start_counts),
        ReadyModel(
            negative_binomial_counts,
            "overdispersed counts with a latent log rate",
            start_counts,
        ),
        ReadyModel(binomial_counts, "successes among trials, with latent log odds", start_counts),
        ReadyModel(
            constant_velocity,
            "a target with nearly constant velocity, its position observed with noise",
            start_velocity,
        ),
        ReadyModel(
            range_bearing,
            "a target in the plane, observed by a sensor as range and bearing",
            start_range_bearing,
            obs_dim=2,
        ),
        ReadyModel(neural_decoder, "latent linear dynamics, decoded by a network", start_neural),
    )
}
"""The ready models by name."""


def from_options(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    obs_dim: int = 1,
    key: PRNGKey | None = None,
) -> StateSpaceModel:
    """Build a ready model by its name.

    Example:
        >>> import retrodict as rd
        >>> rd.models.from_options("seasonal", {"period": 4}).state_dim
        4

    Args:
        name: one of `READY`.
        options: values of its options by name; defaults for the others.
        obs_dim: the number of columns of the data.
        key: a typed key, for models with random weights.

    Raises:
        ModelError: if the name or an option is unknown, or a value is invalid.
    """
    return ready_model(name).build(options, obs_dim=obs_dim, key=key)


def start_from(
    model: StateSpaceModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> StateSpaceModel:
    """Set the parameters of a ready model to starting values from data.

    Levels, scales and rates get the magnitude of the data. Fixed parameters stay. Any other model
    is returned unchanged.

    Args:
        model: a model.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of rows, one integer per series or one for all.
    """
    equation = getattr(model.transition, "fn", None)
    if not isinstance(equation, AbstractEquation) or equation.kind not in READY:
        return model
    return READY[equation.kind].start(model, ys, mask=mask, inputs=inputs, length=length)


def ready_model(name: str) -> ReadyModel:
    """Return the record of a ready model; refuse an unknown name with the nearest one."""
    if name not in READY:
        raise ModelError(
            f"There is no ready model {name}.{guess(name, READY)} There are {', '.join(READY)}."
        )
    return READY[name]


def check_options(
    ready: ReadyModel, options: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return the options; refuse unknown names and wrong types."""
    for name, value in options.items():
        if name not in ready.options:
            raise ModelError(
                f"{prefix}{name} is not an option of {ready.name}.{nearest(name, ready.options)}"
            )
        kind = ready.options[name].kind
        if not _is_of(value, kind):
            expected = "a list of numbers" if kind is list else f"of type {kind.__name__}"
            raise ModelError(
                f"{prefix}{name} must be {expected}, got {value!r} of type {type(value).__name__}."
            )
        if not isinstance(value, bool) and isinstance(value, int) and value > _most(name, options):
            raise ModelError(
                f"{prefix}{name} must be at most {_most(name, options)}, got {value}: the state or"
                " its network would not fit into memory."
            )
    return dict(options)


def _most(name: str, options: Mapping[str, Any]) -> int | float:
    """Return the largest value of an option that is a size; infinity for others."""
    if name == "period" and not options.get("harmonics"):
        return MOST_STATES
    return {
        "harmonics": MOST_STATES // 2,
        "order": MOST_STATES,
        "latent_dim": MOST_STATES,
        "width": 4096,
        "depth": 64,
    }.get(name, math.inf)


def option_from_text(ready: ReadyModel, text: str) -> tuple[str, Any]:
    """Parse an option of the command line, `key=value`."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ModelError(f"An option is key=value, such as period=12, got {text!r}.")
    if name not in ready.options:
        names = ", ".join(ready.options)
        raise ModelError(
            f"{name} is not an option of {ready.name}.{guess(name, ready.options)} It has {names}."
        )
    kind = ready.options[name].kind
    try:
        return name, _PARSERS[kind](value)
    except (KeyError, ValueError) as error:
        raise ModelError(f"The option {name} must be {_KINDS[kind]}, got {value!r}.") from error


_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
    list: lambda text: [float(part) for part in text.strip("[]()").split(",")],
}

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "numbers with commas between them",
}


def _is_of(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, (list, tuple)) and all(_is_of(entry, float) for entry in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
