"""Checks that only models with regimes need: their posterior, their levels, and their use."""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from retrodict import data, models
from retrodict.runs._report_content import Finding
from retrodict.runs._residuals import randomised_rank
from retrodict.runs._run import Run
from retrodict.runs._switching import drawn_ahead, posterior_of, smooth

MIN_ROWS = 5.0
"""A regime with fewer expected rows is hardly determined by the data."""

MIN_STARTS = 2
"""With fewer starts at the best maximum, a higher one may exist."""

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
    if plain.regimes.takes_state or plain.regimes.takes_input:
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
    few = [f"{name} has {count:.1f} rows" for name, count in rows.items() if count < MIN_ROWS]
    value = "; ".join(few) or f"at least {min(rows.values()):.1f} rows"
    meaning = "regimes with few rows are hardly determined by the data: use fewer of them"
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
    ys = np.where(table.mask, table.ys, 0.0)
    chains = posterior_of(model, ys, table.mask, table.inputs, table.length).chain
    keys = jax.random.split(key, table.num_series)
    options = (table.mask, table.inputs, table.length)
    log_weights = np.asarray(_path_weights(model, keys, chains, ys, *options, count))
    shapes = [float(rd.particles.pareto_shape(each)) for each in log_weights]
    elbos = log_weights.mean(axis=1)
    evidences = np.logaddexp.reduce(log_weights, axis=1) - math.log(count)
    gaps = (evidences - elbos) / np.maximum(table.mask.any(axis=2).sum(axis=1), 1)
    gap, shape = float(gaps.max()), max(shapes)
    grade = "good" if gap < SMALL_GAP else "doubtful" if gap < LARGE_GAP else "bad"
    sure = shape < rd.particles.K_HAT_GOOD
    return [
        Finding(
            "gap of the ELBO to the importance evidence",
            f"{gap:.4f} nats per observed row, largest of {len(gaps)}",
            "the loss of GPB2 against the exact posterior"
            if sure
            else "a lower bound of the loss of GPB2: the weights of paths are uneven",
            grade,
            {"value": gap, "series": len(gaps)},
        ),
        Finding(
            "k-hat of path weights",
            f"{shape:.2f}, largest of {len(shapes)}",
            "expectations may be corrected by importance weights"
            if sure
            else "a few paths carry most of the weight: compare with a particle smoother",
            "good" if sure else "doubtful",
            {"value": shape, "series": len(shapes)},
        ),
    ]


@eqx.filter_jit
def _path_weights(
    model: rd.switching.SwitchingModel,
    keys: Any,
    chains: Any,
    ys: Any,
    mask: Any,
    us: Any,
    length: Any,
    count: int,
) -> jax.Array:
    """Return log p(z, x, y) − log q(z, x) of paths of each series, of shape `(batch, sample)`."""

    def one(key: Any, chain: Any, ys: Any, mask: Any, us: Any, length: Any) -> jax.Array:
        zs, xs = chain.sample(key, count)

        def weight(z: Any, x: Any) -> jax.Array:
            joint = model.log_joint(z, x, ys, mask=mask, inputs=us, length=length)
            return joint - chain.log_prob(z, x)

        return jax.lax.map(lambda path: weight(*path), (zs, xs), batch_size=100)

    return eqx.filter_vmap(one)(keys, chains, ys, mask, us, length)


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
