"""Answer rows as they arrive, with a state that survives a restart."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict._errors import Argument, Notice
from retrodict.runs._folder import RunError
from retrodict.runs._learning_monitor import HISTORY_STARTS, Monitor, MonitorState
from retrodict.runs._lines import Answers, arriving, as_texts, header, written
from retrodict.runs._names import state_names
from retrodict.runs._online_options import Learning
from retrodict.runs._record import Run
from retrodict.runs._save_learned import refuse_existing, save_learned
from retrodict.runs._stream_state import (
    Live,
    StateLock,
    StreamState,
    empty_file,
    open_output,
    read_state,
    refuse_removed,
    write_state,
)

CHUNK = 256
"""Rows per call of the compiled program; a shorter chunk is padded."""

SECONDS_BETWEEN_SAVES = 1.0


class Start(NamedTuple):
    """The rows that a stream starts after.

    Attributes:
        rows: the rows; `None` for a start from the prior of the model.
        fingerprint: their fingerprint.
        words: a sentence that describes the start.
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
    """Answer rows of comma-separated values as they arrive.

    The stream continues after the rows that the run was fitted to, or after those of another table:
    the filtered state of its first row is that of the row in a table of both. A gap between them is
    a gap of missing rows. Leading rows that are not later than the last row before the stream are
    skipped, and their number is reported.

    The answer to a row is the filtered state, and the state `lag` rows before given all rows so
    far, which equals the offline smoother on these rows. The state of the stream has a fixed size
    and is written to a file at least every second. After a restart, rows up to the last one that it
    covers are skipped, and the answers continue as if there had been no interruption. If `out` is a
    file it is first truncated to that row, so that it contains every answer once; a reader of a
    pipe may receive the rows of the last second again, with the same answers.

    With `learning`, each row is answered with the present parameters and then learned from. The
    learned parameters and the state of the optimiser are in the same file: an interrupted stream
    that resumes gives the same results to the last bit.

    Args:
        run: the run.
        source: the rows, with a header, in order of time: a file that was opened for bytes.
        out: the destination of answers: such a file, or the path of one that they are appended to.
        lag: the number of rows that a smoothed row waits for.
        state: the file of the state; by default one in the folder of the run.
        flush: whether to answer the last rows too when the source ends: with the file of the state
            this ends the stream.
        seed: the random seed of families that draw.
        as_json: whether an answer is a line of JSON instead of comma-separated values.
        learning: the options of learning from the rows; by default the parameters are fixed.
        restart: whether to start over: the state, and the files that this stream wrote, are
            replaced.
        after: the rows before the first row of the stream: those that the run was `"fit"` to, a
            table that was read with `run.layout`, or none, for a start from the `"prior"` of the
            model. These rows are not answered, and parameters are not learned from them.
        say: a callback for messages: where the stream starts, and how many rows it skips.

    Returns:
        The number of rows answered.

    Raises:
        DataError: if a row cannot be read.
        RunError: if the state is of another run, start, lag, learning or file, or if the run does
            not store the rows that it was fitted to.
    """
    say = say or (lambda _: None)
    start = _start(run, after)
    place = state_place(run, lag, learning) if state is None else state
    live = rd.online.FixedLag(run.smoother, lag) if learning is None else learning.learner(run, lag)
    if learning is not None and learning.save_run is not None:
        refuse_existing(learning.save_run)
    outputs = [out, *((learning.history, learning.figure) if learning else ())]
    for path in (place, *outputs):
        if isinstance(path, Path):
            data.check_target(path, overwrite=True, suffixes=())
    with ExitStack() as files:
        lock = StateLock(place, files)
        # Without output files and rows a state is only read, and another stream may use it.
        if restart or any(isinstance(path, Path) for path in outputs):
            lock.take()
        if restart:
            _forget(place, out, learning, state_names(run))
        fresh = StreamState.initial(live, seed)
        fingerprint = _fingerprint(run, live, learning, start)
        current = read_state(place, fingerprint, fresh)
        # The process may have been killed after its first rows and before their state was written.
        unread = place.exists() and not current.read
        handle = out
        if isinstance(out, Path):
            handle = open_output(out, int(current.written), unread, files)
        monitor = _monitor(run, live, learning, fresh, current, unread, files)
        if place.exists():
            timed = run.layout["time"] is not None
            rows = "rows that it covers are skipped" if timed else "rows without a time are all new"
            say(
                Notice(
                    f"Resuming from {place}: {rows}; ",
                    Argument("restart", True),
                    " starts over.",
                )
            )
        else:
            say(start.words)
            if start.rows is not None:
                current = _read_before(run, live, learning, current, start.rows, seed)
        is_file = handle is not out
        session = _Session(run, live, place, fingerprint, handle, is_file, monitor, say, lock)
        current, count = session.answer(source, current, as_json)
        if flush and current.read:
            handle.write(written(_remaining(live, current), session.names, as_json))
            handle.flush()
        if monitor is not None:
            monitor.show(current.live, last=True)
            if monitor.learning.save_run is not None:
                _save_run(run, monitor, current, monitor.learning.save_run)
    return count


def state_place(run: Run, lag: int, learning: Learning | None = None) -> Path:
    """Return the default file of the state of a stream.

    Args:
        run: the run.
        lag: the number of rows that a smoothed row waits for.
        learning: the options of learning.
    """
    part = "" if learning is None else f"-{learning.what}"
    return run.path / f"stream-{lag}{part}.rd"


def _monitor(
    run: Run,
    live: Live,
    learning: Learning | None,
    fresh: StreamState,
    state: StreamState,
    unread: bool,
    files: ExitStack,
) -> Monitor | None:
    """Return the monitor of a learner, with its history opened."""
    if learning is None or not isinstance(live, rd.online.LaggedLearner):
        return None
    stored, history = MonitorState(*state.monitor), None
    figure, num_bytes = learning.figure, int(stored.noted)
    if figure is not None and figure.exists() and not (num_bytes or unread):
        raise RunError(f"{figure} exists, and is not of this stream; name another.")
    if learning.history is not None:
        history = open_output(learning.history, num_bytes, unread, files)
    return Monitor(live, learning, run.layout["columns"], fresh.live, stored, history)


class _Session:
    """A loop that answers the rows of one source and regularly saves the state.

    Args:
        run: the run.
        live: the smoother.
        place: the file of the state.
        fingerprint: the fingerprint of the state.
        handle: the destination of answers.
        is_file: whether that is a file, which is truncated when the stream resumes.
        monitor: the monitor of a learner.
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
        is_file: bool,
        monitor: Monitor | None,
        say: Callable[[str], None],
        lock: StateLock,
    ):
        self.layout, self.names, self.live = run.layout, state_names(run), live
        self.place, self.fingerprint, self.lock, self.say = place, fingerprint, lock, say
        self.handle, self.is_file, self.monitor = handle, is_file, monitor

    def answer(self, source: Any, state: StreamState, as_json: bool) -> tuple[StreamState, int]:
        """Answer all rows; return the state after them and their number."""
        reader: data.LiveReader | None = None
        last = None if not state.waiting.size else state.as_time(state.last)
        count, reported, saved = 0, False, time.monotonic()
        needs_header = not as_json and not (self.is_file and self.handle.tell())
        for lines in arriving(source):
            if reader is None:
                reader = data.LiveReader(self.layout, lines.pop(0), last=last)
            rows = reader.read(lines)
            if len(rows.times) and not reported:
                self.report_skipped(reader)
                reported = True
                self.lock.take()
            if not count and len(rows.times) and not self.place.exists():
                # Before any answer: a file of answers without a state would be refused later.
                state = self.save(state)
            if needs_header and len(rows.times):
                self.handle.write(header(self.names))
                needs_header = False
                if self.is_file and state.read:  # a file that begins later than the stream
                    state = self.save(state)
            for begin, end in self.chunks(state, len(rows.times)):
                chunk = rows.cut(begin, end)
                state, answers, output = _advance(self.live, state, chunk)
                self.handle.write(written(answers, self.names, as_json))
                count += len(chunk.times)
                if self.monitor is not None:
                    self.monitor.record(state.live, chunk, output.elbo_increment, output.skipped)
                    self.monitor.show(state.live)
                self.handle.flush()
                if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                    state, saved = self.save(state), time.monotonic()
        if reader is not None and not reported:
            self.report_skipped(reader)
        if count:
            state = self.save(state)
        elif needs_header and not self.is_file:
            self.handle.write(header(self.names))
        return state, count

    def report_skipped(self, reader: data.LiveReader) -> None:
        """Report how many rows were skipped, if any."""
        if reader.skipped:
            last = as_texts(np.atleast_1d(reader.resumed))[0]
            self.say(
                f"Skipped {reader.skipped} rows: they are not later than {last}, the last one."
            )

    def chunks(self, state: StreamState, count: int) -> Iterator[tuple[int, int]]:
        """Yield the ends of chunks, which also end where a line of the history is due."""
        begin = 0
        read = 0 if self.monitor is None else int(state.live.learner.num_read)
        while begin < count:
            size = CHUNK
            if self.monitor is not None and self.monitor.history is not None:
                every = self.monitor.learning.history_every
                size = min(CHUNK, every - (read + begin) % every)
            end = min(begin + size, count)
            yield begin, end
            begin = end

    def save(self, state: StreamState) -> StreamState:
        """Write the state, after the answers that it covers."""
        if self.is_file:
            refuse_removed(self.handle)
            self.handle.flush()
            os.fsync(self.handle.fileno())
            state = state._replace(written=np.asarray(self.handle.tell()))
        if self.monitor is not None:
            if self.monitor.history is not None:
                refuse_removed(self.monitor.history)
            state = state._replace(monitor=tuple(self.monitor.save()))
        write_state(self.place, self.live, state, self.fingerprint)
        return state


def _save_run(run: Run, monitor: Monitor, state: StreamState, out: Path) -> None:
    if not state.read:
        raise RunError("No row was read: there is no learned run to save. Send rows first.")
    save_learned(
        run,
        monitor.live.model(state.live),
        monitor.live.family(state.live),
        out,
        learning=monitor.learning,
        num_rows=int(state.live.learner.num_read),
        nats_per_row=monitor.elbo,
        last=as_texts(np.atleast_1d(state.as_time(state.last)))[0],
    )


def _advance(live: Live, state: StreamState, rows: data.Rows) -> tuple[StreamState, Answers, Any]:
    """Read at most a chunk of rows; return the state after them, their answers and the output."""
    count = len(rows.times)
    padding = ((0, CHUNK - count), (0, 0))
    ys = np.pad(rows.ys, padding)
    us = None if rows.inputs is None else np.pad(rows.inputs, padding, mode="edge")
    live_state, output = live.scan(state.live, ys, inputs=us, length=count)
    dates = rows.times.dtype.kind == "M"
    numbers = rows.times.astype(np.int64) if dates else rows.times
    times = np.concatenate([state.waiting, numbers]) if state.waiting.size else numbers
    behind = np.maximum(len(times) - count + np.arange(count) - live.lag, 0)
    state = state._replace(
        live=live_state,
        last=times[-1],
        dates=np.asarray(dates),
        waiting=times[-live.lag :],
        read=state.read + count,
    )
    answers = Answers(
        rows.times,
        _moments(output.filtered, count),
        state.as_time(times[behind]),
        _moments(output.smoothed, count),
        np.asarray(output.ready)[:count],
    )
    return state, answers, output


def _moments(laws: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    covariance = np.asarray(laws.covariance)[:count]
    std = np.sqrt(np.maximum(np.diagonal(covariance, axis1=1, axis2=2), 0.0))
    return np.asarray(laws.mean)[:count], std


def _remaining(live: Live, state: StreamState) -> Answers:
    """Return the answers of the last rows, smoothed given all rows."""
    output = live.flush(state.live)
    mean, std = _moments(output.smoothed, len(np.asarray(output.ready)))
    times = state.as_time(state.waiting)
    count = len(times)
    return Answers(times, None, times, (mean[-count:], std[-count:]), np.ones(count, bool))


def _start(run: Run, after: data.Table | Literal["fit", "prior"]) -> Start:
    """Return the rows that a stream starts after.

    Raises:
        RunError: if there are none, or if the run is of several series.
    """
    if run.layout["series"]:
        raise RunError(
            f"{run.path} is a run of several series, and a stream has one series; fit a single"
            " series."
        )
    if isinstance(after, str) and after == "prior":
        words = "Starting from the prior of the model, without earlier rows."
        return Start(None, None, words)
    if isinstance(after, str):
        rows, fingerprint = run.rows(), run.record["data"]["sha256"]
        origin = "that the run was fitted to"
        if rows is None:
            raise RunError(
                f"{run.path} does not store the rows before the stream; give them with ",
                Argument("after"),
                ", a table of all rows up to now, or start from the prior with ",
                Argument("after", "prior"),
                ".",
            )
    else:
        rows, fingerprint = data.Rows.of_table(after), after.summary.fingerprint
        origin = f"of {after.source}"
        if rows is None:
            raise RunError(f"{after.source} has several series; give a table of one.")
    last = as_texts(rows.times[-1:])[0]
    words = Notice(
        f"Starting after the {len(rows.times)} rows {origin}, up to {last}; ",
        Argument("after", "prior"),
        " leaves them out.",
    )
    return Start(rows, fingerprint, words)


def _read_before(
    run: Run, live: Live, learning: Learning | None, fresh: StreamState, rows: data.Rows, seed: int
) -> StreamState:
    """Read the rows before a stream, without answering them or learning from them.

    A learner reads them with steps of zero, so that its gradients continue from them too.
    """
    state, reader = fresh, live
    if learning is not None:
        without_steps = dataclasses.replace(learning, rate=0.0, schedule="constant")
        reader = without_steps.learner(run, live.lag)
        state = fresh._replace(live=reader.init(jax.random.key(seed)))
    for begin in range(0, len(rows.times), CHUNK):
        state, _, _ = _advance(reader, state, rows.cut(begin, begin + CHUNK))
    if learning is not None:
        learner = dataclasses.replace(fresh.live.learner, gradient=state.live.learner.gradient)
        learner = dataclasses.replace(fresh.live, learner=learner, lag=state.live.lag)
        state = state._replace(live=learner)
    return state._replace(read=fresh.read)


def _fingerprint(run: Run, live: Live, learning: Learning | None, start: Start) -> str:
    fixed = live if isinstance(live, rd.online.FixedLag) else live.live
    settings: list[Any] = [run.record["files"], fixed.lag, fixed.num_samples, start.fingerprint]
    if learning is not None:
        settings.append(learning.settings)
    return json.dumps(settings, sort_keys=True)


def _forget(place: Path, out: Any, learning: Learning | None, names: list[str]) -> None:
    """Remove a state and the output of its stream, but no other files."""
    if not place.exists():
        return
    answers = isinstance(out, Path) and empty_file(out, (header(names), b'{"time": '))
    if learning is not None:
        history = empty_file(learning.history, (HISTORY_STARTS,))
        if learning.figure is not None and (answers or history):
            learning.figure.unlink(missing_ok=True)
    place.unlink()
