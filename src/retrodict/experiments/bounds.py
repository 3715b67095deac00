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
from retrodict.experiments._drawing import DASHES, INKS, Picture, draw
from retrodict.experiments._report import Chapter, Section, Table

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
        "error": np.array([abs(float(b.error)) for b in bounds]),
        "printed": np.array([float(b.printed_proposition) for b in bounds]),
        "corrected": np.array([float(b.s2) for b in bounds]),
        "classical": np.array([float(b.classical) for b in bounds]),
    }


def _chapter(sizes: Sizes, growth: dict[int, Stage], example: Stage) -> Chapter:
    powers = {epoch: _power(sizes.lengths, part["bound"]) for epoch, part in growth.items()}
    violated = int(sum((part["error"] > part["bound"]).sum() for part in growth.values()))
    checked = sum(part["error"].size for part in growth.values())
    broken = int((example["error"] > example["printed"] * (1 + 1e-9)).sum())
    last = {
        epoch: part["bound"][-1].mean() / part["error"][-1].mean() for epoch, part in growth.items()
    }
    return Chapter(
        name="bounds",
        title="Section 3: linear growth, theory against practice",
        summary=(
            f"The bound is violated in {violated} of {checked} cases, and grows as"
            f" n^{min(powers.values()):.2f} to n^{max(powers.values()):.2f} between the last two"
            f" lengths. At n = {sizes.lengths[-1]} it is"
            f" {min(last.values()):.1f} to {max(last.values()):.1f} times the error of the sum of"
            f" states. Proposition 3.1 as printed is below the error in {broken} of"
            f" {len(BIASES)} two-state examples."
        ),
        sections=[
            Section(
                "Growth with the number of observations",
                "The error is bounded by a constant times n; the paper does not compute the"
                " constants.",
                [_draw_growth(sizes.lengths, growth), _growth_table(sizes.lengths, growth)],
                "The bound holds for every sum of 1-Lipschitz functions of the states, such as the"
                " sum of states. It uses the exact posterior of linear-Gaussian models.",
            ),
            Section(
                "Proposition 3.1, as printed and corrected",
                "An explicit constant for models that mix strongly.",
                [_draw_example(example), _example_table(example)],
                "The example: three independent fair coins, on which the data have no information."
                " The approximation is exact except for the middle coin, whose probability is off"
                " by e. The error of its expected sign is 2e, and the printed right-hand side is of"
                " order e². S2 holds for every finite model, and Theorem 2 under assumptions H1 and"
                " H2; the proofs are on the theory page. In this example S2 equals the error.",
            ),
        ],
        numbers={
            "violations": [violated, checked],
            "power_of_n": powers,
            "bound_over_error": last,
            "two_states": {"e": BIASES, **example},
        },
        seconds={},
    )


def _power(lengths: Sequence[int], values: np.ndarray) -> float:
    """Return the exponent of n with which the mean grows between the last two lengths."""
    first, second = values[-2:].mean(axis=1)
    return float(np.log(second / first) / np.log(lengths[-1] / lengths[-2]))


def _growth_table(lengths: Sequence[int], growth: dict[int, Stage]) -> Table:
    rows = [
        [
            str(n),
            *(part[what][i].mean() for part in growth.values() for what in ("error", "bound")),
        ]
        for i, n in enumerate(lengths)
    ]
    titles = [f"{what}, {epoch} epochs" for epoch in growth for what in ("error", "bound")]
    return Table(
        "growth",
        "Error of the sum of states and its bound, mean over the sequences.",
        {"n": "", **dict.fromkeys(titles, ".2g")},
        rows,
    )


def _draw_growth(lengths: Sequence[int], growth: dict[int, Stage]) -> Picture:
    def fill(*axes: Any) -> None:
        for axis, (epoch, part) in zip(axes, growth.items(), strict=True):
            low, high = part["error"].min(axis=1), part["error"].max(axis=1)
            axis.fill_between(lengths, low, high, color="0.85", lw=0)
            axis.loglog(lengths, part["bound"].mean(axis=1), color=INKS[0], label="bound")
            axis.loglog(
                lengths, part["error"].mean(axis=1), color=INKS[1], ls=DASHES[1], label="error"
            )
            slope = part["bound"][-1].mean() / lengths[-1] * np.array(lengths)
            axis.loglog(lengths, slope, color="black", ls=":", lw=0.8, label="∝ n")
            axis.set_title(f"λ after {epoch} epochs")
            axis.set_xlabel("observations n")
        axes[0].set_ylabel("additive error")
        axes[0].legend(loc="lower right")

    return draw(
        "growth",
        "Error of the sum of states (dashed; grey: smallest to largest over the sequences) and its"
        " bound, as n grows, with a line of slope one.",
        fill,
        columns=len(growth),
        height=2.6,
    )


def _example_table(example: Stage) -> Table:
    rows = [
        [str(e), *(example[what][i] for what in ("error", "printed", "corrected", "classical"))]
        for i, e in enumerate(BIASES)
    ]
    return Table(
        "two_states",
        "The two-state example by e: the error, Proposition 3.1 as printed, and the"
        " corrected bounds: S2 and Theorem 2.",
        {"e": "", "error": ".4f", "as printed": ".4f", "S2": ".4f", "Theorem 2": ".4f"},
        rows,
    )


def _draw_example(example: Stage) -> Picture:
    def fill(axis: Any) -> None:
        for i, (what, label) in enumerate(
            {
                "error": "error",
                "printed": "Proposition 3.1, as printed",
                "corrected": "corrected, S2",
                "classical": "corrected, Theorem 2",
            }.items()
        ):
            # S2 equals the error here; a second line would hide it.
            line = "none" if what == "error" else DASHES[i]
            axis.semilogy(
                BIASES,
                example[what],
                color=INKS[i],
                ls=line,
                marker="x" if what == "error" else None,
                label=label,
            )
        axis.set_xlabel("error e of the middle coin")
        axis.set_ylabel("additive error and bounds")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(
        "two_states",
        "Two-state example with an error e of the middle coin: the additive error, the proposition"
        " as printed, which is below it for e < 0.1, and corrected bounds.",
        fill,
        height=2.5,
    )
