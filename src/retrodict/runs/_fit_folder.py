"""The folder of a fit before it is finished: its settings, its lock, and what is refused."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict._workspace import as_json, hold_folder, make_writable, write_atomically
from retrodict.runs._folder import RECORD, REPORT, RunError, as_plain, read_record

SETTINGS = "settings.json"
"""The settings of an unfinished run."""


def fit_settings(
    table: data.Table | data.SharedTable,
    spec: models.ModelSpec,
    family: str,
    num_steps: int,
    seed: int,
) -> dict[str, Any]:
    """Return everything that the result of a fit depends on."""
    settings = {
        "model": spec.to_dict(),
        "layout": table.layout,
        "data": table.summary.fingerprint,
        "family": family,
        "num_steps": num_steps,
        "seed": seed,
    }
    return settings if spec.given is None else settings | {"given": _fingerprint(spec.given)}


def _fingerprint(model: rd.StateSpaceModel) -> str:
    """Return a fingerprint of a model: its arrays, its structure and the code of its functions."""

    def encode(text: str) -> bytes:  # without memory addresses, which differ between processes
        return re.sub(r" at 0x[0-9a-f]+", "", text).encode()

    leaves, structure = jax.tree.flatten(model)
    digest = hashlib.sha256(encode(str(structure)))
    for leaf in leaves:
        if eqx.is_array_like(leaf):
            digest.update(np.asarray(leaf).tobytes())
        else:
            digest.update(encode(repr(leaf)))
            digest.update(getattr(getattr(leaf, "__code__", None), "co_code", b""))
    return digest.hexdigest()


def is_unfinished_fit(out: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a folder contains a fit with these settings."""
    try:
        return json.loads((out / SETTINGS).read_text()) == as_plain(settings)
    except (OSError, ValueError):
        return False


def lock_folder(out: Path, settings: Mapping[str, Any], locks: ExitStack) -> None:
    """Make the folder of a run, lock it until `locks` is closed, and write the settings."""
    make_writable(out)
    try:
        hold_folder(out, locks)
    except BlockingIOError as error:
        raise RunError(
            f"{out} is in use by another process that fits to it; wait for it to end, or give"
            " another folder."
        ) from error
    refuse_other(out, settings)  # another process may have written since the first check
    write_atomically(out / SETTINGS, as_json(settings))


def check_folder(out: str | Path) -> None:
    """Refuse a folder in which a fit can neither start nor resume, before data are read.

    Args:
        out: the folder of the run.

    Raises:
        RunError: if it contains a finished run with its report, or other files, or is read-only.
    """
    out = Path(out)
    if (out / RECORD).exists() and (out / REPORT).exists():
        _refuse_finished(out)
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; give a folder that does not exist yet.")
    if out.is_dir() and not (out / RECORD).exists() and not (out / SETTINGS).exists():
        # A process that was killed at once may have left a part of its first file.
        if any(not re.fullmatch(r"\..*\.partial", place.name) for place in out.iterdir()):
            raise RunError(f"{out} is not empty and contains no run; give another folder.")
    first = next(place for place in (out.resolve(), *out.resolve().parents) if place.exists())
    if not first.is_dir() or not os.access(first, os.W_OK | os.X_OK):
        raise RunError(f"{out} cannot be written: {first} is read-only or a file; give another.")


def refuse_other(out: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that contains a finished run, a fit with other settings, or other files."""
    check_folder(out)
    if (out / RECORD).exists():
        _refuse_finished(out)
    if (out / SETTINGS).exists() and not is_unfinished_fit(out, settings):
        raise RunError(
            f"{out} contains an unfinished run of other data or options; use the same data and"
            " options to resume it, or give another folder."
        )


def _refuse_finished(out: Path) -> None:
    read_record(out)
    raise RunError(f"{out} contains a finished run; give another folder, or remove it.")
