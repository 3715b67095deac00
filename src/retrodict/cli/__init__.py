"""The command line: parse, call, print. The console script calls `main`."""

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

EXTRAS = {"jinja2", "matplotlib", "rich", "typer"}
"""The packages of the extra `cli`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with one of the codes of `retrodict --help`.

    Args:
        arguments: the words after the program's name; those of the process by default.
    """
    _open_standard_files()
    sys.unraisablehook = interrupt_again
    # Imports and tracing create many objects that stay. Fewer collections save a tenth of the time,
    # and leave at most some ten megabytes of garbage.
    gc.set_threshold(300_000)
    try:
        # Here and not above, so that this module can be imported without the extras.
        from retrodict.cli._app import run

        if isinstance(sys.stdout, io.TextIOWrapper):
            # File names may hold bytes that are not UTF-8, and terminals lack characters.
            sys.stdout.reconfigure(errors="backslashreplace")
        code = run(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        sys.stderr.write(
            f"retrodict: error: the command line needs {missing}; install retrodict[cli]\n"
        )
        code = 1
    except KeyboardInterrupt:  # while JAX is being imported
        sys.stderr.write("retrodict: interrupted\n")
        code = 130
    # At exit Python looks for garbage in all that JAX has made, a tenth of the time of a command.
    gc.freeze()
    sys.exit(code)


def interrupt_again(lost: Any) -> None:
    """Repeat an interrupt that was raised where Python ignores exceptions; report others.

    Ctrl-C raises an exception wherever the program is, also in a callback of the garbage collector,
    from which exceptions do not propagate. The command would continue.

    Args:
        lost: the argument of `sys.unraisablehook`.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # Later, since the callback has not returned yet.
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


def _open_standard_files() -> None:
    """Open the standard files that are closed, so that files of a run do not get their numbers.

    Libraries write messages to descriptor 2, whichever file it is.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
