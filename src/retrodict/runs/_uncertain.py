"""How sure the parameters of a run are: standard errors and intervals, and how they were found."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict._workspace import Folder

LEVEL = 0.9
"""The probability of the intervals of parameters."""

METHODS = {
    "exact": "Standard errors are from the observed information, the curvature of the exact"
    " log-evidence at its maximum.",
    "grid": "Standard errors are from the observed information, the curvature of the log-evidence"
    " on a grid of states, which is exact up to the grid.",
    "louis": "Standard errors are from the observed information by Louis' identity, over paths of a"
    " particle smoother.",
}

SIZES_OF_LOUIS: dict[str, Any] = {"num_particles": 500, "num_samples": 1000, "num_replicates": 20}
"""Some seconds for a hundred rows."""

MOST_REPLICATES = 160
"""Where the data hold a few hundredths of what the states would say, many paths are needed to tell
a little from nothing."""

MOST_ROWS_OF_PATHS = 120_000_000
"""Rows of all paths together, which bound the replicates of a long series to some two minutes; the
first ones are drawn at any length."""

MOST_ROWS_OF_LOUIS = 20_000

MOST_ROWS_OF_GRID, MOST_POINTS = 100_000, 2000
"""How long series, and how many states, a grid may have."""

PARTICLES_OF_GRID, DEVIATIONS_OF_GRID = 500, 8.0
"""By which filter it is seen where states lie, and how far beyond a grid goes."""


def uncertain(
    folder: Folder, key: Any, model: rd.StateSpaceModel, table: data.Table | data.SharedTable
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters by name, entry by entry, with standard errors, and how these were found."""
    learned = models.named_parameters(model)
    options = table.batch()
    ys = options.pop("ys")

    def read(model: rd.StateSpaceModel) -> dict[str, Any]:
        every = models.named_parameters(model, fixed=True)
        return {name: every[name] for name in learned}

    def compute() -> dict[str, Any]:
        sizes: dict[str, Any] = {}
        if not model.is_linear_gaussian:
            too_many = {"refused": np.array(f"more than {MOST_ROWS_OF_LOUIS} rows.")}
            if isinstance(table, data.SharedTable):
                return too_many  # or the processes would not share it
            on_grid = _errors_on_grid(key, model, table, read)
            if on_grid is not None:
                return on_grid
            if table.summary.num_rows > MOST_ROWS_OF_LOUIS:
                return too_many
            sizes = SIZES_OF_LOUIS | {"most_replicates": _most_replicates(table)}
            if isinstance(rd.unwrap(model).transition, rd.AbstractGaussianKernel):
                sizes = sizes | {
                    "backward": rd.particles.RejectionBackward()
                }  # its density is bounded
        try:
            found = rd.parameter_errors(key, model, ys, read=read, level=LEVEL, **sizes, **options)
        except (ValueError, FloatingPointError) as error:
            return {"refused": np.array(str(error))}
        return _as_arrays(found)

    stage = folder.stage("standard errors of the parameters", compute)
    lines: dict[str, Any] = {}
    domains = models.parameter_domains(model)
    every = models.named_parameters(model, fixed=True)
    for name in (*learned, *(name for name in every if name not in learned)):
        values = every[name]
        for index in np.ndindex(values.shape):
            line = {"value": float(values[index]), "learned": name in learned}
            if name in learned and "refused" not in stage:
                entry = f"{name}[{','.join(map(str, index))}]" if index else name
                line |= _line(stage, name, index, line["value"], domains[entry])
            lines[models.entry_name(model, name, index, table.names)] = line
    if "refused" in stage:
        return lines, {"uncertainty": f"No standard errors: {stage['refused']}"}
    status, distance = str(stage["status"]), float(stage["distance"])
    return lines, {
        "uncertainty": _in_words(
            str(stage["method"]), status, distance, lines, float(stage["noise"])
        ),
        "status": status,
        "distance": distance,
    }


def _as_arrays(found: rd.ParameterErrors) -> dict[str, Any]:
    """What is kept of standard errors."""
    arrays = {}
    for what in ("standard_error", "lower", "upper"):
        for name, value in getattr(found, what).items():
            arrays[f"{what} {name}"] = value
    return {
        **arrays,
        "method": np.array(found.method),
        "status": np.array(found.status),
        "distance": np.array(found.distance),
        "noise": np.array(_relative_noise(found)),
    }


def _errors_on_grid(
    key: Any, model: rd.StateSpaceModel, table: data.Table, read: Any
) -> dict[str, Any] | None:
    """Standard errors of a model with one state; `None` where no grid is good enough.

    They take seconds where paths take minutes, and have no noise.
    """
    if model.state_dim != 1 or table.summary.num_rows > MOST_ROWS_OF_GRID:
        return None
    options = table.batch()
    ys = options.pop("ys")
    lower, upper, width = _reach(key, rd.unwrap(model), table)
    if not (np.isfinite(lower) and lower < upper and width > 0):
        return None
    fewest = int(np.clip(2 * (upper - lower) / width, 100, MOST_POINTS // 4))
    for num_points in (fewest, 4 * fewest):
        grid = rd.Grid(np.array([lower]), np.array([upper]), num_points)
        try:
            found = rd.parameter_errors(
                key, model, ys, read=read, level=LEVEL, grid=grid, **options
            )
        except (ValueError, FloatingPointError):
            continue
        return _as_arrays(found)
    return None


def _reach(key: Any, model: rd.StateSpaceModel, table: data.Table) -> tuple[float, float, float]:
    """Where the states of a model with one state lie, and how well each is known, by a filter."""

    @eqx.filter_jit
    def filtered(keys: Any, ys: Any, mask: Any, us: Any, length: Any) -> tuple[Any, Any]:
        def one(key: Any, ys: Any, mask: Any, us: Any, length: Any) -> tuple[Any, Any]:
            options = {"mask": mask, "inputs": us, "length": length, "strict": False}
            found = rd.particle_filter(key, model, ys, PARTICLES_OF_GRID, **options)
            return found.mean[:, 0], jnp.sqrt(found.covariance[:, 0, 0])

        axes = (0, 0, 0, None if us is None else 0, 0)
        return eqx.filter_vmap(one, in_axes=axes)(keys, ys, mask, us, length)

    keys = jax.random.split(key, table.num_series)
    ys = np.where(table.mask, table.ys, np.nan)
    found = filtered(keys, ys, table.mask, table.inputs, table.length)
    exists = np.arange(ys.shape[1]) < table.length[:, None]
    mean, std = (np.asarray(part)[exists] for part in found)
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
    """What is known of one entry of a parameter: its interval, or the edge that it is at."""
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


def _most_replicates(table: data.Table | data.SharedTable) -> int:
    rows = table.summary.num_rows * SIZES_OF_LOUIS["num_samples"]
    return max(SIZES_OF_LOUIS["num_replicates"], min(MOST_REPLICATES, MOST_ROWS_OF_PATHS // rows))


def _relative_noise(found: rd.ParameterErrors) -> float:
    """The largest Monte Carlo error of a standard error, as a share of it; zero if exact."""
    with np.errstate(invalid="ignore", divide="ignore"):  # errors of zero and NaN are left out
        shares = [
            np.ravel(found.monte_carlo_error[name]) / np.ravel(errors)
            for name, errors in found.standard_error.items()
            if np.size(errors)
        ]
    every = np.concatenate(shares)
    return float(np.max(every[np.isfinite(every)], initial=0.0))


def _in_words(
    method: str, status: str, distance: float, lines: Mapping[str, Any], noise: float = 0.0
) -> str:
    """How standard errors were found, on which scale intervals are, and what is to be known."""
    sentences = [METHODS[method]]
    if noise:
        sentences.append(
            f"Those given are known to {100 * noise:.2g}% or better, by their own spread."
        )
    for scale in ("log", "logit"):
        names = [name for name, line in lines.items() if line.get("scale") == scale]
        if names:
            sentences.append(
                f"Intervals of {', '.join(names)} are made on the {scale} scale, and so are not"
                " symmetric."
            )
    for name, line in lines.items():
        if "edge" in line:
            sentences.append(
                f"{name} is at the edge of {line['edge']}: no interval; the others hold with it"
                " fixed there."
            )
    if status == "not at a maximum":
        status = f"not at a maximum, which is {distance:.2g} standard errors away"
    return " ".join([*sentences, f"Status: {status}."])
