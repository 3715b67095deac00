"""Checks that only models with regimes need: their posterior, their levels, and their use."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict.runs._report_content import Finding, Verdict
from retrodict.runs._residuals import randomised_rank
from retrodict.runs._run import Run
from retrodict.runs._switching import drawn_ahead, posterior_of, smooth

MIN_ROWS = 5.0
"""A regime with fewer expected rows is hardly determined by the data."""

MIN_STARTS = 2
"""With fewer starts at the best maximum, a higher one may exist."""

LEAST = 1e-5
"""Smaller scales, relative to the spread of the data, are raised to this before a comparison."""

SMALL_GAP, LARGE_GAP = 0.02, 0.2
"""Gaps of an ELBO in nats per row, as for other models."""


def summarise_regimes(
    model: rd.switching.SwitchingModel, table: data.Table, seed: int
) -> dict[str, dict[str, float]]:
    """Return the share of rows, the expected rows and the expected duration of each regime.

    The expected duration is 1 / (1 − p_jj). If the transition depends on states or inputs, it is
    the number of smoothed rows over that of smoothed exits.

    Args:
        model: the model.
        table: the data.
        seed: the random seed of sampled moments.
    """
    smoothed, plain = smooth(model, table, 256, seed), rd.unwrap(model)
    exists = np.arange(table.ys.shape[1]) < table.length[:, None]
    probabilities = np.asarray(smoothed.probabilities) * exists[..., None]
    rows = probabilities.sum(axis=(0, 1))
    regimes = plain.regimes
    if isinstance(regimes, rd.switching.RegimeHistories):
        share = np.exp(np.diagonal(np.asarray(regimes.base_transition())))
    elif plain.regimes.takes_state or plain.regimes.takes_input:
        pairs = np.asarray(smoothed.pairs) * exists[:, 1:, None, None]
        stays = pairs.sum(axis=(0, 1))
        share = np.diagonal(stays) / np.maximum(stays.sum(axis=1), 1e-300)
    else:
        share = np.exp(np.diagonal(np.asarray(plain.regimes.log_transition())))
    with np.errstate(divide="ignore"):
        durations = 1.0 / (1.0 - share)
    return {
        name: {
            "share": float(rows[j] / rows.sum()),
            "rows": float(rows[j]),
            "expected_duration": float(durations[j]),
        }
        for j, name in enumerate(models.regime_names(model))
    }


def check_regimes(results: Mapping[str, Any]) -> list[Finding]:
    """Judge whether each regime has rows, and how many starts reached the best maximum."""
    rows = {name: line["rows"] for name, line in results["regimes"].items()}
    issues = list(results.get("issues", ()))
    few = [f"{name} has {count:.1f} rows" for name, count in rows.items() if count < MIN_ROWS]
    few = issues or few
    value = "; ".join(few) or f"at least {min(rows.values()):.1f} rows"
    meaning = "the data hardly determine these regimes: use fewer of them, or share their scales"
    findings = [
        Finding(
            "regimes in use",
            value,
            meaning if few else "every regime explains some rows",
            "doubtful" if few else "good",
            {"value": min(rows.values())},
        )
    ]
    starts, best = results.get("starts"), results.get("starts_at_best")
    if starts is None or best is None:
        return findings
    verdict, meaning = "good", "several starts agree: a higher maximum is unlikely"
    if best < min(MIN_STARTS, starts):
        verdict, meaning = "doubtful", "other starts end lower: a higher maximum may exist"
    text = f"{best} of {starts} starts"
    name = "starts that reach the best likelihood"
    return [*findings, Finding(name, text, meaning, verdict, {"value": best})]


def check_posterior(run: Run, table: data.Table, key: Any, count: int) -> list[Finding]:
    """Compare the approximate posterior of each series with its importance weights."""
    model = rd.unwrap(run.model)
    if model.is_finite:
        meaning = "the forward–backward algorithm computes it without approximation"
        return [Finding("posterior", "exact", meaning, "good")]
    model = rd.unwrap(_with_visible_scales(run.model, table))
    series = [table.one(i) for i in range(table.num_series)]
    try:
        checks = [
            rd.switching.importance_smoother(
                jax.random.fold_in(key, i),
                model,
                rd.switching.gpb2_smoother(model, **one).chain,
                num_samples=count,
                **one,
            )
            for i, one in enumerate(series)
        ]
    except FloatingPointError as error:
        return [Finding("comparison with a reference", "failed", str(error), "bad")]
    rows = np.array([max(1, int(one["mask"].any(axis=1).sum())) for one in series])
    gaps = np.array([float(each.log_evidence - each.elbo) for each in checks]) / rows
    gap, shape = float(gaps.max()), max(float(each.k_hat) for each in checks)
    sure = shape < rd.particles.K_HAT_GOOD
    return [
        Finding(
            "gap of the ELBO to the importance evidence",
            f"{gap:.4f} nats per observed row, largest of {len(gaps)}",
            "the divergence of GPB2's chain from the posterior"
            if sure
            else "a lower bound of the divergence of GPB2's chain: the weights are uneven",
            _grade(gap),
            {"value": gap, "series": len(gaps)},
        ),
        Finding(
            "k-hat of path weights",
            f"{shape:.2f}, largest of {len(checks)}",
            "importance weights correct the chain reliably"
            if sure
            else "a few paths carry most of the weight: use rao_blackwellised_smoother",
            "good" if sure else "doubtful",
            {"value": shape, "series": len(checks)},
        ),
    ]


def _with_visible_scales(model: Any, table: data.Table) -> Any:
    """Return the model with scales of at least `LEAST` times the spread of the data.

    Densities of a scale at the edge of zero would consist of rounding errors.
    """
    least = LEAST * float(np.std(table.ys[table.mask]) or 1.0)
    domains = models.parameter_domains(model)
    values = models.named_parameters(model, fixed=True, entries=True)
    raised = {
        name: least
        for name, value in values.items()
        if domains[name] == (0.0, np.inf) and float(value) < least
    }
    return models.with_parameters(model, raised)


def _grade(gap: float) -> Verdict:
    return "good" if gap < SMALL_GAP else "doubtful" if gap < LARGE_GAP else "bad"


def levels_of(run: Run, key: Any, one: Mapping[str, Any], count: int) -> np.ndarray:
    """Return the level of each observation among draws given the rows before it.

    The first row, and those that a model of lags conditions on, are NaN.

    Args:
        run: the run.
        key: a typed key.
        one: `ys`, `mask` and `inputs` of one series.
        count: the number of draws.
    """
    model, mask = rd.unwrap(run.model), np.asarray(one["mask"])
    levels = np.full(mask.shape, np.nan)
    first = max(1, model.num_lags)
    if len(mask) <= first:
        return levels
    ys = np.where(mask, one["ys"], 0.0)
    us = one["inputs"]
    length = np.array([len(ys)])
    batch = (ys[None], mask[None], None if us is None else us[None], length)
    chain = jax.tree.map(lambda leaf: leaf[0], posterior_of(model, *batch).chain)
    draw_key, tie_key = jax.random.split(key)
    draws = np.asarray(drawn_ahead(model, draw_key, chain, ys, us, count))
    uniform = np.asarray(jax.random.uniform(tie_key, mask.shape))
    edge = 0.5 / count  # levels of zero and one have infinite quantiles
    ranks = np.clip(randomised_rank(uniform[1:], draws, ys[1:]), edge, 1 - edge)
    levels[1:] = np.where(mask[1:], ranks, np.nan)
    levels[:first] = np.nan
    return levels
