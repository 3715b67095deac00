"""Time a training step and smoothing by batch size and number of devices.

Devices are simulated on the same CPU cores, so that they add no speed beyond the number of cores.
The figures show the cost of more devices: copies of the parameters, one exchange of gradients per
step, smaller batches per device. With `--real`, the devices of JAX are used, 1, 2, 4, ... of them.
The family is a `RecurrentFamily` for a linear-Gaussian model. Each number of devices has a separate
process, and the best of several chunks counts.

    python benchmarks/scale_devices.py [--devices 1 2 4 8] [--batches 64 512] [--out devices.json]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from report import Table, milliseconds

STATE_DIM, OBS_DIM = 3, 4
CHUNK = 10
NUM_CHUNKS = 5
SIMULATED = "--xla_force_host_platform_device_count={}"


def model() -> rd.StateSpaceModel:
    rng = np.random.default_rng(0)
    zeros, eye = jnp.zeros(STATE_DIM), jnp.eye(STATE_DIM)
    return rd.StateSpaceModel(
        prior=rd.Gaussian(zeros, eye),
        transition=rd.LinearGaussianKernel(0.9 * eye, zeros, 0.4 * eye),
        emission=rd.LinearGaussianKernel(
            jnp.asarray(rng.normal(size=(OBS_DIM, STATE_DIM)), zeros.dtype),
            jnp.zeros(OBS_DIM),
            0.5 * jnp.eye(OBS_DIM),
        ),
    )


def measure(num_devices: int, batch: int, num_times: int) -> dict[str, Any]:
    """Return the seconds of a training step and of smoothing a batch, on the first devices."""
    mesh = jax.make_mesh((num_devices,), ("batch",), devices=jax.devices()[:num_devices])
    theta = model()
    keys = jax.random.split(jax.random.key(0), batch)
    ys = jax.jit(jax.vmap(lambda key: theta.simulate(key, num_times)[1]))(keys)
    family = rd.RecurrentFamily(jax.random.key(1), STATE_DIM, OBS_DIM)
    times = [time.perf_counter()]
    rd.fit(
        jax.random.key(2),
        family,
        theta,
        ys,
        num_steps=CHUNK * (NUM_CHUNKS + 1),
        optimisation=rd.Optimisation(batch_size=batch, chunk_size=CHUNK),
        held_out=ys[:8],
        mesh=mesh,
        progress=lambda step, grade: times.append(time.perf_counter()),
    )
    infer = rd.distributed.sharded_vmap(
        lambda family, y: family.infer(y).marginals().mean, (None, 0), mesh=mesh
    )
    smoothing = []
    for _ in range(NUM_CHUNKS + 1):
        began = time.perf_counter()
        jax.block_until_ready(infer(family, ys))
        smoothing.append(time.perf_counter() - began)
    return {
        "devices": num_devices,
        "batch": batch,
        "num_times": num_times,
        "step": min(np.diff(times)[1:]) / CHUNK,
        "smoothing": min(smoothing[1:]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def in_a_process(num_devices: int, batch: int, num_times: int, real: bool) -> dict[str, Any]:
    flags = os.environ.get("XLA_FLAGS", "")
    if not real:
        flags = f"{flags} {SIMULATED.format(num_devices)}"
    done = subprocess.run(
        [sys.executable, __file__, "--worker", str(num_devices), str(batch), str(num_times)],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(records: list[dict[str, Any]], what: str, title: str) -> Table:
    """Return one row per number of devices, with time and rows per second of each batch."""
    batches = sorted({record["batch"] for record in records})
    rows = []
    for devices in sorted({record["devices"] for record in records}):
        cells = [str(devices)]
        for batch in batches:
            matching = [r for r in records if (r["devices"], r["batch"]) == (devices, batch)]
            seconds = matching[0][what] if matching else None
            rate = matching[0]["num_times"] * batch / matching[0][what] if matching else 0.0
            cells += [milliseconds(seconds), f"{rate / 1e6:.2f}"]
        rows.append(cells)
    columns = ["devices"]
    for batch in batches:
        columns += [f"batch {batch}, ms", "10⁶ rows/s"]
    return Table(title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost by batch and number of devices.")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--num-times", type=int, default=64)
    parser.add_argument("--real", action="store_true", help="the devices that JAX has")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--worker", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(*options.worker)))
        return
    records = [
        in_a_process(devices, batch, options.num_times, options.real)
        for devices in options.devices
        for batch in options.batches
    ]
    kind = "real" if options.real else "simulated"
    shown = [
        table(records, "step", f"A training step, n={options.num_times}, {kind} devices"),
        table(records, "smoothing", f"Smoothing a batch, n={options.num_times}, {kind} devices"),
    ]
    shown[-1].notes.append(
        f"RecurrentFamily, d={STATE_DIM}, m={OBS_DIM}, float32; {records[0]['device']},"
        f" {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f},"
        f" jax {records[0]['jax']}"
    )
    for each in shown:
        each.show()
    if options.out:
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps({"kind": kind, "records": records}, indent=2) + "\n")
        partial.replace(options.out)


if __name__ == "__main__":
    main()
