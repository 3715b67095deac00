"""The commands for a user's own data, as a shell runs them: bad input, kills and restarts."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from retrodict import data, models, runs
from retrodict.cli._app import run as command

GOOD = "year,flow\n" + "".join(f"{1900 + i},{10 + i % 3}\n" for i in range(30))

BAD_TABLES = {
    "empty": ("", "is empty"),
    "header alone": ("year,flow\n", "no rows"),
    "text in numbers": (GOOD.replace("1905,12", "1905,many"), "line 7.*'flow'"),
    "duplicated time": (GOOD + "1903,5\n", "1903"),
    "one row": ("year,flow\n1900,1\n", "one row|1 row"),
    "all missing": ("year,flow\n1900,\n1901,\n1902,\n", "flow"),
    "huge value": (GOOD + "1930,1e300\n", "1e\\+?300"),
    "a row too long": (GOOD + "1930,1,2\n", "line 32"),
}

BAD_MODELS = {
    "unknown name": ("local_levle", "local_level"),
    "missing file": ("model.toml", "cannot be read"),
    "missing module": ("no_such_module:model", "cannot be imported"),
    "unknown key": ("retrodict = 1\n[model]\nnam = 'local_level'\n", "model.nam"),
    "code in it": ("retrodict = 1\n[model]\nname = '__import__(\"os\")'\n", "no ready model"),
    "another version": ("retrodict = 2\n[model]\nname = 'local_level'\n", "version"),
    "no TOML": ("model: local_level", "not TOML"),
    "no steps": (
        "retrodict = 1\n[model]\nname = 'poisson_counts'\n[fit]\nnum_steps = 0\n",
        "own.toml: fit.num_steps must be at least 1, got 0",
    ),
    "a start of another length": (
        "retrodict = 1\n[model]\nname = 'local_level'\nstart = {obs_scale = [1.0, 2.0]}\n",
        "own.toml: model.start.obs_scale: .*cannot be",
    ),
    "a file of code": ("folder/own.py:model", "name a module, not its file"),
    "code that ends the program": ("module_that_exits:model", "imported: SystemExit: 3"),
    "other columns": ("module_of_two:model", "observes 2 columns, and the table has 1: flow"),
}


def refused(arguments: list[str], words: str, capsys, out: Path) -> None:
    """The command ends with 2 and one line that holds the words, and nothing is written."""
    import re

    assert command(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("retrodict: error: ")
    assert re.search(words, captured.err), captured.err
    assert not out.exists()


@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables_are_refused_in_one_line(name: str, tmp_path: Path, capsys):
    text, words = BAD_TABLES[name]
    source, out = tmp_path / "table.csv", tmp_path / "run"
    source.write_text(text)
    refused(["fit", str(source), "--model", "local_level", "--out", str(out)], words, capsys, out)


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_are_refused_in_one_line(name: str, tmp_path: Path, capsys, monkeypatch):
    reference, words = BAD_MODELS[name]
    source, out = tmp_path / "table.csv", tmp_path / "run"
    source.write_text(GOOD)
    (tmp_path / "module_that_exits.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "module_of_two.py").write_text(
        "import retrodict as rd\nmodel = rd.models.local_level(obs_dim=2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    if "\n" in reference or reference.startswith("model:"):
        (tmp_path / "own.toml").write_text(reference)
        reference = str(tmp_path / "own.toml")
    refused(["fit", str(source), "--model", reference, "--out", str(out)], words, capsys, out)


def test_missing_column_and_missing_file_are_refused(tmp_path: Path, capsys):
    source, out = tmp_path / "table.csv", tmp_path / "run"
    source.write_text(GOOD)
    options = ["--model", "local_level", "--out", str(out)]
    refused(["fit", str(source), "--columns", "flw", *options], "flow", capsys, out)
    refused(["fit", str(tmp_path / "none.csv"), *options], "none.csv", capsys, out)


def test_dry_run_prints_table_and_model(tmp_path: Path, capsys):
    source = tmp_path / "table.csv"
    source.write_text(GOOD.replace("1905,12\n", ""))
    assert command(["fit", str(source), "--model", "local_level", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1 row inserted in gaps" in lines
    assert "time: column 'year', 1900 to 1929, step 1" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_messages_name_the_options_of_the_command_line(tmp_path: Path, capsys):
    source, out = tmp_path / "table.csv", tmp_path / "run"
    fit = ["fit", str(source), "--model", "local_level", "--out", str(out)]
    source.write_text(GOOD + "1903,5\n")
    refused(fit, "identifies series with --series$", capsys, out)
    source.write_text(GOOD.replace("19", "01/02/19"))
    refused(fit, "such as --time-format %d/%m/%Y", capsys, out)
    source.write_text(GOOD.replace("flow", "time"))
    refused(fit, "name it with --time$", capsys, out)
    source.write_text("year,flow\n1900,1\n")
    refused(fit, "step of the times with --freq$", capsys, out)
    source.write_text(GOOD)
    refused(
        [*fit, "--freq", "0"],
        "--freq 0, but the times are numbers; give a number above 0",
        capsys,
        out,
    )
    source.write_text("\n".join(GOOD.splitlines()[:2]) + "\n")
    refused(fit, "pass the step of the times with --freq", capsys, out)
    source.write_text(GOOD)
    refused([*fit, "--columns", "year,flow"], "Name these columns one by one", capsys, out)


def test_dry_run_refuses_the_same_arguments_as_fit(tmp_path: Path, capsys):
    source, out = tmp_path / "table.csv", tmp_path / "run"
    source.write_text(GOOD)
    fit = ["fit", str(source), "--dry-run", "--model"]
    irregular = ["--option", "irregular=true"]
    for arguments, words in (
        (
            ["local_level", "--step-input"],
            "takes no inputs, .*table has step.*--option irregular=true",
        ),
        (["local_level", *irregular], "the length of the step.* and the table has none.*--inputs"),
        (
            ["poisson_counts", *irregular, "--option", "exposure=true", "--step-input"],
            "the length of the step, the exposure,.* and the table has step\\.",
        ),
        (["binomial_counts"], "the number of trials,.* and the table has none"),
        (["range_bearing"], "model of 2 columns, got 1"),
        (
            ["binomial_counts", "--option", "total_count=11"],
            "outnumber trials, and row 3 of series 1, column 1, holds 12 of 11",
        ),
    ):
        refused([*fit, *arguments], words, capsys, out)


def test_options_are_passed_and_printed(tmp_path: Path, capsys):
    source, out = tmp_path / "table.csv", tmp_path / "run"
    source.write_text(GOOD)
    fit = ["fit", str(source), "--model", "seasonal"]
    assert command([*fit, "--option", "period=4", "--option", "slope=true", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "option period: 4" in lines and "option slope: true" in lines
    assert "option harmonics: 0 (default)" in lines
    assert command([*fit, "--option", "period=4", "--dry-run", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["options"]["period"] == 4 and content["model"]["model"]["options"] == {
        "period": 4
    }
    for text, words in (
        ("periods=4", "not an option of seasonal.*period"),
        ("period=four", "period must be a whole number"),
        ("slope=1", "slope must be true or false"),
        ("period", "key=value"),
        ("period=-4", "period"),
    ):
        refused([*fit, "--option", text, "--out", str(out)], words, capsys, out)
    (tmp_path / "own.toml").write_text(
        "retrodict = 1\n[model]\nname = 'seasonal'\noptions = {period = 4, slope = true}\n"
    )
    fit = ["fit", str(source), "--model", str(tmp_path / "own.toml"), "--option", "period=6"]
    assert command([*fit, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "option period: 6" in lines and "option slope: true" in lines


def program(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from retrodict.cli import main; main()", *arguments]


@pytest.mark.slow
def test_killed_stream_resumes(tmp_path: Path):
    """Killed without notice in the middle; the answers are those of a stream that was not."""
    rng = np.random.default_rng(0)
    rows = 40_000
    values = np.cumsum(rng.standard_normal(rows)) + rng.standard_normal(rows)
    frame = pd.DataFrame({"t": np.arange(rows), "y": values})
    source, run = tmp_path / "all.csv", tmp_path / "run"
    frame.to_csv(source, index=False)
    frame.iloc[:200].to_csv(tmp_path / "some.csv", index=False)
    fit = program("fit", str(tmp_path / "some.csv"), "--model", "local_level", "--out", str(run))
    subprocess.run(fit, check=True, capture_output=True)

    def stream(name: str) -> list[str]:
        state = ["--state", str(tmp_path / f"{name}.state")]
        return program("stream", str(run), *state, "--out", str(tmp_path / f"{name}.csv"))

    with source.open("rb") as file:
        subprocess.run(stream("whole"), stdin=file, check=True)
    with source.open("rb") as file:
        process = subprocess.Popen(stream("cut"), stdin=subprocess.PIPE)
        lines = file.read().splitlines(keepends=True)
        if process.stdin is None:
            raise RuntimeError("the stream has no input")
        for start in range(0, rows // 2, 2000):
            process.stdin.write(b"".join(lines[start : start + 2000]))
            process.stdin.flush()
            time.sleep(0.3)
        deadline = time.monotonic() + 120
        while not (tmp_path / "cut.state").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
    assert (tmp_path / "cut.state").exists()
    with source.open("rb") as file:
        subprocess.run(stream("cut"), stdin=file, check=True)
    uninterrupted, cut = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("whole", "cut"))
    assert len(uninterrupted) == rows - 200  # those of the fit are known
    assert (tmp_path / "cut.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.slow
def test_killed_fit_resumes_with_the_same_result(tmp_path: Path):
    """Killed up to three times, wherever it is: learning, training or at standard errors."""
    rng = np.random.default_rng(0)
    rate = np.exp(1.0 + 0.4 * np.sin(np.arange(40) / 4))
    source = tmp_path / "counts.csv"
    pd.DataFrame({"t": np.arange(40), "n": rng.poisson(rate)}).to_csv(source, index=False)
    # What is compiled is kept, so that a fit that goes on does not spend its time on that again.
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}

    def fit(name: str) -> list[str]:
        options = ["--model", "poisson_counts", "--family", "gated", "--steps", "600"]
        return program("fit", str(source), *options, "--out", str(tmp_path / name))

    shared = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    began = time.monotonic()
    subprocess.run(fit("whole"), check=True, **shared)
    seconds = time.monotonic() - began
    kills = 0
    for share in rng.uniform(0.2, 0.8, size=3):
        process = subprocess.Popen(fit("cut"), **shared)
        try:
            process.wait(timeout=share * seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
            process.wait()
    if not (tmp_path / "cut" / "run.json").exists():
        subprocess.run(fit("cut"), check=True, **shared)
    assert kills
    one, other = (runs.read_record(tmp_path / name) for name in ("whole", "cut"))
    assert other["files"] == one["files"]  # model, family and training, to the last bit
    for record in (one, other):
        del record["results"]["seconds"]
    assert other["results"] == one["results"]


@pytest.mark.parametrize(
    ("freq", "period"), [("h", 24), ("D", 7), ("B", 5), ("MS", 12), ("ME", 12), ("QS", 4)]
)
def test_the_period_of_a_season_follows_from_the_step(freq: str, period: int):
    dates = pd.date_range("2020-01-01", periods=80, freq=freq)
    table = data.read(pd.DataFrame({"date": dates, "y": np.arange(80.0)}))
    job = runs.FitJob(table, "seasonal", Path())
    assert job.spec.options == {"period": period} and f"period={period}," in job.notice
    assert job.starting_model().state_dim == period
    # What was chosen stays, and other models have none.
    for chosen in (models.load("seasonal").with_options(["period=9"]), job.spec):
        other = runs.FitJob(table, chosen, Path())
        assert (other.spec, other.notice) == (chosen, "")
    assert runs.FitJob(table, "local_level", Path()).notice == ""


def test_undetermined_season_period_is_asked_for(tmp_path: Path, capsys):
    source, out = tmp_path / "table.csv", tmp_path / "run"
    source.write_text(GOOD)
    fit = ["fit", str(source), "--model", "seasonal"]
    refused(
        [*fit, "--out", str(out)], "needs a period.*step of 1,.*--option period=12", capsys, out
    )
    refused([*fit, "--dry-run"], "needs a period", capsys, out)
    with pytest.raises(runs.RunError, match=r"such as models\.seasonal\(period=12\)\.$"):
        runs.FitJob(data.read(source), "seasonal", out)
    dates = pd.date_range("2020-01-01", periods=30)
    pd.DataFrame({"date": dates, "flow": np.arange(30.0)}).to_csv(source, index=False)
    assert command([*fit, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "option period: 7" in captured.out.splitlines()
    assert "The step of the times is 1D: period=7, the days of a week." in captured.err


@pytest.fixture
def own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Iterator[Path]:
    """A run of a model in Python that notes when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("table.csv").write_text(GOOD)
    Path("model_of_a_run.py").write_text(
        "import pathlib, retrodict as rd\n"
        "pathlib.Path('imported').touch()\n"
        "model = rd.models.local_level()\n"
    )
    fit = ["fit", "table.csv", "--model", "model_of_a_run:model", "--out", "run"]
    assert command(fit) == 0
    sys.modules.pop("model_of_a_run")
    Path("imported").unlink()
    capsys.readouterr()
    yield tmp_path
    sys.modules.pop("model_of_a_run", None)


def test_run_imports_only_named_modules(own_run: Path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    commands = [
        ["smooth", "run", "table.csv"],
        ["forecast", "run", "table.csv", "--steps", "2"],
        ["check", "run", "table.csv"],
        ["plot", "run", "table.csv", "--out", "a.png"],
        ["stream", "run"],
    ]
    for arguments in commands:
        words = r"pass --model model_of_a_run:model$"
        refused(arguments, words, capsys, own_run / "a.png")
        named = [*arguments, "--model", "os:getcwd"]
        refused(named, "a run of model_of_a_run:model, got --model os", capsys, own_run / "a.png")
    assert command(["info", "run"]) == 0
    assert not Path("imported").exists()
    with pytest.raises(runs.RunError, match="model='model_of_a_run:model'"):
        runs.open_run("run")
    capsys.readouterr()
    assert command([*commands[0], "--model", "model_of_a_run:model"]) == 0
    assert Path("imported").exists()
    import retrodict as rd

    direct = runs.open_run("run", model=rd.models.local_level())
    by_function = runs.open_run("run", model=rd.models.local_level)
    assert direct.record == by_function.record
