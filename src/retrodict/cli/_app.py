"""The typer application: registers the commands, runs one, and returns its exit code."""

import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from retrodict.cli._compiled import keep_compiled_programs
from retrodict.cli._errors import CLOSED, EXIT_CODES, INTERRUPTED, MISTAKE, as_line
from retrodict.cli._options import COMMAND_LINE
from retrodict.cli.apply import check, forecast, info, plot, smooth
from retrodict.cli.experiments import demo, reproduce
from retrodict.cli.fit import fit
from retrodict.cli.stream import stream

MAX_MESSAGE = 2000
"""Characters of an error message."""

COMMANDS = {
    fit: "retrodict fit nile.csv --model local_level --out nile-run",
    smooth: "retrodict smooth nile-run nile.csv --out smoothed.csv",
    forecast: "retrodict forecast nile-run nile.csv --steps 12",
    check: "retrodict check nile-run nile.csv",
    plot: "retrodict plot nile-run nile.csv --out nile.png --forecast 12",
    stream: "tail -n +1 -f new.csv | retrodict stream nile-run --lag 10",
    info: "retrodict info nile-run",
    demo: "retrodict demo --out demo && open demo/report.html",
    reproduce: "retrodict reproduce linear --quick; retrodict reproduce all --out results",
}
"""The commands, each with an example."""

app = typer.Typer(
    name="retrodict",
    help="""Smoothing in state-space models with posteriors that factorise backward in time.

    Infer the distribution of a hidden state from noisy observations: fit a model to a table, then
    smooth, forecast, check, plot or stream. In Python: import retrodict as rd.""",
    epilog=EXIT_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command, example in COMMANDS.items():
    app.command(epilog=f"Example: {example}")(command)


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name; without any, the help is printed.

    Returns:
        The exit code, see `EXIT_CODES`.
    """
    COMMAND_LINE.set(shlex.join(["retrodict", *arguments]))
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="retrodict", standalone_mode=False)
    except (ValueError, FloatingPointError) as error:  # the types of all user errors
        return _refuse(as_line(error))
    except BrokenPipeError:
        return CLOSED
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return CLOSED  # typer has exited with 1, without a message
    except OSError as error:  # standard output may be closed, or a disk full
        return _refuse(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except MemoryError as error:
        return _refuse(_out_of_memory(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if str(error).startswith("RESOURCE_EXHAUSTED"):  # JAX, with the class RuntimeError
            return _refuse(_out_of_memory(error))
        # Usage errors of typer, whose class is in another module in each version.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        return _refuse(format_message())
    if code == INTERRUPTED:
        sys.stderr.write("retrodict: interrupted\n")
    return code if isinstance(code, int) else 0


def _out_of_memory(error: Exception) -> str:
    return f"not enough memory ({error}): use fewer rows, columns, states or steps"


def _refuse(text: str) -> int:
    # A message may quote a file, which may hold control codes of terminals, or megabytes.
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."
    sys.stderr.write(f"retrodict: error: {line}\n")
    return MISTAKE


def _print_version(requested: bool) -> bool:
    if requested:
        try:
            typer.echo(f"retrodict {version('retrodict')}")
        except PackageNotFoundError:
            typer.echo("retrodict (not installed: running from its source)")
        raise typer.Exit
    return requested


@app.callback()
def _main(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    # A program that cannot be cached is compiled again: no result depends on it.
    warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")
    # Before any array is made. The library leaves JAX's configuration alone; a program may choose.
    if "jax" not in sys.modules:
        os.environ["JAX_ENABLE_X64"] = "1"  # read by JAX when a command imports it
        keep_compiled_programs()
        return
    import jax

    jax.config.update("jax_enable_x64", True)
