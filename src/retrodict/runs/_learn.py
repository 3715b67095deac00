"""From a table and the name of a model to a run: parameters, a family, and how sure they are."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import retrodict as rd
from retrodict import data, models
from retrodict._workspace import (
    Folder,
    Progress,
    Quiet,
    as_csv,
    as_json,
    is_main_process,
    make_writable,
    wait_for_processes,
    write_atomically,
)
from retrodict.runs._folder import RECORD, REPORT, TRAINING, RunError, as_plain, read_record
from retrodict.runs._record import Run, open_run, write

FAMILIES = {
    "mixture": rd.MixtureFamily,
    "nonlinear": rd.NonlinearFamily,
    "recurrent": rd.RecurrentFamily,
    "gated": rd.GatedFamily,
    "conjugate": rd.ConjugateFamily,
}

SETTINGS = "settings.json"
"""What an unfinished run was asked for."""

NUM_SIMULATED, NUM_HELD_OUT, ROWS_SIMULATED = 2048, 128, 64
"""Series that the fitted model makes up, for the family to be trained on."""

LONGEST_GAP = 8
"""Rows of the longest gap that they are given."""

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

MOST_ROWS_A_STEP = 512
"""Of longer series a step of learning sees a window."""

MOST_STEPS_OF_EVIDENCE = 300
"""Steps of L-BFGS on an exact evidence, which ends by itself long before."""


def fit(
    table: data.Table,
    spec: models.ModelSpec,
    out: str | Path,
    *,
    family: str = "mixture",
    num_steps: int = 2000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Run:
    """Learns the parameters of a model from a table, and a family that smooths for it.

    The parameters that the model marks as learnable are those that make the data most likely:
    exactly for linear-Gaussian models, by ascent of the ELBO for others. Then a family is trained
    on series that the fitted model makes up in the likeness of the data, so that it will smooth
    rows of tomorrow as well. What is done is kept in the folder: a fit that was killed goes on
    where it was when it is asked for again. Where several processes were joined by
    `retrodict.initialise_distributed`, all of them call this, with a folder that all of them see:
    the series are spread over their devices, and one of them writes.

    Args:
        table: the data.
        spec: the model, from `retrodict.models.resolve`.
        out: the folder of the run, which must not hold another.
        family: the family to train: `"mixture"`, `"nonlinear"`, `"recurrent"`, `"gated"` or
            `"conjugate"`.
        num_steps: steps of learning, and again of training the family.
        seed: of all that is drawn.
        progress: who is told how far it is.

    Returns:
        The run, as `open_run` finds it.

    Raises:
        RunError: if the folder holds something else, or the model does not fit the table.
        ProcessLostError: if another process has ended.
    """
    if family not in FAMILIES:
        raise RunError(f"There is no family {family!r}; there are {', '.join(FAMILIES)}.")
    if num_steps < 1:
        raise RunError(f"A fit takes at least 1 step, got {num_steps}.")
    out = Path(out)
    settings = _settings(table, spec, family, num_steps, seed)
    _refuse_other(out, settings)
    _, learn_key, train_key, error_key = jax.random.split(jax.random.key(seed), 4)
    model = starting_model(table, spec, seed=seed)
    wait_for_processes("the folder was looked at")
    if is_main_process():
        make_writable(out)
        write_atomically(out / SETTINGS, as_json(settings))
    folder = Folder(out, settings, progress or Quiet())
    exact = model.is_linear_gaussian
    if exact:
        model, history, value = _by_evidence(folder, learn_key, model, table)
        trained, rest = None, np.zeros(0)
    else:
        model, history, value = _by_elbo(folder, learn_key, model, table, num_steps)
        trained, rest = _amortised(folder, train_key, model, table, family, num_steps)
    lines = [("parameters", i + 1, v) for i, v in enumerate(history)]
    lines += [("family", i + 1, v) for i, v in enumerate(rest)]
    folder.write(TRAINING, as_csv(("stage", "step", "nats a row"), lines))
    parameters, uncertainty = _uncertain(folder, error_key, model, table)
    record = {
        "layout": table.layout,
        "options": {"family": None if exact else family, "num_steps": num_steps, "seed": seed},
        "data": {"sha256": fingerprint(table), "described": table.described()},
        "results": {
            "method": "exact" if exact else "amortised",
            "objective": "log-evidence" if exact else "ELBO",
            "nats_a_row": value,
            "total": value * int(table.length.sum()),
            "rows": int(table.length.sum()),
            "rows_observed": int(table.mask.any(axis=2).sum()),
            "seconds": round(folder.seconds, 1),
            "parameters": parameters,
            **uncertainty,
        },
    }
    run = write(out, spec, model, trained, record) if is_main_process() else None
    wait_for_processes("the run is written")
    return open_run(out) if run is None else run


def finished_before(
    table: data.Table,
    spec: models.ModelSpec,
    out: str | Path,
    *,
    family: str = "mixture",
    num_steps: int = 2000,
    seed: int = 0,
) -> Run | None:
    """The run that `fit` would make, if it is there and only its report is missing.

    A fit of the command line may be killed at its end, while it checks what it found.

    Args:
        table: the data.
        spec: the model.
        out: the folder of the run.
        family: as in `fit`.
        num_steps: as in `fit`.
        seed: as in `fit`.
    """
    out = Path(out)
    if not (out / RECORD).exists() or (out / REPORT).exists():
        return None
    settings = _settings(table, spec, family, num_steps, seed)
    return open_run(out) if _noted(out) == as_plain(settings) else None


def num_stages(table: data.Table, spec: models.ModelSpec) -> int:
    """How many stages a fit has, for those who tell how far it is.

    Args:
        table: the data.
        spec: the model.
    """
    model = spec.build(len(table.names), jax.random.key(0))
    return 2 if model.is_linear_gaussian else 3


def fingerprint(table: data.Table) -> str:
    """The SHA-256 of what was read: values, what was seen, inputs, lengths and times."""
    digest = hashlib.sha256()
    arrays = (np.nan_to_num(table.ys), table.mask, table.inputs, table.length, *table.times)
    for array in arrays:
        if array is not None:
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _settings(
    table: data.Table, spec: models.ModelSpec, family: str, num_steps: int, seed: int
) -> dict[str, Any]:
    """What a fit depends on."""
    return {
        "model": spec.to_dict(),
        "layout": table.layout,
        "data": fingerprint(table),
        "family": family,
        "num_steps": num_steps,
        "seed": seed,
    }


def _noted(out: Path) -> Any:
    """The settings of the run in a folder; `None` if there is no note of them, or a broken one."""
    try:
        return json.loads((out / SETTINGS).read_text())
    except (OSError, ValueError):
        return None


def _refuse_other(out: Path, settings: Mapping[str, Any]) -> None:
    """Refuses a folder that holds a finished run, one of other settings, or something else."""
    if not out.exists():
        return
    if not out.is_dir():
        raise RunError(f"{out} is a file; give a folder that does not exist yet.")
    note = out / SETTINGS
    if (out / RECORD).exists():
        read_record(out)
        raise RunError(f"{out} holds a finished run; give another folder, or remove it.")
    if note.exists():
        if _noted(out) != as_plain(settings):
            raise RunError(
                f"{out} holds an unfinished run of other data or options; ask for the same again,"
                " or give another folder."
            )
    elif any(out.iterdir()):
        raise RunError(f"{out} is not empty and holds no run; give another folder.")


def starting_model(
    table: data.Table, spec: models.ModelSpec, *, seed: int = 0
) -> rd.StateSpaceModel:
    """The model that a fit starts from, with values from the data.

    Args:
        table: the data.
        spec: the model, from `retrodict.models.resolve`.
        seed: of the fit.

    Raises:
        RunError: if the model does not fit the table.
    """
    wanted, given = spec.inputs(), ", ".join(table.input_names)
    if wanted and len(wanted) != len(table.input_names):
        raise RunError(
            f"The model {spec.reference} reads as inputs, in this order, {', '.join(wanted)}, and"
            f" the table has {given or 'none'}. Name columns with inputs=..., and ask for the"
            " length of the step with step_input=True."
        )
    options = table.batch()
    key = jax.random.split(jax.random.key(seed), 4)[0]
    model = spec.build_from(options.pop("ys"), key=key, **options)
    if model.takes_input and table.inputs is None:
        raise RunError(
            f"The model {spec.reference} takes inputs, and the table has none: name their columns"
            " with inputs=..., or ask for the length of the step with step_input=True."
        )
    if not model.takes_input and table.inputs is not None:
        raise RunError(
            f"The model {spec.reference} takes no inputs, and the table has {given}. Leave the"
            " inputs out, or choose a model that reads them: ready models read the length of the"
            " step with the option irregular=true."
        )
    columns = _num_observed(model, len(table.input_names))
    if columns != len(table.names):
        raise RunError(
            f"The model {spec.reference} observes {columns} columns, and the table has"
            f" {len(table.names)}: {', '.join(table.names)}. Name those that it observes with"
            " columns=..."
        )
    return model


def _num_observed(model: rd.StateSpaceModel, num_inputs: int) -> int:
    """How many columns a model observes, seen in the shape of an observation."""
    emission, given = rd.unwrap(model).emission, jnp.zeros(num_inputs)
    drawn = eqx.filter_eval_shape(
        lambda key, x, u: emission.sample(key, x, u if emission.takes_input else None),
        jax.random.key(0),
        jnp.zeros(model.state_dim),
        given,
    )
    return drawn.shape[0]


def _by_evidence(
    folder: Folder, key: Any, model: rd.StateSpaceModel, table: data.Table
) -> tuple[rd.StateSpaceModel, np.ndarray, float]:
    """The model of greatest evidence, the way there, and its evidence in nats a row."""
    options = table.batch()
    ys = options.pop("ys")
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(arrays)

    def compute() -> dict[str, Any]:
        found = rd.fit_evidence(
            key,
            model,
            ys,
            optimiser="lbfgs",
            num_steps=MOST_STEPS_OF_EVIDENCE,
            progress=False,
            **options,
        )
        kept = jax.tree.leaves(eqx.filter(found.model, eqx.is_inexact_array))
        return {
            **{f"leaf {i}": leaf for i, leaf in enumerate(kept)},
            "history": found.history,
            "log_evidence": found.log_evidence,
        }

    stage = folder.stage("the parameters, by their evidence", compute)
    kept = [jnp.asarray(stage[f"leaf {i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
    fitted = eqx.combine(jax.tree.unflatten(structure, kept), rest)
    return fitted, stage["history"], float(stage["log_evidence"]) / float(table.length.sum())


def _by_elbo(
    folder: Folder, key: Any, model: rd.StateSpaceModel, table: data.Table, num_steps: int
) -> tuple[rd.StateSpaceModel, np.ndarray, float]:
    """The model of greatest ELBO with a recurrent family beside it, and the way there.

    That family has ELBOs in closed form or by quadrature, so that parameters settle; it has seen
    the given series alone, and is not kept.
    """
    family_key, fit_key = jax.random.split(key)
    options = table.batch()
    ys = options.pop("ys")
    width = 0 if table.inputs is None else table.inputs.shape[2]
    family = rd.RecurrentFamily(family_key, model.state_dim, ys.shape[-1], input_dim=width)
    long = int(table.length.max()) > MOST_ROWS_A_STEP
    found, _ = folder.fit(
        "the parameters, by the ELBO",
        fit_key,
        family,
        model,
        ys,
        num_steps=num_steps,
        learn="both",
        optimiser=_in_units(num_steps),
        window=MOST_ROWS_A_STEP if long else None,
        **options,
    )
    kept = found.held_out[found.held_out_steps == found.kept_step][-1]
    return found.model, found.history, float(kept)


def _in_units(num_steps: int) -> optax.GradientTransformation:
    """Adam whose steps of the model's parameters are relative to their size.

    A scale of a thousand would take a hundred thousand steps of 0.01.
    """
    warmup = max(1, min(num_steps // 20, 500))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 1e-2, warmup, max(num_steps, warmup + 1), 1e-5
    )

    def relative(updates: Any, parameters: Any) -> Any:
        family, model = updates
        scaled = jax.tree.map(
            lambda update, at: update * jnp.maximum(1.0, jnp.abs(at)), model, parameters[1]
        )
        return family, scaled

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99), optax.stateless(relative)
    )


def _amortised(
    folder: Folder,
    key: Any,
    model: rd.StateSpaceModel,
    table: data.Table,
    name: str,
    num_steps: int,
) -> tuple[rd.AbstractFamily, np.ndarray]:
    """A family that was trained on series of the model, and the way there."""
    draw_key, family_key, fit_key = jax.random.split(key, 3)
    options = table.batch()
    ys = options.pop("ys")
    plain = rd.unwrap(model)
    drawn = rd.simulate_like(
        draw_key, plain, ys, NUM_SIMULATED + NUM_HELD_OUT, num_times=ROWS_SIMULATED, **options
    )
    given = drawn.options["mask"]
    seen = jnp.ones(drawn.ys.shape, bool) if given is None else given
    seen = _with_gaps(jax.random.fold_in(draw_key, 1), seen)
    drawn = drawn._replace(options={**drawn.options, "mask": seen})
    train = jax.tree.map(lambda leaf: leaf[:NUM_SIMULATED], drawn)
    held_out = jax.tree.map(lambda leaf: leaf[NUM_SIMULATED:], drawn)
    width = 0 if table.inputs is None else table.inputs.shape[2]
    family = FAMILIES[name](family_key, model.state_dim, ys.shape[-1], input_dim=width)
    found, _ = folder.fit(
        f"a {name} family",
        fit_key,
        family,
        plain,
        train.ys,
        num_steps=num_steps,
        held_out=tuple(held_out),
        **train.options,
    )
    return found.family, found.history


def _with_gaps(key: Any, mask: Any) -> Any:
    """What is seen of simulated series, with gaps of their own in every other series.

    A family that has never met a gap knows nothing of one, and rows of tomorrow may have some: in
    half of the series one row in ten is missing, and a stretch of up to `LONGEST_GAP` rows.

    Args:
        key: a typed key.
        mask: what the data lend them, of shape `(batch, time, obs)`.
    """
    half_key, row_key, place_key, length_key = jax.random.split(key, 4)
    count, rows, _ = mask.shape
    gappy = jax.random.bernoulli(half_key, 0.5, (count, 1))
    single = jax.random.bernoulli(row_key, 0.1, (count, rows))
    begin = jax.random.randint(place_key, (count, 1), 0, rows)
    length = jax.random.randint(length_key, (count, 1), 0, LONGEST_GAP + 1)
    place = jnp.arange(rows)[None]
    gone = gappy & (single | ((place >= begin) & (place < begin + length)))
    return mask & ~gone[..., None]


def _uncertain(
    folder: Folder, key: Any, model: rd.StateSpaceModel, table: data.Table
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
            on_grid = _errors_on_grid(key, model, table, read)
            if on_grid is not None:
                return on_grid
            if table.length.sum() > MOST_ROWS_OF_LOUIS:
                return {"refused": np.array(f"more than {MOST_ROWS_OF_LOUIS} rows.")}
            sizes = SIZES_OF_LOUIS | {"most_replicates": _most_replicates(table)}
            if isinstance(rd.unwrap(model).transition, rd.AbstractGaussianKernel):
                sizes = sizes | {"backward": rd.RejectionBackward()}  # its density is bounded
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
            entry = f"{name}[{','.join(map(str, index))}]" if index else name
            line = {"value": float(values[index]), "learned": name in learned}
            if name in learned and "refused" not in stage:
                line |= _line(stage, name, index, line["value"], domains[entry])
            lines[entry] = line
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
    if model.state_dim != 1 or table.length.sum() > MOST_ROWS_OF_GRID:
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
    return {"edge": "zero" if edge == 0 else f"{edge:g}"}


def _most_replicates(table: data.Table) -> int:
    rows = int(table.length.sum()) * SIZES_OF_LOUIS["num_samples"]
    return max(SIZES_OF_LOUIS["num_replicates"], min(MOST_REPLICATES, MOST_ROWS_OF_PATHS // rows))


def _relative_noise(found: rd.ParameterErrors) -> float:
    """The largest Monte Carlo error of a standard error, as a share of it; zero if exact."""
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
