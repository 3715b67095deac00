"""Measure rows per second of fixed-lag smoothing, row by row and in chunks.

Streams of a linear-Gaussian model with as many observations as states, by `KalmanFamily`, in
float64; with `--family mixture`, by a family that samples. The state is passed from call to call,
and each answer is awaited. The best of the repetitions is printed.

    python benchmarks/stream.py [--lag 20] [--chunk 256] [--seconds 2]
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from report import Table

jax.config.update("jax_enable_x64", True)

DIMENSIONS = (1, 2, 4)


def model_of(dim: int) -> rd.StateSpaceModel:
    rng = np.random.default_rng(dim)
    weight = rng.normal(size=(dim, dim))
    weight *= 0.95 / max(abs(np.linalg.eigvals(weight)))
    zeros, eye = jnp.zeros(dim), jnp.eye(dim)
    return rd.StateSpaceModel(
        prior=rd.Gaussian(zeros, eye),
        transition=rd.LinearGaussianKernel(jnp.asarray(weight), zeros, 0.5 * eye),
        emission=rd.LinearGaussianKernel(jnp.asarray(rng.normal(size=(dim, dim))), zeros, eye),
    )


def family_of(name: str, dim: int) -> rd.AbstractFamily:
    if name == "kalman":
        return rd.KalmanFamily(model_of(dim))
    return rd.MixtureFamily(jax.random.key(0), dim, dim)


def rows_a_second(call: Callable[[Any], Any], state: Any, rows: int, seconds: float) -> float:
    """Return the best rate of many successive calls, each of which reads `rows` rows."""
    state = jax.block_until_ready(call(state))
    best, end = float("inf"), time.perf_counter() + seconds
    batch = max(1, 256 // rows)
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(batch):
            state = jax.block_until_ready(call(state))
        best = min(best, (time.perf_counter() - start) / (batch * rows))
    return 1 / best


def measure(name: str, dim: int, lag: int, chunk: int, seconds: float) -> list[float]:
    live = rd.online.FixedLag(family_of(name, dim), lag)
    ys = np.asarray(model_of(dim).simulate(jax.random.key(1), chunk)[1])
    state, row = live.init(jax.random.key(2)), ys[0]
    jitted = jax.jit(lambda state, y: live.update(state, y)[:2])
    calls: list[tuple[Callable[[Any], Any], int]] = [
        (lambda state: live.update(state, row)[0], 1),
        (lambda state: jitted(state, row)[0], 1),
        (lambda state: live.scan(state, ys)[0], chunk),
    ]
    return [rows_a_second(call, state, count, seconds) for call, count in calls]


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows a second of a fixed lag.")
    parser.add_argument("--lag", type=int, default=20)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on each figure")
    parser.add_argument("--family", choices=["kalman", "mixture"], default="kalman")
    options = parser.parse_args()
    rows = [
        [
            str(dim),
            *(
                f"{rate:,.0f}"
                for rate in measure(
                    options.family, dim, options.lag, options.chunk, options.seconds
                )
            ),
        ]
        for dim in DIMENSIONS
    ]
    Table(
        f"Rows a second, lag {options.lag}, {options.family} family",
        ["d", "update", "update in jax.jit", f"scan of {options.chunk}"],
        rows,
        [
            f"{platform.machine()}, {os.cpu_count()} cores, load"
            f" {os.getloadavg()[0]:.1f}, jax {jax.__version__}"
        ],
    ).show()


if __name__ == "__main__":
    main()
