"""Exit codes, and the translation of Python arguments to options."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrodict._interface import Argument, ModelArgument, UserError
from retrodict.cli._output import as_text

MISTAKE = 2
"""The command could not be done as asked."""

LOST = 75
"""Another process of a distributed job was lost; `sysexits.h` calls it a temporary failure."""

INTERRUPTED = 130
"""Ctrl-C; typer may return it itself."""

CLOSED = 141
"""Standard output was closed by its reader."""

EXIT_CODES = (
    "Exit codes: 0 done; 1 a required package is not installed; 2 the command could not be done as"
    " asked (one line on standard error states why); 75 another process of a distributed job was"
    " lost (the same command continues); 130 interrupted; 141 standard output was closed."
)

OPTIONS = {
    "after": "--after TABLE",
    "after='prior'": "--from-prior",
    "times": "--at FILE",
    "num_steps": "--steps",
}
"""Options whose name or form differs from that of the Python argument."""


def as_option(argument: Argument) -> str:
    """Return an argument as it is given on the command line."""
    if isinstance(argument, ModelArgument):
        return f"--option {shlex.quote(f'{argument.name}={as_text(argument.value)}')}"
    special = OPTIONS.get(str(argument), OPTIONS.get(argument.name))
    option = special or f"--{argument.name.replace('_', '-')}"
    without_value = argument.value is ... or argument.value is True or special is not None
    return option if without_value else f"{option} {shlex.quote(str(argument.value))}"


def as_line(error: Exception) -> str:
    """Return the message of an error with options in place of Python arguments."""
    return error.spelled(as_option) if isinstance(error, UserError) else str(error)


def require_output() -> None:
    """Refuse to compute a result that cannot be printed.

    Raises:
        UserError: if standard output is closed.
    """
    if sys.stdout is None:
        raise UserError("standard output is closed: open it, or name a file where there is --out")


@contextmanager
def writing(out: Path, remedy: str = "") -> Iterator[None]:
    """Turn failures to write into user errors.

    Args:
        out: the file or folder, for errors that do not name one.
        remedy: a sentence to append.

    Raises:
        UserError: if a file cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno is None:  # of the library, in whole sentences
            raise UserError(f"{error}{remedy}") from error
        reason = error.strerror or error
        raise UserError(f"cannot write to {error.filename or out}: {reason}{remedy}") from error
