"""Checks of a run on a table: parameters, posterior, residuals and hidden points."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict._files import as_json
from retrodict._workspace import Progress, Quiet
from retrodict.runs import _check_regimes as regimes
from retrodict.runs._apply import impute
from retrodict.runs._report_content import Finding, Verdict
from retrodict.runs._residuals import (
    coverage,
    has_independent_noise,
    hide,
    pit,
    randomised_rank,
    residual_tests,
    smoothed_levels,
)
from retrodict.runs._run import AnyTable, Run
from retrodict.runs._standard_errors import METHODS

MAX_SERIES, MAX_ROWS = 8, 2000
"""The part of a table that is checked: the longest series, and the last rows of each."""

DOUBTFUL, BAD = 1e-2, 1e-4
"""Levels of p-values. With about ten tests, false alarms occur in 1 of 10 and 1 of 1,000 runs."""

HIDDEN_SHARE, MIN_HIDDEN = 0.1, 20

NUM_CHECKS = 4
"""The number of stages of a check, for progress bars."""

NEAR_MAXIMUM, FAR_FROM_MAXIMUM = 0.3, 2.0
"""Distances from a maximum in standard errors: up to the first the likelihood differs by at most
0.045 nats; beyond the second the parameters are not estimates."""

LARGER, MUCH_LARGER = 0.1, 2.0
"""Differences to a higher maximum in nats: up to the first the verdict is good; beyond the second
the parameters are not estimates."""

STEPS_OF_SEARCH = 60
"""Steps of the search for a higher maximum, which need not converge."""

MAX_ROWS_OF_SEARCH = 100_000
"""Longer tables are not searched again for a higher maximum."""


class Scope(NamedTuple):
    """The part of a table that was checked.

    Attributes:
        series_checked: the number of series that were checked, the longest.
        series: the number of series.
        rows_checked: the number of rows that were checked, the last of each series.
        rows: the number of rows.
    """

    series_checked: int
    series: int
    rows_checked: int
    rows: int

    @property
    def is_partial(self) -> bool:
        """Whether rows were left out."""
        return self.rows_checked < self.rows

    @property
    def summary(self) -> str:
        """The scope as a sentence."""
        if not self.is_partial:
            return f"Checked all {self.rows} rows."
        series = ""
        if self.series > 1:
            longest = ", the longest" if self.series_checked < self.series else ""
            series = f"{self.series_checked} of {self.series} series{longest}, and "
        which = "" if self.series_checked < self.series else ", the last of each series"
        return f"Checked {series}{self.rows_checked} of {self.rows} rows{which}."


class Check(NamedTuple):
    """The results of the checks of a run on a table.

    Attributes:
        findings: one per check.
        verdict: a sentence with the failed or doubtful checks.
        scope: the part of the table that was checked.
    """

    findings: tuple[Finding, ...]
    verdict: str
    scope: Scope | None = None

    @property
    def worst(self) -> Verdict:
        """The worst verdict of all findings."""
        verdicts = {finding.verdict for finding in self.findings}
        return next(level for level in ("bad", "doubtful", "good", "unknown") if level in verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can store; non-finite numbers become `None`.

        Each finding has a `value`, the number that the verdict depends on, or `None`. Further
        numbers are in `details`, and sentences in `text` and `meaning`.
        """
        findings = [
            {
                "name": name,
                "verdict": verdict,
                "value": numbers.get("value"),
                "details": {key: numbers[key] for key in numbers if key != "value"},
                "text": value,
                "meaning": meaning,
            }
            for name, value, meaning, verdict, numbers in self.findings
        ]
        scope = {} if self.scope is None else self.scope._asdict()
        tree = {"verdict": self.worst, "summary": self.verdict, **scope, "findings": findings}
        return json.loads(as_json(tree))


def check(
    run: Run,
    table: AnyTable,
    *,
    seed: int = 0,
    num_particles: int = 1000,
    progress: Progress | None = None,
) -> Check:
    """Check a run on a table.

    Parameters should be at a maximum of the likelihood; if it is exact and the table is that of the
    fit, other starts should not reach a higher maximum. The posterior is compared with importance
    weights and a particle smoother, and the model with one-step-ahead residuals and hidden points.
    Only the longest of many series, and only the last rows of long ones, are checked.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        ...     checked = rd.runs.check(run, table)
        >>> checked.verdict
        'No check failed.'
        >>> [finding.name for finding in checked.findings][:2]
        ['parameters at a maximum of the likelihood', 'posterior']

    Args:
        run: the run.
        table: the data, read with `run.layout`; where several processes share them, the first
            series are checked.
        seed: the random seed.
        num_particles: the number of particles and paths per series.
        progress: progress callback, for `NUM_CHECKS` stages.
    """
    progress, summary = progress or Quiet(), table.summary
    if isinstance(table, data.SharedTable):
        table = table.leading_series()
    order = np.argsort(-table.length, kind="stable")[:MAX_SERIES]
    part = table if table.series is None else table.select([table.series[i] for i in order])
    part = part.last(min(MAX_ROWS, int(part.length.max())))
    # A linear-Gaussian model is checked without draws of JAX, whose programs take long to compile.
    keys = (None, None) if run.is_exact else jax.random.split(jax.random.key(seed))

    stages: dict[str, Callable[[], list[Finding]]] = {
        "the parameters": lambda: _check_fit(run, table),
        "the posterior": lambda: _check_posterior(run, part, keys[0], num_particles),
        "the residuals": lambda: _check_residuals(run, part, keys[1], num_particles),
        "the hidden points": lambda: [_check_coverage(run, part, seed)],
    }
    findings: list[Finding] = []
    for name, compute in stages.items():
        progress.begin(name)
        findings += compute()
        progress.end(name, cached=False)
    scope = Scope(part.num_series, summary.num_series, int(part.length.sum()), summary.num_rows)
    return Check(tuple(findings), _summary(findings), scope)


def _grade(value: float, doubtful: float, bad: float) -> Verdict:
    """Return the verdict of a value that should be small; NaN is bad."""
    return "good" if value < doubtful else "doubtful" if value < bad else "bad"


def _grade_p_value(p_value: float) -> Verdict:
    return _grade(-p_value, -DOUBTFUL, -BAD)


def _check_fit(run: Run, table: data.Table) -> list[Finding]:
    """Judge the parameters and, if there are regimes, their use."""
    findings = [_check_parameters(run, _search_higher_maximum(run, table))]
    return findings + (regimes.check_regimes(run.record["results"]) if run.has_regimes else [])


def _search_higher_maximum(run: Run, table: data.Table) -> float | None:
    """Return by how many nats another maximum is higher; `None` if there was no search.

    Local curvature is not enough: where a scale is near zero the likelihood is flat, and it may be
    much larger elsewhere.
    """
    total = run.record["results"].get("total")
    if not run.is_exact or run.record["data"]["sha256"] != table.summary.fingerprint:
        return None
    too_long = table.summary.num_rows > MAX_ROWS_OF_SEARCH
    if total is None or too_long or not models.named_parameters(run.model):
        return None
    result = rd.fit_evidence(
        jax.random.key(0),
        run.model,
        **table.batch(),
        optimiser="lbfgs",
        num_steps=STEPS_OF_SEARCH,
        progress=False,
    )
    return result.log_evidence - total


def _check_parameters(run: Run, higher: float | None = None) -> Finding:
    """Judge whether the parameters are at a maximum of the likelihood.

    Args:
        run: the run.
        higher: by how many nats another maximum is higher; `None` if there was no search.
    """
    results = run.record["results"]
    name, status = "parameters at a maximum of the likelihood", results.get("status")
    if higher is not None and higher > LARGER:
        return Finding(
            name,
            f"another start reaches a log-likelihood that is higher by {higher:.3g}",
            "the parameters are not the maximum-likelihood estimates: fit again, or from another"
            " start",
            "bad" if higher > MUCH_LARGER else "doubtful",
        )
    if status == "not at a maximum":
        distance = results.get("distance")
        distance = math.inf if distance is None else distance  # JSON has no infinity
        near = distance <= NEAR_MAXIMUM
        return Finding(
            name,
            f"within {distance:.2g} standard errors of it"
            if near
            else f"the maximum is {distance:.2g} standard errors away",
            "no nearby values have a noticeably higher likelihood"
            if near
            else "estimates and intervals are only valid at a maximum: train longer, or from"
            " another start",
            "good" if near else "bad" if distance > FAR_FROM_MAXIMUM else "doubtful",
            {"value": distance},
        )
    if status == "not identified":
        value = "not all are determined"
        meaning = "other values fit the data equally well: fix some, or use a simpler model"
        if METHODS["louis"] in results["uncertainty"]:
            value = "Monte Carlo noise is too large for some"
            meaning = "the sampled paths are too noisy to measure how well the data determine them"
        return Finding(name, value, meaning, "doubtful")
    if status not in ("fine", "at an edge"):
        meaning = "the paths of the particle smoother are missing or too poor for this check"
        return Finding(name, "not checked", meaning, "unknown")
    at_edge = [
        f"{entry} at the edge of {line['edge']}: no interval"
        for entry, line in results["parameters"].items()
        if "edge" in line
    ]
    meaning = "no nearby values have a higher likelihood"
    if at_edge:
        meaning = "at a maximum; a simpler model, with these fixed at their edge, fits equally well"
    numbers = {"value": results.get("distance", np.nan), "at_an_edge": len(at_edge)}
    return Finding(name, "; ".join(at_edge) or "yes", meaning, "good", numbers)


def _check_posterior(run: Run, table: data.Table, key: Any, count: int) -> list[Finding]:
    """Compare the chain of each series with a reference, and bound the error of the longest."""
    if run.has_regimes:
        return regimes.check_posterior(run, table, key, count)
    bound_name = "bound on the error of the smoothed sum"
    if run.is_exact:
        meaning = (
            "the model is linear and Gaussian: its posterior is computed without approximation"
        )
        return [
            Finding("posterior", "exact", meaning, "good"),
            Finding(bound_name, "0", "nothing is approximated", "good", {"value": 0.0}),
        ]
    series = [table.one(i) for i in range(table.num_series)]
    chains = [
        run.smoother.infer(one["ys"], mask=one["mask"], inputs=one["inputs"]) for one in series
    ]
    bound = _bound(run, chains[0], series[0], bound_name, alone=len(series) == 1)
    try:
        checks = [
            rd.check_posterior(
                jax.random.fold_in(key, i), run.model, chain, num_samples=count, **one
            )
            for i, (chain, one) in enumerate(zip(chains, series, strict=True))
        ]
    except FloatingPointError as error:
        return [Finding("comparison with a reference", "failed", str(error), "bad"), bound]
    rows = np.array([max(1, int(one["mask"].any(axis=1).sum())) for one in series])
    gaps = np.array([float(each.gap) for each in checks]) / rows
    squares = [each.elbo_standard_error**2 + each.log_evidence_standard_error**2 for each in checks]
    errors = np.sqrt(np.array(squares, float)) / rows
    worst, shape = int(np.argmax(gaps)), float(np.max([each.k_hat for each in checks]))
    meaning, verdict = (
        f"{checks[0].meaning_of_gap} per observed row",
        _grade(gaps[worst], 0.02, 0.2),
    )
    messages = [message for each in checks for message in each.messages]
    kinds = [kind for each in checks for kind in each.kinds]
    methods = " or ".join(sorted({each.reference for each in checks}))
    if verdict == "good" and "evidence below" in kinds:
        meaning, verdict = messages[kinds.index("evidence below")], "doubtful"
    unchecked = sum(each.verdict == "not checked" for each in checks)
    warnings = f"{len(messages) or 'no'} {'warning' if len(messages) == 1 else 'warnings'}"
    return [
        Finding(
            "gap of the ELBO to the particle evidence",
            f"{gaps[worst]:.4f} ± {errors[worst]:.4f} nats per observed row, largest of"
            f" {len(checks)}",
            meaning,
            verdict,
            {"value": gaps[worst], "standard_error": errors[worst], "series": len(checks)},
        ),
        Finding(
            "k-hat of path weights",
            f"{shape:.2f}, largest of {len(checks)}",
            checks[0].meaning_of_k_hat,
            _grade(shape, 0.7, 1.5),
            {"value": shape, "series": len(checks)},
        ),
        Finding(
            "comparison with a reference",
            f"{unchecked} of {len(checks)} series not checked" if unchecked else warnings,
            "; ".join(messages[:2]) or f"marginals agree with a reference ({methods})",
            "doubtful" if messages else "good",
            {"value": len(messages), "series": len(checks)},
        ),
        bound,
    ]


def _bound(run: Run, chain: Any, one: dict[str, Any], name: str, *, alone: bool) -> Finding:
    """Bound the error of the smoothed sum of one series."""
    try:
        bound = rd.error_bound(run.model, chain, functional=rd.StateSum(), **one)
    except (TypeError, ValueError) as error:
        return Finding(name, "none applies", str(error).split(". ")[0], "unknown")
    value = float(np.max(bound.value))
    kind = "a certificate" if bound.rigorous else "not a certificate"
    longest = "" if alone else ", of the longest series"
    meaning = f"{kind}{longest}; rests on: {bound.rests_on}"
    numbers = {"value": value, "rigorous": bool(bound.rigorous)}
    return Finding(name, f"{value:.3g}", meaning, "unknown", numbers)


def _check_residuals(run: Run, table: data.Table, key: Any, count: int) -> list[Finding]:
    """Test the one-step-ahead residuals of each column."""
    keys = [None] * table.num_series if key is None else jax.random.split(key, table.num_series)
    series = [_levels(run, each, table.one(i), count) for i, each in enumerate(keys)]
    findings = []
    for index, column in enumerate(table.names):
        for test in residual_tests([each[:, index] for each in series]):
            value, verdict = f"p = {test.p_value:.3g}", _grade_p_value(test.p_value)
            if np.isnan(test.p_value):
                value, verdict = "too few rows, or a degenerate particle filter", "unknown"
            numbers = {"value": test.p_value}
            name = f"{test.name} ({column})"
            findings.append(Finding(name, value, test.meaning, verdict, numbers))
    return findings


def _levels(run: Run, key: Any, one: dict[str, Any], count: int) -> np.ndarray:
    """Return the level of each observation of one series given the rows before it."""
    if run.has_regimes:
        return regimes.levels_of(run, key, one, count)
    return pit(key, run.model, num_particles=count, **one)


def _check_coverage(run: Run, table: data.Table, seed: int) -> Finding:
    """Hide observed points from the smoother and count those in their intervals."""
    random = np.random.default_rng(seed)
    hidden = hide(random, table.mask, HIDDEN_SHARE, MIN_HIDDEN)
    name = "hidden points in their 90% intervals"
    if run.has_regimes and run.model.num_lags:
        meaning = "a model of lagged observations cannot smooth with hidden points"
        return Finding(name, "not checked", meaning, "unknown")
    if hidden.sum() < MIN_HIDDEN:
        value = f"too few points: {MIN_HIDDEN} are needed"
        return Finding(name, value, "observed points are hidden and imputed", "unknown")
    times = len(hidden)
    table, hidden = _repeated(table, times), np.concatenate(hidden)
    covered = coverage(_levels_of_hidden(run, table, hidden, random, seed)[hidden])
    share, error = covered.inside / covered.hidden, np.sqrt(0.09 / covered.hidden)
    numbers = {"value": share, "expected": 0.9, "standard_error": error}
    return Finding(
        name,
        f"{100 * share:.1f}% of {covered.hidden} (90 ± {100 * error:.1f} expected)",
        "a tenth of the observed points is hidden from the smoother and imputed"
        + (f"; repeated {times} times with different points" if times > 1 else ""),
        _grade_p_value(covered.p_value),
        {**numbers, "p_value": covered.p_value, "hidden": covered.hidden},
    )


def _levels_of_hidden(
    run: Run, table: data.Table, hidden: np.ndarray, random: np.random.Generator, seed: int
) -> np.ndarray:
    """Return the level of each hidden entry given the others, in closed form or by draws."""
    model = rd.unwrap(run.model)
    if run.is_exact and has_independent_noise(model):
        seen = dataclasses.replace(table, mask=table.mask & ~hidden)
        return smoothed_levels(model, **seen.batch())
    draws = impute(run, table, 400, hidden=hidden, seed=seed)
    uniform = random.random(table.ys.shape)
    return randomised_rank(uniform, np.moveaxis(draws, 1, 2), table.ys)


def _repeated(table: data.Table, times: int) -> data.Table:
    """Return the series repeated several times, as one batch for one compiled program."""
    repeated = {
        name: None if array is None else np.concatenate([array] * times)
        for name, array in table.batch().items()
    }
    return dataclasses.replace(table, **repeated, times=table.times * times)


def _summary(findings: list[Finding]) -> str:
    bad = "; ".join(finding.name for finding in findings if finding.verdict == "bad")
    doubtful = "; ".join(finding.name for finding in findings if finding.verdict == "doubtful")
    if bad:
        return (
            f"Do not trust this run; failed checks: {bad}. If the residuals fail, use another"
            " model; if the parameters or the posterior fail, train longer, or use another start or"
            " another family."
        )
    return f"Use with caution; doubtful checks: {doubtful}." if doubtful else "No check failed."
