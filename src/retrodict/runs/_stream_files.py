"""The files of a stream: its state, which one process at a time may write, and its output."""

import functools
import operator
import os
from contextlib import ExitStack
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

import retrodict as rd
from retrodict._files import lock
from retrodict.runs._record import RunError

MEMORY = 500
"""The number of rows over which the ELBO is averaged."""

Smoother: TypeAlias = rd.online.FixedLag | rd.online.LaggedLearner
"""The smoother of a stream: with fixed parameters, or learning them."""


class MonitorState(NamedTuple):
    """The state of a `Monitor`, which is part of the state of a stream.

    Attributes:
        elbo_increments: the ELBO increments of the last rows, as a ring buffer.
        num_increments: the number of rows that have entered it.
        history_bytes: the number of bytes written to the history.
    """

    elbo_increments: np.ndarray
    num_increments: np.ndarray
    history_bytes: np.ndarray

    @staticmethod
    def initial() -> "MonitorState":
        """Return the state before the first row."""
        return MonitorState(np.zeros(MEMORY), np.zeros((), int), np.zeros((), int))


class StreamState(NamedTuple):
    """The state from which a stream resumes.

    Attributes:
        smoother: the state of the smoother.
        last_time: the time of the last row as a number; dates in microseconds.
        has_dates: whether times are dates.
        pending_times: the times of the rows that are not smoothed yet, as numbers.
        output_bytes: the number of bytes written to the file of answers.
        num_rows: the number of rows answered, without those that the stream starts after.
        monitor: the state of the monitor of a learner; `None` without learning.
    """

    smoother: Any
    last_time: np.ndarray
    has_dates: np.ndarray
    pending_times: np.ndarray
    output_bytes: np.ndarray
    num_rows: np.ndarray
    monitor: Any = None

    @staticmethod
    def initial(smoother: Smoother, seed: int) -> "StreamState":
        """Return the state before the first row."""
        learns = isinstance(smoother, rd.online.LaggedLearner)
        return StreamState(
            smoother.init(jax.random.key(seed)),
            np.zeros(()),
            np.zeros((), bool),
            np.zeros(0),
            np.zeros((), int),
            np.zeros((), int),
            tuple(MonitorState.initial()) if learns else None,
        )

    def as_time(self, values: Any) -> Any:
        """Return stored numbers as times: dates if the stream has dates."""
        values = np.asarray(values)
        return values.astype(np.int64).astype("datetime64[us]") if bool(self.has_dates) else values


def write_state(path: Path, smoother: Smoother, state: StreamState, fingerprint: str) -> None:
    """Write the state of a stream.

    Of a learner only the arrays are written: its model may contain functions of the user.
    """
    if isinstance(smoother, rd.online.LaggedLearner):
        state = state._replace(smoother=jax.tree.leaves(state.smoother))
    try:
        rd.save(path, (tuple(state), fingerprint))
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def read_state(path: Path, fingerprint: str, fresh: StreamState) -> StreamState:
    """Read the state of a stream; return `fresh` if there is no file.

    Args:
        path: the file.
        fingerprint: the fingerprint of run, start and options.
        fresh: the state before the first row, which has the structure of the stored one.

    Raises:
        RunError: if the file is damaged, or of another stream or version.
    """
    if not path.exists():
        return fresh
    try:
        tree = rd.load(path, like=None)
    except rd.CheckpointError as error:
        raise RunError(f"{error} Pass {{restart}} to start over.", restart=True) from error
    other_version = RunError(
        f"{path} was written by another version of retrodict. Pass {{restart}} to start over.",
        restart=True,
    )
    try:
        fields, stored = tree
        state = StreamState(*fields)
    except (TypeError, ValueError) as error:
        raise other_version from error
    if stored != fingerprint:
        raise RunError(
            f"{path} is the state of another run, start or lag, or of other options of learning;"
            f" name another one by {{state}}, or pass {{restart}} to start over.",
            state=...,
            restart=True,
        )
    structure = jax.tree.structure(fresh.smoother)
    numbers = (state.last_time, state.has_dates, state.pending_times, state.output_bytes)
    matches = (
        len(fields) == len(StreamState._fields)
        and (isinstance(state.smoother, list) or jax.tree.structure(state.smoother) == structure)
        and _forms((state.smoother, state.monitor)) == _forms((fresh.smoother, fresh.monitor))
        and [np.ndim(number) for number in numbers] == [0, 0, 1, 0]
        and all(isinstance(number, np.ndarray | np.generic) for number in numbers)
        and all(number.dtype.kind in "bifu" for number in numbers)
        # Compared with the monitor of `fresh`: two numbers of rows and of bytes, after an array.
        and all(
            _is_count(n) for n in (state.output_bytes, state.num_rows, *(state.monitor or ())[1:])
        )
    )
    if not matches:
        raise other_version
    return state._replace(smoother=jax.tree.unflatten(structure, jax.tree.leaves(state.smoother)))


def _is_count(number: Any) -> bool:
    """Return whether a number is a whole one, and not negative."""
    value = np.asarray(number)
    return value.ndim == 0 and value.dtype.kind == "i" and int(value) >= 0


def _forms(tree: Any) -> list[tuple[Any, str]]:
    """Return the shape and type of each leaf."""
    return [
        (getattr(leaf, "shape", None), str(getattr(leaf, "dtype", type(leaf))))
        for leaf in jax.tree.leaves(tree)
    ]


class StateLock:
    """A lock that keeps two processes from resuming one state; it ends with its process.

    Args:
        path: the file of the state.
        files: closes what is opened.
    """

    def __init__(self, path: Path, files: ExitStack):
        self.path, self.files, self.taken = path, files, False
        self.before = self._stamp()

    def take(self) -> None:
        """Take the lock, if it is not taken yet.

        Raises:
            RunError: if another process has it, or has changed the state since it was read.
        """
        if self.taken:
            return
        path = self.path.with_name(f".{self.path.name}.lock")
        handle = self.files.enter_context(open(path, "ab", opener=_open_safely))
        lock_file(handle, self.path, "or name another state by {state}.", state=...)
        if self._stamp() != self.before:
            raise RunError(f"{self.path} was changed by another process; start again.")
        for orphan in self.path.parent.glob(f".{escape(self.path.name)}.*.partial"):
            orphan.unlink(missing_ok=True)  # of a process that was killed
        self.taken = True

    def _stamp(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns


def _open_safely(path: str, flags: int) -> int:
    """Open a file without following a link or waiting for a pipe: others may have made it."""
    safe = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
    return os.open(path, functools.reduce(operator.or_, safe, flags), 0o666)


def lock_file(handle: Any, path: Path, remedy: str, **arguments: Any) -> None:
    """Lock an open file until it is closed.

    Args:
        handle: the file.
        path: its path, for the message.
        remedy: the end of the message.
        **arguments: those that it names.

    Raises:
        RunError: if another process has locked it.
    """
    try:
        lock(handle.fileno())
    except BlockingIOError as error:
        handle.close()
        raise RunError(
            f"{path} is in use by another process; end it, {remedy}", **arguments
        ) from error


class OutputPipe:
    """A file that the caller has opened: it is written to, and not truncated.

    Args:
        handle: the file, opened for bytes.
        header: its first line.
    """

    def __init__(self, handle: Any, header: bytes):
        self.handle, self.header = handle, header

    def write(self, content: bytes) -> None:
        """Write the header if nothing was written yet, and the content."""
        self.handle.write(self.header + content)
        self.header = b""

    def flush(self) -> None:
        """Pass on what was written."""
        self.handle.flush()


class OutputFile:
    """A file that a stream appends to, truncated to the bytes that the state of the stream covers.

    Args:
        path: the file.
        header: its first line.
        num_bytes: the number of bytes that the state covers. If there are none, a file with more
            than the header is refused as not of this stream, unless the state has read no row.
        is_empty: whether there is a state that has read no row.
        files: closes the file, and removes it if it is empty.
    """

    def __init__(self, path: Path, header: bytes, num_bytes: int, is_empty: bool, files: ExitStack):
        self.path, self.header = path, header
        self.handle = open(path, "r+b" if path.exists() else "x+b")
        lock_file(self.handle, path, "or name another.")
        files.callback(_remove_empty, path)
        files.enter_context(self.handle)
        size = path.stat().st_size
        if size < num_bytes:
            raise RunError(
                f"{path} has {size} bytes, and the state covers {num_bytes}: this stream was"
                f" written to another file. Name that one, or another state by {{state}}.",
                state=...,
            )
        # A process that was killed before its first state may have written the header.
        has_rows = not header.startswith(self.handle.read(len(header) + 1))
        if has_rows and not (num_bytes or is_empty):
            raise RunError(f"{path} exists, and is not of this stream; name another.")
        self.handle.truncate(num_bytes)
        self.handle.seek(num_bytes)

    def write(self, content: bytes) -> None:
        """Write the header if the file is empty, and the content."""
        self.handle.write(content if self.handle.tell() else self.header + content)

    def flush(self) -> None:
        """Pass on what was written."""
        self.handle.flush()

    def save(self) -> int:
        """Write the file to the disk; return its number of bytes.

        Raises:
            RunError: if the file was removed: further output would be lost.
        """
        if not os.fstat(self.handle.fileno()).st_nlink:
            raise RunError(
                f"{self.path} was removed while the stream was writing to it. Pass {{restart}} to"
                " start over.",
                restart=True,
            )
        self.handle.flush()
        os.fsync(self.handle.fileno())
        return self.handle.tell()


def _remove_empty(path: Path) -> None:
    if path.exists() and not path.stat().st_size:
        path.unlink()


def empty_file(path: Path | None, starts: tuple[bytes, ...]) -> bool:
    """Empty a file if it begins like an output of a stream; return whether it was emptied."""
    if path is None or not path.exists():
        return False
    with open(path, "r+b") as file:
        matches = file.read(max(map(len, starts))).startswith(starts)
        if matches:
            file.truncate(0)
    return matches
