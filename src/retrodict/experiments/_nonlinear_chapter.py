"""The tables and figures of section 5.2, from the results of `nonlinear`."""

from typing import Any

import numpy as np

from retrodict.experiments import published
from retrodict.experiments._drawing import INKS, MARKERS, Picture, draw
from retrodict.experiments._nonlinear_families import families_section
from retrodict.experiments._nonlinear_results import (
    ARCHIVED,
    Results,
    errors_by_reference,
    errors_to_exact,
    printed_errors,
    reference_errors,
    reproduced_errors,
    scores,
)
from retrodict.experiments._report import Chapter, Section, Table


def chapter(results: Results) -> Chapter:
    """Return the chapter of section 5.2."""
    grades = {name: scores(results, grade) for name, grade in results.grades.items()}
    reproduced = reproduced_errors(results)
    agreeing = sum(
        f"{value:.2f}" == entry
        for name, entries in printed_errors().items()
        for value, entry in zip(reproduced[name], entries, strict=True)
    )
    off = reference_errors(results.two, results)
    printed = np.mean([float(entry) for entry in printed_errors()["gated"]])
    error = {name: figures["additive error"].mean for name, figures in grades.items()}
    worst = max(grades[name]["gap"].mean for name in ("gated", "recurrent"))
    return Chapter(
        name="nonlinear",
        title="Section 5.2: an observation map that is not injective",
        summary=(
            f"The archived networks and the archived reference give {agreeing} of 10 printed"
            f" errors. The mean error of such a reference, a particle smoother with 2 particles, is"
            f" {off.mean():.1f} over {off.shape[0]} runs. The mean of the errors printed for the"
            f" gated network is {printed:.1f}. With correct gradients and an exact reference, the"
            f" ELBO of the gated and the recurrent family is within {worst:.3f} nats per step of"
            f" the evidence. The additive error of the gated family is {error['gated']:.2f}, and"
            f" that of the conjugate family {error['conjugate']:.2f}."
        ),
        sections=[
            _figure_section(results),
            _table_section(results, reproduced, agreeing),
            _reference_section(results, off),
            families_section(results, grades),
        ],
        numbers={
            "printed_entries_reproduced": [agreeing, 10],
            "error_of_2_particles": {
                "mean": off.mean(axis=0),
                "quantiles 0.1 0.5 0.9": np.quantile(off, [0.1, 0.5, 0.9], axis=0),
            },
            "additive_error_by_reference": {
                name: dict(
                    zip(("2", "many", "exact"), errors_by_reference(results, name), strict=True)
                )
                for name in results.sums
            },
            "fresh_series": {
                name: {what: value for what, value in figures.items()}
                for name, figures in grades.items()
            },
            "elbo_of_fits_nats_a_step": results.scores,
        },
        seconds={
            **{f"training {name}": value for name, value in results.seconds.items()},
            **{f"smoothing {name}": float(g["seconds"]) for name, g in results.grades.items()},
            "smoothing FFBSi": float(results.ffbsi["seconds"]),
        },
    )


def _figure_section(results: Results) -> Section:
    archive = published.archive()["nonlinear"]
    lengths = np.array(archive["lengths"])
    panels = {
        "as printed": {name: np.array(archive["errors_by_length"][name]) for name in ARCHIVED},
        "the same networks, exact reference": {
            name: errors_to_exact(results, f"archived {name}") for name in ARCHIVED
        },
        "our fits, exact reference": {name: errors_to_exact(results, name) for name in ARCHIVED},
    }
    rows = [
        [str(n), *(values[name][:, i].mean() for values in panels.values() for name in ARCHIVED)]
        for i, n in enumerate(lengths)
    ]
    titles = [f"{name}, {what}" for what in ("printed", "archived", "ours") for name in ARCHIVED]
    table = Table(
        "additive_error",
        "Additive error after n observations, mean over the five sequences: as printed (reference"
        " with 2 particles), archived networks against the exact posterior, our fits against it.",
        {"n": "", **dict.fromkeys(titles, ".2f")},
        rows,
    )
    return Section(
        "Figure 2: additive errors as n grows",
        "The error of the sum of states for five sequences, gated (dots) and conjugate (stars).",
        [_draw_errors(lengths, panels), table],
        "The left panel shows the values of the paper's figure, from the archive. The middle panel"
        " compares the same networks with the exact posterior: only the reference differs. In the"
        " right panel both families were trained with correct gradients.",
    )


def _draw_errors(lengths: np.ndarray, panels: dict[str, dict[str, np.ndarray]]) -> Picture:
    def fill(*axes: Any) -> None:
        for axis, (title, values) in zip(axes, panels.items(), strict=True):
            for i, name in enumerate(ARCHIVED):
                style = {"color": INKS[1 - i], "marker": "*" if i == 0 else "o", "ms": 4 - i}
                for j, row in enumerate(values[name]):
                    label = {"label": name} if j == 0 else {}
                    axis.plot(lengths, row, lw=0.6, ls="--" if i == 0 else "-", **style, **label)
            axis.set_title(title)
            axis.set_xlabel("observations n")
        axes[0].set_ylabel("additive error")
        axes[0].legend(loc="upper left")

    return draw(
        "additive_error",
        "Additive smoothing errors of five sequences as n grows. Left: the values of the paper's"
        " figure. Middle: the same networks against the exact posterior. Right: our fits"
        " against the exact posterior.",
        fill,
        columns=3,
        height=2.6,
        sharey=True,
    )


def _table_section(results: Results, reproduced: dict[str, np.ndarray], agreeing: int) -> Section:
    tables = []
    for name in ARCHIVED:
        archived, ours = (
            errors_to_exact(results, key)[:, -1] for key in (f"archived {name}", name)
        )
        by_many = np.abs(
            results.sums[f"archived {name}"][:, -1] - results.many["means"].sum(axis=2)
        ).mean(axis=0)
        rows = [
            [str(i), printed, *map(float, values)]
            for i, (printed, *values) in enumerate(
                zip(printed_errors()[name], reproduced[name], by_many, archived, ours, strict=True)
            )
        ]
        tables.append(
            Table(
                f"table_{name}",
                f"Additive errors of the {name} family at n = 500: as printed; the archived network"
                " against the archived 2-particle reference, against a particle smoother with"
                f" {results.sizes.num_particles} particles, and against the exact posterior; our"
                " fit against the exact posterior.",
                {
                    "sequence": "",
                    "printed": "",
                    "archived, 2 particles": ".2f",
                    f"archived, {results.sizes.num_particles} particles": ".2f",
                    "archived, exact": ".2f",
                    "ours, exact": ".2f",
                },
                rows,
            )
        )
    archive = published.archive()["nonlinear"]["table"]
    squared = {
        "two": (results.two["means"] - results.xs) ** 2,
        "many": (results.many["means"] - results.xs) ** 2,
        "exact": (results.exact["means"] - results.xs)[None] ** 2,
    }
    ratio = np.mean([float(row[0]) for row in archive]) / squared["exact"].mean()
    rows = [
        [
            str(i),
            *archive[i][:2],
            *(f(part[:, i]) for part in squared.values() for f in (_mean_of, _variance_of)),
        ]
        for i in range(len(archive))
    ]
    many = f"{results.sizes.num_particles} particles"
    columns = {"sequence": "", "printed mean": "", "printed variance": ""}
    for what in ("2 particles", many, "exact"):
        columns |= {f"mean, {what}": ".3f", f"variance, {what}": ".0e"}
    tables.append(
        Table(
            "reference_errors",
            "Squared error of the reference's marginal means to the true states, mean and variance"
            " over time: as printed, and by particle smoothers of two sizes (mean over runs) and"
            " the exact posterior.",
            columns,
            rows,
        )
    )
    return Section(
        "Table: five sequences",
        "Squared error of the reference to the states, and additive errors of both families at"
        " n = 500.",
        tables,
        f"The archived networks and the archived reference give {agreeing} of the 10 printed"
        f" additive errors. The squared errors printed for that reference are {ratio:.0f} times"
        " those of the exact posterior on average, because it has 2 particles.",
    )


def _mean_of(squared: np.ndarray) -> float:
    return float(squared.mean())


def _variance_of(squared: np.ndarray) -> float:
    return float(squared.var(axis=-1).mean())


def _reference_section(results: Results, off: np.ndarray) -> Section:
    good = reference_errors(results.many, results)
    low, middle, high = np.quantile(off, [0.1, 0.5, 0.9], axis=0)
    archive = published.archive()["nonlinear"]
    archived = np.abs(np.array(archive["reference_sums"]) - results.exact["sums"][:, -1])
    rows = [
        [str(i), float(archived[i]), low[i], middle[i], high[i], good[:, i].mean()]
        for i in range(len(archived))
    ]
    names = [*results.sums]
    ways = [[name, *errors_by_reference(results, name)] for name in names]
    return Section(
        "Error of the reference",
        "According to the text the reference has 1000 samples; the archived run of the table had 2"
        " particles.",
        [
            _draw_reference(off, archived),
            Table(
                "reference",
                f"Additive error of the reference at n = 500: the archived run, quantiles of"
                f" {off.shape[0]} runs of ours with 2 particles, and the mean of"
                f" {good.shape[0]} runs with {results.sizes.num_particles}.",
                {
                    "sequence": "",
                    "archived run": ".2f",
                    "10%": ".2f",
                    "median": ".2f",
                    "90%": ".2f",
                    f"{results.sizes.num_particles} particles": ".3f",
                },
                rows,
            ),
            Table(
                "three_references",
                "Mean additive error at n = 500 on the five sequences, by each reference.",
                {
                    "": "",
                    "2 particles": ".2f",
                    f"{results.sizes.num_particles} particles": ".2f",
                    "exact": ".2f",
                },
                ways,
            ),
        ],
        "The error of a reference changes every row of the table by up to its size, up or down.",
    )


def _draw_reference(off: np.ndarray, archived: np.ndarray) -> Picture:
    printed = printed_errors()

    def fill(axis: Any) -> None:
        positions = np.arange(off.shape[1])
        parts = axis.boxplot(
            off, positions=positions, widths=0.5, whis=(5, 95), sym="", patch_artist=True
        )
        for box in parts["boxes"]:
            box.set(facecolor="#e2e8f0", linewidth=0.7)
        for line in (*parts["medians"], *parts["whiskers"], *parts["caps"]):
            line.set(color="black", linewidth=0.8)
        for i, (label, values) in enumerate(
            {
                "error of the archived reference": archived,
                "printed for the gated family": [float(v) for v in printed["gated"]],
                "printed for the conjugate family": [float(v) for v in printed["conjugate"]],
            }.items()
        ):
            axis.plot(
                positions, values, ls="none", marker=MARKERS[i], ms=5, color=INKS[i], label=label
            )
        axis.set_xticks(positions, [f"sequence {i}" for i in positions])
        axis.set_ylabel("additive error at n = 500")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(
        "reference",
        "Boxes: the additive error of a particle smoother with 2 particles, to the exact posterior,"
        f" over {off.shape[0]} runs (quartiles, whiskers from 5 to 95%). Markers: the archived run,"
        " and the errors that the paper prints.",
        fill,
        height=2.7,
    )
