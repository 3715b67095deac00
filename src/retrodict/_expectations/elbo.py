"""The evidence lower bound of a chain under a model."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from retrodict._arrays import Scalar, is_concrete
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._expectations.backward_sampling import BackwardSampling, along_path
from retrodict._expectations.estimators import AbstractEstimator, ClosedForm, Quadrature
from retrodict._expectations.expectation import (
    Estimate,
    average,
    check_chain,
    check_estimator,
    estimate,
)
from retrodict._expectations.functionals import LogJoint
from retrodict._expectations.moments import existing_rows
from retrodict._model import (
    Frozen,
    Series,
    StateSpaceModel,
    check_densities,
    fill_padding,
    prepare_data,
    prepare_length,
    require_model,
    unwrap,
)
from retrodict.distributed import Parallel

DEFAULT_ORDER = 20
"""The order of the default quadrature."""


def elbo(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    ys: Any,
    *,
    estimator: AbstractEstimator | None = None,
    key: Any = None,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    with_standard_error: bool = False,
    parallel: Parallel = False,
) -> Any:
    """Compute the evidence lower bound E_q[log p(x, y) − log q(x)], in nats for the whole series.

    It equals the log-evidence if and only if the chain is the exact posterior; under
    `BackwardSampling` every single path then gives the log-evidence. By quadrature it is an
    approximation of the bound and not a bound.

    Differentiate it by `jax.grad` or `jax.hessian`; under a `LinearGaussianChain`, `jax.jvp` raises
    a `TypeError`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> exact = rd.kalman_smoother(model, ys)
        >>> bool(jnp.isclose(rd.elbo(model, exact.chain, ys), exact.log_evidence, rtol=1e-4))
        True

    Args:
        model: the model p.
        chain: the law q of paths.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        estimator: how the expectation is taken. Under a `LinearGaussianChain` by default
            `ClosedForm()` for a linear-Gaussian model and `Quadrature(20)` for others with one or
            two state dimensions; other chains need `BackwardSampling`.
        key: a typed key, for estimators that draw.
        mask: true where an entry was observed; `True` alone declares that all entries were.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; by default that of the chain.
        with_standard_error: whether to return the standard error as well.
        parallel: whether recursions over time run in O(log n) depth, for long series on
            accelerators, or over the devices of a `time_mesh`; the value is the same to rounding.
            For a `LinearGaussianChain`.

    Returns:
        The bound, or the pair (bound, standard error).

    Raises:
        ValueError: if model, chain and series do not fit, a key is missing, or a scale of the model
            is singular, so that there is no density.
        TypeError: if a term has no closed form and the estimator needs one.
    """
    check_chain(chain, "elbo")
    model = unwrap(model)
    check_model(model, chain, "elbo")
    estimator = _default_estimator(model, chain) if estimator is None else estimator
    check_estimator(estimator, key, with_standard_error, "elbo")
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs, length=length)
    bound = _jitted_estimate(model, chain, series, estimator, key, parallel)
    return tuple(bound) if with_standard_error else bound.value


def elbo_of_series(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    series: Series,
    estimator: AbstractEstimator,
    key: Any,
    parallel: Parallel = False,
) -> Estimate:
    """Compute the bound from validated arguments, inside `jax.jit`.

    Args:
        model: an unwrapped model.
        chain: a chain with as many rows as the series, whose length is used.
        series: a prepared series.
        estimator: how the expectation is taken.
        key: a typed key, or `None` for a deterministic estimator.
        parallel: whether recursions over time are run in O(log n) depth.
    """
    functional = LogJoint(model)
    if isinstance(estimator, BackwardSampling):
        # The mean of log p − log q over paths, in which common variation cancels.
        data, terms = fill_padding(series.rows, existing_rows(chain)), functional.terms()
        density = Frozen(chain).value if estimator.stop_score else chain

        def log_ratio(path: Float[Array, "time state"]) -> Scalar:
            return along_path(terms, chain, path, data) - density.log_prob(path)

        paths = estimator.draw(terms, chain, key, parallel=parallel)
        return average(estimator, lambda group: estimator.over_group(log_ratio, group), paths)
    joint = estimate(chain, functional, series.rows, estimator, key, parallel)
    if not isinstance(chain, LinearGaussianChain):
        raise TypeError(
            f"The entropy of {type(chain).__name__} has no closed form. Use"
            " BackwardSampling(num_samples) with a key."
        )
    return Estimate(joint.value + chain.entropy(), joint.standard_error)


_jitted_estimate = eqx.filter_jit(elbo_of_series)


def _default_estimator(model: StateSpaceModel, chain: AbstractBackwardChain) -> AbstractEstimator:
    if not isinstance(chain, LinearGaussianChain):
        raise ValueError(
            f"The ELBO of a {type(chain).__name__} needs sampled paths. Pass"
            " estimator=BackwardSampling(num_samples) and a key."
        )
    if all(term.quadratic for term in LogJoint(model).terms()):
        return ClosedForm()
    if model.state_dim <= 2:
        return Quadrature(DEFAULT_ORDER)
    raise ValueError(
        f"A nonlinear model with {model.state_dim} state dimensions has no default estimator. Pass"
        " estimator=RaoBlackwellised(num_samples) or BackwardSampling(num_samples) and a key."
    )


def common_length(chain: Any, length: Any) -> Any:
    """Return the length of the chain, refused if `length` is known to differ from it."""
    chain_length = getattr(chain, "length", None)
    length = prepare_length(length, chain.num_times)
    if length is None:
        return chain_length
    if chain_length is None:
        if is_concrete(length) and int(length) == chain.num_times:
            return None
        raise ValueError(
            f"length was given, but the chain has {chain.num_times} rows and no padding. Infer it"
            " with the same length, or take chain.prefix(length)."
        )
    known = is_concrete(chain_length) and is_concrete(length)
    if known and int(chain_length) != int(length):
        raise ValueError(
            f"length must be that of the chain, {int(chain_length)}, got {int(length)}."
        )
    return chain_length


def series_of_chain(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Series:
    """Validate a series against an unwrapped model and the rows and length of a chain."""
    length = common_length(chain, length)
    series = prepare_data(model, ys, mask=mask, inputs=inputs, length=length)
    if series.num_times != chain.num_times:
        raise ValueError(
            f"ys must have as many rows as the chain, {chain.num_times}, got {series.num_times}."
        )
    return series


def check_model(
    model: Any, chain: AbstractBackwardChain, owner: str, *, with_densities: bool = True
) -> None:
    """Refuse a model that does not fit the chain, or has a known singular scale."""
    require_model(model, owner)
    if model.state_dim != chain.state_dim:
        raise ValueError(
            f"The model has {model.state_dim} state dimensions, and the chain {chain.state_dim}."
        )
    if with_densities:
        check_densities(model, owner)
