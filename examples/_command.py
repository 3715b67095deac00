"""What the examples share: their options, and double precision."""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax

from retrodict import runs


def print_parameters(run: runs.Run, digits: int) -> None:
    """Prints what was learned, with standard errors where there are any."""
    for name, found in run.record["results"]["parameters"].items():
        if not found["learned"]:
            continue
        known = f" ± {found['error']:.{digits}f}" if "error" in found else ""
        if "edge" in found:
            known = f", at the edge of {found['edge']}: no interval"
        print(f"{name}: {found['value']:.{digits}f}{known}")


def command(main: Callable[[Path, bool], None], description: str | None) -> None:
    """Runs an example with the options of the command line."""
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--quick", action="store_true", help="less of everything, for a first look")
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
