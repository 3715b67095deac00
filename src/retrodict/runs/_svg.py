"""Static charts as SVG, for training curves and for readers without JavaScript."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from retrodict._pages import visible

WIDTH, HEIGHT = 480, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 10, 24


class Shape(NamedTuple):
    """A line, a set of dots or a band of a chart.

    Attributes:
        kind: "line", "dots", or "band" between `low` and `high`.
        ink: the name of its colour in the style sheet.
        xs: `(time,)`.
        low: `(time,)`, the values, or the lower end of the band.
        high: `(time,)`, the upper end of the band.
        dashes: the pattern of a line, "" for none.
    """

    kind: str
    ink: str
    xs: np.ndarray
    low: np.ndarray
    high: np.ndarray | None = None
    dashes: str = ""


def svg_chart(
    shapes: Sequence[Shape],
    label: str,
    *,
    dated: bool = False,
    limits: tuple[float, float] | None = None,
) -> str:
    """Return a chart as SVG markup; long series keep the extremes of each pixel column.

    Args:
        shapes: the shapes, lowest first.
        label: the description for screen readers.
        dated: whether `xs` are milliseconds since 1970.
        limits: the smallest and the largest value shown; by default those of all finite values.
    """
    xs = np.concatenate([shape.xs for shape in shapes]).astype(float)
    ys = np.concatenate([np.asarray(y, float) for s in shapes for y in s[3:5] if y is not None])
    left, right = _range(xs)
    low, high = limits or _range(ys)
    pad = 0.05 * (high - low)
    low, high = low - pad, high + pad

    def at_x(values: Any) -> Any:
        return _LEFT + (values - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)

    def at_y(values: Any) -> Any:
        return HEIGHT - _BOTTOM - (values - low) / (high - low) * (HEIGHT - _BOTTOM - _TOP)

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(visible(label))}">'
    ]
    for tick in _ticks(low, high):
        y = at_y(tick)
        parts.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        text = f"{tick:.6g}".replace("-", "−")
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for x, text in _dates(left, right) if dated else _steps(left, right):
        parts.append(f'<path class="rule" d="M{at_x(x):.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>')
    # A nested image clips what is beyond the limits.
    room = f"{_LEFT} {_TOP} {WIDTH - _LEFT - _RIGHT} {HEIGHT - _BOTTOM - _TOP}"
    inner = zip(("x", "y", "width", "height"), room.split(), strict=True)
    parts.append(f'<svg viewBox="{room}" ' + " ".join(f'{k}="{v}"' for k, v in inner) + ">")
    for shape in shapes:
        x, y = at_x(shape.xs.astype(float)), at_y(np.asarray(shape.low, float))
        other = y if shape.high is None else at_y(np.asarray(shape.high, float))
        parts.append(_path(shape, x, y, other))
    return "".join([*parts, "</svg></svg>"])


def _path(shape: Shape, x: np.ndarray, y: np.ndarray, other: np.ndarray) -> str:
    finite = np.isfinite(y) & np.isfinite(other)
    if shape.kind == "dots":
        path = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in _extremes(x[finite], y[finite]))
        width = min(3.0, max(1.2, 600 / max(1, finite.sum())))
        return (
            f'<path d="{path}" style="stroke:var(--{shape.ink})" stroke-width="{width:.1f}" '
            f'stroke-linecap="round"/>'
        )
    path = ""
    for run in _runs(finite):
        if shape.kind == "line":
            path += "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in _extremes(x[run], y[run]))
        else:
            edge = [*_extremes(x[run], other[run]), *reversed(_extremes(x[run], y[run]))]
            path += "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in edge) + "Z"
    if shape.kind == "band":
        return f'<path d="{path}" style="fill:var(--{shape.ink})" fill-opacity=".24"/>'
    dashes = f' stroke-dasharray="{shape.dashes}"' if shape.dashes else ""
    return f'<path class="line" d="{path}" style="stroke:var(--{shape.ink})"{dashes}/>'


def _runs(finite: np.ndarray) -> list[slice]:
    """Return the stretches without a gap."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]])))
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _extremes(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """Return the lowest and the highest point of each pixel column, in order of time."""
    if x.size <= 2 * WIDTH:
        return list(zip(x.tolist(), y.tolist(), strict=True))
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
    if low < high:
        return low, high
    half = 0.1 * abs(low) or 1.0
    return low - half, high + half


def _ticks(low: float, high: float, count: int = 6) -> np.ndarray:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** np.floor(np.log10(rough))
    step = power * next(n for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    # Adding zero turns -0.0 into 0.0.
    return step * np.arange(np.ceil(low / step), np.floor(high / step) + 1) + 0.0


def _steps(left: float, right: float) -> list[tuple[float, str]]:
    return [(x, f"{x:.10g}".replace("-", "−")) for x in _ticks(left, right, 5)]


def _dates(left: float, right: float) -> list[tuple[float, str]]:
    """Return up to four dates, with the time of day where they are close."""
    day = 86_400_000.0
    length = 10 if right - left > 4 * day else 16 if right - left > day / 24 else 19
    return [
        (x, str(np.datetime64(round(x), "ms")).replace("T", " ")[:length])
        for x in np.linspace(left, right, 6)[1 : -1 : 2 if length > 10 else 1]
    ]
