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
from retrodict._model import AbstractLinearGaussianKernel, Frozen, Gaussian, unwrap
from retrodict.switching.autoregression import AutoregressiveEmission
from retrodict.switching.histories import RegimeHistories
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
    index = _permutation(order, _num_base(model))
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
    model: SwitchingModel, key: Callable[[SwitchingModel, int], float] | None = None
) -> SwitchingModel:
    """Return the model with its regimes sorted, so that fits can be compared.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.markov_autoregression(2)
        >>> flipped = rd.switching.permute(model, [1, 0])
        >>> flipped.emission.levels.tolist()
        [1.0, -1.0]
        >>> rd.switching.canonical_order(flipped).emission.levels.tolist()
        [-1.0, 1.0]

    Args:
        model: the model.
        key: `key(model, j)`, the number by which regime j of the unwrapped model is sorted, or a
            tuple of numbers. By default the regimes are sorted by the means of their emissions,
            then by the scales; of a model with a continuous state, by the biases and then the
            scales of the transitions.
    """
    require_switching(model, "canonical_order")
    plain = unwrap(model)
    if key is None and isinstance(model.emission, AutoregressiveEmission):
        keys = [_autoregression_key(model.emission, j) for j in range(_num_base(model))]
    else:
        keys = [(key or _default_key)(plain, j) for j in range(_num_base(model))]
    return permute(model, sorted(range(len(keys)), key=keys.__getitem__))


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


def _num_base(model: SwitchingModel) -> int:
    regimes = model.regimes.tree if isinstance(model.regimes, Frozen) else model.regimes
    is_history = isinstance(regimes, RegimeHistories)
    return regimes.num_base_regimes if is_history else model.num_regimes


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
    return part.permuted(index) if isinstance(part, AutoregressiveEmission) else part


def _autoregression_key(emission: AutoregressiveEmission, j: int) -> tuple[float, ...]:
    """Return level, scale and coefficients of a regime."""
    arrays = (emission.levels, emission.std, emission.coefficients)
    rows = (np.asarray(unwrap(array)) for array in arrays)
    return tuple(float(x) for row in rows for x in np.ravel(row[j if len(row) > 1 else 0]))


def _default_key(model: SwitchingModel, j: int) -> tuple[float, ...]:
    """Return the offset and the scale of the emission, or of the transition, of a regime."""
    part = of_regime(model.emission if model.is_finite else model.transition, j)
    if isinstance(part, AbstractLinearGaussianKernel) and not part.takes_input:
        part = part.at(None)
        law = Gaussian(part.bias, part.scale_tril)
    elif isinstance(part, Gaussian):
        law = part
    else:
        raise TypeError(
            f"There is no default order of regimes with a {type(part).__name__}: pass `key`."
        )
    values: list[Array] = [law.mean, law.std]
    return tuple(float(x) for row in values for x in np.asarray(row))
