"""The state of a stream, in a file that one process at a time may write."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

import retrodict as rd
from retrodict._errors import Argument
from retrodict.runs._folder import RunError
from retrodict.runs._monitor import MonitorState
from retrodict.runs._stream_output import hold_file

Live: TypeAlias = rd.online.FixedLag | rd.online.LaggedLearner
"""The smoother of a stream: with fixed parameters, or learning them."""


class StreamState(NamedTuple):
    """The state from which a stream resumes.

    Attributes:
        live: the state of the smoother.
        last: the time of the last row as a number; dates in microseconds.
        dates: whether times are dates.
        waiting: the times of the rows that are not smoothed yet, as numbers.
        written: the number of bytes written to the file of answers.
        read: the number of rows answered, without those that the stream starts after.
        monitor: the state of the monitor of a learner; `None` without learning.
    """

    live: Any
    last: np.ndarray
    dates: np.ndarray
    waiting: np.ndarray
    written: np.ndarray
    read: np.ndarray
    monitor: Any = None

    @staticmethod
    def initial(live: Live, seed: int) -> "StreamState":
        """Return the state before the first row."""
        learns = isinstance(live, rd.online.LaggedLearner)
        return StreamState(
            live.init(jax.random.key(seed)),
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
        return values.astype(np.int64).astype("datetime64[us]") if bool(self.dates) else values


def write_state(place: Path, live: Live, state: StreamState, fingerprint: str) -> None:
    """Write the state of a stream.

    Of a learner only the arrays are written: its model may contain functions of the user.
    """
    if isinstance(live, rd.online.LaggedLearner):
        state = state._replace(live=jax.tree.leaves(state.live))
    try:
        rd.save(place, (tuple(state), fingerprint))
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(place)
        raise


def read_state(place: Path, fingerprint: str, fresh: StreamState) -> StreamState:
    """Read the state of a stream; return `fresh` if there is no file.

    Args:
        place: the file.
        fingerprint: the fingerprint of run, start and options.
        fresh: the state before the first row, which has the structure of the stored one.

    Raises:
        RunError: if the file is damaged, or of another stream or version.
    """
    if not place.exists():
        return fresh
    try:
        tree = rd.load(place, like=None)
    except rd.CheckpointError as error:
        raise RunError(f"{error} Pass ", Argument("restart", True), " to start over.") from error
    other_version = RunError(
        f"{place} was written by another version of retrodict. Pass ",
        Argument("restart", True),
        " to start over.",
    )
    try:
        fields, stored = tree
        state = StreamState(*fields)
    except (TypeError, ValueError) as error:
        raise other_version from error
    if stored != fingerprint:
        raise RunError(
            f"{place} is the state of another run, start or lag, or of other options of learning;"
            " name another one by ",
            Argument("state"),
            ", or pass ",
            Argument("restart", True),
            " to start over.",
        )
    structure = jax.tree.structure(fresh.live)
    numbers = (state.last, state.dates, state.waiting, state.written)
    matches = (
        len(fields) == len(StreamState._fields)
        and (isinstance(state.live, list) or jax.tree.structure(state.live) == structure)
        and _forms((state.live, state.monitor)) == _forms((fresh.live, fresh.monitor))
        and [np.ndim(number) for number in numbers] == [0, 0, 1, 0]
        and all(isinstance(number, np.ndarray | np.generic) for number in numbers)
        and all(number.dtype.kind in "bifu" for number in numbers)
    )
    if not matches:
        raise other_version
    return state._replace(live=jax.tree.unflatten(structure, jax.tree.leaves(state.live)))


def _forms(tree: Any) -> list[tuple[Any, str]]:
    """Return the shape and type of each leaf."""
    return [
        (getattr(leaf, "shape", None), str(getattr(leaf, "dtype", type(leaf))))
        for leaf in jax.tree.leaves(tree)
    ]


class StateLock:
    """A lock that keeps two processes from resuming one state; it ends with its process.

    Args:
        place: the file of the state.
        files: closes what is opened.
    """

    def __init__(self, place: Path, files: ExitStack):
        self.place, self.files, self.taken = place, files, False
        self.before = self._stamp()

    def take(self) -> None:
        """Take the lock, if it is not taken yet.

        Raises:
            RunError: if another process has it, or has changed the state since it was read.
        """
        if self.taken:
            return
        lock = self.place.with_name(f".{self.place.name}.lock")
        handle = self.files.enter_context(open(lock, "ab"))
        hold_file(handle, self.place, "or name another state by ", Argument("state"), ".")
        if self._stamp() != self.before:
            raise RunError(f"{self.place} was changed by another process; start again.")
        self.taken = True

    def _stamp(self) -> tuple[int, int] | None:
        try:
            status = self.place.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns
