"""Parameters of a model by name: reading them, setting them, and holding them fixed."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from retrodict._errors import ModelError, nearest
from retrodict._model import StateSpaceModel
from retrodict._parameters import (
    AbstractParameter,
    Bounded,
    Frozen,
    Positive,
    PositiveTril,
    StationaryCoefficients,
)
from retrodict._validate import as_real_array
from retrodict.models._equations import AbstractNamed

CONSTRAINED = (Positive, PositiveTril, Bounded, StationaryCoefficients)
"""Parameters that hold one unconstrained array."""

ENTRY = re.compile(r"(?P<name>.*)\[(?P<index>\d+(?:,\d+)*)\]")


class _Place(NamedTuple):
    """Where a parameter stands in a model."""

    path: tuple[Any, ...]
    short: str | None
    node: Any
    fixed: bool

    @property
    def long(self) -> str:
        """The path as it is written, without what wrappers add to it."""
        return jax.tree_util.keystr(self.path).replace(".tree", "").removeprefix(".")

    @property
    def value(self) -> Array:
        return self.node.value if isinstance(self.node, AbstractParameter) else self.node


def named_parameters(
    model: StateSpaceModel, *, fixed: bool = False, entries: bool = False
) -> dict[str, Array]:
    """The parameters of a model by name, each in its natural scale.

    Those of ready models have names such as `level_scale`; others go by their place in the model,
    such as `transition.weight`.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.local_level(level_scale=0.5)
        >>> sorted(rd.models.named_parameters(model, fixed=True))
        ['level_scale', 'obs_scale', 'prior.mean', 'prior.scale_tril.std']
        >>> sorted(rd.models.named_parameters(model, entries=True))
        ['level_scale[0]', 'obs_scale[0]']

    Args:
        model: any model.
        fixed: whether to list what is `Frozen` too, and not only what is learned.
        entries: whether to list single entries, as `transition.weight[0,0]`, instead of arrays.
    """
    found = {
        name: place.value for name, place in _places(model).items() if fixed or not place.fixed
    }
    if not entries:
        return found
    return {
        f"{name}[{','.join(map(str, index))}]" if index else name: value[index]
        for name, value in found.items()
        for index in np.ndindex(value.shape)
    }


def parameter_domains(model: StateSpaceModel) -> dict[str, tuple[float, float]]:
    """Where each entry of a parameter can be: the open interval that it is learned in.

    Example:
        >>> import retrodict as rd
        >>> rd.models.parameter_domains(rd.models.local_level())["obs_scale[0]"]
        (0.0, inf)

    Args:
        model: any model.

    Returns:
        By the names of `named_parameters` with `fixed=True, entries=True`: (0, ∞) of scales, bounds
        of what is `Bounded`, (−1, 1) of the last coefficient of an autoregression, and (−∞, ∞) of
        all else.
    """
    found = {}
    for name, place in _places(model).items():
        for index in np.ndindex(place.value.shape):
            entry = f"{name}[{','.join(map(str, index))}]" if index else name
            found[entry] = _domain(place.node, index)
    return found


def _domain(node: Any, index: tuple[int, ...]) -> tuple[float, float]:
    if isinstance(node, Bounded):
        return node.lower, node.upper
    if isinstance(node, StationaryCoefficients) and index[-1] == node.raw.shape[-1] - 1:
        return -1.0, 1.0  # the last coefficient is a partial autocorrelation; the others are free
    if isinstance(node, Positive) or (isinstance(node, PositiveTril) and len(set(index)) == 1):
        return 0.0, math.inf
    return -math.inf, math.inf


def with_parameters(model: StateSpaceModel, values: Mapping[str, Any]) -> StateSpaceModel:
    """The model with some of its parameters set.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.with_parameters(rd.models.local_level(), {"obs_scale": 3.0})
        >>> rd.models.named_parameters(model)["obs_scale"].tolist()
        [3.0]

    Args:
        model: any model.
        values: by the names of `named_parameters`, of arrays or of single entries; what broadcasts
            to the shape of a parameter is accepted. What is fixed stays fixed, at the new value.

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
    if not arrays:
        return model
    return eqx.tree_at(
        lambda tree: [_at(tree, places[name].path) for name in arrays],
        model,
        [_replaced(name, places[name].node, value) for name, value in arrays.items()],
    )


def fix_parameters(model: StateSpaceModel, names: Iterable[str]) -> StateSpaceModel:
    """The model with some of its parameters wrapped in `Frozen`, so that they are not learned.

    Args:
        model: any model.
        names: names of `named_parameters`, of whole arrays.

    Raises:
        ModelError: if there is no such parameter.
    """
    places = _places(model)
    for name in names:
        if _split(name, places)[1] is not None:
            raise ModelError(
                f"{name} is an entry of a parameter, and only all of {_split(name, places)[0]} can"
                " be fixed."
            )
    chosen = [places[name] for name in dict.fromkeys(names) if not places[name].fixed]
    if not chosen:
        return model
    return eqx.tree_at(
        lambda tree: [_at(tree, place.path) for place in chosen],
        model,
        [Frozen(place.node) for place in chosen],
    )


def is_fixed(model: StateSpaceModel, name: str) -> bool:
    """Whether a parameter is not learned."""
    return _places(model)[name].fixed


def _places(model: StateSpaceModel) -> dict[str, _Place]:
    """All parameters by name: the short one where there is one of that name alone."""
    found = list(_walk(model, (), None, False))
    short = [place.short for place in found]
    return {
        place.short
        if place.short is not None and short.count(place.short) == 1
        else place.long: place
        for place in found
    }


def _walk(node: Any, path: tuple[Any, ...], short: str | None, fixed: bool) -> Iterator[_Place]:
    if isinstance(node, Frozen):
        tree = jax.tree_util.GetAttrKey("tree")
        yield from _walk(node.tree, (*path, tree), short, True)
    elif isinstance(node, CONSTRAINED) or eqx.is_inexact_array(node):
        yield _Place(path, short, node, fixed)
    elif node is not None:
        children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda n: n is not node)
        for keys, child in children:
            if not keys:
                continue  # a leaf that is no array
            name = getattr(keys[0], "name", None) if isinstance(node, AbstractNamed) else None
            yield from _walk(child, (*path, *keys), name, fixed)


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            tree = getattr(tree, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            tree = tree[key.idx]
        elif isinstance(key, jax.tree_util.DictKey):
            tree = tree[key.key]
        else:
            raise TypeError(f"Parameters cannot be named below a node with keys like {key!r}.")
    return tree


def _split(name: str, places: Mapping[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    """The array that a name belongs to, and the entry of it that is meant, if only one is."""
    if name in places:
        return name, None
    match = ENTRY.fullmatch(name)
    if match and match["name"] in places:
        return match["name"], tuple(int(part) for part in match["index"].split(","))
    raise ModelError(f"The model has no parameter {name}.{nearest(name, places)}")


def _replaced(name: str, node: Any, value: Any) -> Any:
    """A parameter of the same kind and shape with another value."""
    before = node.value if isinstance(node, AbstractParameter) else node
    try:
        array = jnp.broadcast_to(as_real_array(value, name).astype(before.dtype), before.shape)
        if not np.all(np.isfinite(np.asarray(array))):
            raise ValueError("it must be finite")
        if isinstance(node, Bounded):
            return Bounded(array, node.lower, node.upper)
        if isinstance(node, (Positive, PositiveTril, StationaryCoefficients)):
            return type(node)(array)
        return array
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ModelError(
            f"The parameter {name} of shape {tuple(before.shape)} cannot be {value!r}: {reason}."
        ) from error
