"""The driver `error_bound`: a model, a chain and a functional to a bound of the error."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import Scalar
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._exact import GridPosterior
from retrodict._expectations import (
    AbstractFunctional,
    check_chain,
    check_model,
    series_of_chain,
)
from retrodict._model import StateSpaceModel, unwrap
from retrodict.bounds import theorems, wasserstein
from retrodict.bounds.comparison import (
    CONFIDENCE,
    Basis,
    Comparison,
    Declined,
)
from retrodict.bounds.functional_classes import AnyBounded, AnyLipschitz
from retrodict.bounds.theorems import BoundValue
from retrodict.particles import ParticlePosterior

Method: TypeAlias = Literal[
    "exact",
    "wasserstein_phi",
    "wasserstein_b",
    "wasserstein_q",
    "wasserstein_a",
    "total_variation",
    "elbo_gap",
    "hoeffding",
    "pinsker",
    "score",
    "estimate",
]


class ErrorBound(eqx.Module):
    """A bound of the error of an expectation under a chain.

    Attributes:
        value: the bound of |E_q h − E h|; of the largest entry if the functional has several.
        per_step: the contribution of each time. Contributions to a computed or estimated error are
            signed; those to a bound sum to its value.
        rigorous: whether a theorem, evaluated in closed form, proves that the error is not larger,
            up to rounding and given the constants that the functional declares. False for values
            from a grid, whose error is estimated and whose box may miss part of the posterior; for
            means over sampled paths; and for estimates.
        rests_on: the assumptions, in words.
        method: how it was obtained.
        error: the signed error, with the structure of the functional, where it is known.
        standard_error: the standard error of a Monte Carlo value; otherwise zero.
        confidence: the nominal probability that the error is not larger: 1 for closed forms, and
            for a grid up to its error; 0.9987 for a mean over sampled paths plus three standard
            errors, if that mean is close to normal; `None` for an estimate, which is not a bound.
        considered: the values of all methods that applied.
        declined: pairs of a method that did not apply and the reason.
    """

    value: Scalar
    per_step: Float[Array, "time"]
    rigorous: bool = eqx.field(static=True)
    rests_on: str = eqx.field(static=True)
    method: Method = eqx.field(static=True)
    error: PyTree
    standard_error: Scalar
    confidence: float | None = eqx.field(static=True)
    considered: dict[str, Scalar]
    declined: tuple[tuple[str, str], ...] = eqx.field(static=True)


def error_bound(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    ys: Any,
    functional: AbstractFunctional | AnyLipschitz | AnyBounded,
    data: PyTree = None,
    *,
    reference: GridPosterior | ParticlePosterior | None = None,
    method: Method | Literal["auto"] = "auto",
    key: Any = None,
    num_samples: int = 1000,
    window: int = 32,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> ErrorBound:
    """Bound the error of the expectation E_q[h_0(x_0) + Σ_{k≥1} h_k(x_{k-1}, x_k)] of a chain.

    Tries every method that applies to the model, the chain and the functional, and returns the
    sharpest of the most trustworthy ones: closed forms (`rigorous`), then values from a grid, then
    means over sampled paths. A smaller value of a less trustworthy method is listed in
    `considered` and never returned in its place. The methods:

    - `"exact"`: the error itself, of a quadratic functional of a linear-Gaussian model, or up to
      grid error with a `GridPosterior` as reference;
    - `"wasserstein_phi"`, `"wasserstein_b"`, `"wasserstein_q"`, `"wasserstein_a"`: Theorem 4, for
      Lipschitz functionals of a linear-Gaussian model; the first also with a grid;
    - `"score"`: Theorem 5 without the posterior, for log-concave models and Lipschitz functionals.
      It is a mean over sampled paths and needs a key;
    - `"elbo_gap"`: Theorem 5 with the gap to an evidence that is known, exactly or by a grid; with
      a grid the ELBO is a mean over sampled paths;
    - `"total_variation"`: Theorem 1's S2φ on a grid in one dimension, for bounded functionals;
    - `"hoeffding"`, `"pinsker"`: Theorem 3 and Pinsker's inequality, for bounded functionals where
      the evidence is known.

    If none applies, the result is an `"estimate"` by particles, which is not a bound.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> def model(weight):
        ...     return rd.StateSpaceModel(
        ...         prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...         transition=rd.LinearGaussianKernel(
        ...             weight * jnp.eye(1), jnp.zeros(1), jnp.eye(1)
        ...         ),
        ...         emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     )
        >>> xs, ys = model(0.9).simulate(jax.random.key(0), num_times=50)
        >>> chain = rd.kalman_smoother(model(0.8), ys).chain
        >>> bound = rd.error_bound(model(0.9), chain, ys, rd.bounds.AnyLipschitz())
        >>> exact = rd.error_bound(model(0.9), chain, ys, rd.StateSum())
        >>> exact.method, bool(exact.value <= bound.value), bound.rigorous
        ('exact', True, True)

    Args:
        model: the model of the data.
        chain: the law of paths whose error is bounded.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        functional: the functional of the expectation. It may declare Lipschitz constants and
            oscillations, which are not checked. Or a class of functionals:
            `AnyLipschitz()`, `AnyBounded()`.
        data: a pytree with one row per time step, which the functional reads; by default the
            observations for `LogJoint` and `Score`.
        reference: the exact posterior on a grid, or paths of a particle smoother.
        method: one method by name, or `"auto"` for the sharpest.
        key: a typed key, for methods that draw.
        num_samples: the number of paths to draw.
        window: the number of gains in a product before products are bounded by products of norms;
            larger is sharper, and any value is rigorous.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist.

    Raises:
        ValueError: if the named method does not apply, or if no method applies and no estimate can
            be taken; the message has the reasons.
    """
    check_chain(chain, "error_bound")
    model = unwrap(model)
    check_model(model, chain, "error_bound")
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs, length=length)
    comparison = Comparison(
        model, chain, series, functional, data, reference, key, num_samples, window
    )
    if method != "auto" and method not in _METHODS:
        raise ValueError(
            f"error_bound expects method 'auto' or one of {get_args(Method)}, got {method!r}."
        )
    closed_forms = comparison.linear_gaussian and isinstance(comparison.chain, LinearGaussianChain)
    results: dict[str, BoundValue] = {}
    declined: dict[str, str] = {}
    for name in _METHODS if method == "auto" else [method]:
        # An exact error needs no bound beside it, unless it comes from a grid and other methods
        # have closed forms. An estimate is the last resort.
        if results and (
            name == "estimate"
            or ("exact" in results and (_rank(results["exact"]) == 0 or not closed_forms))
        ):
            break
        try:
            result = _METHODS[name](comparison)
            if not bool(jnp.isfinite(result.value)):
                raise Declined(f"its value is {float(result.value)}")
            results[name] = result
        except Declined as reason:
            declined[name] = str(reason)
    if not results and method != "auto":
        raise ValueError(f"The method {method!r} does not apply here: {declined[method]}.")
    if not results:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in declined.items())
        raise ValueError(f"No bound applies, and no estimate could be taken:\n{reasons}")
    best: Any = min(results, key=lambda name: (_rank(results[name]), float(results[name].value)))
    result = results[best]
    return ErrorBound(
        value=result.value,
        per_step=result.per_step,
        rigorous=result.basis == "closed form",
        rests_on=result.rests_on,
        method=best,
        error=result.error,
        standard_error=jnp.asarray(result.standard_error, result.value.dtype),
        confidence={"samples": CONFIDENCE, "particles": None}.get(result.basis, 1.0),
        considered={name: result.value for name, result in results.items()},
        declined=tuple(declined.items()),
    )


def _rank(result: BoundValue) -> int:
    """Return the rank of a value by trust, 0 first: a sharper but weaker bound may be wrong."""
    return get_args(Basis).index(result.basis)


# In the order in which they are tried: an exact error first, an estimate last.
_METHODS: dict[str, Callable[[Comparison], BoundValue]] = {
    "exact": theorems.exact,
    "wasserstein_phi": theorems.wasserstein_phi,
    "wasserstein_b": theorems.wasserstein_by(wasserstein.backward),
    "wasserstein_q": theorems.wasserstein_by(wasserstein.forward),
    "wasserstein_a": theorems.wasserstein_by(wasserstein.auxiliary),
    "total_variation": theorems.total_variation,
    "elbo_gap": theorems.elbo_gap,
    "hoeffding": theorems.hoeffding,
    "pinsker": theorems.pinsker,
    "score": theorems.score,
    "estimate": theorems.estimate_by_particles,
}
