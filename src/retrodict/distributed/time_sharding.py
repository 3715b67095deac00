"""One series over several devices: its rows are sharded along the axis `"time"` of a mesh.

The compiler keeps row-wise operations on the device of the row. Only a scan over time crosses
blocks, and is written out here: each device scans its block, one total per device is sent to all,
and each block is combined with the totals before it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from retrodict._arrays import where_rows

T = TypeVar("T")

TIME = "time"
"""The axis of a mesh over which rows are sharded."""

Parallel: TypeAlias = bool | Mesh
"""How a recursion over time is computed: row by row, in O(log n) depth, or so over a mesh."""


def time_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh for one long series, whose rows are sharded over the devices in blocks.

    Pass it as `parallel` to `kalman_smoother`, `infer`, `marginals`, `elbo` and `Objective`: every
    device then holds and processes its share of the rows. This has two conditions. The number of
    rows must be a multiple of the number of devices: pad the series, and pass its `length`. And the
    outputs of a program should have one row per time: the n − 1 backward kernels of a chain cannot
    be sharded evenly, so call `infer` and take marginals, bounds or sums in one `jax.jit`.
    Otherwise the results are the same, and memory is not saved.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> mesh = rd.distributed.time_mesh()
        >>> family = rd.ScanFamily(jax.random.key(0), state_dim=1, obs_dim=1)
        >>> @jax.jit
        ... def smooth(ys):
        ...     return family.infer(ys, parallel=mesh).marginals(parallel=mesh).mean
        >>> smooth(jnp.ones((64, 1))).shape
        (64, 1)

    Args:
        devices: the devices; all of them by default.
    """
    chosen = jax.devices() if devices is None else devices
    return Mesh(np.asarray(chosen), (TIME,), axis_types=(AxisType.Auto,))


def mesh_of(parallel: Parallel) -> Mesh | None:
    """Return the mesh of an option, or `None`."""
    if isinstance(parallel, bool):
        return None
    kinds = dict(zip(parallel.axis_names, parallel.axis_types, strict=True))
    if kinds.get(TIME) != AxisType.Auto:
        raise ValueError(
            f"parallel expects a mesh with an automatic axis {TIME!r}, got axes {kinds}. Use"
            " retrodict.distributed.time_mesh()."
        )
    return parallel


def laid_out(tree: T, parallel: Parallel) -> T:
    """Return the arrays with their leading axis sharded over the devices, if there is a mesh.

    Scalars, and axes that are not a multiple of the number of devices, are unchanged: the results
    are the same, but the compiler may then keep all rows on every device.
    """
    mesh = mesh_of(parallel)
    if mesh is None:
        return tree
    rows = NamedSharding(mesh, PartitionSpec(TIME))

    def shard_over(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 0 or leaf.shape[0] % mesh.shape[TIME]:
            return leaf
        return lax.with_sharding_constraint(leaf, rows)

    return jax.tree.map(shard_over, tree)


def prepended(first: T, rest: T, parallel: Parallel) -> T:
    """Prepend one row to every array of a pytree."""
    return jax.tree.map(lambda one, rows: _joined(rows, one, 0, parallel), first, rest)


def appended(rest: T, last: T, parallel: Parallel) -> T:
    """Append one row to every array of a pytree."""
    return jax.tree.map(lambda rows, one: _joined(rows, one, -1, parallel), rest, last)


def _joined(rows: jax.Array, one: jax.Array, place: int, parallel: Parallel) -> jax.Array:
    if mesh_of(parallel) is None:
        return jnp.concatenate([rows, one[None]] if place else [one[None], rows])
    # For a concatenation, XLA would gather all rows on every device; for padding, it sends one row.
    before, after = (0, 1) if place else (1, 0)
    zero = jnp.zeros((), rows.dtype)
    wider = lax.pad(rows, zero, [(before, after, 0)] + [(0, 0, 0)] * (rows.ndim - 1))
    here = jnp.arange(wider.shape[0]) == place % wider.shape[0]
    return where_rows(~here, wider, one[None])


def scan_over_devices(
    scan: Callable[..., T],
    combine: Callable[[T, T], T],
    elements: T,
    neutral: T,
    mesh: Mesh,
    *,
    reverse: bool,
) -> T:
    """Return the result of `scan` for elements of which each device holds a block.

    Args:
        scan: a prefix scan on one device, of `combine`, elements and a neutral element.
        combine: the operator on two single elements.
        elements: a pytree of arrays with a leading axis.
        neutral: the neutral element.
        mesh: a mesh with an axis `"time"`.
        reverse: whether to scan from the end.
    """
    n, count = jax.tree.leaves(elements)[0].shape[0], mesh.shape[TIME]

    def padded(leaf: jax.Array, fill: jax.Array) -> jax.Array:
        extra = jnp.broadcast_to(fill, (-n % count, *fill.shape))
        return jnp.concatenate([leaf, extra]) if n % count else leaf

    def of_block(elements: T, neutral: T) -> T:
        within = scan(combine, elements, neutral, reverse=reverse)
        edge, ends = (0, slice(1, None)) if reverse else (-1, slice(None, -1))
        totals = jax.tree.map(lambda leaf: lax.all_gather(leaf[edge], TIME), within)
        sums = scan(combine, totals, neutral, reverse=reverse)

        def of_others(leaf: jax.Array, fill: jax.Array) -> jax.Array:
            parts = [leaf[ends], fill[None]] if reverse else [fill[None], leaf[ends]]
            return jnp.concatenate(parts)[lax.axis_index(TIME)]

        others = jax.tree.map(of_others, sums, neutral)
        return jax.vmap(combine, in_axes=(None, 0))(others, within)

    rows, everywhere = PartitionSpec(TIME), PartitionSpec()
    over = jax.shard_map(
        of_block,
        mesh=mesh,
        in_specs=(rows, everywhere),
        out_specs=rows,
        axis_names={TIME},
        check_vma=False,
    )
    summed = over(jax.tree.map(padded, elements, neutral), neutral)
    return jax.tree.map(lambda leaf: leaf[:n], summed)
