"""Statements of `docs/conventions.md`: the table of formulas, and the arguments of functions."""

import ast
import re
from collections.abc import Iterator
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


def test_formula_table_has_one_row_per_formula():
    assert len(formula_rows()) == NUM_FORMULAS


@pytest.mark.parametrize("row", formula_rows())
def test_formulas_are_where_the_table_says(row: str):
    references = REFERENCE.findall(row)
    assert references, f"No reference of the form `path/to/file.py:function` in: {row}"
    for path, name in references:
        assert (REPOSITORY / path).is_file(), f"{path} does not exist"
        assert name in defined_names(REPOSITORY / path), f"{path} does not define {name}"


SOURCE = REPOSITORY / "src" / "retrodict"
NAMESPACES = ("bounds", "online", "particles")
WITHOUT_LENGTH = {"from_grid", "h1_constants"}
"""Functions that take `ys` and refuse padding."""


def exported_names(package: Path) -> set[str]:
    """Return the names that the `__init__` of a package imports as `X as X`."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names if alias.asname == alias.name}


def public_functions() -> Iterator[ast.FunctionDef]:
    """Yield exported functions and the public methods of exported classes, without importing."""
    exported = exported_names(SOURCE).union(*(exported_names(SOURCE / n) for n in NAMESPACES))
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name in exported:
                yield node
            if isinstance(node, ast.ClassDef) and node.name in exported:
                methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                yield from (method for method in methods if not method.name.startswith("_"))


def test_functions_of_ys_take_mask_inputs_and_length_by_keyword():
    functions = [f for f in public_functions() if "ys" in [a.arg for a in f.args.args]]
    assert len(functions) > 25
    for function in functions:
        keywords = [argument.arg for argument in function.args.kwonlyargs]
        expected = {"mask", "inputs", "length"}
        if function.name in WITHOUT_LENGTH:
            expected.remove("length")
        assert expected <= set(keywords), f"{function.name} takes {keywords}"
