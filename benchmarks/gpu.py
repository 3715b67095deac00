"""Time exact smoothing on an accelerator, and compare with its memory traffic alone.

    python benchmarks/gpu.py --out benchmarks/results/kalman-gpu.json

Log-evidence and marginals of one long series, d=3 and m=4, in float32 and float64, and of batches
of series that share a model in float32. It needs retrodict and JAX only. The floor is the time to
read the series and to write the marginals once, at the measured bandwidth of a copy. Errors are
relative to the sequential form in float64 on the CPU, in posterior standard deviations. It runs on
the default backend of JAX, and starts no measurement after `--budget` seconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from kalman import Problem, problem, retrodict_model
from measure import Task, time_calls

STATE, OBS = 3, 4
BATCHES = ((3, 4, 500, 4096, True), (3, 4, 500, 4096, False), (10, 10, 500, 1024, True))
"""Numbers of states, of observed entries, of rows and of series, and whether in parallel."""
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
        *(partial(batch_timing, *case, bandwidth, divisor) for case in BATCHES),
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
    smooth, arguments = smoother(given, n, dtype, parallel)
    facts = {"num_times": n, "dtype": jnp.dtype(dtype).name, "parallel": parallel}
    return {"what": what, **facts, **measured(what, smooth, arguments, n, parallel, bandwidth)}


def batch_timing(
    state: int, obs: int, n: int, count: int, parallel: bool, bandwidth: float, divisor: int
) -> dict[str, Any]:
    """Return the figures of `timing` for a batch of series without gaps, in float32."""
    count = max(count // divisor, 2)
    form = "parallel" if parallel else "sequential"
    what = f"{form}, {count:,} series of {n}, d={state}, m={obs}, float32"
    given = problem(Task("retrodict", "smoother", state, obs, n, num_series=8))
    ys = jnp.asarray(np.resize(given.ys, (count, n, obs)), jnp.float32)

    @jax.jit
    def smooth(model: rd.StateSpaceModel, ys: Any) -> Any:
        batch = rd.kalman_smoother_batch(model, ys, mask=True, parallel=parallel)
        means = batch.map(lambda chain: chain.marginals(parallel=parallel).mean)
        return batch.log_evidence, means, batch[0].chain.marginals(parallel=parallel).covariance

    arguments = (retrodict_model(given, jnp.float32), ys)
    facts = {"num_times": n, "num_series": count, "state_dim": state, "dtype": "float32"}
    figures = measured(what, smooth, arguments, n * count, parallel, bandwidth)
    return {"what": what, **facts, "parallel": parallel, **figures}


def measured(
    what: str, smooth: Any, arguments: tuple, rows: int, parallel: bool, bandwidth: float
) -> dict[str, float]:
    """Compile a function, time it, and compare with the time to read and write its arrays once."""
    _say(f"{what}: compiling")

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
        "compile_s": max(first - best, 0.0),
        "best_s": best,
        "median_s": statistics.median(times),
        "us_per_row": 1e6 * best / rows,
        "bytes_alone_s": floor,
        "times_bytes_alone": best / floor,
    }


def agreement(given: Problem, n: int) -> dict[str, Any]:
    """Return the largest errors of the parallel form, in posterior standard deviations."""
    with jax.default_device(jax.devices("cpu")[0]):
        smooth, arguments = smoother(given, n, jnp.float64, parallel=False)
        _, mean, std = _deviations(smooth(*arguments))
    errors: dict[str, Any] = {"what": f"error against the CPU, n={n:,}", "num_times": n}
    for dtype in (jnp.float32, jnp.float64):
        smooth, arguments = smoother(given, n, dtype, parallel=True)
        _, means, stds = _deviations(smooth(*arguments))
        errors[jnp.dtype(dtype).name] = {
            "mean_in_sds": float(np.max(np.abs(means - mean) / std)),
            "sd_relative": float(np.max(np.abs(stds / std - 1))),
        }
    return errors


def smoother(given: Problem, n: int, dtype: Any, parallel: bool) -> tuple[Any, tuple[Any, Any]]:
    """Return the jitted smoother with its arguments; its results are those of the CPU benchmark."""

    def smooth(model: rd.StateSpaceModel, ys: Any) -> Any:
        exact = rd.kalman_smoother(model, ys, mask=True, parallel=parallel)
        marginals = exact.chain.marginals(parallel=parallel)
        return exact.log_evidence, marginals.mean, marginals.covariance

    return jax.jit(smooth), (retrodict_model(given, dtype), jnp.asarray(given.ys[:n], dtype))


def _deviations(result: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the log-evidence, the means and the standard deviations."""
    log_evidence, mean, covariance = result
    variances = np.diagonal(np.asarray(covariance), axis1=-2, axis2=-1)
    return log_evidence, np.asarray(mean), np.sqrt(variances)


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
