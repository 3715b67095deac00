"""Figures of the experiments: paper-sized, and legible in grey."""

from collections.abc import Callable, Mapping, Sequence
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
        svg: the figure as an SVG file.
        png: the figure as a PNG file, 200 dots per inch.
        caption: the description, with axes and units.
    """

    name: str
    svg: bytes
    png: bytes
    caption: str = ""


BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
"""The legend to the right of the axes."""


def draw(
    name: str,
    plot: Callable[..., Any],
    panels: Sequence[tuple[str, tuple[Any, ...]]] = (("", ()),),
    *,
    caption: str = "",
    columns: int | None = None,
    height: float = 2.6,
    xlabel: str = "",
    ylabels: Sequence[str] = (),
    legend: Mapping[str, Any] | None = None,
    **options: Any,
) -> Picture:
    """Draw a figure of one or several panels.

    Args:
        name: the file name without a suffix.
        plot: draws one panel; called as `plot(axis, *data)`.
        panels: the title and the data of each panel, row by row.
        caption: the description, with axes and units.
        columns: the number of panels in a row; all of them by default.
        height: the height in inches.
        xlabel: the label of the horizontal axes of the last row.
        ylabels: the label of the vertical axis at the left of each row.
        legend: arguments of the legend of the first panel, or of the figure where the location is
            outside of the axes.
        **options: further arguments of `Figure.subplots`.
    """
    columns = columns or len(panels)

    def fill(figure: Any, axes: list[Any]) -> None:
        for axis, (title, data) in zip(axes, panels, strict=True):
            plot(axis, *data)
            if title:
                axis.set_title(title)
        for axis in axes[-columns:] if xlabel else ():
            axis.set_xlabel(xlabel)
        for axis, label in zip(axes[::columns], ylabels, strict=False):
            axis.set_ylabel(label)
        if legend is not None:
            owner = figure if "outside" in legend.get("loc", "") else axes[0]
            owner.legend(*axes[0].get_legend_handles_labels(), **legend)

    files = render_figure(
        fill,
        ["svg", "png"],
        size=(WIDTH, height),
        dpi=200,
        rows=len(panels) // columns,
        columns=columns,
        style={"lines.linewidth": 1.1},
        **options,
    )
    return Picture(name, files["svg"], files["png"], caption)
