"""`retrodict smooth`."""

from typing import Annotated

import typer

from retrodict.cli._errors import require_output
from retrodict.cli._input import open_run_and_table, state_names
from retrodict.cli._options import (
    AllStates,
    AsJson,
    DataFile,
    Level,
    OutFile,
    Overwrite,
    PythonModel,
    RunFolder,
    Seed,
)
from retrodict.cli._output import put_result

NUM_IMPUTED = 1000
"""Draws of each missing value."""


def smooth(
    run: RunFolder,
    source: DataFile,
    out: OutFile = None,
    imputed: Annotated[
        bool, typer.Option("--imputed", help="Add the data, with missing values filled in.")
    ] = False,
    overwrite: Overwrite = False,
    level: Level = 0.9,
    all_states: AllStates = False,
    model: PythonModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Smooth a table: the hidden states of each row given all rows.

    Writes one line per row with the mean, standard deviation and interval of each state. Intervals
    are exact for Gaussian posteriors, and quantiles of draws otherwise. With --imputed each column
    is added: an observed value with deviation 0, a missing one with the distribution of 1,000
    draws.
    """
    from retrodict import data, runs

    require_output() if out is None else data.check_target(out, overwrite=overwrite)
    opened, table = open_run_and_table(run, source, model)
    posterior = runs.smooth(opened, table, seed=seed)
    missing = int(table.length.sum()) * len(table.names) - int(table.mask.sum())
    draws = runs.impute(opened, table, NUM_IMPUTED, seed=seed) if imputed else None
    if missing and not imputed:
        typer.echo(f"{missing} values are missing; --imputed fills them in.", err=True)
    if not posterior.trustworthy:
        typer.echo(
            "This posterior is not checked on these rows: `retrodict check` compares it with a"
            " reference.",
            err=True,
        )
    shown = {"level": level, "observations": draws, **state_names(opened, all_states)}
    put_result(table, posterior, out, overwrite, as_json, **shown)
