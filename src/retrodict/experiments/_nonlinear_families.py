"""The comparison of all families on the model of section 5.2."""

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from retrodict.experiments import published
from retrodict.experiments._drawing import INKS, Picture, draw
from retrodict.experiments._nonlinear_results import (
    ARCHIVED,
    LEVEL,
    Results,
    mean_errors,
)
from retrodict.experiments._report import Section, Spread, Table, spread


def families_section(results: Results, grades: dict[str, dict[str, Spread]]) -> Section:
    """Return the section that compares all families on new series.

    Args:
        results: the results of the experiment.
        grades: the scores of each smoother, by name.
    """
    names = list(grades)
    titles = {
        "gap": "ELBO gap, nats per step",
        "marginal MSE": "marginal MSE, ×10⁻⁴",
        "state MSE": "state MSE, ×10⁻³",
        "coverage": f"coverage of {LEVEL:.0%}",
    }
    units = {"marginal MSE": 1e4, "state MSE": 1e3}

    def cells(figures: dict[str, Spread]) -> list[Spread]:
        return [value.times(units.get(what, 1.0)) for what, value in figures.items()]

    rows: list[list[Any]] = [
        [
            name,
            *cells(grades[name]),
            results.seconds.get(name, np.nan),
            1e3 * float(results.grades[name]["seconds"]),
        ]
        for name in names
    ]
    lower, upper = results.oracle["intervals"]
    inside = ((lower < results.fresh_xs) & (results.fresh_xs < upper)).mean(axis=1)
    particle, exact = (
        mean_errors(results, means) for means in (results.ffbsi["means"], results.oracle["means"])
    )
    rows.append(
        [
            f"FFBSi, {results.sizes.num_particles}",
            np.nan,
            *cells(particle),
            np.nan,
            np.nan,
            1e3 * float(results.ffbsi["seconds"]),
        ]
    )
    state_error = cells({"state MSE": exact["state MSE"]})
    rows.append(["exact, on a grid", 0.0, 0.0, 0.0, *state_error, spread(inside), np.nan, np.nan])
    columns = {"smoother": ""}
    columns |= {titles.get(what, what): ".3g" for what in grades[names[0]]}
    columns |= {"training, s": ".0f", "smoothing, ms": ".3g"}
    count, n = results.fresh_xs.shape
    return Section(
        "Every family of the library",
        "",
        [
            _draw_families(grades),
            _elbo_table(results),
            Table(
                "families",
                f"{count} new series of {n} rows, mean ± standard error over series, against the"
                f" exact posterior. Conjugate and gated: the best of {results.sizes.num_fits} fits"
                f" by ELBO; others: one fit. Training: {results.sizes.num_steps} steps, including"
                " compilation unless an earlier fit had compiled the program."
                " Smoothing: marginal means of one series, compiled.",
                columns,
                rows,
            ),
        ],
        "The archived networks were trained with averaged gradients, and with one draw of the"
        " emission terms where ours use quadrature; ours have 32 instead of 16 units per layer,"
        " and a gate with a sigmoid. Those named '4 rows' are ours: one fit to series of four"
        " rows with correct gradients and Adam at a constant rate of 0.01, for"
        f" {results.sizes.short_steps} steps; the archived fits took 60,000 steps, five times.",
    )


def _elbo_table(results: Results) -> Table:
    archive = published.archive()["nonlinear"]
    rows = [["evidence of the archived series", archive["evidence"]]]
    for name in ARCHIVED:
        fits = archive["elbo"][name]
        rows.append([f"{name}, the best archived fit", max(fits)])
        rows.append([f"{name}, the worst archived fit", min(fits)])
        rows.append([f"{name}, our fit to other series", 4 * results.scores[f"{name}, 4 rows"][0]])
    return Table(
        "elbo",
        "ELBO in training, nats per series of four rows: the best epoch of each archived fit by one"
        " draw, ours by quadrature.",
        {"": "", "nats": ".2f"},
        rows,
    )


def _draw_families(grades: dict[str, dict[str, Spread]]) -> Picture:
    names = list(grades)
    labels = {
        "gap": ("ELBO gap, nats per step", 1.0),
        "additive error": ("additive error", 1.0),
        "marginal MSE": ("marginal MSE, ×10⁻⁴", 1e4),
    }

    def fill(*axes: Any) -> None:
        for axis, (what, (label, unit)) in zip(axes, labels.items(), strict=True):
            for i, name in enumerate(names):
                value, archived = grades[name][what].times(unit), name.startswith("archived")
                axis.errorbar(
                    value.mean,
                    i,
                    xerr=2 * value.error,
                    color=INKS[1] if archived else INKS[0],
                    marker="D" if archived else "o",
                    mfc="white" if archived else INKS[0],
                    ms=4,
                    lw=0.9,
                )
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(axis="y", lw=0.4, color="0.85")
            axis.set_xlabel(label)
        axes[0].set_yticks(np.arange(len(names)), names)
        axes[0].invert_yaxis()

    return draw(
        "families",
        "ELBO gap, additive error and marginal mean squared error on the fresh series, with two"
        " standard errors to each side, on logarithmic axes. Open diamonds: the archived networks.",
        fill,
        columns=3,
        height=2.6,
        sharey=True,
    )
