"""Write docs/scale-measured.md and its picture from the results of the scale benchmarks.

    python benchmarks/scale_page.py [--results benchmarks/results] [--docs docs]

It reads the files `scale-*.json` of `scale.py` and `scale_*.py`, and omits sections without a file.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from report import markdown  # noqa: E402

Run = dict[str, Any]

HEADER = """# Scale: measurements

`benchmarks/scale_page.py` generates this page from `benchmarks/results/scale-*.json`. See
[Scale](scale.md) for the methods. Models have three states and four observed entries unless stated
otherwise. Times are the best of several runs, without compilation. *Efficiency* is the ratio of the
least possible time to the measured time. The least possible time is that of the arithmetic and the
memory traffic alone, at the rates of a large matrix product and a large copy on the same machine.

![Cost against length, batch, states and devices](images/scale.png)
"""


def machine_of(results: dict[str, Any]) -> str:
    """Describe the machine of a file of results."""
    machine = results["machine"]
    name = machine["device"] if machine["backend"] == "gpu" else f"CPU, {machine['cores']} cores"
    return f"{name}, jax {machine['jax']}, {machine['precision']}, load {machine['load']:.1f}"


def of_part(results: dict[str, Any], part: str) -> list[Run]:
    """Return the runs of one part."""
    return [run for run in results["runs"] if run["part"] == part]


def milliseconds(run: Run | None) -> str:
    return "–" if run is None else f"{1e3 * run['best_s']:.3g}"


def efficiency(run: Run | None) -> str:
    return "–" if run is None else f"{100 * run['share_of_time_needed']:.2g}%"


def megabytes(run: Run | None) -> str:
    return "–" if run is None else f"{run['program_bytes'] / 1e6:,.0f}"


def pick(runs: list[Run], **values: Any) -> Run | None:
    """Return the first run with these entries, or `None`."""
    matching = [run for run in runs if all(run.get(key) == values[key] for key in values)]
    return matching[0] if matching else None


def length_section(results: dict[str, Any]) -> str:
    """Return the table of one series by its length."""
    runs, rows = of_part(results, "inference"), []
    for n in sorted({run["num_times"] for run in runs}):
        exact, scan, recurrent = (
            pick(runs, what=what, num_times=n) for what in ("kalman", "scan", "recurrent")
        )
        rows.append(
            [f"{n:,}", milliseconds(exact), milliseconds(scan), milliseconds(recurrent)]
            + [efficiency(exact), efficiency(scan), megabytes(exact), megabytes(scan)]
        )
    columns = ["rows", "exact, ms", "`ScanFamily`, ms", "`RecurrentFamily`, ms"]
    columns += ["efficiency, exact", "efficiency, scan", "MB, exact", "MB, scan"]
    return f"{machine_of(results)}.\n\n" + markdown(columns, rows)


def training_section(results: dict[str, Any], part: str, key: str) -> str:
    """Return the table of training steps by one of their sizes."""
    runs = of_part(results, part)
    rows = [
        [
            f"{run[key]:,}",
            f"`{run['what'].capitalize()}Family`",
            milliseconds(run),
            f"{run['rows_per_s']:,.0f}",
            efficiency(run),
            megabytes(run),
            f"{run['compile_s']:.0f}",
        ]
        for run in runs
    ]
    about = f"{machine_of(results)}; {runs[0]['num_times']} rows per series"
    about += f", {runs[0]['batch']} series.\n\n" if key != "batch" else ".\n\n"
    columns = [key.replace("_", " "), "family", "ms per step", "rows per second", "efficiency"]
    return about + markdown([*columns, "MB", "compilation, s"], rows)


def start_section(results: dict[str, Any]) -> str:
    """Return the table of the time from `fit` to its first step."""
    runs = of_part(results, "start")
    rows = [
        [f"`{run['what'].capitalize()}Family`", f"{run['start_s']:.1f}", str(run["num_programs"])]
        for run in runs
    ]
    about = f"{machine_of(results)}; {runs[0]['batch']:,} series of {runs[0]['num_times']} rows, a"
    about += " new process for each family. The first evaluation is part of it.\n\n"
    return about + markdown(["family", "seconds to the first step", "compiled programs"], rows)


def ratio_section(gpu: dict[str, Any], cpu: dict[str, Any]) -> str:
    """Return the table of training on an accelerator and on two cores."""
    rows = []
    for fast in of_part(gpu, "training"):
        slow = pick(of_part(cpu, "training"), what=fast["what"], batch=fast["batch"])
        if slow is not None:
            ratio = fast["rows_per_s"] / slow["rows_per_s"]
            rates = [f"{run['rows_per_s']:,.0f}" for run in (fast, slow)]
            rows.append([f"`{fast['what'].capitalize()}Family`", *rates, f"{ratio:,.0f}"])
    about = f"{machine_of(gpu)}, compared with two CPU cores of that machine; rows per second.\n\n"
    return about + markdown(["family", "accelerator", "two cores", "ratio"], rows)


def sharded_section(results: dict[str, Any]) -> str:
    """Return the table of one series over several devices."""
    rows = [
        [
            run["what"],
            f"{run['num_times']:,}",
            str(run["devices"]),
            f"{run['program_bytes'] / 1e6:,.0f}",
            f"{run['one_device_alone'] / 1e6:,.0f}",
            f"{run['best_s']:.1f}",
            f"{run['worst_mean_in_sds']:.1e}",
        ]
        for run in of_part(results, "sharded")
    ]
    columns = ["smoother", "rows", "devices", "MB per device", "MB, one device", "seconds"]
    columns += ["largest difference from the sequential means, in standard deviations"]
    return f"{machine_of(results)}, simulated devices.\n\n" + markdown(columns, rows)


def devices_section(results: dict[str, Any]) -> str:
    """Return the table of training and smoothing by the number of devices."""
    records = results["records"]
    rows = [
        [
            str(r["devices"]),
            str(r["batch"]),
            f"{1e3 * r['step']:.3g}",
            f"{1e3 * r['smoothing']:.3g}",
        ]
        for r in records
    ]
    first = records[0]
    about = (
        f"{results['kind'].capitalize()} devices, {first['device']}, jax {first['jax']}, float32,"
    )
    about += f" {first['num_times']} rows per series."
    columns = ["devices", "series", "ms per training step", "ms to smooth all series"]
    return f"{about}\n\n" + markdown(columns, rows)


def disk_section(results: dict[str, Any]) -> str:
    """Return the table of an epoch from disk and in memory."""
    records = results["records"]
    rows = [
        [
            {"memory": "in memory", "disk": "on disk"}[r["kind"]],
            f"{r['series']:,}",
            f"{r['rows']:,}",
            f"{r['rows_per_s']:,.0f}",
            f"{r['epoch_s']:.0f}",
            f"{r['open_s']:.0f}",
            f"{r['peak_bytes'] / 1e6:,.0f}",
        ]
        for r in records
    ]
    last = records[-1]
    best = {
        kind: max(
            r["rows_per_s"] for r in records if (r["kind"], r["series"]) == (kind, last["series"])
        )
        for kind in ("memory", "disk")
    }
    about = f"CPU, {results['cores']} cores, jax {last['jax']}, float32, load {last['load']:.1f};"
    about += (
        f" a Parquet file of {last['file_bytes'] / 1e6:,.0f} MB, batches of {results['batch']},"
    )
    about += " one epoch of a `RecurrentFamily` in a separate process. The best speed from disk is"
    about += f" {best['disk'] / best['memory']:.0%} of the best speed in memory. Peaks include"
    about += " compilation."
    columns = ["data", "series", "rows", "rows per second", "seconds of the epoch, in total"]
    return f"{about}\n\n" + markdown([*columns, "seconds to open", "peak MB of the process"], rows)


def shares_section(results: dict[str, Any]) -> str:
    """Return the table of the memory of each process while a file is read by several."""
    records = results["records"]
    rows = [
        [
            str(r["processes"]),
            f"{r['own_series']:,}",
            f"{r['seconds']:.1f}",
            f"{(r['peak_bytes'] - r['peak_bytes_before']) / 1e6:,.0f}",
            f"{r['peak_bytes_before'] / 1e6:,.0f}",
        ]
        for r in records
    ]
    about = f"CPU, {results['cores']} cores, jax {results['jax']}, float32; a Parquet file of"
    about += (
        f" {results['series']:,} series and {records[0]['rows']:,} rows of four columns, read by"
    )
    about += " `data.read_shared`. Each figure is the largest of all processes. Memory is the peak"
    about += " while reading, without that of Python, JAX and the library (the last column)."
    columns = ["processes", "series per process", "seconds", "peak MB", "MB before reading"]
    return f"{about}\n\n" + markdown(columns, rows)


def remat_section(results: dict[str, Any]) -> str:
    """Return the table of the memory of a gradient by the rows of a series."""
    runs, rows = of_part(results, "remat"), []
    for n in sorted({run["num_times"] for run in runs}):
        stored, again = (pick(runs, what=what, num_times=n) for what in ("kept", "read again"))
        if stored is None or again is None:
            continue
        cells = [f"{run['temporary_bytes'] / 1e6:,.2f}" for run in (stored, again)]
        rows.append([f"{n:,}", *cells, f"{again['best_s'] / stored['best_s']:.1f}"])
    about = f"{machine_of(results)}; memory of the gradient of one series by a `RecurrentFamily`,"
    about += " without the rows themselves, by default and with `remat=True`. The last column is"
    about += " the ratio of times.\n\n"
    return about + markdown(["rows", "MB, default", "MB, `remat=True`", "time ratio"], rows)


BILLION = 1e9


def billion_section(gpu: dict[str, Any], cpu: dict[str, Any], disk: dict[str, Any] | None) -> str:
    """Return the table of the cost of 10⁹ rows, at the measured rates."""
    longest = [run for run in of_part(gpu, "inference") if run["num_times"] == 1_000_000]
    rows = []
    for what, name in (("kalman", "exact smoothing"), ("scan", "smoothing by a `ScanFamily`")):
        run = pick(longest, what=what)
        if run is not None:
            times = BILLION / run["num_times"]
            memory = f"{run['program_bytes'] * times / 1e9:,.0f} GB"
            rows.append([f"{name}, accelerator", duration(run["best_s"] * times), memory])
    for results, where in ((gpu, "accelerator"), (cpu, "two cores")):
        for run in of_part(results, "training"):
            family = f"an epoch of a `{run['what'].capitalize()}Family`, {where}"
            memory = f"{run['program_bytes'] / 1e9:.1f} GB"
            rows.append([family, duration(BILLION / run["rows_per_s"]), memory])
    if disk is not None:
        read = max(disk["records"], key=lambda r: r["rows"] / r["open_s"] * (r["kind"] == "disk"))
        seconds = BILLION / read["rows"] * read["open_s"]
        rows.append(["reading from Parquet once, one core", duration(seconds), "one block"])
    about = (
        "Computed from the rates above, not measured. Smoothing needs memory for a whole series,\n"
    )
    about += "over all devices together. A training step needs memory for one batch.\n\n"
    return about + markdown(["10⁹ rows", "time", "memory"], rows)


def duration(seconds: float) -> str:
    """Format a time in seconds, minutes or hours."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds > 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def load(folder: Path, name: str) -> Any:
    """Read a file of results, or return `None` if it does not exist."""
    path = folder / f"scale-{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def sections(folder: Path) -> Iterable[tuple[str, str]]:
    """Yield headings and sections."""
    gpu, cpu, growth = (load(folder, name) for name in ("gpu", "cpu", "growth"))
    for results in (gpu, growth):
        if results is not None and of_part(results, "inference"):
            device = results["machine"]["device"] if results is gpu else "CPU"
            yield f"One series by its length, {device}", length_section(results)
    if gpu is not None and cpu is not None:
        yield "Training on an accelerator", ratio_section(gpu, cpu)
        yield "Training step on an accelerator", training_section(gpu, "training", "batch")
    if gpu is not None and of_part(gpu, "start"):
        yield "Start of a fit on an accelerator", start_section(gpu)
    if growth is not None:
        yield "Training by the number of series", training_section(growth, "batches", "batch")
        states = training_section(growth, "dimensions", "state_dim")
        yield "Training by the number of states", states
    others: list[tuple[str, str, Callable[[Any], str]]] = [
        ("devices-cpu", "Training by the number of devices", devices_section),
        ("sharded", "One series over several devices", sharded_section),
        ("disk", "Data larger than memory", disk_section),
        ("shares", "Reading by several processes", shares_section),
        ("remat", "Rematerialisation", remat_section),
    ]
    for name, heading, write in others:
        results = load(folder, name)
        if results is not None:
            yield heading, write(results)
    if gpu is not None and cpu is not None:
        yield "Estimated cost of 10⁹ rows", billion_section(gpu, cpu, load(folder, "disk"))


def draw(folder: Path, path: Path) -> None:
    """Draw the cost against length, batch, states and devices."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    gpu, growth, devices = (load(folder, name) for name in ("gpu", "growth", "devices-cpu"))
    for results, style in ((gpu, "-"), (growth, "--")):
        if results is None:
            continue
        runs = of_part(results, "inference")
        for index, what in enumerate(("kalman", "scan", "recurrent")):
            points = [(r["num_times"], 1e3 * r["best_s"]) for r in runs if r["what"] == what]
            if points:
                label = f"{what}, {results['machine']['device']}"
                panels[0, 0].loglog(
                    *zip(*points, strict=True), style, color=f"C{index}", label=label
                )
    panels[0, 0].set(xlabel="rows of one series", ylabel="ms", ylim=(0.5, 1e5))
    panels[0, 0].legend(fontsize="small", loc="upper left", ncols=2)
    for axes, part, key in (
        (panels[0, 1], "batches", "batch"),
        (panels[1, 0], "dimensions", "state_dim"),
    ):
        runs = [] if growth is None else of_part(growth, part)
        for what in ("scan", "recurrent"):
            points = [(r[key], r["rows_per_s"]) for r in runs if r["what"] == what]
            if points:
                axes.loglog(*zip(*points, strict=True), marker="o", label=what)
        axes.set(xlabel={"batch": "series", "state_dim": "states"}[key])
        axes.set(ylabel="rows per second in training")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    records = [] if devices is None else devices["records"]
    for batch in sorted({r["batch"] for r in records}):
        points = [(r["devices"], 1e3 * r["step"]) for r in records if r["batch"] == batch]
        panels[1, 1].loglog(*zip(*points, strict=True), marker="o", label=f"{batch} series")
    panels[1, 1].set(xlabel="simulated devices on the same cores", ylabel="ms per training step")
    counts = sorted({r["devices"] for r in records})
    panels[1, 1].set_xticks(counts, map(str, counts), minor=False)
    panels[1, 1].set_xticks([], minor=True)
    if panels[1, 1].get_legend_handles_labels()[0]:
        panels[1, 1].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    here = Path(__file__).parent
    parser.add_argument("--results", type=Path, default=here / "results")
    parser.add_argument("--docs", type=Path, default=here.parent / "docs")
    arguments = parser.parse_args()
    draw(arguments.results, arguments.docs / "images" / "scale.png")
    parts = [f"## {heading}\n\n{text}" for heading, text in sections(arguments.results)]
    page = "\n".join([HEADER, *parts])
    (arguments.docs / "scale-measured.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
