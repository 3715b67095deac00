"""The report and the pictures of a run."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import equinox as eqx
import jax
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict._workspace import (
    Progress,
    Quiet,
    is_main_process,
    library_version,
    write_atomically,
)
from retrodict.runs._answer import forecast, smooth
from retrodict.runs._check import Check, check
from retrodict.runs._content import (
    Band,
    Curve,
    Diagnostic,
    ParameterLine,
    ReportContent,
    Series,
    SeriesPanel,
)
from retrodict.runs._folder import REPORT, TRAINING, likelihood_in_words
from retrodict.runs._names import state_names
from retrodict.runs._page import MAX_SERIES, page
from retrodict.runs._plot import plot
from retrodict.runs._record import Run

PAGE_STAGE = "the report"

NUM_REPLICATES = 200
"""Draws of each observation, of which the bands around columns are quantiles."""

MOST_POINTS_OF_TRAINING = 500


def write_report(
    run: Run,
    table: data.Table,
    *,
    steps: int = 0,
    level: float = 0.9,
    seed: int = 0,
    found: Check | None = None,
    command: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes the page of a run: data and bands, parameters, training, diagnostics.

    Args:
        run: the run.
        table: the data, read with `run.layout`.
        steps: rows to forecast beyond the data.
        level: the probability within bands and intervals.
        seed: of all that is drawn.
        found: what `check` found, if it was run already.
        command: the command line that makes the run again, if there is one.
        progress: who is told how far it is: of the checks, and of the page as one more stage.

    Returns:
        The path of the page, in the folder of the run.
    """
    progress = progress or Quiet()
    checked = check(run, table, seed=seed, progress=progress) if found is None else found
    progress.begin(PAGE_STAGE)
    results = run.record["results"]
    content = ReportContent(
        title=f"{run.spec.reference}: {', '.join(table.names)}",
        verdict=None if checked.worst == "unknown" else checked.worst,
        summary=[checked.verdict, _how(results)],
        data=table.described(),
        series=_series(run, table, steps, level, seed),
        level=level,
        band="Bands of columns are of new observations given all rows; those of states of the"
        " states themselves.",
        parameters=[_parameter(name, found) for name, found in results["parameters"].items()],
        parameters_method=results["uncertainty"],
        training=_curves(run.path / TRAINING),
        training_label=f"{results['objective']}, nats a row",
        diagnostics=[
            Diagnostic(each.name, each.value, each.meaning, each.verdict)
            for each in checked.findings
            if each.verdict != "unknown"
        ],
        commands=[command] if command else [],
        facts=[
            ("retrodict", library_version()),
            ("jax", jax.__version__),
            ("seed", str(run.record["options"]["seed"])),
            ("SHA-256 of the data", run.record["data"]["sha256"]),
        ],
    )
    place = run.path / REPORT
    if is_main_process():
        write_atomically(place, page(content).encode())
    progress.end(PAGE_STAGE, kept=False)
    return place


def draw(
    run: Run,
    table: data.Table,
    out: Path,
    *,
    steps: int = 0,
    inputs: Any = None,
    times: Sequence[np.ndarray] | None = None,
    level: float = 0.9,
    seed: int = 0,
    series: int = 0,
) -> None:
    """Draws a series, its smoothed states and a forecast into a picture.

    Args:
        run: the run.
        table: the data, read with `run.layout`.
        out: a `.png`, `.svg` or `.pdf` file.
        steps: rows to forecast beyond the data.
        inputs: inputs of those rows, of all series, as in `forecast`.
        times: of those rows, of all series, as in `forecast`.
        level: the probability within bands.
        seed: of all that is drawn.
        series: which of several series, by its place.
    """
    identifiers = table.series
    one = table if identifiers is None else table.select([identifiers[series]])
    place = slice(series, series + 1)
    own_inputs = None if inputs is None else np.asarray(inputs)[place]
    own_times = None if times is None else times[place]
    (found,) = _series(run, one, steps, level, seed, own_inputs, own_times)
    plot(found.panels, out, title=found.name, level=level)


def _how(results: Mapping[str, Any]) -> str:
    value = likelihood_in_words(results)
    value = f"{value[0].upper()}{value[1:]}."
    if results["method"] == "exact":
        return f"The model is linear and Gaussian: smoothing is exact. {value}"
    return f"Smoothing is by a family that was trained on series of the fitted model. {value}"


def _parameter(name: str, found: Mapping[str, Any]) -> ParameterLine:
    if found.get("error") is None:
        note = f"at the edge of {found['edge']}: no interval" if "edge" in found else ""
        return ParameterLine(name, found["value"], learned=found["learned"], note=note)
    interval = (found["lower"], found["upper"])
    return ParameterLine(name, found["value"], found["error"], interval, found["learned"])


def _curves(path: Path) -> list[Curve]:
    """What was watched while learning and training, thinned to what a page shows."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in csv.reader(io.StringIO(path.read_text())):
        if row and row[0] != "stage" and row[2]:
            curves.setdefault(row[0], []).append((float(row[1]), float(row[2])))
    found = []
    for name, points in curves.items():
        steps, values = np.array(points).T
        every = max(1, -(-len(steps) // MOST_POINTS_OF_TRAINING))
        found.append(Curve(name, steps[::every], values[::every]))
    return found


def _series(
    run: Run,
    table: data.Table,
    steps: int,
    level: float,
    seed: int,
    inputs: Any = None,
    times: Sequence[np.ndarray] | None = None,
) -> list[Series]:
    """The panels of the first series, as many as a page holds."""
    if table.num_series > MAX_SERIES and table.series is not None:
        table = table.select(table.series[:MAX_SERIES])
    smoothed = smooth(run, table, seed=seed)
    ahead = coming = None
    if steps:
        ahead = forecast(
            run, table, steps, inputs=inputs, times=times, seed=seed, smoothed=smoothed
        )
        coming = table.future_times(steps) if times is None else table.coming(times)
    replicates = _replicates(run, table, smoothed, seed)
    return [
        Series(
            "" if table.series is None else str(table.series[i]),
            [
                *_columns(table, i, replicates[i], ahead, coming, level),
                *_states(run, table, i, smoothed, ahead, coming, level),
            ],
        )
        for i in range(table.num_series)
    ]


def _replicates(run: Run, table: data.Table, smoothed: rd.Smoothed, seed: int) -> np.ndarray:
    """New observations of every row, of shape `(batch, sample, time, obs)`."""
    model = rd.unwrap(run.model)
    keys = jax.random.split(jax.random.key(seed), table.num_series)
    us = None if table.inputs is None else table.inputs

    @eqx.filter_jit
    def each(keys: Any, chains: Any, us: Any) -> jax.Array:
        return eqx.filter_vmap(
            lambda key, chain, u: rd.predictive(key, model, chain, NUM_REPLICATES, inputs=u),
            in_axes=(0, eqx.if_array(0), None if us is None else 0),
        )(keys, chains, us)

    return np.asarray(each(keys, smoothed.chain, us))


def _columns(
    table: data.Table, i: int, draws: np.ndarray, ahead: Any, coming: Any, level: float
) -> Iterator[SeriesPanel]:
    rows = int(table.length[i])
    ends = (0.5 - level / 2, 0.5 + level / 2)
    for place, name in enumerate(table.names):
        own = draws[:, :rows, place]
        lower, upper = np.quantile(own, ends, axis=0)
        band = None
        if ahead is not None:
            low, high = np.quantile(np.asarray(ahead.observations)[i, :, :, place], ends, axis=0)
            mean = np.asarray(ahead.mean)[i, :, place]
            band = Band(coming[i], mean, low, high)
        seen = np.where(table.mask[i, :rows, place], table.ys[i, :rows, place], np.nan)
        yield SeriesPanel(
            name, table.times[i], own.mean(axis=0), lower, upper, observed=seen, forecast=band
        )


def _states(
    run: Run, table: data.Table, i: int, smoothed: Any, ahead: Any, coming: Any, level: float
) -> Iterator[SeriesPanel]:
    rows = int(table.length[i])
    reach = NormalDist().inv_cdf(0.5 + level / 2)
    for place, name in enumerate(state_names(run)):
        mean = np.asarray(smoothed.mean)[i, :rows, place]
        std = np.sqrt(np.asarray(smoothed.covariance)[i, :rows, place, place])
        band = None
        if ahead is not None:
            centre = np.asarray(ahead.state_mean)[i, :, place]
            wide = reach * np.sqrt(np.asarray(ahead.state_covariance)[i, :, place, place])
            band = Band(coming[i], centre, centre - wide, centre + wide)
        yield SeriesPanel(
            name, table.times[i], mean, mean - reach * std, mean + reach * std, forecast=band
        )
