"""Multilayer perceptrons, and the numbers that they read and emit."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtri
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._numerics import linalg

HIGHEST = lax.Precision.HIGHEST

_UNIT = float(np.log(np.expm1(1.0)))
"""The argument at which softplus is one."""


def tril_size(d: int) -> int:
    """Return the number of entries of a lower triangle."""
    return d * (d + 1) // 2


def tril_from(raw: Float[Array, "size"], d: int) -> Float[Array, "d d"]:
    """Return a lower factor with a positive diagonal from free numbers; zeros give the identity."""
    diagonal = jax.nn.softplus(raw[:d] + _UNIT)
    diagonal = diagonal + jnp.sqrt(jnp.finfo(raw.dtype).tiny)
    if d == 1:
        return diagonal[:, None]
    packed = jnp.concatenate([diagonal, raw[d:]])
    if d > linalg.UNROLLED:
        places = np.full(d * d, packed.size)
        places[_entries(d)] = np.arange(packed.size)
        return jnp.append(packed, 0.0)[places].reshape(d, d)
    return jnp.matmul(packed, _places(d, raw.dtype), precision=HIGHEST).reshape(d, d)


def tril_features(scale: Float[Array, "d d"]) -> Float[Array, "size"]:
    """Return the features of a lower factor: logarithms of its diagonal, and ratios."""
    diagonal, d = jnp.diagonal(scale), scale.shape[0]
    if d == 1:
        return jnp.log(diagonal)
    ratios = (scale / diagonal[None, :]).reshape(-1)
    if d > linalg.UNROLLED:
        below = ratios[_entries(d)[d:]]
    else:
        below = jnp.matmul(ratios, _places(d, scale.dtype)[d:].T, precision=HIGHEST)
    return jnp.concatenate([jnp.log(diagonal), below])


def mlp(key: PRNGKey, in_size: Any, out_size: Any, width: int, depth: int) -> eqx.nn.MLP:
    """Return a tanh network whose last layer has no bias and a hundredth of its random weights.

    Its outputs start near zero, which represents the prior chain; with full weights some starts
    ended in poor optima.
    """
    check_key(key, "A family")
    width = check_count(width, "width")
    network = eqx.nn.MLP(in_size, out_size, width, depth, activation=jnp.tanh, key=key)
    last = network.layers[-1]
    start = (0.01 * last.weight, jnp.zeros(out_size, last.weight.dtype))
    last = eqx.tree_at(lambda layer: (layer.weight, layer.bias), last, start)
    return eqx.tree_at(lambda net: net.layers[-1], network, last)


def redrawn(key: PRNGKey, network: eqx.nn.MLP) -> eqx.nn.MLP:
    """Return a network of the same sizes with new random weights."""
    return mlp(key, network.in_size, network.out_size, network.width_size, network.depth)


def centres(count: int, d: int) -> Float[Array, "component d"]:
    """Return initial centres of components in standard coordinates, in pairs along the axes.

    Along each axis they are quantiles of the prior, symmetric around its mean, so that neither of
    two mirrored modes is nearer to the start.
    """
    axis = np.arange(count) // 2 % d
    on_axis = np.bincount(axis, minlength=d)[axis]
    rank = np.array([np.sum(axis[:j] == axis[j]) for j in range(count)])
    return jax.nn.one_hot(axis, d) * ndtri(jnp.asarray((rank + 0.5) / on_axis))[:, None]


def _places(d: int, dtype: Any) -> Float[np.ndarray, "size entries"]:
    """Return the 0/1 matrix that places a diagonal and the entries below it in a flat matrix.

    A product with it copies each number exactly. For a small matrix it is faster than indexing,
    whose derivative scatters one entry after another.
    """
    places = np.zeros((tril_size(d), d * d), dtype)
    places[np.arange(tril_size(d)), _entries(d)] = 1.0
    return places


def _entries(d: int) -> Int[np.ndarray, "size"]:
    """Return the indices in a flat matrix of the diagonal and of the entries below it."""
    rows, columns = np.tril_indices(d, -1)
    return np.concatenate([np.arange(d) * (d + 1), rows * d + columns])
