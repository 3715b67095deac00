"""Draw the figures of `benchmarks/online.py` from the file that `--collect` wrote.

python benchmarks/online_figures.py online.json docs/images
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402


def gradients(records: list[dict[str, Any]], folder: Path) -> None:
    """Draw the variance against the number of samples, for each method that samples."""
    figures = records[-1]["figures"]
    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, values in figures.items():
        if ", N=" in name:
            method, count = name.rsplit(", N=", 1)
            curves.setdefault(method, []).append((int(count), values["relative_deviation"] ** 2))
    for method, points in curves.items():
        axes.loglog(*zip(*points, strict=True), marker="o", label=method)
    counts = sorted({count for points in curves.values() for count, _ in points})
    axes.set(xlabel="samples", ylabel="relative variance of the gradient")
    axes.set_xticks(counts, map(str, counts), minor=False)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(folder / "online-gradients.png", dpi=150)


def linear(records: list[dict[str, Any]], folder: Path) -> None:
    """Draw the mean absolute error of F and G along the stream, one panel per optimiser."""
    figure, panels = plt.subplots(
        1, len(records), figsize=(8, 3.5), layout="constrained", sharey=True, squeeze=False
    )
    for axes, record in zip(panels[0], records, strict=True):
        figures, curves = record["figures"], {}
        for name, values in figures.items():
            if isinstance(values, dict):
                method = name.split(", seed")[0]
                curves.setdefault(method, []).append(values["mean_absolute_error"])
        for method, several in sorted(curves.items()):
            rows = [figures["every"] * (k + 1) for k in range(len(several[0]))]
            means = [sum(at) / len(at) for at in zip(*several, strict=True)]
            axes.loglog(rows, means, label=f"{method}, {len(several)} data sets")
        axes.set(xlabel="rows", title=record["options"]["optimiser"])
        axes.legend()
    panels[0, 0].set_ylabel("mean absolute error of F and G")
    figure.savefig(folder / "online-linear.png", dpi=150)


def shocks(records: list[dict[str, Any]], folder: Path) -> None:
    """Draw the learned weight and the increment of the ELBO around each shock."""
    figures = records[-1]["figures"]
    figure, rows = plt.subplots(2, 3, figsize=(9, 4), layout="constrained", sharex=True)
    for (above, below), name in zip(rows.T, ("regime", "missing", "outliers"), strict=True):
        curves = figures[name]
        times = [curves["every"] * (k + 1) for k in range(len(curves["weight"]))]
        above.plot(times, curves["weight"])
        below.plot(times, curves["elbo_increment"])
        below.set_yscale("symlog")
        for axes in (above, below):
            axes.axvline(figures["shock_at"], color="grey", linewidth=0.5)
        above.set_title(name)
        below.set_xlabel("rows")
    rows[0, 0].set_ylabel("weight")
    rows[1, 0].set_ylabel("ELBO, nats a row")
    figure.savefig(folder / "online-shocks.png", dpi=150)


DRAWN = {"gradients": gradients, "linear": linear, "shocks": shocks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("records", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    records = json.loads(arguments.records.read_text())
    for part, draw in DRAWN.items():
        draw([record for record in records if record["part"] == part], arguments.folder)


if __name__ == "__main__":
    main()
