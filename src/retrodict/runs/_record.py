"""A run: what was fitted to which data and how, written to its folder and found again."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict._workspace import as_json, library_version, write_atomically
from retrodict.runs._folder import (
    FAMILY,
    FORMAT,
    MODEL,
    RECORD,
    ROWS,
    TRAINING,
    RunError,
    checksum_of,
    digest_of,
    read_record,
)

Model: TypeAlias = str | rd.StateSpaceModel | Callable[[], rd.StateSpaceModel] | models.ModelSpec
"""What `retrodict.models.resolve` takes."""


@dataclass(frozen=True, eq=False)
class Run:
    """A fitted model, the family that smooths for it, and how both came about.

    Attributes:
        path: its folder.
        spec: the model as it was asked for.
        model: the model with what was learned.
        family: the family that was trained; `None` for linear-Gaussian models, which need none.
        record: the rest, as JSON stores it: layout of the table, options, data, results.
    """

    path: Path
    spec: models.ModelSpec
    model: rd.StateSpaceModel
    family: rd.AbstractFamily | None
    record: Mapping[str, Any]

    @property
    def layout(self) -> dict[str, Any]:
        """How `retrodict.data.read` is to read a table for this run."""
        return dict(self.record["layout"])

    @property
    def is_exact(self) -> bool:
        """Whether smoothing is exact, since the model is linear and Gaussian."""
        return self.family is None

    @property
    def smoother(self) -> rd.AbstractFamily:
        """The family by which rows are smoothed as they come; the exact one if there is one."""
        if self.family is not None:
            return self.family
        width = len(self.layout["inputs"] or ()) + bool(self.layout["step_input"])
        return rd.KalmanFamily(rd.unwrap(self.model), input_dim=width or None)

    def rows(self) -> data.Rows | None:
        """Return the rows that the run was fitted to; `None` if its folder does not hold them.

        Runs of several series, and those that were learned along a stream, do not hold them.
        """
        if ROWS not in self.record["files"]:
            return None
        try:
            times, dates, ys, inputs = rd.load(self.path / ROWS)
        except rd.CheckpointError as error:
            raise RunError(f"{self.path}: {error}") from error
        return data.Rows(times.astype("datetime64[us]") if dates else times, ys, inputs)


def write(
    path: Path,
    spec: models.ModelSpec,
    model: rd.StateSpaceModel,
    family: rd.AbstractFamily | None,
    record: Mapping[str, Any],
    rows: data.Rows | None = None,
) -> Run:
    """Write a finished run: its record last, so that a folder with a record is whole."""
    rd.save(path / MODEL, model)
    if family is not None:
        rd.save(path / FAMILY, family)
    named = [MODEL, TRAINING, *([FAMILY] if family is not None else [])]
    if rows is not None:
        dates = np.asarray(rows.times.dtype.kind == "M")
        times = rows.times.astype(np.int64) if dates else rows.times
        rd.save(path / ROWS, (times, dates, rows.ys, rows.inputs))
        named.append(ROWS)
    whole = {
        "retrodict_run": FORMAT,
        "version": library_version(),
        "model": spec.to_dict(),
        **record,
        "files": {name: digest_of((path / name).read_bytes()) for name in named},
    }
    plain = json.loads(as_json(whole))
    write_atomically(path / RECORD, as_json({**plain, "checksum": checksum_of(plain)}))
    return Run(path, spec, model, family, plain)


def open_run(path: str | Path, *, model: Model | None = None) -> Run:
    """Open the folder of a finished run.

    Args:
        path: the folder.
        model: the model that was fitted. It is needed if it was given to `fit` as an object with
            functions of your own, which no file holds; its parameters come from the folder.

    Raises:
        RunError: if there is no run, or it is unfinished, of another version, or was altered, or if
            its model is needed.
    """
    path = Path(path)
    record = read_record(path)
    spec = models.ModelSpec.from_dict(record["model"])
    num_columns = len(record["layout"]["columns"])
    if spec.is_given and model is not None:
        spec = replace(spec, given=models.resolve(model).build(num_columns))
    try:
        like = None
        if spec.name is None and (spec.given is not None or not spec.is_given):
            # functions of the user's own are not stored
            like = spec.build(num_columns)
        stored = rd.load(path / MODEL, like=like)
        family = rd.load(path / FAMILY) if FAMILY in record["files"] else None
    except rd.CheckpointError as error:
        needed = ""
        if spec.is_given and spec.given is None:
            needed = (
                " Its model was given in Python: open it with runs.open_run(path, model=...), or"
                " fit a model that is named as module:name."
            )
        raise RunError(f"{path}: {error}{needed}") from error
    return Run(path, spec, stored, family, record)
