"""Validate the data arguments of `fit` and build a dataset of series."""

from typing import Any

from jax.sharding import Mesh

from retrodict._learning.dataset import AbstractDataset, ArrayDataset, batch_for
from retrodict._learning.on_disk import AbstractSeriesStore, StoredDataset
from retrodict._learning.shared import SharedSeries, check_shared, refuse_beside
from retrodict._model import AbstractModel


def open_dataset(
    model: AbstractModel,
    ys: Any,
    *,
    mask: Any,
    inputs: Any,
    length: Any,
    mesh: Mesh | None,
    owner: str,
) -> AbstractDataset:
    """Return a dataset of series, checked against an unwrapped model.

    Args:
        model: the model.
        ys: arrays as in `prepare_batch`, an `AbstractSeriesStore`, or `SharedSeries`.
        mask: true where an entry was observed; like the next two, for arrays only.
        inputs: inputs.
        length: the number of existing rows.
        mesh: the devices of the function; `None` for one.
        owner: the calling function, for messages.
    """
    options = {"mask": mask, "inputs": inputs, "length": length}
    if isinstance(ys, AbstractSeriesStore):
        refuse_beside(owner, "the store of the series", **options)
        return StoredDataset(ys, model, mesh)
    if isinstance(ys, SharedSeries):
        refuse_beside(owner, "the shared series", **options)
        if ys.mesh != mesh:
            raise ValueError(
                f"{owner} expects series that are shared over the devices of its mesh. Pass the"
                " same `mesh` to SharedSeries and to the function."
            )
        check_shared(model, ys)
        series, count = ys.series, ys.num_series
    else:
        series = batch_for(model, ys, **options, learner=owner)
        count = series.num_series
    return ArrayDataset(series, count, mesh)
