"""Draws for ArviZ, of either major version."""

import importlib.metadata
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrodict._files import version_of
from retrodict._interface import optional
from retrodict.data._results import to_xarray
from retrodict.data._table import Table


def to_arviz(
    table: Table,
    *,
    states: Any = None,
    observations: Any = None,
    parameters: Mapping[str, Any] | None = None,
    state_names: Sequence[str] | None = None,
    num_chains: int | None = None,
) -> Any:
    """Return draws in the form that the plots and diagnostics of ArviZ take.

    The groups are `posterior` (`states` and parameters), `posterior_predictive`, `observed_data`
    and, if there are inputs, `constant_data`. Each observed column is a variable, with the
    same name in the second and third. Sampled paths of a chain are independent, so that they can be
    split into several chains, which some diagnostics require.

    Example:
        >>> import numpy as np, retrodict as rd
        >>> table = rd.data.read({"year": [1871, 1872], "flow": [1.0, 2.0]})
        >>> draws = np.zeros((8, 2, 1))  # paths of a chain, from `chain.sample(key, 8)`
        >>> inference = rd.data.to_arviz(table, states=draws, state_names=["level"])
        >>> inference["posterior"]["states"].shape
        (4, 2, 2, 1)

    Args:
        table: the table of the series.
        states: draws of paths, of shape `(sample, time, state)` or `(batch, sample, time, state)`.
        observations: draws of observations from `predictive`, of shape `(sample, time, obs)` or
            `(batch, sample, time, obs)`.
        parameters: draws of parameters by name, each with a leading axis `sample`.
        state_names: names of the coordinates of the state.
        num_chains: the number of chains to split the draws into; by default 4 if it divides their
            number, and else 1.

    Returns:
        An `arviz.InferenceData` (ArviZ 0.x) or an `xarray.DataTree` (1.x).

    Raises:
        ValueError: if a shape does not fit, or draws cannot be split into so many chains.
    """
    xarray = optional("xarray")
    groups: dict[str, Any] = {}
    posterior = xarray.Dataset(attrs={"library": "retrodict", "version": version_of()})
    if states is not None:
        paths = to_xarray(table, states=states, state_names=state_names)
        posterior = _in_chains(paths, num_chains)
    for name, values in (parameters or {}).items():
        values = np.asarray(values)
        axes = [f"{name}_dim_{i}" for i in range(values.ndim - 1)]
        draws = xarray.Dataset({name: (("sample", *axes), values)})
        posterior = posterior.assign(_in_chains(draws, num_chains).data_vars)
    if posterior.data_vars:
        groups["posterior"] = posterior
    if observations is not None:
        draws = _in_chains(to_xarray(table, observations=observations), num_chains)
        groups["posterior_predictive"] = _by_column(draws, "observations")
    data = to_xarray(table)
    groups["observed_data"] = _by_column(data, "observed")
    if table.inputs is not None:
        groups["constant_data"] = data[["inputs"]]
    if arviz_major() >= 1:
        return xarray.DataTree.from_dict(groups)
    with warnings.catch_warnings():
        # Its last versions warn of 1.0 when they are imported.
        warnings.simplefilter("ignore", FutureWarning)
        return optional("arviz", "arviz").InferenceData(**groups)


def arviz_major() -> int:
    """Return the installed major version of ArviZ."""
    try:
        return int(importlib.metadata.version("arviz").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("to_arviz needs arviz: pip install 'retrodict[arviz]'.") from None


def _in_chains(dataset: Any, num_chains: int | None) -> Any:
    """Split the axis `sample` into the two leading axes `chain` and `draw`."""
    samples = dataset.sizes["sample"]
    chains = num_chains if num_chains is not None else (4 if samples % 4 == 0 else 1)
    if chains < 1 or samples % chains:
        raise ValueError(f"{samples} draws cannot be split into {chains} chains of equal length.")
    length = samples // chains
    split = dataset.coarsen(sample=length).construct(sample=("chain", "draw"))
    numbered = {"chain": np.arange(chains), "draw": np.arange(length)}
    return split.transpose("chain", "draw", ...).assign_coords(numbered).assign_attrs(dataset.attrs)


def _by_column(dataset: Any, name: str) -> Any:
    """Return one variable per observed column."""
    columns = {
        str(label): dataset[name].sel(obs=label, drop=True) for label in dataset["obs"].values
    }
    return optional("xarray").Dataset(columns, attrs=dataset.attrs)
