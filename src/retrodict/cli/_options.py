"""Arguments and options that several commands share."""

from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

MOST = 2**31 - 1
"""The largest number of rows or steps that can be requested: the largest size of an array."""

LONGEST_MEMORY = 10**6
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
