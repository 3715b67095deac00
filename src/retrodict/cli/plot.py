"""`retrodict plot`."""

from pathlib import Path
from typing import Annotated

import typer

from retrodict._errors import UserError
from retrodict.cli._errors import writing
from retrodict.cli._input import future_rows, open_run_and_table
from retrodict.cli._options import (
    MOST,
    AllStates,
    DataFile,
    FutureInputs,
    FutureTimes,
    Level,
    Overwrite,
    PythonModel,
    RunFolder,
    Seed,
)


def plot(
    run: RunFolder,
    source: DataFile,
    out: Annotated[Path, typer.Option(help="A .png, .svg or .pdf file.")],
    steps: Annotated[
        int | None,
        typer.Option("--forecast", min=0, max=MOST, help="Rows to forecast after the data."),
    ] = None,
    at: FutureTimes = None,
    inputs: FutureInputs = None,
    series: Annotated[
        str | None, typer.Option(help="The series to draw.", show_default="the first")
    ] = None,
    level: Level = 0.9,
    all_states: AllStates = False,
    model: PythonModel = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Draw a series of a table, its smoothed states and a forecast."""
    from retrodict import data, runs

    data.check_target(out, overwrite=overwrite, suffixes=runs.FORMATS)
    opened, table = open_run_and_table(run, source, model)
    names = [str(name) for name in table.series or ()]
    if series is not None and series not in names:
        raise UserError(f"there is no series {series}; there are {', '.join(names) or 'none'}")
    place = 0 if series is None else names.index(series)
    with writing(out):
        count, future = future_rows(opened, table, steps, at, inputs)
        runs.draw(
            opened,
            table,
            out,
            steps=count,
            level=level,
            seed=seed,
            series=place,
            all_states=all_states,
            **future,
        )
    which = f", series {names[place]} of {len(names)}" if len(names) > 1 else ""
    typer.echo(f"Wrote {out}{which}.")
