"""Time retrodict and its peers on the CPU: tables on the terminal, figures as JSON.

`make bench` runs everything; `--quick` runs a smaller version and `--only` some suites. A complete
run writes `results/kalman-cpu.json`, any other only the file of `--out`.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from suites import LOOP_FLAG, SUITES

RESULTS = Path(__file__).with_name("results") / "kalman-cpu.json"
PACKAGES = ("retrodict", "jax", "jaxlib", "numpy", "statsmodels", "dynamax", "cuthbert")


def main() -> None:
    arguments = _parse()
    facts = machine()
    print(json.dumps(facts, indent=2), flush=True)
    start, results = time.perf_counter(), {}
    for name in arguments.only or SUITES:
        load = os.getloadavg()[0]  # anything else at work blurs every figure
        print(f"\n== {name} (load {load:.1f})", flush=True)
        outcome = SUITES[name](arguments.quick)
        for table in outcome.tables:
            table.show()
        records = [record.as_json() for record in outcome.records]
        results[name] = {"load": load, "records": records}
    print(f"'with the XLA flag' means XLA_FLAGS={LOOP_FLAG}")
    print(f"All of it took {time.perf_counter() - start:.0f} s.")
    complete = not arguments.quick and not arguments.only
    out = arguments.out or (RESULTS if complete else None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": facts, "suites": results}, indent=1) + "\n")
        print(f"Written to {os.path.relpath(out)}.")


def machine() -> dict[str, Any]:
    """Return the commit, the machine and the versions."""
    return {
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
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
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--only", nargs="+", choices=list(SUITES), help="run these suites alone")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
