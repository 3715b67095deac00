"""Mistakes that one line explains, and the codes with which a command ends."""

import sys
from pathlib import Path

MISTAKE = 2
"""After a mistake of the user."""

INTERRUPTED = 130
"""What a shell expects of a program that was stopped by Ctrl-C; typer may return it itself."""


CLOSED = 141
"""What a shell expects of a program whose output nobody reads any more."""


class UserError(Exception):
    """A mistake that one line explains."""


def need_output() -> None:
    """Refuse to compute what nobody can read.

    Raises:
        UserError: if standard output is closed.
    """
    if sys.stdout is None:
        raise UserError("standard output is closed: open it, or name a file where there is --out")


def cannot_write(error: OSError, out: Path) -> str:
    """Why a file or a folder could not be written."""
    return f"cannot write to {error.filename or out}: {error.strerror or error}"
