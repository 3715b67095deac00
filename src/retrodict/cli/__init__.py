"""The command line: parse, call, print. `main` is what the console script calls."""

import io
import sys
from collections.abc import Sequence

EXTRAS = {"matplotlib", "rich", "typer"}
"""What the command line needs beyond the library: the extra `cli`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 if all went well, 2 after a mistake of the user.

    Args:
        arguments: what stands after the program's name; those of the process if left out.
    """
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
