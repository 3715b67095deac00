"""Printed results: tables, JSON, runs, verdicts and result files."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrodict._pages import visible


def grid(*headings: str, **options: Any) -> Table:
    """Return an empty table without frame; columns after the first are aligned to the right."""
    table = Table(box=SIMPLE, pad_edge=False, **options)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    return table


def print_json(tree: Any) -> None:
    """Print JSON; escapes of bytes that are not UTF-8 stay escaped."""
    text = json.dumps(tree, indent=2, ensure_ascii=False, default=str)
    typer.echo(text.encode("utf-8", "backslashreplace").decode())


def print_run(record: Mapping[str, Any]) -> None:
    """Print the model, data and parameters of a run."""
    from retrodict import runs

    results = record["results"]
    typer.echo(f"model: {record['model']['reference']}{_options(record)}")
    for line in record["data"]["described"]:
        typer.echo(visible(line))
    typer.echo(f"smoothing: {results['method']}; {runs.likelihood_in_words(results)}")
    table = grid("parameter", "value", "standard error", "90% interval")
    for name, parameter in runs.parameter_lines(results):
        # As text: a name in brackets is not a style.
        table.add_row(Text(visible(name)), *_cells(parameter))
    Console().print(table)
    if regimes := runs.regimes_in_words(results):
        typer.echo(visible(regimes))
    if unit := runs.unit_in_words(record):
        typer.echo(unit)
    typer.echo(visible(results["uncertainty"]))


def print_verdict(checked: Any) -> None:
    """Print the verdict of a check, and which part of the table it is based on."""
    typer.echo(f"verdict: {checked.worst}. {checked.verdict}")
    if checked.scope is not None and checked.scope.is_partial:
        typer.echo(checked.scope.summary)


def put_result(
    table: Any, result: Any, out: Path | None, overwrite: bool, as_json: bool, **options: Any
) -> None:
    """Write a result to a file, or print it as comma-separated values or JSON.

    Args:
        table: the table that the result belongs to.
        result: the return value of `runs.smooth` or `runs.forecast`.
        out: the file; standard output if `None`.
        overwrite: whether the file may be replaced.
        as_json: whether to print JSON.
        **options: further arguments of `data.to_frame` and `data.to_xarray`.
    """
    from retrodict import data

    if out is not None and out.suffix.lower() == ".nc":
        data.write(data.to_xarray(table, result, **options), out, overwrite=overwrite)
    else:
        frame = data.to_frame(table, result, **options)
        if out is None:
            if as_json:
                text = frame.to_json(orient="records", date_format="iso", double_precision=15)
                sys.stdout.write(f"{text}\n")
            else:
                sys.stdout.write(frame.to_csv(index=False))
            return
        data.write(frame, out, overwrite=overwrite)
    typer.echo(f"Wrote {out}.")


def as_text(value: Any) -> Any:
    """Return an option of a model as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else value


def _options(record: Mapping[str, Any]) -> str:
    """Return the options of the model of a run, including those found in the data."""
    model = record["model"].get("model")
    options = model.get("options") if isinstance(model, Mapping) else None
    if not isinstance(options, Mapping) or not options:
        return ""
    return f" ({', '.join(f'{name}={as_text(value)}' for name, value in options.items())})"


def _cells(parameter: Mapping[str, Any]) -> tuple[str, str, str]:
    value = _number(parameter, "value", ".5g")
    if not parameter["learned"]:
        return value, "fixed", ""
    if "edge" in parameter:
        return value, "–", f"at the edge of {parameter['edge']}: no interval"
    if parameter.get("error") is None:
        return value, "–", "–"
    interval = f"{_number(parameter, 'lower', '.4g')} to {_number(parameter, 'upper', '.4g')}"
    return value, f"{parameter['error']:.3g}", interval


def _number(parameter: Mapping[str, Any], name: str, form: str) -> str:
    """Return an entry of a parameter; a dash if it is missing or was not finite."""
    return "–" if parameter.get(name) is None else format(parameter[name], form)
