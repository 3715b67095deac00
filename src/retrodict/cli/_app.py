"""The commands, as a typer application."""

import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import jax
import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from retrodict.experiments.demo import DemoResult

app = typer.Typer(
    name="retrodict",
    help="Smoothing in state-space models with posteriors that factorise backward in time.",
    epilog="The library itself is used from Python: import retrodict as rd.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class UserError(Exception):
    """A mistake that one line explains."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: what stands after the program's name; with nothing there, help is printed.

    Returns:
        The exit code: 2 with one line on stderr after a mistake of the user.
    """
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="retrodict", standalone_mode=False)
    except UserError as error:
        return _refuse(str(error))
    except Exception as error:
        # typer's own complaints, whose class has another home in each of its versions
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        return _refuse(format_message())
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    sys.stderr.write(f"retrodict: error: {' '.join(message.split())}\n")
    return 2


def _print_version(wanted: bool) -> bool:
    if wanted:
        try:
            typer.echo(f"retrodict {version('retrodict')}")
        except PackageNotFoundError:
            typer.echo("retrodict (not installed: running from its source)")
        raise typer.Exit
    return wanted


@app.callback()
def _main(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    # Before any array is made. The library leaves JAX's configuration alone; a program may choose.
    jax.config.update("jax_enable_x64", True)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for smoothing.png and summary.json; made if needed.")
    ] = Path("demo"),
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the simulated series.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")
    ] = False,
) -> None:
    """Smooth a simulated series with gaps, check the result, and draw it."""
    progress = Console(stderr=True)
    with progress.status("Compiling, smoothing and drawing..."):
        # matplotlib loads slowly, and --help does not need it
        from retrodict.experiments import demo as experiment

        try:
            result = experiment.run(out, seed=seed)
        except OSError as error:
            raise UserError(f"cannot write to {out}: {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps(result._asdict(), indent=2))
    else:
        Console().print(_table(result))
        typer.echo(f"Wrote {out / 'smoothing.png'} and {out / 'summary.json'}.")


def _table(result: "DemoResult") -> Table:
    table = Table(title="A noisy oscillator with gaps, smoothed exactly", title_justify="left")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    rows = [
        ("rows, of which without observation", f"{result.num_times}, {result.num_missing}"),
        ("log-evidence, nats", f"{result.log_evidence:.3f}"),
        ("root mean squared error, filter", f"{result.filter_rmse:.3f}"),
        ("root mean squared error, smoother", f"{result.smoother_rmse:.3f}"),
        ("coverage of the 90% intervals", f"{result.coverage:.1%}"),
        ("largest |log p(x,y) - log q(x) - log p(y)|", f"{result.identity_error:.1e}"),
        ("time to smooth, milliseconds", f"{1e3 * result.smoothing_seconds:.2f}"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
