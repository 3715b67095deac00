"""The ready models by name: what they are, what can be chosen, and how they start from data."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from retrodict._errors import ModelError, guess, nearest
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
"""The largest dimension of a state that an option may ask for: matrices are dense."""


class Option(NamedTuple):
    """A choice that a ready model offers.

    Attributes:
        kind: the type of its value: `bool`, `int`, `float`, or `list` for a list of numbers.
        default: the value if nothing is chosen.
        help: one line.
    """

    kind: type
    default: Any
    help: str


class ReadyModel(NamedTuple):
    """A ready model.

    Attributes:
        name: its name, which is that of its constructor.
        constructor: the function of `retrodict.models`.
        description: one line.
        options: what can be chosen, by name.
        obs_dim: the number of columns, if it is not free.
        starts: a function of a model and a `Sample` to starting values by name.
    """

    name: str
    constructor: Callable[..., StateSpaceModel]
    description: str
    options: dict[str, Option]
    obs_dim: int | None
    starts: Callable[[StateSpaceModel, Sample], dict[str, Any]]

    def build(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        obs_dim: int = 1,
        key: PRNGKey | None = None,
    ) -> StateSpaceModel:
        """The model with these options.

        Args:
            options: some of the options.
            obs_dim: how many columns the data have.
            key: a typed key, for models with random weights.

        Raises:
            ModelError: if an option is not known, or its value is wrong, or the columns do not fit.
        """
        chosen = check_options(self, options or {})
        if self.obs_dim not in (None, obs_dim):
            raise ModelError(f"{self.name} is a model of {self.obs_dim} columns, got {obs_dim}.")
        accepted = inspect.signature(self.constructor).parameters
        if "obs_dim" in accepted:
            chosen["obs_dim"] = obs_dim
        elif "dim" in accepted:
            chosen["dim"] = obs_dim
        if "key" in accepted:
            if key is None:
                raise ModelError(f"{self.name} starts from random weights: pass a key.")
            chosen["key"] = key
        try:
            return self.constructor(**chosen)
        except ValueError as error:
            raise ModelError(str(error)) from error

    def inputs(self, options: Mapping[str, Any]) -> list[str]:
        """What the model reads as inputs with these options, in order and in words."""
        chosen = {name: option.default for name, option in self.options.items()} | dict(options)
        wanted = ["the length of the step"] if chosen.get("irregular") else []
        if chosen.get("exposure"):
            wanted.append("the exposure")
        if "total_count" in chosen and not chosen["total_count"]:
            wanted.append("the number of trials")
        return wanted

    def start(
        self,
        model: StateSpaceModel,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> StateSpaceModel:
        """The model with starting values from data: see `start_from`."""
        found = self.starts(model, sample_of(ys, mask, inputs, length))
        # What was fixed by somebody stays; the prior is fixed by construction and follows the data.
        kept = {
            name: value
            for name, value in found.items()
            if name.startswith("prior.") or not is_fixed(model, name)
        }
        return with_parameters(model, kept)


_IRREGULAR = Option(bool, False, "whether times are uneven, with the step as the first input")
_WALK = Option(bool, False, "a random walk instead of an AR(1) process")
_EXPOSURE = Option(bool, False, "whether exposures come as the last input")

READY: dict[str, ReadyModel] = {
    ready.name: ready
    for ready in (
        ReadyModel(
            "local_level",
            local_level,
            "a level that wanders, seen with noise",
            {"irregular": _IRREGULAR},
            None,
            start_structural,
        ),
        ReadyModel(
            "local_trend",
            local_trend,
            "a level with a slope, both of which wander",
            {"irregular": _IRREGULAR},
            None,
            start_structural,
        ),
        ReadyModel(
            "seasonal",
            seasonal,
            "a level, a slope if wished, and a season",
            {
                "period": Option(int, 12, "how many steps a season lasts"),
                "harmonics": Option(int, 0, "cycles of the season; 0 for one effect a step"),
                "slope": Option(bool, False, "whether the level has a slope"),
                "irregular": _IRREGULAR,
            },
            None,
            start_structural,
        ),
        ReadyModel(
            "autoregressive",
            autoregressive,
            "an autoregression around a mean, seen with noise",
            {"order": Option(int, 1, "the number of lags"), "irregular": _IRREGULAR},
            None,
            start_autoregressive,
        ),
        ReadyModel(
            "stochastic_volatility",
            stochastic_volatility,
            "returns whose log variance is an AR(1) process",
            {
                "leverage": Option(bool, False, "whether returns move the next variance"),
                "irregular": _IRREGULAR,
            },
            None,
            start_volatility,
        ),
        ReadyModel(
            "poisson_counts",
            poisson_counts,
            "Poisson counts with a latent log rate",
            {"walk": _WALK, "exposure": _EXPOSURE, "irregular": _IRREGULAR},
            None,
            start_counts,
        ),
        ReadyModel(
            "negative_binomial_counts",
            negative_binomial_counts,
            "counts that vary more than Poisson ones, with a latent log rate",
            {"walk": _WALK, "exposure": _EXPOSURE, "irregular": _IRREGULAR},
            None,
            start_counts,
        ),
        ReadyModel(
            "binomial_counts",
            binomial_counts,
            "successes among trials, with latent log odds",
            {
                "total_count": Option(int, 0, "the number of trials; 0 if it is the last input"),
                "walk": _WALK,
                "irregular": _IRREGULAR,
            },
            None,
            start_counts,
        ),
        ReadyModel(
            "constant_velocity",
            constant_velocity,
            "something that moves with nearly constant velocity, its position seen with noise",
            {"irregular": _IRREGULAR},
            None,
            start_velocity,
        ),
        ReadyModel(
            "range_bearing",
            range_bearing,
            "a target in the plane, seen by a sensor as range and bearing",
            {
                "sensor": Option(list, (0.0, 0.0), "where the sensor stands, two numbers"),
                "wrap": Option(bool, True, "whether residuals of bearings are wrapped"),
                "irregular": _IRREGULAR,
            },
            2,
            start_range_bearing,
        ),
        ReadyModel(
            "neural_decoder",
            neural_decoder,
            "latent linear dynamics, decoded by a network",
            {
                "latent_dim": Option(int, 2, "the dimension of the state"),
                "width": Option(int, 32, "units of each hidden layer"),
                "depth": Option(int, 1, "hidden layers"),
            },
            None,
            start_neural,
        ),
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
    """A ready model by its name.

    Example:
        >>> import retrodict as rd
        >>> rd.models.from_options("seasonal", {"period": 4}).state_dim
        4

    Args:
        name: one of `READY`.
        options: some of its options.
        obs_dim: how many columns the data have.
        key: a typed key, for models with random weights.

    Raises:
        ModelError: if the name or an option is not known, or a value is wrong.
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
    """A ready model with starting values from data: levels, scales and rates of the right size.

    Parameters that were fixed stay. A model that is not a ready one is returned as it is.

    Args:
        model: a model.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: how many rows exist, one integer a series or one for all.
    """
    equation = getattr(model.transition, "fn", None)
    if not isinstance(equation, AbstractEquation) or equation.kind not in READY:
        return model
    return READY[equation.kind].start(model, ys, mask=mask, inputs=inputs, length=length)


def ready_model(name: str) -> ReadyModel:
    """The record of a ready model, refused with the nearest name if there is none."""
    if name not in READY:
        raise ModelError(
            f"There is no ready model {name}.{guess(name, READY)} There are {', '.join(READY)}."
        )
    return READY[name]


def check_options(
    ready: ReadyModel, options: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """The options, refused unless all are known and of the right type."""
    for name, value in options.items():
        if name not in ready.options:
            raise ModelError(
                f"{prefix}{name} is no option of {ready.name}.{nearest(name, ready.options)}"
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
    """The largest value of an option, where it is the size of something."""
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
    """An option as a command line gives it, `key=value`, with its value of the right kind."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ModelError(f"An option is key=value, such as period=12, got {text!r}.")
    if name not in ready.options:
        known = ", ".join(ready.options)
        raise ModelError(
            f"{name} is no option of {ready.name}.{guess(name, ready.options)} It has {known}."
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
