"""Time retrodict and its peers on two CPU cores: one table, cost curves, and one JSON file.

`make bench` runs everything and writes `results/speed.json`, from which `speed_page.py` writes
docs/speed.md. `--only` runs some suites alone, and replaces their rows in the file of `--out`, if
it exists. Every row records the commit at which it was measured.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from measure import Record, Task
from race import race
from rows import CURVES, ROWS, SUITES, Row
from speed_page import comparison, cost

RESULTS = Path(__file__).with_name("results") / "speed.json"
PACKAGES = ("retrodict", "jax", "numpy", "statsmodels", "dynamax", "cuthbert", "particles")


def main() -> None:
    arguments = _parse()
    begun = time.perf_counter()
    only = arguments.only or (*SUITES, "curves")
    results: dict[str, Any] = {"machine": machine(), **_kept(arguments.out, only)}
    print(json.dumps(results["machine"], indent=2), flush=True)
    commit, records = results["machine"]["commit"], {}
    for row in ROWS:
        if row.suite in only:
            _measure(row.work, row.tasks(), records)
            results["rows"].append({"commit": commit, **_row_as_json(row, records)})
            results["rows"].sort(key=lambda row: SUITES.index(row["suite"]))
            _write(results, begun, arguments.out)
    for curve in CURVES if "curves" in only else ():
        for size in curve.sizes:
            _measure(f"{curve.title}: {size:,}", curve.tasks(size), records)
        results["curves"].append(
            {
                "commit": commit,
                "axis": curve.axis,
                "title": curve.title,
                "sizes": curve.sizes,
                "best_s": {
                    library: [records[curve.tasks(size)[index]].best_s for size in curve.sizes]
                    for index, library in enumerate(curve.libraries)
                },
            }
        )
        _write(results, begun, arguments.out)
    comparison("retrodict and its peers", results["rows"]).show()
    for curve in results["curves"]:
        cost(curve).show()
    print(f"All of it took {results['seconds'] / 60:.0f} minutes.")
    out = arguments.out or (None if arguments.only else RESULTS)
    _write(results, begun, out)


def _write(results: dict[str, Any], begun: float, out: Path | None) -> None:
    """Write what was measured so far, in place of an earlier file."""
    results["seconds"] = time.perf_counter() - begun
    if out is not None:
        unfinished = out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(results, indent=1) + "\n")
        unfinished.replace(out)


def _kept(out: Path | None, only: Iterable[str]) -> dict[str, Any]:
    """Return what the file holds of suites that are not measured again."""
    earlier = json.loads(out.read_text()) if out is not None and out.exists() else {}
    rows = [row for row in earlier.get("rows", ()) if row["suite"] not in only]
    return {"rows": rows, "curves": [] if "curves" in only else earlier.get("curves", [])}


def _measure(title: str, tasks: Iterable[Task], records: dict[Task, Record]) -> None:
    """Race the tasks of a row, unless all of them were measured for an earlier one."""
    tasks = list(tasks)
    if all(task in records for task in tasks):
        return
    load, begun = os.getloadavg()[0], time.perf_counter()  # other work blurs every figure
    for record in race(tasks):
        records[record.task] = record
        if record.failure:
            print(f"  {record.task.library}: {record.failure}")
    print(f"{title}: {time.perf_counter() - begun:.0f} s (load {load:.1f})", flush=True)


def _row_as_json(row: Row, records: dict[Task, Record]) -> dict[str, Any]:
    measured = [records[task] for task in row.tasks()]
    return {
        "suite": row.suite,
        "work": row.work,
        "measure": row.measure,
        "target": row.target,
        "value": row.value(records),
        "met": row.met(records),
        "why": row.why,
        "shown_s": {record.task.library: row.seconds(record) for record in measured},
        "records": {record.task.library: record.as_json() for record in measured},
    }


def machine() -> dict[str, Any]:
    """Return the commit, the machine and the versions."""
    return {
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.system(),
        "python": platform.python_version(),
        "dtype": "float64",
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _commit() -> str | None:
    """Return the commit that is measured, marked if files differ from it; `None` without git."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=RESULTS.parent, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time retrodict beside its peers on the CPU.")
    parser.add_argument("--only", nargs="+", choices=[*SUITES, "curves"], help="some suites")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
