"""Check the chains of a batch against independent references: one grade, that of the worst."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from retrodict._chains import AbstractBackwardChain
from retrodict._learning import num_series, take
from retrodict._model import StateSpaceModel
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict.bounds import (
    AGAINST_CHAIN,
    K_HAT_GOOD,
    MANY_MISSED,
    MANY_NATS,
    MANY_NATS_PER_ROW,
    MOST_DISTANCE,
    Kind,
    PosteriorCheck,
    Reference,
    check_posterior,
    find_reference,
    options_of,
    root_mean_square,
)

MOST_CHECKED = 8
"""How many series of a batch are checked, evenly spread: each costs a reference."""

NUM_SAMPLES = 1000
"""How many paths of the chain a check draws."""


class Witness(NamedTuple):
    """One series of a batch, and a posterior of it to compare with.

    Attributes:
        position: its index in the batch.
        series: its rows.
        reference: a posterior that is computed independently of the chain.
    """

    position: int
    series: Series
    reference: Reference


class Grade(NamedTuple):
    """The result of checking the chains of a batch.

    Attributes:
        objections: what kinds of finding speak against them; empty if none does.
        elbo: the sum of the ELBOs of the series that were checked, in nats.
        figures: the figures of the worst series, in words.
        unchecked: why a series was not checked, in words; `None` if all were.
    """

    objections: tuple[Kind, ...]
    elbo: float
    figures: str
    unchecked: str | None = None

    @property
    def modes_lost(self) -> bool:
        """Whether the reference has states where a chain has no mass."""
        return "mode loss" in self.objections

    @property
    def passed(self) -> bool:
        """Whether all checked series have a reference, and none speaks against its chain."""
        return not self.objections and self.unchecked is None


def pick(tree: Any, index: int) -> Any:
    """Return one element of a batch of results."""
    return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, tree)


def run_references(key: PRNGKey, model: StateSpaceModel, batch: Series) -> list[Witness]:
    """Compute references for some of the series, evenly spread over the batch."""
    count = num_series(batch)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_CHECKED)).round().astype(int))
    found = []
    for position in chosen.tolist():
        series = take(batch, position)
        own = jax.random.fold_in(key, position)
        found.append(Witness(position, series, find_reference(own, model, series)))
    return found


def grade(
    key: PRNGKey, model: StateSpaceModel, chains: AbstractBackwardChain, witnesses: list[Witness]
) -> Grade:
    """Check the chains of the witnesses' series.

    Args:
        key: a typed key, for paths of the chains.
        model: the model.
        chains: the chains of the whole batch, with a leading axis.
        witnesses: the series to look at.
    """
    checks = [
        check_posterior(
            jax.random.fold_in(key, witness.position),
            model,
            pick(chains, witness.position),
            witness.series.ys,
            reference=witness.reference,
            num_samples=NUM_SAMPLES,
            **options_of(witness.series),
        )
        for witness in witnesses
    ]
    objections: list[Kind] = [
        kind for kind in AGAINST_CHAIN if any(kind in each.kinds for each in checks)
    ]
    unchecked = [each for each in checks if each.verdict == "not checked"]
    return Grade(
        objections=tuple(objections),
        elbo=float(sum(check.elbo for check in checks)),
        figures=_figures(checks),
        unchecked=unchecked[0].messages[0] if unchecked else None,
    )


def _figures(checks: list[PosteriorCheck]) -> str:
    """Put the worst figures of all series into words."""
    shape = max(float(check.k_hat) for check in checks)
    of = f" of {len(checks)} series, at worst," if len(checks) > 1 else ""
    methods = " or ".join(sorted({check.reference for check in checks}))
    # Both ELBO and evidence are estimates, so that a gap of nothing may come out negative.
    gap = max(0.0, *(float(check.gap) for check in checks))
    missed = max(float(np.max(check.missed)) for check in checks)
    distance = max(root_mean_square(check.distance) for check in checks)
    return (
        f"compared with a reference ({methods}), the Kolmogorov distance of its marginals{of} is"
        f" {distance:.2f} on average over time, up to {missed:.0%} of the states are where it has"
        f" no mass, and its ELBO is {gap:.1f} nats below the evidence (good: up to"
        f" {MOST_DISTANCE}, {MANY_MISSED:.0%}, and {MANY_NATS:.0f} nats or {MANY_NATS_PER_ROW} nats"
        f" per row); the Pareto shape of its path weights is {_shape(shape)} (weights correct whole"
        f" paths up to {K_HAT_GOOD})"
    )


def _shape(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ("infinite" if value > 0 else "none")
