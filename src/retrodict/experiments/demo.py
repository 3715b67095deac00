"""The demo: smoothing when two states explain an observation equally well.

The model is that of the paper's section 5.2. A state moves linearly,

    x_k = A x_{k-1} + a + N(0, 0.1²),    y_k = cos(tanh(w x_k)) + N(0, 0.001),

and is seen through an even map: x and −x look the same, and only the dynamics tell them apart.
Three amortised families are trained on simulated series, and smooth held-out ones beside the exact
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
        num_series: training series.
        train_times: their rows.
        num_steps: steps of a fit.
        num_tested: held-out series.
        num_times: their rows.
        num_particles: particles of the particle smoother.
        grid_points: points of the exact reference.
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
        rmse: root mean squared error of its marginal means to the exact ones.
        additive_error: error on the sum of all states of a series.
        coverage: how often its 90% interval holds the true state.
        gap: by how many nats a step its ELBO is short of the evidence; NaN if it has none.
        trained: seconds of training, compilation included; NaN if there was none.
        smoothed: seconds for one series, once compiled.
        says: what it says of itself.
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
        seed: seed of all that is drawn.
        seconds: how long it took.
        scores: how each smoother did, by name.
    """

    seed: int
    seconds: float
    scores: dict[str, Score]


def run(out: Path, *, seed: int = 0, sizes: Sizes = FULL, progress: Progress | None = None) -> Demo:
    """Train, smooth, compare and draw; write `report.html`, `summary.json` and pictures.

    Args:
        out: the folder to write to; made if it does not exist.
        seed: seed of all that is drawn.
        sizes: how much is done.
        progress: who is told how far it is.

    Raises:
        OSError: if the folder cannot be made or written to.
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
        exact = _exact_bands([found[-1] for found in oracle])
    scores: dict[str, Score] = {}
    growth: dict[str, np.ndarray] = {}
    bands: dict[str, Bands] = {"exact": exact}
    evidence = np.array([float(found[-1].log_evidence) for found in oracle])
    for name, smooth in _smoothers(model, families).items():
        with _Stage(progress, name):
            chains, seconds, says = smooth(ys)
            bands[name] = _gaussian_bands(chains)
            bound = _elbos(model, chains, ys, path_key)
            gap = float(np.mean(evidence - bound)) / sizes.num_times
            known = trained.get(name, math.nan)
            scores[name] = _score(bands[name], exact, xs, gap, known, seconds, says)
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
    """A context that reports the beginning and the end of a stage."""

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
    """Return the chains of the held-out series, the seconds per series, and a remark."""

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
            found = [call(model, y) for y in ys]
            words = sorted({posterior.status for posterior in found})
            seconds = shortest(lambda: call(model, ys[0]).chain, 5)
            return [posterior.chain for posterior in found], seconds, "/".join(words)

        return smooth

    return {name: amortised(family) for name, family in families.items()} | {
        "extended": linearised(rd.extended_smoother),
        "unscented": linearised(rd.unscented_smoother),
    }


def _exact_bands(found: Sequence[rd.GridPosterior]) -> Bands:
    tails = np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    ends = np.stack([np.asarray(posterior.quantile(tails))[..., 0] for posterior in found], axis=1)
    return Bands(np.stack([np.asarray(p.mean)[:, 0] for p in found]), *ends)


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
    says: str,
) -> Score:
    truth, off = np.asarray(xs)[..., 0], bands.means - exact.means
    return Score(
        rmse=float(np.sqrt(np.mean(off**2))),
        additive_error=float(np.abs(off.sum(axis=1)).mean()),
        coverage=float(np.mean((bands.lower < truth) & (truth < bands.upper))),
        gap=gap,
        trained=trained,
        smoothed=smoothed,
        says=says,
    )


def _growth(
    chains: Chains, oracle: Sequence[Sequence[rd.GridPosterior]], lengths: np.ndarray
) -> np.ndarray:
    """Compute the additive error given the first n observations, by series and n."""

    def total(chain: rd.LinearGaussianChain, num_times: int) -> float:
        return float(jnp.sum(chain.prefix(num_times).marginals().mean))

    exact = [
        [float(posterior.mean[:n].sum()) for posterior, n in zip(found, lengths, strict=True)]
        for found in oracle
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
        " four smoothers, around the time at which the conjugate family is furthest off.",
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
    seen = np.asarray(jax.vmap(lambda x: model.emission.law(x).mean[0])(exact.points))
    noise = float(model.emission.law(exact.points[0]).std[0])
    likelihood = np.exp(
        np.asarray(jax.vmap(lambda x: model.emission.log_prob(x, ys[k]))(exact.points)).ravel()
    )
    likelihood /= likelihood.sum() * float(exact.grid.spacing[0])
    laws = {name: families[name].infer(ys).marginals() for name in ("conjugate", "gated")}

    def fill(left: Any, right: Any) -> None:
        y = float(ys[k, 0])
        left.plot(points[:, 0], seen, color=INKS[0], label="cos(tanh(w x))")
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
        right.set_title(f"time {k}: what is known of the state")
        left.set_title("two states for one observation")
        right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(
        "two_sides",
        f"Left: the observation map, and the observation at time {k}. Right: what it says of the"
        " state by itself, which has two sides, and the posterior given all observations: exact,"
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
        "How the error on the sum of all states grows with the number of observations: mean and"
        " standard error over the held-out series.",
        fill,
        height=2.5,
    )


def _chapter(demo: Demo, sizes: Sizes, pictures: Sequence[Picture]) -> Chapter:
    bands, two_sides, growth = pictures
    gated, extended = demo.scores["gated"], demo.scores["extended"]
    particles = demo.scores[f"FFBSi {sizes.num_particles}"]
    return Chapter(
        name="demo",
        title="A state that is seen through an even map",
        summary=(
            f"Three families were trained on {sizes.num_series} simulated series of"
            f" {sizes.train_times} rows, and smoothed {sizes.num_tested} held-out series of"
            f" {sizes.num_times}. The gated family's means are {gated.rmse:.3f} from the exact ones"
            f" (root mean square), the extended smoother's {extended.rmse:.3f} and a particle"
            f" smoother's {particles.rmse:.3f}, which took"
            f" {particles.smoothed / gated.smoothed:.0f} times as long for a series."
        ),
        sections=[
            Section("The posterior against the truth", "", [bands, _table(demo, sizes)]),
            Section("Two sides", "", [two_sides]),
            Section("How errors grow", "", [growth]),
        ],
        numbers={},
        seconds={},
    )


def _table(demo: Demo, sizes: Sizes) -> Table:
    return Table(
        "scores",
        f"{sizes.num_tested} held-out series of {sizes.num_times} rows. RMSE and the error on the"
        f" sum of states are to the exact posterior; how often the {LEVEL:.0%} interval holds the"
        " state; how far the ELBO is short of the evidence, nats a step. Training:"
        f" {sizes.num_steps} steps, compilation included. Smoothing: one series, compiled. The last"
        " column is what a linearised smoother says of itself.",
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
        "retrodict infers the path of a hidden state from noisy observations of it. Here a state"
        " and its negative look the same. A conjugate family gives each observation one Gaussian,"
        " which cannot have two sides; a linearised smoother replaces the map by a line; a gated or"
        " recurrent family reads the observation in the light of what it knows already.",
    ]
    footer = f"Made by 'retrodict demo --seed {demo.seed}' in {demo.seconds:.0f} s."
    return page("retrodict: a demo", lead, [chapter], footer)
