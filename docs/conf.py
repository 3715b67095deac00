"""Configuration of the Sphinx documentation."""

import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))

project = "retrodict"
author = "The retrodict developers"
copyright = author
release = version = PROJECT["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
# Single backticks in docstrings are code, as in Markdown.
default_role = "code"

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = False

html_theme = "furo"
html_title = "retrodict"


def plain_formulas(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Keep formulas in docstrings as they are written.

    An indented paragraph after an empty line is a displayed formula and becomes literal text.
    Elsewhere bars are escaped, since Sphinx would read |x| as a substitution.
    """
    result: list[str] = []
    displayed, before = False, ""
    for line in lines:
        indented = line.startswith("    ")
        after_gap = bool(result) and not result[-1].strip()
        if indented and after_gap and before and not before.startswith(" "):
            displayed = True
            result += ["::", ""]
        elif line.strip() and not indented:
            displayed = False
        result.append(line if displayed or _is_code(line) else _escape_bars(line))
        before = line if line.strip() else before
    lines[:] = result


def _is_code(line: str) -> bool:
    return line.lstrip().startswith((">>>", "..."))


def _escape_bars(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else part.replace("|", r"\|") for part in parts)


def setup(app: Any) -> None:
    """Register the changes to docstrings, before napoleon reads them."""
    app.connect("autodoc-process-docstring", plain_formulas, priority=400)
