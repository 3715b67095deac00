"""`retrodict stream`."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from retrodict._interface import Argument, Notice, UserError, fill
from retrodict.cli._display import LearningDisplay
from retrodict.cli._errors import as_option, require_output, writing
from retrodict.cli._options import (
    MAX_COUNT,
    MAX_ROWS_IN_MEMORY,
    AllStates,
    AsJson,
    PythonModel,
    RunFolder,
    Seed,
    open_run,
)


class Part(StrEnum):
    """The parts that a stream can learn."""

    family = "family"
    model = "model"
    both = "both"


class Schedule(StrEnum):
    """Schedules of the learning rate."""

    constant = "constant"
    robbins_monro = "robbins-monro"


LagOption = Annotated[
    int, typer.Option(min=1, max=MAX_ROWS_IN_MEMORY, help="Rows to wait before a row is smoothed.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(help="Append the answers to this file; after a kill each row is there once."),
]
StateOption = Annotated[
    Path | None,
    typer.Option(help="File of the state.", show_default="RUN/stream-LAG.rd; -PART with --learn"),
]
AfterOption = Annotated[
    Path | None,
    typer.Option(
        metavar="TABLE",
        help="Start after the rows of this file.",
        show_default="after the rows of the fit",
    ),
]
FromPriorOption = Annotated[
    bool, typer.Option("--from-prior", help="Start from the prior of the model.")
]
FlushOption = Annotated[
    bool, typer.Option("--flush", help="Smooth the last rows too when the input ends.")
]
LearnOption = Annotated[
    Part | None, typer.Option(help="Learn the family, the model or both from the rows.")
]
RateOption = Annotated[
    float | None,
    typer.Option(
        help="The largest relative learning step.",
        show_default="0.001, or 0.05 for robbins-monro",
    ),
]
ScheduleOption = Annotated[
    Schedule | None,
    typer.Option(
        help="Constant steps, which track drift, or decreasing steps, which converge.",
        show_default="constant",
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_ROWS_IN_MEMORY,
        help="Rows of backpropagation, for runs with a family.",
        show_default="8",
    ),
]
HistoryOption = Annotated[
    Path | None, typer.Option(help="Append the learned parameters to this .csv file.")
]
HistoryEveryOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_COUNT, help="Rows between lines of the history.", show_default="100"
    ),
]
FigureOption = Annotated[
    Path | None, typer.Option(help="Draw the history to this .png, .svg or .pdf file.")
]
SaveRunOption = Annotated[
    Path | None,
    typer.Option(help="Write a run with the learned parameters when the input ends."),
]
RestartOption = Annotated[
    bool, typer.Option("--restart", help="Start again: replace the state and its answers.")
]


def stream(
    run: RunFolder,
    lag: LagOption = 20,
    out: OutOption = None,
    state: StateOption = None,
    after: AfterOption = None,
    from_prior: FromPriorOption = False,
    flush: FlushOption = False,
    learn: LearnOption = None,
    rate: RateOption = None,
    schedule: ScheduleOption = None,
    window: WindowOption = None,
    history: HistoryOption = None,
    history_every: HistoryEveryOption = None,
    figure: FigureOption = None,
    save_run: SaveRunOption = None,
    restart: RestartOption = False,
    all_states: AllStates = False,
    model: PythonModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Filter and smooth rows as they arrive on standard input.

    Rows are comma-separated with a header, in order of time. Each is answered at once by a line
    with the filtered state, and with the state `lag` rows before given all rows so far. The stream
    starts after the rows that the run was fitted to: earlier rows are recognised by their time and
    skipped. The state is stored in the run, and after a restart rows that were answered are skipped
    as well.

    With --learn, the parameters are updated after each row, and rows are answered with the current
    ones. The state holds the learned parameters; --save-run writes them as a new run when the input
    ends.
    """
    from retrodict import data, runs

    if after is not None and from_prior:
        raise UserError("pass --after TABLE or --from-prior, not both")
    if sys.stdin is None:
        raise UserError("standard input is closed: pipe rows to the command")
    if out is None:
        require_output()
    display = LearningDisplay(Console(stderr=True), quiet=out is None and sys.stdout.isatty())
    opened = open_run(run, model)
    learning = _learning(
        learn,
        display,
        rate=rate,
        schedule=schedule,
        window=window,
        history=history,
        history_every=history_every,
        figure=figure,
        save_run=save_run,
    )
    start: Any = "prior" if from_prior else "fit"
    if after is not None:
        start = data.read(after, **opened.layout)
    with writing(out or Path("standard output")), display:
        runs.stream(
            opened,
            sys.stdin.buffer,
            sys.stdout.buffer if out is None else out,
            lag=lag,
            state=state,
            flush=flush,
            seed=seed,
            as_json=as_json,
            all_states=all_states,
            learning=learning,
            restart=restart,
            after=start,
            notify=_print_notice,
        )
    if save_run is not None:
        typer.echo(f"Wrote {save_run}.", err=True)


def _learning(learn: Part | None, display: LearningDisplay, **options: Any) -> Any:
    """Return the options of learning; `None` without `--learn`.

    Raises:
        UserError: if there are such options without `--learn`.
    """
    from retrodict import runs

    options = {name: value for name, value in options.items() if value is not None}
    if learn is not None:
        return runs.Learning(str(learn), progress=display, **options)
    if options:
        names = ", ".join(as_option(Argument(name)) for name in options)
        raise UserError(f"{names}: nothing is learned without --learn family, model or both")
    return None


def _print_notice(notice: str) -> None:
    """Print a message of the library on standard error, with options for Python arguments."""
    if isinstance(notice, Notice):
        notice = fill(notice.template, notice.arguments, as_option)
    typer.echo(notice, err=True)
