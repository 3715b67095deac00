"""Runs: a model fitted to a table and kept in a folder, and what it says afterwards."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bimodal_posterior
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.api as sm
from linear_models import linear_transition_model

import retrodict as rd
from retrodict import data, models, runs
from retrodict._workspace import Folder
from retrodict.cli._app import run as command
from retrodict.data import _source
from retrodict.runs import (
    _apply,
    _check,
    _report,
    _residuals,
    _run,
    _standard_errors,
    _stream,
    _training,
)
from retrodict.runs._page import page
from retrodict.runs._plot import plot
from retrodict.runs._report_content import Band, Panel, PlottedSeries, ReportContent

LAG = 4


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    nile: Any = sm.datasets.nile.load_pandas().data
    rows = nile.astype({"year": int}).iloc[:60]
    return rows.drop(index=[20, 21, 40]).reset_index(drop=True)


@pytest.fixture(scope="module")
def table(frame: pd.DataFrame) -> data.Table:
    return data.read(frame)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, table: data.Table) -> runs.Run:
    out = tmp_path_factory.mktemp("runs") / "nile"
    return runs.fit(table, models.load("local_level"), out)


@pytest.fixture
def copy(run: runs.Run, tmp_path) -> runs.Run:
    """The run in a folder of its own, which a test may spoil."""
    shutil.copytree(run.path, tmp_path / "copy")
    return runs.open_run(tmp_path / "copy")


def scales(fitted: runs.Run) -> np.ndarray:
    named = models.named_parameters(fitted.model)
    return np.array([named["level_scale"][0], named["obs_scale"][0]])


def log_evidence(ys: np.ndarray, model: rd.StateSpaceModel, move: float, noise: float) -> float:
    """Of a random walk seen with noise, as one Gaussian law of the rows that were seen."""
    plain = rd.unwrap(model)
    observed = np.flatnonzero(~np.isnan(ys))
    wide = float(rd.Gaussian(plain.prior.mean, plain.prior.scale_tril).covariance[0, 0])
    walk = np.minimum(observed[:, None], observed[None, :])
    covariance = wide + move**2 * walk + noise**2 * np.eye(observed.size)
    centred = ys[observed] - float(plain.prior.mean[0])
    _, logdet = np.linalg.slogdet(covariance)
    return -0.5 * float(logdet + centred @ np.linalg.solve(covariance, centred))


def test_fit_maximises_the_evidence(run: runs.Run, table: data.Table):
    estimate = scales(run)
    best = log_evidence(table.ys[0, :, 0], run.model, *estimate)
    for factors in ((1.05, 1.0), (0.95, 1.0), (1.0, 1.05), (1.0, 0.95)):
        assert log_evidence(table.ys[0, :, 0], run.model, *(estimate * factors)) < best
    assert run.is_exact and run.record["results"]["method"] == "exact"


def test_opened_run_equals_fitted_run(run: runs.Run):
    again = runs.open_run(run.path)
    np.testing.assert_array_equal(scales(again), scales(run))
    assert again.layout == run.layout and again.record == run.record
    line = again.record["results"]["parameters"]["level_scale[volume]"]
    assert line["lower"] < line["value"] < line["upper"] and line["error"] > 0


def test_a_finished_run_is_not_overwritten(run: runs.Run, table: data.Table):
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    with pytest.raises(runs.RunError, match="contains a finished run"):
        runs.fit(table, run.spec, run.path)
    after = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    assert after == before


def test_foreign_folder_is_not_touched(run: runs.Run, table: data.Table, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(runs.RunError, match="is not empty and contains no run"):
        runs.fit(table, run.spec, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_unfinished_run_with_other_options_is_refused(copy: runs.Run, table: data.Table):
    (copy.path / "run.json").unlink()
    with pytest.raises(runs.RunError, match="is unfinished"):
        runs.open_run(copy.path)
    with pytest.raises(runs.RunError, match="unfinished run of other data or options"):
        runs.fit(table, copy.spec, copy.path, seed=1)
    again = runs.fit(table, copy.spec, copy.path)
    np.testing.assert_array_equal(scales(again), scales(copy))


def _edited(record: dict) -> dict:
    return {**record, "options": {**record["options"], "seed": 7}}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.joinpath("run.json").write_text("{"), "cannot be read"),
        (lambda path: path.joinpath("run.json").write_text("[]"), "is not a record"),
        (
            lambda path: path.joinpath("run.json").write_text(
                json.dumps(_edited(json.loads(path.joinpath("run.json").read_text())))
            ),
            "was changed after `fit` wrote it",
        ),
        (
            lambda path: path.joinpath("run.json").write_text('{"retrodict_run": 99}'),
            "of format 99",
        ),
        (
            lambda path: path.joinpath("model.rd").write_bytes(
                path.joinpath("model.rd").read_bytes()[:-7]
            ),
            "model.rd was changed after `fit` wrote it",
        ),
        (lambda path: path.joinpath("model.rd").unlink(), "model.rd cannot be read"),
    ],
)
def test_damaged_run_is_refused_in_one_line(copy: runs.Run, spoil, words, capsys):
    spoil(copy.path)
    with pytest.raises(runs.RunError, match=words):
        runs.open_run(copy.path)
    assert command(["info", str(copy.path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("retrodict: error: ")


def test_run_states_equal_kalman_smoother(run: runs.Run, table: data.Table):
    one = table.one()
    exact = rd.kalman_smoother(rd.unwrap(run.model), one["ys"], mask=one["mask"])
    smoothed = runs.smooth(run, table)
    np.testing.assert_allclose(smoothed.mean[0], exact.chain.marginals().mean, rtol=1e-10)


def test_run_forecast_equals_smoothing_of_missing_rows(run: runs.Run, table: data.Table):
    one = table.one()
    longer = np.concatenate([one["ys"], np.full((3, 1), np.nan)])
    exact = rd.kalman_smoother(rd.unwrap(run.model), longer).chain.marginals()
    forecast = runs.forecast(run, table, 3)
    np.testing.assert_allclose(forecast.state_mean[0], exact.mean[-3:], rtol=1e-9)
    np.testing.assert_allclose(forecast.state_covariance[0], exact.covariance[-3:], rtol=1e-9)
    # A table of it has these moments, and not those of draws.
    shown, name = data.to_frame(table, forecast, state_names=["level"]), table.names[0]
    noise = run.record["results"]["parameters"]["obs_scale[volume]"]["value"] ** 2
    spread = np.sqrt(np.asarray(exact.covariance)[-3:, 0, 0] + noise)
    np.testing.assert_allclose(shown["level_mean"], exact.mean[-3:, 0], rtol=1e-9)
    np.testing.assert_allclose(shown[f"{name}_mean"], exact.mean[-3:, 0], rtol=1e-9)
    np.testing.assert_allclose(shown[f"{name}_std"], spread, rtol=1e-9)
    reach = 1.6448536269514722 * spread
    np.testing.assert_allclose(shown[f"{name}_upper"] - shown[f"{name}_mean"], reach, rtol=1e-9)
    assert table.future_times(3)[0].tolist() == [1931, 1932, 1933]


def told_of(run: runs.Run, **results: Any) -> runs.Run:
    """The run with another outcome of its fit."""
    record = {**run.record, "results": {**run.record["results"], **results}}
    return dataclasses.replace(run, record=record)


def test_fit_away_from_maximum_is_not_good(run: runs.Run):
    assert run.record["results"]["status"] == "fine"
    fine = _check._check_parameters(run)
    assert fine.verdict == "good"
    near = _check._check_parameters(told_of(run, status="not at a maximum", distance=0.11))
    assert near.verdict == "good" and near.value == "within 0.11 standard errors of it"
    moved = _check._check_parameters(told_of(run, status="not at a maximum", distance=0.7))
    assert moved.verdict == "doubtful" and "0.7 standard errors away" in str(moved.value)
    assert runs.Check((fine, moved), "").worst == "doubtful"
    lost = _check._check_parameters(told_of(run, status="not at a maximum", distance=7.0))
    assert lost.verdict == "bad"
    for words, value in (("exact", "determined"), ("louis", "Monte Carlo noise")):
        unknown = {"status": "not identified", "uncertainty": _standard_errors.METHODS[words]}
        assert value in str(_check._check_parameters(told_of(run, **unknown)).value)
    old = told_of(run)
    del old.record["results"]["status"]  # as earlier versions wrote it
    assert _check._check_parameters(old).verdict == "unknown"


def test_fit_below_a_higher_maximum_is_bad(run: runs.Run, table: data.Table, monkeypatch):
    assert run.record["results"]["search"] == "converged"
    tiny = _check._check_parameters(run, 1e-4)
    assert tiny.verdict == "good"
    some = _check._check_parameters(run, 0.5)
    assert some.verdict == "doubtful" and "higher by 0.5" in str(some.value)
    much = _check._check_parameters(told_of(run, status="at an edge"), 705.0)
    assert much.verdict == "bad" and "higher by 705" in str(much.value)
    # The level of the Nile at zero: a maximum may be flat there, and another is higher.
    values = {"level_scale": 1e-8, "obs_scale": 170.0}
    stuck = dataclasses.replace(run, model=models.with_parameters(run.model, values))
    one = table.one()
    low = rd.kalman_smoother(stuck.model, one["ys"], mask=one["mask"]).log_evidence
    stuck = told_of(stuck, total=float(low))
    higher = _check._search_higher_maximum(stuck, table)
    best = run.record["results"]["total"]
    assert higher is not None and higher > 1
    assert higher == pytest.approx(best - float(low), abs=1e-3)
    # Other data are not those that the run was to make likely.
    monkeypatch.setitem(run.record["data"], "sha256", "of other data")
    assert _check._search_higher_maximum(run, table) is None


def test_scale_at_zero_is_explained(run: runs.Run):
    stage = {
        "standard_error scale": np.array([np.nan, 0.2]),
        "lower scale": np.array([np.nan, 0.5]),
        "upper scale": np.array([np.nan, 2.0]),
    }
    lines = {
        f"scale[{i}]": _standard_errors._line(stage, "scale", (i,), value, (0.0, np.inf))
        for i, value in enumerate((1e-151, 1.0))
    }
    assert lines["scale[0]"] == {"edge": "zero"}
    words = _standard_errors._in_words("exact", "at an edge", 0.0, lines)
    assert "scale[0] is at the edge of zero: no interval" in words
    assert "Intervals of scale[1] are computed on the log scale" in words
    finding = _check._check_parameters(told_of(run, status="at an edge", parameters=lines))
    assert finding.verdict == "good" and "scale[0] at the edge of zero" in str(finding.value)
    assert _report._parameter("s", {"value": 0.0, "learned": True, **lines["scale[0]"]}).note


def test_log_likelihood_is_printed_in_total_and_per_row(run: runs.Run, table: data.Table, capsys):
    one = table.one()
    exact = rd.kalman_smoother(rd.unwrap(run.model), one["ys"], mask=one["mask"]).log_evidence
    assert run.record["results"]["total"] == pytest.approx(float(exact), rel=1e-9)
    assert command(["info", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert f"log-likelihood {float(exact):.2f} in all" in said
    assert "(57 of 60 rows observed)" in said
    # One definition wherever nats are given by row: rows in which something was seen.
    assert f"{float(exact) / 57:.4f} nats per observed row" in said
    assert run.record["results"]["nats_per_row"] == pytest.approx(float(exact) / 57, rel=1e-9)
    history = pd.read_csv(run.path / "training.csv")
    assert history["nats per observed row"].iloc[-1] == pytest.approx(float(exact) / 57, rel=1e-4)
    assert "are computed on the log scale" in " ".join(said.split())


class Told:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def begin(self, stage: str) -> None:
        pass

    def step(self, done: int, total: int) -> None:
        pass

    def end(self, stage: str, *, cached: bool) -> None:
        self.ended.append(stage)

    def say(self, message: str) -> None:
        pass


def test_fit_has_the_announced_number_of_stages(copy: runs.Run, table: data.Table, monkeypatch):
    (copy.path / "run.json").unlink()
    log = Told()
    again = runs.fit(table, copy.spec, copy.path, progress=log)
    assert len(log.ended) == runs.FitJob(table, copy.spec, copy.path).num_stages == 2
    assert runs.FitJob(table, "poisson_counts", copy.path).num_stages == 3
    for name in ("_check_posterior", "_check_residuals"):
        monkeypatch.setattr(_check, name, lambda *_: [])
    monkeypatch.setattr(_check, "_check_coverage", lambda *_: runs.Finding("a", "b", "c", "good"))
    log = Told()
    runs.check(again, table, progress=log)
    assert len(log.ended) == runs.NUM_CHECKS


@pytest.mark.parametrize(("inside", "hidden"), [(0, 1), (3, 3), (85, 100), (90, 100), (97, 100)])
def test_coverage_is_tested_as_by_scipy(inside: int, hidden: int):
    ranks = np.where(np.arange(hidden) < inside, 0.5, 0.999)
    expected = scipy.stats.binomtest(inside, hidden, 0.9).pvalue
    assert _residuals.coverage(ranks).p_value == pytest.approx(expected, rel=1e-9)


def test_check_reports_numbers_and_coverage(run: runs.Run, monkeypatch):
    monkeypatch.setattr(_check, "MAX_SERIES", 2)
    rng = np.random.default_rng(0)
    walks = 1000 + 100 * np.cumsum(rng.normal(size=(3, 30)), axis=1)
    frame = pd.DataFrame(
        {
            "s": np.repeat(np.arange(3), 30),
            "year": np.tile(np.arange(30), 3),
            "volume": walks.ravel(),
        }
    )
    several = data.read(frame, series="s", time="year")
    report = runs.check(run, several).to_dict()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["series_checked"], report["series"]) == (2, 3)
    assert (report["rows_checked"], report["rows"]) == (60, 90)
    named = {line["name"]: line for line in report["findings"]}
    hidden = named["hidden points in their 90% intervals"]
    assert 0.5 < hidden["value"] <= 1.0 and hidden["details"]["expected"] == 0.9
    assert f"{100 * hidden['value']:.1f}% of {hidden['details']['hidden']}" in hidden["text"]
    tests = [line for name, line in named.items() if name.endswith("(volume)")]
    assert tests and all(0.0 <= line["value"] <= 1.0 for line in tests)
    assert "8 of 10 series" in runs.Scope(8, 10, 240, 300).summary
    assert runs.Scope(1, 1, 2000, 2500).summary == (
        "Checked 2000 of 2500 rows, the last of each series."
    )


@pytest.mark.parametrize("name", ["smooth", "forecast", "plot", "fit"])
def test_outputs_are_refused_before_any_work(name: str, copy, tmp_path, capsys, monkeypatch):
    """Neither the run nor the data are read."""
    monkeypatch.setattr(runs, "open_run", lambda *_: pytest.fail("the run was read"))
    monkeypatch.setattr(data, "read", lambda *_, **__: pytest.fail("the data were read"))
    monkeypatch.setattr(data, "read_shared", lambda *_, **__: pytest.fail("the data were read"))
    out = tmp_path / ("out.svg" if name == "plot" else "out.csv")
    out.write_text("mine")
    target, start = out, [name, str(copy.path), str(tmp_path / "rows.csv")]
    if name == "fit":
        start, target = ["fit", str(tmp_path / "rows.csv"), "--model", "local_level"], tmp_path
    for place, words in (
        (target, "contains no run" if name == "fit" else "exists"),
        (
            out if name == "fit" else tmp_path / "no" / out.name,
            "a file" if name == "fit" else "does not",
        ),
    ):
        assert command([*start, "--out", str(place)]) == 2
        assert words in capsys.readouterr().err
    if name != "fit":
        assert command([*start, "--out", str(tmp_path / "out.xls")]) == 2
        assert "'.xls' is not known" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_check_explains_its_rows(run: runs.Run, frame, tmp_path, capsys, monkeypatch):
    source = tmp_path / "nile.csv"
    frame.to_csv(source, index=False)
    check = runs.Check((runs.Finding("this", "that", "so and so", "good"),), "In words.")
    monkeypatch.setattr(runs, "check", lambda *_, **__: check)
    assert command(["check", str(run.path), str(source)]) == 0
    said = capsys.readouterr().out
    assert "meaning" in said and "so and so" in said and "In words." in said


def test_long_series_get_fewer_replicates():
    def most(rows: int) -> int:
        return _standard_errors._most_replicates(data.read({"y": np.zeros(rows)}))

    assert most(120) == _standard_errors.MAX_REPLICATES and most(1500) == 80 and most(6000) == 20
    words = _standard_errors._in_words("louis", "fine", 0.0, {}, noise=0.123)
    assert "Monte Carlo error is 12% or less" in words


def lines_of(frame: pd.DataFrame) -> list[bytes]:
    return frame.to_csv(index=False).encode().splitlines(keepends=True)


def test_stream_equals_offline_smoothing(copy, frame, table):
    out = io.BytesIO()
    count = runs.stream(
        copy, io.BytesIO(b"".join(lines_of(frame))), out, lag=LAG, flush=True, after="prior"
    )
    assert count == 60  # rows that were missing move the state too
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    one = table.one()
    model = rd.unwrap(copy.model)

    @jax.jit
    def marginals(length: Any) -> Any:
        return rd.kalman_smoother(model, one["ys"], length=length).chain.marginals()

    for k in (10, 19, 22, 59):
        rows = marginals(k + 1)
        line = answers.iloc[k]
        assert line["time"] == 1871 + k and line["smoothed_time"] == 1871 + k - LAG
        np.testing.assert_allclose(line["level_mean"], rows.mean[k, 0], rtol=1e-9)
        np.testing.assert_allclose(line["level_smoothed_mean"], rows.mean[k - LAG, 0], rtol=1e-9)
        np.testing.assert_allclose(
            line["level_smoothed_std"], np.sqrt(rows.covariance[k - LAG, 0, 0]), rtol=1e-9
        )
    rest = answers.iloc[60:]
    assert rest["smoothed_time"].tolist() == [1927, 1928, 1929, 1930]
    offline = marginals(60)
    np.testing.assert_allclose(rest["level_smoothed_mean"], offline.mean[-LAG:, 0], rtol=1e-9)


def test_interrupted_stream_resumes_with_the_same_answers(copy, frame, tmp_path):
    lines = lines_of(frame)
    uninterrupted, cut = tmp_path / "whole.csv", tmp_path / "cut.csv"
    state = [tmp_path / "whole.state", tmp_path / "cut.state"]
    runs.stream(
        copy, io.BytesIO(b"".join(lines)), uninterrupted, lag=LAG, state=state[0], after="prior"
    )
    runs.stream(copy, io.BytesIO(b"".join(lines[:30])), cut, lag=LAG, state=state[1], after="prior")
    # what was written after the state was kept, as a kill leaves it, is written again
    with cut.open("ab") as file:
        file.write(b"1899,1.0,")
    count = runs.stream(
        copy, io.BytesIO(b"".join(lines)), cut, lag=LAG, state=state[1], after="prior"
    )
    assert count == 60 - (29 + 2)  # two rows of the first part were missing
    assert cut.read_bytes() == uninterrupted.read_bytes()


def test_restart_option_restarts_a_stream(copy, frame, tmp_path):
    source, out, state = b"".join(lines_of(frame)), tmp_path / "out.csv", tmp_path / "state"
    runs.stream(copy, io.BytesIO(source), out, lag=LAG, state=state, after="prior")
    first = out.read_bytes()
    assert runs.stream(copy, io.BytesIO(source), out, lag=LAG, state=state, after="prior") == 0
    assert out.read_bytes() == first
    assert (
        runs.stream(
            copy, io.BytesIO(source), out, lag=LAG, state=state, restart=True, after="prior"
        )
        == 60
    )
    assert out.read_bytes() == first
    other = tmp_path / "letter.txt"  # a file of something else is not replaced
    other.write_text("dear" * 9999)
    with pytest.raises(runs.RunError, match="exists, and is not of this stream"):
        runs.stream(
            copy, io.BytesIO(source), other, lag=LAG, state=state, restart=True, after="prior"
        )
    assert other.read_text() == "dear" * 9999
    state.write_bytes(b"damaged")
    with pytest.raises(runs.RunError, match="Pass restart=True"):
        runs.stream(copy, io.BytesIO(source), io.BytesIO(), lag=LAG, state=state, after="prior")
    count = runs.stream(
        copy, io.BytesIO(source), io.BytesIO(), lag=LAG, state=state, restart=True, after="prior"
    )
    assert count == 60


def test_rows_out_of_order_are_refused(copy, frame):
    lines = lines_of(frame)
    wrong = [lines[0], lines[2], lines[1]]
    with pytest.raises(data.DataError, match=r"line 3.*1871 is not later than 1872"):
        runs.stream(copy, io.BytesIO(b"".join(wrong)), io.BytesIO(), lag=LAG, after="prior")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1871,x\n", "line 2, column 'volume': 'x'"),
        ("1871,1\n1872,2\n1873.5,3\n", "line 4, column 'year': 1873.5 is not a whole number"),
        ("1871,1\n1872,2\n9999999,3\n", "line 4.*9998126 rows are missing between 1872 and"),
    ],
)
def test_unreadable_rows_leave_no_output(copy, tmp_path, rows: str, words: str):
    source, out, pipe = f"year,volume\n{rows}".encode(), tmp_path / "answers.csv", io.BytesIO()
    for target in (out, pipe):
        with pytest.raises(data.DataError, match=words):
            runs.stream(copy, io.BytesIO(source), target, lag=LAG, after="prior")
    assert not out.exists() and not pipe.getvalue()
    assert not list(copy.path.glob("stream*"))


def test_the_state_of_another_lag_is_refused(copy, frame, tmp_path):
    place = tmp_path / "state"
    source = b"".join(lines_of(frame)[:5])
    runs.stream(copy, io.BytesIO(source), io.BytesIO(), lag=LAG, state=place, after="prior")
    with pytest.raises(runs.RunError, match="of another run, start or lag"):
        runs.stream(copy, io.BytesIO(source), io.BytesIO(), lag=LAG + 1, state=place, after="prior")


def test_predictive_levels_are_uniform_only_under_the_true_model():
    """Fixed seed; under the model a p-value below 1e-3 has that probability."""
    model = models.local_level(level_scale=0.5, obs_scale=1.0, prior_scale=1.0)
    _, ys = model.simulate(jax.random.key(0), 300)
    right = _residuals.pit(jax.random.key(1), model, np.asarray(ys), num_particles=500)
    assert all(test.p_value > 1e-3 for test in _residuals.residual_tests([right[:, 0]]))
    other = models.local_level(level_scale=0.02, obs_scale=1.0, prior_scale=1.0)
    wrong = _residuals.pit(jax.random.key(1), other, np.asarray(ys), num_particles=500)
    assert min(test.p_value for test in _residuals.residual_tests([wrong[:, 0]])) < 1e-6


@pytest.mark.slow
def test_predictive_levels_of_many_states_are_exact():
    """A thousand particles find none of twelve wide states; fixed seed, as above."""
    model = models.seasonal(level_scale=0.3, seasonal_scale=0.05, obs_scale=1.0, prior_scale=50.0)
    _, ys = model.simulate(jax.random.key(0), 240)
    ys = np.array(ys)
    ys[30:33] = np.nan
    levels = _residuals.pit(jax.random.key(1), model, ys)
    assert all(test.p_value > 1e-3 for test in _residuals.residual_tests([levels[:, 0]]))
    # What lies in the wide prior of the first year has no level, and nor has what is missing.
    assert np.isnan(levels[:11]).all() and np.isnan(levels[30:33]).all()
    assert np.isfinite(levels[40:]).all()
    # The level of the last row, by the evidence of the series with it and without.
    mean, std = _residuals.one_step_ahead(rd.unwrap(model), ys)
    evidence = jax.jit(lambda n: rd.kalman_smoother(model, ys, length=n).log_evidence)
    density = -0.5 * ((ys[-1] - mean[-1]) / std[-1]) ** 2 - np.log(std[-1])
    expected = evidence(240) - evidence(239)
    np.testing.assert_allclose(density - 0.5 * np.log(2 * np.pi), expected, rtol=1e-8)


def test_training_masks_include_gaps():
    """A family that had seen none filled them with the mean of the model, whatever was around."""
    mask = np.ones((400, 64, 2), bool)
    mask[:, 5, 1] = False
    with_gaps = np.asarray(_training._with_gaps(jax.random.key(0), jnp.asarray(mask)))
    assert not with_gaps[:, 5, 1].any() and (with_gaps[..., 0] >= with_gaps[..., 1]).all()
    gone = (~with_gaps[..., 0]).sum(axis=1)
    assert 0.4 < np.mean(gone == 0) < 0.6 and 5 < gone[gone > 0].mean() < 14


def test_degenerate_particles_give_no_predictive_levels():
    """Eight states that wander, each seen with little noise, and ten particles."""
    rate = rd.NonlinearGaussianKernel(lambda x: x + 0 * jnp.sin(x), rd.Diagonal(0.01 * jnp.ones(8)))
    model = linear_transition_model(rate, 8, weight=1.0)
    ys = np.asarray(model.simulate(jax.random.key(0), 20)[1])
    assert np.isnan(_residuals.pit(jax.random.key(1), model, ys, num_particles=100)).all()


def test_held_out_points_are_drawn_until_enough():
    mask = np.ones((1, 60, 1), bool)
    mask[0, 5] = False
    away = _residuals.hide(np.random.default_rng(0), mask, 0.1, 20)
    assert len(away) > 1 and 20 <= away.sum() <= 30
    assert not away[:, 0, 5].any() and away.sum(axis=0).max() == 1
    assert len(_residuals.hide(np.random.default_rng(0), np.ones((1, 400, 1), bool), 0.1, 20)) == 1
    all_once = _residuals.hide(np.random.default_rng(0), mask[:, :12], 0.1, 20)
    assert (all_once.sum(axis=0) == mask[:, :12]).all()


def test_held_out_points_of_short_series_are_counted(run: runs.Run, table: data.Table):
    finding = _check._check_coverage(run, table, 0)
    assert finding.verdict == "good" and "times with different points" in finding.meaning
    few = table.last(12)
    assert _check._check_coverage(run, few, 0).verdict == "unknown"


def test_levels_of_hidden_entries_are_those_of_the_joint_gaussian():
    n, level, noise, spread = 7, 0.5, 0.8, 2.0
    model = rd.unwrap(models.local_level(level_scale=level, obs_scale=noise, prior_scale=spread))
    assert _residuals.has_independent_noise(model)
    ys = np.random.default_rng(0).normal(size=(2, n, 1))
    mask = np.ones((2, n, 1), bool)
    mask[0, 2], mask[1, 4:6] = False, False
    options = {"mask": mask, "inputs": None, "length": np.array([n, n - 1])}
    levels = _residuals.smoothed_levels(model, ys, **options)
    times = np.arange(n)
    covariance = spread**2 + level**2 * np.minimum(times[:, None], times) + noise**2 * np.eye(n)
    for series, hidden, rows in ((0, 2, n), (1, 4, n - 1), (1, 5, n - 1)):
        seen = np.flatnonzero(mask[series, :rows, 0])
        gain = np.linalg.solve(covariance[np.ix_(seen, seen)], covariance[seen, hidden])
        mean = gain @ ys[series, seen, 0]
        std = np.sqrt(covariance[hidden, hidden] - gain @ covariance[seen, hidden])
        expected = scipy.stats.norm.cdf(ys[series, hidden, 0], mean, std)
        np.testing.assert_allclose(levels[series, hidden, 0], expected, rtol=1e-9)


def test_bands_of_columns_are_exact_for_linear_gaussian_models(run: runs.Run, table: data.Table):
    ((panel, state),) = (series.panels for series in _report._series(run, table, 4, 0.9, 0))
    noise = models.named_parameters(run.model)["obs_scale"][0]
    column, level = panel.smoothed, state.smoothed
    half = 1.6448536269514722 * np.hypot((level.upper - level.centre) / 1.6448536269514722, noise)
    np.testing.assert_allclose(column.upper - column.centre, half, rtol=1e-6)
    np.testing.assert_allclose(column.centre, level.centre, rtol=1e-6)
    for band in (panel.forecast, state.forecast):
        assert band is not None and np.all(np.diff(band.upper - band.lower) > 0)


def test_fit_killed_at_its_end_writes_its_report(
    copy: runs.Run, frame: pd.DataFrame, tmp_path, monkeypatch, capsys
):
    source, page = tmp_path / "nile $1.csv", copy.path / "report.html"
    frame.to_csv(source, index=False)
    findings = (runs.Finding("a thing", "some", "nothing", "unknown"),)
    scope = runs.Scope(8, 300, 80, 3000)
    monkeypatch.setattr(runs, "check", lambda *_, **__: runs.Check(findings, "Well.", scope))
    before = (copy.path / "run.json").read_bytes()
    arguments = ["fit", str(source), "--model", "local_level", "--out", str(copy.path)]
    assert command([*arguments, "--seed", "1"]) == 2 and not page.exists()
    assert "contains a finished run" in capsys.readouterr().err
    assert command(arguments) == 0
    assert (copy.path / "run.json").read_bytes() == before
    said, text = capsys.readouterr().out, page.read_text()
    line = "Checked 8 of 300 series, the longest, and 80 of 3000 rows."
    assert "verdict: unknown. Well.\n" in said and line in said and line in text
    assert "retrodict fit &#39;" in text and "nile $1.csv" in text and "Not checked" in text
    assert command(arguments) == 2


def test_equal_fixed_entries_share_one_line():
    fixed, other = {"value": 0.0, "learned": False}, {"value": 2.0, "learned": False}
    learned = {"value": 0.0, "learned": True}
    parameters = {"a[0]": learned, "a[1]": learned, "m[0]": other, "m[1]": fixed, "m[2]": fixed}
    parameters |= {"m[3]": fixed, "s[0]": fixed, "w[0,0]": fixed, "w[0,1]": fixed}
    names = [name for name, _ in runs.parameter_lines({"parameters": parameters})]
    assert names == ["a[0]", "a[1]", "m[0]", "m[1..3]", "s[0]", "w[0,0]", "w[0,1]"]


def test_inputs_of_coming_rows_are_those_after_the_last(run: runs.Run):
    frame = pd.DataFrame({"t": np.arange(5), "y": np.ones(5), "u": np.arange(5.0)})
    table = data.read(frame, inputs="u", columns="y")
    driven = dataclasses.replace(run, record={**run.record, "layout": table.layout})
    later = pd.DataFrame({"t": np.arange(3, 9), "u": np.arange(3.0, 9.0)})
    inputs = runs.read_inputs(driven, table, later, 3)
    assert inputs[..., 0].tolist() == [[5.0, 6.0, 7.0]]
    with pytest.raises(runs.RunError, match="must have 5 rows of inputs.*after its last row"):
        runs.read_inputs(driven, table, later, 5)
    with pytest.raises(runs.RunError, match="the time after 4 is 5"):
        runs.read_inputs(driven, table, later.iloc[3:], 2)


def test_coming_times_of_a_regular_table_are_the_next_ones(copy: runs.Run, frame, tmp_path, capsys):
    source, at = tmp_path / "nile.csv", tmp_path / "at.csv"
    frame.to_csv(source, index=False)
    for times, code in (("1931\n1932\n", 0), ("1935\n", 2), ("1931.5\n", 2)):
        at.write_text(f"year\n{times}")
        assert command(["forecast", str(copy.path), str(source), "--at", str(at)]) == code
    assert "the time after 1930 is 1931" in capsys.readouterr().err


def test_coverage_counts_values_inside_the_band():
    coverage = _residuals.coverage(np.array([0.01, 0.3, 0.5, 0.96, 0.94]))
    assert (coverage.inside, coverage.hidden) == (3, 5)
    assert _residuals.coverage(np.full(100, 0.5)).p_value < 0.01


def test_commands_print_the_results_of_python(copy: runs.Run, frame, tmp_path, capsys):
    source = tmp_path / "nile.csv"
    frame.to_csv(source, index=False)
    assert command(["info", str(copy.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["method"] == "exact"
    out = tmp_path / "smoothed.csv"
    assert command(["smooth", str(copy.path), str(source), "--out", str(out)]) == 0
    table = data.read(frame)
    expected = runs.smooth(copy, table).mean[0, :, 0]
    np.testing.assert_allclose(pd.read_csv(out)["level_mean"], expected, rtol=1e-12)
    assert "3 values are missing; --imputed" in capsys.readouterr().err
    assert command(["smooth", str(copy.path), str(source), "--imputed"]) == 0
    captured = capsys.readouterr()
    filled = pd.read_csv(io.StringIO(captured.out))
    observed = table.mask[0, :, 0]
    np.testing.assert_array_equal(filled["volume_mean"][observed], table.ys[0, observed, 0])
    spread = filled["volume_std"].to_numpy()
    assert np.all(spread[observed] == 0) and np.all(spread[~observed] > 0)
    # Within six standard errors of a thousand draws, about the level of that year.
    off = np.abs(np.asarray(filled["volume_mean"] - filled["level_mean"]))
    assert np.all(off[~observed] < 6 * spread[~observed] / 1000**0.5)
    assert command(["smooth", str(copy.path), str(source), "--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    assert command(["forecast", str(copy.path), str(source), "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("year,") and [line[:4] for line in lines[1:]] == [
        "1931",
        "1932",
        "1933",
    ]


@pytest.mark.slow
def test_check_report_and_plot_commands_write_files(copy: runs.Run, table: data.Table, tmp_path):
    check = runs.check(copy, table, num_particles=200)
    assert check.worst in ("good", "doubtful")
    assert "exact" in {finding.value for finding in check.findings}
    page = runs.write_report(copy, table, steps=3, checked=check).read_text()
    assert "level_scale[volume]" in page and "https://" not in page
    runs.draw(copy, table, tmp_path / "nile.png", steps=3)
    assert (tmp_path / "nile.png").read_bytes()[:4] == b"\x89PNG"


def test_count_parameters_are_learned_by_the_elbo(tmp_path):
    """The path of `retrodict fit` for every model that is not linear and Gaussian."""
    table = data.read({"count": np.array([3.0, 4.0, 2.0, np.nan, 5.0, 1.0, 2.0, 4.0])})
    start = models.poisson_counts(mean=1.0, persistence=0.5, scale=0.3)
    folder = Folder(tmp_path, {})
    learned = _training.fit_by_elbo(folder, jax.random.key(0), start, table, 2)
    assert learned.history.shape == (2,) and np.isfinite(learned.total)
    assert jax.tree.structure(learned.model) == jax.tree.structure(start)
    assert not eqx.tree_equal(learned.model, start)


@pytest.mark.slow
def test_run_of_counts_trains_smooths_and_streams(tmp_path, monkeypatch):
    """A family is trained, smooths a series with a gap, and its stream equals it offline."""
    few = {"num_particles": 50, "num_samples": 50, "num_replicates": 5}
    monkeypatch.setattr(_standard_errors, "SIZES_OF_LOUIS", few)
    monkeypatch.setattr(_standard_errors, "MAX_REPLICATES", 5)
    model = models.poisson_counts(mean=1.0, persistence=0.9, scale=0.3)
    _, ys = model.simulate(jax.random.key(0), 60)
    ys = np.array(ys)
    ys[7] = np.nan
    table = data.read({"count": ys[:, 0]})
    run = runs.fit(table, models.load("poisson_counts"), tmp_path / "run", num_steps=60)
    assert isinstance(run.family, rd.MixtureFamily)
    assert "on a grid of states" in run.record["results"]["uncertainty"]
    assert run.record["results"]["parameters"]["scale[count]"]["error"] > 0
    again = runs.open_run(run.path)
    smoothed = runs.smooth(again, table)
    assert bool(jnp.all(jnp.isfinite(smoothed.mean)))
    draws = runs.impute(again, table, 64)
    assert np.all(draws[0, :, 7] == np.round(draws[0, :, 7]))
    np.testing.assert_array_equal(draws[0, 0, :7], ys[:7])
    checked = runs.check(again, table, num_particles=200)
    assert {finding.name for finding in checked.findings} >= {"k-hat of path weights"}


def test_steps_to_coming_times_equal_those_of_the_reader():
    frame = pd.DataFrame({"t": [0.0, 1.0, 3.0, 3.5, 5.5], "y": np.arange(5.0), "u": np.ones(5)})
    early, late = frame.iloc[:3], frame.iloc[3:]
    full_table = data.read(frame, inputs="u", step_input=True, step_unit=1.0)
    table = data.read(early, **full_table.layout)
    times = data.read_times(late, table)
    expected = np.asarray(full_table.inputs)[:, 3:]
    # What stands in place of the steps is not used.
    inputs = np.stack([np.full(2, 7.0), np.ones(2)], axis=1)[None]
    np.testing.assert_array_equal(_apply._future_inputs(table, 2, inputs, times), expected)
    alone = data.read(early[["t", "y"]], freq="irregular", step_input=True, step_unit=1.0)
    np.testing.assert_array_equal(_apply._future_inputs(alone, 2, None, times), expected[..., :1])
    with pytest.raises(runs.RunError, match="needs future times"):
        _apply._future_inputs(alone, 2, None, None)
    with pytest.raises(runs.RunError, match="needs as many times"):
        _apply._future_inputs(alone, 3, None, times)


@pytest.mark.slow
def test_irregular_times_are_forecast_and_drawn(tmp_path, capsys):
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(size=33))
    frame = pd.DataFrame({"t": times, "y": np.cumsum(rng.normal(size=33))})
    source, at = tmp_path / "rows.csv", tmp_path / "coming.csv"
    frame.iloc[:30].to_csv(source, index=False)
    frame.iloc[30:][["t"]].to_csv(at, index=False)
    out = tmp_path / "run"
    fit = ["fit", str(source), "--model", "local_level", "--option", "irregular=true"]
    assert command([*fit, "--step-input", "--out", str(out)]) == 0
    capsys.readouterr()
    assert command(["forecast", str(out), str(source), "--steps", "3"]) == 2
    assert "--at FILE" in capsys.readouterr().err
    assert command(["forecast", str(out), str(source), "--at", str(at)]) == 0
    shown = pd.read_csv(io.StringIO(capsys.readouterr().out))
    run = runs.open_run(out)
    rows = data.read(frame.assign(y=frame["y"].where(frame.index < 30)), **run.layout)
    exact = runs.smooth(run, rows)
    np.testing.assert_allclose(shown["t"], times[30:])
    np.testing.assert_allclose(shown["level_mean"], exact.mean[0, 30:, 0], rtol=1e-8)
    spread = np.sqrt(np.asarray(exact.covariance)[0, 30:, 0, 0])
    np.testing.assert_allclose(shown["level_std"], spread, rtol=1e-8)
    picture = tmp_path / "rows.png"
    assert command(["plot", str(out), str(source), "--at", str(at), "--out", str(picture)]) == 0
    assert picture.exists()


@pytest.mark.slow
def test_stream_handles_irregular_times(tmp_path):
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(size=30))
    frame = pd.DataFrame({"t": times, "y": np.cumsum(rng.normal(size=30))})
    table = data.read(frame, step_input=True)
    spec = models.ModelSpec("local_level", "local_level", options={"irregular": True})
    run, out = runs.fit(table, spec, tmp_path / "run"), io.BytesIO()
    runs.stream(run, io.BytesIO(b"".join(lines_of(frame))), out, lag=LAG, flush=True, after="prior")
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    # The last rows are smoothed by all of them.
    exact = runs.smooth(run, table).mean[0, -LAG:, 0]
    np.testing.assert_allclose(answers["level_smoothed_mean"][-LAG:], exact, rtol=1e-8)


def test_column_with_one_observed_value_is_refused(tmp_path):
    table = data.read({"t": [1, 2, 3, 4], "y": [1.0, np.nan, np.nan, np.nan]})
    with pytest.raises(
        runs.RunError, match="column 'y': a fit needs at least 2 observed values, got 1"
    ):
        runs.fit(table, models.load("local_level"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_band_is_split_between_two_modes():
    rng = np.random.default_rng(0)
    draws = rng.choice([-3.0, 3.0], size=(2000, 4)) + 0.3 * rng.normal(size=(2000, 4))
    band = Band.of_draws(np.arange(4), draws, 0.9)
    assert band.hollow is not None and np.all(np.isnan(band.centre))
    text = page(ReportContent("t", None, [], [], [PlottedSeries("s", [Panel("x", band)])]))
    (payload,) = re.findall(r'id="payload">(.*?)</script>', text)
    (shown,) = json.loads(payload)["series"][0]["panels"]
    np.testing.assert_allclose(shown["hollow"][1], band.hollow.upper, rtol=1e-4)


@pytest.mark.slow
def test_two_modes_appear_in_plots_and_pages(monkeypatch, tmp_path):
    """States at ±3: bands between quantiles of draws, with nothing between the modes.

    Quantiles of 2,000 draws against a grid; a false alarm has a probability of 2e-9 per row.
    """
    exact, smoothed = bimodal_posterior.posterior(), bimodal_posterior.smoothed()
    arrays, rest = eqx.partition(smoothed, eqx.is_array)
    batch = eqx.combine(jax.tree.map(lambda leaf: leaf[None], arrays), rest)
    monkeypatch.setattr(_report, "smooth", lambda *_, **__: batch)
    table = data.read({"y": bimodal_posterior.observations()[:, 0]})
    record = {"layout": table.layout}
    family = rd.MixtureFamily(jax.random.key(0), 1, 1)
    run = runs.Run(tmp_path, models.ModelSpec("own"), bimodal_posterior.model(), family, record)
    (series,) = _report._series(run, table, 3, 0.9, 0)
    column, state = series.panels
    for band, rows in ((state.smoothed, slice(None)), (state.forecast, slice(-3, None))):
        assert band is not None and band.hollow is not None
        oracle = exact if rows == slice(None) else bimodal_posterior.posterior(3)
        num_draws = 2000 if rows == slice(None) else 1000
        for level, end in ((0.05, band.lower), (0.95, band.upper)):
            expected = np.asarray(oracle.quantile(level))[rows, 0]
            near = bimodal_posterior.tolerance(oracle, level, num_draws)[rows]
            assert np.all(np.abs(end - expected) < near)
        # Between the modes there is a hollow, within which the law has hardly any mass.
        assert np.all((band.hollow.lower < -1.5) & (band.hollow.upper > 1.5))
    assert column.smoothed.hollow is None  # their squares have one mode
    # Modes of weights 0.43 and 0.57: the median says nothing, and no line is drawn at it.
    assert np.all(np.isnan(state.smoothed.centre))
    assert not np.any(np.isnan(column.smoothed.centre))
    for end in (".png", ".svg"):
        plot(series.panels, tmp_path / f"two{end}", centre="median")
    assert "smoothed median and 90% band" in (tmp_path / "two.svg").read_text()
    content = ReportContent("t", None, [], [], [series], centre="median")
    (payload,) = re.findall(r'id="payload">(.*?)</script>', page(content))
    of_column, shown = json.loads(payload)["series"][0]["panels"]
    assert state.smoothed.hollow is not None
    np.testing.assert_allclose(shown["hollow"][0], state.smoothed.hollow.lower, rtol=1e-4)
    assert shown["forecast"]["hollow"] and "hollow" not in of_column


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, shape: rng.normal(size=shape),
        lambda rng, shape: rng.standard_t(3, size=shape),
        lambda rng, shape: rng.exponential(size=shape),
        lambda rng, shape: rng.uniform(size=shape),
        lambda rng, shape: rng.poisson(2.0, size=shape).astype(float),
        lambda rng, shape: np.zeros(shape),
        lambda rng, shape: np.full(shape, 1e300) * rng.normal(size=shape),
    ],
)
def test_unimodal_draws_have_no_split_band(draw):
    """1,000 draws of 200 laws each; in 10,000 rows of simulated ones at most 5 were found."""
    draws = draw(np.random.default_rng(0), (1000, 200))
    band = Band.of_draws(np.arange(200), draws, 0.9)
    assert band.hollow is None or np.isfinite(band.hollow.lower).sum() <= 1


def fit_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `fit` write its starting model, without optimisation and standard errors."""

    def unchanged(_: Any, __: Any, model: Any, ___: Any) -> _training.Learned:
        method, objective = "exact", "log-evidence"
        return _training.Learned(model, np.zeros(1), 0.0, method, objective, search="converged")

    monkeypatch.setattr(_training, "fit_by_evidence", unchanged)
    refused = {"refused": np.array("not computed.")}
    monkeypatch.setattr(_standard_errors, "_compute", lambda *_: refused)


@pytest.mark.slow
def test_memory_states_are_omitted_and_parameters_named_by_column(tmp_path, monkeypatch, capsys):
    """A season of twelve months in numbers such as 200001, with uneven scales of its column."""
    rng = np.random.default_rng(0)
    months = [100 * year + month for year in range(2000, 2004) for month in range(1, 13)]
    season = 3 * np.sin(np.arange(48) * np.pi / 6)
    frame = pd.DataFrame({"date": months, "[red]infl": season + rng.normal(size=48)})
    frame.to_csv(tmp_path / "infl.csv", index=False)
    table = data.read(tmp_path / "infl.csv")
    assert table.step == "1 month" and table.inserted == 0
    fit_nothing(monkeypatch)
    run = runs.fit(table, models.load("seasonal"), tmp_path / "run")
    assert run.spec.options == {"period": 12}
    parameters = run.record["results"]["parameters"]
    assert {"level_scale[[red]infl]", "prior.mean[season_lag10]"} <= set(parameters)
    assert [runs.state_names(run)[i] for i in runs.shown_states(run)] == ["level", "season"]
    assert len(runs.shown_states(run, every=True)) == 12
    assert command(["info", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "seasonal (period=12)" in said and "level_scale[[red]infl]" in said
    smooth = ["smooth", str(run.path), str(tmp_path / "infl.csv")]
    assert command(smooth) == 0
    shown = pd.read_csv(io.StringIO(capsys.readouterr().out))
    ends = ("mean", "std", "lower", "upper")
    assert list(shown) == ["date", *(f"{s}_{end}" for s in ("level", "season") for end in ends)]
    assert command([*smooth, "--all-states"]) == 0
    assert len(pd.read_csv(io.StringIO(capsys.readouterr().out)).columns) == 1 + 4 * 12
    (series,) = _report._series(run, table, 2, 0.9, 0)
    assert [panel.title for panel in series.panels] == ["[red]infl", "level", "season"]
    (every,) = _report._series(run, table, 0, 0.9, 0, all_states=True)
    assert len(every.panels) == 13
    for all_states, count in ((False, 2), (True, 12)):
        rows, answers = io.BytesIO(b"date,[red]infl\n200401,1.0\n200402,2.0\n"), io.BytesIO()
        options = {"state": tmp_path / f"{count}.rd", "all_states": all_states}
        assert runs.stream(run, rows, answers, lag=1, **options) == 2
        assert len(answers.getvalue().splitlines()[0].split(b",")) == 2 + 4 * count


def test_unit_of_uneven_times_is_printed(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.choice([2.0, 2.5, 7.1], size=30))
    table = data.read({"t": times, "y": rng.normal(size=30)}, step_input=True)
    spec = models.load("local_level").with_options(["irregular=true"])
    fit_nothing(monkeypatch)
    run = runs.fit(table, spec, tmp_path / "run")
    words = f"scales, slopes and rates are per step of {table.step_unit}, the median step"
    assert command(["info", str(run.path)]) == 0
    assert words in " ".join(capsys.readouterr().out.split())
    nothing = runs.Check((runs.Finding("a thing", "some", "nothing", "unknown"),), "Well.")
    assert words in runs.write_report(run, table, checked=nothing).read_text()
    assert runs.unit_in_words({"layout": {"step_input": False, "step_unit": None}}) == ""


def driven(weight: float = 1.0, gain: Any = None) -> rd.StateSpaceModel:
    """A walk that an input pushes; `gain` makes it nonlinear, with a function of one's own."""
    eye = jnp.eye(1)
    emission: Any = rd.LinearGaussianKernel(eye, jnp.zeros(1), eye)
    if gain is not None:
        emission = rd.NonlinearGaussianKernel(gain, eye)
    return rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.zeros(1), eye)),
        transition=rd.LinearGaussianKernel(
            rd.Frozen(eye), rd.Frozen(jnp.zeros(1)), eye, input_weight=rd.Frozen(weight * eye)
        ),
        emission=emission,
    )


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    rng = np.random.default_rng(0)
    table = data.read({"t": np.arange(30), "y": rng.normal(size=30), "u": np.ones(30)}, inputs="u")
    return runs.fit(table, driven(), tmp_path_factory.mktemp("given") / "run")


def test_fitted_model_object_is_loaded_again(pushed: runs.Run):
    again = runs.open_run(pushed.path)
    assert again.record["model"]["reference"] == "StateSpaceModel"
    jax.tree.map(np.testing.assert_array_equal, again.model, pushed.model)
    assert command(["info", str(pushed.path)]) == 0


def test_inputs_of_coming_rows_say_how_many_there_are(pushed: runs.Run, tmp_path, capsys):
    """Without --steps: as many as the file has; the level rises by the inputs."""
    rows, later = tmp_path / "rows.csv", tmp_path / "next.csv"
    frame = pd.DataFrame({"t": np.arange(30), "y": 0.0, "u": 1.0})
    frame.to_csv(rows, index=False)
    pd.DataFrame({"t": np.arange(28, 33), "u": [9.0, 9.0, 1.0, 2.0, 3.0]}).to_csv(
        later, index=False
    )
    order = ["forecast", str(pushed.path), str(rows), "--inputs", str(later)]
    assert command(order) == 0
    shown = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert shown["t"].tolist() == [30, 31, 32]
    means = shown[[name for name in shown if name.endswith("_mean")][0]]
    np.testing.assert_allclose(np.diff(means), [2.0, 3.0], atol=1e-9)
    picture = tmp_path / "rows.svg"
    assert command(["plot", *order[1:], "--out", str(picture)]) == 0 and picture.exists()
    pd.DataFrame({"t": [28, 29], "u": 1.0}).to_csv(later, index=False)
    assert command(order) == 2
    assert "at least one row of inputs" in capsys.readouterr().err


def test_model_with_user_functions_must_be_passed(pushed: runs.Run, tmp_path):
    shutil.copytree(pushed.path, tmp_path / "run")

    def build() -> rd.StateSpaceModel:
        return driven(gain=lambda x: jnp.sin(x))

    fitted = driven(weight=3.0, gain=lambda x: jnp.sin(x))
    record = {name: pushed.record[name] for name in ("layout", "options", "data", "results")}
    _run.write(tmp_path / "run", models.load(build), fitted, None, record)
    with pytest.raises(runs.RunError, match=r"was passed as a Python object.*model=\.\.\."):
        runs.open_run(tmp_path / "run")
    for model in (build, build()):
        again = runs.open_run(tmp_path / "run", model=model)
        np.testing.assert_array_equal(rd.unwrap(again.model).transition.input_weight, [[3.0]])
        assert again.model.emission.fn(jnp.ones(1)) == jnp.sin(1.0)


def test_resumed_fit_needs_the_same_model_object(tmp_path):
    table = data.read({"y": np.arange(12.0), "u": np.ones(12)}, inputs="u")

    def job(gain: Any, weight: float = 1.0) -> runs.FitJob:
        return runs.FitJob(table, models.load(driven(weight, gain)), tmp_path)

    def settings(gain: Any, weight: float = 1.0) -> Any:
        return job(gain, weight).settings

    first = settings(lambda x: x**2)
    assert settings(lambda x: x**2) == first
    assert all(other != first for other in (settings(jnp.sin), settings(lambda x: x + x)))
    assert settings(lambda x: x**2, 2.0) != first
    with contextlib.ExitStack() as locks:
        job(lambda x: x**2).lock_folder(locks)
    with pytest.raises(runs.RunError, match="unfinished run of other data or options"):
        runs.fit(table, driven(gain=jnp.cos), tmp_path)


def test_unwrapped_scales_maximise_the_evidence(pushed: runs.Run):
    """They are held positive while they are learned, and plain in the run again."""
    rng = np.random.default_rng(0)
    ys, us = rng.normal(size=(30, 1)), np.ones((30, 1))
    results = pushed.record["results"]

    def total(move: float, noise: float) -> float:
        model = driven()
        model = models.with_parameters(
            model, {"transition.scale_tril": move, "emission.scale_tril": noise}
        )
        named = {name: models.named_parameters(pushed.model)[name] for name in free}
        model = models.with_parameters(model, named)
        return float(rd.kalman_smoother(rd.unwrap(model), ys, inputs=us).log_evidence)

    parameters = models.named_parameters(pushed.model)
    scales = ("transition.scale_tril", "emission.scale_tril")
    free = [name for name in parameters if name not in scales]
    move, noise = (float(parameters[name][0, 0]) for name in scales)
    best = total(move, noise)
    np.testing.assert_allclose(best, results["total"], rtol=1e-9)
    assert best >= max(
        total(move + 0.01, noise), total(move, 1.05 * noise), total(move, 0.95 * noise)
    )


def test_non_models_are_refused():
    with pytest.raises(models.ModelError, match="must be a StateSpaceModel.*got int"):
        models.load(lambda: 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        models.load(3)  # type: ignore[arg-type]


def test_a_closed_pipe_ends_a_command_quietly(run: runs.Run, monkeypatch, capsys):
    def closed(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("retrodict.cli._output.typer.echo", closed)
    assert command(["info", str(run.path)]) == 141
    assert capsys.readouterr().err == ""


def test_a_stream_without_input_is_refused_in_one_line(run: runs.Run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert command(["stream", str(run.path)]) == 2
    assert "standard input is closed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smooth", "forecast", "check", "info", "stream"])
def test_a_closed_output_is_refused_in_one_line(run: runs.Run, name: str, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", None)
    source = [] if name in ("info", "stream") else [os.devnull]
    assert command([name, str(run.path), *source]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def test_names_of_files_need_not_be_utf_8(copy: runs.Run):
    """A byte that is not UTF-8 stands in the record, and is read back."""
    source = os.fsdecode(b"\xff.csv")
    described = [f"source: {source}"]
    entries = {name: copy.record[name] for name in ("layout", "options", "results")}
    record = {**entries, "data": {**copy.record["data"], "described": described}}
    _run.write(copy.path, copy.spec, copy.model, None, record)
    assert runs.open_run(copy.path).record["data"]["described"] == described


def test_two_processes_do_not_fit_to_one_folder(table: data.Table, tmp_path):
    """The folder is free again when the first ends; what a kill left of a file is no matter."""
    spec = models.load("local_level")
    job = runs.FitJob(table, spec, tmp_path)
    (tmp_path / ".settings.json.1.partial").write_text("{")
    with contextlib.ExitStack() as locks:
        job.lock_folder(locks)
        with pytest.raises(runs.RunError, match="in use by another process"):
            runs.fit(table, spec, tmp_path)
    with contextlib.ExitStack() as locks:
        job.lock_folder(locks)


def test_settings_that_are_a_pipe_are_refused(table: data.Table, tmp_path):
    """Reading them would wait forever."""
    os.mkfifo(tmp_path / "settings.json")
    with pytest.raises(runs.RunError, match="of other data or options"):
        runs.fit(table, "local_level", tmp_path)


@pytest.mark.slow
def test_full_disk_is_reported_in_one_line(run: runs.Run, frame: pd.DataFrame, tmp_path):
    """In a process of its own: a disk is made full by a limit on the size of files."""
    frame.to_csv(tmp_path / "nile.csv", index=False)
    asked = [sys.executable, "-c", "from retrodict.cli import main; main()", "smooth"]
    asked += [str(run.path), str(tmp_path / "nile.csv"), "--out", str(tmp_path / "out.nc")]
    done = subprocess.run(
        f"ulimit -f 1; {shlex.join(asked)}",
        shell=True,
        capture_output=True,
        text=True,
        env={name: v for name, v in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"},
    )
    assert done.returncode == 2, done.stderr
    *rest, last = done.stderr.splitlines()
    assert rest == ["3 values are missing; --imputed fills them in."]
    assert last.startswith("retrodict: error: ") and "File too large" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nile.csv"]


def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(monkeypatch):
    wide = data.read({f"c{i}": np.arange(4.0) for i in range(60)})
    monkeypatch.setattr(os, "sysconf", lambda _: 600)  # 360,000 bytes; 576,000 are needed
    with pytest.raises(runs.RunError, match=r"60 states for 60 columns.*fewer columns"):
        runs.FitJob(wide, "local_level", Path()).starting_model()
    assert (
        runs.FitJob(data.read({"y": np.arange(9.0)}), "local_level", Path())
        .starting_model()
        .state_dim
        == 1
    )


def test_tables_of_many_columns_are_read_quickly():
    """Names are compared by hashing: a hundred thousand take no time."""
    began = time.perf_counter()
    with pytest.raises(data.DataError, match="'c7'"):
        _source.check_names([*(f"c{i}" for i in range(100_000)), "c7"], "table")
    assert time.perf_counter() - began < 10


def test_missing_header_is_refused_before_rows_arrive(copy: runs.Run):
    with pytest.raises(data.DataError, match="add a line of column names"):
        runs.stream(copy, io.BytesIO(b"1931,700\n"), io.BytesIO(), lag=LAG)


def test_endless_line_is_refused(copy: runs.Run, monkeypatch):
    monkeypatch.setattr(_stream, "MAX_LINE_BYTES", 1 << 18)
    source = io.BytesIO(b"year,volume\n" + b"9" * (1 << 20))
    with pytest.raises(data.DataError, match="a line has more than 262144 bytes"):
        runs.stream(copy, source, io.BytesIO(), lag=LAG)


def test_insufficient_memory_is_reported_in_one_line(run: runs.Run, monkeypatch, capsys):
    for error in (
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),
        MemoryError(),
    ):

        def fails(*_: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(runs, "read_record", fails)
        assert command(["info", str(run.path)]) == 2
        assert capsys.readouterr().err.startswith("retrodict: error: not enough memory")


def test_a_run_of_release_0_1_is_read(tmp_path):
    """The folder was written by release 0.1, whose classes were in other modules."""
    shutil.copytree(Path(__file__).with_name("run_0_1"), tmp_path / "run")
    old = runs.open_run(tmp_path / "run")
    assert old.record["version"].startswith("0.1") and old.is_exact
    assert old.record["results"]["nats_per_row"] == -1.0  # "nats_a_row" in the file
    rows = old.rows()
    assert rows is not None and rows.ys.shape == (20, 1)
    table = data.read({"y": rows.ys[:, 0]}, **old.layout)
    assert runs.smooth(old, table).mean.shape == (1, 20, 1)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(record | {"retrodict_run": 0}))
    with pytest.raises(runs.RunError, match="is of format 0, and this version.*fit again"):
        runs.open_run(tmp_path / "run")
