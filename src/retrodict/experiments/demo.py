"""The demo: a noisy oscillator with gaps, simulated, smoothed exactly, checked and drawn.

The model is the stochastic cycle of structural time series (Harvey 1989). A point in the plane
turns by 2π/period a step, shrinks a little and is pushed by noise. Its first coordinate, the
signal, is observed with noise at some of the times:

    x_k = ρ R(2π/period) x_{k-1} + σ ε_k,    y_k = x_k[0] + τ η_k.

What comes out is checked by an identity that needs no second implementation: whatever path x is
drawn from the posterior q, log p(x, y) − log q(x) is the log-evidence, to rounding.
"""

import io
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import retrodict as rd

PERIOD = 40.0
DAMPING = 0.995
STATE_STD = 0.1
OBS_STD = 0.5
GAPS = ((0.20, 0.32), (0.58, 0.74))
"""Stretches without data, as fractions of the series; of the rest, `LOST` is missing at random."""
LOST = 0.1

LEVEL = 0.9
NUM_CHECKED = 100
"""How many sampled paths are put to the identity."""
NUM_DRAWN = 4
"""How many of them appear in the figure."""


class DemoResult(NamedTuple):
    """The numbers of the demo.

    Attributes:
        seed: seed of the simulated series and of the sampled paths.
        num_times: rows of the series.
        num_missing: rows without an observation.
        log_evidence: log p(y), in nats.
        filter_rmse: root mean squared error of the filtering means to the simulated signal.
        smoother_rmse: the same of the smoothed means.
        coverage: how often the 90% interval of the smoothed signal holds the simulated one.
        identity_error: the largest |log p(x, y) − log q(x) − log p(y)| over sampled paths.
        smoothing_seconds: time of one smoothing pass with marginals, once compiled.
    """

    seed: int
    num_times: int
    num_missing: int
    log_evidence: float
    filter_rmse: float
    smoother_rmse: float
    coverage: float
    identity_error: float
    smoothing_seconds: float


class _Smoothed(NamedTuple):
    """The simulated path, the series, its exact posterior and what follows from it."""

    xs: Float[Array, "time state"]
    ys: Float[Array, "time obs"]
    exact: rd.KalmanPosterior
    marginals: rd.Gaussian
    paths: Float[Array, "sample time state"]
    identity: Float[Array, "sample"]


def stochastic_cycle() -> rd.StateSpaceModel:
    """The model of the demo, started from its stationary law."""
    angle = 2 * math.pi / PERIOD
    rotation = jnp.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    stationary = STATE_STD / math.sqrt(1 - DAMPING**2)
    return rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.zeros(2), rd.Diagonal(stationary * jnp.ones(2))),
        transition=rd.LinearGaussianKernel(
            DAMPING * rotation, jnp.zeros(2), rd.Diagonal(STATE_STD * jnp.ones(2))
        ),
        emission=rd.LinearGaussianKernel(
            jnp.array([[1.0, 0.0]]), jnp.zeros(1), rd.Diagonal(OBS_STD * jnp.ones(1))
        ),
    )


def run(out: Path, *, seed: int = 0, num_times: int = 200) -> DemoResult:
    """Simulates, smooths, checks and draws; writes `smoothing.png` and `summary.json`.

    Args:
        out: the folder to write to; made if it does not exist.
        seed: seed of the simulated series and of the sampled paths.
        num_times: rows of the series.

    Returns:
        The numbers that are in `summary.json`.

    Raises:
        OSError: if the folder cannot be made or written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise PermissionError(13, "Permission denied", str(out))
    result, found = smooth(seed=seed, num_times=num_times)
    write_atomically(out / "smoothing.png", draw(found))
    summary = json.dumps(result._asdict(), indent=2) + "\n"
    write_atomically(out / "summary.json", summary.encode())
    return result


def smooth(*, seed: int, num_times: int) -> tuple[DemoResult, _Smoothed]:
    """The numbers of the demo, and what its figure is drawn from."""
    model = stochastic_cycle()
    data_key, path_key = jax.random.split(jax.random.key(seed))
    xs, ys = _simulate(model, data_key, num_times)
    exact, marginals = _posterior(model, ys)
    paths, identity = _check(model, exact, ys, path_key)
    found = _Smoothed(xs, ys, exact, marginals, paths, identity)

    truth, mean = np.asarray(xs[:, 0]), np.asarray(marginals.mean[:, 0])
    lower, upper = _band(marginals)
    result = DemoResult(
        seed=seed,
        num_times=num_times,
        num_missing=int(np.isnan(ys).sum()),
        log_evidence=float(exact.log_evidence),
        filter_rmse=_rmse(np.asarray(exact.chain.laws.mean[:, 0]) - truth),
        smoother_rmse=_rmse(mean - truth),
        coverage=float(np.mean((lower <= truth) & (truth <= upper))),
        identity_error=float(np.max(np.abs(identity - exact.log_evidence))),
        smoothing_seconds=_seconds(lambda: _posterior(model, ys)),
    )
    return result, found


@partial(jax.jit, static_argnums=2)
def _simulate(model: rd.StateSpaceModel, key: Array, num_times: int) -> tuple[Array, Array]:
    """A path and its observations, NaN in the gaps and where an observation was lost."""
    data_key, loss_key = jax.random.split(key)
    xs, ys = model.simulate(data_key, num_times)
    position = jnp.arange(num_times) / num_times
    seen = jax.random.uniform(loss_key, (num_times,)) >= LOST
    for start, stop in GAPS:
        seen &= (position < start) | (position >= stop)
    return xs, jnp.where(seen[:, None], ys, jnp.nan)


@jax.jit
def _posterior(
    model: rd.StateSpaceModel, ys: Float[Array, "time obs"]
) -> tuple[rd.KalmanPosterior, rd.Gaussian]:
    exact = rd.kalman_smoother(model, ys)
    return exact, exact.chain.marginals()


@jax.jit
def _check(
    model: rd.StateSpaceModel,
    exact: rd.KalmanPosterior,
    ys: Float[Array, "time obs"],
    key: Array,
) -> tuple[Float[Array, "sample time state"], Float[Array, "sample"]]:
    """Sampled paths, and log p(x, y) − log q(x) of each."""
    paths = exact.chain.sample(key, NUM_CHECKED)
    return paths, jax.vmap(lambda x: model.log_joint(x, ys) - exact.chain.log_prob(x))(paths)


def _band(marginals: rd.Gaussian) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the central intervals of the signal."""
    mean, std = np.asarray(marginals.mean[:, 0]), np.asarray(marginals.std[:, 0])
    margin = NormalDist().inv_cdf(0.5 + LEVEL / 2) * std
    return mean - margin, mean + margin


def _rmse(error: np.ndarray) -> float:
    return float(np.sqrt(np.mean(error**2)))


def _seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """The shortest of several timings of what has been compiled already."""
    timings = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        timings.append(time.perf_counter() - start)
    return min(timings)


def draw(found: _Smoothed) -> bytes:
    """The figure as a PNG: the posterior of the signal, and how sure filter and smoother are."""
    # A context, and a figure outside of pyplot: nothing global is left changed.
    with rc_context({"font.family": "serif", "font.size": 9, "axes.linewidth": 0.6}):
        figure = Figure(figsize=(7.0, 4.2), dpi=200, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
        _draw_signal(upper, found)
        _draw_spread(lower, found)
        for axes in (upper, lower):
            _shade_gaps(axes, len(found.ys))
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.01)
        handles, labels = upper.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False)
        figure.align_ylabels((upper, lower))
        buffer = io.BytesIO()
        canvas.print_png(buffer)
    return buffer.getvalue()


def _draw_signal(axes: Axes, found: _Smoothed) -> None:
    times = np.arange(len(found.ys))
    mean, truth, seen = (np.asarray(a[:, 0]) for a in (found.marginals.mean, found.xs, found.ys))
    axes.fill_between(
        times, *_band(found.marginals), color="#b5cde6", lw=0, label=f"{LEVEL:.0%} band"
    )
    for i, path in enumerate(np.asarray(found.paths[:NUM_DRAWN, :, 0])):
        label = "sampled paths" if i == 0 else None
        axes.plot(times, path, color="#5d86b0", lw=0.5, label=label)
    axes.plot(times, mean, color="#123a63", lw=1.4, label="posterior mean")
    axes.plot(times, truth, color="black", lw=1.0, ls=(0, (4, 2)), label="truth")
    points = {"mfc": "white", "mec": "0.2", "mew": 0.6, "label": "observations"}
    axes.plot(times, seen, ls="none", marker="o", ms=2.8, **points)
    axes.set_ylabel("signal")


def _draw_spread(axes: Axes, found: _Smoothed) -> None:
    times = np.arange(len(found.ys))
    filtered, smoothed = found.exact.chain.laws.std[:, 0], found.marginals.std[:, 0]
    axes.plot(times, np.asarray(filtered), color="black", lw=0.9, ls=":", label="filter")
    axes.plot(times, np.asarray(smoothed), color="#123a63", lw=1.2, label="smoother")
    axes.set_ylim(0, None)
    axes.set_ylabel("std. dev.")
    axes.set_xlabel("time step")
    middle = (GAPS[0][1] + GAPS[1][0]) / 2
    axes.legend(loc="upper center", bbox_to_anchor=(middle, 1.12), frameon=False)


def _shade_gaps(axes: Axes, num_times: int) -> None:
    for start, stop in GAPS:
        left, right = start * num_times - 0.5, stop * num_times - 0.5
        axes.axvspan(left, right, color="0.93", lw=0, zorder=-1)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: beside it first, then in its place."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
