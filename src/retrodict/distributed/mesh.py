"""Meshes of devices, and arrays that are sharded over them.

`jax.jit` compiles a program once for all devices. The sharding of its arguments determines the
sharding of the program, and XLA inserts the communication.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

MeshLike: TypeAlias = Mesh | Literal["all"] | None
"""`"all"` for every device of every process, a mesh, or `None` for JAX's default device."""


def as_mesh(mesh: MeshLike) -> Mesh | None:
    """Return the mesh of an option; `None` for one device.

    The axes are those of the given mesh, with automatic sharding by the compiler. With the explicit
    axes of `jax.make_mesh`, every operation in a kernel of the user would have to declare the
    sharding of its result.

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


def on_accelerator() -> bool:
    """Return whether JAX computes on an accelerator unless told otherwise.

    There every operation has a fixed cost, however small it is: loops over time should have few
    operations and few rounds. Results do not depend on it, up to rounding.
    """
    return jax.default_backend() != "cpu"


def num_devices(mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of shards of an array over some axes of a mesh."""
    return math.prod(mesh.shape[axis] for axis in axes)


def is_multi_process(tree: PyTree) -> bool:
    """Return whether some array of a tree is sharded over devices of another process."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return any(not array.is_fully_addressable for array in arrays)


def shard_over(tree: PyTree, mesh: Mesh, spec: P) -> PyTree:
    """Return a tree whose arrays are sharded over the devices of a mesh.

    Arrays that are the same in every process are not sent: each process copies its share to its
    devices.
    """
    sharding = NamedSharding(mesh, spec)

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = place(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if is_multi_process(leaf):
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf
            return jax.jit(lambda array: array, out_shardings=sharding)(leaf)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.map(place, arrays), rest)


def automatic(tree: PyTree) -> PyTree:
    """Return the arrays of a tree on the same devices, with automatic axes."""

    def convert(leaf: Any) -> Any:
        known = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        sharding = leaf.sharding if known else None
        if not isinstance(sharding, NamedSharding):
            return leaf
        shards = [shard.data for shard in leaf.addressable_shards]
        devices = NamedSharding(_with_automatic_axes(sharding.mesh), sharding.spec)
        return jax.make_array_from_single_device_arrays(leaf.shape, devices, shards)

    return jax.tree.map(convert, tree)


def to_hosts(tree: PyTree) -> PyTree:
    """Return the arrays of a tree as NumPy arrays in every process; all processes must call it."""
    arrays, rest = eqx.partition(tree, eqx.is_array)
    if is_multi_process(arrays):
        spread = [leaf for leaf in jax.tree.leaves(arrays) if is_multi_process(leaf)]
        replicated = NamedSharding(spread[0].sharding.mesh, P())
        arrays = jax.jit(lambda tree: tree, out_shardings=replicated)(arrays)
    return eqx.combine(jax.tree.map(np.asarray, arrays), rest)


def writes_for(mesh: Mesh | None) -> bool:
    """Return whether this process writes files for all processes of a mesh."""
    return mesh is None or mesh.devices.flat[0].process_index == jax.process_index()


def gather_from_devices(value: int, mesh: Mesh) -> list[int]:
    """Gather an integer from the process of each device; all processes must call it."""
    rows = NamedSharding(mesh, P(mesh.axis_names))
    values = jax.make_array_from_callback((mesh.size,), rows, lambda _: np.array([value]))
    return to_hosts(values).tolist()


def map_shards(fn: Callable[[PyTree], np.ndarray], tree: PyTree, width: int) -> np.ndarray:
    """Compute one row per entry of the leading axis, each in the process that holds the entry.

    Args:
        fn: returns the rows, of shape `(entries, width)`, of one shard.
        tree: arrays with the same equal sharding of their leading axis.
        width: the number of entries of a row.
    """
    leaves, structure = jax.tree.flatten(tree)
    sharding = leaves[0].sharding
    rows = NamedSharding(sharding.mesh, P(sharding.spec[0]))
    shard_rows = {}
    for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
        shard_rows[_begin(shards[0].index)] = fn(
            structure.unflatten([shard.data for shard in shards])
        )
    shape = (leaves[0].shape[0], width)
    return to_hosts(
        jax.make_array_from_callback(shape, rows, lambda index: shard_rows[_begin(index)])
    )


def _begin(index: Any) -> int:
    return index[0].start or 0


def pad_to_multiple(tree: PyTree, multiple: int) -> PyTree:
    """Pad the leading axes of arrays to a multiple of a number, by repeating the last entry."""

    def pad(leaf: Any) -> Any:
        missing = -leaf.shape[0] % multiple
        if not missing:
            return leaf
        index = np.minimum(np.arange(leaf.shape[0] + missing), leaf.shape[0] - 1)
        return leaf[index]

    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.map(pad, arrays), rest)


def sharded_vmap(
    fn: Callable[..., Any],
    in_axes: int | None | Sequence[int | None] = 0,
    *,
    mesh: MeshLike = "all",
) -> Callable[..., Any]:
    """Return `jax.jit(jax.vmap(fn, in_axes))` with the mapped axis sharded over devices.

    It maps functions of one series, or of one key, over a batch. The results are those of one
    device up to rounding, for any batch size: the batch is padded to a multiple of the number of
    devices, and the results are cut.

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
        fn: a function of arrays, or of pytrees with arrays, such as models and families.
        in_axes: 0 for an argument that is mapped over its leading axis, and `None` for one that is
            shared; one value for all arguments, or one per argument.
        mesh: the devices: `"all"` of them, those of a `jax.sharding.Mesh`, or `None` for JAX's
            default device. The batch is sharded over all axes of a mesh.

    Returns:
        A compiled function. Reuse it: another call of `sharded_vmap` compiles again. If the batch
        is a multiple of the number of devices, the results are sharded in the same way; no process
        holds all of them.

    Raises:
        ValueError: if `mesh` or `in_axes` is something else, or the mapped axes differ in size.
    """

    @eqx.filter_jit
    def mapped(args: Sequence[Any], axes: tuple[int | None, ...], count: int) -> Any:
        filters = tuple(None if axis is None else eqx.if_array(0) for axis in axes)
        results = eqx.filter_vmap(fn, in_axes=filters)(*args)
        arrays, rest = eqx.partition(results, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda leaf: leaf[:count], arrays), rest)

    def over_devices(*args: Any) -> Any:
        axes = _axes_of(in_axes, len(args))
        count = _size_of([arg for arg, axis in zip(args, axes, strict=True) if axis == 0])
        laid_over = as_mesh(mesh)
        if laid_over is not None:
            replicated, rows = P(), P(laid_over.axis_names)
            args = tuple(
                shard_over(arg, laid_over, replicated)
                if axis is None
                else shard_over(pad_to_multiple(arg, laid_over.size), laid_over, rows)
                for arg, axis in zip(args, axes, strict=True)
            )
        return mapped(args, axes, count)

    return over_devices


def _axes_of(
    in_axes: int | None | Sequence[int | None], num_arguments: int
) -> tuple[int | None, ...]:
    """Return one entry per argument."""
    axes = tuple(in_axes) if isinstance(in_axes, Sequence) else (in_axes,) * num_arguments
    if len(axes) != num_arguments or any(axis not in (0, None) for axis in axes) or 0 not in axes:
        raise ValueError(
            "sharded_vmap expects `in_axes` of 0 or None, one for all arguments or one for each,"
            f" not all of them None; got {in_axes} for {num_arguments} arguments."
        )
    return axes


def _size_of(mapped: Sequence[Any]) -> int:
    """Return the common size of the leading axes of all arrays."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(eqx.filter(mapped, eqx.is_array))]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "sharded_vmap expects arrays whose leading axes have one size, at least 1, got shapes"
            f" {', '.join(map(str, shapes))}."
        )
    return sizes.pop()


def process_slice(num_series: int, *, mesh: MeshLike = "all") -> slice:
    """Return the slice of all series that this process must hold for `data.SharedSeries`.

    Each device holds equally many series, with padding at the end. A process holds those of its
    devices: all series if it is the only one, and none if the other devices suffice.

    Example:
        >>> import numpy as np, retrodict as rd
        >>> every = np.arange(10)
        >>> every[rd.distributed.process_slice(10)].tolist()  # one process holds all series
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    Args:
        num_series: the number of series of all processes.
        mesh: the devices over which they are sharded, as in `fit`.

    Raises:
        ValueError: if the devices of a process are not adjacent in the mesh.
    """
    places = device_slice(num_series, as_mesh(mesh))
    return slice(min(places.start, num_series), min(places.stop, num_series))


def device_slice(num_series: int, mesh: Mesh | None) -> slice:
    """Return the slice of the series on the devices of this process, padding included."""
    if mesh is None:
        return slice(0, num_series)
    each = -(-num_series // mesh.size)
    rows = NamedSharding(mesh, P(mesh.axis_names))
    parts = rows.addressable_devices_indices_map((each * mesh.size,)).values()
    begins = sorted({(index[0].start or 0) for index in parts if index is not None})
    if not begins:
        raise ValueError(
            f"Process {jax.process_index()} has no device in the mesh over which series are shared."
            ' Pass mesh="all", or a mesh with devices of all processes.'
        )
    if begins[-1] - begins[0] != each * (len(begins) - 1):
        raise ValueError(
            "Series are divided in the order of the mesh, in which the devices of each process must"
            f" be adjacent; those of process {jax.process_index()} are not. Pass"
            ' mesh="all", or a mesh of jax.devices() in their order.'
        )
    return slice(begins[0], begins[-1] + each)
