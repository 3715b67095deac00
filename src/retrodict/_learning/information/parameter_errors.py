"""Standard errors of the parameters of a model at a maximum of its likelihood."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import PyTree

from retrodict._arrays import PRNGKey, check_count, check_key, is_concrete
from retrodict._chains import AbstractBackwardChain
from retrodict._exact import Grid, check_linear_gaussian
from retrodict._expectations import check_chain
from retrodict._learning.coordinates import ModelCoordinates, coordinates_of
from retrodict._learning.dataset import batch_for
from retrodict._learning.information.exact import (
    Evidence,
    evidence_information,
    exact_information,
    grid_information,
)
from retrodict._learning.information.louis import louis_information
from retrodict._learning.information.result import (
    Information,
    Inverse,
    ParameterErrors,
    inverse,
    jackknife,
    quantities,
)
from retrodict._learning.shared import SharedSeries, check_shared, refuse_beside
from retrodict._model import Series, StateSpaceModel, check_densities, is_linear_gaussian, unwrap
from retrodict.distributed import sum_over_processes
from retrodict.particles import AbstractBackwardSampler, ExactBackward

_EXACT = ExactBackward()

MAX_PARAMETERS = 200
"""The largest number of parameters of an information matrix."""

NEAR = 0.1
"""The distance from a maximum, in standard errors, up to which parameters are at it."""


def parameter_errors(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    read: Callable[[StateSpaceModel], PyTree] | None = None,
    level: float = 0.95,
    method: Literal["exact", "grid", "louis"] | None = None,
    grid: Grid | None = None,
    chain: AbstractBackwardChain | None = None,
    num_particles: int = 500,
    num_samples: int = 500,
    num_replicates: int = 20,
    most_replicates: int | None = None,
    backward: AbstractBackwardSampler = _EXACT,
) -> ParameterErrors:
    """Compute standard errors of learned parameters from the observed information −∇² log p_θ(y).

    The parameters θ are those that `fit` and `fit_evidence` move, in unconstrained coordinates, at
    a maximum of the likelihood; `Frozen` parts are taken as known. For linear-Gaussian models the
    information is exact, and for models of one or two states with a `grid` exact up to that grid.
    For others it is estimated by Louis' identity (1982),

        −∇² log p_θ(y) = E[−∇² log p_θ(x, y) | y] − Cov(∇ log p_θ(x, y) | y),

    from paths x given the series, sampled by `ffbsi` in independent replicates. If the states are
    mostly hidden, both terms are large and nearly equal, and their difference is noisy: if the data
    contain a fraction ρ of the information in the states, S paths give a relative error of about
    √(2/S)/ρ. Monte Carlo standard errors are jackknifed over the replicates. Several series are
    independent, and their information is summed.

    A quantity a(θ) with gradient g has the standard error √(gᵀΣg), Σ the inverse information. Its
    interval ends at its values at θ ± z Σg / √(gᵀΣg), where scales step in their logarithm. The
    interval therefore stays in the domain of the quantity: that of a scale is positive. A scale
    that was estimated at zero, or another parameter at the edge of its domain, has no curvature
    there and no interval; the others are computed with it fixed there. Only an exact information
    distinguishes such an edge from noise.

    Example:
        >>> import jax, retrodict as rd
        >>> model = rd.models.local_level(prior_scale=1.0)
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=100)
        >>> errors = rd.parameter_errors(jax.random.key(1), model, ys)
        >>> errors.names
        ('transition.fn.level_scale[0]', 'emission.fn.obs_scale[0]')
        >>> bool(errors.lower["emission"].scale_tril.std[0] > 0)
        True

    Args:
        key: a typed key; the exact information is deterministic.
        model: the model at its maximum, such as `fit_evidence(...).model`.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series; or, for
            the exact information, `SharedSeries`.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.
        read: the quantities of interest, a function of the model that returns a pytree of
            arrays; by default the learned parameters themselves, by name. Its argument is the model
            with its parameters, which `unwrap` turns into arrays.
        level: the coverage probability of the intervals.
        method: `"exact"`, `"grid"` or `"louis"`; by default exact for linear-Gaussian models, and
            on the grid if there is one.
        grid: a grid that covers the states at all times, as for `grid_smoother`.
        chain: a chain whose weighted paths replace those of `ffbsi`. For one short series: weights
            of whole paths degenerate.
        num_particles: the number of particles of each filter.
        num_samples: the number of paths per replicate.
        num_replicates: the number of independent replicates.
        most_replicates: the largest number of replicates. Their number is doubled while it is
            unclear from noise whether every direction is identified, and this many could decide.
        backward: how `ffbsi` samples paths; `RejectionBackward()` makes many of them cheap.

    Returns:
        The information and its inverse, the score, standard errors, intervals, and a status.

    Raises:
        ValueError: if model and data do not fit, or nothing or too much is to be learned.
        TypeError: if an argument is of the wrong type, or traced.
        FloatingPointError: if a filter fails, or a derivative is non-finite.
    """
    check_key(key, "parameter_errors")
    if not isinstance(model, StateSpaceModel):
        raise TypeError(f"parameter_errors expects a StateSpaceModel, got {type(model).__name__}.")
    if not 0 < level < 1:
        raise ValueError(f"parameter_errors expects a level between 0 and 1, got {level}.")
    if read is not None and not callable(read):
        raise TypeError(
            "parameter_errors expects read to be a function of the model, got"
            f" {type(read).__name__}."
        )
    coordinates, plain = _coordinates(model), unwrap(model)
    method = _method(plain, method, chain, grid)
    options = {"mask": mask, "inputs": inputs, "length": length}
    total = np.asarray
    if isinstance(ys, SharedSeries):
        refuse_beside("parameter_errors", "the shared series", **options)
        check_shared(plain, ys)
        if method != "exact":
            raise ValueError(
                "parameter_errors sums the information of shared series for linear-Gaussian"
                f" models; for the method {method!r} give all series to each process."
            )
        batch, total = ys.local, sum_over_processes
    else:
        batch = batch_for(plain, ys, **options, learner="parameter_errors")
    if method == "exact":
        estimate = exact_information(coordinates, batch, total)
    elif grid is not None:
        estimate = grid_information(coordinates, batch, grid)
    else:
        check_densities(plain, "parameter_errors by Louis' identity")
        estimate = louis_information(
            key,
            coordinates,
            batch,
            backward if chain is None else chain,
            check_count(num_particles, "num_particles"),
            check_count(num_samples, "num_samples"),
            check_count(num_replicates, "num_replicates"),
            check_count(
                num_replicates if most_replicates is None else most_replicates, "most_replicates"
            ),
        )
    _refuse_undefined(estimate.score, estimate.information, coordinates.names)
    return _result(coordinates, estimate, read, level, method)


def errors_of_evidence(
    model: Any,
    batch: Series,
    evidence: Evidence,
    *,
    read: Callable[[Any], PyTree] | None = None,
    level: float = 0.95,
) -> ParameterErrors:
    """Compute standard errors from the curvature of any differentiable log-evidence.

    Args:
        model: the model.
        batch: the series.
        evidence: the log-evidence of an unwrapped model and one series.
        read: the quantities of interest, as in `parameter_errors`.
        level: the probability of the intervals.
    """
    coordinates = _coordinates(model)
    estimate = evidence_information(coordinates, batch, evidence)
    _refuse_undefined(estimate.score, estimate.information, coordinates.names)
    return _result(coordinates, estimate, read, level, "exact")


def _result(
    coordinates: ModelCoordinates,
    estimate: Information,
    read: Callable[[StateSpaceModel], PyTree] | None,
    level: float,
    method: Literal["exact", "grid", "louis"],
) -> ParameterErrors:
    """Invert the information, and collect standard errors, intervals, status and messages."""
    score, information, scores, informations, edges, warnings = estimate
    theta, names = coordinates.theta(), coordinates.names
    at_edge = np.isin(np.arange(theta.size), list(edges))
    inverted = inverse(estimate, theta)
    is_open = inverted.touches(np.eye(theta.size)) > estimate.max_open_share
    distance = float(np.sqrt(score @ inverted.covariance @ score))
    messages: dict[Any, list[str]] = {
        "unreliable": list(warnings),
        "not identified": _unidentified(inverted, names),
        "not at a maximum": _not_at_maximum(distance, inverted, scores),
        "at an edge": _at_edges(edges, names),
    }
    status: Any = next((name for name, sentences in messages.items() if sentences), "fine")
    return ParameterErrors(
        names,
        np.asarray(theta, np.float64),
        information,
        np.zeros_like(information) if informations is None else jackknife(informations),
        _with_open(inverted.covariance, is_open, at_edge),
        score,
        np.zeros_like(score) if scores is None else jackknife(scores),
        distance,
        ~is_open & ~at_edge,
        at_edge,
        **quantities(coordinates, read, inverted, estimate, level),
        method=method,
        status=status,
        messages=tuple(sentence for sentences in messages.values() for sentence in sentences),
    )


def _coordinates(model: Any) -> ModelCoordinates:
    coordinates = coordinates_of(model)
    count = len(coordinates.names)
    if count == 0:
        raise ValueError(
            "parameter_errors expects a model with parameters that can be learned, got one in which"
            " every floating array is Frozen."
        )
    if count > MAX_PARAMETERS:
        raise ValueError(
            "parameter_errors computes the information of at most"
            f" {MAX_PARAMETERS} parameters, got a model with {count}. Wrap parameters of no"
            " interest in Frozen, which takes them as known; the weights of a network have no"
            " useful standard errors."
        )
    if not is_concrete(coordinates.theta()):
        raise TypeError("parameter_errors expects concrete arrays, got traced ones.")
    return coordinates


def _method(
    model: StateSpaceModel, method: Any, chain: AbstractBackwardChain | None, grid: Any
) -> Literal["exact", "grid", "louis"]:
    if method not in (None, "exact", "grid", "louis"):
        raise ValueError(
            f"parameter_errors expects the method 'exact', 'grid', 'louis' or None, got {method!r}."
        )
    if grid is not None or method == "grid":
        if not isinstance(grid, Grid):
            raise TypeError(f"The method 'grid' expects a Grid, got {type(grid).__name__}.")
        if chain is not None or method not in (None, "grid"):
            raise ValueError("A grid requires the method 'grid': leave out `grid`, or the others.")
        return "grid"
    if chain is not None:
        check_chain(chain, "parameter_errors")
        if method == "exact":
            raise ValueError("The method 'exact' takes no chain: leave out `method` or `chain`.")
        return "louis"
    if method == "exact":
        check_linear_gaussian(model, "parameter_errors(method='exact')")
    return method or ("exact" if is_linear_gaussian(model) else "louis")


def _refuse_undefined(score: np.ndarray, information: np.ndarray, names: tuple[str, ...]) -> None:
    defined = np.isfinite(score) & np.all(np.isfinite(information), axis=1)
    if not np.any(np.isfinite(score)) or not np.all(defined):
        which = ", ".join(np.asarray(names)[~defined][:5])
        raise FloatingPointError(
            f"parameter_errors: the derivatives in {which} are not finite. Check that the model's"
            " densities are twice differentiable at these parameters."
        )


def _unidentified(inverted: Inverse, names: tuple[str, ...]) -> list[str]:
    """Return one sentence per direction along which the information is not above zero."""
    sentences = []
    directions = zip(inverted.open.T, inverted.eigenvalues, inverted.noise, strict=True)
    for direction, value, noise in directions:
        scaled = direction * inverted.units
        scaled = scaled / scaled[np.argmax(np.abs(scaled))]
        largest = [i for i in np.argsort(-np.abs(direction))[:4] if abs(direction[i]) > 0.1]
        combination = " ".join(f"{scaled[i]:+.3g} {names[i]}" for i in largest)
        figure = f"{value:.2g} ± {noise:.1g}" if noise > 0 else f"{value:.2g}"
        doubt = (
            " If the model should be identified, use more samples and replicates."
            if noise > 0
            else ""
        )
        sentences.append(
            f"not identified: along {combination} the information is not above zero ({figure}, in"
            " units in which each parameter has one). Fix one of these parameters with Frozen;"
            f" below zero, they are not at a maximum of the likelihood: continue to learn.{doubt}"
        )
    return sentences


def _not_at_maximum(distance: float, inverted: Inverse, scores: np.ndarray | None) -> list[str]:
    noise = 0.0
    if scores is not None:
        centred = scores - scores.mean(axis=0)
        spread = (len(scores) - 1) / len(scores) * centred.T @ centred
        noise = float(np.sum(inverted.covariance * spread))
    if distance**2 <= NEAR**2 + 3.0 * noise:
        return []
    return [
        f"not at a maximum: a Newton step has a length of {distance:.2g} standard errors (Monte"
        f" Carlo error {noise**0.5:.1g}). Standard errors hold at a maximum: continue to learn"
    ]


def _at_edges(edges: Mapping[int, float], names: tuple[str, ...]) -> list[str]:
    return [
        f"at an edge: {names[i]} is at the edge of {edge or 'zero'}, where the likelihood has no"
        " curvature: it has no interval, and the others hold with it fixed there"
        for i, edge in edges.items()
    ]


def _with_open(covariance: np.ndarray, is_open: np.ndarray, at_edge: np.ndarray) -> np.ndarray:
    unknown = is_open | at_edge
    filled = np.where(unknown[:, None] | unknown[None], np.nan, covariance)
    covariance = np.where(at_edge[:, None], np.nan, covariance)
    np.fill_diagonal(filled, np.where(is_open, np.inf, np.diagonal(covariance)))
    return filled
