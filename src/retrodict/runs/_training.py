"""The stages of a fit that optimise: the parameters of the model, then a family."""

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import retrodict as rd
from retrodict import data, models
from retrodict._workspace import Folder
from retrodict.runs._check_regimes import summarise_regimes
from retrodict.runs._record import RunError
from retrodict.runs._run import AnyModel, AnyTable, with_structure_of
from retrodict.runs._switching import by_regressions, posterior_of

FAMILIES = {
    "mixture": rd.MixtureFamily,
    "nonlinear": rd.NonlinearFamily,
    "recurrent": rd.RecurrentFamily,
    "gated": rd.GatedFamily,
    "conjugate": rd.ConjugateFamily,
}

NUM_SIMULATED, NUM_HELD_OUT, ROWS_SIMULATED = 2048, 128, 64
"""The number and length of simulated series that a family is trained and validated on."""

MAX_GAP = 8
"""Rows of the longest gap in simulated series."""

MAX_WINDOW = 512
"""Longer series contribute a window of this many rows to an optimiser step."""

MAX_EVIDENCE_STEPS = 300
"""Steps of L-BFGS on an exact evidence, which usually converges long before."""


NUM_STARTS = 10
"""Starts of a search for the parameters of a model with regimes, whose evidence has many maxima."""

MAX_SWITCHING_STEPS = 200
"""Steps from each of these starts."""

NUM_EM_STARTS, MAX_EM_STEPS = 3, 100
"""Starts and steps of EM, for models with a free kernel per regime."""

SAME = 0.1
"""Starts whose log-evidence differs by less, in nats, have reached the same maximum."""


class Learned(NamedTuple):
    """What a fit has learned.

    Attributes:
        model: the fitted model.
        history: the objective by step of the parameters, in nats per row.
        total: the objective of all rows, in nats.
        method: how rows are smoothed: `"exact"`, `"gpb2"` or `"amortised"`.
        objective: the objective, such as `"log-evidence"`.
        search: the status of the search; `None` for a fit by the ELBO.
        family: the trained family; `None` if none is needed.
        family_history: the objective by step of the family.
        details: further entries of the record.
    """

    model: Any
    history: np.ndarray
    total: float
    method: str
    objective: str
    search: str | None = None
    family: rd.AbstractFamily | None = None
    family_history: np.ndarray = np.zeros(0)
    details: Mapping[str, Any] = MappingProxyType({})


def learn(
    folder: Folder, keys: Any, model: AnyModel, table: AnyTable, family: str, num_steps: int
) -> Learned:
    """Learn a model by the objective that its kind has.

    Args:
        folder: the folder of the stages.
        keys: keys for the parameters and for the family.
        model: the starting model.
        table: the data.
        family: the name of the family to train, if the model needs one.
        num_steps: the number of steps of training by the ELBO.
    """
    if isinstance(model, rd.switching.SwitchingModel):
        return fit_regimes(folder, keys[0], model, table)
    if model.is_linear_gaussian:
        return fit_by_evidence(folder, keys[0], model, table)
    learned = fit_by_elbo(folder, keys[0], model, table, num_steps)
    trained, history = train_family(folder, keys[1], learned.model, table, family, num_steps)
    return learned._replace(family=trained, family_history=history)


def fit_regimes(
    folder: Folder, key: Any, model: rd.switching.SwitchingModel, table: AnyTable
) -> Learned:
    """Maximise the evidence of a model with regimes from several starts.

    The evidence is exact without a continuous state, and that of GPB2 with one. Regimes are put in
    canonical order.
    """
    if isinstance(table, data.SharedTable):
        raise RunError("A model with regimes is fitted by one process; run `fit` without the job.")

    def compute() -> dict[str, Any]:
        result = _search(key, model, table)
        fitted = with_structure_of(model, result.model)
        order = models.canonical_order(fitted)
        if order is not None:
            fitted = models.with_regimes(fitted, order)
        return {
            **_leaves(fitted),
            "history": np.asarray(result.history),
            "issues": np.array(_issues(result, order)),
            "status": np.array(result.status),
            "starts": np.asarray(result.start_values, float),
        }

    stage = folder.stage("the parameters, by their evidence", compute)
    fitted, status = _from_leaves(model, stage), str(stage["status"])
    if status != "converged":
        folder.progress.say(f"The search for the parameters {status} before it converged.")
    starts = np.asarray(stage["starts"], float)
    finite = starts[np.isfinite(starts)]
    ys = np.where(table.mask, table.ys, 0.0)
    posterior = posterior_of(rd.unwrap(fitted), ys, table.mask, table.inputs, table.length)
    details = {
        "starts": len(starts),
        "issues": [text for text in str(stage["issues"]).splitlines() if text],
        "regimes": summarise_regimes(fitted, table, 0),
        "starts_at_best": int(np.sum(finite >= finite.max() - SAME)) if finite.size else 0,
    }
    return Learned(
        fitted,
        np.asarray(stage["history"]),
        float(np.sum(posterior.log_evidence)),
        "exact" if model.is_finite else "gpb2",
        "exact evidence" if model.is_finite else "approximate evidence",
        search=status,
        details=details,
    )


def _issues(result: Any, order: np.ndarray | None) -> str:
    """Return what is wrong with the regimes of a fit, one line each, in their present order."""
    place = {} if order is None else {int(old): new for new, old in enumerate(order)}
    return re.sub(
        r"(?<=regime )\d+|(?<=regimes )\d+|(?<= and )\d+",
        lambda found: str(place.get(int(found[0]), int(found[0])) + 1),
        "\n".join(result.issues),
    )


def _search(key: Any, model: rd.switching.SwitchingModel, table: data.Table) -> Any:
    """Return the best fit of several starts.

    A model that is learned by regressions takes its starting values from local ones.
    """
    if not by_regressions(model):
        return rd.switching.fit_evidence(
            key,
            model,
            **table.batch(),
            num_starts=NUM_STARTS,
            num_steps=MAX_SWITCHING_STEPS,
            progress=False,
        )
    start_key, em_key = jax.random.split(key)
    batch = table.batch()
    start = rd.switching.initialise(start_key, model, **batch)
    return rd.switching.em(
        em_key, start, **batch, num_starts=NUM_EM_STARTS, num_iterations=MAX_EM_STEPS
    )


def _leaves(model: AnyModel) -> dict[str, Any]:
    """Return the arrays of a model by name, for a stage."""
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return {f"leaf {i}": leaf for i, leaf in enumerate(leaves)}


def _from_leaves(model: AnyModel, stage: Mapping[str, Any]) -> Any:
    """Return the model with the arrays of a stage."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(arrays)
    values = [jnp.asarray(stage[f"leaf {i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
    return eqx.combine(jax.tree.unflatten(structure, values), static)


def fit_by_evidence(
    folder: Folder, key: Any, model: rd.StateSpaceModel, table: AnyTable
) -> Learned:
    """Learn the model of maximal evidence."""

    def compute() -> dict[str, Any]:
        result = rd.fit_evidence(
            key,
            model,
            **table.batch(),
            optimiser="lbfgs",
            num_steps=MAX_EVIDENCE_STEPS,
            progress=False,
        )
        return {
            **_leaves(with_structure_of(model, result.model)),
            "history": result.history,
            "log_evidence": result.log_evidence,
            "status": np.array(result.status),
        }

    stage = folder.stage("the parameters, by their evidence", compute)
    status = str(stage["status"]) if "status" in stage else "finished"
    if status != "converged":
        folder.progress.say(f"The search for the parameters {status} before it converged.")
    total = float(stage["log_evidence"])
    fitted = _from_leaves(model, stage)
    return Learned(fitted, stage["history"], total, "exact", "log-evidence", search=status)


def fit_by_elbo(
    folder: Folder,
    key: Any,
    model: rd.StateSpaceModel,
    table: AnyTable,
    num_steps: int,
) -> Learned:
    """Learn the model of maximal ELBO.

    The model is learned with a recurrent family, whose ELBO is in closed form or by quadrature, so
    that parameters converge. That family was trained on these series only, and is discarded.
    """
    family_key, fit_key = jax.random.split(key)
    sizes = (model.state_dim, len(table.names))
    family = rd.RecurrentFamily(family_key, *sizes, input_dim=len(table.input_names))
    result, _ = folder.fit(
        "the parameters, by the ELBO",
        partial(
            rd.fit,
            fit_key,
            family,
            model,
            num_steps=num_steps,
            learn="both",
            objective=rd.Objective(
                window=MAX_WINDOW if table.summary.longest > MAX_WINDOW else None
            ),
            optimisation=rd.Optimisation(optimiser=_optimiser(num_steps)),
            **table.batch(),
        ),
    )
    elbo = float(result.held_out[result.held_out_steps == result.kept_step][-1])
    fitted = with_structure_of(model, result.model)
    return Learned(fitted, result.history, elbo * table.summary.num_rows, "amortised", "ELBO")


def _optimiser(num_steps: int) -> optax.GradientTransformation:
    """Return Adam with steps of the model's parameters relative to their size."""
    warmup = max(1, min(num_steps // 20, 500))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 1e-2, warmup, max(num_steps, warmup + 1), 1e-5
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99), relative_to_size()
    )


def relative_to_size() -> optax.GradientTransformation:
    """Return a transformation that multiplies updates of the model by max(1, |parameter|).

    Without it a scale of a thousand would take a hundred thousand steps of 0.01. Updates are pairs
    of family and model; those of the family are not changed.
    """

    def scale(updates: Any, parameters: Any) -> Any:
        family, model = updates
        scaled = jax.tree.map(
            lambda update, at: update * jnp.maximum(1.0, jnp.abs(at)), model, parameters[1]
        )
        return family, scaled

    return optax.stateless(scale)


def train_family(
    folder: Folder,
    key: Any,
    model: rd.StateSpaceModel,
    table: AnyTable,
    name: str,
    num_steps: int,
) -> tuple[rd.AbstractFamily, np.ndarray]:
    """Train a family on series simulated from the model; return it and the history."""
    draw_key, family_key, fit_key = jax.random.split(key, 3)
    plain = rd.unwrap(model)
    simulated = rd.simulate_like(
        draw_key,
        plain,
        **table.leading_series().batch(),
        num_series=NUM_SIMULATED + NUM_HELD_OUT,
        num_times=ROWS_SIMULATED,
    )
    mask = simulated.options["mask"]
    mask = jnp.ones(simulated.ys.shape, bool) if mask is None else mask
    mask = _with_gaps(jax.random.fold_in(draw_key, 1), mask)
    simulated = simulated._replace(options={**simulated.options, "mask": mask})
    train = jax.tree.map(lambda leaf: leaf[:NUM_SIMULATED], simulated)
    held_out = jax.tree.map(lambda leaf: leaf[NUM_SIMULATED:], simulated)
    sizes = (model.state_dim, len(table.names))
    family = FAMILIES[name](family_key, *sizes, input_dim=len(table.input_names))
    result, _ = folder.fit(
        f"a {name} family",
        partial(
            rd.fit,
            fit_key,
            family,
            plain,
            train.ys,
            num_steps=num_steps,
            held_out=tuple(held_out),
            **train.options,
        ),
    )
    return result.family, result.history / _share_observed(mask, simulated.options["length"])


def _share_observed(mask: Any, length: Any) -> float:
    """Return the share of existing rows with an observed entry."""
    observed: Any = np.asarray(mask).any(axis=2)
    rows = np.arange(observed.shape[1])
    exists = rows < (len(rows) if length is None else np.asarray(length)[:, None])
    exists = np.broadcast_to(exists, observed.shape)
    return float((observed & exists).sum() / exists.sum())


def _with_gaps(key: Any, mask: Any) -> Any:
    """Return the mask with further gaps in half of the series.

    New data may have gaps where these data have none, and a family must be trained on gaps to
    handle them. One row in ten is removed, and a stretch of up to `MAX_GAP` rows.

    Args:
        key: a typed key.
        mask: the mask of the simulated series, of shape `(batch, time, obs)`.
    """
    half_key, row_key, place_key, length_key = jax.random.split(key, 4)
    count, rows, _ = mask.shape
    gappy = jax.random.bernoulli(half_key, 0.5, (count, 1))
    single = jax.random.bernoulli(row_key, 0.1, (count, rows))
    begin = jax.random.randint(place_key, (count, 1), 0, rows)
    length = jax.random.randint(length_key, (count, 1), 0, MAX_GAP + 1)
    place = jnp.arange(rows)[None]
    missing = gappy & (single | ((place >= begin) & (place < begin + length)))
    return mask & ~missing[..., None]
