"""Time several tasks in turn: prepare all, compare their answers, then time them in rounds."""

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from measure import Record, Task, Worker, WorkerError

AGREEMENT = 1e-6
PREPARE_S, ROUND_S = 120.0, 120.0


@dataclass(frozen=True)
class Effort:
    """Numbers of repetitions of a call."""

    rounds: int = 3
    repetitions: int = 30


@dataclass(frozen=True)
class Entrant:
    """One task of a comparison; the first one is the reference of answers and ratios."""

    label: str
    task: Task
    target: float | None = None
    compared: bool = field(default=True)  # false if its data, and so its answer, are others


def race(title: str, entrants: list[Entrant], effort: Effort) -> list[Record]:
    """Time all entrants in turn; a failure is recorded in its row and does not stop the others."""
    records = [Record(each.label, each.task, target=each.target) for each in entrants]
    with ExitStack() as stack:
        workers: dict[int, Worker] = {}
        reference: dict[str, Any] | None = None
        for index, (entrant, record) in enumerate(zip(entrants, records, strict=True)):
            worker = stack.enter_context(Worker(entrant.task))
            answer = _prepare(worker, record, title)
            if answer is None:
                continue
            if entrant.compared and reference is not None:
                record.difference = _difference(reference, answer)
                if not record.difference <= AGREEMENT:  # NaN fails too
                    record.failure = f"disagrees by {record.difference:.1e}: not timed"
                    continue
            if index == 0:
                reference = answer
            workers[index] = worker
        for _ in range(effort.rounds):
            for index in list(workers):
                try:
                    times = workers[index].repeat(effort.repetitions, ROUND_S)
                    records[index].times_s.append(times)
                except WorkerError as error:
                    records[index].failure = str(error)
                    del workers[index]
    best = records[0].best_s
    for record in records:
        if best is not None and record.best_s is not None:
            record.ratio = record.best_s / best
    return records


def _prepare(worker: Worker, record: Record, title: str) -> dict[str, Any] | None:
    start = time.perf_counter()
    try:
        ready = worker.answer(PREPARE_S)
    except WorkerError as error:
        record.failure = str(error)
        print(f"  {title}: {record.label}: {error}", flush=True)
        return None
    spent = time.perf_counter() - start
    print(f"  {title}: {record.label} ready after {spent:.1f} s", flush=True)
    record.compile_s, record.facts = ready["compile_s"], ready["facts"]
    return ready["answer"]


def _difference(reference: dict[str, Any], answer: dict[str, Any]) -> float:
    """Return the largest difference, relative to the largest entry if that is above 1."""
    worst = 0.0
    for name, expected in reference.items():
        a, b = np.asarray(expected), np.asarray(answer[name])
        if a.shape != b.shape:
            return float("nan")
        worst = max(worst, float(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(a))))))
    return worst
