"""From a table and the name of a model to a run: parameters, a family, and how sure they are."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import retrodict as rd
from retrodict import data, models
from retrodict._errors import Argument
from retrodict._workspace import (
    Folder,
    Progress,
    Quiet,
    as_csv,
    as_json,
    hold_folder,
    make_writable,
    write_atomically,
)
from retrodict.distributed import by_all, is_main_process, wait_for_processes
from retrodict.runs._adopt import as_before
from retrodict.runs._folder import RECORD, REPORT, TRAINING, RunError, as_plain, read_record
from retrodict.runs._record import Model, Run, open_run, write
from retrodict.runs._uncertain import uncertain

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

MOST_ROWS_A_STEP = 512
"""Of longer series a step of learning sees a window."""

MOST_STEPS_OF_EVIDENCE = 300
"""Steps of L-BFGS on an exact evidence, which ends by itself long before."""


def fit(
    table: data.Table | data.SharedTable,
    spec: Model,
    out: str | Path,
    *,
    family: str = "mixture",
    num_steps: int = 2000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Run:
    """Learn the parameters of a model from a table, and a family that smooths for it.

    The parameters that the model marks as learnable are those that make the data most likely:
    exactly for linear-Gaussian models, by ascent of the ELBO for others. Then a family is trained
    on series that the fitted model makes up in the likeness of the data, so that it will smooth
    rows of tomorrow as well. What is done is kept in the folder: a fit that was killed goes on
    where it was when it is asked for again. Where several processes were joined by
    `retrodict.initialise`, all of them call this, with a folder that all of them see:
    the series are spread over their devices, and one of them writes. A model starts from the first
    series of a table, as many as have 100,000 rows together.

    Args:
        table: the data, from `retrodict.data.read`, or from `retrodict.data.read_shared` where each
            process reads its share.
        spec: the model: its name, a `StateSpaceModel`, a function of no arguments that returns one,
            or what `retrodict.models.load` made of these. A model that was given as an object
            and holds functions of your own is needed again by `open_run`; the command line reads
            such a model only if it was named as `module:name`.
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
    out, (spec, _) = Path(out), with_period(models.load(spec), table)
    settings = _settings(table, spec, family, num_steps, seed)
    by_all(lambda: _refuse_other(out, settings))
    model = by_all(lambda: starting_model(table, spec, seed=seed))
    with ExitStack() as held:
        by_all(lambda: _take(out, settings, held) if is_main_process() else None)
        folder = Folder(out, settings, progress or Quiet())
        return _run(folder, table, spec, model, family, num_steps, seed)


def _run(
    folder: Folder,
    table: data.Table | data.SharedTable,
    spec: models.ModelSpec,
    model: rd.StateSpaceModel,
    family: str,
    num_steps: int,
    seed: int,
) -> Run:
    """Run the stages of a fit in its folder; the arguments are those of `fit`."""
    _, learn_key, train_key, error_key = jax.random.split(jax.random.key(seed), 4)
    exact = model.is_linear_gaussian
    if exact:
        model, history, total, search = _by_evidence(folder, learn_key, model, table)
        trained, rest = None, np.zeros(0)
    else:
        search = None
        model, history, total = _by_elbo(folder, learn_key, model, table, num_steps)
        trained, rest = _amortised(folder, train_key, model, table, family, num_steps)
    # The library counts nats by time step; people ask what a row in which something was seen adds.
    history = history * (table.summary.num_rows / table.summary.num_rows_observed)
    lines = [("parameters", i + 1, v) for i, v in enumerate(history)]
    lines += [("family", i + 1, v) for i, v in enumerate(rest)]
    folder.write(TRAINING, as_csv(("stage", "step", "nats per observed row"), lines))
    parameters, uncertainty = uncertain(folder, error_key, model, table)
    record = {
        "layout": table.layout,
        "options": {"family": None if exact else family, "num_steps": num_steps, "seed": seed},
        "data": {"sha256": table.summary.fingerprint, "described": table.described()},
        "results": {
            "method": "exact" if exact else "amortised",
            "objective": "log-evidence" if exact else "ELBO",
            "nats_a_row": total / table.summary.num_rows_observed,
            "total": total,
            "rows": table.summary.num_rows,
            "rows_observed": table.summary.num_rows_observed,
            "seconds": round(folder.seconds, 1),
            "parameters": parameters,
            "search": search,
            **uncertainty,
        },
    }
    rows = data.Rows.of_table(table)
    run = write(folder.path, spec, model, trained, record, rows) if is_main_process() else None
    wait_for_processes("the run is written")
    return open_run(folder.path, model=spec) if run is None else run


PERIODS = {
    "1h": (24, "hours of a day"),
    "1D": (7, "days of a week"),
    "B": (5, "business days of a week"),
    "1 month": (12, "months of a year"),
    "3 months": (4, "quarters of a year"),
}
"""How many steps a season lasts, by the step of a table, and what they are."""


def with_period(
    spec: models.ModelSpec, table: data.Table | data.SharedTable
) -> tuple[models.ModelSpec, str]:
    """Return a specification with a period from the step of the table, and how it was chosen.

    A period that was chosen already stays, and so do models without one; the words are then empty.

    Args:
        spec: the model.
        table: the data.

    Raises:
        RunError: if the model needs a period and the step of the table does not imply one.
    """
    if "period" not in spec.all_options() or "period" in spec.options:
        return spec, ""
    step = table.layout["freq"]
    if step not in PERIODS:
        words = "are uneven" if step == "irregular" else f"have a step of {step}"
        raise RunError(
            f"The model {spec.reference} needs a period, and the times of {table.source} {words},"
            " from which it does not follow. Choose how many steps a season lasts with the option"
            " period, such as period=12."
        )
    period, steps = PERIODS[step]
    words = f"The step of the times is {step}: period={period}, the {steps}."
    return dataclasses.replace(spec, options={**spec.options, "period": period}), words


def finished_before(
    table: data.Table | data.SharedTable,
    spec: Model,
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
    out, spec = Path(out), models.load(spec)
    if not (out / RECORD).exists() or (out / REPORT).exists():
        return None
    spec, _ = with_period(spec, table)
    settings = _settings(table, spec, family, num_steps, seed)
    return open_run(out, model=spec) if _noted(out) == as_plain(settings) else None


def num_stages(table: data.Table | data.SharedTable, spec: Model) -> int:
    """How many stages a fit has, for those who tell how far it is.

    Args:
        table: the data.
        spec: the model.
    """
    spec, _ = with_period(models.load(spec), table)
    _refuse_too_large(spec, table)
    model = spec.build(len(table.names), jax.random.key(0))
    return 2 if model.is_linear_gaussian else 3


def _settings(
    table: data.Table | data.SharedTable,
    spec: models.ModelSpec,
    family: str,
    num_steps: int,
    seed: int,
) -> dict[str, Any]:
    """Return what a fit depends on."""
    given = {} if spec.given is None else {"given": _fingerprint(spec.given)}
    return {
        **given,
        "model": spec.to_dict(),
        "layout": table.layout,
        "data": table.summary.fingerprint,
        "family": family,
        "num_steps": num_steps,
        "seed": seed,
    }


def _fingerprint(model: rd.StateSpaceModel) -> str:
    """Return a fingerprint of a model: its arrays, its structure and the code of its functions."""
    leaves, structure = jax.tree.flatten(model)
    digest = hashlib.sha256(_without_addresses(str(structure)))
    for leaf in leaves:
        if eqx.is_array_like(leaf):
            digest.update(np.asarray(leaf).tobytes())
        else:
            digest.update(_without_addresses(repr(leaf)))
            digest.update(getattr(getattr(leaf, "__code__", None), "co_code", b""))
    return digest.hexdigest()


def _without_addresses(text: str) -> bytes:
    """Return the text of an object as it is in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text).encode()


def _noted(out: Path) -> Any:
    """The settings of the run in a folder; `None` if there is no note of them, or a broken one."""
    try:
        return json.loads((out / SETTINGS).read_text())
    except (OSError, ValueError):
        return None


def _take(out: Path, settings: Mapping[str, Any], held: ExitStack) -> None:
    """Make the folder of a run, lock it until `held` is closed, and note the settings."""
    make_writable(out)
    try:
        hold_folder(out, held)
    except BlockingIOError as error:
        raise RunError(
            f"{out} is in use by another process, which fits to it; wait for it to end, or give"
            " another folder."
        ) from error
    _refuse_other(out, settings)  # another process may have been here meanwhile
    write_atomically(out / SETTINGS, as_json(settings))


def check_folder(out: str | Path) -> None:
    """Refuse a folder in which no fit can be made or gone on with, before data are read.

    Args:
        out: the folder of the run.

    Raises:
        RunError: if it holds a finished run with its report, or something else, or is read-only.
    """
    out = Path(out)
    if (out / RECORD).exists() and (out / REPORT).exists():
        _refuse_finished(out)
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; give a folder that does not exist yet.")
    if out.is_dir() and not (out / RECORD).exists() and not (out / SETTINGS).exists():
        _refuse_filled(out)
    first = next(place for place in (out.resolve(), *out.resolve().parents) if place.exists())
    if not first.is_dir() or not os.access(first, os.W_OK | os.X_OK):
        raise RunError(f"{out} cannot be written: {first} is read-only or a file; give another.")


def _refuse_finished(out: Path) -> None:
    read_record(out)
    raise RunError(f"{out} holds a finished run; give another folder, or remove it.")


def _refuse_filled(out: Path) -> None:
    # A process that was killed at once may have left a part of its first file.
    if any(not re.fullmatch(r"\..*\.partial", place.name) for place in out.iterdir()):
        raise RunError(f"{out} is not empty and holds no run; give another folder.")


def _refuse_other(out: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that holds a finished run, one of other settings, or something else."""
    check_folder(out)
    if not out.exists():
        return
    note = out / SETTINGS
    if (out / RECORD).exists():
        _refuse_finished(out)
    if note.exists():
        if _noted(out) != as_plain(settings):
            raise RunError(
                f"{out} holds an unfinished run of other data or options; ask for the same again,"
                " or give another folder."
            )


def starting_model(
    table: data.Table | data.SharedTable, spec: Model, *, seed: int = 0
) -> rd.StateSpaceModel:
    """The model that a fit starts from, with values from the data.

    Args:
        table: the data.
        spec: the model, as in `fit`.
        seed: of the fit.

    Raises:
        RunError: if the model does not fit the table.
    """
    spec = models.load(spec)
    for name, seen in zip(table.names, table.summary.seen, strict=True):
        if seen < 2:
            raise RunError(
                f"{table.source}, column {name!r}: {seen} observed value, from which nothing can be"
                " learned; add rows, or name other columns with ",
                Argument("columns"),
            )
    spec, _ = with_period(spec, table)
    wanted, given = spec.inputs(), ", ".join(table.input_names)
    if wanted and len(wanted) != len(table.input_names):
        raise RunError(
            f"The model {spec.reference} reads as inputs, in this order, {', '.join(wanted)}, and"
            f" the table has {given or 'none'}. Name columns with ",
            Argument("inputs"),
            ", and ask for the length of the step with ",
            Argument("step_input", True),
            ".",
        )
    _refuse_too_large(spec, table)
    options = table.leading_series().batch()
    key = jax.random.split(jax.random.key(seed), 4)[0]
    model = spec.build_from(options.pop("ys"), key=key, **options)
    if model.takes_input and not table.input_names:
        raise RunError(
            f"The model {spec.reference} takes inputs, and the table has none: name their columns"
            " with ",
            Argument("inputs"),
            ", or ask for the length of the step with ",
            Argument("step_input", True),
            ".",
        )
    if not model.takes_input and table.input_names:
        raise RunError(
            f"The model {spec.reference} takes no inputs, and the table has {given}. Leave the"
            " inputs out, or choose a model that reads them: ready models read the length of the"
            " step with the option irregular=true."
        )
    columns = _num_observed(model, len(table.input_names))
    if columns != len(table.names):
        raise RunError(
            f"The model {spec.reference} observes {columns} columns, and the table has"
            f" {len(table.names)}: {', '.join(table.names)}. Name those that it observes with ",
            Argument("columns"),
        )
    return model


MATRICES_OF_A_START = 16
"""How many matrices of the size of a covariance are held while a model is started from data."""


def _refuse_too_large(spec: models.ModelSpec, table: data.Table | data.SharedTable) -> None:
    """Refuse a ready model whose matrices do not fit into the memory of this machine.

    Raises:
        RunError: if it has too many states.
    """
    if spec.name is None or not hasattr(os, "sysconf"):
        return
    try:  # ready models have as many states more for each column
        one, two = (spec.build(columns, jax.random.key(0)) for columns in (1, 2))
    except models.ModelError:
        return  # of a fixed number of columns
    num_states = one.state_dim + (len(table.names) - 1) * (two.state_dim - one.state_dim)
    rows = table.summary.longest if one.is_linear_gaussian else 0
    needed = 8 * num_states**2 * (rows + MATRICES_OF_A_START)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise RunError(
            f"The model {spec.reference} has {num_states} states for {len(table.names)} columns,"
            f" whose covariances take {needed / 1e9:.0f} GB, and this machine has"
            f" {memory / 1e9:.0f} GB of memory. Name fewer columns with ",
            Argument("columns"),
            ", or choose a model with fewer states.",
        )


def _num_observed(model: rd.StateSpaceModel, num_inputs: int) -> int:
    """How many columns a model observes, seen in the shape of an observation."""
    emission, given = rd.unwrap(model).emission, jnp.zeros(num_inputs)
    drawn = eqx.filter_eval_shape(
        lambda key, x, u: emission.sample(key, x, u),
        jax.random.key(0),
        jnp.zeros(model.state_dim),
        given,
    )
    return drawn.shape[0]


def _by_evidence(
    folder: Folder, key: Any, model: rd.StateSpaceModel, table: data.Table | data.SharedTable
) -> tuple[rd.StateSpaceModel, np.ndarray, float, str]:
    """Return the model of greatest evidence, the way there, its evidence and a status."""
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
        kept = jax.tree.leaves(eqx.filter(as_before(model, found.model), eqx.is_inexact_array))
        return {
            **{f"leaf {i}": leaf for i, leaf in enumerate(kept)},
            "history": found.history,
            "log_evidence": found.log_evidence,
            "status": np.array(found.status),
        }

    stage = folder.stage("the parameters, by their evidence", compute)
    kept = [jnp.asarray(stage[f"leaf {i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
    fitted = eqx.combine(jax.tree.unflatten(structure, kept), rest)
    status = str(stage["status"]) if "status" in stage else "finished"
    if status != "converged":
        folder.progress.say(f"The search for the parameters {status} before it converged.")
    return fitted, stage["history"], float(stage["log_evidence"]), status


def _by_elbo(
    folder: Folder,
    key: Any,
    model: rd.StateSpaceModel,
    table: data.Table | data.SharedTable,
    num_steps: int,
) -> tuple[rd.StateSpaceModel, np.ndarray, float]:
    """The model of greatest ELBO with a recurrent family beside it, the way there, and the ELBO.

    That family has ELBOs in closed form or by quadrature, so that parameters settle; it has seen
    the given series alone, and is not kept.
    """
    family_key, fit_key = jax.random.split(key)
    options = table.batch()
    ys, width = options.pop("ys"), len(table.input_names)
    family = rd.RecurrentFamily(family_key, model.state_dim, len(table.names), input_dim=width)
    long = table.summary.longest > MOST_ROWS_A_STEP
    found, _ = folder.fit(
        "the parameters, by the ELBO",
        fit_key,
        family,
        model,
        ys,
        num_steps=num_steps,
        learn="both",
        objective=rd.Objective(window=MOST_ROWS_A_STEP if long else None),
        optimisation=rd.Optimisation(optimiser=_in_units(num_steps)),
        **options,
    )
    kept = found.held_out[found.held_out_steps == found.kept_step][-1]
    return as_before(model, found.model), found.history, float(kept) * table.summary.num_rows


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
    table: data.Table | data.SharedTable,
    name: str,
    num_steps: int,
) -> tuple[rd.AbstractFamily, np.ndarray]:
    """A family that was trained on series of the model, and the way there."""
    draw_key, family_key, fit_key = jax.random.split(key, 3)
    options = table.leading_series().batch()
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
    width = len(table.input_names)
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
    return found.family, found.history / _share_observed(seen, drawn.options["length"])


def _share_observed(mask: Any, length: Any) -> float:
    """The share of existing rows in which something was seen."""
    mask = np.asarray(mask).any(axis=2)
    exists = np.ones(mask.shape, bool)
    if length is not None:
        exists = np.arange(mask.shape[1]) < np.asarray(length)[:, None]
    return float((mask & exists).sum() / exists.sum())


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
