"""Files that commands read: runs, tables, and times and inputs of rows to forecast."""

import os
import sys
from pathlib import Path
from typing import Any

from retrodict._errors import UserError


def find_modules_here(model: str | None) -> None:
    """Make modules of the current folder importable, if a model `module:name` was named.

    The folder is searched last, so that its files do not replace other modules.

    Args:
        model: the model as it was named.
    """
    here = os.getcwd()
    if model is not None and ":" in model and here not in sys.path:
        sys.path.append(here)


def open_run(run: Path, model: str | None) -> Any:
    """Open a run."""
    from retrodict import runs

    find_modules_here(model)
    return runs.open_run(run, model=model)


def open_run_and_table(run: Path, source: Path, model: str | None) -> tuple[Any, Any]:
    """Open a run, and read a table as the table of the run was read."""
    from retrodict import data

    opened = open_run(run, model)
    return opened, data.read(source, **opened.layout)


def state_names(run: Any, every: bool) -> dict[str, list[str]]:
    """Return the names of all states and of those that are shown.

    Args:
        run: the run.
        every: whether states that hold earlier values of others are shown.
    """
    from retrodict import runs

    names = runs.state_names(run)
    shown = [names[place] for place in runs.shown_states(run, every=every)]
    return {"state_names": names, "shown_states": shown}


def future_rows(
    run: Any, table: Any, steps: int | None, at: Path | None, inputs: Path | None
) -> tuple[int, dict[str, Any]]:
    """Return the number of rows to forecast, and their times and inputs from files.

    If times are irregular, a file of inputs also provides the times. By default there are as many
    rows as the files have.
    """
    from retrodict import data, runs

    if at is None and table.step is None:
        at = inputs
    times = None if at is None else data.read_times(at, table)
    if times is not None:
        fewest = min(len(series) for series in times)
        if steps is not None and fewest < steps:
            raise UserError(f"{at} has {fewest} times per series, but --steps is {steps}")
        steps = fewest if steps is None else steps
        times = tuple(series[:steps] for series in times)
    values = None
    if inputs is not None and steps != 0:
        values = runs.read_inputs(run, table, inputs, steps)
        steps = values.shape[1]
    return steps or 0, {"times": times, "inputs": values}
