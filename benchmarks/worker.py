"""Subprocess of one task: prepare it, answer, then repeat it on request.

`measure.Worker` starts it with a task as JSON. It is not meant to be run by hand.
"""

import json
import os
import sys

from measure import Task, time_calls


def main() -> None:
    # Answers go through a stream of their own: libraries may print what they like.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    task = Task(**json.loads(sys.argv[1]))
    _pin(task.cores)
    # JAX counts the cores when it is imported, so not earlier.
    from kalman import prepare

    prepared = prepare(task)
    answer({"compile_s": prepared.compile_s, "answer": prepared.answer, "facts": prepared.facts})
    for line in sys.stdin:
        answer(time_calls(prepared.call, int(line)))


def _pin(cores: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


if __name__ == "__main__":
    main()
