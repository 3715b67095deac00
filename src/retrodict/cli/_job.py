"""A command that several processes run together, and how it ends if one of them is lost."""

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
from retrodict.cli._errors import INTERRUPTED, MISTAKE, UserError

LOST = 75
"""The exit code of a process whose job has lost another: that of sysexits.h for "try again"."""

WAIT_SECONDS = 300
"""How long a process waits for the others when a job starts."""

PATIENCE_SECONDS = 10
"""After how long it says that it waits."""

Distributed = Annotated[
    bool,
    typer.Option("--distributed", help="Work with the other processes of a SLURM or Open MPI job."),
]
Coordinator = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Without such a job: where process 0 can be reached."),
]
NumProcesses = Annotated[
    int | None, typer.Option(min=1, help="Without such a job: how many processes there are.")
]
ProcessId = Annotated[
    int | None, typer.Option(min=0, help="Without such a job: which process this is, from 0.")
]


def join(
    distributed: bool, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> bool:
    """Joins the other processes if there are any; whether this is the one that speaks.

    Raises:
        UserError: if a job was asked for and none was found, or addresses were given without one.
    """
    given = (coordinator, num_processes, process_id)
    if not distributed:
        if given != (None, None, None):
            raise UserError(
                "--coordinator, --num-processes and --process-id need --distributed beside them"
            )
        return True
    if None in given and given != (None, None, None):
        raise UserError("give --coordinator, --num-processes and --process-id together, or none")
    # Other commands, and --help, do without JAX.
    import jax
    from jax.experimental import multihost_utils

    if hasattr(jax.config, "jax_enable_preemption_service"):
        # It would wait for a later signal when the job is told to end, and there is a checkpoint.
        jax.config.update("jax_enable_preemption_service", False)
    with _off_standard_output(), _within_time(coordinator or "the address of the job"):
        try:
            # JAX would abort the process with a trace of its own, so it waits for longer.
            patience = WAIT_SECONDS + 60
            rd.distributed.initialise(coordinator, num_processes, process_id, wait_seconds=patience)
        except ValueError as error:
            if coordinator is not None:
                raise
            raise UserError(
                "no job of SLURM or Open MPI was found: start the command by srun or mpirun, or"
                " give --coordinator HOST:PORT, --num-processes N and --process-id I"
            ) from error
        multihost_utils.sync_global_devices("all processes have joined")
    speaks = jax.process_index() == 0
    if speaks:
        sys.stderr.write(
            f"retrodict: {jax.process_count()} processes with {jax.device_count()} devices; if one"
            " is lost all end, and the same command, with any number of processes, goes on from the"
            " last checkpoint\n"
        )
    return speaks


@contextmanager
def _within_time(place: str) -> Iterator[None]:
    """End the process with one line if it waits too long for the others, or at Ctrl-C.

    JAX waits outside Python, where nothing can be raised.

    Args:
        place: where the processes meet, in words.
    """

    def say() -> None:
        sys.stderr.write(
            f"retrodict: waiting for the other processes at {place}, up to {WAIT_SECONDS} seconds\n"
        )
        sys.stderr.flush()

    def give_up() -> None:
        sys.stderr.write(
            f"retrodict: error: the other processes did not come to {place} within {WAIT_SECONDS}"
            " seconds; check --coordinator, and that all processes, process 0 among them, were"
            " started\n"
        )
        sys.stderr.flush()
        os._exit(MISTAKE)

    timers = [threading.Timer(PATIENCE_SECONDS, say), threading.Timer(WAIT_SECONDS, give_up)]
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
    """Sends what libraries print to standard error: Gloo says there whom it has reached."""
    if sys.stdout is not None:
        sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def ended_together() -> Iterator[None]:
    """Ends a process that cannot go on without waiting for the others.

    JAX would wait for them when Python ends, and they might wait for what this one was to compute.
    If another was lost one line says so; other errors are said as always.
    """
    try:
        yield
    except rd.distributed.ProcessLostError as error:
        sys.stderr.write(f"\nretrodict: error: {error}\n")
        sys.stderr.flush()
        os._exit(LOST)
    except BaseException as error:
        import jax

        if jax.distributed.is_initialized():
            code = {UserError: MISTAKE, KeyboardInterrupt: INTERRUPTED}.get(type(error), 1)
            atexit.register(_leave, code)
        raise


def _leave(code: int) -> None:
    """Ends the process before JAX would wait for the others."""
    if sys.stdout is not None:
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
