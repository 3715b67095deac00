"""Runs: a fitted model with its record, written to a folder and opened again."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict._files import as_json, version_of, write_atomically
from retrodict.runs._record import (
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

AnyModel: TypeAlias = Any
"""The models that a run may have, one of `models.MODELS`."""

Model: TypeAlias = str | AnyModel | Callable[[], AnyModel] | models.ModelSpec
"""The models that `retrodict.models.load` accepts."""

AnyTable: TypeAlias = data.Table | data.SharedTable
"""A table, or one of which each process holds a share."""


@dataclass(frozen=True, eq=False)
class Run:
    """A fitted model, the family that smooths for it, and the record of the fit.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        >>> run.spec.reference, run.is_exact, run.layout["columns"]
        ('local_level', True, ['flow'])
        >>> later = rd.data.read({"year": [1881, 1882], "flow": [1100.0, 1150.0]}, **run.layout)

    Attributes:
        path: its folder.
        spec: the specification of the model.
        model: the fitted model, a `StateSpaceModel` or a `SwitchingModel`.
        family: the trained family; `None` for linear-Gaussian models and those with regimes, which
            need none.
        record: the content of `run.json`: layout of the table, options, data, results.
    """

    path: Path
    spec: models.ModelSpec
    model: Any
    family: rd.AbstractFamily | None
    record: Mapping[str, Any]

    @property
    def layout(self) -> dict[str, Any]:
        """The arguments with which `retrodict.data.read` reads a table for this run."""
        return dict(self.record["layout"])

    @property
    def input_dim(self) -> int:
        """The number of inputs of a row, the length of the step included."""
        return len(self.layout["inputs"] or ()) + bool(self.layout["step_input"])

    @property
    def is_exact(self) -> bool:
        """Whether smoothing is exact because the model is linear and Gaussian."""
        return self.family is None and not self.has_regimes

    @property
    def has_regimes(self) -> bool:
        """Whether the model has regimes, so that `retrodict.switching` smooths for it."""
        return isinstance(self.model, rd.switching.SwitchingModel)

    @property
    def smoother(self) -> rd.AbstractFamily:
        """The family that smooths rows of a stream: the Kalman family if smoothing is exact."""
        if self.family is not None:
            return self.family
        return rd.KalmanFamily(rd.unwrap(self.model), input_dim=self.input_dim or None)

    def rows(self) -> data.Rows | None:
        """Return the rows that the run was fitted to; `None` if they are not in its folder.

        Runs of several series, and those learned from a stream, do not store them.
        """
        if ROWS not in self.record["files"]:
            return None
        try:
            times, dates, ys, inputs = rd.load(self.path / ROWS)
            times = np.asarray(times).astype("datetime64[us]") if dates else np.asarray(times)
            rows = data.Rows(times, np.asarray(ys), None if inputs is None else np.asarray(inputs))
            width = 0 if rows.inputs is None else rows.inputs.shape[1]
            if (rows.ys.shape, width) != (
                (len(times), len(self.layout["columns"])),
                self.input_dim,
            ):
                raise ValueError("its rows do not have the columns of the run")
        except (rd.CheckpointError, TypeError, ValueError, IndexError) as error:
            raise RunError(
                f"{self.path / ROWS}: {error}. Fit again, or name a table: {{after}}.", after=...
            ) from error
        return rows


def write(
    path: Path,
    spec: models.ModelSpec,
    model: AnyModel,
    family: rd.AbstractFamily | None,
    record: Mapping[str, Any],
    rows: data.Rows | None = None,
) -> Run:
    """Write a finished run, its record last: a folder with a record is complete."""
    rd.save(path / MODEL, model)
    if family is not None:
        rd.save(path / FAMILY, family)
    named = [MODEL, TRAINING, *([FAMILY] if family is not None else [])]
    if rows is not None:
        dates = np.asarray(rows.times.dtype.kind == "M")
        times = rows.times.astype(np.int64) if dates else rows.times
        rd.save(path / ROWS, (times, dates, rows.ys, rows.inputs))
        named.append(ROWS)
    entries = {
        "retrodict_run": FORMAT,
        "version": version_of(),
        "model": spec.to_dict(),
        **record,
        "files": {name: digest_of((path / name).read_bytes()) for name in named},
    }
    plain = json.loads(as_json(entries))
    write_atomically(path / RECORD, as_json({**plain, "checksum": checksum_of(plain)}))
    return Run(path, spec, model, family, plain)


def open_run(path: str | Path, *, model: Model | None = None) -> Run:
    """Open the folder of a finished run.

    The folder is data: no code in it is executed, and no module that it names is imported. A run of
    your own model refers to Python code, `module:name`, which you must name again.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = rd.runs.fit(table, "local_level", f"{folder}/run")
        ...     run = rd.runs.open_run(f"{folder}/run")
        >>> run.spec.reference
        'local_level'

    Args:
        path: the folder.
        model: the model that the run was fitted with: its reference, such as `"my_module:model"`,
            the model itself, or a function without arguments that returns it. Needed for your own
            models, unless they were passed as objects without functions.

    Raises:
        RunError: if there is no run, or it is unfinished, of another version, or was altered, or if
            it needs a `model` and none or a different one is given.
    """
    path = Path(path)
    record = read_record(path)
    spec, like = _named(
        path, models.ModelSpec.from_dict(record["model"]), model, len(record["layout"]["columns"])
    )
    try:
        loaded = rd.load(path / MODEL, like=like)
        family = rd.load(path / FAMILY) if FAMILY in record["files"] else None
    except rd.CheckpointError as error:
        remedy = ""
        if spec.is_given and like is None:
            remedy = (
                " Its model was passed as a Python object: open the run in Python with {model}, or"
                " fit a model that is named as module:name."
            )
        raise RunError(f"{path}: {error}{remedy}", model=...) from error
    if not isinstance(loaded, models.MODELS):
        raise RunError(f"{path / MODEL} contains no model. Fit again to another folder.")
    if family is not None and not isinstance(family, rd.AbstractFamily):
        raise RunError(f"{path / FAMILY} contains no family. Fit again to another folder.")
    run = Run(path, spec, loaded, family, record)
    try:
        _trace(run)
    except Exception as error:  # arrays of wrong shapes and types can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise RunError(
            f"{path}: its model does not work on rows of its table ({reason}). Fit again to another"
            " folder."
        ) from error
    return run


def _trace(run: Run) -> None:
    """Trace the model and the family on two rows without computing anything."""
    rows = 2 + getattr(run.model, "num_lags", 0)
    ys = np.zeros((rows, len(run.layout["columns"])))
    us = np.zeros((rows, run.input_dim)) if run.input_dim else None

    def call(model: AnyModel, family: rd.AbstractFamily | None) -> Any:
        inputs = us if rd.unwrap(model).takes_input else None
        xs = np.zeros((rows, model.state_dim))
        if isinstance(model, rd.switching.SwitchingModel):
            return model.log_joint(np.zeros(rows, int), xs, ys, inputs=inputs)
        joint = model.log_joint(xs, ys, inputs=inputs)
        chain = None if family is None else family.infer(ys, inputs=us)
        return joint, None if chain is None else chain.laws

    eqx.filter_eval_shape(call, run.model, run.family)


def _named(
    path: Path, spec: models.ModelSpec, model: Model | None, obs_dim: int
) -> tuple[models.ModelSpec, AnyModel | None]:
    """Return the specification, and a model with the functions that a file does not store.

    The model is `None` for ready models and for objects that were not passed again. Only a
    reference that the caller has named is imported.
    """
    reference = model.reference if isinstance(model, models.ModelSpec) else model
    if isinstance(reference, str) and not spec.is_given and reference != spec.reference:
        raise RunError(f"{path} is a run of {spec.reference}, got {{model}}.", model=reference)
    if spec.name is not None or (spec.is_given and model is None):
        return spec, None
    if model is None:
        raise RunError(
            f"{path} is a run of {spec.reference}, a model in Python, which is imported only if"
            f" you name it: pass {{model}}",
            model=spec.reference,
        )
    if isinstance(reference, str) and not spec.is_given:
        return spec, spec.build(obs_dim=obs_dim)
    like = models.load(model).build(obs_dim)
    return (replace(spec, given=like) if spec.is_given else spec), like


def state_names(run: Run) -> list[str]:
    """Return a name for each coordinate of the state; see `retrodict.models.state_names`.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        >>> rd.runs.state_names(run)
        ['level']

    Args:
        run: the run.
    """
    return models.state_names(run.model, run.layout["columns"])


def shown_states(run: Run, *, every: bool = False) -> list[int]:
    """Return the indices of the states that tables and pictures show.

    States that store earlier values of others, such as the seasons of the last rows, are left out;
    see `retrodict.models.is_memory`.

    Args:
        run: the run.
        every: whether to show these states too.
    """
    memory = models.is_memory(run.model)
    return [index for index, is_copy in enumerate(memory) if every or not is_copy]


class Entry(NamedTuple):
    """One entry of a parameter.

    Attributes:
        parameter: the name of the parameter.
        position: the index of the entry; empty for a scalar.
        value: the value, a number or a tracer.
        learned: whether the parameter is learned.
    """

    parameter: str
    position: tuple[int, ...]
    value: Any
    learned: bool


def parameter_entries(model: AnyModel, columns: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of all parameters by name, learned parameters first.

    Args:
        model: the model.
        columns: the names of the observed columns, which name entries such as `level_scale[gdp]`.
    """
    learned = models.named_parameters(model)
    values = models.named_parameters(model, fixed=True)
    return {
        models.entry_name(model, name, index, columns): Entry(
            name, index, values[name][index], name in learned
        )
        for name in (*learned, *(name for name in values if name not in learned))
        for index in np.ndindex(values[name].shape)
    }


def with_structure_of(before: Any, learned: Any) -> Any:
    """Return the learned model with the structure of the original model.

    Scales that were plain arrays are wrapped while they are learned, to stay positive. A checkpoint
    of a user's own model is read with the structure of that model.
    """
    if jax.tree.structure(before) == jax.tree.structure(learned):
        return learned
    values = models.named_parameters(learned, fixed=True)
    names = models.named_parameters(before, fixed=True)
    return models.with_parameters(before, {name: values[name] for name in names})
