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
from rich.text import Text

from retrodict.cli._errors import UserError, cannot_write, need_output
from retrodict.cli._job import (
    Coordinator,
    Distributed,
    NumProcesses,
    ProcessId,
    ended_together,
    join,
)
from retrodict.cli._options import ASKED, LONGEST_MEMORY, MOST, AsJson, Seed
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
AllStates = Annotated[
    bool,
    typer.Option("--all-states", help="Show states that only hold earlier values of others, too."),
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
    'after="prior"': "--from-prior",
    "after=...": "--after TABLE",
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
        raise UserError(_in_options(str(error))) from error


def _in_options(message: str) -> str:
    """Return a message of the library with the names that its arguments have here."""
    for argument, option in OPTIONS.items():
        message = message.replace(argument, option)
    return message


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
        int | None,
        typer.Option(min=1, max=MOST, help="Steps of each training.", show_default="2000"),
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
        if out is None and not dry_run:
            raise UserError("name the folder of the run: --out RUN")
        speaks = join(distributed, coordinator, num_processes, process_id)
        if out is not None and not dry_run:
            runs.check_folder(out)
        spec = models.load(model).with_options(options or ())
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
        spec, words = runs.with_period(spec, table)
        if words and speaks:
            typer.echo(words, err=True)
        if isinstance(table, data.SharedTable) and speaks:
            typer.echo(f"Each process reads its share of {table.num_series} series.", err=True)
        if dry_run:
            runs.starting_model(table, spec, seed=seed)  # refuses a model that does not fit
            if speaks:
                _say_dry_run(table, spec, as_json)
            return
        if out is None:
            return
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
                found = runs.check(run, table, seed=seed, progress=stages)
                runs.write_report(
                    run, table, seed=seed, found=found, command=ASKED.get(), progress=stages
                )
            except OSError as error:
                raise UserError(cannot_write(error, out)) from error
    if not speaks:
        return
    if as_json:
        _say_run({**run.record, "check": found.to_dict()}, as_json)
        return
    _say_run(run.record, as_json)
    _say_verdict(found)
    typer.echo(f"Wrote {out} and {out / 'report.html'}.")


def _say_verdict(found: Any) -> None:
    """Print how far a run is to be trusted, and how much of the table that is based on."""
    typer.echo(f"verdict: {found.worst}. {found.verdict}")
    if found.scope is not None and found.scope.is_partial:
        typer.echo(found.scope.words)


def _number_or_text(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _say_dry_run(table: Any, spec: Any, as_json: bool) -> None:
    from retrodict import runs

    if as_json:
        found = {
            "table": table.described(),
            "layout": table.layout,
            "model": spec.to_dict(),
            "options": spec.all_options(),
        }
        typer.echo(_as_json(found))
        return
    typer.echo(f"model: {spec.reference}")
    for name, value in spec.all_options().items():
        shown = str(value).lower() if isinstance(value, bool) else value
        typer.echo(f"option {name}: {shown}{'' if name in spec.options else ' (default)'}")
    for line in table.described():
        typer.echo(runs.visible(line))


def smooth(
    run: RunFolder,
    source: DataFile,
    out: OutFile = None,
    imputed: Annotated[
        bool, typer.Option("--imputed", help="Add the data, with what is missing filled in.")
    ] = False,
    overwrite: Overwrite = False,
    level: Level = 0.9,
    all_states: AllStates = False,
    model: OwnModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Smooth a table: the hidden states of each row given all rows.

    One line per row with the mean, standard deviation and interval of each state. Intervals are
    exact where the posterior is Gaussian, and else lie between quantiles of draws. With --imputed
    also of each column: as it was where it was seen, with a deviation of 0, and where it is missing
    what it may have been, by 1,000 draws.
    """
    from retrodict import data, runs

    with _explained(model):
        if out is None:
            need_output()
        else:
            data.check_target(out, overwrite=overwrite)
        opened = runs.open_run(run, model=model)
        table = data.read(source, **opened.layout)
        found = runs.smooth(opened, table, seed=seed)
        missing = int(table.length.sum()) * len(table.names) - int(table.mask.sum())
        draws = None
        if imputed:
            draws = runs.impute(opened, table, NUM_IMPUTED, seed=seed)
        elif missing:
            typer.echo(f"{missing} values are missing; --imputed fills them in.", err=True)
        if not found.trustworthy:
            typer.echo(
                "This posterior is not checked on these rows: `retrodict check` compares it with a"
                " reference.",
                err=True,
            )
        shown = {"level": level, "observations": draws, **_states(opened, all_states)}
        _put(table, found, out, overwrite, as_json, **shown)


def _states(run: Any, every: bool) -> dict[str, list[str]]:
    """The names of all states, and of those that are shown."""
    from retrodict import runs

    names = runs.state_names(run)
    shown = [names[place] for place in runs.shown_states(run, every=every)]
    return {"state_names": names, "shown_states": shown}


def forecast(
    run: RunFolder,
    source: DataFile,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="How many rows to forecast.",
            show_default="those of the file of --at or --inputs",
        ),
    ] = None,
    at: ComingTimes = None,
    future: ComingInputs = None,
    out: OutFile = None,
    overwrite: Overwrite = False,
    level: Level = 0.9,
    all_states: AllStates = False,
    model: OwnModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Forecast the rows that come after a table."""
    from retrodict import data, runs

    with _explained(model):
        if out is None:
            need_output()
        else:
            data.check_target(out, overwrite=overwrite)
        opened = runs.open_run(run, model=model)
        table = data.read(source, **opened.layout)
        count, coming = _coming(opened, table, steps, at, future)
        if not count:
            raise UserError("say how many rows to forecast: --steps K, --at FILE or --inputs FILE")
        found = runs.forecast(opened, table, count, seed=seed, **coming)
        shown = {"level": level, "times": coming["times"], **_states(opened, all_states)}
        _put(table, found, out, overwrite, as_json, **shown)


def _coming(
    run: Any, table: Any, steps: int | None, at: Path | None, future: Path | None
) -> tuple[int, dict[str, Any]]:
    """Return how many rows come, and their times and inputs from files.

    Where times are irregular, those of a file of inputs are the coming ones too. Without a number
    of rows, there are as many as the files have.
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
    inputs = None
    if future is not None and steps != 0:
        inputs = runs.read_inputs(run, table, future, steps)
        steps = inputs.shape[1]
    return steps or 0, {"times": times, "inputs": inputs}


def _put(
    table: Any, found: Any, out: Path | None, overwrite: bool, as_json: bool, **options: Any
) -> None:
    """A result to a file, or as a table or JSON to standard output."""
    from retrodict import data

    if out is not None and out.suffix.lower() == ".nc":
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

    need_output()
    with _explained(model):
        opened = runs.open_run(run, model=model)
        table = data.read(source, **opened.layout)
        with Stages("check", runs.NUM_CHECKS, Console(stderr=True)) as stages:
            found = runs.check(opened, table, seed=seed, progress=stages)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return
    grid = Grid(box=SIMPLE, pad_edge=False)
    for heading in ("what", "found", "verdict", "what it means"):
        grid.add_column(heading)
    for finding in found.findings:
        texts = (finding.name, str(finding.value), finding.verdict, finding.meaning)
        grid.add_row(*(Text(runs.visible(text)) for text in texts))
    Console().print(grid)
    _say_verdict(found)


def plot(
    run: RunFolder,
    source: DataFile,
    out: Annotated[Path, typer.Option(help="A .png, .svg or .pdf file.")],
    steps: Annotated[
        int | None,
        typer.Option("--forecast", min=0, max=MOST, help="Rows to forecast beyond the data."),
    ] = None,
    at: ComingTimes = None,
    future: ComingInputs = None,
    series: Annotated[
        str | None, typer.Option(help="Which of several series.", show_default="the first")
    ] = None,
    level: Level = 0.9,
    all_states: AllStates = False,
    model: OwnModel = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Draw a series of a table, its smoothed states and a forecast."""
    from retrodict import data, runs

    with _explained(model):
        data.check_target(out, overwrite=overwrite, suffixes=runs.FORMATS)
        opened = runs.open_run(run, model=model)
        table = data.read(source, **opened.layout)
        names = [str(name) for name in table.series or ()]
        if series is not None and series not in names:
            raise UserError(f"there is no series {series}; there are {', '.join(names) or 'none'}")
        place = 0 if series is None else names.index(series)
        try:
            count, coming = _coming(opened, table, steps, at, future)
            drawn: dict[str, Any] = {"steps": count, "level": level, "seed": seed, "series": place}
            drawn["all_states"] = all_states
            runs.draw(opened, table, out, **drawn, **coming)
        except OSError as error:
            raise UserError(cannot_write(error, out)) from error
    of = f", series {names[place]} of {len(names)}" if len(names) > 1 else ""
    typer.echo(f"Wrote {out}{of}.")


def stream(
    run: RunFolder,
    lag: Annotated[
        int, typer.Option(min=1, max=LONGEST_MEMORY, help="Rows to wait before a row is smoothed.")
    ] = 20,
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
    after: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE",
            help="Start after the rows of this file.",
            show_default="after the rows of the fit",
        ),
    ] = None,
    from_prior: Annotated[
        bool, typer.Option("--from-prior", help="Start from the prior of the model.")
    ] = False,
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
    with the filtered state and the state `lag` rows before given all rows so far. The stream starts
    after the rows that the run was fitted to: earlier rows are recognised by their time and
    skipped. The state is kept in the run, and rows that were answered before a restart are skipped
    as well.

    With --learn, rows are learned from too, and answered at the parameters as they stand. What was
    learned is in the state; with --save-run it becomes a run of its own when the input ends.
    """
    from retrodict import data, runs

    if after is not None and from_prior:
        raise UserError("give --after TABLE or --from-prior, not both")
    if sys.stdin is None:
        raise UserError("standard input is closed: pipe rows to the command")
    if out is None:
        need_output()
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
        start: Any = "prior" if from_prior else "fit"
        if after is not None:
            start = data.read(after, **opened.layout)
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
                    after=start,
                    say=_say,
                )
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(cannot_write(error, out or Path("standard output"))) from error
    if save_run is not None:
        typer.echo(f"Wrote {save_run}.", err=True)


def _say(message: str) -> None:
    """Print a message of the library on standard error."""
    typer.echo(_in_options(message), err=True)


def info(run: RunFolder, as_json: AsJson = False) -> None:
    """Say what a run is: model, data, parameters."""
    from retrodict import runs

    need_output()
    with _explained():
        record = runs.read_record(run)
    _say_run(record, as_json)


def _say_run(record: Mapping[str, Any], as_json: bool) -> None:
    from retrodict import runs

    if as_json:
        typer.echo(_as_json(record))
        return
    results = record["results"]
    typer.echo(f"model: {record['model']['reference']}{_chosen(record)}")
    for line in record["data"]["described"]:
        typer.echo(runs.visible(line))
    typer.echo(f"smoothing: {results['method']}; {runs.likelihood_in_words(results)}")
    grid = Grid(box=SIMPLE, pad_edge=False)
    for heading in ("parameter", "value", "standard error", "90% interval"):
        grid.add_column(
            heading, justify="left" if heading == "parameter" else "right", overflow="fold"
        )
    for name, found in runs.parameter_lines(results):
        grid.add_row(Text(runs.visible(name)), *_cells(found))  # a name in brackets is no style
    Console().print(grid)
    if unit := runs.unit_in_words(record):
        typer.echo(unit)
    typer.echo(runs.visible(results["uncertainty"]))


def _as_json(tree: Any) -> str:
    """JSON for standard output; what stands for bytes that are not UTF-8 is escaped."""
    text = json.dumps(tree, indent=2, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def _chosen(record: Mapping[str, Any]) -> str:
    """The options of the model of a run, those that were found in the data included."""
    model = record["model"].get("model")
    options = model.get("options") if isinstance(model, Mapping) else None
    if not isinstance(options, Mapping):
        return ""
    texts = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in options.items()
    ]
    return f" ({', '.join(texts)})" if texts else ""


def _cells(found: dict[str, Any]) -> tuple[str, str, str]:
    value = "–" if found["value"] is None else f"{found['value']:.5g}"
    if not found["learned"]:
        return value, "fixed", ""
    if "edge" in found:
        return value, "–", f"at the edge of {found['edge']}: no interval"
    if found.get("error") is None:
        return value, "–", "–"
    return value, f"{found['error']:.3g}", f"{found['lower']:.4g} to {found['upper']:.4g}"
