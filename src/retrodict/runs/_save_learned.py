"""A new run with the model and the family that a stream has learned."""

import os
import shutil
from pathlib import Path

import jax

import retrodict as rd
from retrodict import models
from retrodict.runs._folder import TRAINING, RunError
from retrodict.runs._names import parameter_entries
from retrodict.runs._online_options import Learning
from retrodict.runs._record import Run, open_run, write

RESULTS_OF_FIT = ("total", "rows", "rows_observed", "status", "distance", "search")
"""Results that hold for the fitted parameters only."""


def refuse_existing(out: Path) -> None:
    """Refuse a path that exists, or whose parent is not a writable folder.

    Raises:
        RunError: if the path exists, or its parent does not exist or is read-only.
    """
    if out.exists():
        raise RunError(f"{out} exists, and runs are not overwritten; name another folder.")
    if not out.resolve().parent.is_dir():
        raise RunError(f"{out.resolve().parent} does not exist; make it, or name another folder.")
    if not os.access(out.resolve().parent, os.W_OK | os.X_OK):
        raise RunError(f"{out.resolve().parent} is read-only; name another folder.")


def save_learned(
    run: Run,
    model: rd.StateSpaceModel,
    family: rd.AbstractFamily | None,
    out: Path,
    *,
    learning: Learning,
    num_rows: int,
    nats_per_row: float,
    last: str,
) -> Run:
    """Write a run with a learned model and family, atomically.

    Args:
        run: the run that learning started from.
        model: the learned model.
        family: the learned family; `None` if smoothing is exact.
        out: the folder of the new run, which must not exist.
        learning: the options of learning.
        num_rows: the number of rows that were read.
        nats_per_row: the ELBO per observed row at the end.
        last: the time of the last row, as text.

    Returns:
        The new run.

    Raises:
        RunError: if the folder exists.
    """
    refuse_existing(out)
    old = run.record
    results = {name: old["results"][name] for name in old["results"] if name not in RESULTS_OF_FIT}
    words = f"learned from a stream: {num_rows} rows, up to {last}"
    options = f"{learning.what}, {learning.schedule} steps of {learning.largest_step:g}"
    entries = parameter_entries(model, run.layout["columns"])
    record = {
        "layout": old["layout"],
        "options": old["options"],
        "data": {
            **old["data"],
            "described": [*old["data"]["described"], f"{words} ({options})"],
        },
        "results": {
            **results,
            "nats_a_row": nats_per_row,
            "parameters": {
                name: {"value": float(entry.value), "learned": entry.learned}
                for name, entry in entries.items()
            },
            "uncertainty": f"No standard errors: the parameters were {words}.",
        },
        "learned": {"from": old["files"], "settings": learning.settings, "rows": num_rows},
    }
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        shutil.copyfile(run.path / TRAINING, partial / TRAINING)
        write(partial, run.spec, with_structure_of(run.model, model), family, record)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_run(out, model=run.model)


def with_structure_of(
    before: rd.StateSpaceModel, learned: rd.StateSpaceModel
) -> rd.StateSpaceModel:
    """Return the learned model with the structure of the original model.

    Scales that were plain arrays are wrapped while they are learned, to stay positive. A checkpoint
    of a user's own model is read with the structure of that model.
    """
    if jax.tree.structure(before) == jax.tree.structure(learned):
        return learned
    values = models.named_parameters(learned, fixed=True)
    names = models.named_parameters(before, fixed=True)
    return models.with_parameters(before, {name: values[name] for name in names})
