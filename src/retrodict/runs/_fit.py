"""Fit a model to a table: parameters, a family, standard errors, and the run folder."""

import hashlib
import json
import os
import re
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict._files import as_csv, as_json, ensure_folder, lock_folder, write_atomically
from retrodict._workspace import Folder, Progress, Quiet
from retrodict.distributed import by_all, is_main_process, wait_for_processes
from retrodict.runs._record import (
    RECORD,
    REPORT,
    TRAINING,
    RunError,
    as_plain,
    read_inside,
    read_record,
)
from retrodict.runs._run import AnyModel, AnyTable, Model, Run, open_run, write
from retrodict.runs._standard_errors import parameter_table
from retrodict.runs._starting_model import refuse_too_large, starting_model, with_period
from retrodict.runs._training import FAMILIES, learn

SETTINGS = "settings.json"
"""The settings of an unfinished run."""


@dataclass(frozen=True)
class FitJob:
    """A fit in a folder: what `fit` does, in steps. The arguments are those of `fit`.

    Attributes:
        spec: the model, with the period that the time step implies.
        notice: why it has this period; empty if there is nothing to report.
    """

    table: AnyTable
    model: InitVar[Model]
    out: Path
    family: str = "mixture"
    num_steps: int = 2000
    seed: int = 0
    spec: models.ModelSpec = field(init=False)
    notice: str = field(init=False)

    def __post_init__(self, model: Model) -> None:
        if self.family not in FAMILIES:
            raise RunError(f"`family` must be one of {', '.join(FAMILIES)}, got {self.family!r}.")
        if self.num_steps < 1:
            raise RunError(f"`num_steps` must be at least 1, got {self.num_steps}.")
        spec, notice = with_period(models.load(model), self.table)
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "notice", notice)

    @property
    def num_stages(self) -> int:
        """The number of stages, for progress bars."""
        refuse_too_large(self.spec, self.table)
        model = self.spec.build(len(self.table.names), jax.random.key(0))
        regimes = isinstance(model, rd.switching.SwitchingModel)
        return 2 if regimes or model.is_linear_gaussian else 3

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the result depends on, as JSON stores it; table and model by fingerprint."""
        settings = {
            "model": self.spec.to_dict(),
            "layout": self.table.layout,
            "data": self.table.summary.fingerprint,
            "family": self.family,
            "num_steps": self.num_steps,
            "seed": self.seed,
        }
        given = self.spec.given
        return as_plain(settings if given is None else settings | {"given": _fingerprint(given)})

    def starting_model(self) -> AnyModel:
        """Return the model that the fit starts from, with starting values from the data.

        Raises:
            RunError: if the model does not match the table.
        """
        return starting_model(self.table, self.spec, seed=self.seed)

    def finished_run(self) -> Run | None:
        """Return the run that the fit would make, if it exists and only its report is missing.

        The command line writes the report last, and may be interrupted before that.
        """
        if not (self.out / RECORD).exists() or (self.out / REPORT).exists():
            return None
        return open_run(self.out, model=self.spec) if self.is_in_folder() else None

    def run(self, progress: Progress | None = None) -> Run:
        """Fit, or resume an interrupted fit; see `fit`.

        Args:
            progress: progress callback.
        """
        by_all(self.check_folder)
        model = by_all(self.starting_model)
        with ExitStack() as locks:
            by_all(lambda: self.lock_folder(locks) if is_main_process() else None)
            return _run_stages(Folder(self.out, self.settings, progress or Quiet()), self, model)

    def is_in_folder(self) -> bool:
        """Return whether the folder contains a fit with these settings."""
        try:
            return json.loads(read_inside(self.out, SETTINGS)) == self.settings
        except (OSError, ValueError, RecursionError):
            return False

    def check_folder(self) -> None:
        """Refuse a folder with a finished run, a fit with other settings, or other files."""
        check_folder(self.out)
        if (self.out / RECORD).exists():
            _refuse_finished(self.out)
        if (self.out / SETTINGS).exists() and not self.is_in_folder():
            raise RunError(
                f"{self.out} contains an unfinished run of other data or options; use the same data"
                " and options to resume it, or give another folder."
            )

    def lock_folder(self, locks: ExitStack) -> None:
        """Make the folder, lock it until `locks` is closed, and write the settings."""
        ensure_folder(self.out)
        try:
            lock_folder(self.out, locks)
        except BlockingIOError as error:
            raise RunError(
                f"{self.out} is in use by another process that fits to it; wait for it to end, or"
                " give another folder."
            ) from error
        self.check_folder()  # another process may have written since the first check
        write_atomically(self.out / SETTINGS, as_json(self.settings))


def fit(
    table: AnyTable,
    spec: Model,
    out: str | Path,
    *,
    family: str = "mixture",
    num_steps: int = 2000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Run:
    """Learn the parameters of a model from a table, and train a family that smooths for it.

    Parameters that the model marks as learnable maximise the likelihood: exactly for
    linear-Gaussian models and hidden Markov models, by the evidence of GPB2 for models with regimes
    and states, and through the ELBO for others. A nonlinear model also gets a family, which is
    trained on series simulated from the fitted model, so that it can smooth new rows. Finished
    stages are stored in the folder: call `fit` again with the same arguments to resume an
    interrupted fit. With several processes (`retrodict.initialise`), all of them call this function
    with the same shared folder: the series are distributed over their devices, and one process
    writes. Starting values are computed from the first series of a table, up to 100,000 rows.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        >>> sorted(rd.models.named_parameters(run.model))
        ['level_scale', 'obs_scale']

    Args:
        table: the data, from `retrodict.data.read`, or from `retrodict.data.read_shared` where each
            process reads its share.
        spec: the model: its name, a `StateSpaceModel`, a function without arguments that returns
            one, or a result of `retrodict.models.load`. A model that is passed as an object and
            contains your own functions must be passed to `open_run` again; the command line opens
            such a run only if the model was named as `module:name`.
        out: the folder of the run, which must not contain another run.
        family: the family to train: `"mixture"`, `"nonlinear"`, `"recurrent"`, `"gated"` or
            `"conjugate"`.
        num_steps: optimiser steps for the parameters, and again for the family.
        seed: the random seed.
        progress: progress callback.

    Returns:
        The run, as `open_run` returns it.

    Raises:
        RunError: if the folder contains something else, or the model does not match the table.
        ProcessLostError: if another process has ended.
    """
    job = FitJob(table, spec, Path(out), family=family, num_steps=num_steps, seed=seed)
    return job.run(progress)


def _run_stages(folder: Folder, job: FitJob, model: AnyModel) -> Run:
    """Run the stages of a fit in its folder, from the starting model."""
    table, num_steps = job.table, job.num_steps
    _, learn_key, train_key, error_key = jax.random.split(jax.random.key(job.seed), 4)
    keys = (learn_key, train_key)
    learned = learn(folder, keys, model, table, job.family, num_steps)
    # The library reports nats per time step; reports give nats per observed row.
    history = learned.history * (table.summary.num_rows / table.summary.num_rows_observed)
    lines = [("parameters", i + 1, v) for i, v in enumerate(history)]
    lines += [("family", i + 1, v) for i, v in enumerate(learned.family_history)]
    folder.write(TRAINING, as_csv(("stage", "step", "nats per observed row"), lines))
    parameters, uncertainty = parameter_table(folder, error_key, learned.model, table)
    record: dict[str, Any] = {
        "layout": table.layout,
        "options": {
            "family": None if learned.family is None else job.family,
            "num_steps": num_steps,
            "seed": job.seed,
        },
        "data": {"sha256": table.summary.fingerprint, "described": table.described()},
        "results": {
            "method": learned.method,
            "objective": learned.objective,
            "nats_per_row": learned.total / table.summary.num_rows_observed,
            "total": learned.total,
            "rows": table.summary.num_rows,
            "rows_observed": table.summary.num_rows_observed,
            "seconds": round(folder.seconds, 1),
            "parameters": parameters,
            "search": learned.search,
            **learned.details,
            **uncertainty,
        },
    }
    model, trained = learned.model, learned.family
    rows = data.Rows.of_table(table)
    run = write(folder.path, job.spec, model, trained, record, rows) if is_main_process() else None
    wait_for_processes("the run is written")
    return open_run(folder.path, model=job.spec) if run is None else run


def _fingerprint(model: AnyModel) -> str:
    """Return a fingerprint of a model: its arrays, its structure and the code of its functions."""

    def encode(text: str) -> bytes:  # without memory addresses, which differ between processes
        return re.sub(r" at 0x[0-9a-f]+", "", text).encode()

    leaves, structure = jax.tree.flatten(model)
    digest = hashlib.sha256(encode(str(structure)))
    for leaf in leaves:
        if eqx.is_array_like(leaf):
            digest.update(np.asarray(leaf).tobytes())
        else:
            digest.update(encode(repr(leaf)))
            digest.update(getattr(getattr(leaf, "__code__", None), "co_code", b""))
    return digest.hexdigest()


def check_folder(out: str | Path) -> None:
    """Refuse a folder in which a fit can neither start nor resume, before data are read.

    Args:
        out: the folder of the run.

    Raises:
        RunError: if it contains a finished run with its report, or other files, or is read-only.
    """
    out = Path(out)
    if (out / RECORD).exists() and (out / REPORT).exists():
        _refuse_finished(out)
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; give a folder that does not exist yet.")
    if out.is_dir() and not (out / RECORD).exists() and not (out / SETTINGS).exists():
        # A process that was killed at once may have left a part of its first file.
        if any(not re.fullmatch(r"\..*\.partial", path.name) for path in out.iterdir()):
            raise RunError(f"{out} is not empty and contains no run; give another folder.")
    first = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    if not first.is_dir() or not os.access(first, os.W_OK | os.X_OK):
        raise RunError(f"{out} cannot be written: {first} is read-only or a file; give another.")


def _refuse_finished(out: Path) -> None:
    read_record(out)
    raise RunError(f"{out} contains a finished run; give another folder, or remove it.")
