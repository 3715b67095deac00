"""Models by reference: the name of a ready model, a model file, or a Python object.

A model file is data: it names ready models, options and numbers, and nothing in it is executed.
"""

import dataclasses
import importlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from retrodict._arrays import PRNGKey
from retrodict._interface import ModelError, nearest
from retrodict.models._equations import MODELS, Model
from retrodict.models._parameters import fix_parameters, named_parameters, with_parameters
from retrodict.models._registry import (
    check_options,
    option_from_text,
    ready_model,
    refuse_unless,
    start_from,
)

GIVEN = "StateSpaceModel"
"""The reference of a model that was passed as a Python object."""
OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""A reference to an object of a module."""

DOT = re.compile(r"(?<!\d)\.|\.(?!\d)|\.(?=\d+\.)")
"""A dot that is not the decimal point of a number."""

MAX_DOTS = 5000
"""The largest number of such dots in a model file: a key of many parts takes quadratic time."""

SCHEMA_VERSION = 1
"""The version of the schema, the value of the key `retrodict`."""

# The keys of each table, with the type of the value.
TABLES: dict[str, dict[str, str]] = {
    "model": {
        "name": "a text",
        "options": "a table",
        "start": "a table",
        "fixed": "a list of texts",
    },
    "data": {
        "time": "a text",
        "columns": "a list of texts",
        "inputs": "a list of texts",
        "series": "a text or list of texts",
        "freq": "a text or number",
        "step_input": "true or false",
        "time_format": "a text",
    },
    "fit": {"family": "a text", "num_steps": "a whole number"},
}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The specification of a model, its data and its fit, from a reference.

    Attributes:
        reference: the reference.
        name: the name of a ready model; `None` if the reference is to an object.
        options: options of the ready model.
        start: starting values by parameter, in place of those from data.
        fixed: names of parameters that are not learned.
        data: how to read data: some of the arguments of `retrodict.data.read`.
        fit: how to fit: some of `family` and `num_steps`.
        given: the model, if it was passed as a Python object.
    """

    reference: str
    name: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    start: dict[str, Any] = dataclasses.field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    given: Model | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def is_given(self) -> bool:
        """Whether the model was passed as a Python object without a name."""
        return self.reference == GIVEN

    def build(self, obs_dim: int = 1, key: PRNGKey | None = None) -> Model:
        """Build the model, with its starting values set and its fixed parameters frozen.

        Args:
            obs_dim: the number of columns of the data; ignored for Python objects.
            key: a typed key, for models with random weights.

        Raises:
            ModelError: if the model cannot be built.
        """
        return self._finished(self._bare(obs_dim, key))

    def build_from(
        self,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
        key: PRNGKey | None = None,
    ) -> Model:
        """Build the model with starting values from data, except those that the reference sets.

        Args:
            ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
            mask: true where an entry was observed, of the shape of `ys`.
            inputs: inputs, of shape `(batch, time, input)`.
            length: the number of rows, one integer per series or one for all.
            key: a typed key, for models with random weights.
        """
        model = self._bare(ys.shape[-1], key)
        model = start_from(model, ys, mask=mask, inputs=inputs, length=length)
        return self._finished(model)

    def _bare(self, obs_dim: int, key: PRNGKey | None) -> Model:
        if self.given is not None:
            return self.given
        if self.is_given:
            raise ModelError(
                "The model was passed as a Python object, which a record cannot hold; pass it as"
                " {model}",
                model=...,
            )
        if self.name is None:
            return _object_model(self.reference)
        return ready_model(self.name).build(self.options, obs_dim=obs_dim, key=key)

    def _finished(self, model: Model) -> Model:
        # All at once: entries of one parameter may be valid together and not one by one.
        try:
            model = with_parameters(model, self.start)
        except ModelError as error:
            name = next((name for name in self.start if f" {name}" in f" {error}"), None)
            key = "model.start" if name is None else f"model.start.{name}"
            raise ModelError(f"{self.reference}: {key}: {{error}}", error=error) from error
        return fix_parameters(model, self.fixed)

    def with_options(self, texts: Iterable[str]) -> "ModelSpec":
        """Return the specification with options of the ready model, each as a text `key=value`.

        Example:
            >>> import retrodict as rd
            >>> rd.models.load("seasonal").with_options(["period=4", "slope=true"]).options
            {'period': 4, 'slope': True}

        Args:
            texts: such as `"period=52"`, `"slope=true"` or `"sensor=0,1.5"`.

        Raises:
            ModelError: if the model has no such option, or a value has the wrong type.
        """
        texts = list(texts)
        if not texts:
            return self
        if self.name is None:
            raise ModelError(
                f"{self.reference} is not a ready model, and only ready models have options."
            )
        ready = ready_model(self.name)
        chosen = dict(option_from_text(ready, text) for text in texts)
        spec = dataclasses.replace(self, options={**self.options, **chosen})
        with _located(self.reference):
            _check_ready(spec)
        return spec

    def all_options(self) -> dict[str, Any]:
        """Return all options, including defaults; none for Python objects."""
        if self.name is None:
            return {}
        defaults = {key: option.default for key, option in ready_model(self.name).options.items()}
        return {**defaults, **self.options}

    def inputs(self) -> list[str] | None:
        """Return the inputs that the model reads, in words; `None` for Python objects."""
        return None if self.name is None else ready_model(self.name).inputs(self.options)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that JSON can store, with the keys of a model file."""
        model = {key: getattr(self, key) for key in TABLES["model"]} | {"fixed": list(self.fixed)}
        return {
            "retrodict": SCHEMA_VERSION,
            "reference": self.reference,
            "model": {key: value for key, value in model.items() if value},
            "data": dict(self.data),
            "fit": dict(self.fit),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "ModelSpec":
        """Return the specification of a dictionary of `to_dict`, checked like a model file."""
        reference = record.get("reference")
        if not isinstance(reference, str):
            raise ModelError("A record of a model must have a reference.")
        if _is_object(reference) and not OBJECT.fullmatch(reference):
            raise ModelError(f"{reference!r} is not a reference to an object, as module:name is.")
        content = {key: value for key, value in record.items() if key != "reference"}
        is_object = _is_object(reference) or reference == GIVEN
        with _located(reference):
            return _checked(content, reference, is_object=is_object)


def read_toml(path: str | Path) -> ModelSpec:
    """Read a model file; the page on model files describes the schema.

    Example:
        >>> import tempfile, retrodict as rd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open(f"{folder}/nile.toml", "w") as file:
        ...         print("retrodict = 1", file=file)
        ...         print('model = { name = "local_level", fixed = ["obs_scale"] }', file=file)
        ...     spec = rd.models.read_toml(f"{folder}/nile.toml")
        >>> sorted(rd.models.named_parameters(spec.build()))
        ['level_scale']

    Args:
        path: a TOML file.

    Raises:
        ModelError: if the file cannot be read, is not TOML, or holds an unknown key or a value of
            the wrong type; the message names the file and the key.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ModelError(f"{path} cannot be read: it is not a regular file.")
    try:
        text = Path(path).read_text("utf-8")
        if len(DOT.findall(text)) > MAX_DOTS:
            raise ModelError(f"{path} has more than {MAX_DOTS} dots in names; use shorter names.")
        content = tomllib.loads(text)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise ModelError(f"{path} is not TOML: {error}.") from error
    with _located(str(path)):
        return _checked(content, str(path))


def load(
    reference: str | Model | Callable[[], Model] | ModelSpec,
) -> ModelSpec:
    """Return the specification of a model.

    Example:
        >>> import retrodict as rd
        >>> rd.models.load("local_trend").build(obs_dim=2).state_dim
        4
        >>> rd.models.load(rd.models.local_level()).build().state_dim
        1

    Args:
        reference: the name of a ready model, the path of a model file that ends in `.toml`, or
            `module:name`, where the object is a `StateSpaceModel` or a function of no arguments
            that returns one; a module is imported in this case only. Or a Python object: a
            `StateSpaceModel`, or a function of no arguments that returns one.

    Raises:
        ModelError: if there is no such model.
        TypeError: if it is none of these types.
    """
    if isinstance(reference, ModelSpec):
        return reference
    if not isinstance(reference, str):
        if not (isinstance(reference, MODELS) or callable(reference)):
            raise TypeError(
                "A model must be a name, a StateSpaceModel or a function of no arguments that"
                f" returns one, got {type(reference).__name__}."
            )
        name = getattr(reference, "__qualname__", GIVEN)
        return ModelSpec(GIVEN, given=_built(reference, name))
    if reference.endswith(".toml"):
        return read_toml(reference)
    if _is_object(reference):
        _object_model(reference)
        return ModelSpec(reference)
    try:
        ready_model(reference)
    except ModelError as error:
        raise ModelError(
            "{error} A model is one of these names, a file that ends in .toml, or module:name.",
            error=error,
        ) from error
    return ModelSpec(reference, reference)


def _is_object(reference: str) -> bool:
    return ":" in reference and not reference.endswith(".toml")


def _object_model(reference: str) -> Model:
    module_name, _, attribute = reference.partition(":")
    if module_name.endswith(".py") or "/" in module_name or module_name.startswith("."):
        raise ModelError(f"{reference}: name a module, not its file, such as my_module:model.")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = _reason(error)
        raise ModelError(f"{reference}: {module_name} cannot be imported: {reason}.") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ModelError(
            f"{reference}: {module_name} has no {attribute!r}.{nearest(attribute, public)}"
        )
    return _built(getattr(module, attribute), reference)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")


def _built(model: Any, reference: str) -> Model:
    """Return a model, or call the function that returns one."""
    if callable(model) and not isinstance(model, MODELS):
        try:
            model = model()
        except (Exception, SystemExit) as error:
            raise ModelError(f"{reference}: calling it raised {_reason(error)}.") from error
    if not isinstance(model, MODELS):
        raise ModelError(
            f"{reference} must be a StateSpaceModel or a function of no arguments that returns one,"
            f" got {type(model).__name__}."
        )
    return model


def _checked(content: Mapping[str, Any], reference: str, *, is_object: bool = False) -> ModelSpec:
    """Return the specification of the content of a file; refuse unknown keys and wrong types."""
    _refuse_unknown(content, ["retrodict", *TABLES], "")
    version = content.get("retrodict")
    if version is None:
        raise ModelError(f"retrodict is missing: write retrodict = {SCHEMA_VERSION}.")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ModelError(
            f"retrodict is the version of the schema and must be {SCHEMA_VERSION}, got {version!r}."
        )
    tables: dict[str, Any] = {table: content.get(table, {}) for table in TABLES}
    for table, values in tables.items():
        refuse_unless(values, "a table", table)
        _refuse_unknown(values, TABLES[table], f"{table}.")
        for key, value in values.items():
            refuse_unless(value, TABLES[table][key], f"{table}.{key}")
    model = tables["model"]
    if "name" not in model and not is_object:
        raise ModelError('model.name is missing: write e.g. name = "local_level".')
    for name, value in model.get("start", {}).items():
        refuse_unless(value, "a number or list of numbers", f"model.start.{name}")
    if (steps := tables["fit"].get("num_steps", 1)) < 1:
        raise ModelError(f"fit.num_steps must be at least 1, got {steps}.")
    model = {**model, "fixed": tuple(model.get("fixed", ()))}
    spec = ModelSpec(reference, **model, data=tables["data"], fit=tables["fit"])
    if spec.name is not None:
        _check_ready(spec)
    return spec


def _check_ready(spec: ModelSpec) -> None:
    """Refuse options and parameters that the ready model does not have, by building it."""
    with _located("model.name"):
        ready = ready_model(spec.name or "")
    check_options(ready, spec.options, "model.options.")
    with _located("model.options"):
        key = jax.random.key(0) if ready.has_random_weights else None
        model = ready.build(spec.options, obs_dim=ready.obs_dim or 1, key=key)
    for name, value in spec.start.items():
        with _located(f"model.start.{name}"):
            # Lists have as many entries as the data have columns, which are not known yet.
            default = named_parameters(model, fixed=True).get(name, 0.5)
            with_parameters(model, {name: default if isinstance(value, list) else value})
    with _located("model.fixed"):
        fix_parameters(model, spec.fixed)


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Begin the messages of errors with the file or the key."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{where}: {{error}}", error=error) from error


def _refuse_unknown(values: Mapping[str, Any], known: Iterable[str], table: str) -> None:
    for key in values:
        if key not in known:
            raise ModelError(f"there is no key {table}{key}.{nearest(key, known)}")
