"""Expectations of additive functionals under backward chains."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import check_key, is_concrete
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain, SampledChain
from retrodict._expectations.backward_sampling import BackwardSampling, Paths
from retrodict._expectations.estimators import AbstractEstimator, ClosedForm
from retrodict._expectations.functionals import AbstractFunctional, LogJoint, Score
from retrodict._expectations.moments import existing_rows
from retrodict._model import Series, fill_padding, prepare_rows
from retrodict.distributed import Parallel

_EXACT = ClosedForm()


class Estimate(NamedTuple):
    """A value and its standard error, zero where the value is exact and NaN where unknown."""

    value: PyTree
    standard_error: PyTree


class Marginals(eqx.Module):
    """Means and covariances of states, with a leading axis `time` for several of them.

    Attributes:
        mean: of shape `(time, state)`.
        covariance: of shape `(time, state, state)`.
        mean_standard_error: of the shape of `mean`; zero if it is exact.
        covariance_standard_error: of the shape of `covariance`; zero if it is exact.
    """

    mean: Float[Array, "*time state"]
    covariance: Float[Array, "*time state state"]
    mean_standard_error: Float[Array, "*time state"]
    covariance_standard_error: Float[Array, "*time state state"]

    @classmethod
    def exact(cls, mean: Array, covariance: Array) -> "Marginals":
        """Return moments with standard errors of zero."""
        return cls(mean, covariance, jnp.zeros_like(mean), jnp.zeros_like(covariance))


def expectation(
    chain: AbstractBackwardChain,
    functional: AbstractFunctional,
    data: PyTree = None,
    *,
    estimator: AbstractEstimator = _EXACT,
    key: Any = None,
    with_standard_error: bool = False,
    tolerance: float | None = None,
    max_samples: int = 1_000_000,
    parallel: Parallel = False,
) -> PyTree:
    """Compute E_q[h_0(x_0, data_0) + Σ_{k≥1} h_k(x_{k-1}, x_k, data_k)] under a chain.

    Rows from the length of the chain on contribute exactly zero. The value is differentiable in the
    functional's parameters, the data and the chain: draws are reparameterised.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> chain = rd.LinearGaussianChain.from_arrays(
        ...     jnp.ones((2, 1)), jnp.ones((2, 1, 1)), jnp.ones((1, 1, 1)), jnp.zeros((1, 1)),
        ...     jnp.ones((1, 1, 1)),
        ... )
        >>> rd.expectation(chain, rd.StateSum()).tolist()
        [2.0]

    Args:
        chain: the law of paths.
        functional: the additive functional.
        data: a pytree with one row per time step, which the functional reads; `model.series(ys)`
            for `LogJoint` and `Score`.
        estimator: how the expectation is taken.
        key: a typed key, for estimators that draw.
        with_standard_error: whether to return the standard error as well: zero for exact
            estimators, NaN for a single sample.
        tolerance: the largest accepted standard error: an estimator that draws is run until it is
            reached. Not inside `jax.jit`.
        max_samples: the largest number of paths for a tolerance, per component with `by_component`.
        parallel: whether recursions over time run in O(log n) depth, for long series on
            accelerators, or over the devices of a `time_mesh`; the value is the same to rounding.
            For a `LinearGaussianChain`.

    Returns:
        The value, a pytree of the functional's structure, or the pair (value, standard error).

    Raises:
        TypeError: if a term has no closed form and the estimator needs one.
        ValueError: if the data has the wrong number of rows, a key is missing, a standard error is
            requested of quadrature, whose error is unknown, or a tolerance needs too many paths.
    """
    check_chain(chain, "expectation")
    check_estimator(estimator, key, with_standard_error, "expectation")
    if not isinstance(functional, AbstractFunctional):
        raise TypeError(
            "expectation expects a functional, such as StateSum() or AdditiveFunctional(fn), got"
            f" {type(functional).__name__}."
        )
    _check_tolerance(tolerance)
    data = _check_data(chain, functional, data)

    def run(key: Any) -> Estimate:
        return _estimate(chain, functional, data, estimator, key, parallel)

    result = _within(tolerance, run, estimator, key, max_samples)
    return tuple(result) if with_standard_error else result.value


def marginals(
    chain: AbstractBackwardChain,
    *,
    estimator: AbstractEstimator = _EXACT,
    key: Any = None,
    tolerance: float | None = None,
    max_samples: int = 1_000_000,
    parallel: Parallel = False,
) -> Marginals:
    """Compute the means and covariances of the states, with their standard errors.

    `BackwardSampling` takes any chain; covariances need two paths, or groups of paths that share
    noise, and are NaN for one. Under a `SampledChain` it averages the conditional moments
    E[x_{k-1} | x_k] and Cov[x_{k-1} | x_k] along paths and not the states themselves, which has the
    same mean and a smaller variance (Rao-Blackwell). Other estimators return the closed-form
    moments of a linear-Gaussian chain.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> print(np.array(rd.marginals(chain).mean[:, 0]).round(3))
        [1. 2. 3.]
        >>> options = {"estimator": rd.BackwardSampling(64), "key": jax.random.key(0)}
        >>> sampled = rd.marginals(chain, **options, tolerance=0.05)
        >>> bool(sampled.mean_standard_error.max() < 0.05)
        True

    Args:
        chain: the law of paths.
        estimator: how the moments are taken.
        key: a typed key, for `BackwardSampling`.
        tolerance: the largest accepted standard error of a mean: paths are drawn until it is
            reached. Not inside `jax.jit`.
        max_samples: the largest number of paths for a tolerance, per component with `by_component`.
        parallel: whether recursions over time run in O(log n) depth, for long series on
            accelerators, or over the devices of a `time_mesh`; the value is the same to rounding.
            For a `LinearGaussianChain`.

    Raises:
        TypeError: if the chain has no closed form and the estimator needs one.
        ValueError: if a key is missing, or a tolerance needs too many paths.
    """
    check_chain(chain, "marginals")
    _check_tolerance(tolerance)
    if isinstance(estimator, BackwardSampling):
        check_estimator(estimator, key, False, "marginals")

        def run(key: Any) -> Estimate:
            if isinstance(chain, SampledChain) and not parallel:
                return _conditional_moments(chain, estimator, key)
            return _sample_moments(estimator.draw((), chain, key, parallel=parallel))

        result = _within(tolerance, run, estimator, key, max_samples, lambda errors: errors[0])
        return Marginals(*result.value, *result.standard_error)
    _refuse_unless_estimator(estimator, "marginals")
    if not isinstance(chain, LinearGaussianChain):
        raise TypeError(
            f"The moments of {type(chain).__name__} have no closed form. Pass"
            " estimator=BackwardSampling(num_samples) and a key."
        )
    laws = chain.marginals(parallel=parallel)
    return Marginals.exact(laws.mean, laws.covariance)


def estimate(
    chain: AbstractBackwardChain,
    functional: AbstractFunctional,
    data: PyTree,
    estimator: AbstractEstimator,
    key: Any,
    parallel: Parallel = False,
) -> Estimate:
    """Compute the estimate from validated arguments, inside `jax.jit`.

    The expectation of a score is the gradient of the expected log joint density with the chain held
    fixed, which costs one backward pass and no Hessian of a gradient.
    """
    data = fill_padding(data, existing_rows(chain))
    view = estimator.view(chain, parallel=parallel)
    integrated = LogJoint(functional.model) if isinstance(functional, Score) else functional

    def evaluate(functional: AbstractFunctional, noise: Any) -> PyTree:
        return estimator.evaluate(functional.terms(), view, noise, data)

    def replicate(noise: Any) -> PyTree:
        if isinstance(functional, Score):
            slope = eqx.filter_grad(lambda model: evaluate(LogJoint(model), noise))
            return slope(functional.model)
        return evaluate(functional, noise)

    noise = estimator.draw(integrated.terms(), view, key, parallel=parallel)
    return average(estimator, replicate, noise)


def average(estimator: AbstractEstimator, replicate: Any, noise: Any) -> Estimate:
    """Return the mean of the replicates of an estimator, and its standard error.

    Args:
        estimator: the estimator, which has the number of replicates.
        replicate: the value of one, from its row of noise.
        noise: the result of `estimator.draw`.
    """
    count = estimator.num_replicates
    if count is None:
        value = replicate(noise)
        fill = 0.0 if estimator.error == "none" else jnp.nan
        return Estimate(value, jax.tree.map(lambda leaf: jnp.full_like(leaf, fill), value))
    values = jax.vmap(replicate, axis_size=count)(noise)
    return Estimate(
        jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), values),
        jax.tree.map(_standard_error, values),
    )


def check_chain(chain: Any, owner: str) -> None:
    """Refuse anything but a backward chain."""
    if not isinstance(chain, AbstractBackwardChain):
        hint = " Pass its .chain." if hasattr(chain, "chain") else ""
        raise TypeError(f"{owner} expects a backward chain, got {type(chain).__name__}.{hint}")


def check_estimator(estimator: Any, key: Any, with_standard_error: bool, owner: str) -> None:
    """Refuse anything but an estimator, a missing key, and an unavailable standard error."""
    _refuse_unless_estimator(estimator, owner)
    if estimator.num_replicates is not None:
        if key is None:
            raise ValueError(
                f"{type(estimator).__name__} draws: {owner} needs a key, as from jax.random.key(0)."
            )
        check_key(key, owner)
    if with_standard_error and estimator.error == "unknown":
        raise ValueError(
            f"The error of {type(estimator).__name__} is unknown. For a standard error use"
            " BackwardSampling(num_samples) or RaoBlackwellised(num_samples) with a key."
        )


def _refuse_unless_estimator(estimator: Any, owner: str) -> None:
    if not isinstance(estimator, AbstractEstimator):
        got = estimator if isinstance(estimator, type) else type(estimator)
        raise TypeError(
            f"{owner} expects an estimator, such as ClosedForm() or BackwardSampling(100), got"
            f" {got.__name__}."
        )


def _check_data(
    chain: AbstractBackwardChain, functional: AbstractFunctional, data: PyTree
) -> PyTree:
    if isinstance(functional, (LogJoint, Score)):
        name = type(functional).__name__
        if not isinstance(data, Series):
            raise TypeError(
                f"{name} reads a Series: pass data=model.series(ys), got {type(data).__name__}."
            )
        if functional.model.state_dim != chain.state_dim:
            raise ValueError(
                f"{name} has a model with {functional.model.state_dim} state dimensions, and the"
                f" chain has {chain.state_dim}."
            )
    return prepare_rows(data, chain.num_times)


# Compiled once per shape and functional.
_estimate = eqx.filter_jit(estimate)


@eqx.filter_jit
def _sample_moments(sample: Paths) -> Estimate:
    """Return the moments of weighted paths with a leading axis of replicates."""
    flat = jnp.zeros((*sample.paths.shape, sample.paths.shape[-1]), sample.paths.dtype)
    return _moments_over_paths(sample.paths, flat, sample.weights)


@eqx.filter_jit
def _conditional_moments(chain: SampledChain, estimator: BackwardSampling, key: Any) -> Estimate:
    """Return the moments from the laws that states were drawn from."""
    trace, weights = estimator.trace(chain, key)
    return _moments_over_paths(trace.means, trace.covariances, weights)


def moments_over_paths(
    means: Float[Array, "replicate path time state"],
    covariances: Float[Array, "replicate path time state state"],
    weights: Float[Array, "replicate path"],
) -> Marginals:
    """Return the moments of a mixture of laws, averaged over replicates."""
    moments = _moments_over_paths(means, covariances, weights)
    return Marginals(*moments.value, *moments.standard_error)


def _moments_over_paths(means: Array, covariances: Array, weights: Array) -> Estimate:
    """Return the mean and the covariance of a mixture of laws, averaged over replicates.

    The spread of the means around their estimated mean is smaller than around the true mean, by the
    variance of the estimate. That is estimated from the replicates and added.
    """
    each = jnp.einsum("rp,rptd->rtd", weights, means, precision="highest")
    mean = jnp.mean(each, axis=0)
    shifts = means - mean[None, None]
    products = covariances + shifts[..., :, None] * shifts[..., None, :]
    spreads = jnp.einsum("rp,rptde->rtde", weights, products, precision="highest")
    count = each.shape[0]
    errors = each - mean[None]
    missing = jnp.sum(errors[..., :, None] * errors[..., None, :], axis=0)
    missing = missing / (count * (count - 1) if count > 1 else jnp.nan)
    return Estimate(
        (mean, jnp.mean(spreads, axis=0) + missing),
        (_standard_error(each), _standard_error(spreads)),
    )


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance must be a positive standard error, got {tolerance}.")


def _within(
    tolerance: float | None,
    run: Callable[[Any], Estimate],
    estimator: AbstractEstimator,
    key: Any,
    max_samples: int,
    select: Callable[[PyTree], PyTree] = lambda errors: errors,
) -> Estimate:
    """Return the mean of as many runs of an estimator as a tolerance needs.

    Args:
        tolerance: the largest standard error; `None` for one run.
        run: one run, from a key.
        estimator: the estimator, which has the number of replicates of a run.
        key: a typed key.
        max_samples: the largest total number of paths.
        select: selects the standard errors that must be within the tolerance.
    """
    if tolerance is None or estimator.error == "none":
        return run(key)
    replicates = estimator.num_replicates
    if replicates is None or replicates < 2:
        raise ValueError(
            f"A tolerance needs an estimator that draws two replicates or more, got {estimator}."
        )
    count = getattr(estimator, "num_samples", replicates)
    results = [run(key)]
    while True:
        estimate = _pooled(results)
        error = _largest(select(estimate.standard_error))
        if error <= tolerance:
            return estimate
        # 10% more than the estimated error requires, since it is an estimate itself.
        needed = math.ceil(1.1 * len(results) * (error / tolerance) ** 2)
        if needed * count > max_samples:
            raise ValueError(
                f"A standard error of {tolerance} needs about {needed * count} paths, and"
                f" max_samples is {max_samples}: after {len(results) * count} it is {error:.2g}."
            )
        results += [run(jax.random.fold_in(key, i)) for i in range(len(results), needed)]


def _largest(errors: PyTree) -> float:
    """Return the largest of several standard errors, which must be known and finite."""
    leaves = jax.tree.leaves(errors)
    if not all(is_concrete(leaf) for leaf in leaves):
        raise ValueError("A tolerance is compared with what was drawn: not inside jax.jit.")
    # NaN must not be lost among others, as it would be by the max of Python.
    error = float(np.max([0.0] + [float(jnp.max(leaf)) for leaf in leaves if leaf.size]))
    if not math.isfinite(error):
        raise ValueError(f"The standard error is {error}, and more paths would not lower it.")
    return error


def _pooled(results: list[Estimate]) -> Estimate:
    """Return the mean of several runs, with standard errors added in quadrature."""
    values, errors = zip(*results, strict=True)
    count = len(results)
    return Estimate(
        jax.tree.map(lambda *leaves: sum(leaves) / count, *values),
        jax.tree.map(lambda *leaves: jnp.sqrt(sum(leaf**2 for leaf in leaves)) / count, *errors),
    )


def _standard_error(values: Float[Array, "sample *value"]) -> Float[Array, "*value"]:
    """Return the sample standard deviation over √sample; NaN for a single sample."""
    count = values.shape[0]
    if count == 1:
        return jnp.full_like(values[0], jnp.nan)
    return jnp.std(values, axis=0, ddof=1) / jnp.sqrt(jnp.asarray(count, values.dtype))
