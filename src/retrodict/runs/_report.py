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
from retrodict.runs._exact import seen_anew
from retrodict.runs._folder import REPORT, TRAINING, likelihood_in_words, parameter_lines
from retrodict.runs._names import state_names
from retrodict.runs._page import MAX_SERIES, page
from retrodict.runs._plot import plot
from retrodict.runs._record import Run

PAGE_STAGE = "the report"

FEWEST_REPLICATES, MOST_REPLICATES, MOST_DRAWN = 200, 2000, 4_000_000
"""Draws of each observation, of which the bands around columns are quantiles where the model does
not know them: as many as the rows allow."""

MOST_POINTS_OF_TRAINING = 500


def write_report(
    run: Run,
    table: data.Table | data.SharedTable,
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
        table: the data, read with `run.layout`; where several processes share them, the first
            series are looked at.
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
    described, whole = table.described(), table
    if isinstance(table, data.SharedTable):
        table = table.leading_series()
    checked = check(run, whole, seed=seed, progress=progress) if found is None else found
    scope = [checked.scope.words] if checked.scope and checked.scope.is_partial else []
    progress.begin(PAGE_STAGE)
    results = run.record["results"]
    content = ReportContent(
        title=f"{run.spec.reference}: {', '.join(table.names)}",
        verdict=None if checked.worst == "unknown" else checked.worst,
        summary=[checked.verdict, *scope, _how(results)],
        data=described,
        series=_series(run, table, steps, level, seed),
        level=level,
        band="Bands of columns are of new observations given all rows; those of states of the"
        " states themselves.",
        parameters=[_parameter(*line) for line in parameter_lines(results)],
        parameters_method=results["uncertainty"],
        training=_curves(run.path / TRAINING),
        training_label=f"{results['objective']}, nats a row",
        diagnostics=[
            Diagnostic(each.name, each.value, each.meaning, each.verdict)
            for each in checked.findings
        ],
        commands=[command] if command else [],
        facts=[
            ("retrodict", library_version()),
            ("jax", jax.__version__),
            ("seed", str(run.record["options"]["seed"])),
            ("SHA-256 of the data, summed over series", run.record["data"]["sha256"]),
        ],
    )
    place = run.path / REPORT
    if is_main_process():
        write_atomically(place, page(content).encode(errors="backslashreplace"))
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
    bands = _bands(run, table, smoothed, level, seed)
    return [
        Series(
            "" if table.series is None else str(table.series[i]),
            [
                *_columns(table, i, bands[i], ahead, coming, level),
                *_states(run, table, i, smoothed, ahead, coming, level),
            ],
        )
        for i in range(table.num_series)
    ]


def _bands(
    run: Run, table: data.Table, smoothed: rd.Smoothed, level: float, seed: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each series: means of new observations of its rows, and the ends of their bands."""
    rows = [int(length) for length in table.length]
    if run.is_exact:
        model, reach = rd.unwrap(run.model), NormalDist().inv_cdf(0.5 + level / 2)
        us = [None] * len(rows) if table.inputs is None else table.inputs
        found = [
            seen_anew(model, smoothed.mean[i], smoothed.covariance[i], us[i])
            for i in range(len(rows))
        ]
        return [
            (law.mean[:n], (law.mean - reach * law.std)[:n], (law.mean + reach * law.std)[:n])
            for law, n in zip(found, rows, strict=True)
        ]
    ends = (0.5 - level / 2, 0.5 + level / 2)
    draws = _replicates(run, table, smoothed, seed)
    return [
        (own[:, :n].mean(axis=0), *np.quantile(own[:, :n], ends, axis=0))
        for own, n in zip(draws, rows, strict=True)
    ]


def _replicates(run: Run, table: data.Table, smoothed: rd.Smoothed, seed: int) -> np.ndarray:
    """New observations of every row, of shape `(batch, sample, time, obs)`."""
    model = rd.unwrap(run.model)
    keys = jax.random.split(jax.random.key(seed), table.num_series)
    us = table.inputs
    count = min(MOST_REPLICATES, max(FEWEST_REPLICATES, MOST_DRAWN // table.ys.size))

    @eqx.filter_jit
    def each(keys: Any, chains: Any, us: Any) -> jax.Array:
        return eqx.filter_vmap(
            lambda key, chain, u: rd.predictive(key, model, chain, count, inputs=u),
            in_axes=(0, eqx.if_array(0), None if us is None else 0),
        )(keys, chains, us)

    return np.asarray(each(keys, smoothed.chain, us))


def _columns(
    table: data.Table,
    i: int,
    bands: tuple[np.ndarray, np.ndarray, np.ndarray],
    ahead: Any,
    coming: Any,
    level: float,
) -> Iterator[SeriesPanel]:
    rows = int(table.length[i])
    ends = (0.5 - level / 2, 0.5 + level / 2)
    later = None if ahead is None else jax.tree.map(lambda leaf: leaf[i], ahead)
    outer = None if later is None else np.asarray(later.quantile(ends))
    for place, name in enumerate(table.names):
        mean, lower, upper = (part[:, place] for part in bands)
        band = None
        if later is not None and outer is not None:
            band = Band(coming[i], np.asarray(later.mean)[:, place], *outer[:, :, place])
        seen = np.where(table.mask[i, :rows, place], table.ys[i, :rows, place], np.nan)
        yield SeriesPanel(name, table.times[i], mean, lower, upper, observed=seen, forecast=band)


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
