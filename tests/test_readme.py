"""The code that the README and the documentation print runs, and prints what they say."""

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "docs/tutorial.md",
    "docs/extending.md",
    "docs/theory.md",
    "docs/data.md",
    "docs/forecast.md",
    "docs/models.md",
    "docs/switching.md",
    "docs/model-files.md",
    "docs/scale.md",
    "docs/bounds.md",
    "docs/choose-a-family.md",
]
FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Fenced text of a page, and the line on which it begins."""

    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    return [
        Block(m["language"].strip(), m["text"], page.count("\n", 0, m.start("text")))
        for m in FENCE.finditer(page)
    ]


def run_page(page: str, name: str) -> int:
    """Runs the Python blocks in one namespace; a `text` block right after one is its output."""
    code_blocks = blocks(page)
    namespace: dict[str, object] = {"__name__": "__page__"}
    count = 0
    for block, after in zip(code_blocks, [*code_blocks[1:], None], strict=True):
        if block.language != "python":
            continue
        count += 1
        printed = io.StringIO()
        # Empty lines in front, so that a traceback names the line of the page.
        code = compile("\n" * block.line + block.text, name, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if after is not None and after.language == "text":
            assert printed.getvalue() == after.text, f"{name}, line {after.line + 1}"
    return count


# These train or compile for longer than the others, and are run with the slow tests.
LONG = (
    "docs/scale.md",
    "docs/tutorial.md",
    "docs/extending.md",
    "docs/forecast.md",
    "docs/choose-a-family.md",
)


@pytest.mark.parametrize(
    "name", [pytest.param(p, marks=pytest.mark.slow) if p in LONG else p for p in PAGES]
)
def test_page_runs_as_printed(name: str):
    path = REPOSITORY / name
    assert run_page(path.read_text(encoding="utf-8"), name) > 0


def test_blocks_share_a_namespace_and_others_are_skipped():
    page = "```python\nx = 1\n```\n```sh\nmake\n```\n```python\nprint(x)\n```\n```text\n1\n```\n"
    assert run_page(page, "page") == 2


def test_differing_output_is_detected():
    with pytest.raises(AssertionError, match="page, line 5"):
        run_page("```python\nprint(1)\n```\n```text\n2\n```\n", "page")
