"""Atomic writing of files, locks, and tables and trees as text."""

import csv
import importlib.metadata
import io
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None


def ensure_folder(path: Path) -> None:
    """Create a folder, and raise if it is not writable.

    Raises:
        OSError: if the folder cannot be made or written to.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(path))


def lock(descriptor: int) -> None:
    """Lock an open file or folder for this process, until it is closed or the process ends.

    This is a no-op where locks are not supported, as on some network file systems.

    Args:
        descriptor: the descriptor of the open file or folder.

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


def lock_folder(path: Path, locks: ExitStack) -> None:
    """Lock a folder for this process, until `locks` is closed or the process ends.

    Args:
        path: the folder.
        locks: the stack that closes the folder.

    Raises:
        BlockingIOError: if another process has locked it.
    """
    if fcntl is None:  # platforms without locks cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    locks.callback(os.close, descriptor)
    lock(descriptor)


@contextmanager
def replacing(path: Path, *, previous: Path | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces a file at the end of the block, if nothing fails.

    The new content is on the disk before it gets its name: after a failure, a kill or a loss of
    power, the path has the old content or the new one.

    Args:
        path: the file.
        previous: the new name of an existing file, which is removed by default.
    """
    # An unpredictable name and a new file, which cannot be a link of somebody else.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":
        # A new name is durable after its folder is synced; Windows has no such call.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def as_csv(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> bytes:
    """Return a table as comma-separated values, numbers with all their digits."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_plain(cell) for cell in header])
    writer.writerows([_plain(cell) for cell in row] for row in rows)
    return buffer.getvalue().encode()


def as_json(tree: Any) -> bytes:
    """Return a tree as JSON in UTF-8: arrays as lists; non-finite values become null."""
    text = json.dumps(_plain(tree), indent=2, ensure_ascii=False) + "\n"
    # File names need not be UTF-8; their surrogate characters are escaped.
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


def version_of(package: str = "retrodict") -> str:
    """Return the version of a package, which may run from its source without being installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
