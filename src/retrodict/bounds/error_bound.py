"""The driver: a model, a chain and a functional to a bound of the error, with what it rests on."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._exact import GridPosterior
from retrodict._expectations import AbstractFunctional
from retrodict._model import StateSpaceModel
from retrodict._types import Scalar
from retrodict.bounds import methods, wasserstein
from retrodict.bounds.estimate import by_particles
from retrodict.bounds.methods import Found
from retrodict.bounds.problem import (
    CONFIDENCE,
    AnyBounded,
    AnyLipschitz,
    Basis,
    Declined,
    Problem,
    prepare,
)
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
    """How far the expectation of a functional under a chain may be from the exact one.

    Attributes:
        value: the bound of |E_q h − E h|; of the largest entry if the functional has several.
        per_step: what each time contributes. Contributions to an error that was computed or
            estimated are signed; those to a bound sum to its value.
        rigorous: whether a theorem, evaluated in closed form, says that the error is not larger,
            up to rounding and given the constants that the functional declares. False for what was
            computed on a grid, whose error is estimated and whose box may miss part of the
            posterior; for means over sampled paths; and for estimates.
        rests_on: what was taken for granted, in words.
        method: how it was obtained.
        error: the signed error itself, with the structure of the functional, where it is known.
        standard_error: of the value, if it was taken by Monte Carlo; zero if not.
        confidence: the nominal probability that the error is not larger: 1 for closed forms, and
            for a grid up to its error; 0.9987 for a mean over sampled paths plus three standard
            errors, if that mean is close to normal; `None` for an estimate, which is not a bound.
        considered: the values of all methods that applied.
        declined: why the others did not, as pairs of a method and a reason.
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
    sharpest of the most trustworthy ones: closed forms (`rigorous`), then what was computed on a
    grid, then means over sampled paths. A smaller value of a less trustworthy method is listed in
    `considered` and never returned in its place. The methods:

    - `"exact"`: the error itself, of a quadratic functional of a linear-Gaussian model, or up to
      grid error with a `GridPosterior` as reference;
    - `"wasserstein_phi"`, `"wasserstein_b"`, `"wasserstein_q"`, `"wasserstein_a"`: Theorem 4, for
      Lipschitz functionals of a linear-Gaussian model; the first also with a grid;
    - `"score"`: Theorem 5 without any truth, for log-concave models and Lipschitz functionals. It
      is a mean over sampled paths and needs a key;
    - `"elbo_gap"`: Theorem 5 with the gap to an evidence that is known, exactly or by a grid; with
      a grid the ELBO is a mean over sampled paths;
    - `"total_variation"`: Theorem 1's S2φ on a grid in one dimension, for bounded functionals;
    - `"hoeffding"`, `"pinsker"`: Theorem 3 and its simpler cousin, for bounded functionals where
      the evidence is known.

    Where none applies it returns an `"estimate"` by particles, which is not a bound and says so.

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
        model: the model that the data come from.
        chain: the law of paths whose error is asked for.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        functional: what the expectation is taken of; it may declare Lipschitz constants and
            oscillations, which are taken at their word. Or a class of functionals:
            `AnyLipschitz()`, `AnyBounded()`.
        data: a pytree with one row a time step, which the functional reads; for `LogJoint` and
            `Score` the observations by themselves.
        reference: the exact posterior on a grid, or paths of a particle smoother.
        method: one method by name, or `"auto"` for the sharpest.
        key: a typed key, for methods that draw.
        num_samples: how many paths they draw.
        window: over how many times products of gains are kept before they are bounded by products
            of norms; larger is sharper, and any is rigorous.
        mask: true where an entry was seen.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: how many rows exist.

    Raises:
        ValueError: if the named method does not apply, or nothing does and no estimate can be
            taken; it says why.
    """
    problem = prepare(
        model,
        chain,
        ys,
        functional,
        data,
        reference,
        key,
        num_samples,
        window,
        mask,
        inputs,
        length,
    )
    if method != "auto":
        if method not in _METHODS:
            raise ValueError(
                f"error_bound expects method 'auto' or one of {get_args(Method)}, got {method!r}."
            )
        try:
            found = _attempt(_METHODS[method], problem)
        except Declined as reason:
            raise ValueError(f"The method {method!r} does not apply here: {reason}.") from None
        return _bound(method, found, {method: found.value}, ())
    closed_forms = problem.linear_gaussian and isinstance(problem.chain, LinearGaussianChain)
    results: dict[str, Found] = {}
    declined: list[tuple[str, str]] = []
    for name, attempt in _METHODS.items():
        # An exact error needs no bound beside it, unless a grid stands for a posterior that other
        # methods have in closed form. An estimate is the last resort.
        if results and (
            name == "estimate"
            or ("exact" in results and (_rank(results["exact"]) == 0 or not closed_forms))
        ):
            break
        try:
            results[name] = _attempt(attempt, problem)
        except Declined as reason:
            declined.append((name, str(reason)))
    if not results:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in declined)
        raise ValueError(f"No bound applies, and no estimate could be taken:\n{reasons}")
    best: Any = min(results, key=lambda name: (_rank(results[name]), float(results[name].value)))
    considered = {name: found.value for name, found in results.items()}
    return _bound(best, results[best], considered, tuple(declined))


def _rank(found: Found) -> int:
    """How far a value can be trusted, 0 first: a sharper bound of a worse kind may be too sharp."""
    return get_args(Basis).index(found.basis)


def _attempt(method: Callable[[Problem], Found], problem: Problem) -> Found:
    """What a method gives, declined if it is no number: the least of several would pick it."""
    found = method(problem)
    if not bool(jnp.isfinite(found.value)):
        raise Declined(f"its value is {float(found.value)}")
    return found


def _bound(method: Any, found: Found, considered: dict, declined: tuple) -> ErrorBound:
    return ErrorBound(
        value=found.value,
        per_step=found.per_step,
        rigorous=found.basis == "closed form",
        rests_on=found.rests_on,
        method=method,
        error=found.error,
        standard_error=jnp.asarray(found.standard_error, found.value.dtype),
        confidence={"samples": CONFIDENCE, "particles": None}.get(found.basis, 1.0),
        considered=considered,
        declined=declined,
    )


# In the order in which they are tried: an exact error first, an estimate last.
_METHODS: dict[str, Callable[[Problem], Found]] = {
    "exact": methods.exact,
    "wasserstein_phi": methods.wasserstein_phi,
    "wasserstein_b": methods.by_reference(wasserstein.backward),
    "wasserstein_q": methods.by_reference(wasserstein.forward),
    "wasserstein_a": methods.by_reference(wasserstein.auxiliary),
    "total_variation": methods.total_variation,
    "elbo_gap": methods.elbo_gap,
    "hoeffding": methods.hoeffding,
    "pinsker": methods.pinsker,
    "score": methods.score,
    "estimate": by_particles,
}
