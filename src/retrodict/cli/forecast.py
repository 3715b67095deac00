"""`retrodict forecast`."""

from typing import Annotated

import typer

from retrodict._errors import UserError
from retrodict.cli._errors import require_output
from retrodict.cli._input import future_rows, open_run_and_table, state_names
from retrodict.cli._options import (
    MOST,
    AllStates,
    AsJson,
    DataFile,
    FutureInputs,
    FutureTimes,
    Level,
    OutFile,
    Overwrite,
    PythonModel,
    RunFolder,
    Seed,
)
from retrodict.cli._output import put_result


def forecast(
    run: RunFolder,
    source: DataFile,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="Number of rows to forecast.",
            show_default="the rows of the file of --at or --inputs",
        ),
    ] = None,
    at: FutureTimes = None,
    inputs: FutureInputs = None,
    out: OutFile = None,
    overwrite: Overwrite = False,
    level: Level = 0.9,
    all_states: AllStates = False,
    model: PythonModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Forecast the rows after the end of a table."""
    from retrodict import data, runs

    require_output() if out is None else data.check_target(out, overwrite=overwrite)
    opened, table = open_run_and_table(run, source, model)
    count, future = future_rows(opened, table, steps, at, inputs)
    if not count:
        raise UserError(
            "pass the number of rows to forecast: --steps K, --at FILE or --inputs FILE"
        )
    result = runs.forecast(opened, table, count, seed=seed, **future)
    shown = {"level": level, "times": future["times"], **state_names(opened, all_states)}
    put_result(table, result, out, overwrite, as_json, **shown)
