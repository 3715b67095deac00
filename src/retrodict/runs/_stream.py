"""Answer rows as they arrive, with a state that survives a restart."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict._interface import Argument, Notice
from retrodict.runs._record import RunError
from retrodict.runs._run import Run, shown_states, state_names
from retrodict.runs._stream_files import (
    MonitorState,
    OutputFile,
    OutputPipe,
    Smoother,
    StateLock,
    StreamState,
    empty_file,
    read_state,
    write_state,
)
from retrodict.runs._stream_learning import HISTORY_STARTS, Learning, Monitor, refuse_existing
from retrodict.runs._stream_lines import Answers, Shown, as_lines, as_texts, header

CHUNK = 256
"""Rows per call of the compiled program; a shorter chunk is padded."""

SECONDS_BETWEEN_SAVES = 1.0

MAX_LINE_BYTES = 1 << 24
"""The largest number of bytes of a line; input without an end of line would fill the memory."""


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
    all_states: bool = False,
    learning: Learning | None = None,
    restart: bool = False,
    after: data.Table | Literal["fit", "prior"] = "fit",
    notify: Callable[[str], None] | None = None,
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

    Example:
        >>> import io, tempfile, pandas as pd, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> later = pd.DataFrame({"year": [1881, 1882], "flow": [1100, 1150]})
        >>> answers = io.BytesIO()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        ...     later.to_csv(f"{folder}/new.csv", index=False)
        ...     with open(f"{folder}/new.csv", "rb") as source:
        ...         rd.runs.stream(run, source, answers, lag=1)
        2
        >>> answers.getvalue().decode().splitlines()[0]
        'time,level_mean,level_std,smoothed_time,level_smoothed_mean,level_smoothed_std'

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
        all_states: whether answers have the states that only store earlier values of others.
        learning: the options of learning from the rows; by default the parameters are fixed.
        restart: whether to start over: the state, and the files that this stream wrote, are
            replaced.
        after: the rows before the first row of the stream: those that the run was `"fit"` to, a
            table that was read with `run.layout`, or none, for a start from the `"prior"` of the
            model. These rows are not answered, and parameters are not learned from them.
        notify: a callback for messages: where the stream starts, and how many rows it skips.

    Returns:
        The number of rows answered.

    Raises:
        DataError: if a row cannot be read.
        RunError: if the state is of another run, start, lag, learning or file, or if the run does
            not store the rows that it was fitted to.
    """
    notify = notify or (lambda _: None)
    if run.has_regimes:
        raise RunError(
            f"{run.path} is a run of {run.spec.reference}, a model with regimes, which a stream"
            " does not support. Append the rows to the table and smooth it: retrodict smooth"
            f" {run.path} DATA."
        )
    rows_before, fingerprint_before, words = _start(run, after)
    state_path = default_state_path(run, lag, learning) if state is None else state
    smoother = (
        rd.online.FixedLag(run.smoother, lag) if learning is None else learning.learner(run, lag)
    )
    paths = [state_path, out]
    if learning is not None:
        paths += [learning.history, learning.figure]
        if learning.save_run is not None:
            refuse_existing(learning.save_run)
    for path in paths:
        if isinstance(path, Path):
            data.check_target(path, overwrite=True, suffixes=())
    indices, names = shown_states(run, every=all_states), state_names(run)
    shown = Shown(indices, [names[index] for index in indices])
    first_line = b"" if as_json else header(shown.names)
    with ExitStack() as files:
        lock = StateLock(state_path, files)
        # Without output files and rows a state is only read, and another stream may use it.
        if restart or any(isinstance(path, Path) for path in paths[1:]):
            lock.take()
        if restart:
            _forget(state_path, out, learning, (header(names), header(shown.names)))
        fingerprint = _fingerprint(run, smoother, learning, fingerprint_before)
        fresh = StreamState.initial(smoother, seed)
        current = read_state(state_path, fingerprint, fresh)
        # The process may have been killed after its first rows and before their state was written.
        is_empty = state_path.exists() and not current.num_rows
        answers, monitor = OutputPipe(out, first_line), None
        if isinstance(out, Path):
            answers = OutputFile(out, first_line, int(current.output_bytes), is_empty, files)
        if learning is not None and isinstance(smoother, rd.online.LaggedLearner):
            stored = MonitorState(*current.monitor)
            monitor = Monitor(run, smoother, learning, fresh.smoother, stored, is_empty, files)
        if state_path.exists():
            timed = run.layout["time"] is not None
            rows = "rows that it covers are skipped" if timed else "rows without a time are all new"
            text = f"Resuming from {state_path}: {rows}; {{restart}} starts over."
            notify(Notice(text, restart=True))
        else:
            notify(words)
            current = _read_before(run, smoother, learning, current, rows_before, seed)
        session = _Session(
            run.layout,
            shown,
            smoother,
            current,
            state_path,
            fingerprint,
            answers,
            monitor,
            lock,
            notify,
            as_json,
        )
        count = session.answer(source)
        session.finish(flush=flush)
    return count


def default_state_path(run: Run, lag: int, learning: Learning | None = None) -> Path:
    """Return the default file of the state of a stream.

    Args:
        run: the run.
        lag: the number of rows that a smoothed row waits for.
        learning: the options of learning.
    """
    part = "" if learning is None else f"-{learning.what}"
    return run.path / f"stream-{lag}{part}.rd"


@dataclasses.dataclass
class _Session:
    """One call of `stream`.

    Attributes:
        layout: the layout of the table that the run was fitted to.
        shown: the states in the answers.
        smoother: the smoother.
        state: the state of the stream.
        state_path: the file of the state.
        fingerprint: the fingerprint of the state.
        answers: the destination of answers.
        monitor: the monitor of a learner.
        lock: the lock of the state, taken before anything is written.
        notify: a callback for messages.
        as_json: whether an answer is a line of JSON.
    """

    layout: dict[str, Any]
    shown: Shown
    smoother: Smoother
    state: StreamState
    state_path: Path
    fingerprint: str
    answers: OutputFile | OutputPipe
    monitor: Monitor | None
    lock: StateLock
    notify: Callable[[str], None]
    as_json: bool

    def answer(self, source: Any) -> int:
        """Answer all rows; return their number."""
        reader, count, saved = None, 0, time.monotonic()
        last = self.state.as_time(self.state.last_time) if self.state.pending_times.size else None
        for lines in arriving(source):
            if reader is None:
                reader = data.LiveReader(self.layout, lines.pop(0), last=last)
            rows = reader.read(lines)
            if len(rows.times) and not count:
                self.report_skipped(reader)
                self.begin()
            while num_rows := len(rows.times):
                size = min(CHUNK, num_rows)
                if self.monitor is not None:
                    size = self.monitor.rows_to_line(self.state.smoother, size)
                chunk, rows = rows.cut(0, size), rows.cut(size, num_rows)
                self.state, answers, output = _advance(self.smoother, self.state, chunk)
                self.write(answers)
                count += size
                if self.monitor is not None:
                    self.monitor.record(self.state.smoother, chunk, output)
                if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                    self.save()
                    saved = time.monotonic()
        if count:
            self.save()
        else:
            if reader is not None:
                self.report_skipped(reader)
            if isinstance(self.answers, OutputPipe):
                self.answers.write(b"")
        return count

    def begin(self) -> None:
        """Lock the state, and write it before any answer and after a new header.

        A file of answers without a state that covers its header would be refused later.
        """
        self.lock.take()
        if not self.state_path.exists():
            self.save()
        self.answers.write(b"")
        if self.state.num_rows:
            self.save()

    def finish(self, *, flush: bool) -> None:
        """Answer the last rows if the stream ends, and write what was learned."""
        state, monitor = self.state, self.monitor
        if flush and state.num_rows:
            self.write(_remaining(self.smoother, state))
        if monitor is None:
            return
        monitor.show(state.smoother, last=True)
        if monitor.learning.save_run is not None:
            if not state.num_rows:
                raise RunError("No row was read: there is no learned run to save. Send rows first.")
            last = as_texts(np.atleast_1d(state.as_time(state.last_time)))[0]
            monitor.save_run(monitor.learning.save_run, state.smoother, last)

    def write(self, answers: Answers) -> None:
        """Write answers and pass them on."""
        self.answers.write(as_lines(answers, self.shown, self.as_json))
        self.answers.flush()

    def report_skipped(self, reader: data.LiveReader) -> None:
        """Report how many rows were skipped, if any."""
        if reader.skipped:
            last = as_texts(np.atleast_1d(reader.resumed))[0]
            self.notify(
                f"Skipped {reader.skipped} rows: they are not later than {last}, the last one."
            )

    def save(self) -> None:
        """Write the state, after the answers that it covers."""
        if isinstance(self.answers, OutputFile):
            self.state = self.state._replace(output_bytes=np.asarray(self.answers.save()))
        if self.monitor is not None:
            self.state = self.state._replace(monitor=tuple(self.monitor.save()))
        write_state(self.state_path, self.smoother, self.state, self.fingerprint)


def arriving(source: Any) -> Iterator[list[str]]:
    """Yield lines as they arrive: as many as are available, and at least one.

    Raises:
        DataError: if a line is not UTF-8, or too long.
    """
    rest = b""
    read = getattr(source, "read1", source.read)
    while block := read(1 << 16):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield [_decoded(line) for line in lines]
        if len(rest) > MAX_LINE_BYTES:
            raise data.DataError(
                f"standard input: a line has more than {MAX_LINE_BYTES} bytes; send rows of text."
            )
    if rest.strip():
        yield [_decoded(rest)]


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig").rstrip("\r")
    except UnicodeDecodeError as error:
        raise data.DataError(
            f"standard input: {line[:40]!r} is not UTF-8; send text in UTF-8."
        ) from error


def _advance(
    smoother: Smoother, state: StreamState, rows: data.Rows
) -> tuple[StreamState, Answers, Any]:
    """Read at most a chunk of rows; return the state after them, their answers and the output."""
    count = len(rows.times)
    padding = ((0, CHUNK - count), (0, 0))
    ys = np.pad(rows.ys, padding)
    us = None if rows.inputs is None else np.pad(rows.inputs, padding, mode="edge")
    after, output = smoother.scan(state.smoother, ys, inputs=us, length=count)
    dates = rows.times.dtype.kind == "M"
    numbers = rows.times.astype(np.int64) if dates else rows.times
    times = np.concatenate([state.pending_times, numbers]) if state.pending_times.size else numbers
    behind = np.maximum(len(times) - count + np.arange(count) - smoother.lag, 0)
    state = state._replace(
        smoother=after,
        last_time=times[-1],
        has_dates=np.asarray(dates),
        pending_times=times[-smoother.lag :],
        num_rows=state.num_rows + count,
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


def _remaining(smoother: Smoother, state: StreamState) -> Answers:
    """Return the answers of the last rows, smoothed given all rows."""
    output = smoother.flush(state.smoother)
    mean, std = _moments(output.smoothed, len(np.asarray(output.ready)))
    times = state.as_time(state.pending_times)
    count = len(times)
    return Answers(times, None, times, (mean[-count:], std[-count:]), np.ones(count, bool))


def _start(
    run: Run, after: data.Table | Literal["fit", "prior"]
) -> tuple[data.Rows | None, str | None, str]:
    """Return the rows that a stream starts after, their fingerprint, and a notice.

    Raises:
        RunError: if there are none, or if the run is of several series.
    """
    if run.layout["series"]:
        raise RunError(
            f"{run.path} is a run of several series, and a stream has one series; fit a single"
            " series."
        )
    if isinstance(after, data.Table):
        rows, fingerprint = data.Rows.of_table(after), after.summary.fingerprint
        origin = f"of {after.source}"
        if rows is None:
            raise RunError(f"{after.source} has several series; give a table of one.")
    elif after == "prior":
        return None, None, "Starting from the prior of the model, without earlier rows."
    else:
        rows, fingerprint = run.rows(), run.record["data"]["sha256"]
        origin = "that the run was fitted to"
        if rows is None:
            raise RunError(
                f"{run.path} does not store the rows before the stream; give them with {{after}},"
                f" a table of all rows up to now, or start from the prior with {{prior}}.",
                after=...,
                prior=Argument("after", "prior"),
            )
    last = as_texts(rows.times[-1:])[0]
    words = f"Starting after the {len(rows.times)} rows {origin}, up to {last};"
    return rows, fingerprint, Notice(f"{words} {{after}} leaves them out.", after="prior")


def _read_before(
    run: Run,
    smoother: Smoother,
    learning: Learning | None,
    fresh: StreamState,
    rows: data.Rows | None,
    seed: int,
) -> StreamState:
    """Read the rows before a stream, without answering them or learning from them.

    A learner reads them with steps of zero, so that its gradients continue from them too.
    """
    if rows is None:
        return fresh
    state, reader = fresh, smoother
    if learning is not None:
        without_steps = dataclasses.replace(learning, rate=0.0, schedule="constant")
        reader = without_steps.learner(run, smoother.lag)
        state = fresh._replace(smoother=reader.init(jax.random.key(seed)))
    for begin in range(0, len(rows.times), CHUNK):
        state, _, _ = _advance(reader, state, rows.cut(begin, begin + CHUNK))
    if learning is not None:
        learner = dataclasses.replace(
            fresh.smoother.learner, gradient=state.smoother.learner.gradient
        )
        learner = dataclasses.replace(fresh.smoother, learner=learner, lag=state.smoother.lag)
        state = state._replace(smoother=learner)
    return state._replace(num_rows=fresh.num_rows)


def _fingerprint(
    run: Run, smoother: Smoother, learning: Learning | None, fingerprint_before: str | None
) -> str:
    """Return what the state of a stream depends on."""
    fixed = smoother if isinstance(smoother, rd.online.FixedLag) else smoother.live
    settings: list[Any] = [run.record["files"], fixed.lag, fixed.num_samples, fingerprint_before]
    if learning is not None:
        settings.append(learning.settings)
    return json.dumps(settings, sort_keys=True)


def _forget(
    state_path: Path, out: Any, learning: Learning | None, headers: tuple[bytes, ...]
) -> None:
    """Remove a state and the output of its stream, but no other files."""
    if not state_path.exists():
        return
    answers = isinstance(out, Path) and empty_file(out, (*headers, b'{"time": '))
    if learning is not None:
        history = empty_file(learning.history, HISTORY_STARTS)
        if learning.figure is not None and (answers or history):
            learning.figure.unlink(missing_ok=True)
    state_path.unlink()
