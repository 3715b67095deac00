"""Time several tasks in turn: prepare all, compare their answers, then time them in rounds."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from measure import LONG_S, Record, Task, Worker, WorkerError

AGREEMENT = 1e-6
"""The largest difference of answers that are timed, relative to the largest entry above 1."""

ROUNDS, REPETITIONS, ROUND_S = 3, 30, 2.0
PREPARE_S, REPEAT_S = 240.0, 60.0
"""Timeouts of the first two calls, and of a round."""


def race(tasks: Sequence[Task]) -> list[Record]:
    """Time all tasks in turn; the answer of the first one is the reference.

    A failure is recorded and does not stop the others. Answers are compared between tasks that
    differ in the library alone.
    """
    records = [Record(task) for task in tasks]
    with ExitStack() as stack:
        workers: dict[int, Worker] = {}
        reference: dict[str, Any] = {}
        for index, record in enumerate(records):
            worker = stack.enter_context(Worker(record.task))
            answer = _prepare(worker, record)
            if answer is None:
                continue
            if index == 0:
                reference = answer
            elif replace(record.task, library=tasks[0].library) == tasks[0] and reference:
                record.difference = _difference(reference, answer)
                if not record.difference <= AGREEMENT:  # NaN fails too
                    record.failure = f"disagrees by {record.difference:.1e}"
                    continue
            if record.times_s[0][0] < LONG_S:
                workers[index] = worker
        for _ in range(ROUNDS):
            for index in list(workers):
                try:
                    times = workers[index].repeat(REPETITIONS, ROUND_S, REPEAT_S)
                    records[index].times_s.append(times)
                except WorkerError as error:
                    records[index].failure = str(error)
                    del workers[index]
    return records


def _prepare(worker: Worker, record: Record) -> dict[str, Any] | None:
    """Wait for the first two calls of a worker; return its answer, `None` if it failed."""
    try:
        ready = worker.answer(PREPARE_S)
    except WorkerError as error:
        record.failure = str(error)
        return None
    record.first_s, record.times_s = ready["first_s"], [[ready["second_s"]]]
    return ready["answer"]


def _difference(reference: dict[str, Any], answer: dict[str, Any]) -> float:
    """Return the largest difference, relative to the largest entry if that is above 1."""
    worst = 0.0
    for name, expected in reference.items():
        a, b = np.asarray(expected), np.asarray(answer.get(name))
        if a.shape != b.shape:
            return float("nan")
        worst = max(worst, float(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(a))))))
    return worst
