"""The table of formulas in `docs/conventions.md` names files and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = (REPOSITORY / "docs/conventions.md").read_text(encoding="utf-8")
REFERENCE = re.compile(r"`(src/retrodict/[\w/]+\.py):([\w.]+)`")
NUM_FORMULAS = 13


def formula_rows() -> list[str]:
    """Return the rows of the table below the heading "Where the formulas are"."""
    section = PAGE.partition("\n## Where the formulas are\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return lines[2:]


def defined_names(path: Path) -> set[str]:
    """Return the functions and classes of a module, and methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_the_table_has_one_row_per_formula():
    assert len(formula_rows()) == NUM_FORMULAS


@pytest.mark.parametrize("row", formula_rows())
def test_each_formula_is_where_the_table_says(row: str):
    references = REFERENCE.findall(row)
    assert references, f"No reference of the form `path/to/file.py:function` in: {row}"
    for path, name in references:
        assert (REPOSITORY / path).is_file(), f"{path} does not exist"
        assert name in defined_names(REPOSITORY / path), f"{path} does not define {name}"
