"""The report of experiments: text, tables and figures on one HTML page."""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import jax
import numpy as np

from retrodict._pages import render_page
from retrodict.experiments._drawing import Picture


class Spread(NamedTuple):
    """A mean over series with its standard error."""

    mean: float
    error: float

    def times(self, factor: float) -> "Spread":
        """Return the mean and its error in another unit."""
        return Spread(factor * self.mean, factor * self.error)

    def __format__(self, form: str) -> str:
        if not (math.isfinite(self.mean) and math.isfinite(self.error)):
            return "–"
        # The error has one significant digit; the requested format is ignored.
        decimals = max(0, -math.floor(math.log10(self.error))) if self.error > 0 else 3
        # A line may break before the sign, not after it.
        return f"{self.mean:.{decimals}f} ±\N{NO-BREAK SPACE}{self.error:.{decimals}f}"


def spread(values: Any) -> Spread:
    """Return the mean of one value per series with its standard error."""
    values = np.asarray(values, float)
    return Spread(float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size)))


class Table(NamedTuple):
    """Rows under a header.

    Attributes:
        name: the name of its file of comma-separated values, without the suffix.
        columns: the titles, and how numbers below them are printed, as in `format`.
        rows: strings, numbers and means with their standard errors; NaN is printed as a dash.
        caption: the description of the numbers.
    """

    name: str
    columns: dict[str, str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    @classmethod
    def of_columns(cls, name: str, columns: Mapping[str, tuple[str, Iterable[Any]]]) -> "Table":
        """Make a table from the number format and the values of each column."""
        forms = {title: form for title, (form, _) in columns.items()}
        values = (values for _, values in columns.values())
        return cls(name, forms, list(zip(*values, strict=True)))

    def flat(self) -> tuple[list[str], list[list[Any]]]:
        """Return the header and the rows, with standard errors in separate columns."""
        wide = [
            any(isinstance(row[i], Spread) for row in self.rows) for i in range(len(self.columns))
        ]
        header, rows = [], [[] for _ in self.rows]
        for i, title in enumerate(self.columns):
            header += [title, f"{title}, standard error"] if wide[i] else [title]
            for row, into in zip(self.rows, rows, strict=True):
                cell = row[i]
                into += list(cell) if isinstance(cell, Spread) else [cell, None][: 1 + wide[i]]
        return header, rows


class Section(NamedTuple):
    """A figure or a table of the paper with its reproduction.

    Attributes:
        heading: the figure or table of the paper.
        paper: what the paper shows.
        parts: the reproduction: tables, pictures, and paragraphs as strings.
        deviation: how it differs from the paper, and why.
    """

    heading: str
    paper: str
    parts: Sequence[Table | Picture | str]
    deviation: str = ""


class Chapter(NamedTuple):
    """One experiment.

    Attributes:
        name: its name on the command line.
        title: its title.
        summary: the results in a few sentences.
        sections: one section per figure or table.
        numbers: the results as numbers; the same in every run with the same settings.
        seconds: durations, which differ between runs.
    """

    name: str
    title: str
    summary: str
    sections: Sequence[Section]
    numbers: dict[str, Any]
    seconds: dict[str, float]

    def tables(self) -> list[Table]:
        """Return all tables, in order."""
        return [part for s in self.sections for part in s.parts if isinstance(part, Table)]

    def pictures(self) -> list[Picture]:
        """Return all pictures, in order."""
        return [part for s in self.sections for part in s.parts if isinstance(part, Picture)]


def read_text(name: str, **values: Any) -> dict[str, Any]:
    """Return the text of a chapter from its file in `texts`, with values filled in."""
    file = files("retrodict.experiments").joinpath(f"texts/{name}.toml")
    text = tomllib.loads(file.read_text("utf-8"))
    # Lines are wrapped in the file.
    return jax.tree.map(lambda words: " ".join(words.split()).format(**values), text)


def make_chapter(
    name: str,
    parts: Sequence[Table | Picture],
    numbers: dict[str, Any],
    seconds: dict[str, float],
    **values: Any,
) -> Chapter:
    """Put the tables and figures of an experiment into its text.

    Args:
        name: the name of the experiment.
        parts: tables and figures, which the text names by their files: `"name.csv"`, `"name.svg"`.
        numbers: the results as numbers, which the text may use.
        seconds: durations.
        **values: further values in the text.
    """
    text = read_text(name, **{**numbers, **values})
    by_file = {}
    for part in parts:
        file = f"{part.name}.{'csv' if isinstance(part, Table) else 'svg'}"
        by_file[file] = part._replace(caption=text["captions"][file])
    sections = [
        Section(
            section["heading"],
            section.get("paper", ""),
            [by_file[file] for file in section["parts"]],
            section.get("deviation", ""),
        )
        for section in text["sections"]
    ]
    return Chapter(name, text["title"], text["summary"], sections, numbers, seconds)


def page(title: str, lead: Sequence[str], chapters: Sequence[Chapter], footer: str) -> bytes:
    """Return the report of some experiments as one HTML page.

    Args:
        title: the title.
        lead: paragraphs above the chapters.
        chapters: the experiments.
        footer: how the page was made.
    """
    text = render_page(
        "retrodict.experiments",
        "chapters.html",
        title=title,
        lead=lead,
        chapters=chapters,
        footer=footer,
        cell=_cell,
    )
    return text.encode()


def _cell(value: Any, form: str) -> str:
    if isinstance(value, str):
        return value
    if value != value:  # NaN
        return "–"
    return format(value, form).replace("-", "−")
