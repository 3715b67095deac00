"""Write docs/speed.md and its picture from the results of `make bench`.

    python benchmarks/speed_page.py [--results benchmarks/results] [--docs docs]

The tables are those that `run.py` prints.
"""

import argparse
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import Table, duration, markdown, milliseconds, times
from rows import LIBRARIES, TARGETS

HEADER = """# Speed

`make bench` measures this page; `benchmarks/speed_page.py` writes it from
`benchmarks/results/speed.json`. All is float64 on two cores. A time is the best of three rounds of
up to 30 calls that alternate with the peers, once compiled. Answers are compared first: peers that
disagree are not timed. The factor in parentheses is the time of the peer divided by that of
retrodict. The *floor* is a lower limit of the same work: for training, the networks and emission
terms alone, without the recurrence; for the import, JAX. *Compilation* is the time by which the
first call is longer than the second, of retrodict / of the fastest of the others to compile.
Smoothers return the evidence and all smoothed means and covariances; 64 series are one call
(`kalman_smoother_batch`, peers by `vmap`).

{machine}.
"""

HEADINGS = {
    "smoother": "Kalman smoothers",
    "gradient": "Gradients",
    "first": "First calls",
    "families": "Amortised families",
    "particles": "Particle smoothers",
    "linearised": "Linearised smoothers",
    "commands": "Command line",
}

ADVICE = """\
Covariances are computed once for series with the same gaps, and until they converge. With other
gaps in every series they are computed for each of them. Inside `jax.jit` or `jax.vmap` the values
of `ys` are unknown, so that every series of a batch counts as one with gaps of its own. Pass
`mask=True` if nothing is missing, or call `kalman_smoother_batch` outside.
"""


def comparison(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of rows: work, times, ratio, target and compilation; empty columns go."""
    used = [name for name in LIBRARIES if any(name in row["records"] for row in rows)]
    columns = ["work", "retrodict", *used, "ratio", "target", "met", "compilation, s"]
    cells = [_cells(row, used) for row in rows]
    return Table(title, columns, cells, _notes(rows))


def _cells(row: dict[str, Any], libraries: Sequence[str]) -> list[str]:
    own, target = row["shown_s"]["retrodict"], row["target"]
    ratio = row["value"] if row["measure"] in ("peers", "floor") else None
    met = {None: "–", True: "yes", False: "no"}[row["met"]]
    return [
        row["work"],
        *(_time(row, name, own) for name in ("retrodict", *libraries)),
        times(ratio),
        "–" if target is None else TARGETS[row["measure"]].format(target),
        met,
        _compilation(row["records"]),
    ]


def _time(row: dict[str, Any], library: str, own: float | None) -> str:
    """Return the time of a library, and the factor of a peer."""
    if library not in row["records"]:
        return "–"
    failure, seconds = row["records"][library]["failure"], row["shown_s"][library]
    if failure is not None:
        return "disagrees" if failure.startswith("disagrees") else "failed"
    if library in ("retrodict", "floor") or own is None:
        return duration(seconds)
    return f"{duration(seconds)} ({times(seconds / own)})"


def _compilation(records: dict[str, Any]) -> str:
    known = {name: record["compile_s"] for name, record in records.items()}
    own = known.pop("retrodict")
    jitted = [known[name] for name in ("dynamax", "cuthbert", "floor") if known.get(name)]
    return f"{_seconds(own)} / {_seconds(min(jitted))}" if jitted else _seconds(own)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Explain failures and missed targets."""
    notes = [
        f"{row['work']}: {name} {record['failure']}."
        for row in rows
        for name, record in row["records"].items()
        if record["failure"]
    ]
    missed = [row for row in rows if row["met"] is False and row["why"]]
    return notes + [f"{row['work']}: {row['why']}" for row in missed]


def cost(curve: dict[str, Any]) -> Table:
    """Return the table of a curve, with the slope on a log scale from the row above."""
    columns, sizes = [curve["axis"]], curve["sizes"]
    cells = [[f"{size:,}"] for size in sizes]
    for library, seconds in curve["best_s"].items():
        columns += [f"{library}, ms", "slope"]
        for line, value, slope in zip(cells, seconds, slopes(sizes, seconds), strict=True):
            line += [milliseconds(value), "–" if slope is None else f"{slope:.2f}"]
    note = f"From {sizes[0]:,} to {sizes[-1]:,}: " + ", ".join(
        f"{library} grows with exponent {slope:.2f}"
        for library, seconds in curve["best_s"].items()
        if (slope := slopes([sizes[0], sizes[-1]], [seconds[0], seconds[-1]])[1]) is not None
    )
    return Table(f"exact smoothing, {curve['title']}", columns, cells, [note + "."])


def slopes(sizes: Sequence[int], seconds: Sequence[float | None]) -> list[float | None]:
    """Return the slope log(seconds) / log(size) that ends at each point; `None` at the first."""
    values: list[float | None] = [None]
    for (size, before), (next_size, after) in pairwise(zip(sizes, seconds, strict=True)):
        if before is None or after is None:
            values.append(None)
        else:
            values.append(math.log(after / before) / math.log(next_size / size))
    return values


def draw(curves: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time against each size, both on a log scale, with a line of slope 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.6), squeeze=False)
    for axes, curve in zip(panels[0], curves, strict=True):
        sizes = curve["sizes"]
        for library, seconds in curve["best_s"].items():
            points = [(x, 1e3 * y) for x, y in zip(sizes, seconds, strict=True) if y is not None]
            axes.loglog(*zip(*points, strict=True), marker="o", markersize=4, label=library)
        lowest = min(1e3 * y for each in curve["best_s"].values() for y in each if y is not None)
        linear = [lowest * size / sizes[0] for size in sizes]
        axes.loglog(sizes, linear, ":", color="grey", label="slope 1")
        axes.set(title=curve["title"], xlabel=curve["axis"], ylabel="ms")
        axes.title.set_fontsize("small")
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def page(results: dict[str, Any], folder: Path) -> str:
    """Return the page in Markdown."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commits = dict.fromkeys(part["commit"] for part in results["rows"] + results["curves"])
    about = ", ".join(f"`{commit}`" for commit in commits)
    about = f"Commit {about}, {machine['cpu']}, load {machine['load']:.1f}, {versions}"
    parts = [HEADER.format(machine=about)]
    for suite in dict.fromkeys(row["suite"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["suite"] == suite]
        parts.append(f"## {HEADINGS[suite]}\n\n{_in_markdown(comparison(suite, rows))}")
        if suite == "smoother":
            parts.append(ADVICE)
    parts.append("## Cost by size\n\n![Time against length, batch and states](images/speed.png)\n")
    for curve in results["curves"]:
        table = cost(curve)
        parts.append(f"{table.title.capitalize()}:\n\n{_in_markdown(table)}")
    parts.append(_accelerator(folder))
    return "\n".join(parts)


def _in_markdown(table: Table) -> str:
    return "\n".join([markdown(table.columns, table.rows), *(f"{note}\n" for note in table.notes)])


def _accelerator(folder: Path) -> str:
    """Return the figures of `gpu.py` and of `smoothers.py` on an accelerator."""
    smoother = json.loads((folder / "kalman-gpu.json").read_text())
    particles = json.loads((folder / "smoothers-gpu.json").read_text())
    rows = [
        [f"Kalman smoother, d=3, m=4, {run['what']}", duration(run["best_s"])]
        for run in smoother["runs"]
        if "best_s" in run
    ]
    rows += [
        [
            f"FFBSi, {name}, 10,000 particles and paths, n=500, float32",
            duration(particles[name]["s"]),
        ]
        for name in ("exact", "mcmc")
    ]
    return (
        f"## Accelerator\n\n{smoother['machine']['device']} (`benchmarks/gpu.py`,"
        f" `benchmarks/smoothers.py`):\n\n{markdown(['work', 'time'], rows)}\n"
        "[Decision 2](decisions/0002-gaussian-numerics.md) has the forms of the computation.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/speed.md from results.")
    here = Path(__file__).parent
    parser.add_argument("--results", type=Path, default=here / "results")
    parser.add_argument("--docs", type=Path, default=here.parent / "docs")
    arguments = parser.parse_args()
    results = json.loads((arguments.results / "speed.json").read_text())
    draw(results["curves"], arguments.docs / "images" / "speed.png")
    (arguments.docs / "speed.md").write_text(page(results, arguments.results))


if __name__ == "__main__":
    main()
