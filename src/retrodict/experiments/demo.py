"""The demo: smoothing when two states explain an observation equally well.

The model is that of section 5.2 of the paper. A state moves linearly,

    x_k = A x_{k-1} + a + N(0, 0.1²),    y_k = cos(tanh(w x_k)) + N(0, 0.001),

and is observed through an even map: only the dynamics distinguish x from −x. Three amortised
families are trained on simulated series. On held-out series they are compared with the exact
posterior, a particle smoother and two linearised smoothers.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jinja2  # noqa: F401  (a missing package is reported before training, not after)
import matplotlib  # noqa: F401
import numpy as np
from jaxtyping import Array, Float

import retrodict as rd
from retrodict._workspace import Progress, Quiet, as_json, make_writable, write_atomically
from retrodict.experiments import published
from retrodict.experiments._drawing import DASHES, INKS, MARKERS, Picture, draw
from retrodict.experiments._measure import shortest, simulate
from retrodict.experiments._report import Chapter, Section, Table, page

LEVEL = 0.9
AMORTISED = ("conjugate", "gated", "recurrent")


class Sizes(NamedTuple):
    """The sizes of the demo.

    Attributes:
        num_series: the number of training series.
        train_times: the number of rows of a training series.
        num_steps: the number of optimiser steps of a fit.
        num_tested: the number of held-out series.
        num_times: the number of rows of a held-out series.
        num_particles: the number of particles of the particle smoother.
        grid_points: the number of grid points of the exact reference.
    """

    num_series: int
    train_times: int
    num_steps: int
    num_tested: int
    num_times: int
    num_particles: int
    grid_points: int


FULL = Sizes(512, 64, 400, 8, 300, 1000, 400)


COLUMNS = {
    "smoother": "",
    "RMSE": ".3f",
    "error of Σx": ".2f",
    f"{LEVEL:.0%} holds": ".0%",
    "ELBO gap": ".3f",
    "train, s": ".0f",
    "smooth, ms": ".3g",
    "says": "",
}
"""The columns of the table of scores, with their number formats."""


class Score(NamedTuple):
    """The mean scores of one smoother on the held-out series.

    Attributes:
        rmse: the root mean squared error of its marginal means to the exact ones.
        additive_error: the error of the sum of all states of a series.
        coverage: the share of true states within their 90% interval.
        gap: evidence minus ELBO in nats per step; NaN for a smoother without an ELBO.
        trained: the seconds of training, including compilation; NaN without training.
        smoothed: the seconds per series, without compilation.
        says: the status of a linearised smoother; empty for the others.
    """

    rmse: float
    additive_error: float
    coverage: float
    gap: float
    trained: float
    smoothed: float
    says: str


class Bands(NamedTuple):
    """Marginal means and central intervals of the held-out series."""

    means: Float[np.ndarray, "series time"]
    lower: Float[np.ndarray, "series time"]
    upper: Float[np.ndarray, "series time"]


class Demo(NamedTuple):
    """The results of the demo.

    Attributes:
        seed: the random seed.
        seconds: the duration.
        scores: the scores of each smoother, by name.
    """

    seed: int
    seconds: float
    scores: dict[str, Score]


def run(out: Path, *, seed: int = 0, sizes: Sizes = FULL, progress: Progress | None = None) -> Demo:
    """Run the demo, and write `report.html`, `summary.json` and pictures.

    Args:
        out: the output folder, created if it does not exist.
        seed: the random seed.
        sizes: the sizes of the demo.
        progress: progress callback.

    Raises:
        OSError: if the folder cannot be created or written to.
    """
    began = time.perf_counter()
    make_writable(out)
    progress = Quiet() if progress is None else progress
    model = published.nonlinear_theta()
    data_key, test_key, fit_key, path_key = jax.random.split(jax.random.key(seed), 4)
    train = simulate(model, data_key, sizes.num_series, sizes.train_times)[1]
    xs, ys = simulate(model, test_key, sizes.num_tested, sizes.num_times)

    families, trained = _train(model, train, fit_key, sizes, progress)
    with _Stage(progress, "the exact posterior, on a grid"):
        grid = rd.Grid(jnp.array([-2.5]), jnp.array([2.5]), sizes.grid_points)
        lengths = np.linspace(sizes.num_times // 4, sizes.num_times, 4).astype(int)
        oracle = [[rd.grid_smoother(model, y, grid, length=n) for n in lengths] for y in ys]
        exact = _exact_bands([posteriors[-1] for posteriors in oracle])
    scores: dict[str, Score] = {}
    growth: dict[str, np.ndarray] = {}
    bands: dict[str, Bands] = {"exact": exact}
    evidence = np.array([float(posteriors[-1].log_evidence) for posteriors in oracle])
    for name, smooth in _smoothers(model, families).items():
        with _Stage(progress, name):
            chains, seconds, status = smooth(ys)
            bands[name] = _gaussian_bands(chains)
            bound = _elbos(model, chains, ys, path_key)
            gap = float(np.mean(evidence - bound)) / sizes.num_times
            training = trained.get(name, math.nan)
            scores[name] = _score(bands[name], exact, xs, gap, training, seconds, status)
            if name in AMORTISED:
                growth[name] = _growth(chains, oracle, lengths)
    with _Stage(progress, "the particle smoother"):
        name = f"FFBSi {sizes.num_particles}"
        bands[name], seconds = _particle_bands(model, ys, path_key, sizes.num_particles)
        scores[name] = _score(bands[name], exact, xs, math.nan, math.nan, seconds, "")

    with _Stage(progress, "the report"):
        pictures = [
            _draw_bands(np.asarray(xs)[0, :, 0], bands),
            _draw_two_sides(model, ys[0], oracle[0][-1], families, bands),
            _draw_growth(lengths, growth),
        ]
        demo = Demo(seed, time.perf_counter() - began, scores)
        chapter = _chapter(demo, sizes, pictures)
        for picture in pictures:
            write_atomically(out / f"{picture.name}.png", picture.png)
        write_atomically(out / "summary.json", summary(demo))
        write_atomically(out / "report.html", _page(chapter, demo))
    return demo


class _Stage:
    """A context manager that reports the beginning and the end of a stage."""

    def __init__(self, progress: Progress, name: str):
        self.progress, self.name = progress, name

    def __enter__(self) -> None:
        self.progress.begin(self.name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.progress.end(self.name, kept=False)


NUM_STAGES = len(AMORTISED) + 1 + len(AMORTISED) + 2 + 2
"""The stages: fits, grid, families and linearised smoothers, particles, report."""


def _train(
    model: rd.StateSpaceModel, ys: Array, key: Array, sizes: Sizes, progress: Progress
) -> tuple[dict[str, rd.AbstractLinearGaussianFamily], dict[str, float]]:
    """Train the three families; return them and the seconds of each."""
    kinds = (rd.ConjugateFamily, rd.GatedFamily, rd.RecurrentFamily)
    families, seconds = {}, {}
    for name, kind, one in zip(AMORTISED, kinds, jax.random.split(key, 3), strict=True):
        first, second = jax.random.split(one)
        with _Stage(progress, f"training the {name} family"):
            began = time.perf_counter()
            result = rd.fit(
                second,
                kind(first, 1, 1),
                model,
                ys,
                num_steps=sizes.num_steps,
                mask=True,
                progress=lambda step, _: progress.step(step, sizes.num_steps),
            )
            families[name], seconds[name] = result.family, time.perf_counter() - began
    return families, seconds


Chains = list[rd.LinearGaussianChain]


def _smoothers(
    model: rd.StateSpaceModel, families: dict[str, rd.AbstractLinearGaussianFamily]
) -> dict[str, Callable[[Array], tuple[Chains, float, str]]]:
    """Return smoothers by name: from series to chains, seconds per series, and a status."""

    def amortised(
        family: rd.AbstractLinearGaussianFamily,
    ) -> Callable[[Array], tuple[Chains, float, str]]:
        def whole(y: Array) -> tuple[rd.LinearGaussianChain, rd.Gaussian]:
            chain = family.infer(y)
            return chain, chain.marginals()

        jitted = jax.jit(whole)

        def smooth(ys: Array) -> tuple[Chains, float, str]:
            seconds = shortest(lambda: jitted(ys[0]), 5)
            return [jitted(y)[0] for y in ys], seconds, ""

        return smooth

    def linearised(call: Callable[..., Any]) -> Callable[[Array], tuple[Chains, float, str]]:
        def smooth(ys: Array) -> tuple[Chains, float, str]:
            posteriors = [call(model, y) for y in ys]
            statuses = sorted({posterior.status for posterior in posteriors})
            seconds = shortest(lambda: call(model, ys[0]).chain, 5)
            return [posterior.chain for posterior in posteriors], seconds, "/".join(statuses)

        return smooth

    return {name: amortised(family) for name, family in families.items()} | {
        "extended": linearised(rd.extended_smoother),
        "unscented": linearised(rd.unscented_smoother),
    }


def _exact_bands(posteriors: Sequence[rd.GridPosterior]) -> Bands:
    tails = np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    ends = np.stack([np.asarray(p.quantile(tails))[..., 0] for p in posteriors], axis=1)
    return Bands(np.stack([np.asarray(p.mean)[:, 0] for p in posteriors]), *ends)


def _gaussian_bands(chains: Chains) -> Bands:
    laws = [chain.marginals() for chain in chains]
    means = np.stack([np.asarray(law.mean)[:, 0] for law in laws])
    margin = NormalDist().inv_cdf(0.5 + LEVEL / 2) * np.stack(
        [np.asarray(law.std)[:, 0] for law in laws]
    )
    return Bands(means, means - margin, means + margin)


def _particle_bands(
    model: rd.StateSpaceModel, ys: Array, key: Array, num_particles: int
) -> tuple[Bands, float]:
    smooth = jax.jit(lambda key, y: rd.ffbsi(key, model, y, num_particles).samples[..., 0])
    keys = jax.random.split(key, len(ys))
    seconds = shortest(lambda: smooth(keys[0], ys[0]), 1)
    paths = np.stack([np.asarray(smooth(k, y)) for k, y in zip(keys, ys, strict=True)])
    ends = np.quantile(paths, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    return Bands(paths.mean(axis=1), *ends), seconds


def _elbos(model: rd.StateSpaceModel, chains: Chains, ys: Array, key: Array) -> np.ndarray:
    paths = rd.BackwardSampling(500)
    pairs = zip(chains, ys, strict=True)
    return np.array([float(rd.elbo(model, c, y, estimator=paths, key=key)) for c, y in pairs])


def _score(
    bands: Bands,
    exact: Bands,
    xs: Array,
    gap: float,
    trained: float,
    smoothed: float,
    status: str,
) -> Score:
    truth, error = np.asarray(xs)[..., 0], bands.means - exact.means
    return Score(
        rmse=float(np.sqrt(np.mean(error**2))),
        additive_error=float(np.abs(error.sum(axis=1)).mean()),
        coverage=float(np.mean((bands.lower < truth) & (truth < bands.upper))),
        gap=gap,
        trained=trained,
        smoothed=smoothed,
        says=status,
    )


def _growth(
    chains: Chains, oracle: Sequence[Sequence[rd.GridPosterior]], lengths: np.ndarray
) -> np.ndarray:
    """Compute the additive error given the first n observations, by series and n."""

    def total(chain: rd.LinearGaussianChain, num_times: int) -> float:
        return float(jnp.sum(chain.prefix(num_times).marginals().mean))

    exact = [
        [float(posterior.mean[:n].sum()) for posterior, n in zip(posteriors, lengths, strict=True)]
        for posteriors in oracle
    ]
    return np.abs(np.array([[total(c, int(n)) for n in lengths] for c in chains]) - np.array(exact))


def _worst(bands: dict[str, Bands]) -> int:
    """Return the time at which the conjugate family is furthest from the exact posterior."""
    return int(np.abs(bands["conjugate"].means - bands["exact"].means)[0].argmax())


def _draw_bands(truth: np.ndarray, bands: dict[str, Bands], num_drawn: int = 40) -> Picture:
    shown = ("exact", "gated", "conjugate", "extended")
    titles = {
        "exact": "exact posterior",
        "gated": "gated family",
        "conjugate": "conjugate family",
        "extended": "extended Kalman smoother",
    }
    begin = int(np.clip(_worst(bands) - num_drawn // 2, 0, max(0, truth.size - num_drawn)))
    times = np.arange(begin, min(begin + num_drawn, truth.size))

    def fill(*axes: Any) -> None:
        for axis, name in zip(axes, shown, strict=True):
            mean, lower, upper = (part[0, times] for part in bands[name])
            axis.fill_between(times, lower, upper, color="#b5cde6", lw=0, label=f"{LEVEL:.0%} band")
            axis.plot(times, mean, color=INKS[0], lw=1.2, label="posterior mean")
            axis.plot(times, truth[times], "x", color=INKS[1], ms=3.5, mew=0.9, label="truth")
            axis.set_title(titles[name])
            axis.margins(x=0.01)
        for axis in axes[-2:]:
            axis.set_xlabel("time")
        axes[0].set_ylabel("state")
        axes[2].set_ylabel("state")
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(handles, labels, loc="outside upper center", ncols=3)

    return draw(
        "smoothing",
        f"{times.size} states of a held-out series: truth, posterior mean and {LEVEL:.0%} band by"
        " four smoothers, around the time of the largest error of the conjugate family.",
        fill,
        rows=2,
        columns=2,
        height=4.0,
        sharex=True,
        sharey=True,
    )


def _draw_two_sides(
    model: rd.StateSpaceModel,
    ys: Float[Array, "time obs"],
    exact: rd.GridPosterior,
    families: dict[str, rd.AbstractLinearGaussianFamily],
    bands: dict[str, Bands],
) -> Picture:
    """Draw the marginals where the conjugate family is furthest from the exact posterior."""
    k = _worst(bands)
    points = np.asarray(exact.points)
    curve = np.asarray(jax.vmap(lambda x: model.emission.law(x).mean[0])(exact.points))
    noise = float(model.emission.law(exact.points[0]).std[0])
    likelihood = np.exp(
        np.asarray(jax.vmap(lambda x: model.emission.log_prob(x, ys[k]))(exact.points)).ravel()
    )
    likelihood /= likelihood.sum() * float(exact.grid.spacing[0])
    laws = {name: families[name].infer(ys).marginals() for name in ("conjugate", "gated")}

    def fill(left: Any, right: Any) -> None:
        y = float(ys[k, 0])
        left.plot(points[:, 0], curve, color=INKS[0], label="cos(tanh(w x))")
        left.axhspan(y - 2 * noise, y + 2 * noise, color="0.88", lw=0, label="y ± 2 sd")
        left.axhline(y, color="black", lw=0.8, ls=":")
        left.set_xlabel("state x")
        left.set_ylabel("observation y")
        left.set_xlim(-2, 2)
        left.legend(loc="lower center")
        right.fill_between(points[:, 0], likelihood, color="0.88", lw=0, label="from y alone")
        right.plot(points[:, 0], np.asarray(exact.density[k]), color="black", label="exact")
        for i, (name, law) in enumerate(laws.items()):
            mean, std = float(law.mean[k, 0]), float(law.std[k, 0])
            density = (
                np.exp(-0.5 * ((points[:, 0] - mean) / std) ** 2) / std / math.sqrt(2 * math.pi)
            )
            right.plot(points[:, 0], density, color=INKS[1 + i], ls=DASHES[1 + i], label=name)
        right.set_xlabel("state x")
        right.set_ylabel("density")
        right.set_xlim(-2, 2)
        right.set_title(f"densities of the state at time {k}")
        left.set_title("two states for one observation")
        right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(
        "two_sides",
        f"Left: the observation map, and the observation at time {k}. Right: the likelihood of this"
        " observation alone, which has two modes, and the posterior given all observations: exact,"
        " and by two families.",
        fill,
        columns=2,
        height=2.6,
    )


def _draw_growth(lengths: np.ndarray, growth: dict[str, np.ndarray]) -> Picture:
    def fill(axis: Any) -> None:
        for i, (name, values) in enumerate(growth.items()):
            style = {"color": INKS[i], "ls": DASHES[i], "marker": MARKERS[i], "ms": 4}
            mean = values.mean(axis=0)
            error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
            axis.errorbar(lengths, mean, yerr=error, capsize=2, label=name, **style)
        axis.set_xlabel("observations n")
        axis.set_ylabel("error of Σ x, given n observations")
        axis.set_ylim(0, None)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(
        "growth",
        "Error of the sum of all states by the number of observations: mean and standard error over"
        " the held-out series.",
        fill,
        height=2.5,
    )


def _chapter(demo: Demo, sizes: Sizes, pictures: Sequence[Picture]) -> Chapter:
    bands, two_sides, growth = pictures
    gated, extended = demo.scores["gated"], demo.scores["extended"]
    particles = demo.scores[f"FFBSi {sizes.num_particles}"]
    return Chapter(
        name="demo",
        title="A state observed through an even map",
        summary=(
            f"Three families were trained on {sizes.num_series} simulated series of"
            f" {sizes.train_times} rows, and smoothed {sizes.num_tested} held-out series of"
            f" {sizes.num_times} rows. The root mean squared error to the exact means is"
            f" {gated.rmse:.3f} for the gated family, {extended.rmse:.3f} for the extended smoother"
            f" and {particles.rmse:.3f} for the particle smoother. Per series, the latter took"
            f" {particles.smoothed / gated.smoothed:.0f} times as long as the gated family."
        ),
        sections=[
            Section("The posterior against the truth", "", [bands, _table(demo, sizes)]),
            Section("Two modes", "", [two_sides]),
            Section("Growth of the error", "", [growth]),
        ],
        numbers={},
        seconds={},
    )


def _table(demo: Demo, sizes: Sizes) -> Table:
    return Table(
        "scores",
        f"{sizes.num_tested} held-out series of {sizes.num_times} rows. RMSE and error of Σx: to"
        f" the exact posterior. Coverage of the {LEVEL:.0%} interval. ELBO gap: evidence"
        f" minus ELBO, nats per step. Training: {sizes.num_steps} steps, including compilation."
        " Smoothing: one series, compiled. Last column: the status of a linearised smoother.",
        COLUMNS,
        rows_of(demo),
    )


def rows_of(demo: Demo) -> list[list[Any]]:
    """Return the table of scores: one row per smoother, times per series in milliseconds."""
    return [
        [name, *score[:5], 1e3 * score.smoothed, score.says] for name, score in demo.scores.items()
    ]


def summary(demo: Demo) -> bytes:
    """Return the demo as JSON, as in `summary.json`."""
    scores = {name: score._asdict() for name, score in demo.scores.items()}
    return as_json(demo._asdict() | {"scores": scores})


def _page(chapter: Chapter, demo: Demo) -> bytes:
    lead = [
        "retrodict infers the path of a hidden state from noisy observations. Here a state and its"
        " negative have the same law of observations. A conjugate family represents each"
        " observation by one Gaussian, which has one mode. A linearised smoother replaces the map"
        " by a line. In a gated or recurrent family the update also depends on the earlier"
        " observations.",
    ]
    footer = f"Made by 'retrodict demo --seed {demo.seed}' in {demo.seconds:.0f} s."
    return page("retrodict: a demo", lead, [chapter], footer)
