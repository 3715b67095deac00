"""A new run from what a stream has taught an old one."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import retrodict as rd
from retrodict import models
from retrodict.runs._folder import TRAINING, RunError
from retrodict.runs._learning import Learning
from retrodict.runs._record import Run, open_run, write

OF_THE_FIT = ("total", "rows", "rows_observed", "status", "distance", "search")
"""What was found at the parameters as they were fitted, and does not hold for others."""


def refuse_existing(out: Path) -> None:
    """Refuses a folder that exists, or a place where none can be made.

    Raises:
        RunError: if there is something of this name, or its parent is no folder or read-only.
    """
    if out.exists():
        raise RunError(f"{out} exists, and runs are not overwritten; name another folder.")
    if not out.resolve().parent.is_dir():
        raise RunError(f"{out.resolve().parent} does not exist; make it, or name another folder.")
    if not os.access(out.resolve().parent, os.W_OK | os.X_OK):
        raise RunError(f"{out.resolve().parent} is read-only; name another folder.")


def adopt(
    run: Run,
    model: rd.StateSpaceModel,
    family: rd.AbstractFamily | None,
    out: Path,
    *,
    learning: Learning,
    num_rows: int,
    nats_a_row: float,
    last: str,
) -> Run:
    """Writes a run with a learned model and family; it appears whole or not at all.

    Args:
        run: the run that was started from.
        model: the model as it was learned.
        family: the family as it was learned; `None` if smoothing is exact.
        out: the folder of the new run, which must not exist.
        learning: how it was learned.
        num_rows: from how many rows.
        nats_a_row: the ELBO per observed row at the end.
        last: the time of the last row, as it is written.

    Returns:
        The new run.

    Raises:
        RunError: if the folder exists.
    """
    refuse_existing(out)
    results = {
        name: value for name, value in run.record["results"].items() if name not in OF_THE_FIT
    }
    words = f"learned along a stream: {num_rows} rows, up to {last}"
    how = [learning.what, f"{learning.schedule} steps of {learning.largest_step:g}"]
    described = [*run.record["data"]["described"], f"{words} ({', '.join(how)})"]
    record = {
        "layout": run.record["layout"],
        "options": run.record["options"],
        "data": {**run.record["data"], "described": described},
        "results": {
            **results,
            "nats_a_row": nats_a_row,
            "parameters": entries_of(model, run.layout["columns"]),
            "uncertainty": f"No standard errors: the parameters were {words}.",
        },
        "learned": {"from": run.record["files"], "settings": learning.settings, "rows": num_rows},
    }
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        shutil.copyfile(run.path / TRAINING, partial / TRAINING)
        write(partial, run.spec, as_before(run.model, model), family, record)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_run(out, model=run.model)


def as_before(before: rd.StateSpaceModel, learned: rd.StateSpaceModel) -> rd.StateSpaceModel:
    """The learned model in the structure of the one before.

    Scales that were plain arrays are held positive while they are learned; a model of the user's
    own is read again by the structure that it has.
    """
    if jax.tree.structure(before) == jax.tree.structure(learned):
        return learned
    values = models.named_parameters(learned, fixed=True)
    names = models.named_parameters(before, fixed=True)
    return models.with_parameters(before, {name: values[name] for name in names})


def entries_of(model: rd.StateSpaceModel, columns: Sequence[str]) -> dict[str, Any]:
    """Return the parameters entry by entry as a record holds them, those that are learned first.

    Args:
        model: the model.
        columns: the names of the observed columns.
    """
    learned = models.named_parameters(model)
    every = models.named_parameters(model, fixed=True)
    return {
        models.entry_name(model, name, index, columns): {
            "value": float(every[name][index]),
            "learned": name in learned,
        }
        for name in (*learned, *(name for name in every if name not in learned))
        for index in np.ndindex(every[name].shape)
    }
