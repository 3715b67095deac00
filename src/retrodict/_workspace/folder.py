"""The folder of an experiment: what is finished is kept, what was killed goes on.

An experiment is a sequence of *stages*. The result of a stage is written whole or not at all as
soon as it is there, with checksums, under a name that holds a fingerprint of the settings, and is
read back instead of being computed again. A fit within a stage goes on from its last checkpoint.

Where several processes run one program, all of them go through all stages; the main process decides
what is done already, and it alone writes.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from retrodict._checkpoint import CheckpointError, load, save
from retrodict._families import AbstractFamily
from retrodict._learning import FitResult, fit
from retrodict._workspace.files import as_json, make_writable, write_atomically
from retrodict.distributed import broadcast_from_main, by_all, is_main_process, wait_for_processes

T = TypeVar("T")
Stage = dict[str, np.ndarray]
"""The result of a stage: arrays by name."""


@runtime_checkable
class Progress(Protocol):
    """Who is told how far an experiment is."""

    def begin(self, stage: str) -> None:
        """A stage begins."""

    def step(self, done: int, total: int) -> None:
        """So much of the present stage is done."""

    def end(self, stage: str, *, kept: bool) -> None:
        """A stage is done, or was found done."""

    def say(self, message: str) -> None:
        """Something that the user must know."""


class Quiet:
    """Tells nobody."""

    def begin(self, stage: str) -> None:
        """A stage begins."""

    def step(self, done: int, total: int) -> None:
        """So much of the present stage is done."""

    def end(self, stage: str, *, kept: bool) -> None:
        """A stage is done, or was found done."""

    def say(self, message: str) -> None:
        """Something that the user must know."""


class Folder:
    """Where an experiment keeps its stages and writes its results.

    Args:
        path: the folder; made if it does not exist.
        settings: what the results depend on; stages of other settings are left alone.
        progress: who is told of the stages.

    Attributes:
        seconds: how long the stages took that were asked for, in this run or in those before.

    Raises:
        OSError: if the folder cannot be made or written to.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], progress: Progress | None = None):
        self.path, self.progress = path, progress or Quiet()
        self.seconds = 0.0
        text = json.dumps(settings, sort_keys=True)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()[:12]
        self._writes = is_main_process()
        by_all(lambda: _prepare(path) if self._writes else None)

    def stage(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Stage:
        """The result of a stage: read if it is there, computed and kept if not.

        A file that cannot be read is set aside, and its stage is computed again.

        Args:
            name: the stage, in words; each of an experiment has its own.
            compute: computes the result, a dictionary of numbers and arrays.
        """
        self.progress.begin(name)
        place = self._place(name, ".stage")
        kept = self._read(place)
        if kept is None:
            began = time.perf_counter()
            arrays = {key: np.asarray(value) for key, value in compute().items()}
            kept = arrays, time.perf_counter() - began
            if self._writes:
                save(place, kept)
            self.progress.end(name, kept=False)
        else:
            self.progress.end(name, kept=True)
        found, seconds = kept
        self.seconds += float(found.get("seconds_of_fit", seconds))
        return found

    def fit(
        self,
        name: str,
        key: Any,
        family: AbstractFamily,
        model: Any,
        ys: Any,
        *,
        num_steps: int,
        **options: Any,
    ) -> tuple[FitResult, float]:
        """A fit as a stage of its own, which goes on from its last checkpoint.

        Args:
            name: the stage, in words.
            key: a typed key.
            family: the family to start from.
            model: the model.
            ys: the series to fit to.
            num_steps: how many steps to take.
            **options: what else `retrodict.fit` takes.

        Returns:
            The fit, and the seconds that it took, compilation included: of all attempts together,
            if it was interrupted, up to their last checkpoints.
        """
        checkpoint, clock = self._place(name, ".fit"), self._place(name, ".seconds")
        found: list[FitResult] = []

        def go_on() -> FitResult:
            began, before = time.perf_counter(), _read_seconds(clock, checkpoint)

            def tell(step: int, _: float) -> None:
                if not self._writes:
                    return
                write_atomically(clock, as_json(before + time.perf_counter() - began))
                self.progress.step(step, num_steps)

            try:
                return fit(
                    key,
                    family,
                    model,
                    ys,
                    num_steps=num_steps,
                    checkpoint=checkpoint,
                    progress=tell,
                    **options,
                )
            except ValueError as error:  # damaged, or of other data: CheckpointError is one
                if not self._set_aside(checkpoint, str(error)):
                    raise
                return go_on()

        def compute() -> Mapping[str, Any]:
            found.append(go_on())
            if found[0].status != "finished":
                reason = f" {found[0].reason}" if found[0].reason else ""
                self.progress.say(
                    f"{name}: the fit {found[0].status}; its best parameters are used.{reason}"
                )
            return {"seconds_of_fit": _read_seconds(clock, checkpoint)}

        if self._writes and not checkpoint.exists():
            self._place(name, ".stage").unlink(missing_ok=True)
        seconds = float(self.stage(name, compute)["seconds_of_fit"])
        return (found[0] if found else go_on()), seconds

    def track(self, items: Sequence[T]) -> Iterator[T]:
        """The items, one by one, telling how many are done."""
        for done, item in enumerate(items):
            yield item
            self.progress.step(done + 1, len(items))

    def write(self, name: str, content: bytes) -> None:
        """Writes a result whole or not at all."""
        if self._writes:
            write_atomically(self.path / name, content)

    @property
    def is_complete(self) -> bool:
        """Whether the experiment was run to its end with these settings."""
        return self._place("complete", "").exists()

    def complete(self) -> None:
        """Notes that the experiment was run to its end with these settings."""
        if self._writes:
            write_atomically(self._place("complete", ""), b"")

    def _place(self, name: str, suffix: str) -> Path:
        words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
        return self.path / "stages" / f"{'-'.join(words)}.{self._fingerprint}{suffix}"

    def _read(self, place: Path) -> tuple[Stage, float] | None:
        found, damage = None, ""
        try:
            found = load(place)
        except FileNotFoundError:
            pass
        except CheckpointError as error:
            damage = str(error)
        if broadcast_from_main(bool(damage)):
            self._set_aside(place, damage)
            return None
        if not broadcast_from_main(found is not None):
            return None
        if found is None:
            raise FileNotFoundError(
                f"{place} is seen by the main process and not by this one: the folder must be one"
                " that all processes see."
            )
        return found

    def _set_aside(self, place: Path, why: str) -> bool:
        """Renames a file that is of no use, and the one before it that a fit keeps; whether any."""
        found = [p for p in (place, place.with_name(place.name + ".previous")) if p.exists()]
        some = bool(broadcast_from_main(len(found)))
        if self._writes:
            for path in found:
                os.replace(path, path.with_name(path.name + ".damaged"))
        wait_for_processes(f"{place.name} is set aside")
        if some:
            self.progress.say(
                f"{place} cannot be used ({why}) It was set aside as {place.name}.damaged, and its"
                " stage is done again; all other stages are kept."
            )
        return some


def _prepare(path: Path) -> None:
    """Makes the folder, without what a killed process had begun to write."""
    make_writable(path)
    make_writable(path / "stages")
    for orphan in (*path.glob(".*.partial"), *(path / "stages").glob(".*.partial")):
        orphan.unlink(missing_ok=True)


def _read_seconds(clock: Path, checkpoint: Path) -> float:
    """The seconds that were spent up to a checkpoint."""
    if not checkpoint.exists():
        return 0.0
    try:
        return float(json.loads(clock.read_text()))
    except (FileNotFoundError, ValueError):
        return 0.0
