"""Check the chains of a batch against independent references."""

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
        unchecked: the message about a reference that failed; `None` if none did.
        extent: how many of the series were checked, in words; empty if all were.
    """

    objections: tuple[bounds.Kind, ...]
    elbo: float
    figures: str
    unchecked: str | None = None
    extent: str = ""

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
            return f"{name} does not pass check_posterior{self.extent} ({kinds}): {self.figures}."
        if self.unchecked is not None:
            return f"{name} was {self.unchecked}. Figures: {self.figures}."
        return f"{name} passes check_posterior{self.extent}: {self.figures}."


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
    num_series: int,
) -> BatchCheck:
    """Check the chains of the series that have a reference.

    Args:
        key: a typed key, for paths of the chains.
        model: the model.
        chains: the chains of the whole batch, with a leading axis.
        references: the series to check.
        num_series: the number of series of the batch.
    """
    is_partial = len(references) < num_series
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
        figures=bounds.describe_figures(checks),
        unchecked=unchecked[0] if unchecked else None,
        extent=f", run on {len(references)} of {num_series} series" if is_partial else "",
    )
