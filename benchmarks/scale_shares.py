"""Measure time and memory of reading a table by one, two and four processes.

The file is Parquet, as in `scale_disk.py`, 20,000 series of 200 rows and four columns. Each process
reads its series by `retrodict.data.read_shared` and puts them on its device, in float32. The memory
of Python, JAX and the library before reading has its own column.

    python benchmarks/scale_shares.py [--series 20000] [--out scale-shares.json]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

import retrodict as rd
from scale_disk import peak, write

PROCESSES = (1, 2, 4)


def measure(path: Path, coordinator: str, count: int, index: int) -> dict[str, Any]:
    """Return the size and the memory of the series of this process."""
    if count > 1:
        rd.distributed.initialise(coordinator, count, index)
    jax.block_until_ready(jax.numpy.ones(1))
    before, began = peak(), time.perf_counter()
    table = rd.data.read_shared(path, series="id", time="t")
    if isinstance(table, rd.data.SharedTable):
        local, laid = table.local, table.batch()["ys"]
    else:
        local, laid = table, rd.data.SharedSeries(**table.batch())
    jax.block_until_ready(laid.series)
    return {
        "seconds": time.perf_counter() - began,
        "peak_bytes_before": before,
        "peak_bytes": peak(),
        "own_series": 0 if local is None else local.num_series,
        "rows": table.summary.num_rows,
        "fingerprint": table.summary.fingerprint,
    }


def in_processes(path: Path, count: int) -> dict[str, Any]:
    """Run a job of several processes and return the largest figures."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--worker", str(path), f"localhost:{port}", str(count)]
    jobs = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(count)
    ]
    try:
        said = [json.loads(job.communicate(timeout=900)[0].splitlines()[-1]) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    (rows,), (_,) = ({each[key] for each in said} for key in ("rows", "fingerprint"))
    largest = {
        key: max(each[key] for each in said)
        for key in ("seconds", "own_series", "peak_bytes_before", "peak_bytes")
    }
    return {"processes": count, "rows": rows, **largest, "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="A table that processes share.")
    parser.add_argument("--series", type=int, default=20_000)
    parser.add_argument("--num-times", type=int, default=200)
    parser.add_argument("--group", type=int, default=50_000, help="rows of a row group")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        path, coordinator, count, index = options.worker
        print(json.dumps(measure(Path(path), coordinator, int(count), int(index))))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "series.parquet"
        write(path, options.series, options.num_times, options.group)
        records = []
        for count in PROCESSES:
            records.append(in_processes(path, count))
            print(json.dumps(records[-1]), flush=True)
    if options.out:
        report = {
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "series": options.series,
            "records": records,
        }
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=2) + "\n")
        partial.replace(options.out)


if __name__ == "__main__":
    main()
