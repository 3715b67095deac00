"""The command line: what it prints, what it writes, and how it refuses."""

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest

from retrodict.cli import main
from retrodict.experiments import demo

PNG = b"\x89PNG\r\n\x1a\n"


class Outcome(NamedTuple):
    """What a command left behind."""

    code: object
    out: str
    err: str


@pytest.fixture
def retrodict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Runs the program in this process, with a demo of few rows."""
    monkeypatch.setattr(demo, "run", partial(demo.run, num_times=30))

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
def test_help_explains(retrodict: Callable[..., Outcome], arguments: tuple[str, ...]):
    code, out, err = retrodict(*arguments)
    assert code == 0 and err == ""
    assert "Usage: retrodict" in out and "demo" in out and "--version" in out


def test_help_of_the_demo(retrodict: Callable[..., Outcome]):
    code, out, err = retrodict("demo", "--help")
    assert code == 0 and err == ""
    assert all(option in out for option in ("--out", "--seed", "--json"))


def test_version(retrodict: Callable[..., Outcome]):
    try:
        expected = f"retrodict {version('retrodict')}\n"
    except PackageNotFoundError:
        expected = "retrodict (not installed: running from its source)\n"
    assert retrodict("--version") == (0, expected, "")


def test_the_demo_writes_a_figure_and_a_summary(retrodict: Callable[..., Outcome], tmp_path: Path):
    out = tmp_path / "made" / "on the way"
    code, printed, _ = retrodict("demo", "--out", str(out))
    assert code == 0
    assert "log-evidence" in printed and "coverage" in printed
    # Nothing half-written is left beside them.
    assert sorted(path.name for path in out.iterdir()) == ["smoothing.png", "summary.json"]
    assert (out / "smoothing.png").read_bytes().startswith(PNG)
    summary = demo.DemoResult(**json.loads((out / "summary.json").read_text()))
    assert summary.num_times == 30 and 0 < summary.num_missing < 30
    assert summary.identity_error < 1e-10


def test_json_is_all_that_is_printed(retrodict: Callable[..., Outcome], tmp_path: Path):
    code, printed, _ = retrodict("demo", "--out", str(tmp_path), "--seed", "3", "--json")
    assert code == 0
    assert json.loads(printed) == json.loads((tmp_path / "summary.json").read_text())
    assert json.loads(printed)["seed"] == 3


def test_a_folder_that_cannot_be_made_is_refused(retrodict: Callable[..., Outcome], tmp_path: Path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(retrodict("demo", "--out", str(out)), "cannot write to", str(out))


def test_a_folder_that_cannot_be_written_to_is_refused(
    retrodict: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Permissions do not bind every user that runs tests, so the answer is given here.
    monkeypatch.setattr(demo.os, "access", lambda path, mode: mode != demo.os.W_OK)
    refused(retrodict("demo", "--out", str(tmp_path)), "cannot write to", "Permission denied")


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("dmeo",), "dmeo"),
        (("demo", "--seed", "one"), "--seed"),
        (("demo", "--seed", "-1"), "--seed"),
        (("demo", "--colour"), "--colour"),
        (("demo", "--out"), "--out"),
        (("demo", "more"), "more"),
    ],
)
def test_mistakes_get_one_line(
    retrodict: Callable[..., Outcome], arguments: tuple[str, ...], word: str
):
    refused(retrodict(*arguments), word)


@pytest.mark.parametrize("extra", ["typer", "rich", "matplotlib"])
def test_missing_extras_are_named(
    retrodict: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: str,
):
    for module in list(sys.modules):
        if module.partition(".")[0] == extra or module in (
            "retrodict.cli._app",
            "retrodict.experiments.demo",
        ):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("retrodict.experiments.demo")
    monkeypatch.setitem(sys.modules, extra, None)
    code, out, err = retrodict("demo", "--out", str(tmp_path))
    assert (code, out) == (1, "")
    assert err == f"retrodict: error: the command line needs {extra}; install retrodict[cli]\n"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "summary.json"
    demo.write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(demo.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        demo.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
