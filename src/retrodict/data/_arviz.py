"""Draws for ArviZ, of either major version."""

import importlib.metadata
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrodict._errors import optional
from retrodict._workspace import library_version
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
    """Draws in the form that the plots and diagnostics of ArviZ take.

    The groups are `posterior` (`states` and parameters), `posterior_predictive`, `observed_data`
    and, if there are inputs, `constant_data`. Each observed column is a variable of its own, under
    the same name in the second and third. Draws of paths from a chain are independent, so that they
    may be cut into several chains: some diagnostics want that.

    Args:
        table: what the series were read as.
        states: draws of paths, of shape `(sample, time, state)` or `(batch, sample, time, state)`.
        observations: draws of observations from `predictive`, of shape `(sample, time, obs)` or
            `(batch, sample, time, obs)`.
        parameters: draws of parameters by name, each with a leading axis `sample`.
        state_names: names of the coordinates of the state.
        num_chains: how many chains to cut the draws into; by default 4 if their number is a
            multiple of it, and else 1.

    Returns:
        An `arviz.InferenceData` (ArviZ 0.x) or an `xarray.DataTree` (1.x).

    Raises:
        ValueError: if a shape does not fit, or draws cannot be cut into so many chains.
    """
    groups = arviz_groups(
        table,
        states=states,
        observations=observations,
        parameters=parameters,
        state_names=state_names,
        num_chains=num_chains,
    )
    return inference_data(groups) if arviz_major() < 1 else data_tree(groups)


def arviz_major() -> int:
    """The major version of ArviZ that is installed."""
    try:
        return int(importlib.metadata.version("arviz").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("to_arviz needs arviz: pip install 'retrodict[arviz]'.") from None


def inference_data(groups: Mapping[str, Any]) -> Any:
    """The record of ArviZ 0.x."""
    with warnings.catch_warnings():
        # Its last versions warn of 1.0 when they are imported, whoever imports them.
        warnings.simplefilter("ignore", FutureWarning)
        arviz = optional("arviz", "arviz")
    return arviz.InferenceData(**groups)


def data_tree(groups: Mapping[str, Any]) -> Any:
    """The record of ArviZ 1.x, which is xarray's own."""
    return optional("xarray").DataTree.from_dict(dict(groups))


def arviz_groups(
    table: Table,
    *,
    states: Any,
    observations: Any,
    parameters: Mapping[str, Any] | None,
    state_names: Sequence[str] | None,
    num_chains: int | None,
) -> dict[str, Any]:
    """The datasets of `to_arviz` by group."""
    xarray = optional("xarray")
    groups: dict[str, Any] = {}
    posterior = xarray.Dataset(attrs={"library": "retrodict", "version": library_version()})
    if states is not None:
        drawn = to_xarray(table, states=states, state_names=state_names)
        posterior = _in_chains(drawn, num_chains)
    for name, values in (parameters or {}).items():
        values = np.asarray(values)
        axes = [f"{name}_dim_{i}" for i in range(values.ndim - 1)]
        drawn = xarray.Dataset({name: (("sample", *axes), values)})
        posterior = posterior.assign(_in_chains(drawn, num_chains).data_vars)
    if posterior.data_vars:
        groups["posterior"] = posterior
    if observations is not None:
        drawn = _in_chains(to_xarray(table, observations=observations), num_chains)
        groups["posterior_predictive"] = _by_column(drawn, "observations")
    data = to_xarray(table)
    groups["observed_data"] = _by_column(data, "observed")
    if table.inputs is not None:
        groups["constant_data"] = data[["inputs"]]
    return groups


def _in_chains(dataset: Any, num_chains: int | None) -> Any:
    """The axis `sample` as the two leading axes `chain` and `draw`."""
    xarray = optional("xarray")
    samples = dataset.sizes["sample"]
    chains = num_chains if num_chains is not None else (4 if samples % 4 == 0 else 1)
    if chains < 1 or samples % chains:
        raise ValueError(f"{samples} draws cannot be cut into {chains} chains of equal length.")
    variables = {}
    for name, variable in dataset.data_vars.items():
        moved = variable.transpose("sample", ...)
        values = moved.values.reshape(chains, samples // chains, *moved.shape[1:])
        variables[name] = (("chain", "draw", *moved.dims[1:]), values)
    coordinates = {key: value for key, value in dataset.coords.items() if key != "sample"}
    numbered = {"chain": np.arange(chains), "draw": np.arange(samples // chains)}
    return xarray.Dataset(variables, coords=coordinates | numbered, attrs=dataset.attrs)


def _by_column(dataset: Any, name: str) -> Any:
    """One variable for each observed column."""
    columns = {
        str(label): dataset[name].sel(obs=label, drop=True) for label in dataset["obs"].values
    }
    return optional("xarray").Dataset(columns, attrs=dataset.attrs)
