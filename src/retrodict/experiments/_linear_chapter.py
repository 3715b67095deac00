"""The tables and figures of section 5.1 and appendix D.2, from the results of `linear`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import retrodict as rd
from retrodict._workspace import Stage
from retrodict.experiments import published
from retrodict.experiments._drawing import DASHES, INKS, Picture, draw
from retrodict.experiments._report import Chapter, Section, Table

NUM_TIMES = 64
"""The length of the training series."""

PARAMETERS = ("prior mean", "prior std", "A", "a", "transition std", "B", "emission std")


class Sizes(NamedTuple):
    """The sizes of the experiment.

    Attributes:
        num_series: the number of training series of 64 rows.
        batch_size: the number of series per step.
        epochs: the three stopping points; training ends at the last. An epoch is
            `num_series / batch_size` steps.
        num_fits: the number of fits from different starts.
        num_evaluated: how many of the paper's twenty evaluation sequences are smoothed.
    """

    num_series: int
    batch_size: int
    epochs: tuple[int, int, int]
    num_fits: int
    num_evaluated: int


class Results(NamedTuple):
    """The results of the experiment.

    Attributes:
        sizes: the sizes of the experiment.
        evidence: the mean log-evidence of the training series.
        curves: the ELBO in nats per series, by fit and epoch.
        best: the index of the best fit.
        models: its parameters at the three stopping points.
        kept_epochs: the epochs that these parameters are from.
        theirs: the errors of smoothing with the published parameters.
        ours: the errors of smoothing with `models`.
        seconds: the duration of each fit.
    """

    sizes: Sizes
    evidence: float
    curves: np.ndarray
    best: int
    models: Sequence[rd.StateSpaceModel]
    kept_epochs: Sequence[int]
    theirs: Stage
    ours: Stage
    seconds: dict[str, float]


def chapter(results: Results) -> Chapter:
    """Return the chapter of section 5.1."""
    sizes, ours, theirs = results.sizes, results.ours, results.theirs
    printed = published.archive()["linear"]["table"][: sizes.num_evaluated]
    rows = _table_rows(theirs)
    agreeing = sum(
        f"{value:.6f}" == entry
        for row, entries in zip(rows, printed, strict=True)
        for value, entry in zip(row[1:], entries, strict=True)
    )
    total = sum(len(row) for row in printed)
    gaps = results.evidence - results.curves.max(axis=1)
    error = ours["additive"][-1, :, -1].mean()
    powers = [_power(theirs["lengths"], part.mean(axis=0)) for part in theirs["additive"]]
    parameters = [[float(leaf) for leaf in _numbers(model)] for model in results.models]
    return Chapter(
        name="linear",
        title="Section 5.1: a linear-Gaussian model",
        summary=(
            f"With the published parameters, {agreeing} of {total} entries of the appendix's table"
            f" are reproduced as printed. The best of our {len(results.curves)} fits is"
            f" {max(gaps.min(), 0.0):.1e} nats per series of {NUM_TIMES} rows below the evidence,"
            f" and its mean additive error at n = 2000 is {error:.1e}."
        ),
        sections=[
            _training_section(results),
            _additive_section(results, powers),
            Section(
                "Appendix: marginal errors across time",
                "The error of each marginal mean at the three stopping points.",
                [_draw_marginal(sizes.epochs, theirs, ours)],
                "Means over the sequences; the paper does not state what it averages.",
            ),
            _table_section(results, rows, printed, f"{agreeing} of {total}", parameters[-1]),
        ],
        numbers={
            "evidence_nats_a_series": results.evidence,
            "entries_as_printed": [agreeing, total],
            "gap_nats_a_series": gaps,
            "best_fit": results.best,
            "kept_epochs": results.kept_epochs,
            "power_of_n": powers,
            "parameters": dict(zip(map(str, sizes.epochs), parameters, strict=True)),
            "table_from_published_parameters": rows,
            "table_from_our_fits": _table_rows(ours),
        },
        seconds=results.seconds,
    )


def _training_section(results: Results) -> Section:
    evidence, curves = results.evidence, results.curves
    return Section(
        "Figure 1, left: training curves",
        "The ELBO over 100 epochs of one fit, and the evidence as a dotted line.",
        [
            _draw_training(evidence, curves),
            _curve_table(evidence, curves),
            _stop_table(evidence, results.sizes.epochs, curves[results.best]),
        ],
        "The left panels are the five archived fits; each point is a mean over the minibatches of"
        " an epoch. The right panels are ours, on other training series, evaluated on all of them"
        " at the start and at the end of each epoch. Gaps below 1e-14 are drawn at 1e-14.",
    )


def _additive_section(results: Results, powers: Sequence[float]) -> Section:
    epochs, theirs, ours = results.sizes.epochs, results.theirs, results.ours
    return Section(
        "Figure 1, right: additive smoothing errors",
        "The error of the sum of states, of 20 sequences as n grows to 2000, at three stopping"
        " points: it grows linearly.",
        [_draw_additive(epochs, theirs, ours), _additive_table(epochs, theirs, ours)],
        "The left panel is the paper's figure, drawn again from the published parameters. Our fits"
        " stop at other distances from the truth, so that the levels differ. On logarithmic axes"
        " all stopping points are legible, and linear growth is a line of slope one: over the last"
        f" half of n the mean error grows as n^{min(powers):.2f} to n^{max(powers):.2f} with the"
        " published parameters. Our parameters are the best up to each stop: those of epochs"
        f" {', '.join(map(str, results.kept_epochs))}.",
    )


def _table_section(
    results: Results,
    rows: list[list[Any]],
    printed: Sequence[Sequence[str]],
    agreeing: str,
    parameters: Sequence[float],
) -> Section:
    archive, epochs = published.archive()["linear"], results.sizes.epochs
    with_printed = [
        [row[0], *map(_beside, row[1:], entries)]
        for row, entries in zip(rows, printed, strict=True)
    ]
    columns = {"": "", "θ": ".6f", "published λ": ".6f", f"our λ, {epochs[-1]} epochs": ".6f"}
    values = zip(PARAMETERS, archive["theta"], archive["lambda"]["100"], parameters, strict=True)
    return Section(
        "Appendix: table of 20 sequences",
        "Mean and variance of the squared error of the exact smoother to the states, and additive"
        " errors at n = 2000 at three stopping points.",
        [
            Table(
                "table_published",
                f"The paper's table from its parameters: {agreeing} entries are as printed in all"
                " six decimals. The others have the printed value in brackets.",
                _header(published.EPOCHS),
                with_printed,
            ),
            Table(
                "table_ours",
                f"The same sequences with our fit (start {results.best}).",
                _header(epochs),
                _table_rows(results.ours),
            ),
            Table(
                "parameters",
                "True and learned parameters, the published ones after 100 epochs.",
                columns,
                list(values),
            ),
        ],
        "The published parameters are those of the best of the authors' five fits; ours are those"
        " of the best of our fits.",
    )


def _numbers(model: rd.StateSpaceModel) -> list[Array]:
    model = rd.unwrap(model)
    prior, transition, emission = model.prior, model.transition, model.emission
    parts = (
        prior.mean,
        prior.scale_tril,
        transition.weight,
        transition.bias,
        transition.scale_tril,
        emission.weight,
        emission.scale_tril,
    )
    return [jnp.ravel(part)[0] for part in parts]


def _table_rows(errors_of: Stage) -> list[list[Any]]:
    additive = errors_of["additive"][:, :, -1]
    columns = np.stack([errors_of["mean_error"], errors_of["variance_of_error"], *additive], axis=1)
    return [[str(i), *map(float, row)] for i, row in enumerate(columns)]


def _header(epochs: Sequence[int]) -> dict[str, str]:
    titles = ("mean error, θ", "variance of error, θ", *(f"λ after {e} epochs" for e in epochs))
    return {"sequence": "", **dict.fromkeys(titles, ".6f")}


def _power(lengths: np.ndarray, errors: np.ndarray) -> float:
    """Return the exponent of n with which an error grows over the last half of the lengths."""
    half = len(lengths) // 2
    return float(np.polyfit(np.log(lengths[half:]), np.log(errors[half:]), 1)[0])


def _beside(value: float, printed: str) -> Any:
    return value if f"{value:.6f}" == printed else f"{value:.6f} ({printed})"


def _curve_table(evidence: float, curves: np.ndarray) -> Table:
    archive = published.archive()["linear"]
    theirs = [max(curve) for curve in archive["elbo_curves"]]
    rows = [
        ["evidence", archive["evidence"], evidence],
        *(
            [
                f"best ELBO of fit {i}",
                theirs[i] if i < len(theirs) else np.nan,
                curves[i].max() if i < len(curves) else np.nan,
            ]
            for i in range(max(len(theirs), len(curves)))
        ),
    ]
    return Table(
        "training",
        f"Nats per series of {NUM_TIMES} rows, each fit on its own training series.",
        {"": "", "the archived fits": ".6f", "ours": ".6f"},
        rows,
    )


def _stop_table(evidence: float, epochs: Sequence[int], curve: np.ndarray) -> Table:
    archive = published.archive()["linear"]
    rows = [
        [
            str(i),
            archive["evidence"] - archive["elbo_at_lambda"][str(theirs)],
            max(evidence - best, 0.0),
        ]
        for i, (theirs, best) in enumerate(
            zip(published.EPOCHS, (curve[: e + 1].max() for e in epochs), strict=True)
        )
    ]
    return Table(
        "stopping_points",
        f"Evidence − ELBO at the three stopping points, the archive's after"
        f" {', '.join(map(str, published.EPOCHS))} epochs and ours after"
        f" {', '.join(map(str, epochs))}: nats per series of {NUM_TIMES} rows; zero is rounding.",
        {"stop": "", "published λ": ".1e", "our best fit": ".1e"},
        rows,
    )


def _additive_table(epochs: Sequence[int], theirs: Stage, ours: Stage) -> Table:
    rows = []
    for i, n in enumerate(theirs["lengths"]):
        values = [part["additive"][e, :, i].mean() for part in (theirs, ours) for e in range(3)]
        rows.append([str(n), *values])
    titles = [f"published, {e}" for e in published.EPOCHS] + [f"ours, {e}" for e in epochs]
    return Table(
        "additive_error",
        "Additive error after n observations, mean over the sequences, by epochs of training.",
        {"n": "", **dict.fromkeys(titles, ".2g")},
        rows,
    )


def _draw_training(evidence: float, curves: np.ndarray) -> Picture:
    archive = published.archive()["linear"]
    # Archived values average over an epoch; ours are at its end, and the first is the start.
    panels = (
        ("the archived fits", np.array(archive["elbo_curves"]), archive["evidence"], 0.5),
        ("our fits", curves, evidence, 0.0),
    )

    def fill(*axes: Any) -> None:
        for column, (title, values, top, first) in enumerate(panels):
            upper, lower = axes[column], axes[2 + column]
            epochs = first + np.arange(values.shape[1])
            for i, curve in enumerate(values):
                style = {"color": INKS[i % 5], "ls": DASHES[i % 5], "lw": 0.9, "label": f"fit {i}"}
                upper.plot(epochs, curve, **style)
                lower.semilogy(epochs, np.maximum(top - curve, 1e-14), **style)
            upper.axhline(top, color="black", ls=":", lw=1, label="evidence")
            upper.set_ylim(100, 145)
            upper.set_title(title)
            lower.set_xlabel("epoch")
        axes[0].set_ylabel("ELBO, nats per series")
        axes[2].set_ylabel("evidence − ELBO")
        axes[0].legend(ncols=2)

    return draw(
        "training",
        "ELBO of each fit by epochs, with the evidence; below, evidence − ELBO on a"
        " logarithmic axis. Left: the archived fits. Right: ours.",
        fill,
        rows=2,
        columns=2,
        height=4.0,
        sharex="col",
        sharey="row",
    )


def _panels(epochs: Sequence[int], theirs: Stage, ours: Stage) -> list[tuple[str, Any, Any]]:
    return [("published parameters", published.EPOCHS, theirs), ("our fit", epochs, ours)]


def _draw_additive(epochs: Sequence[int], theirs: Stage, ours: Stage) -> Picture:
    def fill(*axes: Any) -> None:
        for axis, (title, stops, errors) in zip(axes, _panels(epochs, theirs, ours), strict=True):
            for i, epoch in enumerate(stops):
                style = {"color": INKS[i], "ls": DASHES[i]}
                axis.loglog(errors["lengths"], errors["additive"][i].T, lw=0.35, **style)
                mean = errors["additive"][i].mean(axis=0)
                axis.loglog(errors["lengths"], mean, lw=1.8, label=f"{epoch} epochs", **style)
            axis.set_title(title)
            axis.set_xlabel("observations n")
            axis.legend(loc="lower right")
        axes[0].set_ylabel("additive error |E_q Σx − E_p Σx|")

    return draw(
        "additive_error",
        "Additive smoothing error as n grows, each thin line a sequence, thick lines their mean, at"
        " three stopping points.",
        fill,
        columns=2,
        height=2.9,
        sharey=True,
    )


def _draw_marginal(epochs: Sequence[int], theirs: Stage, ours: Stage) -> Picture:
    def fill(*axes: Any) -> None:
        for axis, (title, stops, errors) in zip(axes, _panels(epochs, theirs, ours), strict=True):
            for i, epoch in enumerate(stops):
                mean = errors["marginal"][i].mean(axis=0)
                style = {"color": INKS[i], "ls": DASHES[i], "lw": 0.8, "label": f"{epoch} epochs"}
                axis.semilogy(mean, rasterized=True, **style)
            axis.set_title(title)
            axis.set_xlabel("time k")
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(handles, labels, loc="outside upper center", ncols=3)
        axes[0].set_ylabel("|E_q x_k − E_p x_k|")

    return draw(
        "marginal_error",
        "Error of the marginal means across time, mean over the sequences, n = 2000.",
        fill,
        columns=2,
        height=2.7,
        sharey=True,
    )
