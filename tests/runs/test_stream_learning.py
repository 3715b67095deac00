"""Streams that are learned from: what is answered, what is learned, and how they go on."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import stats

import retrodict as rd
from retrodict import data, models, runs
from retrodict.cli._app import run as command
from retrodict.cli._display import LearningDisplay
from retrodict.runs import _run, _stream, _stream_files, _stream_learning, _stream_lines

LAG = 3
TRUTH = {"level_scale": 80.0, "obs_scale": 60.0}
START = {"level_scale": 40.0, "obs_scale": 120.0}


def local_level(level_scale: float, obs_scale: float) -> rd.StateSpaceModel:
    return models.local_level(
        level_scale=level_scale, obs_scale=obs_scale, prior_mean=1000.0, prior_scale=100.0
    )


def written_run(
    path: Path,
    model: rd.StateSpaceModel,
    family: Any,
    name: str,
    table: data.Table | None = None,
) -> runs.Run:
    """A run as `fit` writes it, with a model that is far from what will come."""
    rows = data.Rows.of_table(table)
    if table is None:
        table = data.read({"year": np.arange(1871, 1881), "flow": np.arange(10.0)})
    path.mkdir()
    (path / _run.TRAINING).write_text("stage,step,nats per observed row\nparameters,1,-6.0\n")
    record = {
        "layout": table.layout,
        "options": {"family": None, "num_steps": 1, "seed": 0},
        "data": {"sha256": "0", "described": table.described()},
        "results": {
            "method": "exact" if family is None else "amortised",
            "objective": "log-evidence" if family is None else "ELBO",
            "nats_per_row": -6.0,
            "seconds": 1.0,
            "parameters": {},
            "uncertainty": "None.",
        },
    }
    return _run.write(path, models.load(name), model, family, record, rows)


@pytest.fixture
def exact(tmp_path: Path) -> runs.Run:
    return written_run(tmp_path / "exact", local_level(**START), None, "local_level")


def rows_of(ys: np.ndarray) -> list[bytes]:
    frame = pd.DataFrame({"year": 1900 + np.arange(len(ys)), "flow": ys})
    return frame.to_csv(index=False).encode().splitlines(keepends=True)


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    ys = local_level(**TRUTH).simulate(jax.random.key(0), 1500)[1]
    return rows_of(np.asarray(ys)[:, 0])


def source_of(lines: list[bytes]) -> io.BytesIO:
    return io.BytesIO(b"".join(lines))


class Pieces:
    """A source that gives some lines at a time, and ends as a killed program would see it."""

    def __init__(self, lines: list[bytes], sizes: list[int], then: type[BaseException]):
        self.lines, self.sizes, self.then = list(lines), list(sizes), then

    def read(self, _: int) -> bytes:
        if not self.sizes:
            raise self.then
        size = self.sizes.pop(0)
        now, self.lines = self.lines[:size], self.lines[size:]
        return b"".join(now)


def learned_arrays(place: Path) -> list[np.ndarray]:
    """Every number of a state."""
    fields, _ = rd.load(place)
    arrays = [leaf for leaf in jax.tree.leaves(fields)]
    return [
        np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)
        for a in arrays
    ]


def test_zero_learning_rate_equals_plain_stream(exact, lines, tmp_path):
    frozen, still = tmp_path / "frozen.csv", tmp_path / "still.csv"
    runs.stream(exact, source_of(lines[:300]), frozen, lag=LAG, flush=True, after="prior")
    learning = runs.Learning("model", rate=0.0)
    runs.stream(
        exact, source_of(lines[:300]), still, lag=LAG, flush=True, learning=learning, after="prior"
    )
    one, other = pd.read_csv(frozen), pd.read_csv(still)
    assert list(one) == list(other) and len(one) == 299 + LAG
    np.testing.assert_allclose(one, other, rtol=1e-9)


def test_learned_model_becomes_a_run(exact, lines, tmp_path):
    updates: list[runs.Learned] = []
    learning = runs.Learning(
        "both",
        rate=0.01,
        history=tmp_path / "history.csv",
        figure=tmp_path / "history.png",
        save_run=tmp_path / "new",
        progress=updates.append,
    )
    out = io.BytesIO()
    assert (
        runs.stream(exact, source_of(lines), out, lag=LAG, learning=learning, after="prior") == 1500
    )
    last = updates[-1]
    assert (last.rows, last.skipped) == (1500, 0)
    assert last.start == {f"{name}[flow]": pytest.approx(value) for name, value in START.items()}
    for name, value in TRUTH.items():
        assert last.now[f"{name}[flow]"] == pytest.approx(value, rel=0.15)
    history = pd.read_csv(tmp_path / "history.csv")
    assert history["row"].tolist() == list(range(100, 1501, 100))
    assert history["time"].tolist() == list(range(1999, 3400, 100))
    assert history["elbo_per_row"].iloc[-1] > history["elbo_per_row"].iloc[0] + 0.05
    assert history["obs_scale[flow]"].iloc[-1] == last.now["obs_scale[flow]"]
    assert (tmp_path / "history.png").read_bytes()[:4] == b"\x89PNG"

    new = runs.open_run(tmp_path / "new")
    parameters = new.record["results"]["parameters"]
    assert {name: line["value"] for name, line in parameters.items() if line["learned"]} == last.now
    # Rows at the end are answered as the new run smooths them.
    table = data.read(pd.read_csv(source_of([lines[0], *lines[-200:]])), **new.layout)
    smoothed = runs.smooth(new, table)
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    off = np.abs(answers["level_mean"].iloc[-1] - float(smoothed.mean[0, -1, 0]))
    assert off < 0.05 * answers["level_std"].iloc[-1]
    assert command(["info", str(new.path)]) == 0
    with pytest.raises(runs.RunError, match="exists, and runs are not overwritten"):
        runs.stream(exact, source_of([]), io.BytesIO(), lag=LAG, learning=learning, after="prior")


def test_interrupted_learning_resumes_bit_for_bit(exact, lines, tmp_path, monkeypatch):
    """However rows arrive, and wherever it is interrupted."""
    lines = [*lines[:150], b"2049,\n", *lines[155:400]]  # nothing seen, and rows that are missing

    def learning(name: str) -> runs.Learning:
        return runs.Learning("model", 0.01, history=tmp_path / f"{name}.h", history_every=30)

    def go(name: str, source: Any) -> None:
        state, out = tmp_path / f"{name}.rd", tmp_path / f"{name}.csv"
        runs.stream(
            exact, source, out, lag=LAG, state=state, learning=learning(name), after="prior"
        )

    go("whole", source_of(lines))
    with pytest.raises(KeyboardInterrupt):  # before anything was kept
        go("cut", Pieces(lines, [50], KeyboardInterrupt))
    monkeypatch.setattr(_stream, "SECONDS_BETWEEN_SAVES", 0.0)
    with pytest.raises(KeyboardInterrupt):
        go("cut", Pieces(lines, [1, 1, 2, 70, 1], KeyboardInterrupt))
    monkeypatch.setattr(_stream, "SECONDS_BETWEEN_SAVES", 1e9)
    with pytest.raises(KeyboardInterrupt):  # what came after the last state is done again
        go("cut", Pieces(lines, [90, 200], KeyboardInterrupt))
    assert (tmp_path / "cut.csv").stat().st_size > 0
    go("cut", Pieces(lines, [40, 260, 90, 10, 0], KeyboardInterrupt))
    assert (tmp_path / "cut.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert (tmp_path / "cut.h").read_bytes() == (tmp_path / "whole.h").read_bytes()
    for one, other in zip(
        learned_arrays(tmp_path / "cut.rd"), learned_arrays(tmp_path / "whole.rd"), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_outlier_bursts_leave_results_finite(exact, lines, tmp_path):
    ys = np.array([float(line.split(b",")[1]) for line in lines[1:]])
    ys[300:330] = np.nan
    ys[500:505] = 1e6 * (-1.0) ** np.arange(5)
    updates: list[runs.Learned] = []
    out = io.BytesIO()
    learning = runs.Learning("model", 0.01, progress=updates.append)
    runs.stream(exact, source_of(rows_of(ys)), out, lag=LAG, learning=learning, after="prior")
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    assert len(answers) == 1500
    assert np.all(np.isfinite(answers.iloc[LAG:]))
    for name, value in TRUTH.items():
        assert updates[-1].now[f"{name}[flow]"] == pytest.approx(value, rel=0.3)
    assert -6.3 < updates[-1].elbo < -6.0


def test_overflowing_rows_are_counted_as_skipped(lines, tmp_path):
    tiny = local_level(level_scale=1e-6, obs_scale=1e-6)
    run = written_run(tmp_path / "tiny", tiny, None, "local_level")
    ys = np.full(30, 1000.0)
    ys[10:12] = 1e150  # whose squares overflow in units of the noise
    updates: list[runs.Learned] = []
    out, learning = io.BytesIO(), runs.Learning("model", 0.01, progress=updates.append)
    runs.stream(run, source_of(rows_of(ys)), out, lag=LAG, learning=learning, after="prior")
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    assert updates[-1].skipped == 2 and np.isfinite(updates[-1].elbo)
    # They are answered as rows in which nothing was seen.
    np.testing.assert_allclose(answers["level_mean"], 1000.0)
    assert np.all(answers["level_std"][10:12] > answers["level_std"][9])


BAD: dict[str, tuple[list[str], str]] = {
    "nothing to learn": (["--rate", "0.1"], "--rate: nothing is learned without --learn"),
    "no family": (["--learn", "family"], "has no family to learn"),
    "no window": (["--learn", "model", "--window", "4"], "needs no window"),
    "a rate beyond": (["--learn", "model", "--rate", "1.5"], "less than 1"),
    "a rate that never shrinks": (
        ["--learn", "model", "--rate", "0", "--schedule", "robbins-monro"],
        "never shrinks",
    ),
    "a figure of nothing": (["--learn", "model", "--figure", "a.png"], "drawn from the history"),
    "a figure of no format": (
        ["--learn", "model", "--history", "h.csv", "--figure", "a.jpg"],
        "ends in .png",
    ),
    "a folder nowhere": (["--learn", "model", "--save-run", "no/where"], "does not exist"),
    "another part": (["--learn", "all"], "'all' is not one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_in_one_line(name, exact, monkeypatch, tmp_path, capsys):
    options, words = BAD[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert command(["stream", str(exact.path), "--from-prior", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err


def test_state_of_another_learner_is_refused(exact, lines, tmp_path):
    place = tmp_path / "state"

    def go(learning: runs.Learning | None) -> None:
        source = source_of(lines[:5])
        runs.stream(
            exact, source, io.BytesIO(), lag=LAG, state=place, learning=learning, after="prior"
        )

    go(runs.Learning("model", 0.01))
    for other in (runs.Learning("model", 0.02), None):
        with pytest.raises(runs.RunError, match="other options of learning"):
            go(other)


def test_foreign_file_is_not_touched(exact, lines, tmp_path):
    letter = tmp_path / "letter.txt"
    letter.write_text("dear")
    learning = runs.Learning("model", 0.01, history=letter)
    with pytest.raises(runs.RunError, match="exists, and is not of this stream"):
        runs.stream(
            exact, source_of(lines[:5]), io.BytesIO(), lag=LAG, learning=learning, after="prior"
        )
    runs.stream(
        exact, source_of(lines[:5]), io.BytesIO(), lag=LAG, state=tmp_path / "s", after="prior"
    )
    with pytest.raises(runs.RunError, match="exists, and is not of this stream"):
        runs.stream(
            exact, source_of(lines[:9]), letter, lag=LAG, state=tmp_path / "s", after="prior"
        )
    assert letter.read_text() == "dear"


def test_unreadable_input_leaves_no_files(exact, lines, tmp_path):
    history, figure, out = (tmp_path / name for name in ("h.csv", "f.png", "out.csv"))
    learning = runs.Learning("model", 0.01, history=history, figure=figure)
    with pytest.raises(data.DataError, match="flow"):
        runs.stream(
            exact, source_of([b"year,flw\n", b"1900,1.0\n"]), out, learning=learning, after="prior"
        )
    runs.stream(exact, source_of(lines[:5]), out, learning=learning, after="prior")
    assert len(pd.read_csv(out)) == 4 and len(pd.read_csv(history)) == 0
    assert not figure.exists()


def test_history_may_start_later(exact, lines, tmp_path):
    state, history = tmp_path / "state", tmp_path / "history.csv"
    for upto, place in ((5, None), (60, history)):
        learning = runs.Learning("model", 0.01, history=place, history_every=20)
        source = source_of(lines[: upto + 1])
        runs.stream(
            exact, source, io.BytesIO(), lag=LAG, state=state, learning=learning, after="prior"
        )
    assert pd.read_csv(history)["row"].tolist() == [20, 40, 60]


def test_a_history_of_an_earlier_version_is_drawn_and_replaced(exact, lines, tmp_path):
    """Its column of the ELBO had another name."""
    history, figure = tmp_path / "history.csv", tmp_path / "history.png"
    learning = runs.Learning("model", 0.01, history=history, history_every=4)
    options: Any = {"lag": LAG, "learning": learning, "after": "prior"}
    runs.stream(exact, source_of(lines[:9]), io.BytesIO(), **options)
    history.write_bytes(history.read_bytes().replace(b"elbo_per_row", b"elbo_a_row"))
    _stream_learning.draw_history(history, figure)
    assert figure.read_bytes()[:4] == b"\x89PNG"
    runs.stream(exact, source_of(lines[:9]), io.BytesIO(), restart=True, **options)
    assert list(pd.read_csv(history))[2] == "elbo_per_row"


def test_command_prints_learned_parameters(exact, lines, tmp_path, monkeypatch, capsys):
    def go(*options: str, rows: list[bytes]) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(source_of(rows)))
        learn = ["--from-prior", "--learn", "model", "--rate", "0.01", "--lag", str(LAG)]
        out = ["--out", str(tmp_path / "out.csv")]
        assert command(["stream", str(exact.path), *learn, *out, *options]) == 0
        return capsys.readouterr().err

    assert "99 rows; ELBO" in go(rows=lines[:100])
    # On demand: no rows, and a run of what was learned before.
    said = go("--save-run", str(tmp_path / "new"), rows=[])
    assert "Resuming from" in said and f"Wrote {tmp_path / 'new'}." in said
    record = json.loads((tmp_path / "new" / "run.json").read_text())
    assert record["learned"]["rows"] == 99


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_callback_receives_learned_values(terminal: bool):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=80, color_system=None)
    start, now = {"a": 2.0, "b": 0.0}, {"a": 3.0, "b": -0.5}
    with LearningDisplay(console) as display:
        display(runs.Learned(1000, 0, -1.25, start, start))
        assert bool(text.getvalue()) == terminal
        display(runs.Learned(2000, 3, -1.0, start, now))
    last = text.getvalue()
    assert "2,000 rows (3 skipped); ELBO -1.0000 nats per observed row" in last
    for words in ("+50.0%", "-0.5") if terminal else ("a 3, b -0.5",):
        assert words in last


def test_unwrapped_scales_stay_unwrapped_in_new_run():
    eye = jnp.eye(1)
    plain = rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.zeros(1), eye),
        transition=rd.LinearGaussianKernel(eye, jnp.zeros(1), rd.Diagonal(jnp.ones(1))),
        emission=rd.Frozen(rd.LinearGaussianKernel(eye, jnp.zeros(1), eye)),
    )
    learner = rd.online.OnlineLearner(None, plain, rd.online.KalmanScore())
    learned = learner.model(learner.init(jax.random.key(0)))
    learned = models.with_parameters(learned, {"transition.scale_tril.std": 3.0})
    rebuilt = _run.with_structure_of(plain, learned)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(plain)
    np.testing.assert_allclose(rebuilt.transition.scale_tril.std, 3.0)


@pytest.mark.slow
def test_learning_handles_irregular_times(tmp_path):
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(size=300))
    frame = pd.DataFrame({"t": times, "y": np.cumsum(rng.normal(size=300))})
    table = data.read(frame.iloc[:40], step_input=True)
    spec = models.ModelSpec("local_level", "local_level", options={"irregular": True})
    run = runs.fit(table, spec, tmp_path / "run")
    lines = frame.to_csv(index=False).encode()

    def answers(learning: runs.Learning | None) -> pd.DataFrame:
        out = io.BytesIO()
        runs.stream(run, io.BytesIO(lines), out, lag=LAG, learning=learning, after="prior")
        return pd.read_csv(io.BytesIO(out.getvalue()))

    frozen, still = answers(None), answers(runs.Learning("model", 0.0))
    np.testing.assert_allclose(frozen, still, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recurrent", "mixture", "nonlinear"])
def test_families_are_learned_from_a_stream(kind: str, tmp_path: Path, monkeypatch):
    """At rest it is the frozen stream; cut into pieces it learns the same; it becomes a run."""
    model = models.poisson_counts(mean=1.0, persistence=0.9, scale=0.3)
    ys = np.asarray(model.simulate(jax.random.key(0), 700)[1])
    make = {
        "recurrent": rd.RecurrentFamily,
        "mixture": rd.MixtureFamily,
        "nonlinear": rd.NonlinearFamily,
    }[kind]
    family = make(jax.random.key(1), 1, 1).prepare(model, ys)
    run = written_run(tmp_path / "run", model, family, "poisson_counts")
    lines = rows_of(ys[:, 0])

    def go(name: str, source: Any, learning: runs.Learning | None) -> pd.DataFrame:
        out, state = tmp_path / f"{name}.csv", tmp_path / f"{name}.rd"
        runs.stream(run, source, out, lag=LAG, state=state, learning=learning, after="prior")
        return pd.read_csv(out)

    frozen = go("frozen", source_of(lines[:100]), None)
    still = go("still", source_of(lines[:100]), runs.Learning("both", 0.0, window=2))
    np.testing.assert_allclose(frozen, still, rtol=1e-8)

    updates: list[runs.Learned] = []
    history, save_run = tmp_path / "history.csv", tmp_path / "new"
    options = runs.Learning(
        "both", 0.01, window=2, history=history, save_run=save_run, progress=updates.append
    )
    go("whole", source_of(lines), options)
    first = pd.read_csv(history)
    assert first["elbo_per_row"].iloc[-1] > first["elbo_per_row"].iloc[0]
    assert first["family_moved"].iloc[-1] > 0 and updates[-1].skipped == 0
    new = runs.open_run(save_run)
    assert isinstance(new.family, make)
    smoothed = runs.smooth(new, data.read(pd.read_csv(source_of(lines[:60])), **new.layout))
    assert np.all(np.isfinite(smoothed.mean))

    cut = runs.Learning("both", 0.01, window=2)
    monkeypatch.setattr(_stream, "SECONDS_BETWEEN_SAVES", 0.0)
    with pytest.raises(KeyboardInterrupt):
        go("cut", Pieces(lines, [5, 1, 300], KeyboardInterrupt), cut)
    go("cut", source_of(lines), cut)
    assert (tmp_path / "cut.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.slow
def test_killed_stream_learns_the_same_parameters(exact, tmp_path: Path):
    """Killed without notice in the middle: answers, history and parameters are the same."""
    ys = local_level(**TRUTH).simulate(jax.random.key(1), 20_000)[1]
    lines = rows_of(np.asarray(ys)[:, 0])

    def stream(name: str) -> list[str]:
        files = {"--state": ".rd", "--out": ".csv", "--history": ".h"}
        named = [part for o, end in files.items() for part in (o, str(tmp_path / (name + end)))]
        program = [sys.executable, "-c", "from retrodict.cli import main; main()"]
        return [*program, "stream", str(exact.path), "--from-prior", "--learn", "model", *named]

    everything = b"".join(lines)
    subprocess.run(stream("whole"), input=everything, check=True)
    process = subprocess.Popen(stream("cut"), stdin=subprocess.PIPE)
    if process.stdin is None:
        raise RuntimeError("the stream has no input")
    deadline = time.monotonic() + 120
    for start in range(0, 15_000, 500):
        process.stdin.write(b"".join(lines[start : start + 500]))
        process.stdin.flush()
        time.sleep(0.1)
    while not (tmp_path / "cut.rd").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    assert (tmp_path / "cut.rd").exists()
    subprocess.run(stream("cut"), input=everything, check=True)
    for end in (".csv", ".h"):
        assert (tmp_path / f"cut{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes()
    for one, other in zip(
        learned_arrays(tmp_path / "cut.rd"), learned_arrays(tmp_path / "whole.rd"), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def level_after(ys: np.ndarray, times: np.ndarray, level_scale: float, obs_scale: float) -> tuple:
    """The law of a level at the last time, and the log density of what was seen, by one Gaussian.

    Args:
        ys: observations at these times, NaN where there is none.
        times: increasing; the level moves by `level_scale` in a unit of time.
        level_scale: of the level.
        obs_scale: of the noise.
    """
    walk = 100.0**2 + level_scale**2 * np.minimum.outer(times - times[0], times - times[0])
    observed = ~np.isnan(ys)
    joint = walk[np.ix_(observed, observed)] + obs_scale**2 * np.eye(observed.sum())
    gain = np.linalg.solve(joint, walk[observed, -1])
    mean = 1000.0 + gain @ (ys[observed] - 1000.0)
    density = stats.multivariate_normal(np.full(observed.sum(), 1000.0), joint).logpdf(ys[observed])
    return mean, np.sqrt(walk[-1, -1] - gain @ walk[observed, -1]), density


@pytest.fixture
def fitted(tmp_path: Path, lines: list[bytes]) -> runs.Run:
    """A run that was fitted to the first forty rows."""
    table = data.read(pd.read_csv(source_of(lines[:41])))
    return written_run(tmp_path / "fitted", local_level(**START), None, "local_level", table)


@pytest.mark.parametrize("rate", [None, 0.0, 0.01])
def test_stream_continues_after_the_fit(fitted, lines, tmp_path, rate: float | None):
    """The first row after the fit, across a gap, against the joint law of all rows."""
    updates: list[runs.Learned] = []
    learning = None if rate is None else runs.Learning("model", rate, progress=updates.append)
    out, said = io.BytesIO(), []
    new = [lines[0], *lines[31:41], lines[44]]  # rows that are known, a gap, and a row
    count = runs.stream(
        fitted, source_of(new), out, lag=LAG, learning=learning, flush=True, notify=said.append
    )
    assert count == 4  # three rows that are missing, and the one that came
    assert "Starting after the 40 rows that the run was fitted to, up to 1939" in said[0]
    assert said[1].startswith("Skipped 10 rows: they are not later than 1939")
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    assert answers["time"].tolist() == [1940, 1941, 1942, 1943, 1941, 1942, 1943]
    ys = np.array([float(line.split(b",")[1]) for line in lines[1:45]])
    ys[40:43] = np.nan
    after = math.nan
    for k in range(40, 44):
        mean, std, after = level_after(ys[: k + 1], np.arange(k + 1), **START)
        np.testing.assert_allclose(answers["level_mean"][k - 40], mean, rtol=1e-9)
        np.testing.assert_allclose(answers["level_std"][k - 40], std, rtol=1e-9)
    if learning is not None:  # what the rows that were known add is not counted
        before = level_after(ys[:40], np.arange(40), **START)[2]
        np.testing.assert_allclose(updates[-1].elbo, after - before, rtol=1e-9)
        assert updates[-1].rows == 4
        moved = updates[-1].now["obs_scale[flow]"] != updates[-1].start["obs_scale[flow]"]
        assert moved == (rate == 0.01)


@pytest.mark.parametrize("learn", [False, True])
def test_stream_after_fit_equals_stream_of_all_rows(fitted, lines, tmp_path, learn: bool):
    """Cut anywhere, it gives the lines of a stream from the prior that has read the fit first."""
    learning = runs.Learning("model", 0.0) if learn else None
    uninterrupted, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"

    def go(source: Any, out: Path, after: Any) -> None:
        state = tmp_path / f"{out.name}.rd"
        runs.stream(fitted, source, out, lag=LAG, state=state, learning=learning, after=after)

    go(source_of(lines[:301]), uninterrupted, "prior")
    with pytest.raises(KeyboardInterrupt):
        go(Pieces([lines[0], *lines[41:301]], [1, 1, 50, 30], KeyboardInterrupt), parts, "fit")
    go(source_of(lines[:301]), parts, "fit")
    expected = uninterrupted.read_bytes().splitlines()
    assert parts.read_bytes().splitlines() == [expected[0], *expected[41:]]


def test_stream_continues_after_a_named_table(exact, fitted, lines, tmp_path):
    table, out, said = data.read(pd.read_csv(source_of(lines[:51]))), io.BytesIO(), []
    new, state = source_of([lines[0], lines[51]]), tmp_path / "state"
    runs.stream(exact, new, out, lag=LAG, after=table, notify=said.append, state=state)
    assert "50 rows of the DataFrame" in said[0]
    ys = np.array([float(line.split(b",")[1]) for line in lines[1:52]])
    mean = level_after(ys, np.arange(51), **START)[0]
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    np.testing.assert_allclose(answers["level_mean"], mean, rtol=1e-9)
    with pytest.raises(runs.RunError, match=r"does not store the rows.*after=\.\.\."):
        runs.stream(exact, source_of(lines[:3]), io.BytesIO(), lag=LAG)
    with pytest.raises(runs.RunError, match="another run, start or lag"):
        runs.stream(exact, new, io.BytesIO(), lag=LAG, after="prior", state=state)
    # Nothing but rows that are known: nothing is answered, and nothing is left behind.
    out, said = io.BytesIO(), []
    assert runs.stream(fitted, source_of(lines[:41]), out, flush=True, notify=said.append) == 0
    assert out.getvalue().count(b"\n") == 1 and "Skipped 40 rows" in said[1]
    assert not list(fitted.path.glob("stream*"))


def test_rows_without_times_follow_the_fit(tmp_path):
    ys = np.array([1010.0, 990.0, 1020.0, 1000.0, 1030.0])
    table = data.read({"flow": ys[:4]})
    run = written_run(tmp_path / "run", local_level(**START), None, "local_level", table)
    out = io.BytesIO()
    runs.stream(run, source_of([b"flow\n", b"1030\n"]), out, lag=2)
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    assert answers["time"].tolist() == [4] and answers["smoothed_time"].tolist() == [2]
    np.testing.assert_allclose(
        answers["level_mean"], level_after(ys, np.arange(5), **START)[0], rtol=1e-9
    )


def test_uneven_times_continue_after_the_fit(tmp_path):
    """Whole times among others are written alike, however rows arrive."""
    times, ys = np.array([0.0, 1.5, 2.0, 4.5, 6.0, 6.25]), 1000.0 + np.arange(6.0)
    frame = pd.DataFrame({"t": times, "flow": ys})
    table = data.read(frame.iloc[:4], step_input=True, freq="irregular", step_unit=1.0)
    model = models.local_level(
        level_scale=START["level_scale"],
        obs_scale=START["obs_scale"],
        prior_mean=1000.0,
        prior_scale=100.0,
        irregular=True,
    )
    run = written_run(tmp_path / "run", model, None, "local_level", table)
    lines = frame.iloc[4:].to_csv(index=False).encode().splitlines(keepends=True)
    outputs = []
    for sizes in ([3, 0], [1, 1, 1, 0]):
        out = io.BytesIO()
        source: Any = Pieces(lines, sizes, KeyboardInterrupt)
        runs.stream(run, source, out, lag=1, state=tmp_path / f"{sizes}")
        outputs.append(out.getvalue())
    assert outputs[0] == outputs[1]
    answers = pd.read_csv(io.BytesIO(outputs[0]))
    assert answers["smoothed_time"].tolist() == [4.5, 6.0]
    for i in range(2):
        mean, std, _ = level_after(ys[: 5 + i], times[: 5 + i], **START)
        np.testing.assert_allclose(answers["level_mean"][i], mean, rtol=1e-9)
        np.testing.assert_allclose(answers["level_std"][i], std, rtol=1e-9)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1940,1\n1935,2\n", "1935 is not later than 1940"),
        ("1940,1\n1941,2\n1902,2\n", "1902 is not later than 1941"),
        ("1940.5,1\n", "1940.5 is not a whole number of steps"),
        ("2020-01-01,1\n", "is a date, and the time before it, 1939, is a number"),
        ("9999999,1\n", "rows are missing between 1939 and"),
    ],
)
def test_rows_that_do_not_follow_the_fit_are_refused(fitted, rows: str, words: str):
    source = io.BytesIO(f"year,flow\n{rows}".encode())
    with pytest.raises(data.DataError, match=words):
        runs.stream(fitted, source, io.BytesIO(), lag=LAG)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [rd.RecurrentFamily, rd.MixtureFamily])
def test_families_continue_after_the_fit(kind: Any, tmp_path: Path):
    """The filtered rows are those of the family on all rows at once, frozen and at rest."""
    model = models.poisson_counts(mean=1.0, persistence=0.9, scale=0.3)
    ys = np.asarray(model.simulate(jax.random.key(0), 50)[1])
    family = kind(jax.random.key(1), 1, 1).prepare(model, ys)
    lines = rows_of(ys[:, 0])
    table = data.read(pd.read_csv(source_of(lines[:41])))
    run = written_run(tmp_path / "run", model, family, "poisson_counts", table)
    laws = family.infer(ys).laws
    for learning in (None, runs.Learning("both", 0.0, window=2)):
        out = io.BytesIO()
        runs.stream(run, source_of([lines[0], *lines[41:]]), out, lag=LAG, learning=learning)
        answers = pd.read_csv(io.BytesIO(out.getvalue()))
        named = answers[[name for name in answers if name.endswith("_mean")][0]]
        np.testing.assert_allclose(named, laws.mean[40:, 0], rtol=1e-8)
        assert answers["smoothed_time"].tolist() == list(range(1940 - LAG, 1950 - LAG))


def test_names_with_commas_and_quotes_are_quoted():
    """Read back by pandas; columns of a table may have any name."""
    names = ['a "b", c', "d\ne"]
    table = pd.read_csv(io.BytesIO(_stream_lines.header(names)))
    assert list(table)[1:5] == [f"{name}_{what}" for name in names for what in ("mean", "std")]


def test_two_streams_do_not_share_a_state(fitted, lines, tmp_path):
    """The second is refused before it touches a file; a state without rows is only read."""
    out, again = tmp_path / "out.csv", tmp_path / "again.csv"
    state = tmp_path / "state"

    def go(source: Any, out: Any) -> int:
        return runs.stream(fitted, source, out, lag=LAG, state=state)

    class Within(Pieces):
        def read(self, _: int) -> bytes:
            if not self.sizes:  # a stream is under way, and has answered rows
                for other in (out, io.BytesIO()):
                    with pytest.raises(runs.RunError, match="in use by another process"):
                        go(source_of([lines[0], lines[51]]), other)
                assert go(source_of([]), io.BytesIO()) == 0
            return super().read(_)

    with pytest.raises(KeyboardInterrupt):
        go(Within([lines[0], *lines[41:51]], [5, 6], KeyboardInterrupt), out)
    go(source_of(lines[:61]), out)
    runs.stream(fitted, source_of(lines[:61]), again, lag=LAG, state=tmp_path / "other")
    assert out.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("count", [np.nan, np.inf, -5, -1.0, 2.0**62])
@pytest.mark.parametrize("field", ["output_bytes", "num_rows"])
def test_a_state_with_impossible_counts_is_refused(field, count, fitted, lines, tmp_path):
    state, out = tmp_path / "state", tmp_path / "out.csv"
    runs.stream(fitted, source_of(lines[:45]), out, lag=LAG, state=state)
    fields, fingerprint = rd.load(state)
    altered = _stream_files.StreamState(*fields)._replace(**{field: np.asarray(count)})
    rd.save(state, (tuple(altered), fingerprint))
    with pytest.raises(runs.RunError, match="another version"):
        runs.stream(fitted, source_of(lines[:50]), out, lag=LAG, state=state)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_that_is_a_pipe_or_a_link_is_refused(kind: str, fitted, lines, tmp_path):
    """A run may be from others: a pipe would wait forever, and a link makes a file elsewhere."""
    lock, elsewhere = tmp_path / ".state.lock", tmp_path / "elsewhere"
    os.mkfifo(lock) if kind == "pipe" else lock.symlink_to(elsewhere)
    with pytest.raises(OSError):
        runs.stream(fitted, source_of(lines[:45]), io.BytesIO(), lag=LAG, state=tmp_path / "state")
    assert not elsewhere.exists()


def test_partial_state_of_killed_stream_is_removed(fitted, lines, tmp_path):
    orphan, other = tmp_path / ".state.0123.partial", tmp_path / ".other.0123.partial"
    for partial in (orphan, other):
        partial.write_bytes(b"half")
    runs.stream(fitted, source_of(lines[:45]), io.BytesIO(), lag=LAG, state=tmp_path / "state")
    assert not orphan.exists() and other.exists()


def test_answer_file_that_starts_later_is_continued(fitted, lines, tmp_path, monkeypatch):
    """A stream to a pipe, then to a file, killed before its state was kept again."""
    state, out = tmp_path / "state", tmp_path / "out.csv"

    def go(source: Any, out: Any) -> None:
        runs.stream(fitted, source, out, lag=LAG, state=state)

    go(source_of([lines[0], *lines[41:45]]), io.BytesIO())
    monkeypatch.setattr(_stream, "SECONDS_BETWEEN_SAVES", 1e9)
    with pytest.raises(KeyboardInterrupt):
        go(Pieces([lines[0], *lines[45:51]], [7], KeyboardInterrupt), out)
    go(source_of(lines[:61]), out)
    assert pd.read_csv(out)["time"].tolist() == list(range(1944, 1960))


def test_two_streams_do_not_share_a_file_of_answers(fitted, lines, tmp_path):
    """The states differ, and so the answers alone are locked."""
    out, other = tmp_path / "out.csv", tmp_path / "other"

    class Within(Pieces):
        def read(self, _: int) -> bytes:
            if not self.sizes:
                with pytest.raises(runs.RunError, match=r"out.csv is in use by another process"):
                    runs.stream(fitted, source_of(lines[:61]), out, lag=LAG, state=other)
            return super().read(_)

    source = Within([lines[0], *lines[41:51]], [5, 6], KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        runs.stream(fitted, source, out, lag=LAG, state=tmp_path / "state")
    assert len(out.read_bytes().splitlines()) > 1 and not other.exists()


def test_removed_answers_are_reported(fitted, lines, tmp_path):
    out = tmp_path / "out.csv"

    class Removing(Pieces):
        def read(self, _: int) -> bytes:
            if len(self.sizes) == 2:
                out.unlink()
            return super().read(_)

    source = Removing([lines[0], *lines[41:51]], [5, 6, 0], KeyboardInterrupt)
    with pytest.raises(runs.RunError, match="was removed while the stream was writing to it"):
        runs.stream(fitted, source, out, lag=LAG, state=tmp_path / "state")


def test_read_only_folder_is_refused_before_rows_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(runs.RunError, match="is read-only"):
        _stream_learning.refuse_existing(tmp_path / "new")
