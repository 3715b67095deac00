"""Reproduce the paper: run experiments, store finished stages, and write one report.

Each experiment has a subfolder with `numbers.json`, one `.csv` per table, one `.svg` and one `.png`
per figure, `settings.json` with sizes, seed, versions and times, and `stages`, from which an
interrupted run resumes.
"""

import math
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

from retrodict._files import as_csv, as_json, ensure_folder, version_of, write_atomically
from retrodict._workspace import Folder, Progress, Quiet
from retrodict.experiments import bounds, demo, linear, multivariate, nonlinear
from retrodict.experiments._report import Chapter, page, read_text

EXPERIMENTS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (linear, multivariate, nonlinear, bounds)
}
"""The experiments by name, in the order of the report."""

PACKAGES = ("jax", "jaxlib", "equinox", "optax", "numpy", "matplotlib")


class Reproduced(NamedTuple):
    """The result of a reproduction.

    Attributes:
        report: the path of the report.
        chapters: the requested experiments, and finished ones of earlier calls.
        seconds: the duration of the stages of each experiment, including earlier calls.
    """

    report: Path
    chapters: tuple[Chapter, ...]
    seconds: dict[str, float]


def reproduce(
    names: Sequence[str],
    out: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    progress: Callable[[str, int], Progress] | None = None,
) -> Reproduced:
    """Run experiments, or read their finished stages, and write the report.

    Args:
        names: names of `EXPERIMENTS`.
        out: the output folder, created if it does not exist.
        quick: whether to use small sizes.
        seed: the random seed; the sequences of the paper do not depend on it.
        progress: returns a progress callback, given the name of an experiment and the number of
            its stages.

    Raises:
        ValueError: if there is no such experiment, or JAX does not compute in float64.
        OSError: if the folder cannot be created or written to; finished stages are kept.
    """
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise ValueError(
            f"there is no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}"
        )
    if jax.numpy.result_type(float) != "float64":
        raise ValueError(
            "the paper's numbers need float64: call jax.config.update('jax_enable_x64', True) first"
        )
    ensure_folder(out)
    chapters, seconds = [], {}
    for name, module in EXPERIMENTS.items():
        sizes = module.QUICK if quick else module.FULL
        settings = {"experiment": name, "sizes": sizes._asdict(), "seed": seed, **_versions()}
        path = out / name
        # The report includes earlier experiments with the same settings.
        if name not in names and not (path.exists() and Folder(path, settings).is_complete):
            continue
        callback = Quiet() if progress is None else progress(name, module.num_stages(sizes))
        folder = Folder(path, settings, callback)
        chapter = module.run(folder, sizes, seed)
        chapters.append(chapter)
        seconds[name] = folder.seconds
        _write(folder, chapter, settings | {"quick": quick})
        folder.complete()
    report = out / "report.html"
    write_atomically(report, _page(chapters, seconds, quick, seed))
    return Reproduced(report, tuple(chapters), seconds)


def demonstrate(
    out: Path, *, seed: int = 0, sizes: demo.Sizes = demo.FULL, progress: Progress | None = None
) -> Chapter:
    """Run the demo, or read its finished stages, and write its results and its report.

    Args:
        out: the output folder, created if it does not exist.
        seed: the random seed.
        sizes: the sizes of the demo.
        progress: progress callback.

    Raises:
        OSError: if the folder cannot be created or written to; finished stages are kept.
    """
    settings = {"experiment": "demo", "sizes": sizes._asdict(), "seed": seed, **_versions()}
    folder = Folder(out, settings, progress)
    chapter = demo.run(folder, sizes, seed)
    _write(folder, chapter, settings)
    footer = f"Made by 'retrodict demo --seed {seed}' in {folder.seconds:.0f} s."
    folder.write("report.html", page("retrodict: a demo", [demo.LEAD], [chapter], footer))
    return chapter


def _write(folder: Folder, chapter: Chapter, settings: dict[str, Any]) -> None:
    """Write the results of one experiment, each file atomically."""
    folder.write("numbers.json", as_json(chapter.numbers))
    for table in chapter.tables():
        folder.write(f"{table.name}.csv", as_csv(*table.flat()))
    for picture in chapter.pictures():
        folder.write(f"{picture.name}.svg", picture.svg)
        folder.write(f"{picture.name}.png", picture.png)
    timed = {"all stages": folder.seconds, **chapter.seconds}
    machine = {"machine": _machine()}
    folder.write("settings.json", as_json(settings | machine | {"seconds": timed}))


def _versions() -> dict[str, dict[str, str]]:
    versions = {package: version(package) for package in PACKAGES}
    return {"versions": {"retrodict": version_of(), **versions}}


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "float64": True,
    }


def _page(chapters: Sequence[Chapter], seconds: dict[str, float], quick: bool, seed: int) -> bytes:
    is_complete = len(chapters) == len(EXPERIMENTS)
    text = read_text(
        "report",
        which="Every figure and table" if is_complete else "Figures and tables",
        command=f"retrodict reproduce{' --quick' if quick else ''} --seed {seed}",
        machine=_machine(),
        times=", ".join(f"{name} {_duration(value)}" for name, value in seconds.items()),
        **_versions(),
    )
    lead = [text["lead"], text["quick"]] if quick else [text["lead"]]
    return page(text["title"], lead, chapters, text["footer"])


def _duration(seconds: float) -> str:
    minutes = math.floor(seconds / 60)
    return f"{minutes} min {seconds - 60 * minutes:.0f} s" if minutes else f"{seconds:.0f} s"
