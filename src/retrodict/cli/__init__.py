"""The command line: parse, call, print. `main` is what the console script calls."""

import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

EXTRAS = {"matplotlib", "rich", "typer"}
"""What the command line needs beyond the library: the extra `cli`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 if all went well, 2 after a mistake of the user.

    Args:
        arguments: what stands after the program's name; those of the process if left out.
    """
    _open_standard_files()
    sys.unraisablehook = interrupt_again
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
    sys.exit(code)


def interrupt_again(lost: Any) -> None:
    """Repeat an interrupt that was raised where Python ignores exceptions; report other ones.

    The interrupt of Ctrl-C is raised wherever the program happens to be, also in a callback of the
    garbage collector, from which nothing propagates: the command would go on.

    Args:
        lost: the argument of `sys.unraisablehook`.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # Later, since the callback has not returned yet.
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


def _open_standard_files() -> None:
    """Open those of the standard files that are closed, so that no file of a run takes their place.

    Libraries write messages to the second descriptor whatever it is.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
