"""One measurement per subprocess: tasks, answers and failures.

A worker prepares its call, returns one answer, and then repeats the call on request. Several
libraries can thus take turns, each in a separate process that compiles once. This module does not
import JAX: the waiting process must stay small and idle.
"""

import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

WORKER = Path(__file__).with_name("worker.py")
LONG_S = 5.0
"""Calls that take longer are timed once: what starts a process or compiles is noise to them."""


@dataclass(frozen=True)
class Task:
    """Measurement of one worker. All arrays are float64, on two cores."""

    library: str  # "floor" is a lower limit of the work, in place of a peer
    what: str  # a key of `worker.MODULES`
    state_dim: int = 1
    obs_dim: int = 1
    num_times: int = 1
    num_series: int = 1
    missing: float = 0.0  # the share of entries that are masked
    varying: bool = False  # whether the transition differs at every time
    option: str = ""  # the family, sampler, linearisation or command


class Prepared(NamedTuple):
    """Call that is ready to be timed, with its first two times and its answer, for comparison."""

    call: Callable[[], object]
    first_s: float
    second_s: float
    answer: dict[str, Any]


@dataclass
class Record:
    """Result of one task."""

    task: Task
    first_s: float | None = None
    times_s: list[list[float]] = field(default_factory=list)  # the second call, then the rounds
    difference: float | None = None  # from the answer of retrodict
    failure: str | None = None

    @property
    def best_s(self) -> float | None:
        """Return the smallest time of all rounds, if nothing failed."""
        return min(map(min, self.times_s)) if self.times_s and not self.failure else None

    @property
    def compile_s(self) -> float | None:
        """Return the seconds by which the first call was longer than the second."""
        return max(self.first_s - self.times_s[0][0], 0.0) if self.first_s is not None else None

    def as_json(self) -> dict[str, Any]:
        """Return everything except the single repetitions."""
        return {
            "task": asdict(self.task),
            "best_s": self.best_s,
            "median_s": statistics.median(sum(self.times_s, [])) if self.times_s else None,
            "best_of_rounds_s": [min(times) for times in self.times_s],
            "repetitions": sum(map(len, self.times_s)),
            "first_s": self.first_s,
            "compile_s": self.compile_s,
            "difference": self.difference,
            "failure": self.failure,
        }


def prepared(
    call: Callable[[], Any],
    read: Callable[[Any], dict[str, Any]] = lambda result: {},
    compiles: bool = True,
) -> Prepared:
    """Call twice, and read the answer of the first result.

    A long first call that compiles nothing counts as the second one too.
    """
    start = time.perf_counter()
    result = call()
    first = second = time.perf_counter() - start
    if compiles or first < LONG_S:
        (second,) = time_calls(call, 1, warm=False)
    return Prepared(call, first, second, read(result))


def time_calls(
    call: Callable[[], object], repetitions: int, seconds: float = math.inf, warm: bool = True
) -> list[float]:
    """Return the seconds of several calls, at least one, after one that is not counted."""
    if warm:
        call()
    times: list[float] = []
    while not times or (len(times) < repetitions and sum(times) < seconds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


class WorkerError(Exception):
    """Timeout or failure of a worker."""


class Worker:
    """Subprocess that prepares one task and repeats it on request."""

    def __init__(self, task: Task):
        self._errors = tempfile.TemporaryFile("w+")
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=self._folder.name,
            env=_environment(),
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, timeout_s: float) -> Any:
        """Return the worker's next answer.

        Raises:
            WorkerError: if there is no answer in time.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise WorkerError(f"timed out after {timeout_s:g} s") from None
        if line is None:
            raise WorkerError(self._last_error())
        return json.loads(line)

    def repeat(self, repetitions: int, seconds: float, timeout_s: float) -> list[float]:
        """Return the seconds of each repetition of the call."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(f"{repetitions} {seconds}\n")
            stdin.flush()
        except OSError:
            raise WorkerError(self._last_error()) from None
        return self.answer(timeout_s)

    def close(self) -> None:
        """End the process, and remove the folder that it ran in."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _last_error(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"exited with status {status}"


def _environment() -> dict[str, str]:
    """Return the environment of the parent, without variables that affect a measurement."""
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
    environment.update(JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu", XLA_FLAGS="")
    return environment
