"""`retrodict fit`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from retrodict._interface import UserError
from retrodict._pages import visible
from retrodict.cli._display import Stages
from retrodict.cli._errors import writing
from retrodict.cli._job import (
    Coordinator,
    Distributed,
    NumProcesses,
    ProcessId,
    end_together,
    join,
)
from retrodict.cli._options import (
    COMMAND_LINE,
    MAX_COUNT,
    AsJson,
    DataFile,
    Seed,
    find_modules_here,
)
from retrodict.cli._output import as_text, print_json, print_run, print_verdict

ModelOption = Annotated[
    str,
    typer.Option(help="A ready model, a model file FILE.toml, or a Python object MODULE:NAME."),
]
OutOption = Annotated[
    Path | None, typer.Option(help="The folder of the run; required without --dry-run.")
]
OptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of a ready model, such as period=12; may be repeated.",
    ),
]
SeriesOption = Annotated[
    list[str] | None, typer.Option(help="A column that identifies series; may be repeated.")
]
ColumnsOption = Annotated[
    list[str] | None, typer.Option(help="An observed column; may be repeated.")
]
InputsOption = Annotated[list[str] | None, typer.Option(help="An input column; may be repeated.")]
FreqOption = Annotated[
    str | None,
    typer.Option(help="The step of the times: a number, irregular, or D, W, MS, 6h, ..."),
]
StepInputOption = Annotated[
    bool, typer.Option("--step-input", help="Make the length of the step an input.")
]
TimeFormatOption = Annotated[
    str | None, typer.Option(help="The format of dates, such as %d/%m/%Y.")
]
FamilyOption = Annotated[
    str | None, typer.Option(help="The family to train.", show_default="mixture")
]
StepsOption = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_COUNT, help="Steps of each training.", show_default="2000"),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print how the file is read, and stop.")
]


def fit(
    source: DataFile,
    model: ModelOption,
    out: OutOption = None,
    options: OptionsOption = None,
    time: Annotated[str | None, typer.Option(help="The time column.")] = None,
    series: SeriesOption = None,
    columns: ColumnsOption = None,
    inputs: InputsOption = None,
    freq: FreqOption = None,
    step_input: StepInputOption = False,
    time_format: TimeFormatOption = None,
    family: FamilyOption = None,
    steps: StepsOption = None,
    seed: Seed = 0,
    dry_run: DryRunOption = False,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    as_json: AsJson = False,
) -> None:
    """Fit a model to a table, and train a smoother for it.

    Learns the learnable parameters of the model, trains a family where smoothing is not exact, and
    writes a folder with the run and report.html. An interrupted fit continues when the command is
    repeated; a finished run is not overwritten. Series are distributed over all devices, and with
    --distributed over those of all processes of a job, each of which reads its share of them.
    """
    from retrodict import data, models, runs

    with end_together():
        if out is None and not dry_run:
            raise UserError("name the folder of the run: --out RUN")
        is_main = join(distributed, coordinator, num_processes, process_id)
        if out is not None and not dry_run:
            runs.check_folder(out)
        find_modules_here(model)
        spec = models.load(model).with_options(options or ())
        layout = {
            "time": time,
            "series": series or None,
            "columns": columns or None,
            "inputs": inputs or None,
            "freq": _number_or_text(freq),
            "step_input": step_input or None,
            "time_format": time_format,
        }
        named = {key: value for key, value in layout.items() if value is not None}
        table = data.read_shared(source, **(spec.data | named))
        training = {"family": family, "num_steps": steps}
        training = spec.fit | {key: value for key, value in training.items() if value is not None}
        job = runs.FitJob(table, spec, out or Path(), seed=seed, **training)
        if is_main:
            if job.notice:
                typer.echo(job.notice, err=True)
            if isinstance(table, data.SharedTable):
                typer.echo(f"Each process reads its share of {table.num_series} series.", err=True)
        if out is None or dry_run:
            job.starting_model()  # refuses a model that does not fit
            if is_main:
                _print_dry_run(table, job.spec, as_json)
            return
        run, checked = _fit_and_check(job, quiet=not is_main)
    if not is_main:
        return
    if as_json:
        print_json({**run.record, "check": checked.to_dict()})
        return
    print_run(run.record)
    print_verdict(checked)
    typer.echo(f"Wrote {out} and {out / 'report.html'}.")


def _fit_and_check(job: Any, *, quiet: bool) -> tuple[Any, Any]:
    """Fit, check and write the report. A run that was finished before is checked only."""
    from retrodict import runs

    run, out = job.finished_run(), job.out
    count = runs.NUM_CHECKS + 1 + (0 if run else job.num_stages)
    with Stages("fit", count, Console(stderr=True, quiet=quiet)) as stages, writing(out):
        options = {"seed": job.seed, "progress": stages}
        if run is None:
            run = job.run(stages)
        checked = runs.check(run, job.table, **options)
        command = COMMAND_LINE.get()
        runs.write_report(run, job.table, checked=checked, command=command, **options)
    return run, checked


def _number_or_text(text: str | None) -> int | float | str | None:
    if text is None:
        return None
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _print_dry_run(table: Any, spec: Any, as_json: bool) -> None:
    """Print the model, its options, and how the table was read."""
    options = spec.all_options()
    if as_json:
        model = spec.to_dict()
        described = table.described()
        print_json({"table": described, "layout": table.layout, "model": model, "options": options})
        return
    typer.echo(f"model: {spec.reference}")
    for name, value in options.items():
        default = "" if name in spec.options else " (default)"
        typer.echo(f"option {name}: {as_text(value)}{default}")
    for line in table.described():
        typer.echo(visible(line))
