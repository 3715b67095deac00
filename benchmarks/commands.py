"""Time commands of the command line on a run of a linear model with 150 rows.

The first call of a command has an empty cache of compiled programs, the others the cache that it
filled. A time is that of the whole process.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from measure import Record, Task

ROWS = 150
COMMANDS = {
    "smooth": ("smooth", "run", "data.csv"),
    "forecast": ("forecast", "run", "data.csv", "--steps", "12"),
    "plot": ("plot", "run", "data.csv", "--out", "plot.png", "--overwrite"),
    "check": ("check", "run", "data.csv"),
}
TIMEOUT = 120


def time_commands(repeats: int) -> list[Record]:
    """Return one record per command, with the first and the smallest repeated time as facts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_series(folder / "data.csv")
        _run(folder, "fit", "fit", "data.csv", "--out", "run", "--model", "local_level")
        return [_time(folder, name, words, repeats) for name, words in COMMANDS.items()]


def _write_series(path: Path) -> None:
    rng = np.random.default_rng(0)
    level = np.cumsum(0.3 * rng.normal(size=ROWS))
    months = np.datetime64("2010-01") + np.arange(ROWS)
    values = level + rng.normal(size=ROWS)
    lines = [f"{month}-01,{value:.4f}" for month, value in zip(months, values, strict=True)]
    path.write_text("\n".join(["date,y", *lines]) + "\n")


def _time(folder: Path, name: str, words: tuple[str, ...], repeats: int) -> Record:
    record = Record(f"retrodict {name}", Task("retrodict", "command", 1, 1, ROWS))
    try:
        first, *others = [_run(folder, f"cache-{name}", *words) for _ in range(1 + repeats)]
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        record.failure = str(error)
        return record
    record.times_s = [others]
    record.facts = {"first_s": first}
    return record


def _run(folder: Path, cache: str, *words: str) -> float:
    """Run a command in a folder, with a cache of this name; return the seconds that it took."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "from retrodict.cli import main; main()", *words],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        timeout=TIMEOUT,
    )
    return time.perf_counter() - began
