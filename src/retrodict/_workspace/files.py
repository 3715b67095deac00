"""Files that are written whole or not at all: tables and numbers."""

import csv
import importlib.metadata
import io
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None


def make_writable(path: Path) -> None:
    """Makes a folder, and complains at once if nothing can be written there.

    Raises:
        OSError: if the folder cannot be made or written to.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(path))


def hold(descriptor: int) -> None:
    """Lock an open file or folder for this process, until it is closed or the process ends.

    Does nothing where there are no such locks, as on some network file systems.

    Args:
        descriptor: that of the open file or folder.

    Raises:
        BlockingIOError: if another process has locked it.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def hold_folder(path: Path, held: ExitStack) -> None:
    """Lock a folder for this process, until `held` is closed or the process ends.

    Args:
        path: the folder.
        held: closes the folder.

    Raises:
        BlockingIOError: if another process has locked it.
    """
    if fcntl is None:  # folders cannot be opened where there are no locks
        return
    descriptor = os.open(path, os.O_RDONLY)
    held.callback(os.close, descriptor)
    hold(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: beside it first, then in its place."""
    # A name that nobody can foresee, and a file that is new: not a link that somebody put there.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def as_csv(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> bytes:
    """A table as comma-separated values, numbers with all their digits."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_plain(cell) for cell in header])
    writer.writerows([_plain(cell) for cell in row] for row in rows)
    return buffer.getvalue().encode()


def as_json(tree: Any) -> bytes:
    """Return a tree as JSON in UTF-8: arrays as lists; non-finite values become null."""
    text = json.dumps(_plain(tree), indent=2, ensure_ascii=False) + "\n"
    # A name of a file need not be UTF-8; what stands for its bytes is written as JSON escapes it.
    return text.encode("utf-8", "backslashreplace")


def _plain(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, np.ndarray):
        return _plain(tree.tolist())
    if isinstance(tree, (list, tuple)):
        return [_plain(value) for value in tree]
    if isinstance(tree, np.generic):
        return _plain(tree.item())
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    return tree


def library_version() -> str:
    """The version of the library that is installed, for the record of what it made."""
    try:
        return importlib.metadata.version("retrodict")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
