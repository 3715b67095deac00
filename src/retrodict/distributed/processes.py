"""Several processes that run one program with `jax.distributed`."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

HEARTBEAT_SECONDS = 60
"""The number of seconds without a heartbeat after which a process is lost."""

WAIT_SECONDS = 300
"""The number of seconds to wait for the other processes at the start."""

RUNTIME_ERROR = re.compile("(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED):")
"""The start of messages of XLA's runtime, whose Python type depends on the collective."""


class ProcessLostError(RuntimeError):
    """A collective operation that failed because another process has ended.

    The job cannot recover: end the process, and start the program again with any number of
    processes. A process that exits normally waits for the lost one until its heartbeat is missed;
    `os._exit` does not wait.

    Example:
        >>> import os, tempfile, pandas as pd, retrodict as rd
        >>> frame = pd.DataFrame({"year": [1871, 1872], "flow": [1.0, 2.0]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame.to_csv(f"{folder}/nile.csv", index=False)
        ...     try:
        ...         table = rd.data.read_shared(f"{folder}/nile.csv")
        ...     except rd.distributed.ProcessLostError:
        ...         os._exit(1)  # the scheduler starts the job again
        >>> table.ys.shape
        (1, 2, 1)
    """


def initialise(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    wait_seconds: int = WAIT_SECONDS,
) -> None:
    """Connect several processes, on one machine or many, to one program.

    Each process must call it before any computation. Afterwards `fit`, and every function with
    `mesh="all"`, runs on the devices of all processes. Jobs of SLURM or Open MPI are detected;
    elsewhere all three arguments are required. A lost process ends the others.

    Example:
        >>> import os, retrodict as rd
        >>> if "SLURM_JOB_ID" in os.environ:  # a job starts this program once per process
        ...     rd.distributed.initialise()
        >>> rd.distributed.process_slice(100)  # the series that this process reads
        slice(0, 100, None)

    Args:
        coordinator: the address of process 0, `"host:port"`.
        num_processes: the number of processes.
        process_id: the index of this process, from 0.
        heartbeat_seconds: the number of seconds without a heartbeat after which a process is lost.
        wait_seconds: the number of seconds to wait for all processes, after which JAX aborts this
            one with its own message.

    Raises:
        ValueError: if only some of the arguments are given, or none outside of such a job; or if
            process 0 cannot listen at the address.
        RuntimeError: if JAX has computed something already.
    """
    arguments = (coordinator, num_processes, process_id)
    if None in arguments and arguments != (None, None, None):
        raise ValueError(
            "initialise expects coordinator, num_processes and process_id together, or"
            f" none of them in a job of SLURM or Open MPI, got {arguments}."
        )
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"coordinator must be host:port, got {coordinator!r}.")
    if coordinator is not None and process_id == 0:
        _check_port(coordinator)
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


def _check_port(coordinator: str) -> None:
    """Refuse a port in use: JAX may crash when it fails to listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(coordinator.rpartition(":")[2])))
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"Process 0 cannot use {coordinator}: {error}. Choose another port."
            ) from error


def is_main_process() -> bool:
    """Return whether this process writes files and messages."""
    return jax.process_index() == 0


def wait_for_processes(name: str) -> None:
    """Wait until all processes have reached this point.

    Args:
        name: the name of the point, the same in all processes.

    Raises:
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() > 1:
        with together():
            multihost_utils.sync_global_devices(name)


def broadcast_from_main(value: int) -> int:
    """Return the value of the main process in every process; all of them must call it.

    A file may be visible to one process and not yet to another: the main process decides.

    Raises:
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() == 1:
        return value
    with together():
        return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def all_gather_object(value: Any) -> list[Any]:
    """Return the values of all processes in every process; all of them must call it.

    Args:
        value: a JSON value; numbers keep all their digits.

    Raises:
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() == 1:
        return [value]
    # As text, since JAX truncates 64-bit arrays to 32 bits unless they are enabled.
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with together():
        sizes = multihost_utils.process_allgather(np.array([encoded.size], np.int32)).ravel()
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: encoded.size] = encoded
        every = np.asarray(multihost_utils.process_allgather(padded))
    rows = zip(every, sizes, strict=True)
    return [json.loads(row[:size].tobytes()) for row, size in rows]


def by_all(compute: Callable[[], T]) -> T:
    """Compute a value in each process; all of them must call it.

    If one process raises, all of them do. Otherwise the others would wait for it forever.

    Raises:
        ValueError: if another process has failed, with its number and its message.
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() == 1:
        return compute()
    try:
        value = compute()
    except Exception as error:
        all_gather_object(str(error))
        raise
    for who, failure in enumerate(all_gather_object(None)):
        if failure is not None:
            raise ValueError(f"Process {who}: {failure}")
    return value


def sum_over_processes(array: np.ndarray) -> np.ndarray:
    """Return the sum of the arrays of all processes in every process; all of them must call it.

    Raises:
        ProcessLostError: if one of them has ended.
    """
    if jax.process_count() == 1:
        return array
    arrays = all_gather_object(np.asarray(array, np.float64).tolist())
    return np.sum([np.asarray(each, np.float64) for each in arrays], axis=0)


@contextmanager
def together() -> Iterator[None]:
    """Raise `ProcessLostError` if a collective operation fails because a process has ended.

    Raises:
        ProcessLostError: in place of the error of a collective.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if jax.process_count() == 1 or not RUNTIME_ERROR.match(str(error)):
            raise
        raise ProcessLostError(
            f"Process {jax.process_index()} of {jax.process_count()} could not continue with the"
            " others, most likely because one of them has ended. Start the job again, with any"
            " number of processes: it resumes from its checkpoint."
            f" Message of JAX: {' '.join(str(error).split())[:300]}"
        ) from error
