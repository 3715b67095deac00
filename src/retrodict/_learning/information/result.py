"""An observed information, its inverse, and standard errors and intervals of quantities."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.special import ndtri
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._learning.coordinates import ModelCoordinates
from retrodict._model import StateSpaceModel
from retrodict._numerics import in_parts

Read = Callable[[StateSpaceModel], PyTree]

MAX_OPEN_SHARE = 1e-6
"""The largest share in unidentified directions of a parameter that is identified."""

MAX_OPEN_SHARE_ESTIMATED = 1e-2
"""The same for an estimated information, whose directions are themselves uncertain."""

NOISE = 3.0
"""The number of Monte Carlo standard errors by which an eigenvalue must exceed zero."""

QUANTITIES_AT_ONCE = 64
"""The number of interval ends that are computed at once."""


class ParameterErrors(eqx.Module):
    """The result of `parameter_errors`.

    Arrays with an axis `parameter` are in unconstrained coordinates θ, in the order of `names`;
    pytrees have the structure of the output of `read`, and are on the natural scale.

    Example:
        >>> import jax, retrodict as rd
        >>> model = rd.models.local_level(prior_scale=1.0)
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=100)
        >>> errors = rd.parameter_errors(jax.random.key(1), model, ys)
        >>> errors.method, errors.theta.shape
        ('exact', (2,))
        >>> bool(errors.standard_error["emission"].scale_tril.std[0] > 0)
        True

    Attributes:
        names: the name of each coordinate of θ, such as `"transition.weight[0,0]"`.
        theta: the coordinates of the model.
        information: the observed information −∇² log p_θ(y).
        information_error: its Monte Carlo standard error; zero if it is exact.
        covariance: its inverse. For parameters that the data do not identify, infinite on the
            diagonal and NaN off it; NaN for those at an edge, at which they are fixed.
        score: the gradient ∇ log p_θ(y), which is zero at a maximum.
        score_error: its Monte Carlo standard error; zero if it is exact.
        distance: √(∇ᵀ covariance ∇), the length of a Newton step to the maximum, in standard
            errors. A few tenths are of no consequence.
        identified: whether the data identify each parameter; false at an edge.
        at_edge: whether a parameter is at the edge of its domain, such as a scale of zero.
        value: the quantities at the model.
        standard_error: their standard errors, by the delta method; infinite if not identified, NaN
            if they depend on parameters at an edge only.
        monte_carlo_error: the Monte Carlo standard error of `standard_error`; zero if it is exact.
        lower: the lower ends of their intervals; NaN if not identified, or at an edge.
        upper: the upper ends.
        method: `"exact"`, `"grid"` or `"louis"`.
        status: `"fine"`, `"at an edge"`, `"not identified"`, `"not at a maximum"`, or
            `"unreliable"` if the paths are too degenerate.
        messages: the reasons for the status; empty if it is `"fine"`.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    theta: Float[np.ndarray, "parameter"]
    information: Float[np.ndarray, "parameter parameter"]
    information_error: Float[np.ndarray, "parameter parameter"]
    covariance: Float[np.ndarray, "parameter parameter"]
    score: Float[np.ndarray, "parameter"]
    score_error: Float[np.ndarray, "parameter"]
    distance: float
    identified: Bool[np.ndarray, "parameter"]
    at_edge: Bool[np.ndarray, "parameter"]
    value: PyTree
    standard_error: PyTree
    monte_carlo_error: PyTree
    lower: PyTree
    upper: PyTree
    method: Literal["exact", "grid", "louis"] = eqx.field(static=True)
    status: Literal["fine", "at an edge", "not identified", "not at a maximum", "unreliable"] = (
        eqx.field(static=True)
    )
    messages: tuple[str, ...] = eqx.field(static=True)


class Information(NamedTuple):
    """An observed information, and what qualifies it.

    Attributes:
        score: the gradient of the log-likelihood.
        information: minus its Hessian.
        scores: scores with one replicate left out; `None` if exact.
        informations: informations with one replicate left out; `None` if exact.
        edges: the parameters at an edge of their domain, and the edge.
        warnings: why the replicates are unreliable.
    """

    score: Float[np.ndarray, "parameter"]
    information: Float[np.ndarray, "parameter parameter"]
    scores: Float[np.ndarray, "replicate parameter"] | None = None
    informations: Float[np.ndarray, "replicate parameter parameter"] | None = None
    edges: Mapping[int, float] = {}
    warnings: Sequence[str] = ()

    @property
    def max_open_share(self) -> float:
        """The largest share in unidentified directions of a parameter that is identified."""
        return MAX_OPEN_SHARE if self.informations is None else MAX_OPEN_SHARE_ESTIMATED


class Inverse(NamedTuple):
    """The inverse of an information on the directions that the data identify.

    Attributes:
        covariance: the inverse there, and zero on the others.
        units: the unit of each parameter in which its information is one; zero at an edge.
        open: orthonormal directions that are not identified, in these units.
        eigenvalues: the information along these directions, in these units.
        noise: the Monte Carlo standard errors of the eigenvalues.
    """

    covariance: Float[np.ndarray, "parameter parameter"]
    units: Float[np.ndarray, "parameter"]
    open: Float[np.ndarray, "parameter direction"]
    eigenvalues: Float[np.ndarray, "direction"]
    noise: Float[np.ndarray, "direction"]

    def touches(self, slopes: Float[np.ndarray, "quantity parameter"]) -> np.ndarray:
        """Return the share of each gradient in the open directions."""
        scaled = slopes * self.units[None]
        squares = np.sum(scaled**2, axis=1)
        return np.sum((scaled @ self.open) ** 2, axis=1) / np.where(squares > 0, squares, 1.0)


def inverse(
    estimate: Information, theta: Float[Array, "parameter"], noise_level: float = NOISE
) -> Inverse:
    """Invert an information on the directions that the data identify.

    Parameters at an edge are taken as known: the block of the others is inverted.

    Args:
        estimate: the information.
        theta: the parameters, in the floating-point type in which it was computed.
        noise_level: the number of Monte Carlo standard errors by which an eigenvalue must exceed
            zero.
    """
    free = np.setdiff1d(np.arange(theta.size), list(estimate.edges)).astype(int)
    block = np.ix_(free, free)
    information, precision = estimate.information[block], float(jnp.finfo(theta.dtype).eps)
    # Below this, moving a parameter by orders of its own size has no visible effect.
    least = precision**0.75 / np.maximum(1.0, np.asarray(theta, np.float64)[free] ** 2)
    units = 1.0 / np.sqrt(np.maximum(np.abs(np.diagonal(information)), least))
    eigenvalues, vectors = np.linalg.eigh(information * units[:, None] * units[None])
    noise = np.zeros_like(eigenvalues)
    if estimate.informations is not None:
        within = estimate.informations[:, *block] * units[:, None] * units[None]
        noise = jackknife(np.diagonal(vectors.T @ within @ vectors, axis1=1, axis2=2))
    identified = eigenvalues > np.maximum(np.sqrt(precision), noise_level * noise)
    basis = units[:, None] * vectors[:, identified]
    others = ~identified
    places = np.eye(theta.size)[:, free]
    return Inverse(
        places @ ((basis / eigenvalues[identified]) @ basis.T) @ places.T,
        places @ units,
        places @ vectors[:, others],
        eigenvalues[others],
        noise[others],
    )


def jackknife(values: Float[np.ndarray, "replicate ..."]) -> np.ndarray:
    """Return the standard error of a statistic from its values with one replicate left out."""
    return np.sqrt((len(values) - 1) * np.var(values, axis=0))


def quantities(
    coordinates: ModelCoordinates,
    read: Read | None,
    inverted: Inverse,
    estimate: Information,
    level: float,
) -> dict[str, PyTree]:
    """Return the fields of `ParameterErrors` on the natural scale.

    The ends of the interval of a quantity with gradient g are its values at θ ± z Σg / √(gᵀΣg), the
    points of the ellipsoid θ'Σ⁻¹θ' ≤ z² at which it is extreme to first order. Scales among the θ
    step in their logarithm. For a function of a single coordinate these are
    its values at the ends of that coordinate's interval.
    """
    theta, edges = coordinates.theta(), list(estimate.edges)
    value, restore = ravel_pytree(_quantities_at(coordinates, read, theta))
    slopes = np.asarray(_slopes(coordinates, read, theta), np.float64)
    errors = _errors(slopes, inverted.covariance)
    loose = inverted.touches(slopes) > estimate.max_open_share
    edge = np.zeros(errors.shape, bool)
    if edges:
        # Derivatives in parameters at an edge vanish there: they are taken in the middle instead.
        middle = _slopes(coordinates, read, theta.at[np.asarray(edges)].set(0.0))
        others = np.any(np.delete(slopes, edges, axis=1) != 0, axis=1)
        edge = np.any(np.asarray(middle)[:, edges] != 0, axis=1) & ~others
    unknown = loose | edge

    steps = slopes @ inverted.covariance / np.where(errors > 0, errors, 1.0)[:, None]
    steps = jnp.asarray(ndtri(jnp.asarray(0.5 + level / 2)) * steps, theta.dtype)
    ends = _ends(coordinates, read, theta, steps)
    span = np.concatenate([np.asarray(ends), np.asarray(value)[:, None]], axis=1)
    monte_carlo = np.zeros_like(errors)
    if estimate.informations is not None:
        left_out = [_errors(slopes, np.linalg.pinv(each)) for each in estimate.informations]
        monte_carlo = np.where(unknown, np.nan, jackknife(np.array(left_out)))
    fields = {
        "value": np.asarray(value),
        "standard_error": np.where(edge, np.nan, np.where(loose, np.inf, errors)),
        "monte_carlo_error": monte_carlo,
        "lower": np.where(unknown, np.nan, span.min(axis=1)),
        "upper": np.where(unknown, np.nan, span.max(axis=1)),
    }
    shaped = {name: restore(jnp.asarray(each, value.dtype)) for name, each in fields.items()}
    return jax.tree.map(np.asarray, shaped)


def _quantities_at(
    coordinates: ModelCoordinates, read: Read | None, theta: Float[Array, "parameter"]
) -> PyTree:
    """Return the quantities of the model at θ, by default the learned parameters."""
    if read is None:
        return coordinates.values_at(theta)
    return jax.tree.map(jnp.asarray, read(coordinates.model_at(theta)))


@eqx.filter_jit
def _slopes(
    coordinates: ModelCoordinates, read: Read | None, theta: Float[Array, "parameter"]
) -> Float[Array, "quantity parameter"]:
    """Return the gradients of all quantities."""
    return jax.jacfwd(lambda at: ravel_pytree(_quantities_at(coordinates, read, at))[0])(theta)


@eqx.filter_jit
def _ends(
    coordinates: ModelCoordinates,
    read: Read | None,
    theta: Float[Array, "parameter"],
    steps: Float[Array, "quantity parameter"],
) -> Float[Array, "quantity 2"]:
    """Return each quantity one step away from θ, on both sides."""

    def one(at: tuple[Array, Array]) -> Array:
        index, step = at
        ends = [coordinates.beside(theta, sign * step) for sign in (-1, 1)]
        sides = [_quantities_at(coordinates, read, end) for end in ends]
        return jnp.stack([ravel_pytree(side)[0][index] for side in sides])

    return in_parts(one, (jnp.arange(steps.shape[0]), steps), QUANTITIES_AT_ONCE)


def _errors(slopes: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    squares = np.einsum("qa,ab,qb->q", slopes, covariance, slopes)
    return np.sqrt(np.maximum(squares, 0.0))
