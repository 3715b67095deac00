"""The tables and figures of section 5.2, from the results of `nonlinear`."""

from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from retrodict._workspace import Stage
from retrodict.experiments import published
from retrodict.experiments._drawing import BESIDE, INKS, MARKERS, Picture, draw
from retrodict.experiments._measure import LEVEL, MARGIN
from retrodict.experiments._report import Chapter, Spread, Table, make_chapter, spread

ARCHIVED = ("conjugate", "gated")
"""The families of the paper, whose trained networks are in its authors' archive."""


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

    @property
    def many_particles(self) -> str:
        """The accurate particle smoother in words."""
        return f"{self.sizes.num_particles} particles"

    def errors(self, name: str) -> np.ndarray:
        """Return additive errors of a smoother to the exact posterior, by sequence and length."""
        return np.abs(self.sums[name] - self.exact["sums"])

    def errors_to(self, particles: Stage, name: str) -> np.ndarray:
        """Return additive errors of a smoother at n = 500 to particles, by run and sequence."""
        return np.abs(self.sums[name][:, -1] - particles["means"].sum(axis=2))

    def errors_of(self, particles: Stage) -> np.ndarray:
        """Return the additive errors of a particle smoother, by run and sequence."""
        return np.abs(particles["means"].sum(axis=2) - self.exact["means"].sum(axis=1))

    def by_reference(self, name: str) -> list[float]:
        """Return the mean additive error at n = 500 by 2 particles, by many and by the grid."""
        errors = [self.errors_to(particles, name) for particles in (self.two, self.many)]
        return [float(each.mean()) for each in (*errors, self.errors(name)[:, -1])]

    def grade(self, smoother: Stage) -> dict[str, Spread]:
        """Return the scores of a smoother on the new series."""
        gaps = (self.oracle["evidence"] - smoother["elbo"]) / self.fresh_xs.shape[1]
        inside = np.abs(self.fresh_xs - smoother["means"]) < MARGIN * smoother["stds"]
        return {
            "gap": spread(gaps),
            **self.mean_errors(smoother["means"]),
            "coverage": spread(inside.mean(axis=1)),
        }

    def mean_errors(self, means: np.ndarray) -> dict[str, Spread]:
        """Return the errors of smoothed means on the new series."""
        errors = means - self.oracle["means"]
        return {
            "additive error": spread(np.abs(errors.sum(axis=1))),
            "marginal MSE": spread((errors**2).mean(axis=1)),
            "state MSE": spread(((means - self.fresh_xs) ** 2).mean(axis=1)),
        }


def chapter(results: Results) -> Chapter:
    """Return the chapter of section 5.2."""
    archive = published.archive()["nonlinear"]
    grades = {name: results.grade(smoother) for name, smoother in results.grades.items()}
    printed = {name: [row[2 + i] for row in archive["table"]] for i, name in enumerate(ARCHIVED)}
    reproduced = {
        name: np.abs(results.sums[f"archived {name}"][:, -1] - np.array(archive["reference_sums"]))
        for name in ARCHIVED
    }
    agreeing = sum(
        f"{value:.2f}" == entry
        for name in ARCHIVED
        for value, entry in zip(reproduced[name], printed[name], strict=True)
    )
    two, many = results.errors_of(results.two), results.errors_of(results.many)
    printed_mean = np.mean([float(row[0]) for row in archive["table"]])
    return make_chapter(
        "nonlinear",
        [
            *_errors_by_length(results),
            *(_error_table(results, name, printed[name], reproduced[name]) for name in ARCHIVED),
            _reference_errors_table(results),
            *_reference_parts(results, printed, two, many),
            _three_references_table(results),
            _draw_families(grades),
            _elbo_table(results),
            _families_table(results, grades),
        ],
        numbers={
            "printed_entries_reproduced": [agreeing, 10],
            "error_of_2_particles": {
                "mean": two.mean(axis=0),
                "quantiles 0.1 0.5 0.9": np.quantile(two, [0.1, 0.5, 0.9], axis=0),
            },
            "additive_error_by_reference": {
                name: dict(zip(("2", "many", "exact"), results.by_reference(name), strict=True))
                for name in results.sums
            },
            "fresh_series": grades,
            "elbo_of_fits_nats_per_step": results.scores,
        },
        seconds={
            **{f"training {name}": value for name, value in results.seconds.items()},
            **{f"smoothing {name}": float(g["seconds"]) for name, g in results.grades.items()},
            "smoothing FFBSi": float(results.ffbsi["seconds"]),
        },
        sizes=results.sizes,
        reference_error=two.mean(),
        num_runs=len(two),
        num_accurate_runs=len(many),
        printed_error=np.mean([float(entry) for entry in printed["gated"]]),
        worst_gap=max(grades[name]["gap"].mean for name in ("gated", "recurrent")),
        gated_error=grades["gated"]["additive error"].mean,
        conjugate_error=grades["conjugate"]["additive error"].mean,
        ratio=printed_mean / ((results.exact["means"] - results.xs) ** 2).mean(),
    )


def _errors_by_length(results: Results) -> tuple[Picture, Table]:
    """Draw and tabulate the additive errors of both families as n grows."""
    archive = published.archive()["nonlinear"]
    lengths = np.array(archive["lengths"])
    panels = {
        "as printed": [np.array(archive["errors_by_length"][name]) for name in ARCHIVED],
        "the same networks, exact reference": [
            results.errors(f"archived {name}") for name in ARCHIVED
        ],
        "our fits, exact reference": [results.errors(name) for name in ARCHIVED],
    }
    columns: dict[str, Any] = {"n": ("", map(str, lengths))}
    for what, errors in zip(("printed", "archived", "ours"), panels.values(), strict=True):
        for name, values in zip(ARCHIVED, errors, strict=True):
            columns[f"{name}, {what}"] = (".2f", values.mean(axis=0))

    def plot(axis: Any, *errors: np.ndarray) -> None:
        styles: list[dict[str, Any]] = [
            {"color": INKS[1], "marker": "*", "ms": 4, "ls": "--"},
            {"color": INKS[0], "marker": "o", "ms": 3, "ls": "-"},
        ]
        for name, values, style in zip(ARCHIVED, errors, styles, strict=True):
            for i, row in enumerate(values):
                axis.plot(lengths, row, lw=0.6, label=name if i == 0 else None, **style)

    picture = draw(
        "additive_error",
        plot,
        [(title, tuple(errors)) for title, errors in panels.items()],
        xlabel="observations n",
        ylabels=["additive error"],
        legend={"loc": "upper left"},
        sharey=True,
    )
    return picture, Table.of_columns("additive_error", columns)


def _error_table(results: Results, name: str, printed: list[str], reproduced: np.ndarray) -> Table:
    many = results.errors_to(results.many, f"archived {name}").mean(axis=0)
    return Table.of_columns(
        f"table_{name}",
        {
            "sequence": ("", [str(i) for i in range(len(printed))]),
            "printed": ("", printed),
            "archived, 2 particles": (".2f", reproduced),
            f"archived, {results.many_particles}": (".2f", many),
            "archived, exact": (".2f", results.errors(f"archived {name}")[:, -1]),
            "ours, exact": (".2f", results.errors(name)[:, -1]),
        },
    )


def _reference_errors_table(results: Results) -> Table:
    """Tabulate squared errors of marginal means to the states, by run, sequence and time."""
    archive = published.archive()["nonlinear"]["table"]
    columns: dict[str, Any] = {
        "sequence": ("", [str(i) for i in range(len(archive))]),
        "printed mean": ("", [row[0] for row in archive]),
        "printed variance": ("", [row[1] for row in archive]),
    }
    for what, means in {
        "2 particles": results.two["means"],
        results.many_particles: results.many["means"],
        "exact": results.exact["means"][None],
    }.items():
        by_sequence = ((means - results.xs) ** 2).swapaxes(0, 1)
        columns[f"mean, {what}"] = (".3f", [each.mean() for each in by_sequence])
        columns[f"variance, {what}"] = (".0e", [each.var(axis=-1).mean() for each in by_sequence])
    return Table.of_columns("reference_errors", columns)


def _reference_parts(
    results: Results, printed: dict[str, list[str]], two: np.ndarray, many: np.ndarray
) -> tuple[Picture, Table]:
    """Draw and tabulate the errors of particle smoothers with 2 and with many particles."""
    archived_sums = np.array(published.archive()["nonlinear"]["reference_sums"])
    archived = np.abs(archived_sums - results.exact["sums"][:, -1])
    low, middle, high = np.quantile(two, [0.1, 0.5, 0.9], axis=0)
    marked: dict[str, Any] = {
        "error of the archived reference": archived,
        "printed for the gated family": [float(entry) for entry in printed["gated"]],
        "printed for the conjugate family": [float(entry) for entry in printed["conjugate"]],
    }

    def plot(axis: Any) -> None:
        positions = np.arange(two.shape[1])
        parts = axis.boxplot(
            two, positions=positions, widths=0.5, whis=(5, 95), sym="", patch_artist=True
        )
        for box in parts["boxes"]:
            box.set(facecolor="#e2e8f0", linewidth=0.7)
        for line in (*parts["medians"], *parts["whiskers"], *parts["caps"]):
            line.set(color="black", linewidth=0.8)
        for i, (label, values) in enumerate(marked.items()):
            style = {"marker": MARKERS[i], "ms": 5, "color": INKS[i]}
            axis.plot(positions, values, ls="none", label=label, **style)
        axis.set_xticks(positions, [f"sequence {i}" for i in positions])

    picture = draw(
        "reference", plot, height=2.7, ylabels=["additive error at n = 500"], legend=BESIDE
    )
    table = Table.of_columns(
        "reference",
        {
            "sequence": ("", [str(i) for i in range(len(archived))]),
            "archived run": (".2f", archived),
            "10%": (".2f", low),
            "median": (".2f", middle),
            "90%": (".2f", high),
            results.many_particles: (".3f", [column.mean() for column in many.T]),
        },
    )
    return picture, table


def _three_references_table(results: Results) -> Table:
    columns = {"": "", "2 particles": ".2f", results.many_particles: ".2f", "exact": ".2f"}
    rows = [[name, *results.by_reference(name)] for name in results.sums]
    return Table("three_references", columns, rows)


UNITS = {
    "gap": ("ELBO gap, nats per step", 1.0),
    "additive error": ("additive error", 1.0),
    "marginal MSE": ("marginal MSE, ×10⁻⁴", 1e4),
    "state MSE": ("state MSE, ×10⁻³", 1e3),
    "coverage": (f"coverage of {LEVEL:.0%}", 1.0),
}
"""The title and the factor of each score in figures and tables."""


def _families_table(results: Results, grades: dict[str, dict[str, Spread]]) -> Table:
    """Compare all families on new series."""

    def cells(scores: dict[str, Spread]) -> list[Spread]:
        return [value.times(UNITS[what][1]) for what, value in scores.items()]

    rows: list[list[Any]] = []
    for name, scores in grades.items():
        milliseconds = 1e3 * float(results.grades[name]["seconds"])
        rows.append([name, *cells(scores), results.seconds.get(name, np.nan), milliseconds])
    ffbsi, oracle = results.ffbsi, results.oracle
    milliseconds = 1e3 * float(ffbsi["seconds"])
    by_particles = cells(results.mean_errors(ffbsi["means"]))
    label = f"FFBSi, {results.sizes.num_particles}"
    rows.append([label, np.nan, *by_particles, np.nan, np.nan, milliseconds])
    lower, upper = oracle["intervals"]
    inside = spread(((lower < results.fresh_xs) & (results.fresh_xs < upper)).mean(axis=1))
    state_error = cells(results.mean_errors(oracle["means"]))[-1]
    rows.append(["exact, on a grid", 0.0, 0.0, 0.0, state_error, inside, np.nan, np.nan])
    titles = [title for title, _ in UNITS.values()]
    columns = {"smoother": "", **dict.fromkeys(titles, ".3g")}
    columns |= {"training, s": ".0f", "smoothing, ms": ".3g"}
    return Table("families", columns, rows)


def _elbo_table(results: Results) -> Table:
    archive = published.archive()["nonlinear"]
    rows = [["evidence of the archived series", archive["evidence"]]]
    for name in ARCHIVED:
        fits = archive["elbo"][name]
        rows.append([f"{name}, the best archived fit", max(fits)])
        rows.append([f"{name}, the worst archived fit", min(fits)])
        rows.append([f"{name}, our fit to other series", 4 * results.scores[f"{name}, 4 rows"][0]])
    return Table("elbo", {"": "", "nats": ".2f"}, rows)


def _draw_families(grades: dict[str, dict[str, Spread]]) -> Picture:
    def plot(axis: Any, what: str) -> None:
        label, unit = UNITS[what]
        for i, (name, scores) in enumerate(grades.items()):
            style = {"color": INKS[0], "marker": "o", "mfc": INKS[0]}
            if name.startswith("archived"):
                style = {"color": INKS[1], "marker": "D", "mfc": "white"}
            value = scores[what].times(unit)
            axis.errorbar(value.mean, i, xerr=2 * value.error, ms=4, lw=0.9, **style)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(axis="y", lw=0.4, color="0.85")
        axis.set_xlabel(label)
        if what == "gap":  # the panels share their vertical axis
            axis.set_yticks(np.arange(len(grades)), list(grades))
            axis.invert_yaxis()

    return draw(
        "families",
        plot,
        [("", (what,)) for what in ("gap", "additive error", "marginal MSE")],
        sharey=True,
    )
