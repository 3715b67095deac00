"""Scans over time that skip repeated steps.

In a linear-Gaussian model the covariances depend on the parameters and on the mask, not on the
data. If the parameters are constant in time they converge within a few steps. `settling_scan` stops
when its carry no longer changes and continues at the next change of its inputs, for example at a
gap in the data. It returns the values of the plain loop, to rounding.

The number of its steps is known only at run time. Under differentiation, and under `vmap` over its
arguments, the plain loop runs instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from retrodict._numerics.batched_map import in_batches

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`step(fixed, carry, row)` returns the next carry and an output, and closes over no tracers."""

Finish = Callable[[Any, Any, Any], PyTree]
"""`finish(fixed, rows, outputs)` maps the outputs of a batch of steps, each by itself."""

BATCH_SIZE = 32
"""The number of outputs per call of `finish`, which fit into the cache of a CPU."""

WINDOW = 16
"""The number of steps over which a carry must not change. A slower drift is below rounding."""

Settled = Callable[[Any, Any], Bool[Array, ""]]
"""`settled(before, after)`: whether two successive carries are equal to rounding."""


class Loop(NamedTuple):
    """The arguments of `settling_scan` that are not arrays."""

    step: Step
    settled: Settled
    finish: Finish | None
    num_steps: int
    reverse: bool


def settling_scan(
    step: Step,
    settled: Settled,
    fixed: PyTree,
    init: PyTree,
    rows: PyTree,
    count: int,
    *,
    finish: Finish | None = None,
    reverse: bool = False,
) -> tuple[PyTree, PyTree]:
    """Return `lax.scan(partial(step, fixed), init, rows, count)`, without its repeated steps.

    Args:
        step: a pure function of `fixed`, the carry and one row.
        settled: decides whether the carry has converged.
        fixed: arrays that are the same at every step.
        init: the first carry.
        rows: arrays with a leading axis of size `count`, or `None`.
        count: the number of steps.
        finish: a function of the outputs that is evaluated in batches, for work that needs no
            carry; it closes over no tracers.
        reverse: whether to start at the last row.

    Returns:
        The last carry, and the outputs of all steps.
    """
    loop = Loop(step, settled, finish, count, reverse)
    run = _settling_scan if count else _plain_scan
    return run(loop, fixed, init, rows)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _settling_scan(loop: Loop, fixed: Any, init: Any, rows: Any) -> tuple[PyTree, PyTree]:
    return _unless_batched(partial(_skipping_scan, loop), partial(_plain_scan, loop))(
        fixed, init, rows
    )


@_settling_scan.defjvp
def _settling_scan_jvp(loop: Loop, primals: tuple, tangents: tuple) -> tuple[PyTree, PyTree]:
    return jax.jvp(partial(_plain_scan, loop), primals, tangents)


def _plain_scan(loop: Loop, fixed: Any, init: Any, rows: Any) -> tuple[PyTree, PyTree]:
    step, finish = loop.step, loop.finish
    last, out = lax.scan(partial(step, fixed), init, rows, loop.num_steps, reverse=loop.reverse)
    if finish is not None:
        out = in_batches(lambda batch: finish(fixed, *batch), (rows, out), BATCH_SIZE)
    return _batched_alike((last, out), (fixed, init, rows))


def _skipping_scan(loop: Loop, fixed: Any, init: Any, rows: Any) -> tuple[PyTree, PyTree]:
    step, settled, finish, count, reverse = loop
    step = jax.jit(step, inline=True)  # so that it is traced once for its shapes and for the loop
    rows = jax.tree.map(lambda leaf: leaf[::-1], rows) if reverse else rows
    changes = _changes(rows, count)
    next_change = _next_changes(changes)
    _, out = jax.eval_shape(step, fixed, init, _at(rows, 0))

    def advance(state: tuple) -> tuple:
        k, carry, (earlier, age), buffers, (total, places) = state
        after, out = step(fixed, carry, _at(rows, k))
        buffers = jax.tree.map(lambda buffer, leaf: buffer.at[total].set(leaf), buffers, out)
        # A small step alone may be one of many in the same direction.
        restart = changes[k] | (age == WINDOW)
        earlier = jax.tree.map(lambda old, new: jnp.where(restart, new, old), earlier, carry)
        age = jnp.where(restart, 1, age + 1)
        done = (age == WINDOW) & settled(carry, after) & settled(earlier, after)
        k_next = jnp.where(done, next_change[k], k + 1)
        return k_next, after, (earlier, age), buffers, (total + 1, places.at[total].set(k))

    zero = jnp.zeros((), next_change.dtype)
    places = jnp.full(count, count, next_change.dtype)
    start = (zero, init, (init, zero), _empty(out, count), (zero, places))
    _, last, _, buffers, (total, places) = lax.while_loop(
        lambda state: state[0] < count, advance, start
    )
    if finish is not None:
        buffers = _finish_computed(finish, fixed, rows, buffers, total, places)
    source = _last_computed(places)
    source = source[::-1] if reverse else source
    return last, _at(buffers, source)


# Scans, since XLA compiles each of them as one kernel, and a cumulative sum or minimum as a dozen.
def _next_changes(changes: Bool[Array, "count"]) -> Int[Array, "count"]:
    """Return the first position after each row at which a row differs from the one before it."""
    positions = jnp.arange(changes.shape[0])

    def back(following: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        position, changed = row
        return jnp.where(changed, position, following), following

    end = jnp.full((), changes.shape[0], positions.dtype)
    return lax.scan(back, end, (positions, changes), reverse=True)[1]


def _last_computed(places: Int[Array, "count"]) -> Int[Array, "count"]:
    """Return the number of the last step up to each row that was computed."""
    computed = jnp.zeros_like(places).at[places].set(1, mode="drop")

    def count(before: Array, one: Array) -> tuple[Array, Array]:
        return before + one, before + one

    return lax.scan(count, jnp.full((), -1, places.dtype), computed)[1]


def _finish_computed(
    finish: Finish, fixed: Any, rows: Any, outputs: Any, total: Array, places: Array
) -> PyTree:
    """Evaluate `finish` on the outputs of the steps that were computed, the first `total`."""
    finish = jax.jit(finish, inline=True)  # as in `_skipping_scan`
    count = places.shape[0]

    def batch_at(chosen: Array) -> PyTree:
        return finish(fixed, _at(rows, places[chosen]), _at(outputs, chosen))

    def advance(state: tuple) -> tuple:
        first, buffers = state
        # Positions beyond the last step repeat it: other contents may take a slower path.
        chosen = jnp.minimum(first + jnp.arange(BATCH_SIZE, dtype=first.dtype), total - 1)
        buffers = jax.tree.map(
            lambda buffer, leaf: buffer.at[chosen].set(leaf), buffers, batch_at(chosen)
        )
        return first + BATCH_SIZE, buffers

    finished = jax.eval_shape(batch_at, jnp.zeros(BATCH_SIZE, total.dtype))
    each = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), finished)
    start = (jnp.zeros_like(total), _empty(each, count))
    return lax.while_loop(lambda state: state[0] < total, advance, start)[1]


def _at(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _empty(shapes: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)


def _unless_batched(loop: Callable, plain: Callable) -> Callable:
    """Return `loop`, replaced by `plain` under `vmap` over any of its arguments.

    A batched `while_loop` would copy its buffers at every step.
    """
    run = jax.custom_batching.custom_vmap(loop)

    @run.def_vmap
    def _(axis_size: int, in_batched: list, *arguments: Any) -> tuple[PyTree, PyTree]:
        del axis_size
        axes = tuple(jax.tree.map(lambda batched: 0 if batched else None, b) for b in in_batched)
        out = jax.vmap(plain, in_axes=axes)(*arguments)
        return out, jax.tree.map(lambda _: True, out)

    return run


def _batched_alike(out: PyTree, arguments: PyTree) -> PyTree:
    """Return `out` with a leading batch axis in every leaf, under `vmap` over any argument.

    JAX takes the batch axes of a compiled function for those of its derivative. A scan has its own
    axes, and none in outputs that do not depend on what is batched.
    """
    batched = jnp.zeros((), bool)
    for leaf in jax.tree.leaves(arguments):
        batched = batched | (leaf.ravel()[:1].sum() != 0)
    # The selection depends on all arguments, and both cases are equal. Adding an axis moves the
    # batch axis to the front.
    return jax.tree.map(lambda leaf: jnp.where(batched, leaf, leaf)[None][0], out)


def _changes(rows: PyTree, count: int) -> Bool[Array, "count"]:
    """Return which rows differ from the row before them; the first row does."""
    # Without the barrier, XLA computes what follows from constant rows while it compiles, slowly.
    changes = lax.optimization_barrier(jnp.zeros(count, bool).at[0].set(True))
    for leaf in jax.tree.leaves(rows):
        differs = jnp.any(leaf[1:] != leaf[:-1], axis=tuple(range(1, leaf.ndim)))
        changes = changes.at[1:].set(changes[1:] | differs)
    return changes


def scales_agree(before: Array, after: Array) -> Bool[Array, ""]:
    """Return whether two lower factors of shape `(d, d)` agree to rounding.

    Entries are compared in units of their coordinate (row) and of the width of their direction
    (column), so that narrow directions must have converged too.
    """
    eps = jnp.finfo(after.dtype).eps
    rows = jnp.max(jnp.abs(after), axis=1, keepdims=True)
    relative = jnp.where(rows > 0, jnp.abs(after) / jnp.where(rows > 0, rows, 1.0), 0.0)
    widths = jnp.maximum(jnp.max(relative, axis=0, keepdims=True), jnp.sqrt(eps))
    return jnp.all(jnp.abs(after - before) <= 4 * eps * rows * widths)


def curvatures_agree(before: Array, after: Array) -> Bool[Array, ""]:
    """Return whether two positive-semidefinite matrices agree to rounding."""
    sizes = jnp.sqrt(jnp.maximum(jnp.diagonal(after), 0.0))
    tolerance = 4 * jnp.finfo(after.dtype).eps * sizes[:, None] * sizes[None, :]
    return jnp.all(jnp.abs(after - before) <= tolerance)
