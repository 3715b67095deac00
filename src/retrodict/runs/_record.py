"""The folder of a run as files: its record, validated, without arrays.

This module does not import JAX, so that describing a run is fast.
"""

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrodict._interface import UserError

FORMAT = 2
"""The version of the layout of a run folder. In format 1 `nats_per_row` had another name."""

RECORD, MODEL, FAMILY, TRAINING = "run.json", "model.rd", "family.rd", "training.csv"

ROWS = "rows.rd"
"""The rows of the table that the run was fitted to, if it is one series."""

REPORT = "report.html"


class RunError(UserError):
    """An error of a run folder or its options, with a message of one line.

    Example:
        >>> import tempfile, retrodict as rd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         rd.runs.open_run(folder)
        ...     except rd.runs.RunError as error:
        ...         print("cannot be opened")
        cannot be opened
    """


def read_record(path: str | Path) -> dict[str, Any]:
    """Read the record of a run: model, data, options and results.

    The files of the run are compared with their hashes.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = rd.runs.fit(table, "local_level", f"{folder}/run")
        ...     record = rd.runs.read_record(f"{folder}/run")
        >>> sorted(record)
        ['data', 'files', 'layout', 'model', 'options', 'results', 'retrodict_run', 'version']

    Args:
        path: the folder.

    Raises:
        RunError: if there is no run, or it is unfinished, of another version, or was altered.
    """
    path = Path(path)
    file = path / RECORD
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise RunError(f"{path} {what}; give the folder that `fit --out` made.")
    try:
        record = json.loads(read_inside(path, RECORD).decode("utf-8"))
        if not isinstance(record, dict):
            raise ValueError("it is not a record")
    except FileNotFoundError as error:
        unfinished = (path / "stages").is_dir()
        rest = (
            "is unfinished: run the same `fit` again to resume it"
            if unfinished
            else f"is not a run: it has no {RECORD}. Give the folder that `fit --out` made"
        )
        raise RunError(f"{path} {rest}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read ({error}). Fit again to another folder.") from error
    if record.get("retrodict_run") not in (1, FORMAT):
        raise RunError(
            f"{file} is of format {record.get('retrodict_run')!r}, and this version of retrodict"
            f" reads format {FORMAT}. Use the version that wrote it"
            f" ({record.get('version', 'unknown')}), or fit again."
        )
    checksum = record.pop("checksum", None)
    try:
        is_intact = checksum == checksum_of(record)
    except (ValueError, RecursionError):
        is_intact = False
    if not is_intact:
        raise RunError(f"{file} was changed after `fit` wrote it. Fit again to another folder.")
    results = record.get("results")
    if isinstance(results, dict) and "nats_a_row" in results:
        results["nats_per_row"] = results.pop("nats_a_row")
    _check(record, file)
    for name, digest in record["files"].items():
        try:
            content = read_inside(path, name)
        except OSError as error:
            raise RunError(
                f"{path / name} cannot be read ({error.strerror or error}); the run needs it. Fit"
                " again."
            ) from error
        if digest_of(content) != digest:
            raise RunError(
                f"{path / name} was changed after `fit` wrote it. Fit again to another folder."
            )
    return record


def read_inside(folder: Path, name: str) -> bytes:
    """Read a regular file of a folder; refuse pipes, devices and links out of the folder."""
    file = folder / name
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(0, "it is not a regular file")
    if not file.resolve().is_relative_to(folder.resolve()):
        raise OSError(0, "it is a link out of the folder")
    return file.read_bytes()


_TEXT, _OPTIONAL_TEXT, _OPTIONAL_TEXTS = (str,), (str, None), ([str], None)
_NUMBER = (int, float, None)
_MISSING = object()
_OPTIONAL_NUMBER = (*_NUMBER, _MISSING)
_SCHEMA: dict[str, Any] = {
    "files": {str: _TEXT},
    "model": {"reference": _TEXT},
    "layout": {
        "time": _OPTIONAL_TEXT,
        "series": _OPTIONAL_TEXTS,
        "columns": ([str],),
        "inputs": _OPTIONAL_TEXTS,
        "freq": (str, *_NUMBER),
        "step_input": (bool,),
        "step_unit": (str, *_NUMBER),
        "time_format": _OPTIONAL_TEXT,
        "pad_to": _OPTIONAL_TEXT,
    },
    "options": {"seed": (int,)},
    "data": {"described": ([str],), "sha256": _TEXT},
    "results": {
        "method": _TEXT,
        "objective": _TEXT,
        "nats_per_row": _NUMBER,
        "uncertainty": _TEXT,
        **dict.fromkeys(("total", "rows", "rows_observed", "distance"), _OPTIONAL_NUMBER),
        "regimes": {str: dict.fromkeys(("share", "rows", "expected_duration"), _NUMBER)},
        "parameters": {
            str: {
                "value": _NUMBER,
                "learned": (bool,),
                **dict.fromkeys(("error", "lower", "upper"), _OPTIONAL_NUMBER),
            }
        },
    },
}
"""The schema of a record: alternatives of types, lists of texts, or tables of these."""


_OPTIONAL_TABLES = ("results.regimes",)
"""Tables that some records lack."""


def _check(record: Mapping[str, Any], file: Path) -> None:
    """Refuse a record with missing entries or values of wrong types."""
    if wrong := _mismatch(record, _SCHEMA, ""):
        raise RunError(f"{file}: {wrong}. It was changed after `fit` wrote it; fit again.")
    unknown = [*set(record["layout"]) - set(_SCHEMA["layout"])]
    unknown += [name for name in record["files"] if name not in (MODEL, FAMILY, TRAINING, ROWS)]
    missing = [name for name in (MODEL, TRAINING) if name not in record["files"]]
    if unknown or missing:
        what = f"{unknown[0]!r} is not part of a run" if unknown else f"there is no {missing[0]}"
        raise RunError(f"{file}: {what}. Fit again to another folder.")


def _mismatch(value: Any, expected: Any, name: str) -> str | None:
    """Describe an entry that is missing or of a wrong type; return `None` if there is none."""
    if value is _MISSING and name in _OPTIONAL_TABLES:
        return None
    if not isinstance(expected, dict):
        fits = any(_is_of(value, kind) for kind in expected)
        return None if fits else f"{name} is missing or of another type"
    if not isinstance(value, dict):
        return f"{name} is missing or of another type"
    named = {key: expected[str] for key in value} if str in expected else expected
    mismatches = (
        _mismatch(value.get(key, _MISSING), kind, f"{name}.{key}".strip("."))
        for key, kind in named.items()
    )
    return next((wrong for wrong in mismatches if wrong), None)


def _is_of(value: Any, kind: Any) -> bool:
    if kind is None or kind is _MISSING:
        return value is kind
    if isinstance(kind, list):
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if kind is int and isinstance(value, int) and abs(value) >= 1 << 63:
        return False
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


OBJECTIVES = {
    "log-evidence": "log-likelihood",
    "exact evidence": "log-likelihood",
    "approximate evidence": "log-likelihood by GPB2, an approximation,",
}
"""Objectives in words."""


def likelihood_in_words(results: Mapping[str, Any]) -> str:
    """Describe the log-likelihood of a fitted model, in total and per row.

    Args:
        results: the results in the record of a run.
    """
    what = OBJECTIVES.get(results["objective"], "ELBO, a lower bound of the log-likelihood,")
    if results["nats_per_row"] is None:
        return f"{what} –"
    words = f"{results['nats_per_row']:.4f} nats per observed row"
    if None not in map(results.get, ("total", "rows", "rows_observed")):
        rows = f"{results['rows_observed']} of {results['rows']} rows observed"
        words = f"{results['total']:.2f} in all, {words} ({rows})"
    return f"{what} {words}"


def regimes_in_words(results: Mapping[str, Any]) -> str:
    """Describe the regimes of a run, with shares and durations; empty if there are none.

    Args:
        results: the results in the record of a run.
    """
    lines = [
        f"{name} has {_figure(line['share'], '.1%')} of the rows and an expected duration of"
        f" {_figure(line['expected_duration'], '.1f')} rows"
        for name, line in results.get("regimes", {}).items()
    ]
    return f"Regimes: {'; '.join(lines)}." if lines else ""


def _figure(value: float | None, form: str) -> str:
    return "unbounded" if value is None else format(value, form)


def parameter_lines(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the parameters by name, with entries fixed at one value as one line.

    Args:
        results: the results in the record of a run.
    """
    lines: list[tuple[str, dict[str, Any]]] = []
    owner = first = None
    for name, line in results["parameters"].items():
        at = _BY_INDEX.fullmatch(name) or _BY_NAME.fullmatch(name)
        if at and at[1] == owner and lines[-1][1] == line and not line["learned"]:
            lines[-1] = (f"{owner}[{first}..{at[2]}]", line)
            continue
        lines.append((name, line))
        owner, first = at.groups() if at else (None, None)
    return lines


_BY_INDEX = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
_BY_NAME = re.compile(r"([^\[]*)\[([^,]*)\]")


def unit_in_words(record: Mapping[str, Any]) -> str:
    """Describe the time unit of the parameters of a run; empty if it is the regular step.

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
    """Return a value as JSON stores it: tuples as lists, keys as texts."""
    return json.loads(json.dumps(value))


def checksum_of(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, independent of the order of its keys."""
    return digest_of(json.dumps(record, sort_keys=True).encode())


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()
