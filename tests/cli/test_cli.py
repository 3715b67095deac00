"""The command line: what it prints, what it writes, and how it refuses."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import retrodict as rd
from retrodict import _files
from retrodict._interface import Argument, ModelArgument, UserError
from retrodict._workspace import Progress
from retrodict.cli import interrupt_again, main
from retrodict.cli._errors import as_line, writing
from retrodict.experiments import demo, reproduction
from retrodict.experiments._report import Chapter, Section, Table


class Outcome(NamedTuple):
    """What a command left behind."""

    code: object
    out: str
    err: str


@pytest.fixture
def retrodict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Runs the program in this process, with a demo that has been seen before."""

    def fake_demo(out: Path, *, seed: int, progress: Progress) -> Chapter:
        _files.ensure_folder(out)
        progress.begin("a stage")
        progress.step(1, 2)
        progress.end("a stage", cached=False)
        nan = float("nan")
        scores = {
            "gated": demo.SmootherScores(0.012, 0.19, 0.9, 0.04, 20.0, 6e-4, ""),
            "FFBSi 1000": demo.SmootherScores(0.004, 0.03, 0.9, nan, nan, 0.4, ""),
        }
        table = Table("scores", demo.COLUMNS, [score.row(name) for name, score in scores.items()])
        numbers = {"scores": {name: score._asdict() for name, score in scores.items()}}
        return Chapter("demo", "", "", [Section("", "", [table])], numbers, {})

    monkeypatch.setattr(reproduction, "demonstrate", fake_demo)

    def run(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        return Outcome(exit_.value.code, captured.out, captured.err)

    return run


def refused(outcome: Outcome, *words: str) -> None:
    """Exit code 2, one line on stderr with these words, nothing on stdout."""
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("retrodict: error: ")
    assert outcome.err.count("\n") == 1 and outcome.err.endswith("\n")
    assert all(word in outcome.err for word in words)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_commands_and_exit_codes(
    retrodict: Callable[..., Outcome], arguments: tuple[str, ...]
):
    code, out, err = retrodict(*arguments)
    assert code == 0 and err == ""
    assert "Usage: retrodict" in out and "--version" in out
    assert "demo" in out and "reproduce" in out and "Exit codes" in out


def test_demo_help_lists_its_options(retrodict: Callable[..., Outcome]):
    code, out, err = retrodict("demo", "--help")
    assert code == 0 and err == ""
    assert all(option in out for option in ("--out", "--seed", "--json", "Example"))


def test_reproduce_help_lists_its_options(retrodict: Callable[..., Outcome]):
    code, out, err = retrodict("reproduce", "--help")
    assert code == 0 and err == ""
    words = ("linear", "multivariate", "nonlinear", "bounds", "all", "--quick", "--seed", "--out")
    assert all(word in out for word in (*words, "--json", "Example:"))


def test_help_and_info_do_not_import_jax(tmp_path: Path):
    """They answer at once: JAX alone takes a second to import."""
    code = (
        "import sys; from retrodict.cli._app import run; code = run(sys.argv[1:]);"
        "sys.exit(code if 'jax' not in sys.modules and 'numpy' not in sys.modules else 9)"
    )
    for arguments, expected in ((["--help"], 0), (["fit", "--help"], 0), (["info", "none"], 2)):
        process = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
        assert process.returncode == expected


def test_exported_names_are_imported_on_first_use():
    assert {"fit", "kalman_smoother", "models", "data"} <= {*dir(rd)}
    assert all(getattr(rd, name) is getattr(rd, name) for name in dir(rd))
    with pytest.raises(AttributeError, match="'retrodict' has no attribute 'kalman_smother'"):
        getattr(rd, "kalman_smother")  # noqa: B009


def test_removed_folder_is_named(tmp_path: Path):
    with (
        pytest.raises(UserError, match=r"^The folder .* of a.rd does not exist"),
        writing(tmp_path / "answers.csv"),
    ):
        rd.save(tmp_path / "removed" / "a.rd", 1)


def test_version_option_prints_the_installed_version(retrodict: Callable[..., Outcome]):
    try:
        expected = f"retrodict {version('retrodict')}\n"
    except PackageNotFoundError:
        expected = "retrodict (not installed: running from its source)\n"
    assert retrodict("--version") == (0, expected, "")


def test_the_demo_prints_a_table(retrodict: Callable[..., Outcome], tmp_path: Path):
    code, printed, log = retrodict("demo", "--out", str(tmp_path / "made"))
    assert code == 0
    assert "gated" in printed and "0.012" in printed and "90%" in printed
    assert "–" in printed and "nan" not in printed
    assert str(tmp_path / "made" / "report.html") in printed.replace("\n", "")
    assert "a stage" in log


def test_json_option_prints_only_json(retrodict: Callable[..., Outcome], tmp_path: Path):
    code, printed, _ = retrodict("demo", "--out", str(tmp_path), "--seed", "3", "--json")
    assert code == 0
    answer = json.loads(printed)
    assert answer["seed"] == 3 and answer["scores"]["gated"]["rmse"] == 0.012
    assert answer["scores"]["FFBSi 1000"]["gap"] is None


@pytest.fixture
def reproduced(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What `reproduce` was asked for; it answers at once."""
    asked: list[tuple] = []

    def answer(names, out: Path, *, quick: bool, seed: int, progress) -> reproduction.Reproduced:
        asked.append((tuple(names), out, quick, seed))
        for name in names:
            stage = progress(name, 1)
            stage.begin("all of it")
            stage.end("all of it", cached=False)
        chapters = tuple(Chapter(n, f"Title of {n}", "Found.", [], {"x": 1.5}, {}) for n in names)
        return reproduction.Reproduced(out / "report.html", chapters, dict.fromkeys(names, 1.0))

    monkeypatch.setattr(reproduction, "reproduce", answer)
    return asked


def test_reproduce_runs_the_named_experiments(
    retrodict: Callable[..., Outcome], reproduced: list[tuple], tmp_path: Path
):
    code, printed, log = retrodict("reproduce", "bounds", "--quick", "--out", str(tmp_path))
    assert code == 0 and "Title of bounds" in printed and "report.html" in printed
    assert "bounds 1/1  all of it" in log
    assert retrodict("reproduce", "--seed", "4", "--out", str(tmp_path)).code == 0
    every = tuple(reproduction.EXPERIMENTS)
    assert every == ("linear", "multivariate", "nonlinear", "bounds")
    assert reproduced == [(("bounds",), tmp_path, True, 0), (every, tmp_path, False, 4)]


def test_reproduce_prints_json(
    retrodict: Callable[..., Outcome], reproduced: list[tuple], tmp_path: Path
):
    code, printed, _ = retrodict("reproduce", "linear", "--out", str(tmp_path), "--json")
    report = str(tmp_path / "report.html")
    assert code == 0
    assert json.loads(printed) == {"report": report, "experiments": {"linear": {"x": 1.5}}}


def test_full_disk_is_explained(
    retrodict: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reproduction, "reproduce", full)
    refused(
        retrodict("reproduce", "linear", "--out", str(tmp_path)),
        "No space left on device",
        "What was computed is kept",
    )


def test_interruption_reports_that_results_are_kept(
    retrodict: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduction, "reproduce", interrupted)
    code, out, err = retrodict("reproduce", "linear", "--out", str(tmp_path))
    assert (code, out) == (130, "")
    assert "What was done is kept" in err and "interrupted" in err and "Traceback" not in err


def test_folder_that_cannot_be_created_is_refused(
    retrodict: Callable[..., Outcome], tmp_path: Path
):
    (tmp_path / "file").write_text("")
    for command in (("demo",), ("reproduce", "linear", "--quick")):
        for out in (tmp_path / "file", tmp_path / "file" / "below"):
            refused(retrodict(*command, "--out", str(out)), "cannot write to", str(out))


def test_unwritable_folder_is_refused(
    retrodict: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Permissions do not bind every user that runs tests, so the answer is given here.
    monkeypatch.setattr(_files.os, "access", lambda path, mode: not mode & _files.os.W_OK)
    for command in ("demo", "reproduce"):
        refused(retrodict(command, "--out", str(tmp_path)), "cannot write to", "Permission denied")


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("dmeo",), "dmeo"),
        (("demo", "--seed", "one"), "--seed"),
        (("demo", "--seed", "-1"), "--seed"),
        (("demo", "--colour"), "--colour"),
        (("demo", "--out"), "--out"),
        (("demo", "more"), "more"),
        (("reproduce", "cubic"), "cubic"),
        (("reproduce", "linear", "--seed", "x"), "--seed"),
    ],
)
def test_usage_errors_print_one_line(
    retrodict: Callable[..., Outcome], arguments: tuple[str, ...], word: str
):
    refused(retrodict(*arguments), word)


@pytest.mark.parametrize("extra", ["typer", "rich", "matplotlib", "jinja2"])
def test_missing_optional_packages_are_named(
    retrodict: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: str,
):
    for module in list(sys.modules):
        if module.partition(".")[0] == extra or module.startswith(
            ("retrodict.cli.", "retrodict.experiments")
        ):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("retrodict.experiments")
    monkeypatch.setitem(sys.modules, extra, None)
    code, out, err = retrodict("demo", "--out", str(tmp_path))
    assert (code, out) == (1, "")
    assert err == f"retrodict: error: the command line needs {extra}; install retrodict[cli]\n"


@pytest.mark.parametrize(
    "argument, python, option",
    [
        (Argument("freq", "1 month"), "freq='1 month'", "--freq '1 month'"),
        (Argument("columns"), "columns=...", "--columns"),
        (Argument("step_input", True), "step_input=True", "--step-input"),
        (Argument("after"), "after=...", "--after TABLE"),
        (Argument("after", "prior"), "after='prior'", "--from-prior"),
        (
            ModelArgument("irregular", True, model="local_level"),
            "models.local_level(irregular=True)",
            "--option irregular=true",
        ),
        (Argument("times", hint="from data.read_times"), "times=... from data", "--at FILE"),
    ],
)
def test_errors_name_python_arguments_or_cli_options(argument: Argument, python: str, option: str):
    cause = UserError("pass {it}", it=argument)
    error = UserError("file.csv: {cause}; or {freq} as text", cause=cause)
    assert (error.argument, error.value) == (argument.name, argument.value)
    assert f"pass {python}" in str(error)
    assert as_line(error) == f"file.csv: pass {option}; or {{freq}} as text"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "summary.json"
    _files.write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(_files.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        _files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_interrupt_swallowed_by_a_callback_is_raised_again():
    lost = SimpleNamespace(exc_type=KeyboardInterrupt)
    # A process that was started in the background ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_again(lost)
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)


def test_opened_files_do_not_replace_closed_standard_streams(tmp_path):
    """A message of a library would be written into them; exit codes stay as they are."""
    code = (
        "import os, sys; from retrodict.cli import _open_standard_files as opened; opened();"
        f"assert os.open({str(tmp_path / 'file')!r}, os.O_CREAT) > 2; sys.stderr.write('x')"
    )
    text = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- >&- 2>&-"
    assert subprocess.run(text, shell=True).returncode == 0


@pytest.mark.slow
def test_batches_of_many_states_do_not_deadlock_on_two_cores(tmp_path: Path):
    """With one thread per core, jaxlib 0.10 hangs in two of three of these commands."""
    months = [f"{2001 + k // 12}-{k % 12 + 1:02d},{k % 12 + 0.1 * (k % 7)}" for k in range(60)]
    (tmp_path / "months.csv").write_text("month,sales\n" + "\n".join(months) + "\n")
    environment = {name: v for name, v in os.environ.items() if name != "PJRT_NPROC"}
    code = "import sys; from retrodict.cli import main; main(sys.argv[1:])"
    words = ("fit", "months.csv", "--model", "seasonal", "--out", "run")
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
