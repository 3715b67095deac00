"""Prefix sums under an associative operator, compiled quickly.

`jax.lax.associative_scan` traces its operator 2 log₂ n times; with the operators of this library,
a few small factorisations each, it then compiles for long. Here the operator is traced three
times, whatever n is.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict import _linalg as linalg

T = TypeVar("T")

BLOCK = 16
"""How many elements are summed one after another, in all blocks at once."""


def prefix_scan(
    combine: Callable[[T, T], T], elements: T, neutral: T, *, reverse: bool = False
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

    Returns:
        The sums, shaped as `elements`.
    """
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
    _, means, spreads = prefix_scan(compose, (weights, biases, covariances), neutral, reverse=True)
    return means, spreads
