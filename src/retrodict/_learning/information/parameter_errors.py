"""Standard errors of the parameters of a model at a maximum of its likelihood."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from retrodict._chains import AbstractBackwardChain
from retrodict._exact import Grid, check_linear_gaussian
from retrodict._expectations import check_chain, check_model, series_of_chain
from retrodict._learning.coordinates import Coordinates, coordinates_of
from retrodict._learning.dataset import batch_for, num_series, take
from retrodict._learning.information.edge import edges_of, raised, spread_of
from retrodict._learning.information.exact import exact_information
from retrodict._learning.information.louis import (
    Replicates,
    combine,
    jackknife,
    particle_replicates,
    weighted_replicates,
)
from retrodict._learning.information.on_grid import grid_information
from retrodict._learning.information.result import (
    LEAST_SHARE,
    NOISE,
    Inverse,
    ParameterErrors,
    inverse,
    quantities,
)
from retrodict._learning.shared import SharedSeries, check_shared, refuse_beside
from retrodict._model import StateSpaceModel, check_densities, is_linear_gaussian
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key, is_concrete
from retrodict.distributed import sum_over_processes
from retrodict.particles import (
    DEGENERATE,
    FINE,
    K_HAT_GOOD,
    AbstractBackwardSampler,
    ExactBackward,
    pareto_shape,
    refuse_failure,
)

_EXACT = ExactBackward()

MAX_PARAMETERS = 200
"""The largest number of parameters of an information matrix."""

FEWEST_REPLICATES = 4
"""The smallest number of replicates for an estimate of their spread."""

SURE = 4.0
"""The number of Monte Carlo standard errors by which the information must exceed zero before no
more replicates are drawn. The relative error of standard errors is then about an eighth."""

BENEFIT = 2.0
"""The number of Monte Carlo standard errors added to an eigenvalue before it counts as hopeless."""

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
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Frozen(rd.Gaussian(jnp.zeros(1), jnp.eye(1))),
        ...     transition=rd.Frozen(rd.LinearGaussianKernel(
        ...         0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1))),
        ...     emission=rd.LinearGaussianKernel(
        ...         rd.Frozen(jnp.eye(1)), jnp.zeros(1), rd.Diagonal(rd.Positive(jnp.ones(1)))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=100)
        >>> errors = rd.parameter_errors(jax.random.key(1), model, ys)
        >>> errors.names
        ('emission.bias[0]', 'emission.scale_tril.std[0]')
        >>> bool(errors.lower["emission.scale_tril.std"][0] > 0)
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
    is_shared = isinstance(ys, SharedSeries)
    batch = (
        _local_series(plain, ys, method, options)
        if is_shared
        else batch_for(plain, ys, **options, owner="parameter_errors")
    )
    if method == "exact":
        estimate = _exact_information(coordinates, batch, is_shared)
    elif grid is not None:
        score, information = grid_information(coordinates, batch, grid)
        estimate = _Information(np.asarray(score, float), np.asarray(information, float))
    else:
        check_densities(plain, "parameter_errors by Louis' identity")
        sizes = _Sizes(
            check_count(num_particles, "num_particles"),
            check_count(num_samples, "num_samples"),
            check_count(num_replicates, "num_replicates"),
            check_count(
                num_replicates if most_replicates is None else most_replicates, "most_replicates"
            ),
        )
        estimate = _louis_information(key, coordinates, batch, chain, backward, sizes)
    _refuse_undefined(estimate.score, estimate.information, coordinates.names)
    return _result(coordinates, estimate, read, level, method)


class _Information(NamedTuple):
    """An observed information, and what qualifies it.

    Attributes:
        score: the gradient of the log-likelihood.
        information: minus its Hessian.
        scores: scores with one replicate left out; `None` if exact.
        informations: informations with one replicate left out; `None` if exact.
        edges: the parameters at an edge of their domain, and the edge.
        warnings: why the replicates are unreliable.
    """

    score: np.ndarray
    information: np.ndarray
    scores: np.ndarray | None = None
    informations: np.ndarray | None = None
    edges: Mapping[int, float] = {}
    warnings: Sequence[str] = ()


class _Sizes(NamedTuple):
    """The sizes of a Monte Carlo estimate."""

    num_particles: int
    num_samples: int
    num_replicates: int
    most_replicates: int


def _exact_information(coordinates: Coordinates, batch: Series, is_shared: bool) -> _Information:
    """Return the exact information, summed over processes if each holds a share of the series."""
    total = sum_over_processes if is_shared else np.asarray
    spread, theta = spread_of(batch, total), coordinates.theta()
    raised_theta = raised(np.asarray(theta, np.float64), coordinates, spread)
    inside = coordinates.moved(jnp.asarray(raised_theta, theta.dtype))
    sums = exact_information(inside, batch)
    score, information = (total(np.asarray(each, float)) for each in sums)
    information = (information + information.T) / 2
    edges = edges_of(coordinates, raised_theta, score, information, spread)
    return _Information(score, information, edges=edges)


def _louis_information(
    key: PRNGKey,
    coordinates: Coordinates,
    batch: Series,
    chain: AbstractBackwardChain | None,
    backward: AbstractBackwardSampler,
    sizes: _Sizes,
) -> _Information:
    """Return the information by Louis' identity, from particles or from paths of a chain."""
    if sizes.num_replicates < FEWEST_REPLICATES:
        raise ValueError(
            f"parameter_errors expects at least {FEWEST_REPLICATES} replicates, from whose spread"
            f" the Monte Carlo error is estimated, got num_replicates={sizes.num_replicates}."
        )

    def draw(key: PRNGKey) -> tuple[Replicates, list[str]]:
        if chain is None:
            return _from_particles(key, coordinates, batch, sizes, backward)
        return _from_chain(key, coordinates, batch, chain, sizes)

    replicates, warnings = _until_sure(key, draw, coordinates, sizes.most_replicates)
    return _Information(*combine(replicates), warnings=warnings)


def _result(
    coordinates: Coordinates,
    estimate: _Information,
    read: Callable[[StateSpaceModel], PyTree] | None,
    level: float,
    method: Literal["exact", "grid", "louis"],
) -> ParameterErrors:
    """Invert the information, and collect standard errors, intervals, status and messages."""
    score, information, scores, informations, edges, warnings = estimate
    theta, names = np.asarray(coordinates.theta(), np.float64), coordinates.names
    at_edge = np.isin(np.arange(theta.size), list(edges))
    inverted = inverse(information, theta, informations, _precision(coordinates), fixed=at_edge)
    is_open = inverted.touches(np.eye(theta.size)) > LEAST_SHARE[informations is None]
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
        theta,
        information,
        np.zeros_like(information) if informations is None else jackknife(informations),
        _with_open(inverted.covariance, is_open, at_edge),
        score,
        np.zeros_like(score) if scores is None else jackknife(scores),
        distance,
        ~is_open & ~at_edge,
        at_edge,
        *quantities(coordinates, read, inverted, informations, level, at_edge),
        method,
        status,
        tuple(sentence for sentences in messages.values() for sentence in sentences),
    )


def _local_series(
    model: StateSpaceModel, shared: SharedSeries, method: str, options: Mapping[str, Any]
) -> Series:
    """Return the series of this process, whose information is added to that of the others."""
    refuse_beside("parameter_errors", "the shared series", **options)
    check_shared(model, shared)
    if method != "exact":
        raise ValueError(
            "parameter_errors sums the information of shared series for linear-Gaussian models;"
            f" for the method {method!r} give all series to each process."
        )
    return shared.local


def _coordinates(model: StateSpaceModel) -> Coordinates:
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
        check_linear_gaussian(model)
    if method is None:
        return "exact" if is_linear_gaussian(model) else "louis"
    return method


def _precision(coordinates: Coordinates) -> float:
    return float(jnp.finfo(coordinates.theta().dtype).eps)


def _until_sure(
    key: PRNGKey,
    draw: Callable[[PRNGKey], tuple[Replicates, list[str]]],
    coordinates: Coordinates,
    most: int,
) -> tuple[Replicates, list[str]]:
    """Double the replicates until the sign of every direction is clear from noise."""
    replicates, messages = draw(key)
    first = replicates.log_weight.shape[1]
    raw = np.asarray(coordinates.theta(), np.float64)
    rounds = 1
    while not messages and 2 * rounds * first <= most:
        _, information, _, informations = combine(replicates)
        if not np.all(np.isfinite(information)):
            break
        inverted = inverse(information, raw, informations, _precision(coordinates), SURE)
        unclear = np.abs(inverted.eigenvalues) <= SURE * inverted.noise
        if not np.any(unclear) or _is_hopeless(inverted, rounds * first, most):
            break
        for turn in range(rounds, 2 * rounds):
            more, warned = draw(jax.random.fold_in(key, turn))
            messages = messages or warned
            replicates = Replicates(
                *(np.concatenate(pair, axis=1) for pair in zip(replicates, more, strict=True))
            )
        rounds *= 2
    return replicates, messages


def _is_hopeless(inverted: Inverse, count: int, most: int) -> bool:
    """Return whether some direction would probably remain unclear with all replicates.

    Noise decreases with the square root of the number of replicates. The eigenvalue of a direction
    is taken two standard errors above its estimate.
    """
    at_best = np.maximum(inverted.eigenvalues + BENEFIT * inverted.noise, 0.0)
    return bool(np.any(at_best < NOISE * inverted.noise * np.sqrt(count / most)))


def _from_particles(
    key: PRNGKey,
    coordinates: Coordinates,
    batch: Series,
    sizes: _Sizes,
    backward: AbstractBackwardSampler,
) -> tuple[Replicates, list[str]]:
    keys = jax.random.split(key, (num_series(batch), sizes.num_replicates))
    replicates, status, time = particle_replicates(
        coordinates, batch, keys, sizes.num_particles, sizes.num_samples, backward
    )
    status, time = np.asarray(status), np.asarray(time)
    for code, at in zip(status.ravel(), time.ravel(), strict=True):
        if code not in (FINE, DEGENERATE):
            refuse_failure("parameter_errors", code, at, True)
    if not np.any(status == DEGENERATE):
        return replicates, []
    return replicates, [
        "unreliable: at some time the paths go through fewer than 10 particles, in"
        f" {np.sum(status == DEGENERATE)} of {status.size} replicates. Use more particles"
    ]


def _from_chain(
    key: PRNGKey,
    coordinates: Coordinates,
    batch: Series,
    chain: AbstractBackwardChain,
    sizes: _Sizes,
) -> tuple[Replicates, list[str]]:
    if num_series(batch) != 1:
        raise ValueError(
            f"parameter_errors with a chain expects one series, got {num_series(batch)}. Call it"
            " for each series with its chain and sum the information, or leave out `chain`."
        )
    model = unwrap(coordinates.model)
    check_model(model, chain, "parameter_errors")
    one = take(batch, 0)
    series = series_of_chain(
        model,
        chain,
        one.ys,
        mask=True if one.mask is None else one.mask,
        inputs=one.inputs,
        length=one.length,
    )
    keys = jax.random.split(key, sizes.num_replicates)
    replicates, raw = weighted_replicates(coordinates, chain, series, keys, sizes.num_samples)
    shape = pareto_shape(np.asarray(raw).ravel())
    if shape <= K_HAT_GOOD:
        return replicates, []
    return replicates, [
        f"unreliable: the Pareto shape of the weights is {shape:.2f}, above {K_HAT_GOOD}: a few"
        " paths carry most of the weight. Use a chain that is closer to the posterior, or none"
    ]


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
