"""Time an epoch of training on series on disk, and the same with all series in memory.

A `RecurrentFamily` for a linear-Gaussian model of three states and four observed columns, float32.
The file is Parquet, with one row per time step. Each run has a separate process, which reports its
peak memory; runs of both kinds alternate. Times start with the first chunk, without compilation and
without opening the file, which has its own column. A quarter of the series, also from disk, shows
whether memory grows with their number.

    python benchmarks/scale_disk.py [--series 100000] [--rounds 2] [--out scale-disk.json]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import retrodict as rd
from scale_devices import OBS_DIM, STATE_DIM, model

BATCH, CHUNK = 64, 100
WRITTEN = 2_000
"""Series that are made and written at a time."""


def write(path: Path, num_series: int, num_times: int, group: int) -> None:
    """Simulate series and write them in chunks."""
    simulate = jax.jit(jax.vmap(lambda key: model().simulate(key, num_times)[1]))
    columns = [f"y{i}" for i in range(OBS_DIM)]
    schema = pa.schema(
        [("id", pa.int32()), ("t", pa.int32()), *((name, pa.float32()) for name in columns)]
    )
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, num_series, WRITTEN):
            count = min(WRITTEN, num_series - first)
            ys = np.asarray(simulate(jax.random.split(jax.random.key(first), count)), np.float32)
            arrays = [
                np.repeat(np.arange(first, first + count, dtype=np.int32), num_times),
                np.tile(np.arange(num_times, dtype=np.int32), count),
                *(ys[:, :, i].ravel() for i in range(OBS_DIM)),
            ]
            writer.write_table(pa.table(arrays, schema), row_group_size=group)


def peak() -> int:
    """Return the peak memory of the process in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in ru_maxrss what the process that started this one held until then.
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def measure(kind: str, path: Path) -> dict[str, Any]:
    """Run one epoch in this process."""
    began = time.perf_counter()
    if kind == "memory":
        table = pq.read_table(path, columns=[f"y{i}" for i in range(OBS_DIM)])
        num_times = pq.read_table(path, columns=["t"])["t"].to_numpy().max() + 1
        ys: Any = np.stack([column.to_numpy() for column in table.columns], axis=1)
        ys = ys.reshape(-1, num_times, OBS_DIM)
        num_series, num_rows = ys.shape[0], ys.shape[0] * ys.shape[1]
        del table
    else:
        ys = rd.data.open_series(path, series="id", time="t", progress=False)
        num_series, num_rows = ys.num_series, ys.num_rows
    opened, peak_to_open = time.perf_counter() - began, peak()
    times: list[float] = []
    rd.fit(
        jax.random.key(0),
        rd.RecurrentFamily(jax.random.key(1), STATE_DIM, OBS_DIM),
        model(),
        ys,
        num_steps=num_series // BATCH,
        optimisation=rd.Optimisation(batch_size=BATCH, chunk_size=CHUNK),
        progress=lambda step, grade: times.append(time.perf_counter()),
    )
    steps = CHUNK * (len(times) - 2)
    rows = steps * BATCH * (num_rows // num_series)
    return {
        "kind": kind,
        "series": num_series,
        "rows": num_rows,
        "open_s": opened,
        "epoch_s": times[-1] - began - opened,
        "rows_per_s": rows / (times[-2] - times[0]),
        "peak_bytes_to_open": peak_to_open,
        "peak_bytes": peak(),
        "jax": jax.__version__,
        "load": os.getloadavg()[0],
    }


def in_a_process(kind: str, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--worker", kind, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=3600,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="An epoch from disk beside one in memory.")
    parser.add_argument("--series", type=int, default=100_000)
    parser.add_argument("--num-times", type=int, default=200)
    parser.add_argument("--group", type=int, default=50_000, help="rows of a row group")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.worker[0], Path(options.worker[1]))))
        return
    if options.series // 4 < 3 * CHUNK * BATCH:
        parser.error(f"a quarter must make three chunks: {12 * CHUNK * BATCH} series or more")
    with tempfile.TemporaryDirectory() as folder:
        few, path = Path(folder) / "few.parquet", Path(folder) / "series.parquet"
        write(few, options.series // 4, options.num_times, options.group)
        write(path, options.series, options.num_times, options.group)
        runs = [("disk", few), *([("memory", path), ("disk", path)] * options.rounds)]
        records = []
        for kind, file in runs:
            records.append({**in_a_process(kind, file), "file_bytes": file.stat().st_size})
            print(json.dumps(records[-1]), flush=True)
    best = {
        kind: max(
            r["rows_per_s"] for r in records if (r["kind"], r["series"]) == (kind, options.series)
        )
        for kind in ("memory", "disk")
    }
    print(f"from disk at {best['disk'] / best['memory']:.2f} of the speed in memory")
    if options.out:
        partial = options.out.with_suffix(".partial")
        report = {"cores": os.cpu_count(), "batch": BATCH, "records": records}
        partial.write_text(json.dumps(report, indent=2) + "\n")
        partial.replace(options.out)


if __name__ == "__main__":
    main()
