"""Rows as they come, answered at once, with a state that survives a restart."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict._errors import Argument, Notice
from retrodict._workspace import hold
from retrodict.runs._adopt import adopt, refuse_existing
from retrodict.runs._folder import RunError
from retrodict.runs._learning import Learning
from retrodict.runs._lines import Answers, arriving, as_texts, header, written
from retrodict.runs._names import state_names
from retrodict.runs._record import Run
from retrodict.runs._watch import HISTORY_STARTS, Watch, Watched

Live: TypeAlias = rd.online.FixedLag | rd.online.LaggedLearner
"""What answers the rows: a family that stays, or one that learns."""

CHUNK = 256
"""Rows that are read by one compiled program. A shorter chunk is padded to it."""

SECONDS_BETWEEN_SAVES = 1.0


class Kept(NamedTuple):
    """What a stream needs to go on.

    Attributes:
        live: the state of what answers the rows.
        last: the time of the last row, as a number; dates in microseconds.
        dates: whether times are dates.
        waiting: the times of the rows that are not smoothed yet, likewise.
        written: how many bytes were written to the file of answers.
        read: how many rows were answered, those that the stream starts after not counted.
        watched: what was seen of the learning; `None` if nothing is learned.
    """

    live: Any
    last: np.ndarray
    dates: np.ndarray
    waiting: np.ndarray
    written: np.ndarray
    read: np.ndarray
    watched: Any = None


RESTART = Argument("restart", True)


class Start(NamedTuple):
    """What a stream starts after.

    Attributes:
        rows: the rows before its first; `None` if it starts from the prior of the model.
        fingerprint: of these rows.
        words: the start in words.
    """

    rows: data.Rows | None
    fingerprint: str | None
    words: str


def stream(
    run: Run,
    source: Any,
    out: Any,
    *,
    lag: int = 20,
    state: Path | None = None,
    flush: bool = False,
    seed: int = 0,
    as_json: bool = False,
    learning: Learning | None = None,
    restart: bool = False,
    after: data.Table | Literal["fit", "prior"] = "fit",
    say: Callable[[str], None] | None = None,
) -> int:
    """Answer rows of comma-separated values as they come.

    The stream goes on after the rows that the run was fitted to, or after those of another table:
    the filtered state of its first row is that of the row in a table of both. A gap between them is
    a gap of missing rows. Leading rows that are not later than the last row before the stream are
    skipped, and their number is reported.

    Each row is answered by the filtered state, and the state `lag` rows before given all rows so
    far, which is what smoothing these rows offline would say. The state of the stream has a fixed
    size and is kept in a file at least every second. After a restart, rows up to the last that it
    knows are skipped, and what follows is the same as if nothing had happened. If `out` is a file
    it is first cut back to that row, so that it holds every answer once; a reader of a pipe may see
    the rows of the last second again, with the same answers.

    With `learning`, each row is answered at the parameters as they stand, and then learned from.
    What was learned, and what it takes to go on, is in the same file: killed and gone on with, it
    learns and answers the same to the last bit.

    Args:
        run: the run.
        source: the rows, with a header, in order of time: a file that was opened for bytes.
        out: where answers go: such a file, or the path of one that they are appended to.
        lag: how many rows a smoothed row waits for.
        state: the file of the state; by default one in the folder of the run.
        flush: whether to answer the last rows too when the source ends: with the file of the state
            this ends the stream.
        seed: of the draws of families that draw.
        as_json: whether an answer is a line of JSON, instead of comma-separated values.
        learning: what is learned from the rows, and how; by default nothing is.
        restart: whether to begin anew: the state, and the files that this stream wrote, are
            replaced.
        after: the rows before the first row of the stream: those that the run was `"fit"` to, a
            table that was read with `run.layout`, or none, for a start from the `"prior"` of the
            model. They are neither answered nor learned from.
        say: a callback for messages: where the stream starts, and how many rows it skips.

    Returns:
        How many rows were answered.

    Raises:
        DataError: if a row cannot be read.
        RunError: if the state is of another run, start, lag, learning or file, or if the run does
            not hold the rows that it was fitted to.
    """
    say = say or (lambda _: None)
    start = _start(run, after)
    place = state_place(run, lag, learning) if state is None else state
    live = rd.online.FixedLag(run.smoother, lag) if learning is None else learning.learner(run, lag)
    if learning is not None and learning.save_run is not None:
        refuse_existing(learning.save_run)
    written_to = [out, *((learning.history, learning.figure) if learning else ())]
    for path in (place, *written_to):
        if isinstance(path, Path):
            data.check_target(path, overwrite=True, suffixes=())
    with ExitStack() as files:
        lock = _Lock(place, files)
        # Without files and without rows a state is only read, and another stream may go on.
        if restart or any(isinstance(path, Path) for path in written_to):
            lock.take()
        if restart:
            _forget(place, out, learning, state_names(run))
        fresh = _fresh(live, seed)
        fingerprint = _fingerprint(run, live, learning, start)
        kept = _read_state(place, fingerprint, fresh)
        # Nothing is known yet of files whose first rows were killed on their way to the state.
        unread = place.exists() and not kept.read
        handle = _opened(out, int(kept.written), unread, files) if isinstance(out, Path) else out
        watch = None
        if isinstance(live, rd.online.LaggedLearner) and learning is not None:
            watch = _watching(live, learning, fresh, kept, unread, files)
        if place.exists():
            timed = run.layout["time"] is not None
            known = "rows that it knows are skipped" if timed else "rows without a time are all new"
            say(Notice(f"Going on from {place}: {known}; ", RESTART, " begins anew."))
        else:
            say(start.words)
            if start.rows is not None:
                kept = _read_before(run, live, learning, kept, start.rows, seed)
        owned = handle is not out
        session = _Session(run, live, place, fingerprint, handle, owned, watch, say, lock)
        kept, count = session.answer(source, kept, as_json)
        if flush and kept.read:
            handle.write(written(_remaining(live, kept), session.names, as_json))
            handle.flush()
        if watch is not None:
            watch.show(kept.live, last=True)
            if watch.learning.save_run is not None:
                _save_run(run, watch, kept, watch.learning.save_run)
    return count


def state_place(run: Run, lag: int, learning: Learning | None = None) -> Path:
    """Where the state of a stream is kept unless a place is named.

    Args:
        run: the run.
        lag: how many rows a smoothed row waits for.
        learning: what is learned.
    """
    what = "" if learning is None else f"-{learning.what}"
    return run.path / f"stream-{lag}{what}.rd"


def _watching(
    live: rd.online.LaggedLearner,
    learning: Learning,
    fresh: Kept,
    kept: Kept,
    unread: bool,
    files: ExitStack,
) -> Watch:
    watched, history = Watched(*kept.watched), None
    figure, known = learning.figure, int(watched.noted)
    if figure is not None and figure.exists() and not (known or unread):
        raise RunError(f"{figure} exists, and is not of this stream; name another.")
    if learning.history is not None:
        history = _opened(learning.history, known, unread, files)
    return Watch(live, learning, fresh.live, watched, history)


class _Lock:
    """Keeps two processes from going on with one state; it ends with its process.

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
        handle = self.files.enter_context(
            open(self.place.with_name(f".{self.place.name}.lock"), "ab")
        )
        try:
            hold(handle.fileno())
        except BlockingIOError as error:
            raise RunError(
                f"{self.place} is in use by another process; end it, or name another state by"
                " --state."
            ) from error
        if self._stamp() != self.before:
            raise RunError(f"{self.place} was changed by another process; start again.")
        self.taken = True

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self.place.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


class _Session:
    """What answers the rows of one source, and keeps the state meanwhile.

    Args:
        run: the run.
        live: what answers the rows.
        place: the file of the state.
        fingerprint: what the state is of.
        handle: where answers go.
        owned: whether that is a file that is cut back when the stream goes on.
        watch: who follows what is learned.
        say: a callback for messages.
        lock: taken before anything is written.
    """

    def __init__(
        self,
        run: Run,
        live: Live,
        place: Path,
        fingerprint: str,
        handle: Any,
        owned: bool,
        watch: Watch | None,
        say: Callable[[str], None],
        lock: "_Lock",
    ):
        self.layout, self.names, self.live = run.layout, state_names(run), live
        self.place, self.fingerprint = place, fingerprint
        self.handle, self.owned, self.watch, self.say = handle, owned, watch, say
        self.lock = lock

    def answer(self, source: Any, kept: Kept, as_json: bool) -> tuple[Kept, int]:
        """Answers all rows; what is to be kept, and how many there were."""
        reader: data.LiveReader | None = None
        last = None if not kept.waiting.size else _as_time(kept.last, kept)
        count, reported, saved = 0, False, time.monotonic()
        untitled = not as_json and not (self.owned and self.handle.tell())
        for lines in arriving(source):
            if reader is None:
                reader = data.LiveReader(self.layout, lines.pop(0), last=last)
            rows = reader.read(lines)
            if len(rows.times) and not reported:
                self.report(reader)
                reported = True
                self.lock.take()
            if not count and len(rows.times) and not self.place.exists():
                # Before any answer: a file of answers without a state would be somebody else's.
                kept = self.save(kept)
            if untitled and len(rows.times):
                self.handle.write(header(self.names))
                untitled = False
                if self.owned and kept.read:  # a file that begins later than the stream
                    kept = self.save(kept)
            for begin, end in self.cuts(kept, len(rows.times)):
                part = rows.cut(begin, end)
                kept, answers, out = _advanced(self.live, kept, part)
                self.handle.write(written(answers, self.names, as_json))
                count += len(part.times)
                if self.watch is not None:
                    self.watch.saw(kept.live, part, out.elbo_increment, out.skipped)
                    self.watch.show(kept.live)
                self.handle.flush()
                if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                    kept, saved = self.save(kept), time.monotonic()
        if reader is not None and not reported:
            self.report(reader)
        if count:
            kept = self.save(kept)
        elif untitled and not self.owned:
            self.handle.write(header(self.names))
        return kept, count

    def report(self, reader: data.LiveReader) -> None:
        """Report how many rows were skipped, if any."""
        if reader.skipped:
            last = as_texts(np.atleast_1d(reader.resumed))[0]
            self.say(
                f"Skipped {reader.skipped} rows: they are not later than {last}, the last one."
            )

    def cuts(self, kept: Kept, count: int) -> Iterator[tuple[int, int]]:
        """Where rows are cut: into chunks, and where a line of the history is due."""
        begin = 0
        read = 0 if self.watch is None else int(kept.live.learner.num_read)
        while begin < count:
            room = CHUNK
            if self.watch is not None and self.watch.history is not None:
                every = self.watch.learning.history_every
                room = min(CHUNK, every - (read + begin) % every)
            end = min(begin + room, count)
            yield begin, end
            begin = end

    def save(self, kept: Kept) -> Kept:
        """Keeps the state, after the answers that it stands for."""
        if self.owned:
            _refuse_removed(self.handle)
            self.handle.flush()
            os.fsync(self.handle.fileno())
            kept = kept._replace(written=np.asarray(self.handle.tell()))
        if self.watch is not None:
            if self.watch.history is not None:
                _refuse_removed(self.watch.history)
            kept = kept._replace(watched=tuple(self.watch.keep()))
        try:
            rd.save(self.place, (tuple(_packed(self.live, kept)), self.fingerprint))
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(self.place)
            raise
        return kept


def _save_run(run: Run, watch: Watch, kept: Kept, out: Path) -> None:
    """Makes a new run of what was learned."""
    if not kept.read:
        raise RunError("No row was read, and nothing learned: there is no run to save.")
    adopt(
        run,
        watch.live.model(kept.live),
        watch.live.family(kept.live),
        out,
        learning=watch.learning,
        num_rows=int(kept.live.learner.num_read),
        nats_a_row=watch.elbo,
        last=as_texts(np.atleast_1d(_as_time(kept.last, kept)))[0],
    )


def _advanced(live: Live, kept: Kept, rows: data.Rows) -> tuple[Kept, Answers, Any]:
    """Reads at most a chunk of rows; the state after them, their answers, and all that was said."""
    count = len(rows.times)
    padding = ((0, CHUNK - count), (0, 0))
    ys = np.pad(rows.ys, padding)
    us = None if rows.inputs is None else np.pad(rows.inputs, padding, mode="edge")
    state, out = live.scan(kept.live, ys, inputs=us, length=count)
    dates = rows.times.dtype.kind == "M"
    numbers = rows.times.astype(np.int64) if dates else rows.times
    every = np.concatenate([kept.waiting, numbers]) if kept.waiting.size else numbers
    begin = len(every) - count
    behind = np.maximum(begin + np.arange(count) - live.lag, 0)
    ready = np.asarray(out.ready)[:count]
    now = kept._replace(
        live=state,
        last=every[-1],
        dates=np.asarray(dates),
        waiting=every[-live.lag :],
        read=kept.read + count,
    )
    answers = Answers(
        rows.times,
        _moments(out.filtered, count),
        _as_time(every[behind], now),
        _moments(out.smoothed, count),
        ready,
    )
    return now, answers, out


def _moments(found: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    covariance = np.asarray(found.covariance)[:count]
    std = np.sqrt(np.maximum(np.diagonal(covariance, axis1=1, axis2=2), 0.0))
    return np.asarray(found.mean)[:count], std


def _remaining(live: Live, kept: Kept) -> Answers:
    """The rows that nothing came after, given all of them."""
    found = live.flush(kept.live)
    ready = np.asarray(found.ready)
    mean, std = _moments(found.smoothed, len(ready))
    times = _as_time(kept.waiting, kept)
    count = len(times)
    moments = (mean[-count:], std[-count:])
    return Answers(times, None, times, moments, np.ones(count, bool))


def _as_time(values: Any, kept: Kept) -> Any:
    values = np.asarray(values)
    return values.astype(np.int64).astype("datetime64[us]") if bool(kept.dates) else values


def _start(run: Run, after: data.Table | Literal["fit", "prior"]) -> Start:
    """Find the rows that a stream starts after.

    Raises:
        RunError: if there are none, or if the run is of several series.
    """
    if run.layout["series"]:
        raise RunError(
            f"{run.path} is a run of several series, and rows are answered as they come for one"
            " series; fit one series alone."
        )
    if isinstance(after, str):
        if after == "prior":
            words = "Starting from the prior of the model: no row before the first is known."
            return Start(None, None, words)
        rows, fingerprint, of = (
            run.rows(),
            run.record["data"]["sha256"],
            "that the run was fitted to",
        )
        if rows is None:
            raise RunError(
                f"{run.path} does not hold the rows before the stream; give them with ",
                Argument("after"),
                ", a table of all rows up to now, or start from the prior with ",
                Argument("after", "prior"),
                ".",
            )
    else:
        rows, fingerprint = data.Rows.of_table(after), after.summary.fingerprint
        of = f"of {after.source}"
        if rows is None:
            raise RunError(f"{after.source} has several series; give a table of one.")
    last = as_texts(rows.times[-1:])[0]
    count = len(rows.times)
    words = Notice(
        f"Starting after the {count} rows {of}, up to {last}; ",
        Argument("after", "prior"),
        " leaves them out.",
    )
    return Start(rows, fingerprint, words)


def _read_before(
    run: Run, live: Live, learning: Learning | None, fresh: Kept, rows: data.Rows, seed: int
) -> Kept:
    """Read the rows before a stream, which are neither answered nor learned from.

    A learner reads them with steps of zero, so that its gradients go on from them too.
    """
    kept, still = fresh, live
    if learning is not None:
        at_rest = dataclasses.replace(learning, rate=0.0, schedule="constant")
        still = at_rest.learner(run, live.lag)
        kept = fresh._replace(live=still.init(jax.random.key(seed)))
    for begin in range(0, len(rows.times), CHUNK):
        kept, _, _ = _advanced(still, kept, rows.cut(begin, begin + CHUNK))
    if learning is not None:
        learner = dataclasses.replace(fresh.live.learner, gradient=kept.live.learner.gradient)
        learner = dataclasses.replace(fresh.live, learner=learner, lag=kept.live.lag)
        kept = kept._replace(live=learner)
    return kept._replace(read=fresh.read)


def _fingerprint(run: Run, live: Live, learning: Learning | None, start: Start) -> str:
    fixed = live if isinstance(live, rd.online.FixedLag) else live.live
    settings: list[Any] = [run.record["files"], fixed.lag, fixed.num_samples, start.fingerprint]
    if learning is not None:
        settings.append(learning.settings)
    return json.dumps(settings, sort_keys=True)


def _fresh(live: Live, seed: int) -> Kept:
    """Before the first row."""
    return Kept(
        live.init(jax.random.key(seed)),
        np.zeros(()),
        np.zeros((), bool),
        np.zeros(0),
        np.zeros((), int),
        np.zeros((), int),
        None if isinstance(live, rd.online.FixedLag) else tuple(Watched.nothing()),
    )


def _packed(live: Live, kept: Kept) -> Kept:
    """What is written: of a learner the arrays alone, as a model may hold functions of a user."""
    if isinstance(live, rd.online.FixedLag):
        return kept
    return kept._replace(live=jax.tree.leaves(kept.live))


def _forget(place: Path, out: Any, learning: Learning | None, names: list[str]) -> None:
    """Removes a state and what its stream wrote: a file of something else is not touched."""
    if not place.exists():
        return
    answers = _emptied(out, (header(names), b'{"time": ')) if isinstance(out, Path) else False
    if learning is not None:
        history = learning.history is not None and _emptied(learning.history, (HISTORY_STARTS,))
        if learning.figure is not None and (answers or history):
            learning.figure.unlink(missing_ok=True)
    place.unlink()


def _emptied(path: Path, starts: tuple[bytes, ...]) -> bool:
    """Empties a file if it begins as one of a stream; whether it did."""
    if not path.exists():
        return False
    with open(path, "r+b") as file:
        ours = file.read(max(map(len, starts))).startswith(starts)
        if ours:
            file.truncate(0)
    return ours


def _remove_empty(path: Path) -> None:
    if path.exists() and not path.stat().st_size:
        path.unlink()


def _read_state(place: Path, fingerprint: str, fresh: Kept) -> Kept:
    if not place.exists():
        return fresh
    try:
        tree = rd.load(place, like=None)
    except rd.CheckpointError as error:
        raise RunError(f"{error} Pass ", RESTART, " to begin anew.") from error
    try:
        fields, found = tree
        kept = Kept(*fields)
    except (TypeError, ValueError) as error:
        raise _other_state(place) from error
    if found != fingerprint:
        raise RunError(
            f"{place} is the state of another run, start or lag, or of other ways to learn; name"
            " another one with ",
            Argument("state"),
            ", or pass ",
            RESTART,
            " to begin anew.",
        )
    if len(fields) != len(Kept._fields):
        raise _other_state(place)
    structure, leaves = jax.tree.structure(fresh.live), jax.tree.leaves(kept.live)
    expected = jax.tree.leaves(fresh.live)
    if not isinstance(kept.live, list) and jax.tree.structure(kept.live) != structure:
        raise _other_state(place)
    if [_form(leaf) for leaf in leaves] != [_form(leaf) for leaf in expected]:
        raise _other_state(place)
    numbers = (kept.last, kept.dates, kept.waiting, kept.written)
    if [np.ndim(number) for number in numbers] != [0, 0, 1, 0] or not all(
        isinstance(number, np.ndarray | np.generic) and number.dtype.kind in "bifu"
        for number in numbers
    ):
        raise _other_state(place)
    if (kept.watched is None) != (fresh.watched is None) or (
        kept.watched is not None
        and jax.tree.map(_form, kept.watched) != jax.tree.map(_form, fresh.watched)
    ):
        raise _other_state(place)
    return kept._replace(live=jax.tree.unflatten(structure, leaves))


def _form(leaf: Any) -> tuple[Any, str]:
    return getattr(leaf, "shape", None), str(getattr(leaf, "dtype", type(leaf)))


def _other_state(place: Path) -> RunError:
    return RunError(
        f"{place} was written by another version of retrodict. Pass ", RESTART, " to begin anew."
    )


def _opened(out: Path, known: int, unread: bool, files: ExitStack) -> Any:
    """A file that is appended to, cut back to what the state knows of.

    A file of which the state knows nothing is somebody else's, unless the state has read no row.
    """
    handle = open(out, "r+b" if out.exists() else "x+b")
    try:
        hold(handle.fileno())
    except BlockingIOError as error:
        handle.close()
        raise RunError(f"{out} is in use by another process; end it, or name another.") from error
    files.callback(_remove_empty, out)  # nothing is left of a stream that answered no row
    files.enter_context(handle)
    size = out.stat().st_size
    if size < known:
        raise RunError(
            f"{out} has {size} bytes, and the state knows of {known}: it is not the file that this"
            " stream was written to. Name that one, or another state with ",
            Argument("state"),
            ".",
        )
    if size and not (known or unread):
        raise RunError(f"{out} exists, and no state says that it is of this stream; name another.")
    handle.truncate(known)
    handle.seek(known)
    return handle


def _refuse_removed(handle: Any) -> None:
    """Refuse to go on with a file that somebody has removed: what is written to it is lost."""
    if not os.fstat(handle.fileno()).st_nlink:
        raise RunError(
            f"{handle.name} was removed while the stream was writing to it. Pass ",
            RESTART,
            " to begin anew.",
        )
