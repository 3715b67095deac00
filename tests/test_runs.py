"""Runs: a model fitted to a table and kept in a folder, and what it says afterwards."""

import dataclasses
import io
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import retrodict as rd
from retrodict import data, models, runs
from retrodict.cli._app import run as command
from retrodict.runs import _answer, _check, _exact, _learn, _report, _residuals, _uncertain

LAG = 4


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    whole: Any = sm.datasets.nile.load_pandas().data
    found = whole.astype({"year": int}).iloc[:60]
    return found.drop(index=[20, 21, 40]).reset_index(drop=True)


@pytest.fixture(scope="module")
def table(frame: pd.DataFrame) -> data.Table:
    return data.read(frame)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, table: data.Table) -> runs.Run:
    out = tmp_path_factory.mktemp("runs") / "nile"
    return runs.fit(table, models.resolve("local_level"), out)


@pytest.fixture
def copy(run: runs.Run, tmp_path) -> runs.Run:
    """The run in a folder of its own, which a test may spoil."""
    shutil.copytree(run.path, tmp_path / "copy")
    return runs.open_run(tmp_path / "copy")


def scales(found: runs.Run) -> np.ndarray:
    named = models.named_parameters(found.model)
    return np.array([named["level_scale"][0], named["obs_scale"][0]])


def log_evidence(ys: np.ndarray, model: rd.StateSpaceModel, move: float, noise: float) -> float:
    """Of a random walk seen with noise, as one Gaussian law of the rows that were seen."""
    plain = rd.unwrap(model)
    seen = np.flatnonzero(~np.isnan(ys))
    wide = float(rd.Gaussian(plain.prior.mean, plain.prior.scale_tril).covariance[0, 0])
    walk = np.minimum(seen[:, None], seen[None, :])
    covariance = wide + move**2 * walk + noise**2 * np.eye(seen.size)
    centred = ys[seen] - float(plain.prior.mean[0])
    _, logdet = np.linalg.slogdet(covariance)
    return -0.5 * float(logdet + centred @ np.linalg.solve(covariance, centred))


def test_parameters_are_those_of_greatest_evidence(run: runs.Run, table: data.Table):
    found = scales(run)
    best = log_evidence(table.ys[0, :, 0], run.model, *found)
    for factors in ((1.05, 1.0), (0.95, 1.0), (1.0, 1.05), (1.0, 0.95)):
        assert log_evidence(table.ys[0, :, 0], run.model, *(found * factors)) < best
    assert run.is_exact and run.record["results"]["method"] == "exact"


def test_a_run_is_found_again(run: runs.Run):
    again = runs.open_run(run.path)
    np.testing.assert_array_equal(scales(again), scales(run))
    assert again.layout == run.layout and again.record == run.record
    line = again.record["results"]["parameters"]["level_scale[0]"]
    assert line["lower"] < line["value"] < line["upper"] and line["error"] > 0


def test_a_finished_run_is_not_overwritten(run: runs.Run, table: data.Table):
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    with pytest.raises(runs.RunError, match="holds a finished run"):
        runs.fit(table, run.spec, run.path)
    after = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    assert after == before


def test_a_folder_of_something_else_is_not_touched(run: runs.Run, table: data.Table, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(runs.RunError, match="is not empty and holds no run"):
        runs.fit(table, run.spec, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_an_unfinished_run_of_other_options_is_not_mixed_up(copy: runs.Run, table: data.Table):
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
        (lambda path: path.joinpath("run.json").write_text("[]"), "holds no record"),
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
            "model.rd is not as `fit` wrote it",
        ),
        (lambda path: path.joinpath("model.rd").unlink(), "model.rd cannot be read"),
    ],
)
def test_a_spoiled_run_is_refused_in_one_line(copy: runs.Run, spoil, words, capsys):
    spoil(copy.path)
    with pytest.raises(runs.RunError, match=words):
        runs.open_run(copy.path)
    assert command(["info", str(copy.path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("retrodict: error: ")


def test_states_are_those_of_the_exact_smoother(run: runs.Run, table: data.Table):
    one = table.one()
    exact = rd.kalman_smoother(rd.unwrap(run.model), one["ys"], mask=one["mask"])
    found = runs.smooth(run, table)
    np.testing.assert_allclose(found.mean[0], exact.chain.marginals().mean, rtol=1e-10)


def test_a_forecast_is_what_missing_rows_would_be(run: runs.Run, table: data.Table):
    one = table.one()
    longer = np.concatenate([one["ys"], np.full((3, 1), np.nan)])
    exact = rd.kalman_smoother(rd.unwrap(run.model), longer).chain.marginals()
    found = runs.forecast(run, table, 3)
    np.testing.assert_allclose(found.state_mean[0], exact.mean[-3:], rtol=1e-9)
    np.testing.assert_allclose(found.state_covariance[0], exact.covariance[-3:], rtol=1e-9)
    # A table of it has these moments, and not those of draws.
    shown, name = data.to_frame(table, found, state_names=["level"]), table.names[0]
    noise = run.record["results"]["parameters"]["obs_scale[0]"]["value"] ** 2
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


def test_a_fit_that_is_not_at_a_maximum_is_not_good(run: runs.Run):
    assert run.record["results"]["status"] == "fine"
    (fine,) = _check._fitted(run)
    assert fine.verdict == "good"
    (near,) = _check._fitted(told_of(run, status="not at a maximum", distance=0.11))
    assert near.verdict == "good" and near.value == "to 0.11 standard errors"
    (moved,) = _check._fitted(told_of(run, status="not at a maximum", distance=0.7))
    assert moved.verdict == "doubtful" and "0.7 standard errors away" in moved.value
    assert runs.Check((fine, moved), "").worst == "doubtful"
    (lost,) = _check._fitted(told_of(run, status="not at a maximum", distance=7.0))
    assert lost.verdict == "bad"
    for words, value in (("exact", "determined"), ("louis", "told from noise")):
        unknown = {"status": "not identified", "uncertainty": _uncertain.METHODS[words]}
        assert value in _check._fitted(told_of(run, **unknown))[0].value
    old = told_of(run)
    del old.record["results"]["status"]  # as earlier versions wrote it
    assert _check._fitted(old)[0].verdict == "unknown"


def test_a_higher_maximum_elsewhere_is_bad(run: runs.Run, table: data.Table, monkeypatch):
    assert run.record["results"]["search"] == "converged"
    (tiny,) = _check._fitted(run, 1e-4)
    assert tiny.verdict == "good"
    (some,) = _check._fitted(run, 0.5)
    assert some.verdict == "doubtful" and "higher by 0.5" in some.value
    (much,) = _check._fitted(told_of(run, status="at an edge"), 705.0)
    assert much.verdict == "bad" and "higher by 705" in much.value
    # The level of the Nile at zero: a maximum may be flat there, and another is higher.
    values = {"level_scale": 1e-8, "obs_scale": 170.0}
    stuck = dataclasses.replace(run, model=models.with_parameters(run.model, values))
    one = table.one()
    low = rd.kalman_smoother(stuck.model, one["ys"], mask=one["mask"]).log_evidence
    stuck = told_of(stuck, total=float(low))
    higher = _check._higher(stuck, table)
    best = run.record["results"]["total"]
    assert higher is not None and higher > 1
    assert higher == pytest.approx(best - float(low), abs=1e-3)
    # Other data are not those that the run was to make likely.
    monkeypatch.setitem(run.record["data"], "sha256", "of other data")
    assert _check._higher(run, table) is None


def test_a_scale_at_zero_is_said_in_words(run: runs.Run):
    stage = {
        "standard_error scale": np.array([np.nan, 0.2]),
        "lower scale": np.array([np.nan, 0.5]),
        "upper scale": np.array([np.nan, 2.0]),
    }
    lines = {
        f"scale[{i}]": _uncertain._line(stage, "scale", (i,), value, (0.0, np.inf))
        for i, value in enumerate((1e-151, 1.0))
    }
    assert lines["scale[0]"] == {"edge": "zero"}
    words = _uncertain._in_words("exact", "at an edge", 0.0, lines)
    assert "scale[0] is at the edge of zero: no interval" in words
    assert "Intervals of scale[1] are made on the log scale" in words
    (found,) = _check._fitted(told_of(run, status="at an edge", parameters=lines))
    assert found.verdict == "good" and "scale[0] at the edge of zero" in found.value
    assert _report._parameter("s", {"value": 0.0, "learned": True, **lines["scale[0]"]}).note


def test_the_likelihood_is_told_in_all_and_by_row(run: runs.Run, table: data.Table, capsys):
    one = table.one()
    exact = rd.kalman_smoother(rd.unwrap(run.model), one["ys"], mask=one["mask"]).log_evidence
    assert run.record["results"]["total"] == pytest.approx(float(exact), rel=1e-9)
    assert command(["info", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert f"log-likelihood {float(exact):.2f} in all" in said
    assert "(57 of 60 rows observed)" in said
    assert "are made on the log scale" in " ".join(said.split())


class Told:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def begin(self, stage: str) -> None:
        pass

    def step(self, done: int, total: int) -> None:
        pass

    def end(self, stage: str, *, kept: bool) -> None:
        self.ended.append(stage)

    def say(self, message: str) -> None:
        pass


def test_a_fit_has_as_many_stages_as_it_says(copy: runs.Run, table: data.Table, monkeypatch):
    (copy.path / "run.json").unlink()
    told = Told()
    again = runs.fit(table, copy.spec, copy.path, progress=told)
    assert len(told.ended) == runs.num_stages(table, copy.spec) == 2
    assert runs.num_stages(table, models.resolve("poisson_counts")) == 3
    for name in ("_posterior", "_residuals"):
        monkeypatch.setattr(_check, name, lambda *_: [])
    monkeypatch.setattr(_check, "_hidden", lambda *_: runs.Finding("a", "b", "c", "good"))
    told = Told()
    runs.check(again, table, progress=told)
    assert len(told.ended) == runs.NUM_CHECKS


def test_a_check_says_what_its_rows_mean(run: runs.Run, frame, tmp_path, capsys, monkeypatch):
    source = tmp_path / "nile.csv"
    frame.to_csv(source, index=False)
    found = runs.Check((runs.Finding("this", "that", "so and so", "good"),), "In words.")
    monkeypatch.setattr(runs, "check", lambda *_, **__: found)
    assert command(["check", str(run.path), str(source)]) == 0
    said = capsys.readouterr().out
    assert "what it means" in said and "so and so" in said and "In words." in said


def test_replicates_are_few_where_rows_are_many():
    def most(rows: int) -> int:
        return _uncertain._most_replicates(data.read({"y": np.zeros(rows)}))

    assert most(120) == _uncertain.MOST_REPLICATES and most(1500) == 80 and most(6000) == 20
    words = _uncertain._in_words("louis", "fine", 0.0, {}, noise=0.123)
    assert "known to 12% or better" in words


def lines_of(frame: pd.DataFrame) -> list[bytes]:
    return frame.to_csv(index=False).encode().splitlines(keepends=True)


def test_a_stream_answers_as_offline_smoothing_does(copy, frame, table):
    out = io.BytesIO()
    count = runs.stream(copy, io.BytesIO(b"".join(lines_of(frame))), out, lag=LAG, flush=True)
    assert count == 60  # rows that were missing move the state too
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    one = table.one()
    model = rd.unwrap(copy.model)
    for k in (10, 19, 22, 59):
        rows = rd.kalman_smoother(model, one["ys"][: k + 1]).chain.marginals()
        line = answers.iloc[k]
        assert line["time"] == 1871 + k and line["smoothed_time"] == 1871 + k - LAG
        np.testing.assert_allclose(line["level_mean"], rows.mean[k, 0], rtol=1e-9)
        np.testing.assert_allclose(line["level_smoothed_mean"], rows.mean[k - LAG, 0], rtol=1e-9)
        np.testing.assert_allclose(
            line["level_smoothed_std"], np.sqrt(rows.covariance[k - LAG, 0, 0]), rtol=1e-9
        )
    rest = answers.iloc[60:]
    assert rest["smoothed_time"].tolist() == [1927, 1928, 1929, 1930]
    whole = rd.kalman_smoother(model, one["ys"]).chain.marginals()
    np.testing.assert_allclose(rest["level_smoothed_mean"], whole.mean[-LAG:, 0], rtol=1e-9)


def test_a_stream_goes_on_as_if_nothing_had_happened(copy, frame, tmp_path):
    lines = lines_of(frame)
    whole, cut = tmp_path / "whole.csv", tmp_path / "cut.csv"
    state = [tmp_path / "whole.state", tmp_path / "cut.state"]
    runs.stream(copy, io.BytesIO(b"".join(lines)), whole, lag=LAG, state=state[0])
    runs.stream(copy, io.BytesIO(b"".join(lines[:30])), cut, lag=LAG, state=state[1])
    # what was written after the state was kept, as a kill leaves it, is written again
    with cut.open("ab") as file:
        file.write(b"1899,1.0,")
    count = runs.stream(copy, io.BytesIO(b"".join(lines)), cut, lag=LAG, state=state[1])
    assert count == 60 - (29 + 2)  # two rows of the first part were missing
    assert cut.read_bytes() == whole.read_bytes()


def test_a_stream_begins_anew_when_it_is_told_to(copy, frame, tmp_path):
    source, out, state = b"".join(lines_of(frame)), tmp_path / "out.csv", tmp_path / "state"
    runs.stream(copy, io.BytesIO(source), out, lag=LAG, state=state)
    first = out.read_bytes()
    assert runs.stream(copy, io.BytesIO(source), out, lag=LAG, state=state) == 0
    assert out.read_bytes() == first
    assert runs.stream(copy, io.BytesIO(source), out, lag=LAG, state=state, restart=True) == 60
    assert out.read_bytes() == first
    other = tmp_path / "letter.txt"  # a file of something else is not replaced
    other.write_text("dear" * 9999)
    with pytest.raises(runs.RunError, match="no state says that it is of this stream"):
        runs.stream(copy, io.BytesIO(source), other, lag=LAG, state=state, restart=True)
    assert other.read_text() == "dear" * 9999
    state.write_bytes(b"damaged")
    with pytest.raises(runs.RunError, match="Pass restart=True"):
        runs.stream(copy, io.BytesIO(source), io.BytesIO(), lag=LAG, state=state)
    count = runs.stream(copy, io.BytesIO(source), io.BytesIO(), lag=LAG, state=state, restart=True)
    assert count == 60


def test_rows_out_of_order_are_refused(copy, frame):
    lines = lines_of(frame)
    wrong = [lines[0], lines[2], lines[1]]
    with pytest.raises(data.DataError, match=r"line 3.*1871 is not later than 1872"):
        runs.stream(copy, io.BytesIO(b"".join(wrong)), io.BytesIO(), lag=LAG)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1871,x\n", "line 2, column 'volume': 'x'"),
        ("1871,1\n1872,2\n1873.5,3\n", "line 4, column 'year': 1873.5 is not a whole number"),
        ("1871,1\n1872,2\n9999999,3\n", "line 4.*9998126 rows are missing between 1872 and"),
    ],
)
def test_rows_that_cannot_be_answered_leave_nothing(copy, tmp_path, rows: str, words: str):
    source, out, pipe = f"year,volume\n{rows}".encode(), tmp_path / "answers.csv", io.BytesIO()
    for target in (out, pipe):
        with pytest.raises(data.DataError, match=words):
            runs.stream(copy, io.BytesIO(source), target, lag=LAG)
    assert not out.exists() and not pipe.getvalue()
    assert not list(copy.path.glob("stream*"))


def test_the_state_of_another_lag_is_refused(copy, frame, tmp_path):
    place = tmp_path / "state"
    source = b"".join(lines_of(frame)[:5])
    runs.stream(copy, io.BytesIO(source), io.BytesIO(), lag=LAG, state=place)
    with pytest.raises(runs.RunError, match="of another run or lag"):
        runs.stream(copy, io.BytesIO(source), io.BytesIO(), lag=LAG + 1, state=place)


def test_levels_are_uniform_under_the_model_and_not_under_another():
    """Fixed seed; under the model a p-value below 1e-3 has that probability."""
    model = models.local_level(level_scale=0.5, obs_scale=1.0, prior_scale=1.0)
    _, ys = model.simulate(jax.random.key(0), 300)
    right = _residuals.levels(jax.random.key(1), model, np.asarray(ys), num_particles=500)
    assert all(test.p_value > 1e-3 for test in _residuals.residual_tests([right[:, 0]]))
    other = models.local_level(level_scale=0.02, obs_scale=1.0, prior_scale=1.0)
    wrong = _residuals.levels(jax.random.key(1), other, np.asarray(ys), num_particles=500)
    assert min(test.p_value for test in _residuals.residual_tests([wrong[:, 0]])) < 1e-6


def test_levels_of_a_model_with_many_states_are_exact():
    """A thousand particles find none of twelve wide states; fixed seed, as above."""
    model = models.seasonal(level_scale=0.3, seasonal_scale=0.05, obs_scale=1.0, prior_scale=50.0)
    _, ys = model.simulate(jax.random.key(0), 240)
    ys = np.array(ys)
    ys[30:33] = np.nan
    found = _residuals.levels(jax.random.key(1), model, ys)
    assert all(test.p_value > 1e-3 for test in _residuals.residual_tests([found[:, 0]]))
    # What lies in the wide prior of the first year has no level, and nor has what is missing.
    assert np.isnan(found[:11]).all() and np.isnan(found[30:33]).all()
    assert np.isfinite(found[40:]).all()
    # The level of the last row, by the evidence of the series with it and without.
    law = _exact.one_step_ahead(rd.unwrap(model), ys)
    evidences = (rd.kalman_smoother(model, ys[:n]).log_evidence for n in (240, 239))
    density = -0.5 * ((ys[-1] - law.mean[-1]) / law.std[-1]) ** 2 - np.log(law.std[-1])
    expected = next(evidences) - next(evidences)
    np.testing.assert_allclose(density - 0.5 * np.log(2 * np.pi), expected, rtol=1e-8)


def test_families_meet_gaps_while_they_are_trained():
    """A family that had seen none filled them with the mean of the model, whatever was around."""
    given = np.ones((400, 64, 2), bool)
    given[:, 5, 1] = False
    seen = np.asarray(_learn._with_gaps(jax.random.key(0), jnp.asarray(given)))
    assert not seen[:, 5, 1].any() and (seen[..., 0] >= seen[..., 1]).all()
    gone = (~seen[..., 0]).sum(axis=1)
    assert 0.4 < np.mean(gone == 0) < 0.6 and 5 < gone[gone > 0].mean() < 14


def test_particles_that_know_nothing_have_no_levels():
    """Eight states that wander, each seen with little noise, and ten particles."""
    rate = rd.NonlinearGaussianKernel(lambda x: x + 0 * jnp.sin(x), rd.Diagonal(0.01 * jnp.ones(8)))
    move = rd.LinearGaussianKernel(jnp.eye(8), jnp.zeros(8), jnp.eye(8))
    model = rd.StateSpaceModel(rd.Gaussian(jnp.zeros(8), jnp.eye(8)), move, rate)
    ys = np.asarray(model.simulate(jax.random.key(0), 20)[1])
    assert np.isnan(_residuals.levels(jax.random.key(1), model, ys, num_particles=100)).all()


def test_points_are_hidden_as_often_as_needed():
    mask = np.ones((1, 60, 1), bool)
    mask[0, 5] = False
    away = _residuals.hide(jax.random.key(0), mask, 0.1, 20)
    assert len(away) > 1 and 20 <= away.sum() <= 30
    assert not away[:, 0, 5].any() and away.sum(axis=0).max() == 1
    assert len(_residuals.hide(jax.random.key(0), np.ones((1, 400, 1), bool), 0.1, 20)) == 1
    all_once = _residuals.hide(jax.random.key(0), mask[:, :12], 0.1, 20)
    assert (all_once.sum(axis=0) == mask[:, :12]).all()


def test_hidden_points_of_a_short_series_are_counted(run: runs.Run, table: data.Table):
    found = _check._hidden(run, table, jax.random.key(0), 0)
    assert found.verdict == "good" and "times, another tenth each" in found.meaning
    few = table.last(12)
    assert _check._hidden(run, few, jax.random.key(0), 0).verdict == "unknown"


def test_bands_of_columns_are_exact_where_the_model_is(run: runs.Run, table: data.Table):
    ((panel, state),) = (found.panels for found in _report._series(run, table, 4, 0.9, 0))
    noise = models.named_parameters(run.model)["obs_scale"][0]
    half = 1.6448536269514722 * np.hypot((state.upper - state.mean) / 1.6448536269514722, noise)
    np.testing.assert_allclose(panel.upper - panel.mean, half, rtol=1e-6)
    np.testing.assert_allclose(panel.mean, state.mean, rtol=1e-6)
    for band in (panel.forecast, state.forecast):
        assert band is not None and np.all(np.diff(band.upper - band.lower) > 0)


def test_a_fit_that_was_killed_at_its_end_writes_its_report(
    copy: runs.Run, frame: pd.DataFrame, tmp_path, monkeypatch, capsys
):
    source, page = tmp_path / "nile $1.csv", copy.path / "report.html"
    frame.to_csv(source, index=False)
    findings = (runs.Finding("a thing", "some", "nothing", "unknown"),)
    monkeypatch.setattr(_report, "check", lambda *_, **__: runs.Check(findings, "Well."))
    before = (copy.path / "run.json").read_bytes()
    arguments = ["fit", str(source), "--model", "local_level", "--out", str(copy.path)]
    assert command([*arguments, "--seed", "1"]) == 2 and not page.exists()
    assert "holds a finished run" in capsys.readouterr().err
    assert command(arguments) == 0
    assert (copy.path / "run.json").read_bytes() == before
    text = page.read_text()
    assert "retrodict fit &#x27;" in text and "nile $1.csv" in text and "Not judged" in text
    assert command(arguments) == 2


def test_entries_fixed_at_one_value_are_one_line():
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
    found = runs.read_inputs(driven, table, later, 3)
    assert found[..., 0].tolist() == [[5.0, 6.0, 7.0]]
    with pytest.raises(runs.RunError, match="must have 5 rows of inputs.*after its last row"):
        runs.read_inputs(driven, table, later, 5)
    with pytest.raises(runs.RunError, match="after 4 comes 5"):
        runs.read_inputs(driven, table, later.iloc[3:], 2)


def test_coming_times_of_a_regular_table_are_the_next_ones(copy: runs.Run, frame, tmp_path, capsys):
    source, at = tmp_path / "nile.csv", tmp_path / "at.csv"
    frame.to_csv(source, index=False)
    for times, code in (("1931\n1932\n", 0), ("1935\n", 2), ("1931.5\n", 2)):
        at.write_text(f"year\n{times}")
        assert command(["forecast", str(copy.path), str(source), "--at", str(at)]) == code
    assert "after 1930 comes 1931" in capsys.readouterr().err


def test_coverage_counts_what_lies_inside():
    found = _residuals.coverage(np.array([0.01, 0.3, 0.5, 0.96, 0.94]))
    assert (found.inside, found.hidden) == (3, 5)
    assert _residuals.coverage(np.full(100, 0.5)).p_value < 0.01


def test_commands_say_what_python_says(copy: runs.Run, frame, tmp_path, capsys):
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
    seen = table.mask[0, :, 0]
    np.testing.assert_array_equal(filled["volume_mean"][seen], table.ys[0, seen, 0])
    spread = filled["volume_std"].to_numpy()
    assert np.all(spread[seen] == 0) and np.all(spread[~seen] > 0)
    # Within six standard errors of a thousand draws, about the level of that year.
    off = np.abs(np.asarray(filled["volume_mean"] - filled["level_mean"]))
    assert np.all(off[~seen] < 6 * spread[~seen] / 1000**0.5)
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
def test_check_report_and_picture(copy: runs.Run, table: data.Table, tmp_path):
    found = runs.check(copy, table, num_particles=200)
    assert found.worst in ("good", "doubtful")
    assert {"they are", "exact"} <= {finding.value for finding in found.findings}
    page = runs.write_report(copy, table, steps=3, found=found).read_text()
    assert "level_scale[0]" in page and "https://" not in page
    runs.draw(copy, table, tmp_path / "nile.png", steps=3)
    assert (tmp_path / "nile.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_run_of_counts(tmp_path, monkeypatch):
    """A family is trained, smooths a series with a gap, and its stream equals it offline."""
    few = {"num_particles": 50, "num_samples": 50, "num_replicates": 5}
    monkeypatch.setattr(_uncertain, "SIZES_OF_LOUIS", few)
    monkeypatch.setattr(_uncertain, "MOST_REPLICATES", 5)
    model = models.poisson_counts(mean=1.0, persistence=0.9, scale=0.3)
    _, ys = model.simulate(jax.random.key(0), 60)
    ys = np.array(ys)
    ys[7] = np.nan
    table = data.read({"count": ys[:, 0]})
    run = runs.fit(table, models.resolve("poisson_counts"), tmp_path / "run", num_steps=60)
    assert isinstance(run.family, rd.MixtureFamily)
    assert "on a grid of states" in run.record["results"]["uncertainty"]
    assert run.record["results"]["parameters"]["scale[0]"]["error"] > 0
    again = runs.open_run(run.path)
    found = runs.smooth(again, table)
    assert bool(jnp.all(jnp.isfinite(found.mean)))
    draws = runs.impute(again, table, 64)
    assert np.all(draws[0, :, 7] == np.round(draws[0, :, 7]))
    np.testing.assert_array_equal(draws[0, 0, :7], ys[:7])
    checked = runs.check(again, table, num_particles=200)
    assert {finding.name for finding in checked.findings} >= {"k-hat of path weights"}


def test_steps_to_coming_times_are_those_of_the_reader():
    frame = pd.DataFrame({"t": [0.0, 1.0, 3.0, 3.5, 5.5], "y": np.arange(5.0), "u": np.ones(5)})
    early, late = frame.iloc[:3], frame.iloc[3:]
    whole = data.read(frame, inputs="u", step_input=True, step_unit=1.0)
    table = data.read(early, **whole.layout)
    times = data.read_times(late, table)
    expected = np.asarray(whole.inputs)[:, 3:]
    # What stands in place of the steps is not used.
    given = np.stack([np.full(2, 7.0), np.ones(2)], axis=1)[None]
    np.testing.assert_array_equal(_answer._future_inputs(table, 2, given, times), expected)
    alone = data.read(early[["t", "y"]], freq="irregular", step_input=True, step_unit=1.0)
    np.testing.assert_array_equal(_answer._future_inputs(alone, 2, None, times), expected[..., :1])
    with pytest.raises(runs.RunError, match="needs the coming times"):
        _answer._future_inputs(alone, 2, None, None)
    with pytest.raises(runs.RunError, match="expects as many times"):
        _answer._future_inputs(alone, 3, None, times)


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
def test_a_stream_of_irregular_times(tmp_path):
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(size=30))
    frame = pd.DataFrame({"t": times, "y": np.cumsum(rng.normal(size=30))})
    table = data.read(frame, step_input=True)
    spec = models.ModelSpec("local_level", "local_level", options={"irregular": True})
    found, out = runs.fit(table, spec, tmp_path / "run"), io.BytesIO()
    runs.stream(found, io.BytesIO(b"".join(lines_of(frame))), out, lag=LAG, flush=True)
    answers = pd.read_csv(io.BytesIO(out.getvalue()))
    # The last rows are smoothed by all of them.
    exact = runs.smooth(found, table).mean[0, -LAG:, 0]
    np.testing.assert_allclose(answers["level_smoothed_mean"][-LAG:], exact, rtol=1e-8)


def test_a_column_with_one_observed_value_is_no_data(tmp_path):
    table = data.read({"t": [1, 2, 3, 4], "y": [1.0, np.nan, np.nan, np.nan]})
    with pytest.raises(runs.RunError, match="column 'y': 1 observed value"):
        runs.fit(table, models.resolve("local_level"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
