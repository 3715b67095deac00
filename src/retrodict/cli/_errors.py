"""Mistakes that one line explains."""

from pathlib import Path


class UserError(Exception):
    """A mistake that one line explains."""


def cannot_write(error: OSError, out: Path) -> str:
    """Why a file or a folder could not be written."""
    return f"cannot write to {error.filename or out}: {error.strerror or error}"
