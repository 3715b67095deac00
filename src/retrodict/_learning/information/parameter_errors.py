"""The driver: a model at a maximum of its likelihood, and data, to standard errors."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from retrodict._chains import AbstractBackwardChain
from retrodict._exact import Grid, check_linear_gaussian
from retrodict._expectations import check_chain, check_model, series_of_chain
from retrodict._learning.dataset import batch_for, num_series, take
from retrodict._learning.information.coordinates import Coordinates, coordinates_of
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

MOST = 200
"""How many parameters an information matrix is computed for."""

FEWEST_REPLICATES = 4
"""From how many replicates on their spread says something."""

SURE = 4.0
"""By how many Monte Carlo standard errors an information is to be above zero before no more
replicates are drawn: standard errors are then known to about an eighth."""

BENEFIT = 2.0
"""How many Monte Carlo standard errors of doubt are in favour of drawing on."""

NEAR = 0.1
"""Up to how many standard errors from a maximum parameters count as being there."""


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
    """Standard errors of learned parameters, from the observed information −∇² log p_θ(y).

    The parameters θ are those that `fit` and `fit_evidence` move, in unconstrained coordinates, at
    a maximum of the likelihood; what is `Frozen` is taken as known. For linear-Gaussian models the
    information is exact, and for models of one or two states with a `grid` exact up to that grid.
    For others it is estimated by Louis' identity (1982),

        −∇² log p_θ(y) = E[−∇² log p_θ(x, y) | y] − Cov(∇ log p_θ(x, y) | y),

    from paths x given the series, drawn by `ffbsi` in independent replicates. Both terms are large
    and nearly equal where the states are mostly hidden, and their difference is then noisy: where
    the data hold a share ρ of what the states would tell, S paths in all give a relative error of
    about √(2/S)/ρ. Monte Carlo standard errors are jackknifed over the replicates. Several series
    are independent, and their information adds up.

    A quantity a(θ) with gradient g has the standard error √(gᵀΣg), Σ the inverse information. Its
    interval has as ends its values at θ ± z Σg / √(gᵀΣg), where scales step in their logarithm, and
    so stays where the quantity can be: a scale's is positive. A scale that was estimated at zero,
    or another parameter at the edge of its domain, has no curvature there and no interval; the
    others are given with it fixed there. An exact information alone tells such a one from noise.

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
        >>> found = rd.parameter_errors(jax.random.key(1), model, ys)
        >>> found.names
        ('emission.bias[0]', 'emission.scale_tril.std[0]')
        >>> bool(found.lower["emission.scale_tril.std"][0] > 0)
        True

    Args:
        key: a typed key; exact information draws nothing.
        model: the model at its maximum, such as `fit_evidence(...).model`.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series; or, for
            the exact information, `SharedSeries`.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: how many rows exist, one integer a series or one for all.
        read: the quantities of interest, a function of the model that returns a pytree of
            arrays; by default the learned parameters themselves, by name. It is given the model
            with its parameters, of which `unwrap` makes arrays.
        level: the probability with which an interval is to cover.
        method: `"exact"`, `"grid"` or `"louis"`; by default exact for linear-Gaussian models, and
            on the grid if there is one.
        grid: points that hold the states at all times, as `grid_smoother` takes them.
        chain: a law of paths from which Louis' identity takes weighted paths, instead of `ffbsi`.
            For one series, and not a long one: weights of whole paths degenerate.
        num_particles: how many particles each filter has.
        num_samples: how many paths each replicate draws.
        num_replicates: how many independent replicates there are.
        most_replicates: if this is more, as many again are drawn, up to this number, as long as
            noise does not let tell whether every direction is identified, and this many could.
        backward: how `ffbsi` draws paths; `RejectionBackward()` makes many of them cheap.

    Returns:
        The information and its inverse, the score, standard errors, intervals, and a status.

    Raises:
        ValueError: if model and data do not fit, or nothing or too much is to be learned.
        TypeError: if an argument is of the wrong kind, or traced.
        FloatingPointError: if a filter fails, or a derivative is not finite.
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
    coordinates = _coordinates(model)
    plain = unwrap(model)
    method = _method(plain, method, chain, grid)
    options = {"mask": mask, "inputs": inputs, "length": length}
    shared = isinstance(ys, SharedSeries)
    batch = (
        _own(plain, ys, method, options)
        if shared
        else batch_for(plain, ys, **options, owner="parameter_errors")
    )

    messages: list[str] = []
    edges: dict[int, float] = {}
    theta = coordinates.theta()
    if method == "exact":
        total = sum_over_processes if shared else np.asarray
        spread = spread_of(batch, total)
        at = raised(np.asarray(theta, np.float64), coordinates, spread)
        moved_in = coordinates.moved(jnp.asarray(at, theta.dtype))
        found_exactly = exact_information(moved_in, batch)
        score, information = (total(np.asarray(x, float)) for x in found_exactly)
        information = (information + information.T) / 2
        scores, informations = None, None
        edges = edges_of(coordinates, at, score, information, spread)
    elif grid is not None:
        found_on_grid = grid_information(coordinates, batch, grid)
        score, information = (np.asarray(x, float) for x in found_on_grid)
        scores, informations = None, None
    else:
        check_densities(plain, "parameter_errors by Louis' identity")
        num_replicates = check_count(num_replicates, "num_replicates")
        if num_replicates < FEWEST_REPLICATES:
            raise ValueError(
                f"parameter_errors expects at least {FEWEST_REPLICATES} replicates, whose spread"
                f" is the Monte Carlo error, got num_replicates={num_replicates}."
            )
        sizes = (check_count(num_particles, "num_particles"), check_count(num_samples, "samples"))
        most = num_replicates if most_replicates is None else most_replicates
        most = check_count(most, "most_replicates")

        def draw(key: PRNGKey) -> tuple[Replicates, list[str]]:
            if chain is None:
                return _from_particles(key, coordinates, batch, sizes, num_replicates, backward)
            return _from_chain(key, coordinates, batch, chain, sizes[1], num_replicates)

        replicates, messages = _until_sure(key, draw, coordinates, most)
        score, information, scores, informations = combine(replicates)
    _refuse_undefined(score, information, coordinates.names)

    raw = np.asarray(theta, np.float64)
    at_edge = np.isin(np.arange(raw.size), list(edges))
    found = inverse(information, raw, informations, _precision(coordinates), fixed=at_edge)
    is_open = found.touches(np.eye(raw.size)) > LEAST_SHARE[informations is None]
    distance = float(np.sqrt(score @ found.covariance @ score))
    poor = bool(messages)
    unidentified = _unidentified(found, coordinates.names)
    moved = _not_at_maximum(distance, found, scores)
    status = (
        "unreliable"
        if poor
        else "not identified"
        if unidentified
        else "not at a maximum"
        if moved
        else "at an edge"
        if edges
        else "fine"
    )
    natural = quantities(coordinates, read, found, informations, level, at_edge)
    return ParameterErrors(
        coordinates.names,
        raw,
        information,
        np.zeros_like(information) if informations is None else jackknife(informations),
        _with_open(found.covariance, is_open, at_edge),
        score,
        np.zeros_like(score) if scores is None else jackknife(scores),
        distance,
        ~is_open & ~at_edge,
        at_edge,
        *natural,
        method,
        status,
        (*messages, *unidentified, *moved, *_at_edges(edges, coordinates.names)),
    )


def _own(
    model: StateSpaceModel, shared: SharedSeries, method: str, options: Mapping[str, Any]
) -> Series:
    """The series of this process, whose information is added to that of the others'."""
    refuse_beside("parameter_errors", "the shared series", **options)
    check_shared(model, shared)
    if method != "exact":
        raise ValueError(
            "parameter_errors adds up the informations of shared series where they are exact, for"
            f" linear-Gaussian models; for the method {method!r} give all series to each process."
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
    if count > MOST:
        raise ValueError(
            f"parameter_errors computes the information of at most {MOST} parameters, got a model"
            f" with {count}. Wrap what is of no interest in Frozen, which takes it as known; the"
            " weights of a network have no standard errors of use."
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
            raise ValueError("A grid is for the method 'grid': leave out the grid, or the others.")
        return "grid"
    if chain is not None:
        check_chain(chain, "parameter_errors")
        if method == "exact":
            raise ValueError("The exact information takes no chain: leave out method or chain.")
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
    """Replicates, twice as many each time, until no direction may owe its sign to noise."""
    replicates, messages = draw(key)
    first = replicates.log_weight.shape[1]
    raw = np.asarray(coordinates.theta(), np.float64)
    rounds = 1
    while not messages and 2 * rounds * first <= most:
        _, information, _, informations = combine(replicates)
        if not np.all(np.isfinite(information)):
            break
        found = inverse(information, raw, informations, _precision(coordinates), SURE)
        if not np.any(np.abs(found.eigenvalues) <= SURE * found.noise):
            break
        if _is_hopeless(found, rounds * first, most):
            break
        for turn in range(rounds, 2 * rounds):
            more, warned = draw(jax.random.fold_in(key, turn))
            messages = messages or warned
            replicates = Replicates(
                *(np.concatenate(pair, axis=1) for pair in zip(replicates, more, strict=True))
            )
        rounds *= 2
    return replicates, messages


def _is_hopeless(found: Inverse, count: int, most: int) -> bool:
    """Whether even all replicates would not tell some direction from noise, by all likelihood.

    Noise falls as one over the root of the replicates. A direction is given the benefit of the
    doubt, two standard errors more information than was seen.
    """
    at_best = np.maximum(found.eigenvalues + BENEFIT * found.noise, 0.0)
    noise_in_the_end = found.noise * np.sqrt(count / most)
    return bool(np.any(at_best < NOISE * noise_in_the_end))


def _from_particles(
    key: PRNGKey,
    coordinates: Coordinates,
    batch: Series,
    sizes: tuple[int, int],
    num_replicates: int,
    backward: AbstractBackwardSampler,
) -> tuple[Replicates, list[str]]:
    keys = jax.random.split(key, (num_series(batch), num_replicates))
    found, status, time = particle_replicates(coordinates, batch, keys, *sizes, backward)
    status, time = np.asarray(status), np.asarray(time)
    for code, at in zip(status.ravel(), time.ravel(), strict=True):
        if code not in (FINE, DEGENERATE):
            refuse_failure("parameter_errors", code, at, True)
    if not np.any(status == DEGENERATE):
        return found, []
    return found, [
        "unreliable: at some time the paths go through fewer than 10 particles, in"
        f" {np.sum(status == DEGENERATE)} of {status.size} replicates. Use more particles"
    ]


def _from_chain(
    key: PRNGKey,
    coordinates: Coordinates,
    batch: Series,
    chain: AbstractBackwardChain,
    num_samples: int,
    num_replicates: int,
) -> tuple[Replicates, list[str]]:
    if num_series(batch) != 1:
        raise ValueError(
            f"A chain stands for one series, and ys holds {num_series(batch)}. Call"
            " parameter_errors for each with its chain and add up the informations, or leave the"
            " chain out."
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
    keys = jax.random.split(key, num_replicates)
    found, raw = weighted_replicates(coordinates, chain, series, keys, num_samples)
    shape = pareto_shape(np.asarray(raw).ravel())
    if shape <= K_HAT_GOOD:
        return found, []
    return found, [
        f"unreliable: the Pareto shape of the weights is {shape:.2f}, above {K_HAT_GOOD}: a few"
        " paths carry most of the weight. Use a chain that is nearer to the posterior, or none"
    ]


def _refuse_undefined(score: np.ndarray, information: np.ndarray, names: tuple[str, ...]) -> None:
    defined = np.isfinite(score) & np.all(np.isfinite(information), axis=1)
    if not np.any(np.isfinite(score)) or not np.all(defined):
        which = ", ".join(np.asarray(names)[~defined][:5])
        raise FloatingPointError(
            f"parameter_errors: the derivatives in {which} are not finite. Check that the model's"
            " densities are twice differentiable at these parameters."
        )


def _unidentified(found: Inverse, names: tuple[str, ...]) -> list[str]:
    """One sentence for each direction along which the information is not above zero."""
    sentences = []
    for direction, value, noise in zip(found.open.T, found.eigenvalues, found.noise, strict=True):
        scaled = direction * found.units
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
            f" below zero, these are not at a maximum of the likelihood: learn on.{doubt}"
        )
    return sentences


def _not_at_maximum(distance: float, found: Inverse, scores: np.ndarray | None) -> list[str]:
    noise = 0.0
    if scores is not None:
        centred = scores - scores.mean(axis=0)
        spread = (len(scores) - 1) / len(scores) * centred.T @ centred
        noise = float(np.sum(found.covariance * spread))
    if distance**2 <= NEAR**2 + 3.0 * noise:
        return []
    return [
        f"not at a maximum: one step of Newton leads {distance:.2g} standard errors from here"
        f" (Monte Carlo error {noise**0.5:.1g}). Standard errors hold at a maximum: learn on"
    ]


def _at_edges(edges: dict[int, float], names: tuple[str, ...]) -> list[str]:
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
