"""Series of which each process of a job holds its share."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from retrodict._learning.batch import batch_for, num_series
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._series import Series, prepare_batch
from retrodict._validate import as_real_array
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

    `fit` and `fit_evidence` take them as `ys`, and so does `parameter_errors` for linear-Gaussian
    models. What they find is, up to rounding, what the same call with all series would find. All
    processes must make them, and make such calls, together; one process alone holds everything.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> walk = rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1))
        >>> model = rd.StateSpaceModel(rd.Gaussian(jnp.zeros(1), jnp.eye(1)), walk, walk)
        >>> every = jax.random.normal(jax.random.key(0), (10, 20, 1))
        >>> mine = every[rd.distributed.process_slice(10)]  # read from a file, these rows alone
        >>> series = rd.data.SharedSeries(mine)
        >>> found = rd.fit_evidence(jax.random.key(1), model, series, num_steps=5, progress=False)
        >>> series.num_series, found.status
        (10, 'finished')

    Args:
        ys: this process's series, of shape `(own, time, obs)`, padded to the same number of rows
            in all processes; `own` is 0 where `process_slice` is empty.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(own, time, input)`.
        length: how many rows exist, one integer a series; in all processes, or in none.
        mesh: the devices over which the series lie, which must be those of the fit.

    Attributes:
        series: all of them, spread over the devices of all processes, and filled up at the end.
        num_series: how many there are.
        mesh: the devices; `None` for one.
        own: those of this process, on no device; there may be none.

    Raises:
        ValueError: if a process holds more or fewer than its share, or series of another shape.
        ProcessLostError: if another process has ended.
    """

    series: Series
    num_series: int
    mesh: Mesh | None
    own: Series

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
                "SharedSeries lie over the devices of all processes, and the mesh is one device;"
                ' give mesh="all", and do not set jax.default_device.'
            )
        own = by_all(lambda: _prepared(ys, mask, inputs, length))
        count = num_series(own)
        said = all_gather_object(
            {
                "count": count,
                "numbers of rows and columns": own.ys.shape[1:],
                "numbers of inputs": 0 if own.inputs is None else own.inputs.shape[2],
                "lengths": "none" if length is None else "given",
                "masks": own.mask is not None,
            }
        )
        for what in ("numbers of rows and columns", "numbers of inputs", "lengths"):
            if len({str(each[what]) for each in said}) > 1:
                raise ValueError(
                    f"SharedSeries expects series of one shape in all processes, and their {what}"
                    f" differ: {', '.join(str(each[what]) for each in said)}."
                )
        self.num_series = sum(each["count"] for each in said)
        if not self.num_series:
            raise ValueError("SharedSeries expects one series or more in all, got none.")
        share = by_all(lambda: process_slice(self.num_series, mesh=self.mesh))
        fits = all_gather_object(count == share.stop - share.start)
        if not all(fits):
            raise ValueError(
                f"SharedSeries: process {jax.process_index()} holds {count} of"
                f" {self.num_series} series, and must hold {share.stop - share.start}, those of"
                f" process_slice({self.num_series}). The same is asked of all processes."
            )
        if own.mask is None and any(each["masks"] for each in said):
            own = eqx.tree_at(
                lambda s: s.mask, own, jnp.ones(own.ys.shape, bool), is_leaf=lambda x: x is None
            )
        self.series = _spread(own, self.num_series, self.mesh)
        self.own = jax.tree.map(np.asarray, own)

    def __repr__(self) -> str:
        rows, columns = self.series.ys.shape[1:]
        own = num_series(self.own)
        return f"SharedSeries({self.num_series} series, {rows} rows, {columns} columns; {own} own)"


def _prepared(ys: Any, mask: Any, inputs: Any, length: Any) -> Series:
    """The series of one process, which may be none."""
    owner, ys = "SharedSeries", as_real_array(ys, "ys", missing=True)
    inputs, shape = None if inputs is None else as_real_array(inputs, "inputs"), ys.shape
    if len(shape) != 3:
        raise ValueError(f"{owner} expects ys of shape (own, time, obs), got {shape}.")
    if not shape[0]:
        if inputs is not None and len(inputs.shape) != 3:
            raise ValueError(
                f"{owner} expects inputs of shape (0, {shape[1]}, input), got {inputs.shape}."
            )
        return _series([ys, None, inputs, length])
    options = {"mask": mask, "inputs": inputs, "length": length}
    return prepare_batch(ys, **options, takes_input=inputs is not None)


def _spread(own: Series, count: int, mesh: Mesh | None) -> Series:
    """The shares of all processes as arrays over a mesh."""
    if mesh is None:
        return own
    own = _or_another(own)
    places, total = device_slice(count, mesh), -(-count // mesh.size) * mesh.size
    index = np.minimum(np.arange(places.stop - places.start), num_series(own) - 1)
    rows = NamedSharding(mesh, P(mesh.axis_names))

    def over_devices(leaf: Any) -> jax.Array:
        local = np.asarray(leaf)[index]

        def part(which: Any) -> np.ndarray:
            begin, end, _ = which[0].indices(total)
            return local[begin - places.start : end - places.start]

        return jax.make_array_from_callback((total, *local.shape[1:]), rows, part)

    return jax.tree.map(over_devices, own)


def _or_another(own: Series) -> Series:
    """The series of this process or, if it has none, one of another, to fill up with.

    What fills up counts nothing, but is computed with: other values might not be possible ones. All
    processes must call it.
    """
    counts = all_gather_object(num_series(own))
    if all(counts):
        return own
    speaks = jax.process_index() == next(who for who, count in enumerate(counts) if count)
    arrays = (own.ys, own.mask, own.inputs, own.length)
    said = all_gather_object(
        [a if a is None else (a[:1].tolist(), str(a.dtype)) for a in arrays] if speaks else None
    )
    if num_series(own):
        return own
    (one,) = [parts for parts in said if parts is not None]
    return _series([None if part is None else np.asarray(*part) for part in one])


def _series(parts: Sequence[Any]) -> Series:
    arrays: list[Any] = [None if part is None else jnp.asarray(part) for part in parts]
    return jax.vmap(Series)(*arrays)


def counted_for(
    model: StateSpaceModel,
    ys: Any,
    *,
    mask: Any,
    inputs: Any,
    length: Any,
    mesh: Mesh | None,
    owner: str,
) -> tuple[Series, int]:
    """Series that may be shared, checked against an unwrapped model, and how many of them count.

    Args:
        model: the model.
        ys: `SharedSeries`, or as in `batch_for`, like the rest.
        mask: true where an entry was seen.
        inputs: inputs.
        length: how many rows exist.
        mesh: the devices of the verb; `None` for one.
        owner: the verb, for messages.
    """
    if not isinstance(ys, SharedSeries):
        batch = batch_for(model, ys, mask=mask, inputs=inputs, length=length, owner=owner)
        return batch, num_series(batch)
    refuse_beside(owner, "the shared series", mask=mask, inputs=inputs, length=length)
    if ys.mesh != mesh:
        raise ValueError(f"{owner}: the series are shared over other devices than its mesh has.")
    check_shared(model, ys)
    return ys.series, ys.num_series


def check_shared(model: StateSpaceModel, shared: SharedSeries) -> None:
    """Refuses shared series that do not fit an unwrapped model, in all processes alike."""
    one = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape[2:])), shared.series)
    prepare_data(model, one.ys, inputs=one.inputs)


def refuse_beside(owner: str, what: str, **options: Any) -> None:
    """Refuses options that the series bring with them."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{owner} reads {name} from {what}; leave {name} out.")
