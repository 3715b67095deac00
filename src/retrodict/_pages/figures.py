"""Figures from matplotlib: the same bytes from the same numbers, whatever the user's settings."""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STYLE: Mapping[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "retrodict",
}

UNDATED: Mapping[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Metadata without which a figure would have other bytes every day."""


def render_figure(
    draw: Callable[[Any, list[Any]], None],
    formats: Sequence[str],
    *,
    size: tuple[float, float],
    dpi: int,
    rows: int = 1,
    columns: int = 1,
    style: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, bytes]:
    """Draw a figure without pyplot and return its files by format.

    matplotlib's global settings are neither used nor changed.

    Args:
        draw: draws, given the figure and its axes row by row.
        formats: any of `"png"`, `"svg"` and `"pdf"`.
        size: width and height in inches.
        dpi: the resolution in dots per inch.
        rows: rows of axes.
        columns: columns of axes.
        style: matplotlib parameters that differ from those of `STYLE`.
        **options: further arguments of `Figure.subplots`.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context, rcdefaults, rcParams
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib: pip install 'retrodict[cli]', or pip install matplotlib."
        ) from error
    files = {}
    with rc_context(), warnings.catch_warnings():
        # A name may be in a script that the font does not have.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        rcdefaults()
        settings: Any = {**STYLE, **(style or {})}
        rcParams.update(settings)
        figure = Figure(figsize=size, dpi=dpi, layout="constrained")
        draw(figure, list(figure.subplots(rows, columns, squeeze=False, **options).ravel()))
        for suffix in formats:
            content = io.BytesIO()
            figure.savefig(content, format=suffix, metadata=UNDATED.get(suffix))
            files[suffix] = content.getvalue()
    return files
