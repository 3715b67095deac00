"""Time the parallel smoother on an accelerator, and compare with its memory traffic alone.

    python benchmarks/gpu.py --out benchmarks/results/kalman-gpu.json

Filter, backward kernels and marginals of one long series, d=3 and m=4, in float32 and float64. It
needs retrodict and JAX only. The floor is the time to read the series and to write the filtering
laws, kernels and marginals once, at the measured bandwidth of a copy. Errors are relative to the
sequential form in float64 on the CPU, in posterior standard deviations. It runs on the default
backend of JAX, and starts no measurement after `--budget` seconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from kalman import Problem, problem, retrodict_model
from measure import Task, time_calls

STATE, OBS = 3, 4
LONG, MIDDLE, COMPARED, SEQUENTIAL = 1_000_000, 100_000, 20_000, 1_000


def main() -> None:
    arguments = _parse()
    jax.config.update("jax_enable_x64", True)
    start = time.perf_counter()
    divisor = 100 if arguments.quick else 1
    given = problem(Task("retrodict", "smoother", STATE, OBS, max(LONG // divisor, COMPARED)))
    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {
        "machine": {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "copy_bytes_per_s": bandwidth,
        },
        "runs": [],
    }
    _say(f"{report['machine']}")

    def both(n: int, parallel: bool) -> list[Callable[[], dict[str, Any]]]:
        return [
            lambda dtype=dtype: timing(given, n, dtype, parallel, bandwidth)
            for dtype in (jnp.float32, jnp.float64)
        ]

    steps = [
        *both(LONG // divisor, True),
        lambda: agreement(given, min(COMPARED, LONG // divisor)),
        *both(SEQUENTIAL, False),
        *both(MIDDLE // divisor, True),
    ]
    for step in steps:
        if time.perf_counter() - start > arguments.budget:
            _say(f"stopped: {arguments.budget:g} s are over")
            break
        report["runs"].append(step())
        _say(json.dumps(report["runs"][-1]))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    _say(f"done after {time.perf_counter() - start:.0f} s")


def copy_bandwidth() -> float:
    """Measure the bytes read and written per second by `x + 1` on a large array."""
    size = 2**24 if jax.default_backend() == "cpu" else 2**28
    x = jnp.zeros(size, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    queued = 8  # so that launching does not count

    def copy() -> None:
        for _ in range(queued - 1):
            add(x)
        add(x).block_until_ready()

    return queued * 2 * x.nbytes / min(time_calls(copy, 10))


def timing(given: Problem, n: int, dtype: Any, parallel: bool, bandwidth: float) -> dict[str, Any]:
    """Return compile time, run time and the floor of memory traffic, of one size and type."""
    what = f"{'parallel' if parallel else 'sequential'}, n={n:,}, {jnp.dtype(dtype).name}"
    _say(f"{what}: compiling")
    smooth, arguments = smoother(given, n, dtype, parallel)

    def call() -> Any:
        return jax.block_until_ready(smooth(*arguments))

    start = time.perf_counter()
    result = call()
    first = time.perf_counter() - start
    floor = sum(leaf.nbytes for leaf in jax.tree.leaves((arguments[1], result))) / bandwidth
    del result
    times = time_calls(call, 10 if not parallel else 20)
    best = min(times)
    return {
        "what": what,
        "num_times": n,
        "dtype": jnp.dtype(dtype).name,
        "parallel": parallel,
        "compile_s": max(first - best, 0.0),
        "best_s": best,
        "median_s": statistics.median(times),
        "us_per_step": 1e6 * best / n,
        "bytes_alone_s": floor,
        "times_bytes_alone": best / floor,
    }


def agreement(given: Problem, n: int) -> dict[str, Any]:
    """Return the largest errors of the parallel form, in posterior standard deviations."""
    with jax.default_device(jax.devices("cpu")[0]):
        smooth, arguments = smoother(given, n, jnp.float64, parallel=False)
        _, exact = smooth(*arguments)
        mean, std = np.asarray(exact.mean), np.asarray(exact.std)
    errors: dict[str, Any] = {"what": f"error against the CPU, n={n:,}", "num_times": n}
    for dtype in (jnp.float32, jnp.float64):
        smooth, arguments = smoother(given, n, dtype, parallel=True)
        _, marginals = smooth(*arguments)
        errors[jnp.dtype(dtype).name] = {
            "mean_in_sds": float(np.max(np.abs(np.asarray(marginals.mean) - mean) / std)),
            "sd_relative": float(np.max(np.abs(np.asarray(marginals.std) / std - 1))),
        }
    return errors


def smoother(given: Problem, n: int, dtype: Any, parallel: bool) -> tuple[Any, tuple[Any, Any]]:
    """Return the jitted smoother with its arguments; it returns the chain and the marginals."""

    def smooth(model: rd.StateSpaceModel, ys: Any) -> Any:
        chain = rd.kalman_smoother(model, ys, mask=True, parallel=parallel).chain
        return chain, chain.marginals(parallel=parallel)

    return jax.jit(smooth), (retrodict_model(given, dtype), jnp.asarray(given.ys[:n], dtype))


def _say(text: str) -> None:
    print(text, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the parallel smoother on an accelerator.")
    parser.add_argument("--out", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--budget", type=float, default=180.0, help="begin nothing after, seconds")
    parser.add_argument("--quick", action="store_true", help="series of a hundredth the length")
    return parser.parse_args()


if __name__ == "__main__":
    main()
