"""One page of HTML that needs nothing beside it: text, tables and figures."""

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from retrodict.experiments._drawing import Picture


class Spread(NamedTuple):
    """A mean over series, and its standard error."""

    mean: float
    error: float

    def times(self, factor: float) -> "Spread":
        """In another unit."""
        return Spread(factor * self.mean, factor * self.error)

    def __format__(self, form: str) -> str:
        if not (math.isfinite(self.mean) and math.isfinite(self.error)):
            return "–"
        # As many decimals as the error has one digit for; the format asked for does not matter.
        decimals = max(0, -math.floor(math.log10(self.error))) if self.error > 0 else 3
        # A cell may break before the sign, not after it.
        return f"{self.mean:.{decimals}f} ±\N{NO-BREAK SPACE}{self.error:.{decimals}f}"


def spread(values: Any) -> Spread:
    """The mean of a value a series, with its standard error."""
    values = np.asarray(values, float)
    return Spread(float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size)))


class Table(NamedTuple):
    """Rows under a header.

    Attributes:
        name: the name of its file of comma-separated values, without the suffix.
        caption: what the numbers are of.
        columns: the titles, and how numbers below them are printed, as in `format`.
        rows: strings, numbers and means with their standard errors; NaN is printed as a dash.
    """

    name: str
    caption: str
    columns: dict[str, str]
    rows: Sequence[Sequence[Any]]

    def flat(self) -> tuple[list[str], list[list[Any]]]:
        """Header and rows with a standard error in a column of its own."""
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
    """A figure or a table of the paper, and ours beside it.

    Attributes:
        heading: what of the paper it is about.
        paper: what the paper shows.
        parts: ours: tables, pictures, and paragraphs as strings.
        deviation: how ours differs, and why.
    """

    heading: str
    paper: str
    parts: Sequence[Table | Picture | str]
    deviation: str = ""


class Chapter(NamedTuple):
    """One experiment.

    Attributes:
        name: its name on the command line.
        title: what it is, in words.
        summary: what was found, in a few sentences.
        sections: figure by figure, table by table.
        numbers: what was found, for machines; the same in every run with the same settings.
        seconds: what was timed, which is not.
    """

    name: str
    title: str
    summary: str
    sections: Sequence[Section]
    numbers: dict[str, Any]
    seconds: dict[str, float]

    def tables(self) -> list[Table]:
        """All tables, in order."""
        return [part for s in self.sections for part in s.parts if isinstance(part, Table)]

    def pictures(self) -> list[Picture]:
        """All pictures, in order."""
        return [part for s in self.sections for part in s.parts if isinstance(part, Picture)]


_CSS = """
:root { --ink: #1a202c; --soft: #4a5568; --line: #cbd5e0; --paper: #fff; --tint: #f4f6f9; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 56rem; padding: 1.2rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .4rem 0 .6rem; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .5rem; padding-top: .8rem;
  border-top: 2px solid var(--ink); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p { margin: .5rem 0; }
p, li, h1, h2, h3, figcaption, caption { overflow-wrap: anywhere; }
nav ul { padding-left: 1.2rem; margin: .3rem 0; }
.paper, .deviation { padding: .5rem .8rem; margin: .7rem 0; background: var(--tint);
  border-left: 3px solid var(--line); font-size: .93rem; }
.deviation { border-left-color: #c05621; }
.label { font-weight: 600; }
figure { margin: 1.1rem 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption, caption { color: var(--soft); font-size: .86rem; text-align: left; margin: .35rem 0; }
caption { caption-side: bottom; padding-top: .3rem; }
.wide { overflow-x: auto; margin: 1.1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; border-top: 1.5px solid var(--ink);
  border-bottom: 1.5px solid var(--ink); }
th { text-align: right; font-weight: 600; border-bottom: 1px solid var(--ink);
  vertical-align: bottom; }
th, td { padding: .22rem .5rem; }
td { text-align: right; }
th:first-child, td:first-child { text-align: left; }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .84rem; }
@media (max-width: 640px) {
  body { padding: .8rem; font-size: 15px; }
  table { font-size: .68rem; line-height: 1.3; }
  th, td { padding: .16rem .18rem; }
  th { font-size: .62rem; }
  .many th:not(:first-child) { writing-mode: vertical-rl; transform: rotate(180deg);
    text-align: left; }
  figure { overflow-x: auto; }
  figure img { min-width: 36rem; }
}
@media print { h2 { break-before: page; } figure, .wide { break-inside: avoid; } }
"""


def page(title: str, lead: Iterable[str], chapters: Sequence[Chapter], footer: str) -> bytes:
    """The page.

    Args:
        title: its title.
        lead: paragraphs above the chapters.
        chapters: the experiments.
        footer: how it was made.
    """
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(text)}</p>" for text in lead)]
    if len(chapters) > 1:
        links = "".join(f'<li><a href="#{c.name}">{escape(c.title)}</a></li>' for c in chapters)
        body.append(f"<nav><ul>{links}</ul></nav>")
    for chapter in chapters:
        body += _chapter(chapter)
    body.append(f"<footer><p>{escape(footer)}</p></footer>")
    text = "<main>\n" + "\n".join(body) + "\n</main>"
    document = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n{text}\n</body>\n</html>\n"
    )
    return document.encode()


def _chapter(chapter: Chapter) -> list[str]:
    parts = [
        f'<h2 id="{chapter.name}">{escape(chapter.title)}</h2>',
        f"<p>{escape(chapter.summary)}</p>",
    ]
    for section in chapter.sections:
        parts.append(f"<h3>{escape(section.heading)}</h3>")
        if section.paper:
            parts.append(_box("paper", "The paper", section.paper))
        parts += [_part(part) for part in section.parts]
        if section.deviation:
            parts.append(_box("deviation", "What differs, and why", section.deviation))
    return parts


def _box(kind: str, label: str, text: str) -> str:
    return f'<p class="{kind}"><span class="label">{label}.</span> {escape(text)}</p>'


def _part(part: Table | Picture | str) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    if isinstance(part, Picture):
        data = base64.b64encode(part.svg).decode()
        label = f"Figure {escape(part.name.replace('_', ' '))}, described below it"
        return (
            f'<figure tabindex="0"><img alt="{label}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{escape(part.caption)}</figcaption></figure>"
        )
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in part.columns)
    formats = list(part.columns.values())
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{escape(_cell(c, f))}</td>" for c, f in zip(row, formats, strict=True))
        + "</tr>"
        for row in part.rows
    )
    # On a narrow screen the titles of many columns are turned upright.
    kind = "wide many" if len(part.columns) > 6 else "wide"
    return (
        f'<div class="{kind}" tabindex="0"><table><caption>{escape(part.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(value: Any, form: str) -> str:
    if isinstance(value, str):
        return value
    if value != value:  # NaN
        return "–"
    return format(value, form).replace("-", "−")
