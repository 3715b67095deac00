"""One measurement per subprocess: tasks, answers and failures.

A worker prepares its call, returns one answer, and then repeats the call on request. Several
libraries can thus take turns, each in a separate process that compiles once. This module does not
import JAX: the waiting process must stay small and idle.
"""

import json
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
from typing import Any, Self

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Task:
    """Measurement of one worker. All arrays are float64, on the CPU."""

    library: str
    what: str  # "smoother" or "gradient"
    state_dim: int
    obs_dim: int
    num_times: int
    num_series: int = 1  # more than one: under vmap
    missing: float = 0.0  # the share of entries that are masked
    parallel: bool = False
    cores: int = 2
    xla_flags: str = ""
    memory: bool = False  # also measure resident memory


@dataclass
class Record:
    """Result of one task."""

    label: str
    task: Task
    compile_s: float | None = None
    times_s: list[list[float]] = field(default_factory=list)  # one list a round
    difference: float | None = None  # from the reference's answer
    target: float | None = None  # how many times slower than the reference it should be
    ratio: float | None = None  # and is
    failure: str | None = None
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def best_s(self) -> float | None:
        """Return the smallest time of all rounds."""
        return min(map(min, self.times_s)) if self.times_s else None

    @property
    def median_s(self) -> float | None:
        """Return the median over all repetitions of all rounds."""
        return statistics.median(sum(self.times_s, [])) if self.times_s else None

    def as_json(self) -> dict[str, Any]:
        """Return everything except the single repetitions."""
        return {
            "label": self.label,
            "task": asdict(self.task),
            "best_s": self.best_s,
            "median_s": self.median_s,
            "best_of_rounds_s": [min(times) for times in self.times_s],
            "repetitions": sum(map(len, self.times_s)),
            **{
                name: getattr(self, name)
                for name in ("compile_s", "difference", "target", "ratio", "failure", "facts")
            },
        }


class WorkerError(Exception):
    """Timeout or failure of a worker."""


class Worker:
    """Subprocess that prepares one task and repeats it on request."""

    def __init__(self, task: Task):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(task),
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

    def repeat(self, repetitions: int, timeout_s: float) -> list[float]:
        """Return the seconds of each repetition of the call."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(f"{repetitions}\n")
            stdin.flush()
        except OSError:
            raise WorkerError(self._last_error()) from None
        return self.answer(timeout_s)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

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


def time_calls(call: Callable[[], object], repetitions: int) -> list[float]:
    """Return the seconds of several calls, after one call that is not counted."""
    call()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _environment(task: Task) -> dict[str, str]:
    """Return the environment of the parent, without variables that affect a measurement."""
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    environment.update(JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu", XLA_FLAGS=task.xla_flags)
    return environment
