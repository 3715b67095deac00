"""Section 3: the additive error grows linearly with n, in theory and in practice.

Model: that of section 5.1, with the published parameters at three stopping points, on the
evaluation sequences of the paper; and a two-state model on which the proposition fails as printed.

Reproduced: the claim of section 3 that the error of an additive functional is at most linear in the
number of observations. The paper shows the error only; here the bound is shown too.

Deviations: Proposition 3.1 is false as printed for models that mix well (ρ < ½), which a two-state
example shows. It does not apply to the example of the paper either: the sum of states is unbounded,
and assumption H2 fails on the whole line. The bound shown is for Lipschitz functionals, computed by
`error_bound`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

import retrodict as rd
from retrodict._workspace import Folder, Stage
from retrodict.experiments import published
from retrodict.experiments._drawing import BESIDE, DASHES, INKS, Picture, draw
from retrodict.experiments._measure import power_of_n
from retrodict.experiments._report import Chapter, Table, make_chapter

BIASES = (0.01, 0.02, 0.05, 0.09, 0.12, 0.2, 0.3)
"""The error e of the middle coin of the two-state example."""


class Sizes(NamedTuple):
    """The sizes of the experiment.

    Attributes:
        num_series: the number of evaluation sequences of the paper that are used.
        lengths: the numbers of observations n.
    """

    num_series: int
    lengths: tuple[int, ...]


FULL = Sizes(20, (25, 50, 100, 200, 500, 1000, 2000))
QUICK = Sizes(4, (50, 400, 2000))


def num_stages(sizes: Sizes) -> int:
    """Return the number of stages of `run`."""
    return len(published.EPOCHS) + 1


def run(folder: Folder, sizes: Sizes, seed: int) -> Chapter:
    """Compute errors and bounds of the published fits as n grows, without random draws."""
    _, ys = published.linear_sequences(sizes.num_series)
    growth = {
        epoch: folder.stage(
            f"growth after {epoch} epochs", lambda epoch=epoch: _growth(folder, epoch, ys, sizes)
        )
        for epoch in published.EPOCHS
    }
    example = folder.stage("two states", lambda: _two_states(folder))
    return _chapter(sizes, growth, example)


def _growth(folder: Folder, epoch: int, ys: Array, sizes: Sizes) -> dict[str, Any]:
    """Compute the additive error and a bound for 1-Lipschitz sums, by n and sequence."""
    theta, learned = (
        rd.unwrap(model) for model in (published.linear_theta(), published.linear_lambda(epoch))
    )
    smooth = jax.jit(lambda model, y: rd.kalman_smoother(model, y).chain)
    errors, bounds = np.empty((2, len(sizes.lengths), len(ys)))
    places = [(i, n, j) for i, n in enumerate(sizes.lengths) for j in range(len(ys))]
    for i, n, j in folder.track(places):
        y = ys[j, :n]
        chain, exact = smooth(learned, y), smooth(theta, y)
        sums = [rd.expectation(law, rd.StateSum())[0] for law in (chain, exact)]
        errors[i, j] = abs(float(sums[0] - sums[1]))
        bound = rd.error_bound(theta, chain, y, rd.bounds.AnyLipschitz(), method="wasserstein_phi")
        bounds[i, j] = float(bound.value)
    return {"error": errors, "bound": bounds}


def _two_states(folder: Folder) -> dict[str, Any]:
    """Compute the error of the two-state example, the printed proposition and corrected bounds."""
    bounds = [
        rd.bounds.finite_bounds(rd.bounds.two_state_counterexample(e)) for e in folder.track(BIASES)
    ]
    return {
        "error": np.abs([b.error for b in bounds]),
        "printed": [b.printed_proposition for b in bounds],
        "corrected": [b.s2 for b in bounds],
        "classical": [b.classical for b in bounds],
    }


def _chapter(sizes: Sizes, growth: dict[int, Stage], example: Stage) -> Chapter:
    powers = {
        epoch: power_of_n(sizes.lengths, part["bound"].mean(axis=1), 2)
        for epoch, part in growth.items()
    }
    violated = int(sum((part["error"] > part["bound"]).sum() for part in growth.values()))
    checked = sum(part["error"].size for part in growth.values())
    broken = int((example["error"] > example["printed"] * (1 + 1e-9)).sum())
    last = {
        epoch: part["bound"][-1].mean() / part["error"][-1].mean() for epoch, part in growth.items()
    }
    return make_chapter(
        "bounds",
        [
            _draw_growth(sizes.lengths, growth),
            _growth_table(sizes.lengths, growth),
            _draw_example(example),
            _example_table(example),
        ],
        numbers={
            "violations": [violated, checked],
            "power_of_n": powers,
            "bound_over_error": last,
            "two_states": {"e": BIASES, **example},
        },
        seconds={},
        least_power=min(powers.values()),
        largest_power=max(powers.values()),
        length=sizes.lengths[-1],
        least_ratio=min(last.values()),
        largest_ratio=max(last.values()),
        broken=broken,
        num_examples=len(BIASES),
    )


def _growth_table(lengths: Sequence[int], growth: dict[int, Stage]) -> Table:
    columns: dict[str, Any] = {"n": ("", map(str, lengths))}
    for epoch, part in growth.items():
        for what in ("error", "bound"):
            columns[f"{what}, {epoch} epochs"] = (".2g", part[what].mean(axis=1))
    return Table.of_columns("growth", columns)


def _draw_growth(lengths: Sequence[int], growth: dict[int, Stage]) -> Picture:
    def plot(axis: Any, part: Stage) -> None:
        error, bound = part["error"], part["bound"].mean(axis=1)
        axis.fill_between(lengths, error.min(axis=1), error.max(axis=1), color="0.85", lw=0)
        axis.loglog(lengths, bound, color=INKS[0], label="bound")
        axis.loglog(lengths, error.mean(axis=1), color=INKS[1], ls=DASHES[1], label="error")
        slope = bound[-1] / lengths[-1] * np.array(lengths)
        axis.loglog(lengths, slope, color="black", ls=":", lw=0.8, label="∝ n")

    return draw(
        "growth",
        plot,
        [(f"λ after {epoch} epochs", (part,)) for epoch, part in growth.items()],
        xlabel="observations n",
        ylabels=["additive error"],
        legend={"loc": "lower right"},
    )


def _example_table(example: Stage) -> Table:
    titles = {
        "error": "error",
        "printed": "as printed",
        "corrected": "S2",
        "classical": "Theorem 2",
    }
    return Table.of_columns(
        "two_states",
        {"e": ("", map(str, BIASES))}
        | {title: (".4f", example[what]) for what, title in titles.items()},
    )


def _draw_example(example: Stage) -> Picture:
    labels = {
        "error": "error",
        "printed": "Proposition 3.1, as printed",
        "corrected": "corrected, S2",
        "classical": "corrected, Theorem 2",
    }

    def plot(axis: Any) -> None:
        for i, (what, label) in enumerate(labels.items()):
            # S2 equals the error here; a second line would hide it.
            style = {"ls": "none", "marker": "x"} if what == "error" else {"ls": DASHES[i]}
            axis.semilogy(BIASES, example[what], color=INKS[i], label=label, **style)

    return draw(
        "two_states",
        plot,
        height=2.5,
        xlabel="error e of the middle coin",
        ylabels=["additive error and bounds"],
        legend=BESIDE,
    )
