"""The demo: smoothing when two states explain an observation equally well.

The model is that of section 5.2 of the paper. A state moves linearly,

    x_k = A x_{k-1} + a + N(0, 0.1²),    y_k = cos(tanh(w x_k)) + N(0, 0.001),

and is observed through an even map: only the dynamics distinguish x from −x. Three amortised
families are trained on simulated series. On held-out series they are compared with the exact
posterior, a particle smoother and two linearised smoothers.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jinja2  # noqa: F401  (a missing package is reported before training, not after)
import matplotlib  # noqa: F401
import numpy as np
from jaxtyping import Array, Float

import retrodict as rd
from retrodict._files import as_json, ensure_folder, write_atomically
from retrodict._workspace import Progress, Quiet
from retrodict.experiments import published
from retrodict.experiments._drawing import BESIDE, DASHES, INKS, MARKERS, Picture, draw
from retrodict.experiments._measure import LEVEL, MARGIN, exact_band, shortest, simulate
from retrodict.experiments._report import Table, make_chapter, page

LEAD = (
    "retrodict infers the path of a hidden state from noisy observations. Here a state and its"
    " negative have the same law of observations. A conjugate family represents each observation by"
    " one Gaussian, which has one mode. A linearised smoother replaces the map by a line. In a"
    " gated or recurrent family the update also depends on the earlier observations."
)
NUM_DRAWN = 40
"""The number of states in the figure of bands."""

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
    ensure_folder(out)
    progress = Quiet() if progress is None else progress
    model = published.nonlinear_theta()
    data_key, test_key, fit_key, path_key = jax.random.split(jax.random.key(seed), 4)
    _, train = simulate(model, jax.random.split(data_key, sizes.num_series), sizes.train_times)
    xs, ys = simulate(model, jax.random.split(test_key, sizes.num_tested), sizes.num_times)

    families, trained = _train(model, train, fit_key, sizes, progress)
    with _stage(progress, "the exact posterior, on a grid"):
        grid = rd.Grid(jnp.array([-2.5]), jnp.array([2.5]), sizes.grid_points)
        lengths = np.linspace(sizes.num_times // 4, sizes.num_times, 4).astype(int)
        oracle = [[rd.grid_smoother(model, y, grid, length=n) for n in lengths] for y in ys]
        exact = Bands(*np.stack([exact_band(by_length[-1]) for by_length in oracle], axis=1))
    scores: dict[str, Score] = {}
    growth: dict[str, np.ndarray] = {}
    bands: dict[str, Bands] = {"exact": exact}
    evidence = np.array([float(by_length[-1].log_evidence) for by_length in oracle])
    for name, smooth in _smoothers(model, families).items():
        with _stage(progress, name):
            chains, statuses = zip(*map(smooth, ys), strict=True)
            bands[name] = _gaussian_bands(chains)
            gap = float(np.mean(evidence - _elbos(model, chains, ys, path_key))) / sizes.num_times
            seconds = shortest(lambda smooth=smooth: smooth(ys[0])[0], 5)
            status, training = "/".join(sorted({*statuses})), trained.get(name, math.nan)
            errors = _errors(bands[name], exact, xs)
            scores[name] = Score(*errors, gap, training, seconds, status)
            if name in AMORTISED:
                growth[name] = _growth(chains, oracle, lengths)
    with _stage(progress, "the particle smoother"):
        name = f"FFBSi {sizes.num_particles}"
        bands[name], seconds = _particle_bands(model, ys, path_key, sizes.num_particles)
        scores[name] = Score(*_errors(bands[name], exact, xs), math.nan, math.nan, seconds, "")

    with _stage(progress, "the report"):
        pictures = [
            _draw_bands(np.asarray(xs)[0, :, 0], bands),
            _draw_two_sides(model, ys[0], oracle[0][-1], families, bands),
            _draw_growth(lengths, growth),
        ]
        demo = Demo(seed, time.perf_counter() - began, scores)
        chapter = make_chapter(
            "demo",
            [*pictures, Table("scores", COLUMNS, rows_of(demo))],
            numbers={},
            seconds={},
            sizes=sizes,
            scores=scores,
            particles=scores[name],
            times_as_long=scores[name].smoothed / scores["gated"].smoothed,
            num_drawn=min(NUM_DRAWN, sizes.num_times),
            worst=_worst(bands),
        )
        footer = f"Made by 'retrodict demo --seed {seed}' in {demo.seconds:.0f} s."
        for picture in pictures:
            write_atomically(out / f"{picture.name}.png", picture.png)
        write_atomically(out / "summary.json", summary(demo))
        write_atomically(out / "report.html", page("retrodict: a demo", [LEAD], [chapter], footer))
    return demo


@contextmanager
def _stage(progress: Progress, name: str) -> Iterator[None]:
    """Report the beginning and, if nothing fails, the end of a stage."""
    progress.begin(name)
    yield
    progress.end(name, kept=False)


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
        with _stage(progress, f"training the {name} family"):
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


Chains: TypeAlias = Sequence[rd.LinearGaussianChain]
Smoother: TypeAlias = Callable[[Array], tuple[rd.LinearGaussianChain, str]]
"""A map from a series to its chain and a status."""


def _smoothers(
    model: rd.StateSpaceModel, families: dict[str, rd.AbstractLinearGaussianFamily]
) -> dict[str, Smoother]:
    """Return the smoothers by name."""

    def amortised(family: rd.AbstractLinearGaussianFamily) -> Smoother:
        @jax.jit
        def infer_with_marginals(y: Array) -> tuple[rd.LinearGaussianChain, rd.Gaussian]:
            chain = family.infer(y)
            return chain, chain.marginals()

        return lambda y: (infer_with_marginals(y)[0], "")

    def linearised(call: Callable[..., Any]) -> Smoother:
        def smooth(y: Array) -> tuple[rd.LinearGaussianChain, str]:
            posterior = call(model, y)
            return posterior.chain, posterior.status

        return smooth

    return {name: amortised(family) for name, family in families.items()} | {
        "extended": linearised(rd.extended_smoother),
        "unscented": linearised(rd.unscented_smoother),
    }


def _gaussian_bands(chains: Chains) -> Bands:
    laws = [chain.marginals() for chain in chains]
    means, stds = (np.stack([getattr(law, part)[:, 0] for law in laws]) for part in ("mean", "std"))
    return Bands(means, means - MARGIN * stds, means + MARGIN * stds)


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


def _errors(bands: Bands, exact: Bands, xs: Array) -> tuple[float, float, float]:
    """Return the first three scores of a smoother."""
    truth, error = np.asarray(xs)[..., 0], bands.means - exact.means
    return (
        float(np.sqrt(np.mean(error**2))),
        float(np.abs(error.sum(axis=1)).mean()),
        float(np.mean((bands.lower < truth) & (truth < bands.upper))),
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


def _draw_bands(truth: np.ndarray, bands: dict[str, Bands]) -> Picture:
    shown = {
        "exact": "exact posterior",
        "gated": "gated family",
        "conjugate": "conjugate family",
        "extended": "extended Kalman smoother",
    }
    begin = int(np.clip(_worst(bands) - NUM_DRAWN // 2, 0, max(0, truth.size - NUM_DRAWN)))
    times = np.arange(begin, min(begin + NUM_DRAWN, truth.size))

    def plot(axis: Any, name: str) -> None:
        mean, lower, upper = (part[0, times] for part in bands[name])
        axis.fill_between(times, lower, upper, color="#b5cde6", lw=0, label=f"{LEVEL:.0%} band")
        axis.plot(times, mean, color=INKS[0], lw=1.2, label="posterior mean")
        axis.plot(times, truth[times], "x", color=INKS[1], ms=3.5, mew=0.9, label="truth")
        axis.margins(x=0.01)

    return draw(
        "smoothing",
        plot,
        [(title, (name,)) for name, title in shown.items()],
        columns=2,
        height=4.0,
        xlabel="time",
        ylabels=["state", "state"],
        legend={"loc": "outside upper center", "ncols": 3},
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
    points, y = np.asarray(exact.points)[:, 0], float(ys[k, 0])
    curve = np.asarray(jax.vmap(lambda x: model.emission.law(x).mean[0])(exact.points))
    noise = float(model.emission.law(exact.points[0]).std[0])
    likelihood = np.exp(
        np.asarray(jax.vmap(lambda x: model.emission.log_prob(x, ys[k]))(exact.points)).ravel()
    )
    likelihood /= likelihood.sum() * float(exact.grid.spacing[0])

    def draw_map(axis: Any) -> None:
        axis.plot(points, curve, color=INKS[0], label="cos(tanh(w x))")
        axis.axhspan(y - 2 * noise, y + 2 * noise, color="0.88", lw=0, label="y ± 2 sd")
        axis.axhline(y, color="black", lw=0.8, ls=":")
        axis.set_ylabel("observation y")
        axis.legend(loc="lower center")

    def draw_densities(axis: Any) -> None:
        axis.fill_between(points, likelihood, color="0.88", lw=0, label="from y alone")
        axis.plot(points, np.asarray(exact.density[k]), color="black", label="exact")
        for i, name in enumerate(("conjugate", "gated")):
            law = families[name].infer(ys).marginals()
            marginal = NormalDist(float(law.mean[k, 0]), float(law.std[k, 0]))
            density = [marginal.pdf(x) for x in points]
            axis.plot(points, density, color=INKS[1 + i], ls=DASHES[1 + i], label=name)
        axis.set_ylabel("density")
        axis.legend(**BESIDE)

    def plot(axis: Any, draw_side: Callable[[Any], None]) -> None:
        draw_side(axis)
        axis.set_xlim(-2, 2)

    return draw(
        "two_sides",
        plot,
        [
            ("two states for one observation", (draw_map,)),
            (f"densities of the state at time {k}", (draw_densities,)),
        ],
        xlabel="state x",
    )


def _draw_growth(lengths: np.ndarray, growth: dict[str, np.ndarray]) -> Picture:
    def plot(axis: Any) -> None:
        for i, (name, values) in enumerate(growth.items()):
            style = {"color": INKS[i], "ls": DASHES[i], "marker": MARKERS[i], "ms": 4}
            error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
            axis.errorbar(lengths, values.mean(axis=0), yerr=error, capsize=2, label=name, **style)
        axis.set_ylim(0, None)

    return draw(
        "growth",
        plot,
        height=2.5,
        xlabel="observations n",
        ylabels=["error of Σ x, given n observations"],
        legend=BESIDE,
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
