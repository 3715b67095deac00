"""Appendix D.2: a linear-Gaussian model with three states and four observations.

Model: x_0 ~ N(m, 0.1 I), x_k = A x_{k-1} + N(0, 0.1 I), y_k = B x_k + N(0, 0.1 I), with A diagonal,
its entries drawn from (0.99, 1). Only the prior mean m and A are learned. All other
parameters are fixed, which removes the ambiguity of scales and permutations of the states.

Reproduced: the figure of smoothed components with 95% regions, under the true and under the learned
parameters.

Deviations: the paper does not state m, B or the length of the sequence in its figure. Here m and B
are standard normal draws, and the sequence has 64 rows. In addition, the coverage of the regions is
computed. Each step draws a new minibatch.
"""

from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import retrodict as rd
from retrodict._workspace import Folder, Stage
from retrodict.experiments._drawing import INKS, Picture, draw
from retrodict.experiments._measure import simulate
from retrodict.experiments._report import Chapter, Table, make_chapter, spread

STATE_DIM, OBS_DIM = 3, 4
LEVEL = 0.95
MARGIN = NormalDist().inv_cdf(0.5 + LEVEL / 2)
"""Half the width of a region in standard deviations."""


class Sizes(NamedTuple):
    """The sizes of the experiment.

    Attributes:
        num_series: the number of training series, of ten rows each.
        num_epochs: the number of epochs of `num_series / BATCH_SIZE` steps.
        learning_rate: the constant rate of Adam.
        num_times: the number of rows of an evaluated sequence.
        num_covered: the number of sequences on which coverage is computed.
    """

    num_series: int
    num_epochs: int
    learning_rate: float
    num_times: int
    num_covered: int


FULL = Sizes(10_000, 100, 1e-3, 64, 500)
QUICK = Sizes(10_000, 8, 1e-2, 64, 200)
BATCH_SIZE, LENGTH = 100, 10


class DiagonalMatrix(rd.AbstractParameter):
    """A matrix that stays diagonal while it is learned."""

    entries: Float[Array, "state"]

    @property
    def value(self) -> Float[Array, "state state"]:
        """Return the matrix."""
        return jnp.diag(self.entries)


def num_stages(sizes: Sizes) -> int:
    """Return the number of stages of `run`."""
    return 2


def run(folder: Folder, sizes: Sizes, seed: int) -> Chapter:
    """Learn the prior mean and the transition, and smooth with both sets of parameters."""
    model_key, start_key, data_key, fit_key, test_key = jax.random.split(jax.random.key(seed), 5)
    theta = _model(model_key)
    _, ys = simulate(theta, jax.random.split(data_key, sizes.num_series), LENGTH)
    result, seconds = folder.fit(
        "fit",
        partial(
            rd.fit,
            fit_key,
            rd.KalmanFamily(_start(theta, start_key)),
            theta,
            ys,
            num_steps=sizes.num_epochs * sizes.num_series // BATCH_SIZE,
            optimisation=rd.Optimisation(
                batch_size=BATCH_SIZE, optimiser=optax.adam(sizes.learning_rate)
            ),
            mask=True,
        ),
    )
    family: Any = result.family
    learned = rd.unwrap(family.model)
    stage = folder.stage("smoothing", lambda: _smooth(rd.unwrap(theta), learned, test_key, sizes))
    return _chapter(sizes, rd.unwrap(theta), learned, stage, seconds)


def _model(key: Array) -> rd.StateSpaceModel:
    mean_key, weight_key, design_key = jax.random.split(key, 3)
    noise = jnp.sqrt(0.1)
    fixed = rd.Frozen
    return rd.StateSpaceModel(
        prior=rd.Gaussian(
            jax.random.normal(mean_key, (STATE_DIM,)), fixed(noise * jnp.eye(STATE_DIM))
        ),
        transition=rd.LinearGaussianKernel(
            DiagonalMatrix(jax.random.uniform(weight_key, (STATE_DIM,), minval=0.99, maxval=1.0)),
            fixed(jnp.zeros(STATE_DIM)),
            fixed(noise * jnp.eye(STATE_DIM)),
        ),
        emission=rd.LinearGaussianKernel(
            fixed(jax.random.normal(design_key, (OBS_DIM, STATE_DIM))),
            fixed(jnp.zeros(OBS_DIM)),
            fixed(noise * jnp.eye(OBS_DIM)),
        ),
    )


def _start(theta: rd.StateSpaceModel, key: Array) -> rd.StateSpaceModel:
    """Return θ with another prior mean and transition, as a start for learning."""
    mean_key, weight_key = jax.random.split(key)
    return eqx.tree_at(
        lambda model: (model.prior.mean, model.transition.weight.entries),
        theta,
        (
            jax.random.normal(mean_key, (STATE_DIM,)),
            jax.random.uniform(weight_key, (STATE_DIM,)),
        ),
    )


def _smooth(
    theta: rd.StateSpaceModel, learned: rd.StateSpaceModel, key: Array, sizes: Sizes
) -> dict[str, Any]:
    """Smooth one sequence for the figure, and count how often regions contain the states."""
    xs, ys = simulate(theta, jax.random.split(key, sizes.num_covered), sizes.num_times)

    @jax.jit
    def smooth(model: rd.StateSpaceModel) -> tuple[Array, Array, Array]:
        laws = jax.lax.map(lambda y: rd.kalman_smoother(model, y).chain.marginals(), ys)
        inside = jnp.abs(xs - laws.mean) < MARGIN * laws.std
        return laws.mean[0], laws.std[0], jnp.mean(inside, axis=1)

    arrays = {"xs": xs[0]}
    for name, model in (("true", theta), ("learned", learned)):
        mean, std, covered = smooth(model)
        arrays |= {f"mean_{name}": mean, f"std_{name}": std, f"covered_{name}": covered}
    return arrays


def _chapter(
    sizes: Sizes,
    theta: rd.StateSpaceModel,
    learned: rd.StateSpaceModel,
    stage: Stage,
    seconds: float,
) -> Chapter:
    coverage = {
        name: [spread(stage[f"covered_{name}"][:, i]) for i in range(STATE_DIM)]
        for name in ("true", "learned")
    }
    mean = {name: np.mean([state.mean for state in states]) for name, states in coverage.items()}
    true, fitted = (
        [*map(float, jnp.diagonal(model.transition.weight)), *map(float, model.prior.mean)]
        for model in (theta, learned)
    )
    names = [f"{what} {i}" for what in ("A, entry", "prior mean") for i in range(STATE_DIM)]
    parts = [
        _draw(stage),
        Table.of_columns(
            "parameters", {"": ("", names), "true": (".4f", true), "learned": (".4f", fitted)}
        ),
        Table(
            "coverage",
            {"parameters": "", **{f"state {i}": "" for i in range(STATE_DIM)}},
            [[name, *states] for name, states in coverage.items()],
        ),
    ]
    numbers = {
        "parameters": dict(zip(names, zip(true, fitted, strict=True), strict=True)),
        "coverage": coverage,
    }
    return make_chapter(
        "multivariate",
        parts,
        numbers,
        {"fit": seconds},
        sizes=sizes,
        mean=mean,
        largest_error=np.abs(np.subtract(true, fitted)).max(),
    )


def _draw(stage: Stage) -> Picture:
    times = np.arange(stage["xs"].shape[0])

    def plot(axis: Any, i: int, name: str) -> None:
        axis.errorbar(
            times,
            stage[f"mean_{name}"][:, i],
            yerr=MARGIN * stage[f"std_{name}"][:, i],
            fmt="o",
            ms=1.8,
            lw=0.7,
            color=INKS[0],
            label="mean and 95% region",
        )
        axis.plot(times, stage["xs"][:, i], "*", ms=4, mew=0, color=INKS[1], label="state")

    return draw(
        "smoothing",
        plot,
        [
            (f"{name} parameters" if i == 0 else "", (i, name))
            for i in range(STATE_DIM)
            for name in ("true", "learned")
        ],
        columns=2,
        height=4.6,
        xlabel="time",
        ylabels=[f"state {i}" for i in range(STATE_DIM)],
        legend={"loc": "outside upper center", "ncols": 2},
        sharex=True,
        sharey="row",
    )
