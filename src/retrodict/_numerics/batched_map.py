"""The values of a function at many rows, a part of the rows at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def in_parts(fn: Callable[[Any], PyTree], xs: PyTree, size: int) -> PyTree:
    """What `jax.vmap(fn)(xs)` is, with at most `size` rows at once.

    `jax.lax.map` with a batch size has the function twice in its program, the second time for the
    remainder, and takes twice as long to compile. Here the last part is filled up with copies of
    the first rows, whose values are dropped.
    """
    count = jax.tree.leaves(xs)[0].shape[0]
    turns = max(1, -(-count // size))
    if turns == 1:
        return jax.vmap(fn)(xs)
    size = -(-count // turns)
    short = turns * size - count

    def parted(leaf: jax.Array) -> jax.Array:
        filled = jnp.concatenate([leaf, leaf[:short]]) if short else leaf
        return filled.reshape(turns, size, *leaf.shape[1:])

    found = jax.lax.map(jax.vmap(fn), jax.tree.map(parted, xs))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], found)
