"""Is the answer of a run to be trusted? The posterior, the model, and hidden points."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict._workspace import Progress, Quiet
from retrodict.runs._answer import impute
from retrodict.runs._record import Run
from retrodict.runs._residuals import coverage, hide, levels, residual_tests
from retrodict.runs._uncertain import METHODS

Verdict = Literal["good", "doubtful", "bad", "unknown"]

MOST_SERIES, MOST_ROWS = 8, 2000
"""How much of a table is checked: the longest series, and the last rows of each."""

DOUBTFUL, BAD = 1e-2, 1e-4
"""Levels of p-values, for each of some ten tests: false alarms in one of ten and of a thousand."""

HIDDEN_SHARE, FEWEST_HIDDEN = 0.1, 20

NUM_CHECKS = 3
"""How many stages a check has, for those who tell how far it is."""

NEAR_MAXIMUM, FAR_FROM_MAXIMUM = 0.3, 2.0
"""How many standard errors from a maximum do not matter: the likelihood there is larger by 0.045
nats; and from how many on parameters are no estimates."""

T = TypeVar("T")


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        name: what.
        value: what was found, as text.
        meaning: how to read it.
        verdict: `"good"`, `"doubtful"`, `"bad"` or `"unknown"`.
    """

    name: str
    value: str
    meaning: str
    verdict: Verdict


class Check(NamedTuple):
    """What speaks for and against a run on a table.

    Attributes:
        findings: one a thing that was looked at.
        verdict: in words.
    """

    findings: tuple[Finding, ...]
    verdict: str

    @property
    def worst(self) -> Verdict:
        """The worst verdict of all findings that have one."""
        found = {finding.verdict for finding in self.findings}
        return next(level for level in ("bad", "doubtful", "good", "unknown") if level in found)


def check(
    run: Run,
    table: data.Table,
    *,
    seed: int = 0,
    num_particles: int = 1000,
    progress: Progress | None = None,
) -> Check:
    """Looks for what is wrong with a run on a table.

    Parameters are to be at a maximum of the likelihood. The posterior is compared with importance
    weights and a particle smoother; the model by one-step-ahead residuals and by points that are
    hidden from it. Of many series the longest are looked at, of long ones the last rows.

    Args:
        run: the run.
        table: the data, read with `run.layout`.
        seed: of all that is drawn.
        num_particles: particles and paths of each series.
        progress: who is told how far it is, of `NUM_CHECKS` stages.
    """
    told = progress or Quiet()
    order = np.argsort(-table.length, kind="stable")[:MOST_SERIES]
    part = table if table.series is None else table.select([table.series[i] for i in order])
    part = part.last(min(MOST_ROWS, int(part.length.max())))
    posterior_key, level_key, hide_key = jax.random.split(jax.random.key(seed), 3)

    def stage(name: str, look: Callable[[], T]) -> T:
        told.begin(name)
        found = look()
        told.end(name, kept=False)
        return found

    findings = [
        *_fitted(run),
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
    return Check(tuple(findings), _in_words(run, findings))


def _fitted(run: Run) -> list[Finding]:
    """Whether the parameters are estimates: what their standard errors found on the way."""
    results = run.record["results"]
    name, status = "parameters at a maximum of the likelihood", results.get("status")
    if status == "not at a maximum":
        far = results["distance"]
        if far <= NEAR_MAXIMUM:
            meaning = "no other values make the data noticeably more likely"
            return [Finding(name, f"to {far:.2g} standard errors", meaning, "good")]
        return [
            Finding(
                name,
                f"not at a maximum, which is {far:.2g} standard errors away",
                "estimates and their intervals are those of a maximum: learn longer, or from"
                " another start",
                "bad" if far > FAR_FROM_MAXIMUM else "doubtful",
            )
        ]
    if status == "not identified":
        value = "not all are determined"
        meaning = "other values explain the data as well: hold some fixed, or use a simpler model"
        if METHODS["louis"] in results["uncertainty"]:
            value = "not all could be told from noise"
            meaning = "paths of a particle smoother do not tell how well the data determine them"
        return [Finding(name, value, meaning, "doubtful")]
    if status not in ("fine", "at an edge"):
        meaning = "there are no paths, or too poor ones, to tell whether this is a maximum"
        return [Finding(name, "not judged", meaning, "unknown")]
    at_edge = {
        entry: line["edge"] for entry, line in results["parameters"].items() if "edge" in line
    }
    if not at_edge:
        return [Finding(name, "they are", "no other values make the data more likely", "good")]
    value = "; ".join(
        f"{entry} at the edge of {edge}: no interval" for entry, edge in at_edge.items()
    )
    meaning = "a maximum; the data do not ask for what is at an edge, and a simpler model would do"
    return [Finding(name, value, meaning, "good")]


def _posterior(run: Run, table: data.Table, key: Any, count: int) -> list[Finding]:
    if run.is_exact:
        meaning = (
            "the model is linear and Gaussian, and its posterior is computed, not approximated"
        )
        return [Finding("posterior", "exact", meaning, "good")]
    found = []
    for i in range(table.num_series):
        one = table.one(i)
        chain = run.smoother.infer(one["ys"], mask=one["mask"], inputs=one["inputs"])
        own = jax.random.fold_in(key, i)
        try:
            found.append(rd.check_posterior(own, run.model, chain, num_samples=count, **one))
        except FloatingPointError as error:
            return [Finding("comparison with a reference", "failed", str(error), "bad")]
    rows = [int(k) for k in table.length]
    gaps = np.array([float(each.gap) / n for each, n in zip(found, rows, strict=True)])
    shapes = np.array([float(each.k_hat) for each in found])
    messages = [message for each in found for message in each.messages]
    unchecked = sum(each.verdict == "not checked" for each in found)
    worst = int(np.argmax(gaps))
    errors = np.array(
        [
            float(np.hypot(each.elbo_standard_error, each.log_evidence_standard_error)) / n
            for each, n in zip(found, rows, strict=True)
        ]
    )
    off: Verdict = "good" if gaps.max() < 0.02 else "doubtful" if gaps.max() < 0.2 else "bad"
    meaning = "an estimate of how far the posterior is off: KL(q ‖ posterior) a row"
    if off == "good" and np.any(gaps < -4 * errors - 1e-3):
        # No ELBO is above the evidence: the particles have lost what explains the data.
        off, meaning = (
            "doubtful",
            "a particle evidence below the ELBO is too low: take more of them",
        )
    shaped: Verdict = "good" if shapes.max() < 0.7 else "doubtful" if shapes.max() < 1.5 else "bad"
    return [
        Finding(
            "gap of the ELBO to the particle evidence",
            f"{gaps[worst]:.4f} ± {errors[worst]:.4f} nats a row, largest of {len(found)}",
            meaning,
            off,
        ),
        Finding(
            "k-hat of path weights",
            f"{shapes.max():.2f}, largest of {len(found)}",
            "below 0.7 weights could correct whole paths; it grows with the length of a series",
            shaped,
        ),
        Finding(
            "comparison with a reference",
            f"{unchecked} of {len(found)} series not checked"
            if unchecked
            else f"{len(messages)} objections"
            if messages
            else "no objection",
            " ".join(messages[:2])
            or "marginals agree with a grid smoother, or with tempered particles",
            "doubtful" if messages else "good",
        ),
    ]


def _certificate(run: Run, table: data.Table) -> Finding:
    name = "certified bound on the error of the smoothed sum"
    if run.is_exact:
        return Finding(name, "0", "nothing is approximated", "good")
    one = table.one(0)
    chain = run.smoother.infer(one["ys"], mask=one["mask"], inputs=one["inputs"])
    try:
        bound = rd.error_bound(run.model, chain, functional=rd.StateSum(), **one)
    except (TypeError, ValueError) as error:
        return Finding(name, "none applies", str(error).split(". ")[0], "unknown")
    value = float(jnp.max(jnp.asarray(bound.value)))
    rests = ", ".join(bound.rests_on)
    kind = "a bound" if bound.rigorous else "an estimate, not a bound"
    return Finding(name, f"{value:.3g}", f"{kind}; rests on {rests}", "unknown")


def _residuals(run: Run, table: data.Table, key: Any, count: int) -> list[Finding]:
    found = []
    for i in range(table.num_series):
        one = table.one(i)
        own = jax.random.fold_in(key, i)
        found.append(levels(own, run.model, num_particles=count, **one))
    findings = []
    for place, column in enumerate(table.names):
        for test in residual_tests([each[:, place] for each in found]):
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
            value = "too few rows, or too poor particles" if np.isnan(p) else f"p = {p:.3g}"
            name = f"{test.name} ({column})"
            findings.append(Finding(name, value, test.meaning, verdict))
    return findings


def _hidden(run: Run, table: data.Table, key: Any, seed: int) -> Finding:
    hide_key, tie_key = jax.random.split(key)
    away = hide(hide_key, table.mask, HIDDEN_SHARE, FEWEST_HIDDEN)
    name = "hidden points in their 90% intervals"
    if away.sum() < FEWEST_HIDDEN:
        value = f"too few points: {FEWEST_HIDDEN} are needed"
        return Finding(name, value, "points that were seen are hidden and drawn again", "unknown")
    times = len(away)
    table, away = _again(table, times), np.concatenate(away)
    draws = impute(run, table, 400, hidden=away, seed=seed)
    truth = table.ys[:, None]
    below, equal = (draws < truth).mean(axis=1)[away], (draws == truth).mean(axis=1)[away]
    ties = np.asarray(jax.random.uniform(tie_key, below.shape))
    found = coverage(below + ties * equal)
    share = found.inside / found.hidden
    error = np.sqrt(0.09 / found.hidden)
    p = found.p_value
    return Finding(
        name,
        f"{100 * share:.1f}% of {found.hidden} (90 ± {100 * error:.1f} expected)",
        "a tenth of what was seen is hidden from the smoother, and drawn by it"
        + (f"; {times} times, another tenth each" if times > 1 else ""),
        "bad" if p < BAD else "doubtful" if p < DOUBTFUL else "good",
    )


def _again(table: data.Table, times: int) -> data.Table:
    """The same series several times over, as one batch: one program for all of them."""
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
            f"Do not trust this run as it is; these failed: {'; '.join(bad)}. If residuals speak"
            " against it, it needs another model; if the parameters or the posterior do, longer"
            " training, another start or another family."
        )
    if doubtful:
        return "With reserve; in doubt: " + "; ".join(doubtful) + "."
    return "Nothing that was looked at speaks against this run."
