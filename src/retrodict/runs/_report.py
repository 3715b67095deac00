"""Write the report and the pictures of a run."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict._files import version_of, write_atomically
from retrodict._workspace import Progress, Quiet
from retrodict.distributed import is_main_process
from retrodict.runs import _switching as switching
from retrodict.runs._apply import for_each_series, forecast, smooth
from retrodict.runs._check import Check, check
from retrodict.runs._page import MAX_SERIES, page
from retrodict.runs._plot import plot
from retrodict.runs._record import (
    REPORT,
    TRAINING,
    likelihood_in_words,
    parameter_lines,
    regimes_in_words,
    unit_in_words,
)
from retrodict.runs._report_content import (
    Band,
    Curve,
    Panel,
    ParameterLine,
    PlottedSeries,
    ReportContent,
    Shade,
)
from retrodict.runs._residuals import propagate_rows
from retrodict.runs._run import AnyTable, Run, shown_states, state_names

PAGE_STAGE = "the report"

MIN_REPLICATES, MAX_REPLICATES, MAX_DRAWS = 200, 2000, 4_000_000
"""Draws per observation for bands without a closed form, and the largest number of draws in all."""

OPEN = " They are quantiles of draws, with a gap between two modes."

MAX_POINTS_OF_TRAINING = 500

Law: TypeAlias = tuple[np.ndarray | None, Any, Any]
"""Draws of shape `(batch, sample, time, column)`, or None for Gaussian laws; means; covariances."""


def write_report(
    run: Run,
    table: AnyTable,
    *,
    steps: int = 0,
    level: float = 0.9,
    seed: int = 0,
    checked: Check | None = None,
    command: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the report of a run: data and bands, parameters, training, diagnostics.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        ...     path = rd.runs.write_report(run, table, steps=2)
        >>> path.name
        'report.html'

    Args:
        run: the run.
        table: the data, read with `run.layout`; where several processes share them, the first
            series are shown.
        steps: the number of rows to forecast.
        level: the probability within bands and intervals.
        seed: the random seed.
        checked: the result of `check`, if it is available.
        command: the command line that reproduces the run, if there is one.
        progress: progress callback for the checks, and for the report as one more stage.

    Returns:
        The path of the report, in the folder of the run.
    """
    progress = progress or Quiet()
    described, full_table = table.described(), table
    if isinstance(table, data.SharedTable):
        table = table.leading_series()
    if checked is None:
        checked = check(run, full_table, seed=seed, progress=progress)
    scope = [checked.scope.summary] if checked.scope and checked.scope.is_partial else []
    progress.begin(PAGE_STAGE)
    results = run.record["results"]
    content = ReportContent(
        title=f"{run.spec.reference}: {', '.join(table.names)}",
        verdict=None if checked.worst == "unknown" else checked.worst,
        summary=[
            text
            for text in (checked.verdict, *scope, _how(results), regimes_in_words(results))
            if text
        ],
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
        diagnostics=checked.findings,
        commands=[command] if command else [],
        facts=[
            ("retrodict", version_of()),
            ("jax", jax.__version__),
            ("seed", str(run.record["options"]["seed"])),
            ("SHA-256 of the data, combined over series", run.record["data"]["sha256"]),
        ],
    )
    path = run.path / REPORT
    if is_main_process():
        write_atomically(path, page(content).encode(errors="backslashreplace"))
    progress.end(PAGE_STAGE, cached=False)
    return path


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

    Example:
        >>> import pathlib, tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        ...     picture = pathlib.Path(folder, "nile.png")
        ...     rd.runs.draw(run, table, picture, steps=2)
        ...     picture.exists()
        True

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
    batch = slice(series, series + 1)
    inputs = None if inputs is None else np.asarray(inputs)[batch]
    times = None if times is None else times[batch]
    (content,) = _series(run, one, steps, level, seed, inputs, times, all_states=all_states)
    plot(content.panels, out, title=content.name, level=level, centre=_centre(run))


def _centre(run: Run) -> Literal["mean", "median"]:
    """Return the kind of the line within a band."""
    return "mean" if run.is_exact else "median"


def _how(results: Mapping[str, Any]) -> str:
    value = likelihood_in_words(results)
    value = f"{value[0].upper()}{value[1:]}."
    if "regimes" in results:
        return f"{switching.REASONS[results['method']]} {value}"
    if results["method"] == "exact":
        return f"The model is linear and Gaussian: smoothing is exact. {value}"
    return f"Smoothing is by a family trained on series simulated from the fitted model. {value}"


def _parameter(name: str, line: Mapping[str, Any]) -> ParameterLine:
    known = line.get("error") is not None
    return ParameterLine(
        name,
        line["value"],
        line.get("error"),
        (line.get("lower"), line.get("upper")) if known else None,
        line["learned"],
        note=f"at the edge of {line['edge']}: no interval" if "edge" in line else "",
    )


def _curves(path: Path) -> list[Curve]:
    """Return the training curves, thinned to the points that a page shows."""
    points_by_name: dict[str, list[tuple[float, float]]] = {}
    with path.open(newline="") as file:
        for name, step, value in [*csv.reader(file)][1:]:
            if value:
                points_by_name.setdefault(name, []).append((float(step), float(value)))
    curves = []
    for name, points in points_by_name.items():
        steps, values = np.array(points).T
        every = -(-len(steps) // MAX_POINTS_OF_TRAINING)
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
) -> list[PlottedSeries]:
    """Return the panels of the first series, at most `MAX_SERIES` of them."""
    if table.num_series > MAX_SERIES and table.series is not None:
        table = table.select(table.series[:MAX_SERIES])
    smoothed = smooth(run, table, seed=seed)
    titles = [*table.names, *state_names(run)]
    bands = _bands(table.times, _smoothed_laws(run, table, smoothed, seed), level)
    ahead, shades = None, _shades(table.times, smoothed)
    if steps:
        options: Any = {"inputs": inputs, "times": times, "seed": seed, "smoothed": smoothed}
        future_times = (
            table.future_times(steps) if times is None else table.check_future_times(times)
        )
        result = forecast(run, table, steps, **options)
        ahead = _bands(future_times, _forecast_laws(result), level)
        shades = _shades(table.times, smoothed, future_times, result)
    num_columns = len(table.names)
    shown = [*range(num_columns), *(num_columns + i for i in shown_states(run, every=all_states))]

    def panel(i: int, index: int) -> Panel:
        rows, observed = int(table.length[i]), None
        if index < num_columns:
            observed = np.where(table.mask[i, :rows, index], table.ys[i, :rows, index], np.nan)
        coming = None if ahead is None else ahead[index][i]
        return Panel(titles[index], bands[index][i], observed, coming, shades[i])

    names = [""] if table.series is None else [str(name) for name in table.series]
    return [PlottedSeries(name, [panel(i, k) for k in shown]) for i, name in enumerate(names)]


def _shades(
    times: Sequence[np.ndarray],
    smoothed: Any,
    future_times: Sequence[np.ndarray] | None = None,
    ahead: Any = None,
) -> list[Shade | None]:
    """Return the most probable regimes of each series; `None` without regimes."""
    if not hasattr(smoothed, "probabilities"):
        return [None] * len(times)
    shades = []
    for i, stamps in enumerate(times):
        probabilities = np.asarray(smoothed.probabilities[i])[: len(stamps)]
        if future_times is not None:
            coming = np.asarray(ahead.probabilities[i])[: len(future_times[i])]
            probabilities = np.concatenate([probabilities, coming])
            stamps = np.concatenate([stamps, future_times[i]])
        shades.append(Shade(stamps, probabilities))
    return shades


def _smoothed_laws(run: Run, table: data.Table, smoothed: Any, seed: int) -> list[Law]:
    """Return the laws of new observations of every row, and of the states."""
    model, us, states = rd.unwrap(run.model), table.inputs, (smoothed.mean, smoothed.covariance)
    if run.is_exact:
        columns = for_each_series(
            lambda mean, covariance, us: propagate_rows(model.emission, mean, covariance, us),
            *states,
            us,
        )
        return [(None, *columns), (None, *states)]
    keys = jax.random.split(jax.random.key(seed), table.num_series)
    num_replicates = _num_draws(table.ys.size)
    num_paths = _num_draws(max(1, smoothed.mean.size))
    if run.has_regimes:
        ys = np.where(table.mask, table.ys, 0.0)
        rows = switching.replicates(model, keys, smoothed.chain, ys, us, num_replicates)
        paths = switching.drawn_states(keys, smoothed.chain, num_paths)
        return [(np.asarray(rows), None, None), (np.asarray(paths), *states)]
    replicates = for_each_series(
        lambda key, chain, us: rd.predictive(key, model, chain, num_replicates, inputs=us),
        keys,
        smoothed.chain,
        us,
    )
    paths = for_each_series(lambda key, chain: chain.sample(key, num_paths), keys, smoothed.chain)
    return [(np.asarray(replicates), None, None), (np.asarray(paths), *states)]


def _forecast_laws(ahead: Any) -> list[Law]:
    """Return the laws of the observations and of the states of a forecast."""
    gaussian, gaussian_states = (
        getattr(ahead, name, False) for name in ("gaussian", "gaussian_states")
    )
    columns = None if gaussian else np.asarray(ahead.observations)
    states = None if gaussian_states else np.asarray(ahead.states)
    return [
        (columns, ahead.mean, ahead.covariance),
        (states, ahead.state_mean, ahead.state_covariance),
    ]


def _bands(times: Sequence[np.ndarray], laws: Sequence[Law], level: float) -> list[list[Band]]:
    """Return the bands of laws, by column or state and series."""
    bands: list[list[Band]] = []
    for draws, mean, covariance in laws:
        if draws is not None:
            bands += [
                [
                    Band.of_draws(stamps, draws[i, :, : len(stamps), column], level)
                    for i, stamps in enumerate(times)
                ]
                for column in range(draws.shape[-1])
            ]
            continue
        centre, (lower, upper) = np.asarray(mean), data.gaussian_ends(mean, covariance, level)
        for column in range(centre.shape[-1]):
            rows = [(i, slice(len(stamps)), column) for i, stamps in enumerate(times)]
            bands.append(
                [
                    Band(stamps, centre[at], lower[at], upper[at])
                    for stamps, at in zip(times, rows, strict=True)
                ]
            )
    return bands


def _num_draws(size: int) -> int:
    return min(MAX_REPLICATES, max(MIN_REPLICATES, MAX_DRAWS // size))
