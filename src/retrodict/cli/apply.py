"""The commands that apply a run: `info`, `smooth`, `forecast`, `check` and `plot`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from retrodict._interface import UserError
from retrodict._pages import visible
from retrodict.cli._display import Stages
from retrodict.cli._errors import require_output, writing
from retrodict.cli._options import (
    MAX_COUNT,
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
    future_rows,
    open_run_and_table,
    state_names,
)
from retrodict.cli._output import grid, print_json, print_run, print_verdict, put_result

NUM_IMPUTED = 1000
"""Draws of each missing value."""


def info(run: RunFolder, as_json: AsJson = False) -> None:
    """Print the model, data and parameters of a run."""
    from retrodict import runs

    require_output()
    record = runs.read_record(run)
    print_json(record) if as_json else print_run(record)


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


def forecast(
    run: RunFolder,
    source: DataFile,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
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


def check(
    run: RunFolder,
    source: DataFile,
    model: PythonModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Check whether a run can be trusted on a table.

    Compares the ELBO with a particle estimate of the evidence, computes the Pareto shape of path
    weights, tests residuals and the coverage of held-out points, and bounds the error where a bound
    applies. Prints a verdict. The exit code is 0 whatever the verdict.
    """
    from retrodict import runs

    require_output()
    opened, table = open_run_and_table(run, source, model)
    with Stages("check", runs.NUM_CHECKS, Console(stderr=True)) as stages:
        checked = runs.check(opened, table, seed=seed, progress=stages)
    if as_json:
        print_json(checked.to_dict())
        return
    findings = grid()
    for heading in ("check", "result", "verdict", "meaning"):
        findings.add_column(heading)
    for finding in checked.findings:
        texts = (finding.name, finding.value, finding.verdict, finding.meaning)
        findings.add_row(*(Text(visible(text)) for text in texts))
    Console().print(findings)
    print_verdict(checked)


def plot(
    run: RunFolder,
    source: DataFile,
    out: Annotated[Path, typer.Option(help="A .png, .svg or .pdf file.")],
    steps: Annotated[
        int | None,
        typer.Option("--forecast", min=0, max=MAX_COUNT, help="Rows to forecast after the data."),
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
    index = 0 if series is None else names.index(series)
    with writing(out):
        count, future = future_rows(opened, table, steps, at, inputs)
        runs.draw(
            opened,
            table,
            out,
            steps=count,
            level=level,
            seed=seed,
            series=index,
            all_states=all_states,
            **future,
        )
    which = f", series {names[index]} of {len(names)}" if len(names) > 1 else ""
    typer.echo(f"Wrote {out}{which}.")
