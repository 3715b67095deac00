"""The commands for a user's own data: fit, smooth, forecast, check, plot, stream, info."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as Grid

from retrodict.cli._errors import UserError, cannot_write
from retrodict.cli._job import (
    Coordinator,
    Distributed,
    NumProcesses,
    ProcessId,
    ended_together,
    join,
)
from retrodict.cli._options import ASKED, AsJson, Seed
from retrodict.cli._progress import Stages
from retrodict.cli._stream import (
    Figure,
    History,
    HistoryEvery,
    Learn,
    Rate,
    SaveRun,
    Steps,
    Telling,
    Window,
    learning_of,
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `fit` made.")]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:NAME",
        help="The model that the run was fitted with, if it is Python code of your own.",
    ),
]
DataFile = Annotated[
    Path, typer.Argument(metavar="DATA", help="A .csv, .tsv, .parquet or .nc file.")
]
OutFile = Annotated[
    Path | None,
    typer.Option(help="Write to this .csv, .parquet or .nc file instead of standard output."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]
Level = Annotated[
    float, typer.Option(min=0.01, max=0.999, help="The probability of the intervals.")
]
ComingTimes = Annotated[
    Path | None,
    typer.Option("--at", help="A file with the times of the coming rows, if these are uneven."),
]
ComingInputs = Annotated[
    Path | None, typer.Option("--inputs", help="A file with the inputs of the coming rows.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to an application."""
    examples = {
        fit: "retrodict fit nile.csv --model local_level --out nile-run",
        smooth: "retrodict smooth nile-run nile.csv --out smoothed.csv",
        forecast: "retrodict forecast nile-run nile.csv --steps 12",
        check: "retrodict check nile-run nile.csv",
        plot: "retrodict plot nile-run nile.csv --out nile.png --forecast 12",
        stream: "tail -n +1 -f new.csv | retrodict stream nile-run --lag 10",
        info: "retrodict info nile-run",
    }
    for command, example in examples.items():
        app.command(epilog=f"Example: {example}")(command)


NUM_IMPUTED = 1000
"""Draws of what is missing."""

OPTIONS = {
    "step_input=True": "--step-input",
    "freq='irregular'": "--freq irregular",
    "freq=": "--freq ",
    "time_format=": "--time-format ",
    "series=...": "--series",
    "columns=...": "--columns",
    "inputs=...": "--inputs",
    "overwrite=True": "--overwrite",
    "history_every": "--history-every",
    "restart=True": "--restart",
    "times=... from read_times": "--at FILE",
    "times=... from data.read_times": "--at FILE",
    "time=...": "--time",
    "model=": "--model ",
}
"""What Python's arguments are called here; the longer ones first."""


@contextmanager
def _explained(model: str | None = None) -> Iterator[None]:
    """Errors of the user's files, models and options as one line.

    A model may be an object of the user's, in a module of the present folder. It is looked in only
    if such a model was named, and last, so that no file there stands in for another module.

    Args:
        model: the model as it was named.
    """
    here = os.getcwd()
    if model is not None and ":" in model and here not in sys.path:
        sys.path.append(here)
    try:
        yield
    except (ValueError, FloatingPointError) as error:  # those of tables, models and runs are
        message = str(error)
        for argument, option in OPTIONS.items():
            message = message.replace(argument, option)
        raise UserError(message) from error


def fit(
    source: DataFile,
    model: Annotated[
        str,
        typer.Option(help="A ready model, a model file FILE.toml, or module:name of your own."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The folder of the run; needed but for --dry-run.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="KEY=VALUE",
            help="An option of a ready model, such as period=12; may be repeated.",
        ),
    ] = None,
    time: Annotated[str | None, typer.Option(help="The time column.")] = None,
    series: Annotated[
        list[str] | None, typer.Option(help="A column that tells series apart; may be repeated.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="An observed column; may be repeated.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option(help="A column of inputs; may be repeated.")
    ] = None,
    freq: Annotated[
        str | None,
        typer.Option(help="The step of the times: a number, irregular, or D, W, MS, 6h, ..."),
    ] = None,
    step_input: Annotated[
        bool, typer.Option("--step-input", help="Make the length of the step an input.")
    ] = False,
    time_format: Annotated[
        str | None, typer.Option(help="How dates are written, such as %d/%m/%Y.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="The family to train.", show_default="mixture")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each training.", show_default="2000")
    ] = None,
    seed: Seed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what was understood of the file, and stop.")
    ] = False,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    as_json: AsJson = False,
) -> None:
    """Fit a model to a table, and learn to smooth for it.

    Learns the parameters that the model marks as learnable, trains a family where smoothing is not
    exact, and writes a folder with the run and report.html. A fit that was interrupted goes on when
    it is asked for again; a folder with a finished run is not overwritten. Series are spread over
    all devices, with --distributed over those of all processes of a job, each of which reads its
    share of them.
    """
    from retrodict import data, models, runs

    with ended_together(), _explained(model):
        speaks = join(distributed, coordinator, num_processes, process_id)
        spec = models.resolve(model).with_options(options or ())
        given = {
            "time": time,
            "series": series or None,
            "columns": columns or None,
            "inputs": inputs or None,
            "freq": _number_or_text(freq),
            "step_input": step_input or None,
            "time_format": time_format,
        }
        layout = spec.data | {key: value for key, value in given.items() if value is not None}
        table = data.read_shared(source, **layout)
        if isinstance(table, data.SharedTable) and speaks:
            typer.echo(f"Each process reads its share of {table.num_series} series.", err=True)
        if dry_run:
            runs.starting_model(table, spec, seed=seed)  # refuses a model that does not fit
            if speaks:
                _say_dry_run(table, spec, as_json)
            return
        if out is None:
            raise UserError("name the folder of the run: --out RUN")
        chosen = {
            "family": family or spec.fit.get("family", "mixture"),
            "num_steps": steps or spec.fit.get("num_steps", 2000),
        }
        run = runs.finished_before(table, spec, out, seed=seed, **chosen)
        count = runs.NUM_CHECKS + 1 + (0 if run else runs.num_stages(table, spec))
        terminal = Console(stderr=True, quiet=not speaks)
        with Stages("fit", count, terminal) as stages:
            try:
                if run is None:
                    run = runs.fit(table, spec, out, seed=seed, progress=stages, **chosen)
                runs.write_report(run, table, seed=seed, command=ASKED.get(), progress=stages)
            except OSError as error:
                raise UserError(cannot_write(error, out)) from error
    if not speaks:
        return
    _say_run(run.record, as_json)
    if not as_json:
        typer.echo(f"Wrote {out} and {out / 'report.html'}.")


def _number_or_text(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _say_dry_run(table: Any, spec: Any, as_json: bool) -> None:
    if as_json:
        found = {
            "table": table.described(),
            "layout": table.layout,
            "model": spec.to_dict(),
            "options": spec.all_options(),
        }
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False, default=str))
        return
    typer.echo(f"model: {spec.reference}")
    for name, value in spec.all_options().items():
        shown = str(value).lower() if isinstance(value, bool) else value
        typer.echo(f"option {name}: {shown}{'' if name in spec.options else ' (default)'}")
    for line in table.described():
        typer.echo(line)


def smooth(
    run: RunFolder,
    source: DataFile,
    out: OutFile = None,
    imputed: Annotated[
        bool, typer.Option("--imputed", help="Add the data, with what is missing filled in.")
    ] = False,
    overwrite: Overwrite = False,
    level: Level = 0.9,
    model: OwnModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Smooth a table: the hidden states of each row given all rows.

    One line a row with the mean, standard deviation and interval of each state. With --imputed also
    of each column: as it was where it was seen, with a deviation of 0, and where it is missing what
    it may have been, by 1,000 draws.
    """
    from retrodict import data, runs

    with _explained(model):
        opened = runs.open_run(run, model=model)
        table = data.read(source, **opened.layout)
        found = runs.smooth(opened, table, seed=seed)
        names = runs.state_names(opened)
        missing = int(table.length.sum()) * len(table.names) - int(table.mask.sum())
        draws = None
        if imputed:
            draws = runs.impute(opened, table, NUM_IMPUTED, seed=seed)
        elif missing:
            typer.echo(f"{missing} values are missing; --imputed fills them in.", err=True)
        shown = {"level": level, "state_names": names, "observations": draws}
        _put(table, found, out, overwrite, as_json, **shown)


def forecast(
    run: RunFolder,
    source: DataFile,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many rows to forecast.", show_default="those of the file of --at"
        ),
    ] = None,
    at: ComingTimes = None,
    future: ComingInputs = None,
    out: OutFile = None,
    overwrite: Overwrite = False,
    level: Level = 0.9,
    model: OwnModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Forecast the rows that come after a table."""
    from retrodict import data, runs

    with _explained(model):
        opened = runs.open_run(run, model=model)
        table = data.read(source, **opened.layout)
        count, coming = _coming(opened, table, steps, at, future)
        if not count:
            raise UserError("say how many rows to forecast: --steps K, or --at FILE")
        found = runs.forecast(opened, table, count, seed=seed, **coming)
        names, times = runs.state_names(opened), coming["times"]
        _put(table, found, out, overwrite, as_json, level=level, state_names=names, times=times)


def _coming(
    run: Any, table: Any, steps: int | None, at: Path | None, future: Path | None
) -> tuple[int, dict[str, Any]]:
    """How many rows come, and their times and inputs from files.

    Where times are irregular, those of a file of inputs are the coming ones too.
    """
    from retrodict import data, runs

    if at is None and table.step is None:
        at = future
    times = None if at is None else data.read_times(at, table)
    if times is not None:
        fewest = min(len(own) for own in times)
        if steps is not None and fewest < steps:
            raise UserError(f"{at} has {fewest} times of a series, and {steps} are asked for")
        steps = fewest if steps is None else steps
        times = tuple(own[:steps] for own in times)
    count = steps or 0
    inputs = None if future is None else runs.read_inputs(run, table, future, count)
    return count, {"times": times, "inputs": inputs}


def _put(
    table: Any, found: Any, out: Path | None, overwrite: bool, as_json: bool, **options: Any
) -> None:
    """A result to a file, or as a table or JSON to standard output."""
    from retrodict import data

    if out is not None and out.suffix.lower() == ".nc":
        options.pop("level")
        dataset = data.to_xarray(table, found, **options)
        data.write(dataset, out, overwrite=overwrite)
    else:
        frame = data.to_frame(table, found, **options)
        if out is None:
            text = (
                frame.to_json(orient="records", date_format="iso", double_precision=15) + "\n"
                if as_json
                else frame.to_csv(index=False)
            )
            sys.stdout.write(text)
            return
        data.write(frame, out, overwrite=overwrite)
    typer.echo(f"Wrote {out}.")


def check(
    run: RunFolder,
    source: DataFile,
    model: OwnModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Check whether a run is to be trusted on a table.

    The ELBO against a particle estimate of the evidence, the Pareto shape of path weights, tests of
    residuals, coverage of points that are hidden, and an error bound where one applies; a verdict
    in words. The exit code is 0 whatever the verdict.
    """
    from retrodict import data, runs

    with _explained(model):
        opened = runs.open_run(run, model=model)
        table = data.read(source, **opened.layout)
        with Stages("check", runs.NUM_CHECKS, Console(stderr=True)) as stages:
            found = runs.check(opened, table, seed=seed, progress=stages)
    if as_json:
        answer = {
            "verdict": found.worst,
            "words": found.verdict,
            "findings": [finding._asdict() for finding in found.findings],
        }
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    grid = Grid(box=SIMPLE, pad_edge=False)
    for heading in ("what", "found", "verdict", "what it means"):
        grid.add_column(heading)
    for finding in found.findings:
        grid.add_row(finding.name, finding.value, finding.verdict, finding.meaning)
    Console().print(grid)
    typer.echo(found.verdict)


def plot(
    run: RunFolder,
    source: DataFile,
    out: Annotated[Path, typer.Option(help="A .png, .svg or .pdf file.")],
    steps: Annotated[
        int | None, typer.Option("--forecast", min=0, help="Rows to forecast beyond the data.")
    ] = None,
    at: ComingTimes = None,
    future: ComingInputs = None,
    series: Annotated[
        str | None, typer.Option(help="Which of several series.", show_default="the first")
    ] = None,
    level: Level = 0.9,
    model: OwnModel = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Draw a series of a table, its smoothed states and a forecast."""
    from retrodict import data, runs

    with _explained(model):
        opened = runs.open_run(run, model=model)
        table = data.read(source, **opened.layout)
        if out.exists() and not overwrite:
            raise UserError(f"{out} exists; pass --overwrite, or choose another name")
        names = [str(name) for name in table.series or ()]
        if series is not None and series not in names:
            raise UserError(f"there is no series {series}; there are {', '.join(names) or 'none'}")
        place = 0 if series is None else names.index(series)
        try:
            count, coming = _coming(opened, table, steps, at, future)
            drawn = {"steps": count, "level": level, "seed": seed, "series": place}
            runs.draw(opened, table, out, **drawn, **coming)
        except OSError as error:
            raise UserError(cannot_write(error, out)) from error
    of = f", series {names[place]} of {len(names)}" if len(names) > 1 else ""
    typer.echo(f"Wrote {out}{of}.")


def stream(
    run: RunFolder,
    lag: Annotated[int, typer.Option(min=1, help="Rows to wait before a row is smoothed.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(help="Append the answers to this file: after a kill each row is there once."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Where the state is kept.", show_default="RUN/stream-LAG.rd; -PART if it learns"
        ),
    ] = None,
    flush: Annotated[
        bool, typer.Option("--flush", help="Smooth the last rows too when the input ends.")
    ] = False,
    learn: Learn = None,
    rate: Rate = None,
    schedule: Steps = None,
    window: Window = None,
    history: History = None,
    history_every: HistoryEvery = None,
    figure: Figure = None,
    save_run: SaveRun = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew: replace the state and its answers.")
    ] = False,
    model: OwnModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Answer rows as they come on standard input.

    Rows are comma-separated with a header, in order of time. Each is answered at once by a line
    with the filtered state and the state `lag` rows before given all rows so far. The state is kept
    in the run: rows that were answered before a restart are recognised by their time and skipped.

    With --learn, rows are learned from too, and answered at the parameters as they stand. What was
    learned is in the state; with --save-run it becomes a run of its own when the input ends.
    """
    from retrodict import runs

    telling = Telling(Console(stderr=True), quiet=out is None and sys.stdout.isatty())
    with _explained(model):
        opened = runs.open_run(run, model=model)
        learning = learning_of(
            learn,
            telling,
            rate=rate,
            schedule=schedule,
            window=window,
            history=history,
            history_every=history_every,
            figure=figure,
            save_run=save_run,
        )
        timed = opened.layout["time"] is not None
        known = "rows that it knows are skipped" if timed else "rows have no time, and all are new"

        def going_on(place: Path) -> None:
            typer.echo(f"Going on from {place}: {known}; --restart begins anew.", err=True)

        try:
            with telling:
                runs.stream(
                    opened,
                    sys.stdin.buffer,
                    sys.stdout.buffer if out is None else out,
                    lag=lag,
                    state=state,
                    flush=flush,
                    seed=seed,
                    as_json=as_json,
                    learning=learning,
                    restart=restart,
                    going_on=going_on,
                )
        except OSError as error:
            raise UserError(cannot_write(error, out or run)) from error
    if save_run is not None:
        typer.echo(f"Wrote {save_run}.", err=True)


def info(run: RunFolder, as_json: AsJson = False) -> None:
    """Say what a run is: model, data, parameters."""
    from retrodict import runs

    with _explained():
        record = runs.read_record(run)
    _say_run(record, as_json)


def _say_run(record: Mapping[str, Any], as_json: bool) -> None:
    from retrodict import runs

    if as_json:
        typer.echo(json.dumps(record, indent=2, ensure_ascii=False))
        return
    results = record["results"]
    typer.echo(f"model: {record['model']['reference']}")
    for line in record["data"]["described"]:
        typer.echo(line)
    typer.echo(f"smoothing: {results['method']}; {runs.likelihood_in_words(results)}")
    grid = Grid(box=SIMPLE, pad_edge=False)
    for heading in ("parameter", "value", "standard error", "90% interval"):
        grid.add_column(
            heading, justify="left" if heading == "parameter" else "right", overflow="fold"
        )
    for name, found in runs.parameter_lines(results):
        grid.add_row(name, *_cells(found))
    Console().print(grid)
    typer.echo(results["uncertainty"])


def _cells(found: dict[str, Any]) -> tuple[str, str, str]:
    value = "–" if found["value"] is None else f"{found['value']:.5g}"
    if not found["learned"]:
        return value, "fixed", ""
    if "edge" in found:
        return value, "–", f"at the edge of {found['edge']}: no interval"
    if found.get("error") is None:
        return value, "–", "–"
    return value, f"{found['error']:.3g}", f"{found['lower']:.4g} to {found['upper']:.4g}"
