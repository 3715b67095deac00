"""The drivers: a model and a series to an approximate posterior."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._chains import LinearGaussianChain
from retrodict._kernels import (
    AbstractLinearGaussianKernel,
    LinearGaussianKernel,
    NonlinearGaussianKernel,
)
from retrodict._laws import Gaussian, scale_diagonal
from retrodict._linearised.diagnosis import diagnose, judge
from retrodict._linearised.moments import check_moments, observed_entries
from retrodict._linearised.posterior import LinearisedPosterior
from retrodict._linearised.recursion import iterate, iterate_from, linearised_filter
from retrodict._linearised.rules import AbstractRule, AbstractSigmaPoints, Taylor, Unscented
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import Scalar
from retrodict._validate import check_count, check_finite, is_concrete


def extended_smoother(
    model: StateSpaceModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> LinearisedPosterior:
    """Smooths a series under a model expanded to first order along its own filter.

    The transition is expanded at the mean of each filtering law and the emission at the predicted
    mean,

        E[x_{k+1} | x_k] ≈ f(m) + f'(m) (x_k − m),    E[y_k | x_k] ≈ h(m) + h'(m) (x_k − m),

    each with the covariance that it has there: the extended Kalman filter, and the
    Rauch–Tung–Striebel smoother as a chain of backward kernels. For laws that are not Gaussian the
    conditional mean and covariance are used, which numpyro's distributions have. It is quick, and
    exact for linear-Gaussian models; where a mean bends within the width of a law, take
    `unscented_smoother` or `iterated_smoother`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(
        ...         0.9 * jnp.eye(1), jnp.zeros(1), 0.4 * jnp.eye(1)
        ...     ),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.1 * jnp.ones(1))),
        ... )
        >>> _, ys = model.simulate(jax.random.key(0), num_times=50)
        >>> posterior = rd.extended_smoother(model, ys)
        >>> posterior.status, posterior.chain.marginals().mean.shape
        ('ok', (50, 1))

    Args:
        model: a model whose prior and kernels have means and covariances.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        mask: true where an entry was seen; `True` alone promises that everything was.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: how many rows exist; the rest is padding.

    Returns:
        The chain, an approximate log-evidence, and whether the smoother is lost.

    Raises:
        TypeError: if the prior or a kernel does not say what its moments are.
        ValueError: if shapes do not fit, or a scale of the emission is singular.
    """
    return _smooth(model, ys, Taylor(), mask=mask, inputs=inputs, length=length)


def unscented_smoother(
    model: StateSpaceModel,
    ys: Any,
    *,
    rule: AbstractSigmaPoints | None = None,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> LinearisedPosterior:
    """Smooths a series under a model regressed on sigma points along its own filter.

    Each kernel is replaced by its statistical linear regression with respect to the filtering law
    or the prediction at hand, x ↦ N(A x + b, Ω), where Ω includes what the regression leaves; see
    `Unscented`, `Cubature` and `GaussHermite` for the points. What then follows is exact: the
    sigma-point Kalman filter, and its smoother as a chain of backward kernels.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), 0.6 * jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(
        ...         0.95 * jnp.eye(1), jnp.zeros(1), 0.2 * jnp.eye(1)
        ...     ),
        ...     emission=rd.NonlinearGaussianKernel(jnp.square, rd.Diagonal(0.1 * jnp.ones(1))),
        ... )
        >>> _, ys = model.simulate(jax.random.key(0), num_times=50)
        >>> rd.unscented_smoother(model, ys).status  # x and -x explain y = x² equally well
        'lost'

    Args:
        model: a model whose prior and kernels have means and covariances.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        rule: the points, `Unscented()` by default.
        mask: true where an entry was seen; `True` alone promises that everything was.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: how many rows exist; the rest is padding.

    Returns:
        The chain, an approximate log-evidence, and whether the smoother is lost.

    Raises:
        TypeError: if the prior or a kernel does not say what its moments are.
        ValueError: if shapes do not fit, a scale of the emission is singular, or the points do not
            fit the dimension of the state.
    """
    rule = Unscented() if rule is None else rule
    if not isinstance(rule, AbstractSigmaPoints):
        raise TypeError(
            "unscented_smoother expects sigma points as its rule, such as Unscented(), Cubature()"
            f" or GaussHermite(order), got {type(rule).__name__}. For Taylor() call"
            " extended_smoother."
        )
    return _smooth(model, ys, rule, mask=mask, inputs=inputs, length=length)


def iterated_smoother(
    model: StateSpaceModel,
    ys: Any,
    *,
    rule: AbstractRule | None = None,
    num_iterations: int = 20,
    damping: float = 0.5,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> LinearisedPosterior:
    """Smooths a series under a model linearised along its own smoothed marginals.

    After a first pass as by `unscented_smoother`, or `extended_smoother` for `rule=Taylor()`, every
    kernel is linearised anew with respect to the smoothed law of its state, which is narrower than
    the filter's and knows what came after; that model is smoothed exactly, and so on (iterated
    posterior linearisation, García-Fernández, Svensson and Särkkä 2017). With `Taylor()` this is
    the Gauss–Newton method, and the smoothed means converge to the most probable path if the noise
    does not depend on the state.

    Linearisations of all times are done at once; `changes` of the result says how far each
    iteration moved the means. In the chain the filtering laws are those of the model as linearised
    in the end, so that `chain.prefix` is not the posterior of fewer rows.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(
        ...         0.9 * jnp.eye(1), jnp.zeros(1), 0.4 * jnp.eye(1)
        ...     ),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.1 * jnp.ones(1))),
        ... )
        >>> _, ys = model.simulate(jax.random.key(0), num_times=50)
        >>> posterior = rd.iterated_smoother(model, ys)
        >>> posterior.status, bool(posterior.changes[-1] < 0.01)
        ('ok', True)

    Args:
        model: a model whose prior and kernels have means and covariances.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        rule: how kernels are linearised: `Unscented()` by default, any other sigma points, or
            `Taylor()`.
        num_iterations: how often to linearise anew after the first pass.
        damping: what share of each move of the means is held back, from 0 to below 1. Full steps
            overshoot on many models and then swing for ever: on four of them 293 of 480 runs
            converged in twenty iterations with 0, and 476 with 0.5.
        mask: true where an entry was seen; `True` alone promises that everything was.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: how many rows exist; the rest is padding.

    Returns:
        The chain, an approximate log-evidence, whether the smoother is lost, and how it converged.

    Raises:
        TypeError: if the prior or a kernel does not say what its moments are.
        ValueError: if shapes do not fit, a scale of the emission is singular, or the points do not
            fit the dimension of the state.
    """
    rule = Unscented() if rule is None else rule
    if not isinstance(rule, AbstractRule):
        raise TypeError(
            "iterated_smoother expects a rule such as Taylor(), Unscented(), Cubature() or"
            f" GaussHermite(order), got {type(rule).__name__}."
        )
    count = check_count(num_iterations, "num_iterations")
    if is_concrete(damping) and not 0.0 <= damping < 1.0:
        raise ValueError(f"damping must lie between 0 and below 1, got {damping}.")
    return _smooth(
        model, ys, rule, count, jnp.asarray(damping), mask=mask, inputs=inputs, length=length
    )


@eqx.filter_jit
def smooth_from_paths(
    model: StateSpaceModel,
    series: Series,
    paths: Float[Array, "start time state"],
    scales: Float[Array, "time state state"],
    num_iterations: int = 30,
) -> LinearGaussianChain:
    """Run the iterated smoother from each of several paths, to look for other modes.

    Args:
        model: an unwrapped model with moments.
        series: a prepared series.
        paths: the means to linearise at first.
        scales: lower factors of the covariances to linearise with first.
        num_iterations: how often to linearise anew.

    Returns:
        The chains, with a leading axis for the starts.
    """
    series = Series(series.ys, observed_entries(model, series), series.inputs, series.length)

    def one(path: Float[Array, "time state"]) -> LinearGaussianChain:
        nominal = jax.vmap(Gaussian)(path, scales)
        half = jnp.asarray(0.5, path.dtype)
        return iterate_from(model, series, Unscented(), nominal, num_iterations, half)

    return jax.vmap(one)(paths)


def _smooth(
    model: StateSpaceModel,
    ys: Any,
    rule: AbstractRule,
    num_iterations: int = 0,
    damping: Scalar | None = None,
    **data: Any,
) -> LinearisedPosterior:
    """Checks what was given, once for all smoothers, and runs."""
    model = unwrap(model)
    series = prepare_data(model, ys, **data)
    check_moments(model, series)
    _check_values(model)
    series = Series(series.ys, observed_entries(model, series), series.inputs, series.length)
    return _run(model, series, rule, num_iterations, damping)


@eqx.filter_jit
def _run(
    model: StateSpaceModel,
    series: Series,
    rule: AbstractRule,
    num_iterations: int,
    damping: Scalar | None,
) -> LinearisedPosterior:
    found = linearised_filter(model, series, rule)
    changes = jnp.zeros(0, found.increments.dtype)
    if damping is None:
        chain = found.chain(series)
    else:
        damping = damping.astype(changes.dtype)
        found, chain, changes = iterate(model, series, rule, found, num_iterations, damping)
    measured = diagnose(model, series, found)
    exact = isinstance(model.prior, Gaussian) and all(
        isinstance(kernel, AbstractLinearGaussianKernel)
        for kernel in (model.transition, model.emission)
    )
    verdict = judge(found, measured, changes, exact=exact)
    return LinearisedPosterior(
        chain=chain,
        log_evidence=jnp.sum(found.increments),
        log_evidence_increments=found.increments,
        diagnostics=measured,
        changes=changes,
        code=verdict.code,
        status_time=verdict.time,
    )


def _check_values(model: StateSpaceModel) -> None:
    """Refuses values that can only give NaN, where they are known."""
    for name in ("prior", "transition", "emission"):
        part = getattr(model, name)
        for leaf in jax.tree.leaves(eqx.filter(part, eqx.is_inexact_array)):
            check_finite(leaf, f"The {name}'s parameters")
    kernel = model.emission
    if not isinstance(kernel, (LinearGaussianKernel, NonlinearGaussianKernel)):
        return
    pivots = scale_diagonal(kernel.scale_tril)
    if is_concrete(pivots) and np.any(np.asarray(pivots) <= 0):
        raise ValueError(
            "A linearised smoother expects an emission scale with a positive diagonal, got diagonal"
            f" {np.asarray(pivots)}. An observation without noise has no density: give it a small"
            " one."
        )
