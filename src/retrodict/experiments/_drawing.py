"""Figures of the experiments: paper-sized, and legible in grey."""

from collections.abc import Callable
from typing import Any, NamedTuple

from retrodict._pages import render_figure

WIDTH = 6.5
"""The text width of a page in inches."""

INKS = ("#0b2545", "#b7410e", "#2f9e6e", "#8e7cc3", "#a0aec0")
"""Colours from dark to light that differ in grey; lines also differ in style or marker."""
DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (7, 2, 1.5, 2)), (0, (3, 1.5)))
MARKERS = ("o", "^", "s", "D", "v")


class Picture(NamedTuple):
    """A rendered figure.

    Attributes:
        name: the file name without a suffix.
        caption: the description, with axes and units.
        svg: the figure as an SVG file.
        png: the figure as a PNG file, 200 dots per inch.
    """

    name: str
    caption: str
    svg: bytes
    png: bytes


def draw(
    name: str,
    caption: str,
    fill: Callable[..., None],
    *,
    rows: int = 1,
    columns: int = 1,
    height: float = 2.6,
    **options: Any,
) -> Picture:
    """Draw a figure and return it with its caption.

    Args:
        name: the file name without a suffix.
        caption: the description, with axes and units.
        fill: draws, given the axes row by row.
        rows: rows of axes.
        columns: columns of axes.
        height: the height in inches.
        **options: further arguments of `Figure.subplots`.
    """
    files = render_figure(
        lambda _, axes: fill(*axes),
        ["svg", "png"],
        size=(WIDTH, height),
        dpi=200,
        rows=rows,
        columns=columns,
        style={"lines.linewidth": 1.1},
        **options,
    )
    return Picture(name, caption, files["svg"], files["png"])
