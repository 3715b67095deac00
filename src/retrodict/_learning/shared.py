"""Series of several processes, each of which holds its share."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from retrodict._arrays import as_real_array
from retrodict._model import AbstractModel, Series, prepare_batch
from retrodict.distributed import (
    MeshLike,
    all_gather_object,
    as_mesh,
    by_all,
    device_slice,
    process_slice,
)


class SharedSeries:
    """Series of which each process holds its share, in the order of `process_slice`.

    `fit` and `fit_evidence` accept them as `ys`, and so does `parameter_errors` for linear-Gaussian
    models. The results are those of the same call with all series, up to rounding. All processes
    must construct them, and call these functions, together. A single process holds all series.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> walk = rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1))
        >>> model = rd.StateSpaceModel(rd.Gaussian(jnp.zeros(1), jnp.eye(1)), walk, walk)
        >>> every = jax.random.normal(jax.random.key(0), (10, 20, 1))
        >>> mine = every[rd.distributed.process_slice(10)]  # read from a file, these rows alone
        >>> series = rd.data.SharedSeries(mine)
        >>> result = rd.fit_evidence(jax.random.key(1), model, series, num_steps=5, progress=False)
        >>> series.num_series, result.status
        (10, 'finished')

    Args:
        ys: the series of this process, of shape `(local, time, obs)`, padded to the same number of
            rows in all processes; `local` is 0 where `process_slice` is empty.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(local, time, input)`.
        length: the number of existing rows, one integer per series; in all processes, or in none.
        mesh: the devices over which the series are sharded, the same as those of the function.

    Attributes:
        series: all series, sharded over the devices of all processes and padded at the end.
        num_series: the number of series, without padding.
        mesh: the devices; `None` for one.
        local: the series of this process as NumPy arrays; possibly none.

    Raises:
        ValueError: if a process holds more or fewer than its share, or series of another shape.
        ProcessLostError: if another process has ended.
    """

    series: Series
    num_series: int
    mesh: Mesh | None
    local: Series

    def __init__(
        self,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
        mesh: MeshLike = "all",
    ) -> None:
        self.mesh = as_mesh(mesh)
        if self.mesh is None and jax.process_count() > 1:
            raise ValueError(
                "SharedSeries expects a mesh of the devices of all processes, got a single device."
                ' Pass mesh="all", and do not set jax.default_device.'
            )
        local = by_all(lambda: _prepare_local(ys, mask, inputs, length))
        count = local.num_series
        reports = all_gather_object(
            {
                "count": count,
                "numbers of rows and columns": local.ys.shape[1:],
                "numbers of inputs": 0 if local.inputs is None else local.inputs.shape[2],
                "lengths": "none" if length is None else "given",
                "masks": local.mask is not None,
            }
        )
        for what in ("numbers of rows and columns", "numbers of inputs", "lengths"):
            if len({str(each[what]) for each in reports}) > 1:
                raise ValueError(
                    f"SharedSeries expects series of one shape in all processes, but their {what}"
                    f" differ: {', '.join(str(each[what]) for each in reports)}."
                )
        self.num_series = sum(each["count"] for each in reports)
        if not self.num_series:
            raise ValueError(
                "SharedSeries expects at least one series in all processes together, got none."
            )
        share = by_all(lambda: process_slice(self.num_series, mesh=self.mesh))
        fits = all_gather_object(count == share.stop - share.start)
        if not all(fits):
            raise ValueError(
                f"SharedSeries: process {jax.process_index()} holds {count} of"
                f" {self.num_series} series, and must hold {share.stop - share.start}, those of"
                f" process_slice({self.num_series}). Every process must pass its own slice."
            )
        if local.mask is None and any(each["masks"] for each in reports):
            local = _series([local.ys, jnp.ones(local.ys.shape, bool), local.inputs, local.length])
        self.series = _shard(local, self.num_series, self.mesh)
        self.local = jax.tree.map(np.asarray, local)

    def __repr__(self) -> str:
        rows, columns = self.series.ys.shape[1:]
        shape = f"{self.num_series} series, {rows} rows, {columns} columns"
        return f"SharedSeries({shape}; {self.local.num_series} local)"


def _prepare_local(ys: Any, mask: Any, inputs: Any, length: Any) -> Series:
    """Check the series of one process, which may be none."""
    owner, ys = "SharedSeries", as_real_array(ys, "ys", missing=True)
    inputs, shape = None if inputs is None else as_real_array(inputs, "inputs"), ys.shape
    if len(shape) != 3:
        raise ValueError(f"{owner} expects ys of shape (local, time, obs), got {shape}.")
    if not shape[0]:
        if inputs is not None and len(inputs.shape) != 3:
            raise ValueError(
                f"{owner} expects inputs of shape (0, {shape[1]}, input), got {inputs.shape}."
            )
        return _series([ys, None, inputs, length])
    options = {"mask": mask, "inputs": inputs, "length": length}
    return prepare_batch(ys, **options, takes_input=inputs is not None)


def _shard(local: Series, count: int, mesh: Mesh | None) -> Series:
    """Return the shares of all processes as arrays over a mesh."""
    if mesh is None:
        return local
    local = _with_padding(local)
    places, total = device_slice(count, mesh), -(-count // mesh.size) * mesh.size
    index = np.minimum(np.arange(places.stop - places.start), local.num_series - 1)
    rows = NamedSharding(mesh, P(mesh.axis_names))

    def over_devices(leaf: Any) -> jax.Array:
        values = np.asarray(leaf)[index]

        def part(which: Any) -> np.ndarray:
            begin, end, _ = which[0].indices(total)
            return values[begin - places.start : end - places.start]

        return jax.make_array_from_callback((total, *values.shape[1:]), rows, part)

    return jax.tree.map(over_devices, local)


def _with_padding(local: Series) -> Series:
    """Return the series of this process or, if it has none, one series of another, as padding.

    Padding contributes nothing, but it is computed with: made-up values might be impossible under
    the model. All processes must call this function.
    """
    counts = all_gather_object(local.num_series)
    if all(counts):
        return local
    sends = jax.process_index() == next(who for who, count in enumerate(counts) if count)
    arrays = (local.ys, local.mask, local.inputs, local.length)
    reports = all_gather_object(
        [a if a is None else (a[:1].tolist(), str(a.dtype)) for a in arrays] if sends else None
    )
    if local.num_series:
        return local
    (one,) = [parts for parts in reports if parts is not None]
    return _series([None if part is None else np.asarray(*part) for part in one])


def _series(parts: Sequence[Any]) -> Series:
    arrays: list[Any] = [None if part is None else jnp.asarray(part) for part in parts]
    return Series(*arrays)


def check_shared(model: AbstractModel, shared: SharedSeries) -> None:
    """Raise in all processes if shared series do not fit an unwrapped model."""
    one = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape[2:])), shared.series)
    model.series(one.ys, inputs=one.inputs)


def refuse_beside(owner: str, what: str, **options: Any) -> None:
    """Raise if an option is given that the series already contain."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{owner} reads {name} from {what}; leave out `{name}`.")
