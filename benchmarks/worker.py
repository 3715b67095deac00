"""Subprocess of one task: prepare it, answer, then repeat it on request.

`measure.Worker` starts it with a task as JSON. It is not meant to be run by hand.
"""

import json
import os
import sys
from importlib import import_module

from measure import Task, time_calls

CORES = 2
MODULES = {
    "smoother": "kalman",
    "gradient": "kalman",
    "linearised": "linearised",
    "paths": "smoothers",
    "training": "families",
    "inference": "families",
    "fit": "families",
    "command": "commands",
    "import": "commands",
}
"""The module that prepares each kind of task."""


def main() -> None:
    # Answers go through a stream of their own: libraries may print what they like.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    task = Task(**json.loads(sys.argv[1]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    # JAX counts the cores when it is imported, so not earlier.
    prepared = import_module(MODULES[task.what]).prepare(task)
    result = {name: _as_list(array) for name, array in prepared.answer.items()}
    answer({"first_s": prepared.first_s, "second_s": prepared.second_s, "answer": result})
    for line in sys.stdin:
        repetitions, seconds = line.split()
        answer(time_calls(prepared.call, int(repetitions), float(seconds)))


def _as_list(array: object) -> object:
    import numpy as np

    return np.asarray(array).tolist()


if __name__ == "__main__":
    main()
