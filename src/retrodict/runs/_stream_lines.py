"""Answers to the rows of a stream, as lines of comma-separated values or of JSON."""

import json
from typing import NamedTuple

import numpy as np

from retrodict._files import as_csv


class Shown(NamedTuple):
    """The states in the answers: their indices and names."""

    indices: list[int]
    names: list[str]


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


def as_lines(answers: Answers, shown: Shown, as_json: bool) -> bytes:
    """Return answers as lines of comma-separated values or of JSON."""
    times, smoothed_times = as_texts(answers.times), as_texts(answers.smoothed_times)
    smoothed = _interleaved(answers.smoothed, shown.indices)
    filtered = None
    if answers.filtered is not None:
        filtered = _interleaved(answers.filtered, shown.indices)
    names, lines = shown.names, []
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


def _interleaved(moments: tuple[np.ndarray, np.ndarray], indices: list[int]) -> list[list[float]]:
    """Return means and standard deviations of some states in turn, rounded to ten digits.

    The last of the sixteen digits depends on how rows are cut into chunks; answers must not.
    """
    rows = np.stack(moments, axis=-1)[:, indices].reshape(len(moments[0]), -1).tolist()
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
