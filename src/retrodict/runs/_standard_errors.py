"""Standard errors and intervals of the parameters of a run."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict._workspace import Folder
from retrodict.runs._apply import for_each_series
from retrodict.runs._run import AnyModel, AnyTable, parameter_entries

LEVEL = 0.9
"""The probability of the intervals of parameters."""

METHODS = {
    "exact": "Standard errors are from the observed information, the curvature of the exact"
    " log-evidence at its maximum.",
    "grid": "Standard errors are from the observed information, the curvature of the log-evidence"
    " on a grid of states, which is exact up to the grid.",
    "gpb2": "Standard errors are from the curvature of the evidence of GPB2, which is approximate.",
    "louis": "Standard errors are from the observed information by Louis' identity, over paths of a"
    " particle smoother.",
}

SIZES_OF_LOUIS: dict[str, Any] = {"num_particles": 500, "num_samples": 1000, "num_replicates": 20}
"""Sizes that take some seconds per hundred rows."""

MAX_REPLICATES = 160
"""Needed where the data contain a few hundredths of the information of the states."""

MAX_ROWS_OF_PATHS = 120_000_000
"""Rows of all paths together, about two minutes; the first replicates are drawn at any length."""

MAX_ROWS_OF_LOUIS = 20_000

MAX_ROWS_OF_GRID, MAX_POINTS = 100_000, 2000
"""The largest number of rows, and of grid points, for which a grid is used."""

PARTICLES_OF_GRID, DEVIATIONS_OF_GRID = 500, 8.0
"""The particles of the filter that locates the states, and the margin of the grid around them."""


def parameter_table(
    folder: Folder, key: Any, model: AnyModel, table: AnyTable
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of all parameters with standard errors, and how these were computed."""
    learned = models.named_parameters(model)

    def read(model: AnyModel) -> dict[str, Any]:
        values = models.named_parameters(model, fixed=True)
        return {name: values[name] for name in learned}

    stage = folder.stage(
        "standard errors of the parameters", lambda: _compute(key, model, table, read)
    )
    domains = models.parameter_domains(model)
    lines: dict[str, Any] = {}
    for title, (name, index, value, is_learned) in parameter_entries(model, table.names).items():
        lines[title] = {"value": float(value), "learned": is_learned}
        if is_learned and "refused" not in stage:
            domain = domains[f"{name}[{','.join(map(str, index))}]" if index else name]
            lines[title] |= _line(stage, name, index, float(value), domain)
    if "refused" in stage:
        return lines, {"uncertainty": f"No standard errors: {stage['refused']}"}
    status, distance = str(stage["status"]), float(stage["distance"])
    words = _in_words(str(stage["method"]), status, distance, lines, float(stage["noise"]))
    return lines, {"uncertainty": words, "status": status, "distance": distance}


def _compute(key: Any, model: AnyModel, table: AnyTable, read: Any) -> dict[str, Any]:
    """Return standard errors as arrays, or the reason why there are none as `"refused"`."""
    sizes: dict[str, Any] = {}
    if isinstance(model, rd.switching.SwitchingModel):
        return _errors_of_regimes(model, table, read)
    if not model.is_linear_gaussian:
        is_shared = isinstance(table, data.SharedTable)  # processes would not share the computation
        on_grid = None if is_shared else _errors_on_grid(key, model, table, read)
        if on_grid is not None:
            return on_grid
        if is_shared or table.summary.num_rows > MAX_ROWS_OF_LOUIS:
            return {"refused": np.array(f"more than {MAX_ROWS_OF_LOUIS} rows.")}
        sizes = SIZES_OF_LOUIS | {"most_replicates": _most_replicates(table)}
        if isinstance(rd.unwrap(model).transition, rd.AbstractGaussianKernel):
            # Rejection sampling needs a bounded density.
            sizes |= {"backward": rd.particles.RejectionBackward()}
    try:
        errors = rd.parameter_errors(key, model, read=read, level=LEVEL, **sizes, **table.batch())
    except (ValueError, FloatingPointError) as error:
        return {"refused": np.array(str(error))}
    return _as_arrays(errors)


def _errors_of_regimes(
    model: rd.switching.SwitchingModel, table: AnyTable, read: Any
) -> dict[str, Any]:
    """Return standard errors of a model with regimes, or the reason why there are none."""
    try:
        errors = rd.switching.parameter_errors(model, read=read, level=LEVEL, **table.batch())
    except (ValueError, FloatingPointError) as error:
        return {"refused": np.array(str(error))}
    method = "exact" if model.is_finite else "gpb2"
    return _as_arrays(errors) | {"method": np.array(method)}


def _as_arrays(errors: rd.ParameterErrors) -> dict[str, Any]:
    """Return standard errors as arrays for a stage file."""
    return {
        **{
            f"{what} {name}": value
            for what in ("standard_error", "lower", "upper")
            for name, value in getattr(errors, what).items()
        },
        "method": np.array(errors.method),
        "status": np.array(errors.status),
        "distance": np.array(errors.distance),
        "noise": np.array(_relative_noise(errors)),
    }


def _errors_on_grid(
    key: Any, model: rd.StateSpaceModel, table: data.Table, read: Any
) -> dict[str, Any] | None:
    """Return standard errors of a model with one state; `None` where no grid is fine enough.

    They take seconds where paths take minutes, and have no Monte Carlo noise.
    """
    if model.state_dim != 1 or table.summary.num_rows > MAX_ROWS_OF_GRID:
        return None
    lower, upper, width = _reach(key, rd.unwrap(model), table)
    if not (np.isfinite(lower) and lower < upper and width > 0):
        return None
    fewest = int(np.clip(2 * (upper - lower) / width, 100, MAX_POINTS // 4))
    for num_points in (fewest, 4 * fewest):
        grid = rd.Grid(np.array([lower]), np.array([upper]), num_points)
        try:
            return _as_arrays(
                rd.parameter_errors(key, model, read=read, level=LEVEL, grid=grid, **table.batch())
            )
        except (ValueError, FloatingPointError):
            continue
    return None


def _reach(key: Any, model: rd.StateSpaceModel, table: data.Table) -> tuple[float, float, float]:
    """Return the range of the states of a model with one state, and their precision."""

    def filtered(key: Any, ys: Any, mask: Any, us: Any, length: Any) -> tuple[Any, Any]:
        options: Any = {"mask": mask, "inputs": us, "length": length, "strict": False}
        result = rd.particle_filter(key, model, ys, PARTICLES_OF_GRID, **options)
        return result.mean[:, 0], jnp.sqrt(result.covariance[:, 0, 0])

    keys = jax.random.split(key, table.num_series)
    ys = np.where(table.mask, table.ys, np.nan)
    moments = for_each_series(filtered, keys, ys, table.mask, table.inputs, table.length)
    exists = np.arange(ys.shape[1]) < table.length[:, None]
    mean, std = (np.asarray(part)[exists] for part in moments)
    reach = DEVIATIONS_OF_GRID * std
    width = float(np.quantile(std, 0.05))
    return float(np.min(mean - reach)), float(np.max(mean + reach)), width


def _line(
    stage: Mapping[str, Any],
    name: str,
    index: tuple[int, ...],
    value: float,
    domain: tuple[float, float],
) -> dict[str, Any]:
    """Return the interval of one entry of a parameter, or the edge that it is at."""
    ends = ("standard_error", "lower", "upper")
    error, lower, upper = (float(stage[f"{end} {name}"][index]) for end in ends)
    if np.isfinite(error):
        line: dict[str, Any] = {"error": error, "lower": lower, "upper": upper}
        if np.isfinite(domain[0]):
            line["scale"] = "logit" if np.isfinite(domain[1]) else "log"
        return line
    if not np.isnan(error):
        return {}
    edge = min(domain, key=lambda end: abs(end - value))
    if not np.isfinite(edge):
        return {"edge": "stationarity"}
    return {"edge": "zero" if edge == 0 else f"{edge:g}"}


def _most_replicates(table: AnyTable) -> int:
    rows = table.summary.num_rows * SIZES_OF_LOUIS["num_samples"]
    return max(SIZES_OF_LOUIS["num_replicates"], min(MAX_REPLICATES, MAX_ROWS_OF_PATHS // rows))


def _relative_noise(result: rd.ParameterErrors) -> float:
    """Return the largest relative Monte Carlo error of a standard error; zero if exact."""
    with np.errstate(invalid="ignore", divide="ignore"):  # errors of zero and NaN are left out
        shares = [
            np.ravel(result.monte_carlo_error[name]) / np.ravel(errors)
            for name, errors in result.standard_error.items()
            if np.size(errors)
        ]
    every = np.concatenate(shares)
    return float(np.max(every[np.isfinite(every)], initial=0.0))


def _in_words(
    method: str, status: str, distance: float, lines: Mapping[str, Any], noise: float = 0.0
) -> str:
    """Describe the method, the scales of the intervals, and the status."""
    sentences = [METHODS[method]]
    if noise:
        sentences.append(f"Their Monte Carlo error is {100 * noise:.2g}% or less.")
    for scale in ("log", "logit"):
        names = [name for name, line in lines.items() if line.get("scale") == scale]
        if names:
            sentences.append(
                f"Intervals of {', '.join(names)} are computed on the {scale} scale and are not"
                " symmetric."
            )
    for name, line in lines.items():
        if "edge" in line:
            sentences.append(
                f"{name} is at the edge of {line['edge']}: no interval; the others are computed"
                " with it fixed there."
            )
    if status == "not at a maximum":
        status = f"not at a maximum, but {distance:.2g} standard errors from it"
    return " ".join([*sentences, f"Status: {status}."])
