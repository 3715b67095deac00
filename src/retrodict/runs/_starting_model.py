"""The model that a fit starts from, checked against the table."""

import dataclasses
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from retrodict import models
from retrodict._interface import ModelArgument
from retrodict.runs._record import RunError
from retrodict.runs._run import AnyModel, AnyTable
from retrodict.runs._switching import by_regressions, refuse_series

PERIODS = {
    "1h": (24, "hours of a day"),
    "1D": (7, "days of a week"),
    "B": (5, "business days of a week"),
    "1 month": (12, "months of a year"),
    "3 months": (4, "quarters of a year"),
}
"""The steps of a season and their meaning, by the time step of a table."""

NUM_MATRICES = 16
"""Matrices of the size of a covariance that are allocated while starting values are computed."""


def with_period(spec: models.ModelSpec, table: AnyTable) -> tuple[models.ModelSpec, str]:
    """Return a specification with the period that the time step implies, and the reason in words.

    A specification with a period, or of a model without one, is returned unchanged, with an empty
    text.

    Args:
        spec: the model.
        table: the data.

    Raises:
        RunError: if the model needs a period and the time step of the table does not imply one.
    """
    if "period" not in spec.all_options() or "period" in spec.options:
        return spec, ""
    step = table.layout["freq"]
    if step not in PERIODS:
        words = "are uneven" if step == "irregular" else f"have a step of {step}"
        raise RunError(
            f"The model {spec.reference} needs a period, and the times of {table.source} {words},"
            " which does not imply one. Set the number of steps per season, such as {period}.",
            period=ModelArgument("period", 12, model=spec.name or ""),
        )
    period, steps = PERIODS[step]
    words = f"The step of the times is {step}: period={period}, the {steps}."
    return dataclasses.replace(spec, options={**spec.options, "period": period}), words


def starting_model(table: AnyTable, spec: models.ModelSpec, *, seed: int = 0) -> AnyModel:
    """Return the model that a fit starts from, with starting values from the data.

    Args:
        table: the data.
        spec: the model, with its period.
        seed: the random seed of the fit.

    Raises:
        RunError: if the model does not match the table.
    """
    for name, count in zip(table.names, table.summary.num_observed, strict=True):
        if count < 2:
            raise RunError(
                f"{table.source}, column {name!r}: a fit needs at least 2 observed values, got"
                f" {count}; add rows, or name other columns with {{columns}}",
                columns=...,
            )
    expected, names = spec.inputs(), ", ".join(table.input_names)
    if expected and len(expected) != len(table.input_names):
        raise RunError(
            f"The model {spec.reference} reads the inputs {', '.join(expected)}, in this order,"
            f" and the table has {names or 'none'}. Name columns with {{inputs}}, and add the"
            f" length of the step with {{step_input}}.",
            inputs=...,
            step_input=True,
        )
    refuse_too_large(spec, table)
    key = jax.random.split(jax.random.key(seed), 4)[0]
    model = spec.build_from(**table.leading_series().batch(), key=key)
    if model.takes_input and not table.input_names:
        raise RunError(
            f"The model {spec.reference} takes inputs, and the table has none: name their columns"
            f" with {{inputs}}, or add the length of the step with {{step_input}}.",
            inputs=...,
            step_input=True,
        )
    if not model.takes_input and table.input_names:
        raise RunError(
            f"The model {spec.reference} takes no inputs, and the table has {names}. Leave the"
            " inputs out, or choose a model that reads them: ready models read the length of the"
            " step with an option, such as {irregular}.",
            irregular=ModelArgument("irregular", True, model="local_level"),
        )
    num_columns = _num_observed(model, len(table.input_names))
    if num_columns != len(table.names):
        raise RunError(
            f"The model {spec.reference} observes {num_columns} columns, and the table has"
            f" {len(table.names)}: {', '.join(table.names)}. Name those that it observes with"
            f" {{columns}}",
            columns=...,
        )
    if isinstance(model, rd.switching.SwitchingModel):
        _refuse_regimes(model, spec, table)
    return model


def _refuse_regimes(
    model: rd.switching.SwitchingModel, spec: models.ModelSpec, table: AnyTable
) -> None:
    """Refuse more regimes than rows, and series that the lags of the model do not fit."""
    rows = table.summary.num_rows_observed
    if model.num_regimes > rows:
        raise RunError(
            f"{table.source} has {rows} observed rows, fewer than the {model.num_regimes} regimes;"
            " set a smaller number of {regimes}.",
            regimes=ModelArgument("regimes", 2, model="markov_switching"),
        )
    refuse_series(model, table.leading_series())
    if by_regressions(model):
        mask = table.leading_series().mask
        if np.any(mask.any(axis=2) != mask.all(axis=2)):
            raise RunError(
                f"{table.source}: {spec.reference} is learned from rows that are complete or"
                " missing altogether; fill in the rows that miss some columns."
            )


def refuse_too_large(spec: models.ModelSpec, table: AnyTable) -> None:
    """Refuse a ready model whose matrices do not fit into the memory of this machine.

    Raises:
        RunError: if it has too many states.
    """
    if spec.name is None or not hasattr(os, "sysconf"):
        return
    try:  # the number of states of a ready model is linear in the number of columns
        one, two = (spec.build(columns, jax.random.key(0)) for columns in (1, 2))
    except models.ModelError:
        return  # the number of columns is fixed
    num_states = one.state_dim + (len(table.names) - 1) * (two.state_dim - one.state_dim)
    is_dense = getattr(one, "is_linear_gaussian", False)
    rows = table.summary.longest if is_dense else 0
    needed = 8 * num_states**2 * (rows + NUM_MATRICES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise RunError(
            f"The model {spec.reference} has {num_states} states for {len(table.names)} columns,"
            f" whose covariances take {needed / 1e9:.0f} GB, and this machine has"
            f" {memory / 1e9:.0f} GB of memory. Name fewer columns with {{columns}}, or choose a"
            " model with fewer states.",
            columns=...,
        )


def _num_observed(model: AnyModel, num_inputs: int) -> int:
    """Return the number of columns of an observation, from its shape."""
    if isinstance(model, rd.switching.SwitchingModel):
        us = jnp.zeros((1, num_inputs)) if model.takes_input else None
        path = eqx.filter_eval_shape(
            lambda key: model.simulate(key, 1, inputs=us), jax.random.key(0)
        )
        return path[2].shape[1]
    emission = rd.unwrap(model).emission
    draw = eqx.filter_eval_shape(
        lambda key, x, u: emission.sample(key, x, u),
        jax.random.key(0),
        jnp.zeros(model.state_dim),
        jnp.zeros(num_inputs),
    )
    return draw.shape[0]
