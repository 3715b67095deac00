"""Names of states and of entries of parameters, for tables and pictures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import retrodict as rd
from retrodict import models
from retrodict.runs._record import Run


def state_names(run: Run) -> list[str]:
    """Return a name for each coordinate of the state; see `retrodict.models.state_names`.

    Args:
        run: the run.
    """
    return models.state_names(run.model, run.layout["columns"])


def shown_states(run: Run, *, every: bool = False) -> list[int]:
    """Return the indices of the states that tables and pictures show.

    States that store earlier values of others, such as the seasons of the last rows, are left out;
    see `retrodict.models.is_memory`.

    Args:
        run: the run.
        every: whether to show these states too.
    """
    memory = models.is_memory(run.model)
    return [index for index, is_copy in enumerate(memory) if every or not is_copy]


class Entry(NamedTuple):
    """One entry of a parameter.

    Attributes:
        parameter: the name of the parameter.
        place: the index of the entry; empty for a scalar.
        value: the value, a number or a tracer.
        learned: whether the parameter is learned.
    """

    parameter: str
    place: tuple[int, ...]
    value: Any
    learned: bool


def parameter_entries(model: rd.StateSpaceModel, columns: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of all parameters by name, learned parameters first.

    Args:
        model: the model.
        columns: the names of the observed columns, which name entries such as `level_scale[gdp]`.
    """
    learned = models.named_parameters(model)
    values = models.named_parameters(model, fixed=True)
    return {
        models.entry_name(model, name, index, columns): Entry(
            name, index, values[name][index], name in learned
        )
        for name in (*learned, *(name for name in values if name not in learned))
        for index in np.ndindex(values[name].shape)
    }
