"""Files that were damaged at random: a result, or one line, and never a traceback."""

import gc
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import retrodict as rd
from retrodict import models, runs
from retrodict.cli._app import run as command
from retrodict.runs._run import parameter_entries, write

CSV = "time,id,y\n" + "".join(f"2020-01-{i % 9 + 1:02d},{'ab'[i // 9]},{i}.5\n" for i in range(18))
TOML = 'retrodict = 1\n[model]\nname = "seasonal"\noptions = {period = 4}\n[data]\nfreq = "D"\n'
TOKENS = [b"-1", b"0", b"nan", b"1e999", b"1000000000000", b"\0", b"\xff", b"\n", b'"', b"[", b"{"]
VALUES = [None, True, -1, 10**12, 10**400, "", "os:system", "a" * 9999, [], ["y", "y"], {}, [[[]]]]


def good_files(folder: Path) -> dict[str, list[bytes]]:
    """Whole files, by suffix."""
    frame = pd.read_csv(io.StringIO(CSV), parse_dates=["time"])
    one = xr.Dataset({"y": ("time", np.arange(9.0))}, coords={"time": np.arange(9)})
    two = xr.Dataset({"y": (("id", "time"), np.ones((2, 9)))}, coords={"id": ["a", "b"]})
    netcdf = []
    cases: Any = ((one, "scipy"), (two, "h5netcdf"), (one, "h5netcdf"))
    for dataset, engine in cases:
        dataset.to_netcdf(folder / "good.nc", engine=engine)
        netcdf.append((folder / "good.nc").read_bytes())
    parquet = [frame.to_parquet(), frame.to_parquet(compression="gzip", index=True)]
    return {".csv": [CSV.encode()], ".parquet": parquet, ".nc": netcdf, ".toml": [TOML.encode()]}


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Flips, cuts, copies and replaces some bytes."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        place, width = rng.randrange(len(data) or 1), rng.choice([1, 2, 4, 8, 64])
        there = bytes(data[place : place + width])
        data[place : place + width] = rng.choice(
            [
                bytes([rng.randrange(256)]) + there[1:],
                *(b"", there * 3, b"\xff" * width, bytes(width)),
                rng.choice(TOKENS),
                rng.choice([-1, 1, 2**31 - 1]).to_bytes(
                    4, rng.choice(["big", "little"]), signed=True
                ),
                content[rng.randrange(len(content)) :],
            ]
        )
        if rng.random() < 0.1:
            del data[place:]
    return bytes(data)


def altered(tree: Any, rng: random.Random) -> None:
    """Replaces or removes one entry of a tree of JSON."""
    while True:
        place = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        inner = tree[place]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            tree = inner
        elif rng.random() < 0.2:
            del tree[place]
            return
        else:
            tree[place] = rng.choice(VALUES)
            return


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def alter_run(path: Path, rng: random.Random) -> None:
    """Alter the record of a run, its model or its rows, and make all hashes right again."""
    record = json.loads((path / "run.json").read_text())
    record.pop("checksum")
    if rng.random() < 0.5:
        altered(record, rng)
    else:
        target = rng.choice(["model.rd", "rows.rd"])
        with zipfile.ZipFile(path / target) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        manifest = json.loads(members.pop("manifest.json"))
        altered(manifest["tree"], rng)
        content = {key: manifest[key] for key in ("tree", "arrays", "metadata")}
        manifest["content_sha256"] = sha256(json.dumps(content, sort_keys=True).encode())
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("manifest.json", json.dumps(manifest))
            for name, member in members.items():
                archive.writestr(name, member)
            archive.comment = b"0" * 64
        data = buffer.getvalue()
        (path / target).write_bytes(data[:-64] + sha256(data[:-64]).encode())
        record["files"][target] = sha256((path / target).read_bytes())
    record["checksum"] = sha256(json.dumps(record, sort_keys=True).encode())
    (path / "run.json").write_text(json.dumps(record))


def refused(call: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Whether a call is refused in one line; any other error is raised."""
    try:
        call(*args, **options)
    except ValueError as error:  # of tables, models and runs
        assert "\n" not in str(error).strip()
        return True
    return False


def try_files(suffix: str, folder: Path, count: int, seed: int) -> int:
    """Reads damaged files of a kind; how many were refused."""
    rng, total = random.Random(seed), 0
    seeds = good_files(folder)[suffix]
    for _ in range(count):
        path = folder / f"damaged{suffix}"
        path.write_bytes(mutated(rng.choice(seeds), rng) or b"\n")
        if suffix == ".toml":
            total += refused(models.read_toml, path)
            continue
        series = rng.choice([None, "id"])
        total += refused(rd.data.read, path, series=series)
        if suffix != ".csv":
            total += refused(rd.data.open_series, path, series="id", progress=False)
    gc.collect()
    return total


def try_runs(run: Path, folder: Path, count: int, seed: int) -> int:
    """Opens damaged runs; how many were refused."""
    rng, total = random.Random(seed), 0
    for _ in range(count):
        path = folder / "damaged"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(run, path)
        if rng.random() < 0.3:
            place = path / rng.choice(["run.json", "model.rd", "rows.rd", "training.csv"])
            place.write_bytes(mutated(place.read_bytes(), rng))
        else:
            alter_run(path, rng)
        assert command(["info", str(path)]) in (0, 2)
        total += refused(lambda path: runs.open_run(path).rows(), path)
    return total


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as `fit` writes it, of a model that was not fitted."""
    path = tmp_path_factory.mktemp("run")
    table = rd.data.read({"y": np.arange(20.0)})
    spec = models.load("local_level")
    model = spec.build()
    (path / "training.csv").write_text("stage,step,nats per observed row\n")
    record = {
        "layout": table.layout,
        "options": {"family": None, "num_steps": 1, "seed": 0},
        "data": {"sha256": "", "described": table.described()},
        "results": {
            "method": "exact",
            "objective": "log-evidence",
            "nats_per_row": -1.0,
            "uncertainty": "No standard errors.",
            "parameters": {
                name: {"value": float(entry.value), "learned": entry.learned}
                for name, entry in parameter_entries(model, table.names).items()
            },
        },
    }
    return write(path, spec, model, None, record, rd.data.Rows.of_table(table)).path


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".nc", ".toml"])
def test_damaged_tables_are_read_or_refused(suffix: str, tmp_path: Path, capfd):
    assert try_files(suffix, tmp_path, 40, seed=0) > 10
    assert capfd.readouterr().err == ""


def test_damaged_runs_are_opened_or_refused(run: Path, tmp_path: Path, capfd):
    assert try_runs(run, tmp_path, 20, seed=0) > 10
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("without", ["total", "rows", "rows_observed", "lower", "upper", "error"])
@pytest.mark.parametrize("null", [True, False])
def test_a_record_without_some_results_is_shown(
    without: str, null: bool, run: Path, tmp_path: Path, capfd
):
    """JSON has no infinity: the end of an interval, for instance, may be null."""
    path = tmp_path / "copy"
    shutil.copytree(run, path)
    record = json.loads((path / "run.json").read_text())
    record["results"] |= {"total": -9.0, "rows": 20, "rows_observed": 20}
    line = record["results"]["parameters"]["level_scale[y]"]
    line |= {"error": 0.1, "lower": 0.0, "upper": 1.0}
    for owner in (line, record["results"]):
        if without in owner:
            del owner[without]
            if null:
                owner[without] = None
    del record["checksum"]
    record["checksum"] = sha256(json.dumps(record, sort_keys=True).encode())
    (path / "run.json").write_text(json.dumps(record))
    assert command(["info", str(path)]) == 0
    assert "local_level" in capfd.readouterr().out


def test_links_pipes_and_devices_in_a_run_are_refused(run: Path, tmp_path: Path, capfd):
    for target in ("/dev/zero", "/etc/passwd", str(run / "run.json"), "pipe", "folder", "deep"):
        for name in ("run.json", "model.rd", "training.csv"):
            path = tmp_path / "damaged"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(run, path)
            (path / name).unlink()
            if target == "pipe":
                os.mkfifo(path / name)
            elif target == "folder":
                (path / name).mkdir()
            elif target == "deep":
                (path / name).write_text("[" * 100_000)
            else:
                (path / name).symlink_to(target)
            assert command(["info", str(path)]) == 2
            captured = capfd.readouterr()
            assert captured.err.count("\n") == 1 and captured.err.startswith("retrodict: error: ")


def test_a_curve_without_a_hash_is_refused(run: Path, tmp_path: Path):
    """It could be a link to a file elsewhere, which a run learned from a stream would copy."""
    path = tmp_path / "copy"
    shutil.copytree(run, path)
    record = json.loads((path / "run.json").read_text())
    del record["files"]["training.csv"], record["checksum"]
    record["checksum"] = sha256(json.dumps(record, sort_keys=True).encode())
    (path / "run.json").write_text(json.dumps(record))
    (path / "training.csv").unlink()
    (path / "training.csv").symlink_to("/etc/passwd")
    with pytest.raises(runs.RunError, match=r"there is no training.csv"):
        runs.open_run(path)


def test_declared_sizes_beyond_memory_are_refused(tmp_path: Path):
    path = tmp_path / "large.nc"
    dataset = xr.Dataset({"y": ("time", np.zeros(1))})
    dataset.to_netcdf(path, engine="scipy")
    content = path.read_bytes()
    at = content.index(b"time") + 4
    path.write_bytes(content[:at] + (2**31 - 1).to_bytes(4, "big") + content[at + 4 :])
    assert refused(rd.data.read, path)
    huge = b"retrodict = 1\n[model]\nname = 'seasonal'\noptions = {period = 1000000000}\n"
    deep = b"retrodict = " + b"[" * 100_000
    for content in (huge, deep):
        (tmp_path / "large.toml").write_bytes(content)
        assert refused(models.read_toml, tmp_path / "large.toml")


def test_endless_hdf5_heap_is_refused(tmp_path: Path):
    """HDF5 goes through the objects of a heap by their sizes, and never ends at a size of zero."""
    path = tmp_path / "heap.nc"
    content = good_files(tmp_path)[".nc"][1]
    at = content.index(b"GCOL") + 16
    for index, size in ((0, 0), (0, 8), (2, 1 << 63)):
        entry = index.to_bytes(8, "little") + size.to_bytes(8, "little")
        path.write_bytes(content[:at] + entry + content[at + 16 :])
        assert refused(rd.data.read, path)
        assert refused(rd.data.open_series, path, series="id", progress=False)


CHILD = """
import resource, signal, sys, tempfile
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
signal.alarm(1200)
import test_files_mutated as t
suffix, run, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
folder = Path(tempfile.mkdtemp(dir=Path(run).parent))
count = t.try_runs(Path(run), folder, 150, seed) if suffix == "run" else \
    t.try_files(suffix, folder, 500, seed)
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".csv", ".parquet", ".nc", ".toml", "run"])
def test_damaged_files_respect_time_and_memory_limits(kind: str, run: Path):
    child = subprocess.run(
        [sys.executable, "-c", CHILD, kind, str(run), "1"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    refusals, megabytes = map(int, child.stdout.split()[-2:])
    assert refusals > 50 and megabytes < 3000
    assert "Traceback" not in child.stderr
