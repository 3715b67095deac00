"""Runs of models with regimes: fit, tables, pictures, checks, reports, and refusals."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import retrodict as rd
from retrodict import data, models, runs
from retrodict.cli._app import run as command
from retrodict.runs import _check_regimes, _training
from retrodict.runs._plot import edges_of
from retrodict.runs._report_content import Shade

NUM_ROWS = 90


def simulated(model: Any, values: dict[str, Any], seed: int, rows: int = NUM_ROWS) -> tuple:
    model = models.with_parameters(model, values)
    zs, _, ys = model.simulate(jax.random.key(seed), rows)
    return np.asarray(zs), np.asarray(ys)[:, 0]


MEANS = {"mean": [[-1.0], [2.0]], "scale": [[0.5], [1.0]], "transition": [[0.9, 0.1], [0.1, 0.9]]}


@pytest.fixture(scope="module")
def truth() -> tuple[np.ndarray, np.ndarray]:
    return simulated(models.markov_switching(switching="mean,variance"), MEANS, 1)


@pytest.fixture(scope="module")
def frame(truth: tuple) -> pd.DataFrame:
    months = pd.date_range("2000-01-01", periods=NUM_ROWS, freq="MS")
    return pd.DataFrame({"month": months, "growth": truth[1]})


@pytest.fixture(scope="module")
def table(frame: pd.DataFrame) -> data.Table:
    return data.read(frame)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, table: data.Table) -> runs.Run:
    """Two means and two variances, from three starts."""
    spec = models.load("markov_switching").with_options(["switching=mean,variance"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_training, "NUM_STARTS", 3)
        return runs.fit(table, spec, tmp_path_factory.mktemp("regimes") / "run")


@pytest.fixture(scope="module")
def two_series() -> pd.DataFrame:
    """Two levels of different lengths, with a gap in the first."""
    values = {"level_scale": [[0.05], [1.0]], "obs_scale": 0.3}
    parts = []
    for name, rows in (("a", 60), ("b", 45)):
        model = models.switching_level(prior_scale=1.0)
        _, ys = simulated(model, values, len(parts), rows)
        parts.append(pd.DataFrame({"id": name, "t": range(rows), "y": ys}))
    parts[0].loc[20:24, "y"] = np.nan
    return pd.concat(parts)


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory, two_series: pd.DataFrame) -> tuple:
    table = data.read(two_series, series="id")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_training, "NUM_STARTS", 2)
        out = tmp_path_factory.mktemp("levels") / "run"
        return runs.fit(table, "switching_level", out), table


def test_fit_has_the_likelihood_of_statsmodels(run: runs.Run, table: data.Table):
    results = run.record["results"]
    assert results["objective"] == "exact evidence" and results["method"] == "exact"
    p = {name: np.asarray(value) for name, value in models.named_parameters(run.model).items()}
    peer = sm.tsa.MarkovRegression(table.ys[0, :, 0], k_regimes=2, switching_variance=True)
    parameters = np.r_[p["transition"][:, 0], p["mean"][:, 0], p["scale"][:, 0] ** 2]
    np.testing.assert_allclose(results["total"], peer.loglike(parameters), rtol=1e-8)
    # A maximum: statsmodels finds nothing higher from here.
    better: Any = peer.fit(start_params=parameters, disp=False)
    assert better.llf < results["total"] + 1e-3


def test_record_describes_regimes(run: runs.Run, truth: tuple):
    results = run.record["results"]
    assert list(results["regimes"]) == ["regime_1", "regime_2"]
    assert results["starts"] == 3 and 1 <= results["starts_at_best"] <= 3
    shares = [line["share"] for line in results["regimes"].values()]
    np.testing.assert_allclose(sum(shares), 1.0)
    assert abs(shares[0] - np.mean(truth[0] == 0)) < 0.1
    stay = results["parameters"]["transition[regime_1,regime_1]"]["value"]
    duration = results["regimes"]["regime_1"]["expected_duration"]
    np.testing.assert_allclose(duration, 1 / (1 - stay), rtol=1e-6)
    means = [results["parameters"][f"mean[regime_{j},growth]"]["value"] for j in (1, 2)]
    assert means[0] < means[1]  # the canonical order
    assert all("error" in line for line in results["parameters"].values())


def test_opened_run_equals_fitted_run(run: runs.Run, table: data.Table):
    opened = runs.open_run(run.path)
    assert opened.has_regimes and not opened.is_exact
    for one, other in zip(jax.tree.leaves(run.model), jax.tree.leaves(opened.model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert opened.record == run.record


def test_smoothed_table_has_probabilities(run: runs.Run, table: data.Table, truth: tuple):
    smoothed = runs.smooth(run, table)
    frame = data.to_frame(table, smoothed, state_names=runs.state_names(run))
    assert list(frame) == ["month", "regime_1", "regime_2", "regime"]
    chain = rd.switching.forward_backward(run.model, table.ys[0]).chain
    expected = chain.marginals().probabilities
    np.testing.assert_allclose(frame[["regime_1", "regime_2"]], expected, atol=1e-9)
    assert np.mean(frame["regime"] == truth[0] + 1) > 0.9
    dataset = data.to_xarray(table, smoothed, state_names=runs.state_names(run))
    assert dataset["probabilities"].dims == ("time", "regime")
    assert dataset["regime"].values.tolist() == ["regime_1", "regime_2"]
    assert dataset.attrs["method"] == "exact"


def test_forecast_mixes_regimes(run: runs.Run, table: data.Table):
    ahead: Any = runs.forecast(run, table, 200)
    frame = data.to_frame(table, ahead, state_names=runs.state_names(run))
    names = ["growth_mean", "growth_std", "growth_lower", "growth_upper"]
    assert list(frame) == ["month", *names, "regime_1", "regime_2", "regime"]
    plain = rd.unwrap(run.model)
    stationary = np.exp(np.asarray(plain.regimes.log_initial()))
    np.testing.assert_allclose(frame[["regime_1", "regime_2"]].iloc[-1], stationary, atol=1e-6)
    means = np.asarray(models.named_parameters(run.model)["mean"])[:, 0]
    np.testing.assert_allclose(frame["growth_mean"].iloc[-1], stationary @ means, atol=1e-6)


def test_check_judges_regimes(run: runs.Run, table: data.Table):
    checked = runs.check(run, table, num_particles=200)
    findings = {finding.name: finding for finding in checked.findings}
    assert findings["posterior"].value == "exact"
    assert findings["regimes in use"].verdict == "good"
    assert findings["starts that reach the best likelihood"].value.endswith("of 3 starts")
    assert findings["parameters at a maximum of the likelihood"].verdict == "good"
    assert {"distribution of residuals (growth)", "hidden points in their 90% intervals"} <= set(
        findings
    )


def test_states_and_regimes_of_several_series(levels: tuple, two_series: pd.DataFrame):
    run, table = levels
    assert run.record["results"]["method"] == "gpb2"
    assert run.record["results"]["objective"] == "approximate evidence"
    smoothed = runs.smooth(run, table)
    assert not smoothed.trustworthy
    frame = data.to_frame(table, smoothed, state_names=runs.state_names(run))
    assert len(frame) == 105 and {"regime_1", "regime", "level_mean", "level_upper"} <= set(frame)
    # The evidence of both series, by the smoother of the library.
    parts = [np.asarray(two_series["y"][two_series["id"] == name])[:, None] for name in "ab"]
    total = sum(float(rd.switching.log_evidence(run.model, part)) for part in parts)
    np.testing.assert_allclose(run.record["results"]["total"], total, rtol=1e-8)
    draws = runs.impute(run, table, 20)
    observed = table.mask[0, :60, 0]
    assert np.array_equal(draws[0, 0, :60, 0][observed], table.ys[0, :60, 0][observed])
    assert np.isfinite(draws[0, :, :60]).all() and draws[0, :, 22, 0].std() > 0


@pytest.mark.slow
def test_approximate_posterior_is_compared_with_importance_weights(levels: tuple):
    run, table = levels
    checked = runs.check(run, table, num_particles=200)
    findings = {finding.name: finding for finding in checked.findings}
    gap = findings["gap of the ELBO to the importance evidence"]
    assert 0 <= gap.numbers["value"] < 0.05 and gap.numbers["series"] == 2
    assert "k-hat of path weights" in findings


def test_scales_at_zero_are_compared_without_rounding_errors(levels: tuple):
    """Noise of 1e-18 of the data: densities of sampled paths would be rounding errors."""
    run, table = levels
    model = models.with_parameters(run.model, {"level_scale": 1e-18})
    key = jax.random.key(0)
    fixed = dataclasses.replace(run, model=model)
    findings = _check_regimes.check_posterior(fixed, table, key, 100)
    assert findings[0].numbers["value"] < 0.05


def test_pictures_and_reports_shade_regimes(levels: tuple, tmp_path: Path):
    run, table = levels
    shutil.copytree(run.path, tmp_path / "copy")
    copy = runs.open_run(tmp_path / "copy")
    runs.draw(copy, table, tmp_path / "level.svg", steps=3, series=1)
    drawn = (tmp_path / "level.svg").read_text()
    assert "#2a9d8f" in drawn and "#e0a100" in drawn
    finding = runs.Finding("posterior", "not checked", "", "unknown")
    checked = runs.Check((finding,), "No check failed.")
    page = runs.write_report(copy, table, steps=3, checked=checked).read_text()
    assert "regime 1, most probable" in page and "regime 2, most probable" in page
    assert "Regimes: regime_1 has" in page
    payload = json.loads(re.search(r'id="payload">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore
    shade = payload["series"][0]["panels"][0]["regimes"]
    assert len(shade["best"]) == len(shade["strength"]) == 63
    assert set(shade["best"]) <= {0, 1} and max(shade["strength"]) <= 1


def test_shades_have_the_strength_of_their_lead():
    times = np.arange(3)
    shade = Shade(times, np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]))
    assert shade.most_probable.tolist() == [0, 0, 1]
    assert shade.strength.tolist() == [0.0, 1.0, 0.5]
    assert Shade(times, np.ones((3, 1))).strength.tolist() == [1.0, 1.0, 1.0]
    assert edges_of(np.array([0.0, 1.0, 3.0])).tolist() == [-0.5, 0.5, 2.0, 4.0]
    assert edges_of(np.array([2.0])).tolist() == [1.5, 2.5]


def test_stream_refuses_regimes(run: runs.Run, tmp_path: Path):
    with pytest.raises(runs.RunError, match="a stream does not support"):
        runs.stream(run, None, tmp_path / "answers.csv")


def test_interrupted_fit_resumes(run: runs.Run, table: data.Table, tmp_path: Path, monkeypatch):
    """Stages are read back: nothing is searched again."""
    shutil.copytree(run.path, tmp_path / "copy")
    (tmp_path / "copy" / "run.json").unlink()

    def refuse(*_: Any) -> None:
        raise AssertionError("the parameters were searched again")

    monkeypatch.setattr(_training, "_search", refuse)
    again = runs.fit(table, run.spec, tmp_path / "copy")
    assert again.record["results"]["total"] == run.record["results"]["total"]


def test_commands_print_regimes(run: runs.Run, frame: pd.DataFrame, tmp_path: Path, capsys):
    frame.to_csv(tmp_path / "growth.csv", index=False)
    source = str(tmp_path / "growth.csv")
    assert command(["info", str(run.path)]) == 0
    assert "Regimes: regime_1 has" in capsys.readouterr().out
    assert command(["smooth", str(run.path), source]) == 0
    assert capsys.readouterr().out.startswith("month,regime_1,regime_2,regime\n")
    assert command(["forecast", str(run.path), source, "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0].endswith("regime_1,regime_2,regime")
    assert command(["stream", str(run.path)]) == 2
    assert "a stream does not support" in capsys.readouterr().err


def rows_of(values: Any) -> data.Table:
    return data.read({"t": range(len(values)), "y": [float(value) for value in values]})


REFUSED = {
    "gaps with lags": (
        [1.0, 2.0, np.nan, 3.0, 1.0, 2.0],
        ["order=1", "switching=intercept"],
        "needs every row: fill in the missing values",
    ),
    "more lags than rows": ([1, 2, 3, 1, 2], ["order=6", "switching=intercept"], "more rows than"),
    "more regimes than rows": ([1, 2, 3, 1], ["regimes=5"], "fewer than the 5 regimes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_series_that_do_not_fit_are_refused(name: str, tmp_path: Path):
    values, options, words = REFUSED[name]
    spec = models.load("markov_switching").with_options(options)
    with pytest.raises(runs.RunError, match=words):
        runs.fit(rows_of(values), spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [["regimes=1"], ["regimes=2", "switching=mean,variance"]])
def test_constant_series_get_an_answer(options: list[str], tmp_path: Path, monkeypatch):
    """The likelihood of a constant has no bound; the run says so, or its parameters are finite."""
    monkeypatch.setattr(_training, "NUM_STARTS", 2)
    spec = models.load("markov_switching").with_options(options)
    table = rows_of([3.0] * 12)
    run = runs.fit(table, spec, tmp_path / "run")
    smoothed: Any = runs.smooth(run, table)
    assert np.isfinite(np.asarray(smoothed.probabilities)).all()
    (finding,) = [f for f in runs.check(run, table).findings if f.name.startswith("parameters at")]
    assert finding.verdict != "good"


def test_rows_that_miss_a_column_are_refused_by_regressions(tmp_path: Path):
    ys = np.random.default_rng(0).normal(size=(20, 2))
    ys[3, 0] = np.nan
    table = data.read({"t": range(20), "a": ys[:, 0], "b": ys[:, 1]})
    with pytest.raises(runs.RunError, match="complete or missing altogether"):
        runs.fit(table, "recurrent_switching", tmp_path / "run")


@pytest.mark.slow
def test_recurrent_model_is_fitted_and_smoothed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(_training, "NUM_EM_STARTS", 1)
    monkeypatch.setattr(_training, "MAX_EM_STEPS", 5)
    angles = np.arange(80) * 0.3
    noise = np.random.default_rng(0).normal(size=(80, 2)) * 0.1
    ys = np.stack([np.cos(angles), np.sin(angles)], axis=1) + noise
    table = data.read({"t": range(80), "a": ys[:, 0], "b": ys[:, 1]})
    spec = models.load("recurrent_switching").with_options(["regimes=2"])
    run = runs.fit(table, spec, tmp_path / "run")
    frame = data.to_frame(table, runs.smooth(run, table), state_names=runs.state_names(run))
    assert {"regime_2", "state0_mean", "state1_std"} <= set(frame)
    assert np.isfinite(frame.to_numpy(float)).all()
    assert runs.open_run(run.path).record["results"]["method"] == "gpb2"
