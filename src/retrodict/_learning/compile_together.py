"""Compilation of several programs at the same time."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any


def compile_together(*programs: tuple[Any, tuple]) -> None:
    """Compile several programs at the same time, so that calls find them compiled.

    Args:
        *programs: pairs of a function under `eqx.filter_jit` and its arguments.
    """
    lowered = [function.lower(*arguments) for function, arguments in programs]
    with ThreadPoolExecutor(len(lowered)) as pool:
        # Compilation does not hold the lock of the interpreter.
        list(pool.map(lambda each: each.compile(), lowered))
