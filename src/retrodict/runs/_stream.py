"""Rows as they come, answered at once, with a state that survives a restart."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict.runs._names import state_names
from retrodict.runs._record import Run, RunError

CHUNK = 256
"""Rows that are read by one compiled program. A shorter chunk is padded to it."""

SECONDS_BETWEEN_SAVES = 1.0


class Kept(NamedTuple):
    """What a stream needs to go on.

    Attributes:
        live: the state of `retrodict.FixedLag`.
        last: the time of the last row, as a number; dates in microseconds.
        dates: whether times are dates.
        waiting: the times of the rows that are not smoothed yet, likewise.
        written: how many bytes were written to the file of answers.
    """

    live: Any
    last: np.ndarray
    dates: np.ndarray
    waiting: np.ndarray
    written: np.ndarray


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
) -> int:
    """Answers rows of comma-separated values as they come.

    Each row is answered by the filtered state, and the state `lag` rows before given all rows so
    far, which is what smoothing these rows offline would say. The state of the stream has a fixed
    size and is kept in a file at least every second. After a restart, rows up to the last that it
    knows are skipped, and what follows is the same as if nothing had happened. If `out` is a file
    it is first cut back to that row, so that it holds every answer once; a reader of a pipe may see
    the rows of the last second again, with the same answers.

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

    Returns:
        How many rows were answered.

    Raises:
        DataError: if a row cannot be read.
        RunError: if the state is of another run, lag or file.
    """
    place = run.path / f"stream-{lag}.rd" if state is None else state
    names = state_names(run)
    live = rd.FixedLag(run.smoother, lag)
    kept = _read_state(place, live, run, seed)
    handle, owned = _opened(out, kept)
    try:
        return _answer(run, live, source, handle, owned, kept, place, names, flush, as_json)
    finally:
        if owned:
            handle.close()


def _answer(
    run: Run,
    live: rd.FixedLag,
    source: Any,
    handle: Any,
    owned: bool,
    kept: Kept,
    place: Path,
    names: list[str],
    flush: bool,
    as_json: bool,
) -> int:
    reader: data.LiveReader | None = None
    last = None if not kept.waiting.size else _as_time(kept.last, kept)
    count, saved = 0, time.monotonic()
    if not as_json and not (owned and handle.tell()):
        handle.write(_header(names))
    for lines in _arriving(source):
        if reader is None:
            reader = data.LiveReader(run.layout, lines.pop(0), last=last)
        rows = reader.read(lines)
        for begin in range(0, len(rows.times), CHUNK):
            part = rows.cut(begin, begin + CHUNK)
            kept, answers = _advanced(live, kept, part)
            handle.write(_written(answers, names, as_json))
            count += len(part.times)
        handle.flush()
        if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
            kept = _save(place, kept, handle, owned, run, live)
            saved = time.monotonic()
    if count:
        kept = _save(place, kept, handle, owned, run, live)
    if flush and kept.waiting.size:
        handle.write(_written(_remaining(live, kept), names, as_json))
        handle.flush()
    return count


def _arriving(source: Any) -> Iterator[list[str]]:
    """Lines as they come: as many as are there, and at least one."""
    rest = b""
    read = getattr(source, "read1", source.read)
    while block := read(1 << 16):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield [_decoded(line) for line in lines]
    if rest.strip():
        yield [_decoded(rest)]


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig").rstrip("\r")
    except UnicodeDecodeError as error:
        raise data.DataError(
            f"standard input: {line[:40]!r} is not UTF-8; send text in UTF-8."
        ) from error


class Answers(NamedTuple):
    """Rows of answers; moments of the smoothed row are NaN before there is one."""

    times: np.ndarray
    filtered: tuple[np.ndarray, np.ndarray] | None
    smoothed_times: np.ndarray
    smoothed: tuple[np.ndarray, np.ndarray]
    ready: np.ndarray


def _advanced(live: rd.FixedLag, kept: Kept, rows: data.Rows) -> tuple[Kept, Answers]:
    """Reads at most a chunk of rows."""
    count = len(rows.times)
    padding = ((0, CHUNK - count), (0, 0))
    ys = np.pad(rows.ys, padding)
    us = None if rows.inputs is None else np.pad(rows.inputs, padding, mode="edge")
    state, out = live.scan(kept.live, ys, inputs=us, length=count)
    dates = rows.times.dtype.kind == "M"
    numbers = rows.times.astype(np.int64) if dates else rows.times
    every = np.concatenate([kept.waiting.astype(numbers.dtype), numbers])
    begin = len(every) - count
    behind = np.maximum(begin + np.arange(count) - live.lag, 0)
    ready = np.asarray(out.ready)[:count]
    now = Kept(state, every[-1], np.asarray(dates), every[-live.lag :], kept.written)
    return now, Answers(
        rows.times,
        _moments(out.filtered, count),
        _as_time(every[behind], now),
        _moments(out.smoothed, count),
        ready,
    )


def _moments(found: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    covariance = np.asarray(found.covariance)[:count]
    std = np.sqrt(np.maximum(np.diagonal(covariance, axis1=1, axis2=2), 0.0))
    return np.asarray(found.mean)[:count], std


def _remaining(live: rd.FixedLag, kept: Kept) -> Answers:
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


def _header(names: list[str]) -> bytes:
    parts = ["time", *(f"{name}_{what}" for name in names for what in ("mean", "std"))]
    parts += ["smoothed_time"]
    parts += [f"{name}_smoothed_{what}" for name in names for what in ("mean", "std")]
    return (",".join(parts) + "\n").encode()


def _written(answers: Answers, names: list[str], as_json: bool) -> bytes:
    lines = []
    times = _texts(answers.times)
    behind = _texts(answers.smoothed_times)
    smoothed = _interleaved(answers.smoothed)
    filtered = None if answers.filtered is None else _interleaved(answers.filtered)
    empty = [None] * (2 * len(names))
    for i, stamp in enumerate(times):
        now = empty if filtered is None else filtered[i]
        later = [behind[i], *smoothed[i]] if answers.ready[i] else [None, *empty]
        lines.append((stamp, now, later))
    if not as_json:
        rows = ([stamp, *now, *later] for stamp, now, later in lines)
        return "".join(
            ",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in rows
        ).encode()
    return "".join(
        json.dumps(
            {
                "time": stamp,
                "filtered": None if filtered is None else _by_name(names, now),
                "smoothed_time": later[0],
                "smoothed": None if later[0] is None else _by_name(names, later[1:]),
            }
        )
        + "\n"
        for stamp, now, later in lines
    ).encode()


def _by_name(names: list[str], cells: list[Any]) -> dict[str, dict[str, float]]:
    return {name: {"mean": cells[2 * i], "std": cells[2 * i + 1]} for i, name in enumerate(names)}


def _interleaved(moments: tuple[np.ndarray, np.ndarray]) -> list[list[float]]:
    """Means and deviations side by side, to ten digits.

    How rows are cut into chunks changes the last of the sixteen digits, and must not be seen.
    """
    rows = np.stack(moments, axis=-1).reshape(len(moments[0]), -1).tolist()
    return [[float(f"{cell:.10g}") for cell in row] for row in rows]


def _texts(times: np.ndarray) -> list[str]:
    if times.dtype.kind == "M":
        return [str(stamp).removesuffix(".000000") for stamp in times]
    return [repr(stamp) for stamp in times.tolist()]


def _fingerprint(run: Run, live: rd.FixedLag) -> str:
    return json.dumps([run.record["files"], live.lag, live.num_samples], sort_keys=True)


def _read_state(place: Path, live: rd.FixedLag, run: Run, seed: int) -> Kept:
    fresh = Kept(
        live.init(jax.random.key(seed)),
        np.zeros(()),
        np.zeros((), bool),
        np.zeros(0),
        np.zeros((), int),
    )
    if not place.exists():
        return fresh
    try:
        kept, fingerprint = rd.load(place, like=None)
    except rd.CheckpointError as error:
        raise RunError(f"{place}: {error} Remove it to begin anew.") from error
    if fingerprint != _fingerprint(run, live):
        raise RunError(
            f"{place} is the state of another run or lag; name another one by --state, or remove it"
            " to begin anew."
        )
    return Kept(*kept)


def _save(place: Path, kept: Kept, handle: Any, owned: bool, run: Run, live: rd.FixedLag) -> Kept:
    """Keeps the state, after the answers that it stands for."""
    if owned:
        handle.flush()
        os.fsync(handle.fileno())
        kept = kept._replace(written=np.asarray(handle.tell()))
    rd.save(place, (tuple(kept), _fingerprint(run, live)))
    return kept


def _opened(out: Any, kept: Kept) -> tuple[Any, bool]:
    """Where answers go; a file is cut back to what the state knows of."""
    if not isinstance(out, Path):
        return out, False
    known = int(kept.written)
    size = out.stat().st_size if out.exists() else 0
    if size < known:
        raise RunError(
            f"{out} has {size} bytes, and the state knows of {known}: it is not the file that this"
            " stream was written to. Name that one, or another state by --state."
        )
    if size and not kept.waiting.size:
        raise RunError(f"{out} exists, and no state says that it is of this stream; name another.")
    handle = open(out, "r+b" if size else "wb")
    handle.truncate(known)
    handle.seek(known)
    return handle, True
