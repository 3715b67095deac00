"""Arguments and options that several commands share, and the files that they name."""

import os
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer

from retrodict._interface import UserError

MAX_COUNT = 2**31 - 1
"""The largest number of rows or steps that can be requested: the largest size of an array."""

MAX_ROWS_IN_MEMORY = 10**6
"""The largest number of rows that a stream can hold in memory."""

COMMAND_LINE: ContextVar[str | None] = ContextVar("COMMAND_LINE", default=None)
"""The command line as it was typed; a report shows it."""

Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of all random numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A folder that `fit` wrote.")]
DataFile = Annotated[
    Path, typer.Argument(metavar="DATA", help="A .csv, .tsv, .parquet or .nc file.")
]
PythonModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:NAME",
        help="The model that the run was fitted with, if it is Python code.",
    ),
]
OutFile = Annotated[
    Path | None,
    typer.Option(help="Write to this .csv, .parquet or .nc file instead of standard output."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]
Level = Annotated[float, typer.Option(min=0.01, max=0.999, help="Probability of the intervals.")]
AllStates = Annotated[
    bool,
    typer.Option("--all-states", help="Also show states that hold earlier values of others."),
]
FutureTimes = Annotated[
    Path | None,
    typer.Option("--at", help="A file with the times of the rows to forecast, if irregular."),
]
FutureInputs = Annotated[
    Path | None, typer.Option("--inputs", help="A file with the inputs of the rows to forecast.")
]


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
    shown = [names[index] for index in runs.shown_states(run, every=every)]
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
