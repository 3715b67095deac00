"""Write the report and the pictures of a run."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict._workspace import Progress, Quiet, library_version, write_atomically
from retrodict.distributed import is_main_process
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
from retrodict.runs._exact import replicate_moments
from retrodict.runs._folder import (
    REPORT,
    TRAINING,
    likelihood_in_words,
    parameter_lines,
    unit_in_words,
)
from retrodict.runs._names import shown_states, state_names
from retrodict.runs._page import MAX_SERIES, page
from retrodict.runs._plot import plot
from retrodict.runs._record import Run

PAGE_STAGE = "the report"

FEWEST_REPLICATES, MOST_REPLICATES, MOST_DRAWN = 200, 2000, 4_000_000
"""Draws per observation for bands without a closed form, and the largest number of draws in all."""

OPEN = " They are quantiles of draws, with a gap between two modes."

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
    """Write the report of a run: data and bands, parameters, training, diagnostics.

    Args:
        run: the run.
        table: the data, read with `run.layout`; where several processes share them, the first
            series are shown.
        steps: the number of rows to forecast.
        level: the probability within bands and intervals.
        seed: the random seed.
        found: the result of `check`, if it is available.
        command: the command line that reproduces the run, if there is one.
        progress: progress callback for the checks, and for the report as one more stage.

    Returns:
        The path of the report, in the folder of the run.
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
        band="Bands of columns are for new observations given all rows; bands of states are for the"
        f" states.{'' if run.is_exact else OPEN}",
        centre=_centre(run),
        parameters=[_parameter(*line) for line in parameter_lines(results)],
        parameters_method=f"{unit_in_words(run.record)} {results['uncertainty']}".strip(),
        training=_curves(run.path / TRAINING),
        training_label=f"{results['objective']}, nats per observed row",
        diagnostics=[
            Diagnostic(each.name, each.value, each.meaning, each.verdict)
            for each in checked.findings
        ],
        commands=[command] if command else [],
        facts=[
            ("retrodict", library_version()),
            ("jax", jax.__version__),
            ("seed", str(run.record["options"]["seed"])),
            ("SHA-256 of the data, combined over series", run.record["data"]["sha256"]),
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
    all_states: bool = False,
) -> None:
    """Draw a series, its smoothed states and a forecast to a picture.

    Args:
        run: the run.
        table: the data, read with `run.layout`.
        out: a `.png`, `.svg` or `.pdf` file.
        steps: the number of rows to forecast.
        inputs: the inputs of these rows for all series, as in `forecast`.
        times: the times of these rows for all series, as in `forecast`.
        level: the probability within bands.
        seed: the random seed.
        series: the index of the series.
        all_states: whether to draw states that only store earlier values of others, too.
    """
    identifiers = table.series
    one = table if identifiers is None else table.select([identifiers[series]])
    place = slice(series, series + 1)
    inputs = None if inputs is None else np.asarray(inputs)[place]
    times = None if times is None else times[place]
    (content,) = _series(run, one, steps, level, seed, inputs, times, all_states=all_states)
    plot(content.panels, out, title=content.name, level=level, centre=_centre(run))


def _centre(run: Run) -> Literal["mean", "median"]:
    """Return the kind of the line within a band."""
    return "mean" if run.is_exact else "median"


def _how(results: Mapping[str, Any]) -> str:
    value = likelihood_in_words(results)
    value = f"{value[0].upper()}{value[1:]}."
    if results["method"] == "exact":
        return f"The model is linear and Gaussian: smoothing is exact. {value}"
    return f"Smoothing is by a family trained on series simulated from the fitted model. {value}"


def _parameter(name: str, line: Mapping[str, Any]) -> ParameterLine:
    if line.get("error") is None:
        note = f"at the edge of {line['edge']}: no interval" if "edge" in line else ""
        return ParameterLine(name, line["value"], learned=line["learned"], note=note)
    interval = (line["lower"], line["upper"])
    return ParameterLine(name, line["value"], line["error"], interval, line["learned"])


def _curves(path: Path) -> list[Curve]:
    """Return the training curves, thinned to the points that a page shows."""
    points_by_name: dict[str, list[tuple[float, float]]] = {}
    for row in csv.reader(io.StringIO(path.read_text())):
        if row and row[0] != "stage" and row[2]:
            points_by_name.setdefault(row[0], []).append((float(row[1]), float(row[2])))
    curves = []
    for name, points in points_by_name.items():
        steps, values = np.array(points).T
        every = max(1, -(-len(steps) // MOST_POINTS_OF_TRAINING))
        curves.append(Curve(name, steps[::every], values[::every]))
    return curves


def _series(
    run: Run,
    table: data.Table,
    steps: int,
    level: float,
    seed: int,
    inputs: Any = None,
    times: Sequence[np.ndarray] | None = None,
    *,
    all_states: bool = False,
) -> list[Series]:
    """Return the panels of the first series, at most `MAX_SERIES` of them."""
    if table.num_series > MAX_SERIES and table.series is not None:
        table = table.select(table.series[:MAX_SERIES])
    smoothed = smooth(run, table, seed=seed)
    panels = [*zip(table.names, _columns(run, table, smoothed, level, seed), strict=True)]
    shown, names = shown_states(run, every=all_states), state_names(run)
    states = _states(run, table, smoothed, level, seed)
    panels += [(names[place], states[place]) for place in shown]
    ahead: list[list[Band]] | None = None
    if steps:
        forecasted = forecast(
            run, table, steps, inputs=inputs, times=times, seed=seed, smoothed=smoothed
        )
        coming = table.future_times(steps) if times is None else table.coming(times)
        later = _coming(forecasted, coming, level)
        ahead = later[: len(table.names)] + [later[len(table.names) + place] for place in shown]
    return [
        Series(
            "" if table.series is None else str(table.series[i]),
            [
                _panel(table, i, place, title, bands[i], None if ahead is None else ahead[place][i])
                for place, (title, bands) in enumerate(panels)
            ],
        )
        for i in range(table.num_series)
    ]


def _panel(
    table: data.Table, i: int, place: int, title: str, band: Band, ahead: Band | None
) -> SeriesPanel:
    """Return the panel of one column or state of a series."""
    observed = None
    if place < len(table.names):
        rows = int(table.length[i])
        observed = np.where(table.mask[i, :rows, place], table.ys[i, :rows, place], np.nan)
    ends = (band.centre, band.lower, band.upper)
    return SeriesPanel(title, band.times, *ends, observed, None, ahead, band.hollow)


def _columns(
    run: Run, table: data.Table, smoothed: rd.Smoothed, level: float, seed: int
) -> list[list[Band]]:
    """Return the bands of new observations, by column and series."""
    if not run.is_exact:
        return _of_draws(table.times, _replicates(run, table, smoothed, seed), level)
    model, reach = rd.unwrap(run.model), NormalDist().inv_cdf(0.5 + level / 2)
    laws = [
        replicate_moments(
            model,
            smoothed.mean[i],
            smoothed.covariance[i],
            None if table.inputs is None else table.inputs[i],
        )
        for i in range(table.num_series)
    ]
    means = np.stack([law.mean for law in laws])
    margin = reach * np.stack([law.std for law in laws])
    return _between(table.times, means, means - margin, means + margin)


def _states(
    run: Run, table: data.Table, smoothed: rd.Smoothed, level: float, seed: int
) -> list[list[Band]]:
    """Return the bands of the states, by state and series."""
    if not run.is_exact:
        return _of_draws(table.times, _paths(run, table, smoothed, seed), level)
    lower, upper = data.gaussian_ends(smoothed.mean, smoothed.covariance, level)
    return _between(table.times, np.asarray(smoothed.mean), lower, upper)


def _coming(ahead: rd.Forecast, times: Sequence[np.ndarray], level: float) -> list[list[Band]]:
    """Return the bands of the forecast, by column or state and series."""
    bands: list[list[Band]] = []
    for exact, mean, covariance, draws in (
        (ahead.gaussian, ahead.mean, ahead.covariance, ahead.observations),
        (ahead.gaussian_states, ahead.state_mean, ahead.state_covariance, ahead.states),
    ):
        if exact:
            lower, upper = data.gaussian_ends(mean, covariance, level)
            bands += _between(times, np.asarray(mean), lower, upper)
        else:
            bands += _of_draws(times, np.asarray(draws), level)
    return bands


def _between(
    times: Sequence[np.ndarray], centre: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> list[list[Band]]:
    """Return bands from ends of shape `(batch, time, column)`, by column and series."""
    return [
        [
            Band(
                stamps,
                centre[i, : len(stamps), place],
                lower[i, : len(stamps), place],
                upper[i, : len(stamps), place],
            )
            for i, stamps in enumerate(times)
        ]
        for place in range(centre.shape[-1])
    ]


def _of_draws(times: Sequence[np.ndarray], draws: np.ndarray, level: float) -> list[list[Band]]:
    """Return bands from draws of shape `(batch, sample, time, column)`, by column and series."""
    return [
        [
            Band.of_draws(stamps, draws[i, :, : len(stamps), place], level)
            for i, stamps in enumerate(times)
        ]
        for place in range(draws.shape[-1])
    ]


def _replicates(run: Run, table: data.Table, smoothed: rd.Smoothed, seed: int) -> np.ndarray:
    """Draw new observations of every row, of shape `(batch, sample, time, obs)`."""
    model = rd.unwrap(run.model)
    keys = jax.random.split(jax.random.key(seed), table.num_series)
    us = table.inputs
    count = _num_draws(table.ys.size)

    @eqx.filter_jit
    def each(keys: Any, chains: Any, us: Any) -> jax.Array:
        return eqx.filter_vmap(
            lambda key, chain, u: rd.predictive(key, model, chain, count, inputs=u),
            in_axes=(0, eqx.if_array(0), None if us is None else 0),
        )(keys, chains, us)

    return np.asarray(each(keys, smoothed.chain, us))


def _paths(run: Run, table: data.Table, smoothed: rd.Smoothed, seed: int) -> np.ndarray:
    """Draw paths of the states, of shape `(batch, sample, time, state)`."""
    keys = jax.random.split(jax.random.key(seed), table.num_series)
    count = _num_draws(smoothed.mean.size)

    @eqx.filter_jit
    def each(keys: Any, chains: Any) -> jax.Array:
        return eqx.filter_vmap(
            lambda key, chain: chain.sample(key, count), in_axes=(0, eqx.if_array(0))
        )(keys, chains)

    return np.asarray(each(keys, smoothed.chain))


def _num_draws(size: int) -> int:
    return min(MOST_REPLICATES, max(FEWEST_REPLICATES, MOST_DRAWN // size))
