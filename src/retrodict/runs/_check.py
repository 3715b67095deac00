"""Checks of a run on a table: parameters, posterior, residuals and hidden points."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict._workspace import Progress, Quiet
from retrodict.runs._answer import impute
from retrodict.runs._record import Run
from retrodict.runs._residuals import coverage, hide, levels, residual_tests
from retrodict.runs._standard_errors import METHODS

Verdict = Literal["good", "doubtful", "bad", "unknown"]

MOST_SERIES, MOST_ROWS = 8, 2000
"""The part of a table that is checked: the longest series, and the last rows of each."""

DOUBTFUL, BAD = 1e-2, 1e-4
"""Levels of p-values. With about ten tests, false alarms occur in 1 of 10 and 1 of 1,000 runs."""

HIDDEN_SHARE, FEWEST_HIDDEN = 0.1, 20

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

MOST_ROWS_OF_SEARCH = 100_000
"""Longer tables are not searched again for a higher maximum."""

T = TypeVar("T")


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        name: the name of the check.
        value: its result, as text.
        meaning: the interpretation.
        verdict: `"good"`, `"doubtful"`, `"bad"` or `"unknown"`.
        numbers: the result as numbers by name; the verdict depends on `"value"`.
    """

    name: str
    value: str
    meaning: str
    verdict: Verdict
    numbers: Mapping[str, float] = MappingProxyType({})


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
    def words(self) -> str:
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
        verdict: the verdict in words.
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
        findings = []
        for each in self.findings:
            numbers = {name: _finite(number) for name, number in each.numbers.items()}
            line = {"name": each.name, "verdict": each.verdict, "value": numbers.pop("value", None)}
            line |= {"details": numbers, "text": each.value, "meaning": each.meaning}
            findings.append(line)
        scope = {} if self.scope is None else self.scope._asdict()
        return {"verdict": self.worst, "words": self.verdict, **scope, "findings": findings}


def check(
    run: Run,
    table: data.Table | data.SharedTable,
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

    Args:
        run: the run.
        table: the data, read with `run.layout`; where several processes share them, the first
            series are checked.
        seed: the random seed.
        num_particles: the number of particles and paths per series.
        progress: progress callback, for `NUM_CHECKS` stages.
    """
    progress, whole = progress or Quiet(), table.summary
    if isinstance(table, data.SharedTable):
        table = table.leading_series()
    order = np.argsort(-table.length, kind="stable")[:MOST_SERIES]
    part = table if table.series is None else table.select([table.series[i] for i in order])
    part = part.last(min(MOST_ROWS, int(part.length.max())))
    posterior_key, level_key, hide_key = jax.random.split(jax.random.key(seed), 3)

    def stage(name: str, compute: Callable[[], T]) -> T:
        progress.begin(name)
        result = compute()
        progress.end(name, kept=False)
        return result

    findings = [
        *stage("the parameters", lambda: _fitted(run, _higher(run, table))),
        *stage(
            "the posterior",
            lambda: [
                *_posterior(run, part, posterior_key, num_particles),
                _certificate(run, part),
            ],
        ),
        *stage("the residuals", lambda: _residuals(run, part, level_key, num_particles)),
        stage("the hidden points", lambda: _hidden(run, part, hide_key, seed)),
    ]
    scope = Scope(part.num_series, whole.num_series, int(part.length.sum()), whole.num_rows)
    return Check(tuple(findings), _in_words(run, findings), scope)


def _finite(number: Any) -> float | int | bool | None:
    """Return a number that JSON can store."""
    if isinstance(number, int):
        return number
    return float(number) if np.isfinite(number) else None


def _higher(run: Run, table: data.Table) -> float | None:
    """Return by how many nats another maximum is higher; `None` if there was no search.

    Local curvature is not enough: where a scale is near zero the likelihood is flat, and it may be
    much larger elsewhere.
    """
    results = run.record["results"]
    same = run.record["data"]["sha256"] == table.summary.fingerprint
    if not run.is_exact or not same or results.get("total") is None:
        return None
    if table.summary.num_rows > MOST_ROWS_OF_SEARCH or not models.named_parameters(run.model):
        return None
    options = table.batch()
    result = rd.fit_evidence(
        jax.random.key(0),
        run.model,
        options.pop("ys"),
        optimiser="lbfgs",
        num_steps=STEPS_OF_SEARCH,
        progress=False,
        **options,
    )
    return result.log_evidence - results["total"]


def _fitted(run: Run, higher: float | None = None) -> list[Finding]:
    """Judge whether the parameters are at a maximum of the likelihood.

    Args:
        run: the run.
        higher: by how many nats another maximum is higher; `None` if there was no search.
    """
    results = run.record["results"]
    name, status = "parameters at a maximum of the likelihood", results.get("status")
    if higher is not None and higher > LARGER:
        return [
            Finding(
                name,
                f"another start reaches a log-likelihood that is higher by {higher:.3g}",
                "the parameters are not the maximum-likelihood estimates: fit again, or from"
                " another start",
                "bad" if higher > MUCH_LARGER else "doubtful",
            )
        ]
    if status == "not at a maximum":
        far = results["distance"]
        if far <= NEAR_MAXIMUM:
            meaning = "no nearby values have a noticeably higher likelihood"
            text = f"to {far:.2g} standard errors"
            return [Finding(name, text, meaning, "good", {"value": far})]
        return [
            Finding(
                name,
                f"the maximum is {far:.2g} standard errors away",
                "estimates and intervals are only valid at a maximum: train longer, or from"
                " another start",
                "bad" if far > FAR_FROM_MAXIMUM else "doubtful",
                {"value": far},
            )
        ]
    if status == "not identified":
        value = "not all are determined"
        meaning = "other values fit the data equally well: fix some, or use a simpler model"
        if METHODS["louis"] in results["uncertainty"]:
            value = "Monte Carlo noise is too large for some"
            meaning = "the sampled paths are too noisy to measure how well the data determine them"
        return [Finding(name, value, meaning, "doubtful")]
    if status not in ("fine", "at an edge"):
        meaning = "the paths of the particle smoother are missing or too poor for this check"
        return [Finding(name, "not checked", meaning, "unknown")]
    at_edge = {
        entry: line["edge"] for entry, line in results["parameters"].items() if "edge" in line
    }
    numbers = {"value": results.get("distance", np.nan), "at_an_edge": len(at_edge)}
    if not at_edge:
        meaning = "no nearby values have a higher likelihood"
        return [Finding(name, "yes", meaning, "good", numbers)]
    value = "; ".join(
        f"{entry} at the edge of {edge}: no interval" for entry, edge in at_edge.items()
    )
    meaning = "at a maximum; a simpler model, with these fixed at their edge, fits equally well"
    return [Finding(name, value, meaning, "good", numbers)]


def _posterior(run: Run, table: data.Table, key: Any, count: int) -> list[Finding]:
    if run.is_exact:
        meaning = (
            "the model is linear and Gaussian: its posterior is computed without approximation"
        )
        return [Finding("posterior", "exact", meaning, "good")]
    checks = []
    for i in range(table.num_series):
        one = table.one(i)
        chain = run.smoother.infer(one["ys"], mask=one["mask"], inputs=one["inputs"])
        series_key = jax.random.fold_in(key, i)
        try:
            checks.append(
                rd.check_posterior(series_key, run.model, chain, num_samples=count, **one)
            )
        except FloatingPointError as error:
            return [Finding("comparison with a reference", "failed", str(error), "bad")]
    rows = [max(1, int(mask.any(axis=1).sum())) for mask in table.mask]
    gaps = np.array([float(each.gap) / n for each, n in zip(checks, rows, strict=True)])
    shapes = np.array([float(each.k_hat) for each in checks])
    messages = [message for each in checks for message in each.messages]
    unchecked = sum(each.verdict == "not checked" for each in checks)
    worst = int(np.argmax(gaps))
    errors = np.array(
        [
            float(np.hypot(each.elbo_standard_error, each.log_evidence_standard_error)) / n
            for each, n in zip(checks, rows, strict=True)
        ]
    )
    gap_verdict: Verdict = (
        "good" if gaps.max() < 0.02 else "doubtful" if gaps.max() < 0.2 else "bad"
    )
    meaning = "an estimate of KL(q ‖ posterior) per observed row"
    if gap_verdict == "good" and np.any(gaps < -4 * errors - 1e-3):
        # The ELBO is at most the evidence: the particle filter has degenerated.
        gap_verdict, meaning = (
            "doubtful",
            "the particle estimate of the evidence is below the ELBO: use more particles",
        )
    shape_verdict: Verdict = (
        "good" if shapes.max() < 0.7 else "doubtful" if shapes.max() < 1.5 else "bad"
    )
    return [
        Finding(
            "gap of the ELBO to the particle evidence",
            f"{gaps[worst]:.4f} ± {errors[worst]:.4f} nats per observed row, largest of"
            f" {len(checks)}",
            meaning,
            gap_verdict,
            {"value": gaps[worst], "standard_error": errors[worst], "series": len(checks)},
        ),
        Finding(
            "k-hat of path weights",
            f"{shapes.max():.2f}, largest of {len(checks)}",
            "below 0.7 importance weights can correct whole paths; it grows with the series length",
            shape_verdict,
            {"value": shapes.max(), "series": len(checks)},
        ),
        Finding(
            "comparison with a reference",
            f"{unchecked} of {len(checks)} series not checked"
            if unchecked
            else f"{len(messages)} {'warning' if len(messages) == 1 else 'warnings'}"
            if messages
            else "no warnings",
            " ".join(messages[:2])
            or "marginals agree with a grid smoother, or with tempered particles",
            "doubtful" if messages else "good",
            {"value": len(messages), "series": len(checks)},
        ),
    ]


def _certificate(run: Run, table: data.Table) -> Finding:
    name = "bound on the error of the smoothed sum"
    if run.is_exact:
        return Finding(name, "0", "nothing is approximated", "good", {"value": 0.0})
    one = table.one(0)
    chain = run.smoother.infer(one["ys"], mask=one["mask"], inputs=one["inputs"])
    try:
        bound = rd.error_bound(run.model, chain, functional=rd.StateSum(), **one)
    except (TypeError, ValueError) as error:
        return Finding(name, "none applies", str(error).split(". ")[0], "unknown")
    value = float(jnp.max(jnp.asarray(bound.value)))
    kind = "a certificate" if bound.rigorous else "not a certificate"
    numbers = {"value": value, "rigorous": bool(bound.rigorous)}
    longest = "" if table.num_series == 1 else ", of the longest series"
    meaning = f"{kind}{longest}; rests on: {bound.rests_on}"
    return Finding(name, f"{value:.3g}", meaning, "unknown", numbers)


def _residuals(run: Run, table: data.Table, key: Any, count: int) -> list[Finding]:
    series = []
    for i in range(table.num_series):
        one = table.one(i)
        series_key = jax.random.fold_in(key, i)
        series.append(levels(series_key, run.model, num_particles=count, **one))
    findings = []
    for place, column in enumerate(table.names):
        for test in residual_tests([each[:, place] for each in series]):
            p = test.p_value
            verdict: Verdict = (
                "unknown"
                if np.isnan(p)
                else "bad"
                if p < BAD
                else "doubtful"
                if p < DOUBTFUL
                else "good"
            )
            value = (
                "too few rows, or a degenerate particle filter" if np.isnan(p) else f"p = {p:.3g}"
            )
            name = f"{test.name} ({column})"
            findings.append(Finding(name, value, test.meaning, verdict, {"value": p}))
    return findings


def _hidden(run: Run, table: data.Table, key: Any, seed: int) -> Finding:
    hide_key, tie_key = jax.random.split(key)
    hidden = hide(hide_key, table.mask, HIDDEN_SHARE, FEWEST_HIDDEN)
    name = "hidden points in their 90% intervals"
    if hidden.sum() < FEWEST_HIDDEN:
        value = f"too few points: {FEWEST_HIDDEN} are needed"
        return Finding(name, value, "observed points are hidden and imputed", "unknown")
    times = len(hidden)
    table, hidden = _repeated(table, times), np.concatenate(hidden)
    draws = impute(run, table, 400, hidden=hidden, seed=seed)
    truth = table.ys[:, None]
    below, equal = (draws < truth).mean(axis=1)[hidden], (draws == truth).mean(axis=1)[hidden]
    ties = np.asarray(jax.random.uniform(tie_key, below.shape))
    covered = coverage(below + ties * equal)
    share = covered.inside / covered.hidden
    error = np.sqrt(0.09 / covered.hidden)
    p = covered.p_value
    return Finding(
        name,
        f"{100 * share:.1f}% of {covered.hidden} (90 ± {100 * error:.1f} expected)",
        "a tenth of the observed points is hidden from the smoother and imputed"
        + (f"; repeated {times} times with different points" if times > 1 else ""),
        "bad" if p < BAD else "doubtful" if p < DOUBTFUL else "good",
        {
            "value": share,
            "expected": 0.9,
            "standard_error": error,
            "p_value": p,
            "hidden": covered.hidden,
        },
    )


def _repeated(table: data.Table, times: int) -> data.Table:
    """Return the series repeated several times, as one batch for one compiled program."""
    return dataclasses.replace(
        table,
        ys=np.concatenate([table.ys] * times),
        mask=np.concatenate([table.mask] * times),
        inputs=None if table.inputs is None else np.concatenate([table.inputs] * times),
        length=np.concatenate([table.length] * times),
        times=table.times * times,
    )


def _in_words(run: Run, findings: list[Finding]) -> str:
    bad = [finding.name for finding in findings if finding.verdict == "bad"]
    doubtful = [finding.name for finding in findings if finding.verdict == "doubtful"]
    if bad:
        return (
            f"Do not trust this run; failed checks: {'; '.join(bad)}. If the residuals fail, use"
            " another model; if the parameters or the posterior fail, train longer, or use another"
            " start or another family."
        )
    if doubtful:
        return "Use with caution; doubtful checks: " + "; ".join(doubtful) + "."
    return "No check failed."
