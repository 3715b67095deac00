"""The folder of an experiment: what is finished is kept, what was killed goes on.

An experiment is a sequence of *stages*. The result of a stage is written whole or not at all as
soon as it is there, under a name that holds a fingerprint of the settings, and is read back instead
of being computed again. A fit within a stage goes on from its last checkpoint.
"""

import hashlib
import io
import json
import math
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

import retrodict as rd
from retrodict.experiments._files import make_writable, save_arrays, write_atomically

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

    Raises:
        OSError: if the folder cannot be made or written to.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], progress: Progress | None = None):
        self.path, self.progress = path, progress or Quiet()
        text = json.dumps(settings, sort_keys=True)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()[:12]
        make_writable(path)
        (path / "stages").mkdir(exist_ok=True)

    def stage(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Stage:
        """The result of a stage: read if it is there, computed and kept if not.

        A file that cannot be read is set aside, and its stage is computed again.

        Args:
            name: the stage, in words; each of an experiment has its own.
            compute: computes the result, a dictionary of numbers, strings and arrays.
        """
        self.progress.begin(name)
        place = self._place(name, ".npz")
        found = self._read(place)
        if found is None:
            found = {key: np.asarray(value) for key, value in compute().items()}
            save_arrays(place, found)
            self.progress.end(name, kept=False)
        else:
            self.progress.end(name, kept=True)
        return found

    def fit(
        self, name: str, key: Any, family: rd.AbstractFamily, model: Any, ys: Any, **options: Any
    ) -> tuple[rd.FitResult, float]:
        """A fit as a stage of its own, which goes on from its last checkpoint.

        Args:
            name: the stage, in words.
            key: a typed key.
            family: the family to start from.
            model: the model.
            ys: the series to fit to.
            **options: what else `retrodict.fit` takes.

        Returns:
            The fit, and the seconds that it took, compilation included; NaN if it went on from a
            checkpoint, since then nobody knows.
        """
        checkpoint = self._place(name, ".fit")
        found: list[rd.FitResult] = []
        num_steps = options.get("num_steps", 4000)

        def go_on() -> rd.FitResult:
            try:
                return rd.fit(
                    key,
                    family,
                    model,
                    ys,
                    checkpoint=checkpoint,
                    progress=lambda step, _: self.progress.step(step, num_steps),
                    **options,
                )
            except rd.CheckpointError as error:
                self._set_aside(checkpoint, str(error))
                return go_on()

        def compute() -> Mapping[str, Any]:
            begun, start = checkpoint.exists(), time.perf_counter()
            found.append(go_on())
            seconds = math.nan if begun else time.perf_counter() - start
            return {"seconds": seconds}

        seconds = float(self.stage(name, compute)["seconds"])
        return (found[0] if found else go_on()), seconds

    def track(self, items: Sequence[T]) -> Iterator[T]:
        """The items, one by one, telling how many are done."""
        for done, item in enumerate(items):
            yield item
            self.progress.step(done + 1, len(items))

    def write(self, name: str, content: bytes) -> None:
        """Writes a result whole or not at all."""
        write_atomically(self.path / name, content)

    def _place(self, name: str, suffix: str) -> Path:
        words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
        return self.path / "stages" / f"{'-'.join(words)}.{self._fingerprint}{suffix}"

    def _read(self, place: Path) -> Stage | None:
        try:
            content = place.read_bytes()
        except FileNotFoundError:
            return None
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            self._set_aside(place, str(error))
            return None

    def _set_aside(self, place: Path, why: str) -> None:
        # A fit keeps the checkpoint before the last one beside it, and came here without either.
        for damaged in (place, place.with_name(place.name + ".previous")):
            if damaged.exists():
                os.replace(damaged, damaged.with_name(damaged.name + ".damaged"))
        self.progress.say(
            f"{place} is damaged ({why}). It was set aside as {place.name}.damaged, and its"
            " stage is done again; all other stages are kept."
        )
