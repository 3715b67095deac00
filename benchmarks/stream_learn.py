"""Measure rows per second of a stream with and without learning.

`retrodict.runs.stream` reads comma-separated rows, answers each with filtered and smoothed states,
saves its state every second and, with `Learning`, takes a step of Adam per row. A local level (one
state) and two local linear trends (four states) are learned by the exact score; a mixture family on
counts by backpropagation through 8 rows. All in float64. Programs are compiled before timing, and
the best of several runs is printed. Columns are for whole streams, from input bytes to output
bytes, and for their compiled program alone, in chunks of 256 rows.

    python benchmarks/stream_learn.py [--rows 20000] [--lag 20]
"""

import argparse
import io
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pandas as pd

import retrodict as rd
from report import Table
from retrodict import data, models, runs

jax.config.update("jax_enable_x64", True)

CHUNK = 256


def series_of(model: rd.StateSpaceModel, num_rows: int) -> np.ndarray:
    return np.asarray(rd.unwrap(model).simulate(jax.random.key(1), num_rows)[1])


def rate_of_stream(
    run: runs.Run, ys: np.ndarray, lag: int, learning: runs.Learning | None
) -> float:
    """Return rows per second of a whole stream, the best of three; the first compiles."""
    frame = pd.DataFrame({f"y{i}": ys[:, i] for i in range(ys.shape[1])})
    frame.insert(0, "t", np.arange(len(ys)))
    lines, state = frame.to_csv(index=False).encode(), run.path / "state.rd"
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        runs.stream(
            run,
            io.BytesIO(lines),
            io.BytesIO(),
            lag=lag,
            state=state,
            learning=learning,
            after="prior",
        )
        seconds.append(time.perf_counter() - start)
        state.unlink()
    return len(ys) / min(seconds[1:])


def rate_of_program(live: Any, ys: np.ndarray) -> float:
    """Return rows per second of one compiled chunk, the best of many."""
    rows, state = ys[:CHUNK], live.init(jax.random.key(0))
    state, _ = jax.block_until_ready(live.scan(state, rows))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(live.scan(state, rows))
        best = min(best, time.perf_counter() - start)
    return CHUNK / best


def exact_line(name: str, columns: int, options: argparse.Namespace, folder: Path) -> list[str]:
    """Measure a linear-Gaussian run that learns its model."""
    truth = models.from_options(name, obs_dim=columns)
    ys = series_of(truth, options.rows)
    first = {"t": np.arange(200)} | {f"y{i}": ys[:200, i] for i in range(columns)}
    run = runs.fit(data.read(first), models.load(name), folder / name)
    learning = runs.Learning("model")
    rates = [rate_of_stream(run, ys, options.lag, how) for how in (None, learning)]
    lives = (rd.online.FixedLag(run.smoother, options.lag), learning.learner(run, options.lag))
    rates += [rate_of_program(live, ys) for live in lives]
    return cells(f"{name}, d = {truth.state_dim}", *rates)


def family_line(options: argparse.Namespace) -> list[str]:
    """Measure a mixture family and its model, learned together from counts."""
    model = models.poisson_counts(mean=1.0, persistence=0.9, scale=0.3)
    ys = series_of(model, CHUNK)
    family = rd.MixtureFamily(jax.random.key(0), 1, 1).prepare(model, ys)
    learner = rd.online.OnlineLearner(
        family, model, rd.online.TruncatedBackprop(8), optax.adam(1e-3)
    )
    lives = (rd.online.FixedLag(family, options.lag), rd.online.LaggedLearner(learner, options.lag))
    rates = [rate_of_program(live, ys) for live in lives]
    return cells("poisson_counts, mixture, d = 1", None, None, *rates)


def cells(name: str, *rates: float | None) -> list[str]:
    return [name, *("–" if rate is None else f"{rate:,.0f}" for rate in rates)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows a second of a stream that learns.")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--lag", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines: list[Any] = [
            exact_line("local_level", 1, options, Path(folder)),
            exact_line("local_trend", 2, options, Path(folder)),
            family_line(options),
        ]
    device, cores = jax.devices()[0].device_kind, os.cpu_count()
    Table(
        f"Rows a second, lag {options.lag}, {options.rows:,} rows",
        ["", "frozen stream", "learning stream", "frozen program", "learning program"],
        lines,
        [f"{device}, {cores} cores, {platform.machine()}, jax {jax.__version__}, float64"],
    ).show()


if __name__ == "__main__":
    main()
