"""Grading the chains of a batch by independent means: one verdict, that of the worst."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from retrodict._bounds import PosteriorCheck, check_posterior
from retrodict._bounds.check import K_HAT_GOOD, MANY_MISSED, MANY_NATS, Kind
from retrodict._chain import AbstractBackwardChain
from retrodict._fit.batch import num_series, take
from retrodict._mask import Series
from retrodict._model import StateSpaceModel
from retrodict._particle import ParticlePosterior, ffbsi
from retrodict._types import PRNGKey

MOST_CHECKED = 16
"""How many series of a batch are checked, evenly spread: each costs a particle smoother."""

NUM_PARTICLES = 1000
"""How many particles, and how many paths of the chain, a check has."""

AGAINST_CHAINS: tuple[Kind, ...] = ("mode loss", "thin tails", "loose ELBO")
"""What of a check speaks against a chain."""

WITHOUT_PARTICLES: tuple[Kind, ...] = ("thin tails",)
"""What of it still does where the particles cannot be trusted."""


class Witness(NamedTuple):
    """One series of a batch, and what a particle smoother says of it.

    Attributes:
        position: which one.
        series: its rows.
        particles: paths and an evidence that owe nothing to the chain in question.
    """

    position: int
    series: Series
    particles: ParticlePosterior


class Grade(NamedTuple):
    """What independent means say of the chains of a batch.

    Attributes:
        objections: what kinds of finding speak against them; empty if none does.
        elbo: the sum of the ELBOs of the series that were checked, in nats.
        figures: the figures that decided, those of the worst series, in words.
    """

    objections: tuple[Kind, ...]
    elbo: float
    figures: str

    @property
    def modes_lost(self) -> bool:
        """Whether particles were found where a chain has no mass."""
        return "mode loss" in self.objections


def options_of(series: Series) -> dict[str, Any]:
    """A prepared series as the verbs take it, but for its `ys`."""
    mask = True if series.mask is None else series.mask
    return {"mask": mask, "inputs": series.inputs, "length": series.length}


def pick(tree: Any, index: int) -> Any:
    """One element of a batch of results."""
    return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, tree)


def call_witnesses(key: PRNGKey, model: StateSpaceModel, batch: Series) -> list[Witness]:
    """A particle smoother for some of the series, evenly spread over the batch."""
    count = num_series(batch)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_CHECKED)).round().astype(int))
    found = []
    for position in chosen.tolist():
        series = take(batch, position)
        # A filter that fails is told by its status: then it says nothing, and the rest goes on.
        particles = ffbsi(
            jax.random.fold_in(key, position),
            model,
            series.ys,
            NUM_PARTICLES,
            strict=False,
            **options_of(series),
        )
        found.append(Witness(position, series, particles))
    return found


def grade(
    key: PRNGKey, model: StateSpaceModel, chains: AbstractBackwardChain, witnesses: list[Witness]
) -> Grade:
    """Checks the chains of the witnesses' series.

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
            reference=witness.particles,
            num_samples=NUM_PARTICLES,
            **options_of(witness.series),
        )
        for witness in witnesses
    ]
    heard = [_heard(one, witness) for one, witness in zip(checks, witnesses, strict=True)]
    objections: list[Kind] = [
        kind
        for kind in AGAINST_CHAINS
        if any(
            kind in check.kinds and (trusted or kind in WITHOUT_PARTICLES)
            for check, trusted in zip(checks, heard, strict=True)
        )
    ]
    return Grade(
        objections=tuple(objections),
        elbo=float(sum(check.elbo for check in checks)),
        figures=_figures(checks, heard),
    )


def _heard(check: PosteriorCheck, witness: Witness) -> bool:
    """Whether the particles can be trusted: neither degenerate nor below what is known to hold."""
    return int(witness.particles.status) == 0 and "evidence below" not in check.kinds


def _figures(checks: list[PosteriorCheck], heard: list[bool]) -> str:
    """The worst figures of all series, and whether particles had a say in them."""
    shape = max(float(check.k_hat) for check in checks)
    of = f" of {len(checks)} series, at worst," if len(checks) > 1 else ""
    figures = f"the Pareto shape of its path weights{of} is {_shape(shape)}"
    limits = f"{K_HAT_GOOD}"
    trusted = [check for check, so in zip(checks, heard, strict=True) if so]
    if trusted:
        # Both ELBO and evidence are estimates, so that a gap of nothing may come out negative.
        gap = max(0.0, *(float(check.gap) for check in trusted))
        missed = max(float(np.max(check.missed)) for check in trusted)
        figures += (
            f", its ELBO is {gap:.1f} nats below the particle evidence, and up to {missed:.0%} of"
            " the particles are where it has no mass"
        )
        limits += f", {MANY_NATS:.0f} nats and {MANY_MISSED:.0%}"
    if not all(heard):
        figures += "; where the particle smoother degenerates, the shape alone decides"
    return f"{figures} (good: up to {limits})"


def _shape(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ("infinite" if value > 0 else "none")
