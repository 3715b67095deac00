"""The results of `nonlinear`, and the errors computed from them."""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from retrodict._workspace import Stage
from retrodict.experiments import published
from retrodict.experiments._report import Spread, spread

ARCHIVED = ("conjugate", "gated")
"""The families of the paper, whose trained networks are in its authors' archive."""
LEVEL = 0.9
"""The level of the intervals whose coverage is counted."""


class Sizes(NamedTuple):
    """The sizes of the experiment.

    Attributes:
        num_series: the number of training series of 64 rows.
        num_steps: the steps of a fit.
        num_fits: the fits of the conjugate and of the gated family; the others have one.
        short_steps: the steps of a fit to series of four rows, as in the paper.
        num_fresh: the number of new series on which all families are evaluated.
        num_times: the length of these series.
        num_particles: the particles of the accurate particle smoother.
        num_references: the runs of the smoother with 2 particles.
        grid_points: the points of the exact reference on [−2.5, 2.5].
    """

    num_series: int
    num_steps: int
    num_fits: int
    short_steps: int
    num_fresh: int
    num_times: int
    num_particles: int
    num_references: int
    grid_points: int


class Results(NamedTuple):
    """The results of the experiment.

    Attributes:
        sizes: the sizes of the experiment.
        xs: the states of the paper's five sequences.
        exact: their exact posterior, and sums of states by length.
        many: the same sequences by an accurate particle smoother.
        two: the same by one with 2 particles, over many runs.
        sums: expected sums of states of every smoother, by sequence and length.
        fresh_xs: the states of the new series.
        oracle: their exact posterior.
        ffbsi: the new series by the accurate particle smoother.
        grades: the new series by every smoother.
        scores: the best ELBO of each fit on a part of its training series, nats per time step.
        seconds: the training times.
    """

    sizes: Sizes
    xs: np.ndarray
    exact: Stage
    many: Stage
    two: Stage
    sums: dict[str, np.ndarray]
    fresh_xs: np.ndarray
    oracle: Stage
    ffbsi: Stage
    grades: dict[str, Stage]
    scores: dict[str, list[float]]
    seconds: dict[str, float]


def printed_errors() -> dict[str, list[str]]:
    """Return the two printed columns of additive errors."""
    rows = published.archive()["nonlinear"]["table"]
    return {"conjugate": [row[2] for row in rows], "gated": [row[3] for row in rows]}


def reproduced_errors(results: Results) -> dict[str, np.ndarray]:
    """Return the additive errors of the archived networks against the archived reference."""
    reference = np.array(published.archive()["nonlinear"]["reference_sums"])
    return {name: np.abs(results.sums[f"archived {name}"][:, -1] - reference) for name in ARCHIVED}


def errors_to_exact(results: Results, name: str) -> np.ndarray:
    """Return additive errors to the exact posterior, by sequence and length."""
    return np.abs(results.sums[name] - results.exact["sums"])


def reference_errors(particles: Stage, results: Results) -> np.ndarray:
    """Return the additive error of a particle smoother, by run and sequence."""
    return np.abs(particles["means"].sum(axis=2) - results.exact["means"].sum(axis=1))


def errors_by_reference(results: Results, name: str) -> tuple[float, float, float]:
    """Return the additive error at n = 500 by reference, averaged over sequences and runs."""
    sums = results.sums[name][:, -1]

    def by(particles: Stage) -> float:
        return float(np.abs(sums - particles["means"].sum(axis=2)).mean())

    return by(results.two), by(results.many), float(errors_to_exact(results, name)[:, -1].mean())


def scores(results: Results, grade: Stage) -> dict[str, Spread]:
    """Return the scores of a smoother on the new series."""
    n, means = results.fresh_xs.shape[1], grade["means"]
    margin = NormalDist().inv_cdf(0.5 + LEVEL / 2) * grade["stds"]
    return {
        "gap": spread((results.oracle["evidence"] - grade["elbo"]) / n),
        **mean_errors(results, means),
        "coverage": spread((np.abs(results.fresh_xs - means) < margin).mean(axis=1)),
    }


def mean_errors(results: Results, means: np.ndarray) -> dict[str, Spread]:
    """Return the errors of smoothed means on the new series."""
    off = means - results.oracle["means"]
    return {
        "additive error": spread(np.abs(off.sum(axis=1))),
        "marginal MSE": spread((off**2).mean(axis=1)),
        "state MSE": spread(((means - results.fresh_xs) ** 2).mean(axis=1)),
    }
