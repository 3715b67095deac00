"""Parameters of a model by name: getting, setting and fixing them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from retrodict._arrays import as_real_array
from retrodict._interface import ModelError, nearest
from retrodict._model import (
    UNBOUNDED,
    AbstractConstrained,
    AbstractParameter,
    Bounded,
    Frozen,
    StationaryCoefficients,
)
from retrodict.models._equations import AbstractNamed, Model

ENTRY = re.compile(r"(?P<name>.*)\[(?P<index>\d+(?:,\d+)*)\]")


class _Place(NamedTuple):
    """The place of a parameter in a model."""

    path: tuple[Any, ...]
    short: str | None
    node: Any
    fixed: bool

    @property
    def long(self) -> str:
        """The path in Python, without the fields of wrappers."""
        return jax.tree_util.keystr(self.path).replace(".tree", "").removeprefix(".")

    @property
    def value(self) -> Array:
        return self.node.value if isinstance(self.node, AbstractParameter) else self.node


def named_parameters(
    model: Model, *, fixed: bool = False, entries: bool = False
) -> dict[str, Array]:
    """Return the parameters of a model by name, each in its natural scale.

    Those of ready models have names such as `level_scale`; others are named by their place in the
    model, such as `transition.weight`.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.local_level(level_scale=0.5)
        >>> sorted(rd.models.named_parameters(model, fixed=True))
        ['level_scale', 'obs_scale', 'prior.mean', 'prior.scale_tril.std']
        >>> sorted(rd.models.named_parameters(model, entries=True))
        ['level_scale[0]', 'obs_scale[0]']

    Args:
        model: any model.
        fixed: whether to return `Frozen` parameters too.
        entries: whether to return single entries, as `transition.weight[0,0]`, instead of arrays.
    """
    places = _places(model).items()
    arrays = {name: place.value for name, place in places if fixed or not place.fixed}
    if not entries:
        return arrays
    return {
        _entry(name, index): value[index]
        for name, value in arrays.items()
        for index in np.ndindex(value.shape)
    }


def _entry(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{','.join(map(str, index))}]" if index else name


def parameter_domains(model: Model) -> dict[str, tuple[float, float]]:
    """Return the open interval in which each entry of a parameter is learned.

    Example:
        >>> import retrodict as rd
        >>> rd.models.parameter_domains(rd.models.local_level())["obs_scale[0]"]
        (0.0, inf)

    Args:
        model: any model.

    Returns:
        By the names of `named_parameters` with `fixed=True, entries=True`: (0, ∞) for scales, the
        bounds of `Bounded` ones, (−1, 1) for the last coefficient of an autoregression, and (−∞, ∞)
        for all others.
    """
    return {
        _entry(name, index): _domain(place.node, index)
        for name, place in _places(model).items()
        for index in np.ndindex(place.value.shape)
    }


def _domain(node: Any, index: tuple[int, ...]) -> tuple[float, float]:
    if not isinstance(node, AbstractConstrained):
        return UNBOUNDED
    if isinstance(node, StationaryCoefficients) and index[-1] < node.raw.shape[-1] - 1:
        return UNBOUNDED  # of the coefficients, only the last is a partial autocorrelation
    return node.domain(index)


def with_parameters(model: Model, values: Mapping[str, Any]) -> Model:
    """Return the model with some of its parameters set.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.with_parameters(rd.models.local_level(), {"obs_scale": 3.0})
        >>> rd.models.named_parameters(model)["obs_scale"].tolist()
        [3.0]

    Args:
        model: any model.
        values: values by the names of `named_parameters`, of arrays or of single entries. They are
            broadcast to the shape of the parameter. Fixed parameters stay fixed, at the new value.

    Raises:
        ModelError: if there is no such parameter, or the value does not fit it.
    """
    places = _places(model)
    arrays: dict[str, Any] = {}
    for name, value in values.items():
        owner, index = _split(name, places)
        if index is None:
            arrays[owner] = value
        else:
            before = np.array(arrays.get(owner, places[owner].value), float)
            try:
                before[index] = value
            except (IndexError, TypeError, ValueError) as error:
                raise ModelError(f"{name} cannot be set to {value!r}: {error}.") from error
            arrays[owner] = before
    changed = {
        places[name].path: _replaced(name, places[name].node, value)
        for name, value in arrays.items()
    }
    return _with_nodes(model, changed)


def fix_parameters(model: Model, names: Iterable[str]) -> Model:
    """Return the model with some of its parameters wrapped in `Frozen`: they are not learned.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.fix_parameters(rd.models.local_level(), ["obs_scale"])
        >>> sorted(rd.models.named_parameters(model))
        ['level_scale']

    Args:
        model: any model.
        names: names of `named_parameters`, of whole arrays.

    Raises:
        ModelError: if there is no such parameter.
    """
    places = _places(model)
    chosen = {}
    for name in names:
        owner, index = _split(name, places)
        if index is not None:
            raise ModelError(
                f"{name} is an entry of a parameter, and only all of {owner} can be fixed."
            )
        if not places[owner].fixed:
            chosen[places[owner].path] = Frozen(places[owner].node)
    return _with_nodes(model, chosen)


def _places(model: Model) -> dict[str, _Place]:
    """Return all parameters by name: the short one if it is unique."""
    places = list(_walk(model, (), None, False))
    short = [place.short for place in places]
    return {
        place.short
        if place.short is not None and short.count(place.short) == 1
        else place.long: place
        for place in places
    }


def _walk(node: Any, path: tuple[Any, ...], short: str | None, fixed: bool) -> Iterator[_Place]:
    if isinstance(node, Frozen):
        tree = jax.tree_util.GetAttrKey("tree")
        yield from _walk(node.tree, (*path, tree), short, True)
    elif isinstance(node, AbstractConstrained) or eqx.is_inexact_array(node):
        yield _Place(path, short, node, fixed)
    elif node is not None:
        children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda n: n is not node)
        for keys, child in children:
            if not keys:
                continue  # a leaf that is not an array
            name = getattr(keys[0], "name", None) if isinstance(node, AbstractNamed) else None
            yield from _walk(child, (*path, *keys), name, fixed)


def _with_nodes(model: Model, nodes: Mapping[tuple[Any, ...], Any]) -> Model:
    """Return the model with other nodes at some paths."""
    if not nodes:
        return model
    return jax.tree_util.tree_map_with_path(
        lambda path, node: nodes.get(path, node),
        model,
        is_leaf=lambda node: isinstance(node, AbstractConstrained),
    )


def _split(name: str, places: Mapping[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    """Return the array that a name belongs to, and the index if it names an entry."""
    if name in places:
        return name, None
    match = ENTRY.fullmatch(name)
    if match and match["name"] in places:
        return match["name"], tuple(int(part) for part in match["index"].split(","))
    raise ModelError(f"The model has no parameter {name}.{nearest(name, places)}")


def _replaced(name: str, node: Any, value: Any) -> Any:
    """Return a parameter of the same type and shape with another value."""
    before = node.value if isinstance(node, AbstractParameter) else node
    try:
        array = jnp.broadcast_to(as_real_array(value, name).astype(before.dtype), before.shape)
        if not np.all(np.isfinite(np.asarray(array))):
            raise ValueError("it must be finite")
        if isinstance(node, Bounded):
            return Bounded(array, node.lower, node.upper)
        if isinstance(node, AbstractConstrained):
            return type(node)(array)  # pyright: ignore
        return array
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ModelError(
            f"The parameter {name} of shape {tuple(before.shape)} cannot be {value!r}: {reason}."
        ) from error
