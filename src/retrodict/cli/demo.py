"""`retrodict demo`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from retrodict.cli._errors import writing
from retrodict.cli._options import AsJson, Seed
from retrodict.cli._output import grid
from retrodict.cli._progress import Stages

if TYPE_CHECKING:
    from rich.table import Table

    from retrodict.experiments import demo as demo_experiment


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, summary.json and figures.")
    ] = Path("demo"),
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare smoothers on a model whose posterior has two modes.

    The state is observed through an even map, so that its sign is not identified. Trains three
    amortised families on simulated series, smooths held-out ones, and compares with the exact
    posterior, a particle smoother and linearised smoothers. Takes about a minute on two cores.
    """
    # matplotlib loads slowly, and --help does not need it
    from retrodict.experiments import demo as experiment

    with Stages("demo", experiment.NUM_STAGES, Console(stderr=True)) as stages, writing(out):
        result = experiment.run(out, seed=seed, progress=stages)
    if as_json:
        typer.echo(experiment.summary(result).decode(), nl=False)
        return
    Console().print(_table(result))
    typer.echo(f"Wrote {out / 'report.html'}, {out / 'summary.json'} and figures.")


def _table(result: "demo_experiment.Demo") -> "Table":
    from retrodict.experiments import demo as experiment

    table = grid(title="Smoothers against the exact posterior", title_justify="left")
    for heading, form in experiment.COLUMNS.items():
        lines = "\n".join(heading.split())
        table.add_column(lines, justify="right" if form else "left", no_wrap=True)
    for row in experiment.rows_of(result):
        cells = zip(row, experiment.COLUMNS.values(), strict=True)
        table.add_row(*("–" if cell != cell else format(cell, form) for cell, form in cells))
    return table
