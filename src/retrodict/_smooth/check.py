"""Check the chains of a batch against independent references."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from retrodict import bounds
from retrodict._arrays import PRNGKey
from retrodict._chains import AbstractBackwardChain
from retrodict._model import Series, StateSpaceModel

MAX_CHECKED = 8
"""The largest number of series of a batch that are checked: each costs a reference."""

NUM_SAMPLES = 1000
"""The number of paths of the chain that a check draws."""


class SeriesReference(NamedTuple):
    """One series of a batch with a reference posterior.

    Attributes:
        position: its index in the batch.
        series: its rows.
        reference: a posterior that is computed independently of the chain.
    """

    position: int
    series: Series
    reference: bounds.Reference


class BatchCheck(NamedTuple):
    """The result of checking the chains of a batch.

    Attributes:
        objections: the kinds of findings against the chains; empty if there are none.
        elbo: the sum of the ELBOs of the checked series, in nats.
        figures: the figures of the worst series, in words.
        unchecked: why a series was not checked; `None` if all were.
    """

    objections: tuple[bounds.Kind, ...]
    elbo: float
    figures: str
    unchecked: str | None = None

    @property
    def modes_lost(self) -> bool:
        """Whether the reference has states where a chain has no mass."""
        return "mode loss" in self.objections

    @property
    def passed(self) -> bool:
        """Whether every checked series has a valid reference that agrees with its chain."""
        return not self.objections and self.unchecked is None

    def verdict(self, name: str) -> str:
        """Describe the outcome for the method called `name`, with the figures."""
        if self.objections:
            kinds = ", ".join(self.objections)
            return f"{name} does not pass check_posterior ({kinds}): {self.figures}."
        if self.unchecked is not None:
            reason = self.unchecked.removeprefix("not checked: ")
            return f"{name} was not checked: {reason}. Figures: {self.figures}."
        return f"{name} passes check_posterior: {self.figures}."


def pick(tree: Any, index: int) -> Any:
    """Return one element of a batch of results."""
    return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, tree)


def run_references(key: PRNGKey, model: StateSpaceModel, batch: Series) -> list[SeriesReference]:
    """Compute references for some of the series, evenly spread over the batch."""
    count = batch.num_series
    chosen = np.unique(np.linspace(0, count - 1, min(count, MAX_CHECKED)).round().astype(int))

    def one(position: int) -> SeriesReference:
        series, series_key = batch.at(position), jax.random.fold_in(key, position)
        return SeriesReference(position, series, bounds.find_reference(series_key, model, series))

    return [one(position) for position in chosen.tolist()]


def check_chains(
    key: PRNGKey,
    model: StateSpaceModel,
    chains: AbstractBackwardChain,
    references: list[SeriesReference],
) -> BatchCheck:
    """Check the chains of the series that have a reference.

    Args:
        key: a typed key, for paths of the chains.
        model: the model.
        chains: the chains of the whole batch, with a leading axis.
        references: the series to check.
    """
    checks = [
        bounds.check_posterior(
            jax.random.fold_in(key, each.position),
            model,
            pick(chains, each.position),
            each.series.ys,
            reference=each.reference,
            num_samples=NUM_SAMPLES,
            **each.series.options(),
        )
        for each in references
    ]
    unchecked = [check.messages[0] for check in checks if check.verdict == "not checked"]
    return BatchCheck(
        objections=tuple(
            kind for kind in bounds.AGAINST_CHAIN if any(kind in c.kinds for c in checks)
        ),
        elbo=float(sum(check.elbo for check in checks)),
        figures=_figures(checks),
        unchecked=unchecked[0] if unchecked else None,
    )


def _figures(checks: list[bounds.PosteriorCheck]) -> str:
    """Describe the worst figures of all series."""
    shape = max(float(check.k_hat) for check in checks)
    words = f"{shape:.2f}" if math.isfinite(shape) else ("infinite" if shape > 0 else "none")
    of = f" of {len(checks)} series, at worst," if len(checks) > 1 else ""
    methods = " or ".join(sorted({check.reference for check in checks}))
    # Both ELBO and evidence are estimates, so that a gap of zero may come out negative.
    gap = max(0.0, *(float(check.gap) for check in checks))
    missed = max(float(np.max(check.missed)) for check in checks)
    distance = max(bounds.root_mean_square(check.distance) for check in checks)
    return (
        f"compared with a reference ({methods}), the Kolmogorov distance of its marginals{of} is"
        f" {distance:.2f} on average over time, up to {missed:.0%} of the states are where it has"
        f" no mass, and its ELBO is {gap:.1f} nats below the evidence (good: up to"
        f" {bounds.MAX_DISTANCE}, {bounds.MANY_MISSED:.0%}, and {bounds.MANY_NATS:.0f} nats or"
        f" {bounds.MANY_NATS_PER_ROW} nats per row); the Pareto shape of its path"
        f" weights is {words} (weights correct whole paths up to {bounds.K_HAT_GOOD})"
    )
