"""Lines of a stream: rows that are read, and answers that are written."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from retrodict import data
from retrodict._workspace import as_csv

LONGEST_LINE = 1 << 24
"""The largest number of bytes of a line; input without an end of line would fill the memory."""


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
        if len(rest) > LONGEST_LINE:
            raise data.DataError(
                f"standard input: a line has more than {LONGEST_LINE} bytes; send rows of text."
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


class Answers(NamedTuple):
    """Answers to rows: filtered moments, and smoothed moments of earlier rows where `ready`."""

    times: np.ndarray
    filtered: tuple[np.ndarray, np.ndarray] | None
    smoothed_times: np.ndarray
    smoothed: tuple[np.ndarray, np.ndarray]
    ready: np.ndarray


def header(names: list[str]) -> bytes:
    """Return the header of a file of answers."""
    parts = ["time", *(f"{name}_{what}" for name in names for what in ("mean", "std"))]
    parts += ["smoothed_time"]
    parts += [f"{name}_smoothed_{what}" for name in names for what in ("mean", "std")]
    return as_csv(parts, [])


def written(answers: Answers, names: list[str], as_json: bool) -> bytes:
    """Return answers as lines of comma-separated values or of JSON."""
    lines = []
    times = as_texts(answers.times)
    behind = as_texts(answers.smoothed_times)
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
    """Return means and standard deviations in turn, rounded to ten digits.

    The last of the sixteen digits depends on how rows are cut into chunks; answers must not.
    """
    rows = np.stack(moments, axis=-1).reshape(len(moments[0]), -1).tolist()
    return [[float(f"{cell:.10g}") for cell in row] for row in rows]


def as_texts(times: np.ndarray) -> list[str]:
    """Return times as texts."""
    if times.dtype.kind == "M":
        return [str(stamp).removesuffix(".000000") for stamp in times]
    # Whole numbers look the same whether or not other rows of their chunk are whole.
    return [
        repr(int(stamp) if abs(stamp) < 2**53 and stamp == int(stamp) else stamp)
        for stamp in times.tolist()
    ]
