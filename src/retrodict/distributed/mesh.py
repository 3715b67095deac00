"""Meshes of devices: which to use, and how arrays are laid over them.

Programs are compiled once for all devices by `jax.jit`; the arrays say where they lie, and XLA
inserts what has to be exchanged.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

MeshLike: TypeAlias = Mesh | Literal["all"] | None
"""`"all"` for every device of every process, a mesh, or `None` for JAX's default device."""


def as_mesh(mesh: MeshLike) -> Mesh | None:
    """The mesh that an option names; `None` where one device does everything.

    The axes are those of the given mesh, but laid out by the compiler: with the explicit axes that
    `jax.make_mesh` makes, every operation of a kernel of the user would have to say where its
    result lies.

    Raises:
        ValueError: if it is neither `None`, `"all"` nor a mesh.
    """
    if mesh is None:
        return None
    if isinstance(mesh, Mesh):
        return _with_automatic_axes(mesh)
    if mesh != "all":
        raise ValueError(f'mesh must be None, "all" or a jax.sharding.Mesh, got {mesh!r}.')
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if jax.device_count() == 1 or chosen is not None:
        return None
    return _with_automatic_axes(Mesh(np.asarray(jax.devices()), ("batch",)))


def _with_automatic_axes(mesh: Any) -> Mesh:
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def num_devices(mesh: Mesh, axes: Sequence[str]) -> int:
    """How many shares the axes of a mesh cut an array into."""
    return math.prod(mesh.shape[axis] for axis in axes)


def is_spread(tree: PyTree) -> bool:
    """Whether some array of a tree lies in part on devices of another process."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return any(not array.is_fully_addressable for array in arrays)


def lay(tree: PyTree, mesh: Mesh, spec: P) -> PyTree:
    """The arrays of a tree over the devices of a mesh; the rest of the tree as it is.

    What is the same in every process is not sent: each process puts its own share on its devices.
    """
    sharding = NamedSharding(mesh, spec)

    def laid(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = laid(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if is_spread(leaf):
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf
            return jax.jit(lambda array: array, out_shardings=sharding)(leaf)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.map(laid, arrays), rest)


def automatic(tree: PyTree) -> PyTree:
    """The arrays of a tree where they lie, on meshes whose axes are laid out by the compiler."""

    def of(leaf: Any) -> Any:
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        if not isinstance(sharding, NamedSharding):
            return leaf
        shards = [shard.data for shard in leaf.addressable_shards]
        devices = NamedSharding(_with_automatic_axes(sharding.mesh), sharding.spec)
        return jax.make_array_from_single_device_arrays(leaf.shape, devices, shards)

    return jax.tree.map(of, tree)


def to_hosts(tree: PyTree) -> PyTree:
    """The arrays of a tree as numpy arrays, whole in every process; all processes must call it."""
    arrays, rest = eqx.partition(tree, eqx.is_array)
    if is_spread(arrays):
        spread = [leaf for leaf in jax.tree.leaves(arrays) if is_spread(leaf)]
        whole = NamedSharding(spread[0].sharding.mesh, P())
        arrays = jax.jit(lambda tree: tree, out_shardings=whole)(arrays)
    return eqx.combine(jax.tree.map(np.asarray, arrays), rest)


def writes_for(mesh: Mesh | None) -> bool:
    """Whether this process is the one that writes files for all that work on a mesh."""
    return mesh is None or mesh.devices.flat[0].process_index == jax.process_index()


def said_by_all(value: int, mesh: Mesh) -> list[int]:
    """What each device's process says; all processes of the mesh must call it."""
    rows = NamedSharding(mesh, P(mesh.axis_names))
    said = jax.make_array_from_callback((mesh.size,), rows, lambda _: np.array([value]))
    return to_hosts(said).tolist()


def rows_where_they_lie(fn: Callable[[PyTree], np.ndarray], tree: PyTree, width: int) -> np.ndarray:
    """A table with a row for each entry of the leading axis, of which each process makes its own.

    Args:
        fn: makes the rows, of shape `(entries, width)`, from the share of one device.
        tree: arrays that lie in equal shares over their leading axis, all in the same way.
        width: how many numbers a row has.
    """
    leaves, structure = jax.tree.flatten(tree)
    sharding = leaves[0].sharding
    rows = NamedSharding(sharding.mesh, P(sharding.spec[0]))
    made = {}
    for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
        made[_begin(shards[0].index)] = fn(structure.unflatten([shard.data for shard in shards]))
    shape = (leaves[0].shape[0], width)
    return to_hosts(jax.make_array_from_callback(shape, rows, lambda index: made[_begin(index)]))


def _begin(index: Any) -> int:
    return index[0].start or 0


def fill_up(tree: PyTree, multiple: int) -> PyTree:
    """Arrays whose leading axis is a multiple of a number, by repeating the last entry."""

    def filled(leaf: Any) -> Any:
        missing = -leaf.shape[0] % multiple
        if not missing:
            return leaf
        index = np.minimum(np.arange(leaf.shape[0] + missing), leaf.shape[0] - 1)
        return leaf[index]

    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.map(filled, arrays), rest)


def sharded_vmap(
    fn: Callable[..., Any],
    in_axes: int | None | Sequence[int | None] = 0,
    *,
    mesh: MeshLike = "all",
) -> Callable[..., Any]:
    """`jax.jit(jax.vmap(fn, in_axes))`, with the mapped axis laid over devices.

    Every verb of this library that takes one series, or one key, is spread over a batch by it. The
    answers are those of one device up to rounding, whatever the size of the batch: it is filled up
    to a multiple of the number of devices, and the answers are cut.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> walk = rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1))
        >>> model = rd.StateSpaceModel(rd.Gaussian(jnp.zeros(1), jnp.eye(1)), walk, walk)
        >>> smooth = rd.distributed.sharded_vmap(
        ...     lambda model, ys: rd.kalman_smoother(model, ys).chain.marginals().mean, (None, 0)
        ... )
        >>> smooth(model, jnp.ones((5, 10, 1))).shape
        (5, 10, 1)

    Args:
        fn: a function of arrays, or of pytrees that hold some, such as models and families.
        in_axes: 0 for an argument whose arrays are mapped over their leading axis and `None` for
            one that is the same for all; one for all arguments, or one for each.
        mesh: the devices: `"all"` of them, those of a `jax.sharding.Mesh`, or `None` for JAX's
            default device. The batch is laid over all axes of a mesh.

    Returns:
        A compiled function. Keep it: calling `sharded_vmap` again compiles again. If the batch is a
        multiple of the number of devices, what it returns lies on them in the same way; between
        several processes no one holds all of it.

    Raises:
        ValueError: if `mesh` or `in_axes` is something else, or the mapped axes differ in size.
    """

    @eqx.filter_jit
    def mapped(args: Sequence[Any], axes: tuple[int | None, ...], count: int) -> Any:
        given = tuple(None if axis is None else eqx.if_array(0) for axis in axes)
        found = eqx.filter_vmap(fn, in_axes=given)(*args)
        arrays, rest = eqx.partition(found, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda leaf: leaf[:count], arrays), rest)

    def over_devices(*args: Any) -> Any:
        axes = _axes_of(in_axes, len(args))
        count = _size_of([arg for arg, axis in zip(args, axes, strict=True) if axis == 0])
        laid_over = as_mesh(mesh)
        if laid_over is not None:
            whole, rows = P(), P(laid_over.axis_names)
            args = tuple(
                lay(arg, laid_over, whole)
                if axis is None
                else lay(fill_up(arg, laid_over.size), laid_over, rows)
                for arg, axis in zip(args, axes, strict=True)
            )
        return mapped(args, axes, count)

    return over_devices


def _axes_of(
    in_axes: int | None | Sequence[int | None], num_arguments: int
) -> tuple[int | None, ...]:
    """One entry for each argument."""
    axes = tuple(in_axes) if isinstance(in_axes, Sequence) else (in_axes,) * num_arguments
    if len(axes) != num_arguments or any(axis not in (0, None) for axis in axes) or 0 not in axes:
        raise ValueError(
            "sharded_vmap expects in_axes 0 or None, one for all arguments or one for each, not all"
            f" of them None; got {in_axes} for {num_arguments} arguments."
        )
    return axes


def _size_of(mapped: Sequence[Any]) -> int:
    """The one size of the leading axes of all arrays."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(eqx.filter(mapped, eqx.is_array))]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "sharded_vmap expects arrays whose leading axes have one size, at least 1, got shapes"
            f" {', '.join(map(str, shapes))}."
        )
    return sizes.pop()


def process_slice(num_series: int, *, mesh: MeshLike = "all") -> slice:
    """Return which of all series this process is to hold, as `data.SharedSeries` takes them.

    Each device has equally many, those at the end of the last ones are filled up. A process has
    those of its devices: all series if it is alone, and none if the others have enough devices.

    Args:
        num_series: how many there are in all processes.
        mesh: the devices over which they lie, as in `fit`.

    Raises:
        ValueError: if the devices of a process are not next to each other in the mesh.
    """
    places = device_slice(num_series, as_mesh(mesh))
    return slice(min(places.start, num_series), min(places.stop, num_series))


def device_slice(num_series: int, mesh: Mesh | None) -> slice:
    """Return the series of this process's devices, with those that fill them up."""
    if mesh is None:
        return slice(0, num_series)
    each = -(-num_series // mesh.size)
    rows = NamedSharding(mesh, P(mesh.axis_names))
    parts = rows.addressable_devices_indices_map((each * mesh.size,)).values()
    begins = sorted({(index[0].start or 0) for index in parts if index is not None})
    if not begins:
        raise ValueError(
            f"Process {jax.process_index()} has no device in the mesh over which series are shared;"
            ' give mesh="all", or a mesh with devices of all processes.'
        )
    if begins[-1] - begins[0] != each * (len(begins) - 1):
        raise ValueError(
            "Series are shared out in the order of the mesh, in which the devices of each process"
            f" must be next to each other; those of process {jax.process_index()} are not. Give"
            ' mesh="all", or a mesh of jax.devices() in their order.'
        )
    return slice(begins[0], begins[-1] + each)
