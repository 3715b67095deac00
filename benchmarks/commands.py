"""Time commands of the command line on a run of a linear model with 150 rows, and imports.

A time is that of the whole process. The first call of a command has an empty cache of compiled
programs, the others have the cache that it filled.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from measure import Prepared, Task, prepared

ROWS = 150
COMMANDS = {
    "smooth": ("smooth", "run", "data.csv"),
    "forecast": ("forecast", "run", "data.csv", "--steps", "12"),
    "plot": ("plot", "run", "data.csv", "--out", "plot.png", "--overwrite"),
    "check": ("check", "run", "data.csv"),
}
MAIN = "from retrodict.cli import main; main()"
TIMEOUT = 120


def prepare(task: Task) -> Prepared:
    """Return the call of a command on a new run, or of an import in a new process."""
    folder = Path.cwd()
    if task.what == "import":
        # The names of retrodict are imported when they are used.
        code = "import jax" if task.library == "floor" else "import jax; from retrodict import *"
        return prepared(lambda: _run(folder, "unused", code))
    _write_series(folder / "data.csv")
    _run(folder, "fit", MAIN, "fit", "data.csv", "--out", "run", "--model", "local_level")
    return prepared(lambda: _run(folder, "cache", MAIN, *COMMANDS[task.option]))


def _write_series(path: Path) -> None:
    rng = np.random.default_rng(0)
    level = np.cumsum(0.3 * rng.normal(size=ROWS))
    months = np.datetime64("2010-01") + np.arange(ROWS)
    values = level + rng.normal(size=ROWS)
    lines = [f"{month}-01,{value:.4f}" for month, value in zip(months, values, strict=True)]
    path.write_text("\n".join(["date,y", *lines]) + "\n")


def _run(folder: Path, cache: str, code: str, *words: str) -> None:
    """Run Python code in a folder, with a cache of this name."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / cache)}
    # An installed package has its bytecode, and the commands choose the settings of JAX themselves.
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_X64", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", code, *words]
    subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, timeout=TIMEOUT
    )
