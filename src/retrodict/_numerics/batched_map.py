"""A vectorised map over many rows, in batches of bounded size."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def in_parts(fn: Callable[[Any], PyTree], xs: PyTree, size: int) -> PyTree:
    """Compute `jax.vmap(fn)(xs)` in batches of at most `size` rows."""
    return in_batches(jax.vmap(fn), xs, size)


def in_batches(fn: Callable[[Any], PyTree], xs: PyTree, size: int) -> PyTree:
    """Compute `fn(xs)`, which maps each row on its own, in batches of at most `size` rows.

    `jax.lax.map` with a batch size compiles the function twice, the second time for the remainder,
    and so takes twice as long to compile. Here the last batch is padded with copies of the first
    rows, and their values are dropped.
    """
    count = jax.tree.leaves(xs)[0].shape[0]
    num_batches = max(1, -(-count // size))
    if num_batches == 1:
        return fn(xs)
    size = -(-count // num_batches)
    padding = num_batches * size - count

    def split(leaf: jax.Array) -> jax.Array:
        padded = jnp.concatenate([leaf, leaf[:padding]]) if padding else leaf
        return padded.reshape(num_batches, size, *leaf.shape[1:])

    values = jax.lax.map(fn, jax.tree.map(split, xs))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], values)
