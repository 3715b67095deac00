"""Prefix sums under an associative operator, compiled quickly.

`jax.lax.associative_scan` traces its operator 2 log₂ n times; with the operators of this library,
a few small factorisations each, it then compiles for long. Here the operator is traced three
times, whatever n is.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._numerics import linalg
from retrodict.distributed import Parallel, appended, mesh_of, prepended, scan_over_devices

T = TypeVar("T")

BLOCK = 16
"""How many elements are summed one after another, in all blocks at once."""


def prefix_scan(
    combine: Callable[[T, T], T],
    elements: T,
    neutral: T,
    *,
    reverse: bool = False,
    parallel: Parallel = True,
) -> T:
    """All sums e_0 ∘ … ∘ e_k of an associative operator.

    Blocks of `BLOCK` elements are summed one after another, all blocks at once; the totals of the
    blocks by doubling (distances 1, 2, 4, …, all of them at once); then each block is added to the
    sum of those before it. About 3n applications of the operator, in BLOCK + log₂(n/BLOCK) + 1
    rounds.

    Args:
        combine: the operator on two single elements, earlier one first.
        elements: a pytree of arrays with a leading axis.
        neutral: an element that changes nothing, without that axis.
        reverse: whether to sum from the end; `combine` then has the later element first.
        parallel: a mesh to sum over several devices; `True` for one.

    Returns:
        The sums, shaped as `elements`.
    """
    mesh = mesh_of(parallel)
    if mesh is not None:
        return scan_over_devices(prefix_scan, combine, elements, neutral, mesh, reverse=reverse)
    n = jax.tree.leaves(elements)[0].shape[0]
    block = min(BLOCK, n)
    blocks = -(-n // block)
    together = jax.vmap(combine)

    def spread(count: int) -> T:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), neutral)

    def flip(tree: T) -> T:
        return jax.tree.map(lambda leaf: leaf[::-1], tree) if reverse else tree

    padded = jax.tree.map(
        lambda leaf, fill: jnp.swapaxes(
            jnp.concatenate([leaf, fill]).reshape(blocks, block, *leaf.shape[1:]), 0, 1
        ),
        flip(elements),
        spread(blocks * block - n),
    )

    def add(total: T, element: T) -> tuple[T, T]:
        total = together(total, element)
        return total, total

    totals, within = lax.scan(add, spread(blocks), padded)

    def double(sums: T, distance: jax.Array) -> tuple[T, None]:
        earlier = jax.tree.map(
            lambda leaf, fill: lax.dynamic_slice_in_dim(
                jnp.concatenate([fill, leaf]), blocks - distance, blocks
            ),
            sums,
            spread(blocks),
        )
        return together(earlier, sums), None

    levels = max(blocks - 1, 0).bit_length()
    sums, _ = lax.scan(double, totals, 2 ** jnp.arange(levels))
    before = jax.tree.map(
        lambda leaf, fill: jnp.concatenate([fill[None], leaf[:-1]]), sums, neutral
    )
    result = jax.vmap(together, in_axes=(None, 0))(before, within)
    return flip(
        jax.tree.map(
            lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(blocks * block, *leaf.shape[2:])[:n],
            result,
        )
    )


def affine_suffix_scan(
    weights: Float[Array, "time d d"],
    biases: Float[Array, "time d"],
    covariances: Float[Array, "time d d"],
    parallel: Parallel = True,
) -> tuple[Float[Array, "time d"], Float[Array, "time d d"]]:
    """Solves m_k = w_k m_{k+1} + b_k and P_k = w_k P_{k+1} w_kᵀ + c_k from m_n = 0, P_n = 0.

    The affine maps are composed by a prefix scan, so that all times are found in O(log n) rounds.
    """

    def compose(later: tuple, earlier: tuple) -> tuple:
        (weight_1, bias_1, covariance_1), (weight_2, bias_2, covariance_2) = later, earlier
        spread = linalg.matmul(linalg.matmul(weight_2, covariance_1), weight_2.T)
        return (
            linalg.matmul(weight_2, weight_1),
            linalg.matvec(weight_2, bias_1) + bias_2,
            spread + covariance_2,
        )

    eye = jnp.eye(biases.shape[1], dtype=biases.dtype)
    neutral = (eye, jnp.zeros_like(biases[0]), jnp.zeros_like(eye))
    elements = (weights, biases, covariances)
    _, means, spreads = prefix_scan(compose, elements, neutral, reverse=True, parallel=parallel)
    return means, spreads


def affine_suffix_paths(
    weights: Float[Array, "time d d"],
    biases: Float[Array, "time d sample"],
    parallel: Parallel = True,
) -> Float[Array, "time d sample"]:
    """Solves x_k = w_k x_{k+1} + b_k from x_n = 0 for many b at once, in O(log n) rounds."""

    def compose(later: tuple, earlier: tuple) -> tuple:
        (weight_1, bias_1), (weight_2, bias_2) = later, earlier
        return linalg.matmul(weight_2, weight_1), linalg.matmul(weight_2, bias_1) + bias_2

    neutral = (jnp.eye(weights.shape[1], dtype=weights.dtype), jnp.zeros_like(biases[0]))
    return prefix_scan(compose, (weights, biases), neutral, reverse=True, parallel=parallel)[1]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear_recurrence(
    decays: Float[Array, "time units"],
    drives: Float[Array, "time units"],
    parallel: Parallel = True,
) -> Float[Array, "time units"]:
    """Solves h_k = a_k h_{k-1} + b_k from h_{-1} = 0, unit by unit, in O(log n) rounds.

    Its derivative is for reverse mode, and a recurrence of the same kind from the end: with g_k the
    cotangent of h_k, λ_k = g_k + a_{k+1} λ_{k+1} is that of b_k, and λ_k h_{k-1} that of a_k.
    """
    return _recur(decays, drives, parallel, reverse=False)


def _recur(decays: Array, drives: Array, parallel: Parallel, *, reverse: bool) -> Array:
    def compose(first: tuple, second: tuple) -> tuple:
        return first[0] * second[0], second[0] * first[1] + second[1]

    neutral = (jnp.ones_like(decays[0]), jnp.zeros_like(drives[0]))
    return prefix_scan(compose, (decays, drives), neutral, reverse=reverse, parallel=parallel)[1]


def _recurrence_forward(decays: Array, drives: Array, parallel: Parallel) -> tuple[Array, tuple]:
    states = _recur(decays, drives, parallel, reverse=False)
    return states, (decays, states)


def _recurrence_backward(parallel: Parallel, kept: tuple, cotangents: Array) -> tuple[Array, Array]:
    decays, states = kept
    onward = appended(decays[1:], jnp.zeros_like(decays[0]), parallel)
    adjoints = _recur(onward, cotangents, parallel, reverse=True)
    before = prepended(jnp.zeros_like(states[0]), states[:-1], parallel)
    return adjoints * before, adjoints


linear_recurrence.defvjp(_recurrence_forward, _recurrence_backward)
