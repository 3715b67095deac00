"""The commands, as a typer application."""

import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from retrodict.cli import _own
from retrodict.cli._errors import CLOSED, INTERRUPTED, MISTAKE, UserError, cannot_write
from retrodict.cli._options import ASKED, AsJson, Seed
from retrodict.cli._progress import Stages

if TYPE_CHECKING:
    from retrodict.experiments import demo as demo_experiment

app = typer.Typer(
    name="retrodict",
    help="""Smoothing in state-space models with posteriors that factorise backward in time.

    From noisy observations of a hidden state, retrodict infers the law of its whole path: fit a
    model to a table, then smooth, forecast, check, plot or stream. From Python: import retrodict
    as rd.""",
    epilog=(
        "Exit codes: 0 done; 1 something that the command needs is not installed; 2 the command"
        " could not be done as asked, one line on standard error says why; 75 another process of a"
        " distributed job was lost, and the same command goes on; 130 interrupted; 141 nobody reads"
        " standard output any more."
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_own.register(app)


LONGEST_MESSAGE = 2000
"""Characters of an error."""


class Experiment(StrEnum):
    """What `reproduce` can be asked for."""

    all = "all"
    linear = "linear"
    multivariate = "multivariate"
    nonlinear = "nonlinear"
    bounds = "bounds"


def run(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: what stands after the program's name; with nothing there, help is printed.

    Returns:
        The exit code: 2 with one line on stderr after a mistake of the user, 130 if interrupted,
        141 if nobody reads standard output any more.
    """
    ASKED.set(shlex.join(["retrodict", *arguments]))
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="retrodict", standalone_mode=False)
    except UserError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        return CLOSED
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return CLOSED  # typer has ended with 1, and said nothing
    except OSError as error:  # standard output may be closed, or a full disk
        return _refuse(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except MemoryError as error:
        return _refuse(_too_large(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        # typer's own complaints, whose class has another home in each of its versions
        if str(error).startswith("RESOURCE_EXHAUSTED"):  # of JAX, whose class is RuntimeError
            return _refuse(_too_large(error))
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        return _refuse(format_message())
    if code == INTERRUPTED:
        sys.stderr.write("retrodict: interrupted\n")
    return code if isinstance(code, int) else 0


def _too_large(error: Exception) -> str:
    return f"not enough memory ({error}): use fewer rows, columns, states or steps"


def _refuse(message: str) -> int:
    # A message may quote a file, which may hold codes that a terminal obeys, or megabytes.
    line = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    line = line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."
    sys.stderr.write(f"retrodict: error: {line}\n")
    return MISTAKE


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
    # A compiled program that cannot be kept or read is compiled again, and nothing is lost.
    warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")
    # Before any array is made. The library leaves JAX's configuration alone; a program may choose.
    if "jax" not in sys.modules:
        os.environ["JAX_ENABLE_X64"] = "1"  # read by JAX when a command imports it
        return
    import jax

    jax.config.update("jax_enable_x64", True)


@app.command(
    epilog="Example: retrodict demo --out demo && open demo/report.html",
)
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, summary.json and pictures.")
    ] = Path("demo"),
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare smoothers where two states look alike.

    A state is seen through an even map, so that its sign cannot be seen. Trains three amortised
    families on simulated series, smooths held-out ones, and compares with the exact posterior, a
    particle smoother and linearised smoothers. Takes about a minute on two cores.
    """
    # matplotlib loads slowly, and --help does not need it
    from retrodict.experiments import demo as experiment

    with Stages("demo", experiment.NUM_STAGES, Console(stderr=True)) as stages:
        try:
            found = experiment.run(out, seed=seed, progress=stages)
        except OSError as error:
            raise UserError(cannot_write(error, out)) from error
    if as_json:
        typer.echo(experiment.summary(found).decode(), nl=False)
        return
    Console().print(_table(found))
    typer.echo(f"Wrote {out / 'report.html'}, {out / 'summary.json'} and pictures.")


def _table(found: "demo_experiment.Demo") -> Table:
    from retrodict.experiments import demo as demo_experiment

    title = "Smoothers against the exact posterior"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for heading, form in demo_experiment.COLUMNS.items():
        lines = "\n".join(heading.split())
        table.add_column(lines, justify="right" if form else "left", no_wrap=True)
    for row in demo_experiment.rows_of(found):
        cells = zip(row, demo_experiment.COLUMNS.values(), strict=True)
        table.add_row(*("–" if cell != cell else format(cell, form) for cell, form in cells))
    return table


@app.command(
    epilog="Examples: retrodict reproduce linear --quick; retrodict reproduce all --out results",
)
def reproduce(
    experiment: Annotated[
        Experiment, typer.Argument(help="Which experiment of the paper.", show_default=True)
    ] = Experiment.all,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less of everything: under five minutes on two cores.")
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

    Writes numbers, tables and figures of each experiment, and one report.html that sets them beside
    the paper's. A run that was interrupted or killed goes on where it was; what is done is not done
    again.
    """
    from retrodict.experiments import reproduction

    out = out or Path("reproduction-quick" if quick else "reproduction")
    names = [*reproduction.EXPERIMENTS] if experiment is Experiment.all else [experiment.value]
    console = Console(stderr=True)
    with _compiled_programs_in(out / "compiled"), ExitStack() as opened:

        def told(name: str, num_stages: int) -> Stages:
            opened.pop_all().close()
            return opened.enter_context(Stages(name, num_stages, console))

        try:
            found = reproduction.reproduce(names, out, quick=quick, seed=seed, progress=told)
        except OSError as error:
            raise UserError(
                f"{cannot_write(error, out)}. What was computed is kept; give another folder, or"
                " make room and run the same command again."
            ) from error
        except KeyboardInterrupt:
            opened.close()
            console.print(
                "What was done is kept: the same command goes on from here.", highlight=False
            )
            raise
    if as_json:
        numbers = {chapter.name: chapter.numbers for chapter in found.chapters}
        answer = {"report": str(found.report), "experiments": numbers}
        typer.echo(reproduction.as_json(answer).decode(), nl=False)
        return
    for chapter in found.chapters:
        typer.echo(f"{chapter.title}\n  {chapter.summary}\n")
    typer.echo(f"Wrote {found.report}.")


@contextmanager
def _compiled_programs_in(place: Path) -> Iterator[None]:
    """Keeps compiled programs in a folder: fits that differ in numbers alone share one.

    Where the user named a folder for them already, in JAX's own variable, that one is used.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        yield
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    try:
        with warnings.catch_warnings():
            # An entry that cannot be written or read is compiled instead, and nothing is lost.
            warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")
            yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        compilation_cache.reset_cache()
