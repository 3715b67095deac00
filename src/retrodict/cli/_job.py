"""Distributed jobs: joining the other processes, and ending when one of them is lost."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

import retrodict as rd
from retrodict._interface import UserError
from retrodict.cli._errors import INTERRUPTED, LOST, MISTAKE

WAIT_SECONDS = 300
"""How long a process waits for the others when a job starts."""

PATIENCE_SECONDS = 10
"""How long it waits without a message."""

Distributed = Annotated[
    bool,
    typer.Option("--distributed", help="Join the other processes of a SLURM or Open MPI job."),
]
Coordinator = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Without such a job: the address of process 0."),
]
NumProcesses = Annotated[
    int | None, typer.Option(min=1, help="Without such a job: the number of processes.")
]
ProcessId = Annotated[
    int | None, typer.Option(min=0, help="Without such a job: the number of this process, from 0.")
]


def join(
    distributed: bool, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> bool:
    """Join the other processes if there are any; return whether this is the main process.

    Raises:
        UserError: if there is no job, or if addresses were given without `--distributed`.
    """
    address = (coordinator, num_processes, process_id)
    if not distributed:
        if address != (None, None, None):
            raise UserError(
                "--coordinator, --num-processes and --process-id need --distributed beside them"
            )
        return True
    if None in address and address != (None, None, None):
        raise UserError("pass --coordinator, --num-processes and --process-id together, or none")
    # Not above: other commands and --help do not need JAX.
    import jax
    from jax.experimental import multihost_utils

    if hasattr(jax.config, "jax_enable_preemption_service"):
        # It would wait for a later signal when the job is terminated; there are checkpoints.
        jax.config.update("jax_enable_preemption_service", False)
    with _off_standard_output(), _within_time(coordinator or "the address of the job"):
        try:
            # JAX would abort the process with its own trace, so it waits for longer.
            patience = WAIT_SECONDS + 60
            rd.distributed.initialise(coordinator, num_processes, process_id, wait_seconds=patience)
        except ValueError as error:
            if coordinator is not None:
                raise
            raise UserError(
                "no job of SLURM or Open MPI was found: start the command with srun or mpirun, or"
                " pass --coordinator HOST:PORT, --num-processes N and --process-id I"
            ) from error
        multihost_utils.sync_global_devices("all processes have joined")
    is_main = jax.process_index() == 0
    if is_main:
        sys.stderr.write(
            f"retrodict: {jax.process_count()} processes with {jax.device_count()} devices; if one"
            " is lost all end, and the same command, with any number of processes, continues from"
            " the last checkpoint\n"
        )
    return is_main


@contextmanager
def _within_time(place: str) -> Iterator[None]:
    """End the process with one line if it waits too long for the others, or at Ctrl-C.

    JAX waits outside Python, where no exception can be raised.

    Args:
        place: the meeting point of the processes, in words.
    """

    def report() -> None:
        waiting = f"waiting for the other processes at {place}, up to {WAIT_SECONDS} seconds"
        print(f"retrodict: {waiting}", file=sys.stderr, flush=True)

    def give_up() -> None:
        print(
            f"retrodict: error: the other processes did not join at {place} within {WAIT_SECONDS}"
            " seconds; check --coordinator, and that all processes, including process 0, were"
            " started",
            file=sys.stderr,
            flush=True,
        )
        os._exit(MISTAKE)

    timers = [threading.Timer(PATIENCE_SECONDS, report), threading.Timer(WAIT_SECONDS, give_up)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        if before is not None:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _off_standard_output() -> Iterator[None]:
    """Redirect prints of libraries to standard error: Gloo reports its connections."""
    if sys.stdout is not None:
        sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


@contextmanager
def end_together() -> Iterator[None]:
    """End a process that fails without waiting for the others.

    JAX would wait for them when Python ends, and they may wait for a result of this process. The
    loss of another process is reported in one line; other errors are raised.
    """
    try:
        yield
    except rd.distributed.ProcessLostError as error:
        print(f"\nretrodict: error: {error}", file=sys.stderr, flush=True)
        os._exit(LOST)
    except BaseException as error:
        import jax

        if jax.distributed.is_initialized():
            mistake = isinstance(error, ValueError | FloatingPointError)
            code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
            atexit.register(_leave, MISTAKE if mistake else code)
        raise


def _leave(code: int) -> None:
    """End the process before JAX would wait for the others."""
    if sys.stdout is not None:
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
