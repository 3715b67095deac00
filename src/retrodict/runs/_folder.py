"""The folder of a run as files: its record and what that says, checked, without a single array.

Nothing here needs JAX, so that a run is described at once.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
"""The version of the layout of a run folder."""

RECORD, MODEL, FAMILY, TRAINING = "run.json", "model.rd", "family.rd", "training.csv"

ROWS = "rows.rd"
"""The rows of the table that the run was fitted to, if it is one series."""

REPORT = "report.html"


class RunError(ValueError):
    """A run folder that cannot be used as asked, in one line."""


def read_record(path: str | Path) -> dict[str, Any]:
    """What a run says of itself, without its arrays: model, data, options and results.

    Its files are compared with what `fit` wrote.

    Args:
        path: the folder.

    Raises:
        RunError: if there is no run, or it is unfinished, of another version, or was altered.
    """
    path = Path(path)
    place = path / RECORD
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise RunError(f"{path} {what}; give the folder that `fit --out` made.")
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("it holds no record")
    except FileNotFoundError as error:
        unfinished = (path / "stages").is_dir()
        rest = (
            "is unfinished: run the same `fit` again, which goes on"
            if unfinished
            else f"is no run: it has no {RECORD}. Give the folder that `fit --out` made"
        )
        raise RunError(f"{path} {rest}.") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{place} cannot be read ({error}). Fit again to another folder.") from error
    if record.get("retrodict_run") != FORMAT:
        raise RunError(
            f"{place} is of format {record.get('retrodict_run')!r}, and this version of retrodict"
            f" reads format {FORMAT}. Use the version that wrote it"
            f" ({record.get('version', 'unknown')}), or fit again."
        )
    checksum = record.pop("checksum", None)
    if checksum != checksum_of(record):
        raise RunError(f"{place} was changed after `fit` wrote it. Fit again to another folder.")
    for name, digest in record["files"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise RunError(
                f"{path / name} cannot be read ({error.strerror}); the run needs it. Fit again."
            ) from error
        if digest_of(content) != digest:
            raise RunError(f"{path / name} is not as `fit` wrote it. Fit again to another folder.")
    return record


def likelihood_in_words(results: Mapping[str, Any]) -> str:
    """How likely the data are under a fitted model, in all and by row.

    Args:
        results: those of the record of a run.
    """
    exact = results["objective"] == "log-evidence"
    what = "log-likelihood" if exact else "ELBO, a lower bound of the log-likelihood,"
    if results["nats_a_row"] is None:
        return f"{what} –"
    words = f"{results['nats_a_row']:.4f} nats per observed row"
    if "total" in results:
        rows = f"{results['rows_observed']} of {results['rows']} rows observed"
        words = f"{results['total']:.2f} in all, {words} ({rows})"
    return f"{what} {words}"


def parameter_lines(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The parameters by name, where entries that are fixed at one value are one line.

    Args:
        results: those of the record of a run.
    """
    lines: list[tuple[str, dict[str, Any]]] = []
    owner = first = None
    for name, found in results["parameters"].items():
        at = _BY_INDEX.fullmatch(name) or _BY_NAME.fullmatch(name)
        if at and at[1] == owner and lines[-1][1] == found and not found["learned"]:
            lines[-1] = (f"{owner}[{first}..{at[2]}]", found)
            continue
        lines.append((name, found))
        owner, first = at.groups() if at else (None, None)
    return lines


_BY_INDEX = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
_BY_NAME = re.compile(r"([^\[]*)\[([^,]*)\]")


def unit_in_words(record: Mapping[str, Any]) -> str:
    """Return in what unit of time the parameters of a run are; empty if it is its regular step.

    Args:
        record: the record of a run.
    """
    unit = record["layout"].get("step_unit")
    if not record["layout"].get("step_input") or unit is None:
        return ""
    return (
        f"Times are uneven: scales, slopes and rates are per step of {unit}, the median step of the"
        " data unless another unit was chosen."
    )


def as_plain(value: Any) -> Any:
    """What JSON makes of a value: tuples as lists, keys as texts."""
    return json.loads(json.dumps(value))


def checksum_of(record: Mapping[str, Any]) -> str:
    """The SHA-256 of a record, however its keys are ordered."""
    return digest_of(json.dumps(record, sort_keys=True).encode())


def digest_of(content: bytes) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()
