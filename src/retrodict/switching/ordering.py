"""The order of regimes: permutations, a canonical order, and matching to a reference.

The regimes of a model can be renumbered without a change of the law of the data, so that two fits
may hold the same regimes in different orders.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._arrays import known_values
from retrodict._model import (
    AbstractKernel,
    AbstractLinearGaussianKernel,
    Frozen,
    Gaussian,
    unwrap,
)
from retrodict.switching.histories import RegimeHistories, num_base_regimes
from retrodict.switching.model import SwitchingModel, of_regime, require_switching
from retrodict.switching.regimes import Regimes


def permute(model: SwitchingModel, order: Any) -> SwitchingModel:
    """Return the same model with its regimes in another order.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.2, 0.8], [[0.9, 0.1], [0.3, 0.7]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (5.0, 1.0)],
        ... )
        >>> [law.mean.item() for law in rd.switching.permute(model, [1, 0]).emission]
        [1.0, 5.0]

    Args:
        model: the model, with `Regimes` or `RegimeHistories`.
        order: regime j of the result is regime `order[j]` of the model.
    """
    require_switching(model, "permute")
    index = _permutation(order, num_base_regimes(model))
    parts = {
        name: _permuted_part(getattr(model, name), index)
        for name in ("prior", "transition", "emission")
    }
    return SwitchingModel(
        _permuted_regimes(model.regimes, index),
        parts["emission"],
        parts["prior"],
        parts["transition"],
        model.num_lags,
    )


def canonical_order(
    model: SwitchingModel, key: Callable[[SwitchingModel, int], Any] | None = None
) -> SwitchingModel:
    """Return the model with its regimes sorted, so that fits can be compared.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.markov_switching(regimes=2)
        >>> flipped = rd.switching.permute(model, [1, 0])
        >>> rd.models.named_parameters(flipped)["mean"].ravel().tolist()
        [1.0, -1.0]
        >>> again = rd.switching.canonical_order(flipped)
        >>> rd.models.named_parameters(again)["mean"].ravel().tolist()
        [-1.0, 1.0]

    Args:
        model: the model.
        key: `key(model, j)`, the number by which regime j of the unwrapped model is sorted, or a
            tuple of numbers. By default regimes are sorted by the offsets of their transitions, the
            scales and the weights, and then by those of their emissions.
    """
    return permute(model, regime_order(model, key))


def regime_order(
    model: SwitchingModel, key: Callable[[SwitchingModel, int], Any] | None = None
) -> Int[np.ndarray, "regime"]:
    """Return the order in which `canonical_order` puts the regimes.

    Example:
        >>> import retrodict as rd
        >>> model = rd.switching.permute(rd.models.markov_switching(regimes=3), [2, 0, 1])
        >>> rd.switching.regime_order(model).tolist()
        [1, 2, 0]

    Args:
        model: the model.
        key: as in `canonical_order`.

    Raises:
        TypeError: if the parts of the model have no default order and there is no `key`.
    """
    require_switching(model, "regime_order")
    plain = unwrap(model)
    keys = [(key or _default_key)(plain, j) for j in range(num_base_regimes(model))]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__))


def match_regimes(probabilities: Any, reference: Any) -> Int[np.ndarray, "regime"]:
    """Return the order of regimes that agrees best with a reference.

    It maximises Σ_k Σ_j p_{k, order[j]} r_{k, j} over all permutations (Kuhn 1955).

    Example:
        >>> import numpy as np, retrodict as rd
        >>> reference = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> order = rd.switching.match_regimes(reference[:, ::-1], reference)
        >>> order.tolist()
        [1, 0]

    Args:
        probabilities: probabilities of regimes, of shape `(time, regime)`, or regimes, integers of
            shape `(time,)`.
        reference: the same of the reference, such as true regimes.

    Returns:
        The order: `probabilities[:, order]` is to be compared with the reference, and
        `permute(model, order)` with the model of the reference.
    """
    from scipy.optimize import linear_sum_assignment  # here, since this import takes 0.2 s

    p, r = (np.asarray(part) for part in (probabilities, reference))
    count = max(_count(p), _count(r))
    p, r = _as_probabilities(p, count), _as_probabilities(r, count)
    if p.shape != r.shape:
        raise ValueError(
            "match_regimes expects probabilities and reference of one shape (time, regime), got"
            f" {p.shape} and {r.shape}."
        )
    return np.asarray(linear_sum_assignment(-(r.T @ p))[1])


def _count(array: np.ndarray) -> int:
    if array.ndim == 1 and np.issubdtype(array.dtype, np.integer):
        return int(array.max(initial=0)) + 1
    if array.ndim != 2:
        raise ValueError(
            "match_regimes expects probabilities of shape (time, regime), or integers of shape"
            f" (time,), got {array.dtype} of shape {array.shape}."
        )
    return array.shape[1]


def _as_probabilities(array: np.ndarray, count: int) -> Float[np.ndarray, "time regime"]:
    return np.eye(count)[array] if array.ndim == 1 else array


def _permutation(order: Any, count: int) -> Int[np.ndarray, "regime"]:
    index = np.asarray(known_values(jnp.asarray(order)))
    if index.shape != (count,) or sorted(index.tolist()) != list(range(count)):
        raise ValueError(
            f"`order` must be a permutation of the regimes 0 to {count - 1}, got {index.tolist()}."
        )
    return index.astype(int)


def _taken(value: Any, index: np.ndarray, axes: tuple[int, ...]) -> Any:
    """Permute axes of an array, or of an array in `Frozen`; an axis of one entry is shared."""
    if isinstance(value, Frozen):
        return Frozen(_taken(value.tree, index, axes))
    if value is None:
        return None
    if not eqx.is_array_like(value):
        raise TypeError(
            f"permute expects arrays as parameters of the regimes, got {type(value).__name__}."
        )
    for axis in axes:
        if value.shape[axis] > 1:
            value = jnp.take(value, index, axis=axis)
    return value


def _permuted_regimes(regimes: Any, index: np.ndarray) -> Any:
    if isinstance(regimes, Frozen):
        return Frozen(_permuted_regimes(regimes.tree, index))
    if hasattr(regimes, "permuted"):
        return regimes.permuted(index)
    if isinstance(regimes, RegimeHistories):
        matrix = _taken(regimes.transition_logits, index, (0, 1))
        return RegimeHistories(matrix, regimes.order)
    if not isinstance(regimes, Regimes):
        raise TypeError(
            f"permute expects Regimes or RegimeHistories, got {type(regimes).__name__}."
        )
    return Regimes(
        _taken(regimes.initial_logits, index, (0,)),
        _taken(regimes.transition_logits, index, (0, 1)),
        _taken(regimes.state_weight, index, (0,)),
        _taken(regimes.input_weight, index, (0,)),
    )


def _permuted_part(part: Any, index: np.ndarray) -> Any:
    if isinstance(part, Frozen):
        return Frozen(_permuted_part(part.tree, index))
    if isinstance(part, tuple):
        return tuple(part[j] for j in index)
    # A parameter whose value is one part per regime permutes what it is computed from.
    return part.permuted(index) if hasattr(part, "permuted") else part


def _default_key(model: SwitchingModel, j: int) -> tuple[float, ...]:
    """Return the numbers of transition and emission of a regime; those of a state come first."""
    parts = [] if model.is_finite else [of_regime(model.transition, j)]
    values = [value for part in (*parts, of_regime(model.emission, j)) for value in _numbers(part)]
    return tuple(float(x) for value in values for x in np.ravel(value))


def _numbers(part: Any) -> list[Array]:
    """Return offset, scale and weight of a linear-Gaussian kernel; mean and scale of a law."""
    if isinstance(part, AbstractLinearGaussianKernel) and not part.takes_input:
        part = part.at(None)
        return [part.bias, Gaussian(part.bias, part.scale_tril).std, part.weight]
    if isinstance(part, Gaussian):
        return [part.mean, part.std]
    if not isinstance(part, AbstractKernel) and hasattr(part, "mean"):
        return [part.mean]
    raise TypeError(
        f"There is no default order of regimes with a {type(part).__name__}: pass `key`."
    )
