"""Folders of long computations, which resume after interruption.

An experiment is a sequence of *stages*. The result of a stage is written atomically when it is
complete, with checksums, under a name with a fingerprint of the settings, and is read back instead
of computed again. A fit within a stage resumes from its last checkpoint.

If several processes run one program, all of them go through all stages. The main process decides
which stages are complete, and only it writes.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from retrodict._checkpoint import CheckpointError, load, save
from retrodict._files import as_json, ensure_folder, write_atomically
from retrodict.distributed import broadcast_from_main, by_all, is_main_process, wait_for_processes

T = TypeVar("T")
Fit = TypeVar("Fit", bound=Any)
"""The result of `retrodict.fit`; this module does not depend on training."""

Stage = dict[str, np.ndarray]
"""The result of a stage: arrays by name."""


@runtime_checkable
class Progress(Protocol):
    """A progress callback of an experiment."""

    def begin(self, stage: str) -> None:
        """Report the start of a stage."""

    def step(self, done: int, total: int) -> None:
        """Report the completed part of the present stage."""

    def end(self, stage: str, *, cached: bool) -> None:
        """Report the end of a stage; `cached` if its result was read from a file."""

    def say(self, message: str) -> None:
        """Report a message to the user."""


class Quiet(Progress):
    """A progress callback that does nothing."""


class Folder:
    """The folder of the stages and results of an experiment.

    Args:
        path: the folder; created if it does not exist.
        settings: the settings of the results; stages of other settings are unchanged.
        progress: the progress callback.

    Attributes:
        seconds: the duration of the stages of this run, including those of earlier runs.

    Raises:
        OSError: if the folder cannot be created or is not writable.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], progress: Progress | None = None):
        self.path, self.progress = path, progress or Quiet()
        self.seconds = 0.0
        text = json.dumps(settings, sort_keys=True)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()[:12]
        self._writes = is_main_process()
        by_all(lambda: _prepare(path) if self._writes else None)

    def stage(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Stage:
        """Return the result of a stage: read if it is complete, else computed and written.

        A file that cannot be read is renamed, and its stage is computed again.

        Args:
            name: the name of the stage, unique in the experiment.
            compute: computes the result, a dictionary of numbers and arrays.
        """
        self.progress.begin(name)
        path = self._path(name, ".stage")
        stored = self._read(path)
        if stored is None:
            began = time.perf_counter()
            arrays = {key: np.asarray(value) for key, value in compute().items()}
            stored = arrays, time.perf_counter() - began
            if self._writes:
                save(path, stored)
            self.progress.end(name, cached=False)
        else:
            self.progress.end(name, cached=True)
        result, seconds = stored
        self.seconds += float(result.get("seconds_of_fit", seconds))
        return result

    def fit(self, name: str, start: partial[Fit]) -> tuple[Fit, float]:
        """Run a fit as a stage, which resumes from its last checkpoint.

        Args:
            name: the name of the stage.
            start: `retrodict.fit` with its arguments, but for `checkpoint` and `progress`; with
                `num_steps` by name.

        Returns:
            The fit and its duration in seconds, compilation included. After an interruption, it is
            the sum over all attempts up to their last checkpoints.
        """
        checkpoint, clock = self._path(name, ".fit"), self._path(name, ".seconds")
        results: list[Fit] = []

        def resume() -> Fit:
            began, before = time.perf_counter(), _read_seconds(clock, checkpoint)

            def report(step: int, _: float) -> None:
                if self._writes:
                    write_atomically(clock, as_json(before + time.perf_counter() - began))
                    self.progress.step(step, start.keywords["num_steps"])

            try:
                return start(checkpoint=checkpoint, progress=report)
            except ValueError as error:  # damaged, or of other data; includes CheckpointError
                if not self._set_aside(checkpoint, str(error)):
                    raise
                return resume()

        def compute() -> Mapping[str, Any]:
            result = resume()
            results.append(result)
            if result.status != "finished":
                reason = f" {result.reason}" if result.reason else ""
                self.progress.say(
                    f"{name}: the fit {result.status}; its best parameters are used.{reason}"
                )
            return {"seconds_of_fit": _read_seconds(clock, checkpoint)}

        if self._writes and not checkpoint.exists():
            self._path(name, ".stage").unlink(missing_ok=True)
        seconds = float(self.stage(name, compute)["seconds_of_fit"])
        return (results[0] if results else resume()), seconds

    def track(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the items, and report how many are complete."""
        for done, item in enumerate(items):
            yield item
            self.progress.step(done + 1, len(items))

    def write(self, name: str, content: bytes) -> None:
        """Write a result atomically."""
        if self._writes:
            write_atomically(self.path / name, content)

    @property
    def is_complete(self) -> bool:
        """Whether the experiment is complete with these settings."""
        return self._path("complete", "").exists()

    def complete(self) -> None:
        """Mark the experiment as complete with these settings."""
        if self._writes:
            write_atomically(self._path("complete", ""), b"")

    def _path(self, name: str, suffix: str) -> Path:
        words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
        return self.path / "stages" / f"{'-'.join(words)}.{self._fingerprint}{suffix}"

    def _read(self, path: Path) -> tuple[Stage, float] | None:
        stored, damage = None, ""
        try:
            stored = load(path)
        except FileNotFoundError:
            pass
        except CheckpointError as error:
            damage = str(error)
        if broadcast_from_main(bool(damage)):
            self._set_aside(path, damage)
            return None
        if not broadcast_from_main(stored is not None):
            return None
        if stored is None:
            raise FileNotFoundError(
                f"{path} is visible to the main process and not to this one. Use a folder that all"
                " processes can read."
            )
        return stored

    def _set_aside(self, path: Path, why: str) -> bool:
        """Rename an unusable file and its previous version; return whether there was one."""
        paths = [p for p in (path, path.with_name(path.name + ".previous")) if p.exists()]
        some = bool(broadcast_from_main(len(paths)))
        if self._writes:
            for each in paths:
                os.replace(each, each.with_name(each.name + ".damaged"))
        wait_for_processes(f"{path.name} is set aside")
        if some:
            self.progress.say(
                f"{path} cannot be used ({why}) It was set aside as {path.name}.damaged, and its"
                " stage is computed again; all other stages are kept."
            )
        return some


def _prepare(path: Path) -> None:
    """Create the folder, and remove partial files of killed processes."""
    ensure_folder(path)
    ensure_folder(path / "stages")
    for orphan in (*path.glob(".*.partial"), *(path / "stages").glob(".*.partial")):
        orphan.unlink(missing_ok=True)


def _read_seconds(clock: Path, checkpoint: Path) -> float:
    """Return the duration up to a checkpoint in seconds."""
    if not checkpoint.exists():
        return 0.0
    try:
        return float(json.loads(clock.read_text()))
    except (FileNotFoundError, ValueError):
        return 0.0
