"""The worked examples, at a small size."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("_"))


def test_examples_folder_is_not_empty():
    assert len(SCRIPTS) == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_run(name: str, tmp_path: Path):
    out = tmp_path / name
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    made = {path.suffix for path in out.iterdir()}
    assert ".png" in made or ".csv" in made
