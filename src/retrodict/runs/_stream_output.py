"""The output of a stream: answers as lines, and the files that they are appended to."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from retrodict._errors import Argument
from retrodict._workspace import as_csv, hold
from retrodict.runs._folder import RunError


class Answers(NamedTuple):
    """Answers to rows: filtered moments, and smoothed moments of earlier rows where `ready`."""

    times: np.ndarray
    filtered: tuple[np.ndarray, np.ndarray] | None
    smoothed_times: np.ndarray
    smoothed: tuple[np.ndarray, np.ndarray]
    ready: np.ndarray


def header(names: list[str]) -> bytes:
    """Return the header of a file of answers."""
    filtered = [f"{name}_{moment}" for name in names for moment in ("mean", "std")]
    smoothed = [f"{name}_smoothed_{moment}" for name in names for moment in ("mean", "std")]
    return as_csv(["time", *filtered, "smoothed_time", *smoothed], [])


def as_lines(answers: Answers, names: list[str], as_json: bool) -> bytes:
    """Return answers as lines of comma-separated values or of JSON."""
    times, smoothed_times = as_texts(answers.times), as_texts(answers.smoothed_times)
    smoothed = _interleaved(answers.smoothed)
    filtered = None if answers.filtered is None else _interleaved(answers.filtered)
    lines = []
    for i, ready in enumerate(answers.ready):
        now = None if filtered is None else filtered[i]
        smoothed_time, later = (smoothed_times[i], smoothed[i]) if ready else (None, None)
        if as_json:
            values = {"time": times[i], "filtered": _by_name(names, now)}
            values |= {"smoothed_time": smoothed_time, "smoothed": _by_name(names, later)}
            lines.append(json.dumps(values))
        else:
            empty = [""] * (2 * len(names))
            cells = [times[i], *(now or empty), smoothed_time or "", *(later or empty)]
            lines.append(",".join(map(str, cells)))
    return "".join(f"{line}\n" for line in lines).encode()


def _by_name(names: list[str], cells: list[float] | None) -> dict[str, dict[str, float]] | None:
    if cells is None:
        return None
    pairs = zip(names, cells[::2], cells[1::2], strict=True)
    return {name: {"mean": mean, "std": std} for name, mean, std in pairs}


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


def hold_file(handle: Any, path: Path, *remedy: str | Argument) -> None:
    """Lock an open file until it is closed.

    Args:
        handle: the file.
        path: its path, for the message.
        *remedy: the end of the message.

    Raises:
        RunError: if another process has locked it.
    """
    try:
        hold(handle.fileno())
    except BlockingIOError as error:
        handle.close()
        raise RunError(f"{path} is in use by another process; end it, ", *remedy) from error


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
        num_bytes: the number of bytes that the state covers. A file with none is refused as not of
            this stream, unless the state has read no row.
        unread: whether there is a state that has read no row.
        files: closes the file, and removes it if it is empty.
    """

    def __init__(self, path: Path, header: bytes, num_bytes: int, unread: bool, files: ExitStack):
        self.path, self.header = path, header
        self.handle = open(path, "r+b" if path.exists() else "x+b")
        hold_file(self.handle, path, "or name another.")
        files.callback(_remove_empty, path)
        files.enter_context(self.handle)
        size = path.stat().st_size
        if size < num_bytes:
            raise RunError(
                f"{path} has {size} bytes, and the state covers {num_bytes}: this stream was"
                " written to another file. Name that one, or another state by ",
                Argument("state"),
                ".",
            )
        if size and not (num_bytes or unread):
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
                f"{self.path} was removed while the stream was writing to it. Pass ",
                Argument("restart", True),
                " to start over.",
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
