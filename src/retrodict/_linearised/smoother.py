"""Linearised smoothers: from a model and a series to an approximate posterior."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import Scalar, check_count, check_finite, is_concrete
from retrodict._chains import LinearGaussianChain
from retrodict._linearised.moments import check_moments, mask_rows
from retrodict._linearised.posterior import LinearisedPosterior, diagnose, judge
from retrodict._linearised.recursion import iterate, iterate_from, linearised_filter
from retrodict._linearised.rules import AbstractRule, AbstractSigmaPoints, Taylor, Unscented
from retrodict._model import (
    Gaussian,
    Series,
    StateSpaceModel,
    check_densities,
    is_linear_gaussian,
    prepare_data,
    unwrap,
)


def extended_smoother(
    model: StateSpaceModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> LinearisedPosterior:
    """Smooth a series under a first-order expansion of the model along its own filter.

    The transition is expanded at the mean of each filtering law and the emission at the predicted
    mean,

        E[x_{k+1} | x_k] ≈ f(m) + f'(m) (x_k − m),    E[y_k | x_k] ≈ h(m) + h'(m) (x_k − m),

    each with its covariance at that point. This is the extended Kalman filter, with the
    Rauch–Tung–Striebel smoother as a chain of backward kernels. For non-Gaussian laws the
    conditional mean and covariance are used, which numpyro's distributions define. The smoother is
    fast, and exact for linear-Gaussian models. If a conditional mean is strongly nonlinear within
    the width of a law, use `unscented_smoother` or `iterated_smoother`.

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
        mask: true where an entry was observed; the scalar `True` if no entry is missing.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; the rest is padding.

    Returns:
        The chain, an approximate log-evidence, and whether the smoother is lost.

    Raises:
        TypeError: if the prior or a kernel does not define its mean or its covariance.
        ValueError: if shapes do not match, or the scale of the emission is singular.
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
    """Smooth a series under a sigma-point regression of the model along its own filter.

    Each kernel is replaced by its statistical linear regression with respect to the current
    filtering law or prediction, x ↦ N(A x + b, Ω), where Ω includes the residual of the regression.
    See `Unscented`, `Cubature` and `GaussHermite` for the points. The remaining computation is
    exact: the sigma-point Kalman filter, and its smoother as a chain of backward kernels.

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
        rule: the sigma points, `Unscented()` by default.
        mask: true where an entry was observed; the scalar `True` if no entry is missing.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; the rest is padding.

    Returns:
        The chain, an approximate log-evidence, and whether the smoother is lost.

    Raises:
        TypeError: if the prior or a kernel does not define its mean or its covariance.
        ValueError: if shapes do not match, the scale of the emission is singular, or the rule does
            not support the dimension of the state.
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
    """Smooth a series under a linearisation of the model along its own smoothed marginals.

    The first pass is that of `unscented_smoother`, or of `extended_smoother` for `rule=Taylor()`.
    Each iteration then linearises every kernel with respect to the smoothed law of its state, and
    smooths the linearised model exactly (iterated posterior linearisation, García-Fernández,
    Svensson and Särkkä 2017). The smoothed law is narrower than the filtering law and includes
    later data. With `Taylor()` this is the Gauss–Newton method, and the smoothed means converge to
    the most probable path if the noise does not depend on the state.

    Each iteration linearises all times at once. `changes` in the result holds the largest move of
    the means per iteration. The filtering laws of the chain are those of the final linearised
    model, so `chain.prefix` is not the posterior of fewer rows.

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
        rule: the linearisation rule: `Unscented()` by default, any other sigma points, or
            `Taylor()`.
        num_iterations: the number of iterations after the first pass.
        damping: the fraction of each move of the means that is not applied, in [0, 1). Full steps
            overshoot on many models and then oscillate indefinitely. On four such models, 293 of
            480 runs converged in twenty iterations with 0, and 476 with 0.5.
        mask: true where an entry was observed; the scalar `True` if no entry is missing.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; the rest is padding.

    Returns:
        The chain, an approximate log-evidence, whether the smoother is lost, and how it converged.

    Raises:
        TypeError: if the prior or a kernel does not define its mean or its covariance.
        ValueError: if shapes do not match, the scale of the emission is singular, or the rule does
            not support the dimension of the state.
    """
    rule = Unscented() if rule is None else rule
    if not isinstance(rule, AbstractRule):
        raise TypeError(
            "iterated_smoother expects a rule such as Taylor(), Unscented(), Cubature() or"
            f" GaussHermite(order), got {type(rule).__name__}."
        )
    count = check_count(num_iterations, "num_iterations")
    if is_concrete(damping) and not 0.0 <= damping < 1.0:
        raise ValueError(f"`damping` must be at least 0 and below 1, got {damping}.")
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
    """Run the iterated smoother from each of several paths, to search for other modes.

    Args:
        model: an unwrapped model with moments.
        series: a prepared series.
        paths: the means of the initial laws to linearise at.
        scales: lower factors of the covariances of these laws.
        num_iterations: the number of iterations after the first pass.

    Returns:
        The chains, with a leading axis `start`.
    """
    series = mask_rows(model, series)

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
    """Check the arguments and run a smoother."""
    model = unwrap(model)
    series = prepare_data(model, ys, **data)
    check_moments(model, series)
    _check_parameters(model)
    check_densities(model, "A linearised smoother", ("emission",))
    return _run(model, mask_rows(model, series), rule, num_iterations, damping)


def _check_parameters(model: StateSpaceModel) -> None:
    """Refuse known parameters that are not finite."""
    for name in ("prior", "transition", "emission"):
        for leaf in jax.tree.leaves(eqx.filter(getattr(model, name), eqx.is_inexact_array)):
            check_finite(leaf, f"The {name}'s parameters")


@eqx.filter_jit
def _run(
    model: StateSpaceModel, series: Series, rule: AbstractRule, num_iterations: int, damping: Any
) -> LinearisedPosterior:
    last_pass = linearised_filter(model, series, rule)
    changes = jnp.zeros(0, last_pass.increments.dtype)
    if damping is None:
        chain = last_pass.chain(series)
    else:
        damping = damping.astype(changes.dtype)
        last_pass, chain, changes = iterate(model, series, rule, last_pass, num_iterations, damping)
    diagnostics = diagnose(model, series, last_pass)
    code, time = judge(last_pass, diagnostics, changes, exact=is_linear_gaussian(model))
    evidence = jnp.sum(last_pass.increments)
    return LinearisedPosterior(
        chain, evidence, last_pass.increments, diagnostics, changes, code, time
    )
