"""The commands that run experiments: `demo` and `reproduce`."""

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from retrodict.cli._display import Stages
from retrodict.cli._errors import writing
from retrodict.cli._options import AsJson, Seed
from retrodict.cli._output import grid


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, numbers.json and figures.")
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
    from retrodict.experiments import reproduction

    num_stages = experiment.num_stages(experiment.FULL)
    with Stages("demo", num_stages, Console(stderr=True)) as stages, writing(out):
        chapter = reproduction.demonstrate(out, seed=seed, progress=stages)
    if as_json:
        typer.echo(reproduction.as_json({"seed": seed, **chapter.numbers}).decode(), nl=False)
        return
    (scores,) = chapter.tables()
    table = grid(title="Smoothers against the exact posterior", title_justify="left")
    for heading, form in scores.columns.items():
        lines = "\n".join(heading.split())
        table.add_column(lines, justify="right" if form else "left", no_wrap=True)
    for row in scores.rows:
        cells = zip(row, scores.columns.values(), strict=True)
        table.add_row(*("–" if cell != cell else format(cell, form) for cell, form in cells))
    Console().print(table)
    typer.echo(f"Wrote {out / 'report.html'}, {out / 'numbers.json'}, a table and figures.")


class Experiment(StrEnum):
    """The experiments of the paper."""

    all = "all"
    linear = "linear"
    multivariate = "multivariate"
    nonlinear = "nonlinear"
    bounds = "bounds"


def reproduce(
    experiment: Annotated[
        Experiment, typer.Argument(help="An experiment of the paper.", show_default=True)
    ] = Experiment.all,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller experiments: five minutes on two cores.")
    ] = False,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results and report.html.",
            show_default="reproduction, or reproduction-quick with --quick",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce the paper, as printed and corrected.

    Writes numbers, tables and figures of each experiment, and one report.html that compares them
    with the paper's. An interrupted run continues when the command is repeated.
    """
    from retrodict.experiments import reproduction

    out = out or Path("reproduction-quick" if quick else "reproduction")
    names = [*reproduction.EXPERIMENTS] if experiment is Experiment.all else [experiment.value]
    console = Console(stderr=True)
    remedy = (
        ". What was computed is kept; name another folder, or make room and run the same command"
        " again."
    )
    with ExitStack() as opened, writing(out, remedy):

        def stages_of(name: str, num_stages: int) -> Stages:
            opened.pop_all().close()
            return opened.enter_context(Stages(name, num_stages, console))

        try:
            result = reproduction.reproduce(names, out, quick=quick, seed=seed, progress=stages_of)
        except KeyboardInterrupt:
            opened.close()
            console.print(
                "What was done is kept: the same command continues from here.", highlight=False
            )
            raise
    if as_json:
        numbers = {chapter.name: chapter.numbers for chapter in result.chapters}
        answer = {"report": str(result.report), "experiments": numbers}
        typer.echo(reproduction.as_json(answer).decode(), nl=False)
        return
    for chapter in result.chapters:
        typer.echo(f"{chapter.title}\n  {chapter.summary}\n")
    typer.echo(f"Wrote {result.report}.")
