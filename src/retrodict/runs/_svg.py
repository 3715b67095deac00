"""The geometry of static charts, which a template draws as SVG: for readers without JavaScript."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrodict.runs._report_content import Shape, is_dated, milliseconds

WIDTH, HEIGHT = 480, 210
LEFT, RIGHT, TOP, BOTTOM = 62, 470, 10, 186
"""The box of the data within the chart."""


def chart(
    shapes: Sequence[Shape], label: str, limits: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Return the ticks and paths of a chart; long series keep the extremes of each pixel column.

    Args:
        shapes: the shapes, lowest first.
        label: the description for screen readers.
        limits: the smallest and the largest value shown; by default those of all finite values.
    """
    times = [milliseconds(shape.xs).astype(float) for shape in shapes]
    left, right = _range(np.concatenate(times))
    ends = [np.asarray(y, float) for s in shapes for y in (s.low, s.high) if y is not None]
    low, high = limits or _range(np.concatenate(ends))
    pad = 0.05 * (high - low)
    low, high = low - pad, high + pad

    def at_x(values: Any) -> Any:
        return LEFT + (values - left) / (right - left) * (RIGHT - LEFT)

    def at_y(values: Any) -> Any:
        return BOTTOM - (np.asarray(values, float) - low) / (high - low) * (BOTTOM - TOP)

    def path(shape: Shape, xs: np.ndarray) -> tuple[Shape, str, float]:
        x, y = at_x(xs), at_y(shape.low)
        other = y if shape.high is None else at_y(shape.high)
        width = min(3.0, max(1.2, 600 / max(1, np.isfinite(y).sum())))
        return shape, _path(shape.kind, x, y, other), width

    dates_or_numbers = _dates if is_dated(shapes[0].xs) else _numbers
    return {
        "label": label,
        "rows": [(at_y(tick), text) for tick, text in _numbers(low, high, 6, digits=6)],
        "columns": [(at_x(tick), text) for tick, text in dates_or_numbers(left, right)],
        "paths": [path(shape, xs) for shape, xs in zip(shapes, times, strict=True)],
    }


def _path(kind: str, x: np.ndarray, y: np.ndarray, other: np.ndarray) -> str:
    """Return the path of a shape from its ends, with a gap where they are not finite."""
    finite = np.isfinite(y) & np.isfinite(other)
    if kind == "dots":
        return "".join(f"M{a:.1f} {b:.1f}h0" for a, b in _extremes(x[finite], y[finite]))
    path = ""
    edges = np.flatnonzero(np.diff(finite, prepend=False, append=False))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        run = slice(begin, end)
        points = _extremes(x[run], y[run])
        if kind == "band":
            points = [*_extremes(x[run], other[run]), *reversed(points)]
        close = "Z" if kind == "band" else ""
        path += "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points) + close
    return path


def _extremes(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """Return the lowest and the highest point of each pixel column, in order of time."""
    rows: Any = slice(None)
    if x.size > 2 * WIDTH:
        column = np.floor(x).astype(int)
        # Sorted by column and then by value: the ends of each group are its extremes.
        order = np.lexsort((y, column))
        starts = np.flatnonzero(np.diff(column[order], prepend=column[order[0]] - 1))
        ends = np.append(starts[1:], x.size) - 1
        rows = np.unique(order[np.concatenate([starts, ends])])
    return list(zip(x[rows].tolist(), y[rows].tolist(), strict=True))


def _range(values: np.ndarray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    half = 0.0 if low < high else 0.1 * abs(low) or 1.0
    return low - half, high + half


def _numbers(low: float, high: float, count: int = 5, digits: int = 10) -> list[tuple[float, str]]:
    """Return multiples of 1, 2 or 5 times a power of ten, with their texts."""
    rough = (high - low) / count
    power = 10.0 ** np.floor(np.log10(rough))
    step = power * next(n for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    # Adding zero turns -0.0 into 0.0.
    ticks = step * np.arange(np.ceil(low / step), np.floor(high / step) + 1) + 0.0
    return [(tick, f"{tick:.{digits}g}".replace("-", "−")) for tick in ticks]


def _dates(left: float, right: float) -> list[tuple[float, str]]:
    """Return up to four dates, with the time of day where they are close."""
    day = 86_400_000.0
    length = 10 if right - left > 4 * day else 16 if right - left > day / 24 else 19
    return [
        (x, str(np.datetime64(round(x), "ms")).replace("T", " ")[:length])
        for x in np.linspace(left, right, 6)[1 : -1 : 2 if length > 10 else 1]
    ]
