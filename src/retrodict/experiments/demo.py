"""The demo: smoothing when two states explain an observation equally well.

The model is that of section 5.2 of the paper. A state moves linearly,

    x_k = A x_{k-1} + a + N(0, 0.1²),    y_k = cos(tanh(w x_k)) + N(0, 0.001),

and is observed through an even map: only the dynamics distinguish x from −x. Three amortised
families are trained on simulated series. On held-out series they are compared with the exact
posterior, a particle smoother and two linearised smoothers.
"""

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jinja2  # noqa: F401  (a missing package is reported before training, not after)
import matplotlib  # noqa: F401
import numpy as np
from jaxtyping import Array, Float

import retrodict as rd
from retrodict._workspace import Folder
from retrodict.experiments import published
from retrodict.experiments._drawing import BESIDE, DASHES, INKS, MARKERS, Picture, draw
from retrodict.experiments._measure import (
    LEVEL,
    MARGIN,
    exact_sums,
    gaussian_bands,
    grid_bands,
    particle_bands,
    simulate,
    sums_of,
)
from retrodict.experiments._report import Chapter, Table, make_chapter

LEAD = (
    "retrodict infers the path of a hidden state from noisy observations. Here a state and its"
    " negative have the same law of observations. A conjugate family represents each observation by"
    " one Gaussian, which has one mode. A linearised smoother replaces the map by a line. In a"
    " gated or recurrent family the update also depends on the earlier observations."
)
NUM_DRAWN = 40
"""The number of states in the figure of bands."""

AMORTISED = {
    "conjugate": rd.ConjugateFamily,
    "gated": rd.GatedFamily,
    "recurrent": rd.RecurrentFamily,
}
LINEARISED = {"extended": rd.extended_smoother, "unscented": rd.unscented_smoother}


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
    f"coverage of {LEVEL:.0%}": ".0%",
    "ELBO gap": ".3f",
    "train, s": ".0f",
    "smooth, ms": ".3g",
    "status": "",
}
"""The columns of the table of scores, with their number formats."""


class SmootherScores(NamedTuple):
    """The mean scores of one smoother on the held-out series.

    Attributes:
        rmse: the root mean squared error of its marginal means to the exact ones.
        additive_error: the error of the sum of all states of a series.
        coverage: the share of true states within their 90% interval.
        gap: evidence minus ELBO in nats per step; NaN for a smoother without an ELBO.
        trained: the seconds of training, including compilation; NaN without training.
        smoothed: the seconds per series, without compilation.
        status: the status of a linearised smoother; empty for the others.
    """

    rmse: float
    additive_error: float
    coverage: float
    gap: float
    trained: float
    smoothed: float
    status: str

    def row(self, name: str) -> list[Any]:
        """Return the row of the table, with times per series in milliseconds."""
        return [name, *self[:5], 1e3 * self.smoothed, self.status]


Bands = Float[np.ndarray, "3 series time"]
"""Marginal means of the held-out series, and the ends of their central intervals."""


def num_stages(sizes: Sizes) -> int:
    """Return the number of stages of `run`."""
    return 2 * len(AMORTISED) + len(LINEARISED) + 4


def run(folder: Folder, sizes: Sizes, seed: int) -> Chapter:
    """Train three families, and compare them with exact, particle and linearised smoothers."""
    model = published.nonlinear_theta()
    data_key, test_key, fit_key, path_key = jax.random.split(jax.random.key(seed), 4)
    _, train = simulate(model, jax.random.split(data_key, sizes.num_series), sizes.train_times)
    xs, ys = simulate(model, jax.random.split(test_key, sizes.num_tested), sizes.num_times)
    families, trained = _train(folder, model, train, fit_key, sizes)

    grid = rd.Grid(jnp.array([-2.5]), jnp.array([2.5]), sizes.grid_points)
    lengths = np.linspace(sizes.num_times // 4, sizes.num_times, 4).astype(int).tolist()
    oracle = folder.stage("the exact posterior", lambda: grid_bands(folder, model, ys, grid))
    exact = folder.stage("exact sums", lambda: exact_sums(folder, model, ys, lengths, grid))
    # A bound method of a family cannot be jitted: JAX would hash the family.
    amortised = {
        name: jax.jit(lambda y, infer=family.infer: infer(y)) for name, family in families.items()
    }
    linearised = {
        name: lambda y, smooth=smooth: smooth(model, y).chain for name, smooth in LINEARISED.items()
    }
    stages = {
        name: folder.stage(
            name, lambda infer=infer: gaussian_bands(folder, model, infer, ys, path_key)
        )
        for name, infer in (amortised | linearised).items()
    }
    sums = folder.stage("sums of the families", lambda: sums_of(folder, amortised, ys, lengths))
    particles = folder.stage(
        "the particle smoother",
        lambda: particle_bands(folder, model, ys, path_key, sizes.num_particles),
    )
    bands = {"exact": np.stack([oracle["means"], *oracle["intervals"]])}
    bands |= {
        name: stage["means"] + MARGIN * np.array([0.0, -1.0, 1.0])[:, None, None] * stage["stds"]
        for name, stage in stages.items()
    }
    ffbsi = f"FFBSi {sizes.num_particles}"
    bands[ffbsi] = np.stack([particles["means"], *particles["intervals"]])
    scores = {
        name: SmootherScores(
            *_errors(bands[name], bands["exact"][0], np.asarray(xs)[..., 0]),
            float(np.mean(oracle["evidence"] - stage.get("elbo", np.nan))) / sizes.num_times,
            trained.get(name, np.nan),
            float(stage["seconds"]),
            _statuses(LINEARISED[name], model, ys) if name in LINEARISED else "",
        )
        for name, stage in (stages | {ffbsi: particles}).items()
    }
    return make_chapter(
        "demo",
        [
            _draw_bands(np.asarray(xs)[0, :, 0], bands),
            _draw_two_sides(model, ys[0], rd.grid_smoother(model, ys[0], grid), families, bands),
            _draw_growth(lengths, {name: np.abs(sums[name] - exact["sums"]) for name in AMORTISED}),
            Table("scores", COLUMNS, [score.row(name) for name, score in scores.items()]),
        ],
        numbers={"scores": {name: score._asdict() for name, score in scores.items()}},
        seconds={},
        sizes=sizes,
        particles=scores[ffbsi],
        times_as_long=scores[ffbsi].smoothed / scores["gated"].smoothed,
        num_drawn=min(NUM_DRAWN, sizes.num_times),
        worst=_worst(bands),
    )


def _train(
    folder: Folder, model: rd.StateSpaceModel, ys: Array, key: Array, sizes: Sizes
) -> tuple[dict[str, Any], dict[str, float]]:
    """Train the three families; return them and the seconds of each."""
    families, seconds = {}, {}
    for (name, kind), one in zip(AMORTISED.items(), jax.random.split(key, 3), strict=True):
        first, second = jax.random.split(one)
        fit = partial(rd.fit, second, kind(first, 1, 1), model, ys, mask=True)
        result, seconds[name] = folder.fit(
            f"training the {name} family", partial(fit, num_steps=sizes.num_steps)
        )
        families[name] = result.family
    return families, seconds


def _statuses(smooth: Callable[..., Any], model: rd.StateSpaceModel, ys: Array) -> str:
    return "/".join(sorted({smooth(model, y).status for y in ys}))


def _errors(bands: Bands, exact: np.ndarray, truth: np.ndarray) -> tuple[float, float, float]:
    """Return the first three scores of a smoother."""
    means, lower, upper = bands
    return (
        float(np.sqrt(np.mean((means - exact) ** 2))),
        float(np.abs((means - exact).sum(axis=1)).mean()),
        float(np.mean((lower < truth) & (truth < upper))),
    )


def _worst(bands: dict[str, Bands]) -> int:
    """Return the time at which the conjugate family is furthest from the exact posterior."""
    return int(np.abs(bands["conjugate"][0] - bands["exact"][0])[0].argmax())


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
        mean, lower, upper = bands[name][:, 0, times]
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
    families: dict[str, Any],
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


def _draw_growth(lengths: list[int], growth: dict[str, np.ndarray]) -> Picture:
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
