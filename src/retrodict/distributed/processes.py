"""Several processes that run one program, by `jax.distributed`."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

HEARTBEAT_SECONDS = 60
"""After how long a process that is silent counts as lost."""

WAIT_SECONDS = 300
"""How long a process waits for the others when they are joined."""

RUNTIME_ERROR = re.compile("(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED):")
"""What messages of XLA's runtime begin with; their Python type depends on the collective."""


class ProcessLostError(RuntimeError):
    """The work of several processes that could not go on, since one of them has ended.

    What remains of the job cannot be mended: end the process, and start the same program again,
    with as many processes as there are. A process that ends by itself waits for the lost one until
    its heartbeat is missed; `os._exit` does not wait.
    """


def initialise(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    wait_seconds: int = WAIT_SECONDS,
) -> None:
    """Makes one program of several processes, on one machine or many.

    To be called by each of them, before anything is computed. Then `fit` and all that takes
    `mesh="all"` runs on the devices of all processes. Within a job of SLURM or Open MPI everything
    is found; elsewhere all three arguments are needed. A process of which nothing is heard for some
    time ends the others.

    Args:
        coordinator: `"host:port"`, where process 0 can be reached by the others.
        num_processes: how many processes there are.
        process_id: which of them this is, from 0.
        heartbeat_seconds: after how many seconds of silence a process counts as lost.
        wait_seconds: how many seconds to wait until all processes have come; then JAX aborts this
            one with a message of its own.

    Raises:
        ValueError: if only some of the arguments are given, or none, and there is no such job; or
            if process 0 cannot listen at the address.
        RuntimeError: if JAX has computed something already.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise ValueError(
            "initialise expects coordinator, num_processes and process_id together, or"
            f" none of them in a job of SLURM or Open MPI, got {given}."
        )
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"coordinator must be host:port, got {coordinator!r}.")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=wait_seconds,
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except RuntimeError as error:
        if not RUNTIME_ERROR.match(str(error)):
            raise
        raise ValueError(
            f"Process {process_id} cannot use {coordinator or 'the address of the job'}: {error}."
            " Choose another port if it is in use."
        ) from error
    except ValueError as error:
        if coordinator is not None:
            raise
        raise ValueError(
            "No job of SLURM or Open MPI was found: start the processes by srun or mpirun, or give"
            " coordinator, num_processes and process_id."
        ) from error


def is_main_process() -> bool:
    """Whether this process is the one that writes files and speaks."""
    return jax.process_index() == 0


def wait_for_processes(name: str) -> None:
    """Returns once all processes have come to this point.

    Args:
        name: the point, the same in all processes.

    Raises:
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() > 1:
        with together():
            multihost_utils.sync_global_devices(name)


def broadcast_from_main(value: int) -> int:
    """What the main process says, in every process; all of them must ask.

    What lies in a folder may be seen by one process and not yet by another: one decides for all.

    Raises:
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() == 1:
        return value
    with together():
        return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def all_gather_object(value: Any) -> list[Any]:
    """What each process says, in their order, in every process; all of them must call it.

    Args:
        value: anything that JSON can hold; numbers keep all their digits.

    Raises:
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() == 1:
        return [value]
    # Text, since an array of 64 bits would be cut to 32 where JAX is not told to keep them.
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with together():
        sizes = multihost_utils.process_allgather(np.array([own.size], np.int32)).ravel()
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: own.size] = own
        every = np.asarray(multihost_utils.process_allgather(padded))
    rows = zip(every, sizes, strict=True)
    return [json.loads(row[:size].tobytes()) for row, size in rows]


def by_all(compute: Callable[[], T]) -> T:
    """What each process finds by itself; all of them must call it.

    If one of them fails, all of them do: the others would wait for it for ever.

    Raises:
        ValueError: if another process has failed, with its number and its message.
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() == 1:
        return compute()
    try:
        found = compute()
    except Exception as error:
        all_gather_object(str(error))
        raise
    for who, failure in enumerate(all_gather_object(None)):
        if failure is not None:
            raise ValueError(f"Process {who}: {failure}")
    return found


def sum_over_processes(array: np.ndarray) -> np.ndarray:
    """The sum of an array of each process, in every process; all of them must call it.

    Raises:
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() == 1:
        return array
    said = all_gather_object(np.asarray(array, np.float64).tolist())
    return np.sum([np.asarray(own, np.float64) for own in said], axis=0)


@contextmanager
def together() -> Iterator[None]:
    """Says so if what is computed with other processes fails since one of them has ended.

    Raises:
        ProcessLostError: in place of the error of a collective.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if jax.process_count() == 1 or not RUNTIME_ERROR.match(str(error)):
            raise
        raise ProcessLostError(
            f"Process {jax.process_index()} of {jax.process_count()} could not go on with the"
            " others, most likely since one of them has ended. Start the job again, with any number"
            " of processes: what was kept in a checkpoint is not lost."
            f" JAX says: {' '.join(str(error).split())[:300]}"
        ) from error
