"""Command-line options and double precision, shared by the examples."""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax

from retrodict import runs


def print_parameters(run: runs.Run, digits: int) -> None:
    """Print the learned parameters, with standard errors where they are available."""
    for name, parameter in run.record["results"]["parameters"].items():
        if not parameter["learned"]:
            continue
        error = f" ± {parameter['error']:.{digits}f}" if "error" in parameter else ""
        if "edge" in parameter:
            error = f", at the edge of {parameter['edge']}: no interval"
        print(f"{name}: {parameter['value']:.{digits}f}{error}")


def command(main: Callable[[Path, bool], None], description: str | None) -> None:
    """Run an example with the options of the command line."""
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--quick", action="store_true", help="use fewer rows and steps")
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
