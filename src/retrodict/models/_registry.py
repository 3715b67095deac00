"""The ready models by name: constructors, options and starting values."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from retrodict._arrays import PRNGKey
from retrodict._interface import ModelError, guess, nearest
from retrodict._model import VaryingLinearGaussianKernel
from retrodict.models._equations import Model, equation_of
from retrodict.models._parameters import named_parameters, with_parameters
from retrodict.models._start import Sample, sample_of

LARGEST = {
    "period": 2000,
    "harmonics": 1000,
    "order": 2000,
    "latent_dim": 2000,
    "width": 4096,
    "depth": 64,
    "regimes": 50,
}
"""The largest values of options that are sizes: matrices are dense. A season of harmonics may have
any period."""


class Option(NamedTuple):
    """An option of a ready model.

    Attributes:
        kind: the type of its value: `bool`, `int`, `float`, `str`, or `list` for a list of numbers.
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
    "regimes": "the number of regimes",
    "switching": "what switches with the regime, separated by commas",
    "emission": "the law of a row: gaussian or poisson",
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

    constructor: Callable[..., Model]
    description: str
    starts: Callable[[Model, Sample], dict[str, Any]]
    obs_dim: int | None = None

    @property
    def name(self) -> str:
        """The name of the model, which is that of its constructor."""
        return self.constructor.__name__

    @property
    def has_random_weights(self) -> bool:
        """Whether the model is built with a key."""
        return "key" in inspect.signature(self.constructor).parameters

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
    ) -> Model:
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
        if self.has_random_weights:
            if key is None:
                raise ModelError(f"{self.name} has random initial weights: pass {{key}}", key=...)
            chosen["key"] = key
        try:
            return self.constructor(**chosen)
        except ValueError as error:
            raise ModelError("{error}", error=error) from error

    def inputs(self, options: Mapping[str, Any]) -> list[str]:
        """Return the inputs that the model reads with these options, in order and in words."""
        chosen = {name: option.default for name, option in self.options.items()} | dict(options)
        is_input = {
            "the length of the step": chosen.get("irregular"),
            "the exposure": chosen.get("exposure"),
            "the number of trials": chosen.get("total_count") == 0,
        }
        return [name for name, is_read in is_input.items() if is_read]

    def start(self, model: Model, ys: Any, **series: Any) -> Model:
        """Return the model with starting values from data, as `start_from` does."""
        irregular = isinstance(model.transition, VaryingLinearGaussianKernel)
        values = self.starts(model, sample_of(ys, irregular, **series))
        # Parameters that the user fixed stay. Priors are fixed by construction and follow the data.
        learned = named_parameters(model)
        free = {
            name: value
            for name, value in values.items()
            if name.startswith("prior.") or name in learned
        }
        return with_parameters(model, free)


READY: dict[str, ReadyModel] = {}
"""The ready models by name."""

Constructor = TypeVar("Constructor", bound=Callable[..., Model])


def ready(
    description: str, starts: Callable[..., dict[str, Any]], obs_dim: int | None = None
) -> Callable[[Constructor], Constructor]:
    """Register the constructor of a ready model; the arguments are those of `ReadyModel`."""

    def register(constructor: Constructor) -> Constructor:
        model = ReadyModel(constructor, description, starts, obs_dim)
        READY[model.name] = model
        return constructor

    return register


def from_options(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    obs_dim: int = 1,
    key: PRNGKey | None = None,
) -> Model:
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
    model: Model,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Model:
    """Set the parameters of a ready model to starting values from data.

    Levels, scales and rates get the magnitude of the data. Fixed parameters stay. Any other model
    is returned unchanged.

    Example:
        >>> import numpy as np, retrodict as rd
        >>> ys = np.array([[1120.0], [1160.0], [963.0], [1210.0], [1160.0]])
        >>> model = rd.models.start_from(rd.models.local_level(), ys)
        >>> scale = rd.models.named_parameters(model)["level_scale"]
        >>> bool(10 < scale[0] < 1000)  # the magnitude of the data
        True

    Args:
        model: a model.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of rows, one integer per series or one for all.
    """
    kind = getattr(equation_of(model), "kind", None)
    if kind not in READY:
        return model
    return READY[kind].start(model, ys, mask=mask, inputs=inputs, length=length)


def ready_model(name: str) -> ReadyModel:
    """Return the record of a ready model; refuse an unknown name with the nearest one."""
    if name not in READY:
        raise ModelError(
            f"There is no ready model {name}.{guess(name, READY)} There are"
            f" {', '.join(sorted(READY))}."
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
        refuse_unless(value, KINDS[ready.options[name].kind], f"{prefix}{name}")
        is_free = name == "period" and options.get("harmonics")
        most = math.inf if is_free else LARGEST.get(name, math.inf)
        if isinstance(value, int) and value > most:
            raise ModelError(
                f"{prefix}{name} must be at most {most}, got {value}: the state or its network"
                " would not fit into memory."
            )
    return dict(options)


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
        raise ModelError(f"The option {name} must be {KINDS[kind]}, got {value!r}.") from error


_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
    str: str,
    list: lambda text: [float(part) for part in text.strip("[]()").split(",")],
}

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list of numbers",
}
"""The kinds of options in words."""

_TYPES = {"text": str, "table": dict, "whole number": int, "number": (int, float)}


def refuse_unless(value: Any, kind: str, name: str) -> None:
    """Refuse a value of another kind.

    Args:
        value: the value.
        kind: kinds in words, such as `"a text or list of texts"`.
        name: the name of the value, for messages.
    """
    if not _is_kind(value, kind.removeprefix("a ")):
        raise ModelError(f"{name} must be {kind}, got {value!r} of type {type(value).__name__}.")


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "true or false"
    if isinstance(value, list | tuple):
        entries = [entry for entry in _TYPES if f"list of {entry}s" in kind]
        return any(all(_is_kind(each, entry) for each in value) for entry in entries)
    return any(isinstance(value, _TYPES[part]) for part in kind.split(" or ") if part in _TYPES)
