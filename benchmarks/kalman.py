"""Kalman workloads: one linear-Gaussian problem, and the call of each library.

Every library gets the same arrays, as arguments of the compiled function and not as constants. Each
returns the log-evidence with the smoothed means and covariances (as Cholesky factors where the
library has those), or the gradient of the log-evidence in every parameter. Peers are imported only
in the function that calls them.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from measure import Task

DECAY, NOISE = 0.9, 0.3


class Problem(NamedTuple):
    """Stationary model with its series.

    The prior is the stationary law of the transition, so that libraries whose first transition
    precedes the first observation need no special first step.
    """

    weight: Any
    noise: Any  # Cholesky factors, here and below
    design: Any
    obs_noise: Any
    prior: Any
    ys: Any  # (series, time, obs), or without the first axis for one series
    mask: Any  # like ys; None if everything was seen


class Program(NamedTuple):
    """Function to compile, its arguments, and a reader of its result as named arrays.

    The last argument holds the observations. It alone has an axis of series, if there are several.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    read: Callable[[Any], dict[str, Any]]


class Prepared(NamedTuple):
    """Call that is ready to be timed; `answer` is its result, for comparison."""

    call: Callable[[], object]
    compile_s: float | None
    answer: dict[str, Any]
    facts: dict[str, float]


def problem(task: Task) -> Problem:
    """Draw a model and its series, the same for every library."""
    d, m, n = task.state_dim, task.obs_dim, task.num_times
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    design = rng.normal(size=(m, d))
    obs_noise = 0.5 * np.eye(m) + 0.1 * np.tril(rng.normal(size=(m, m)), -1)
    prior = NOISE / np.sqrt(1 - DECAY**2) * np.eye(d)
    weight = DECAY * rotation

    xs = NOISE * rng.normal(size=(n, task.num_series, d))
    xs[0] *= prior[0, 0] / NOISE
    for before, after in zip(xs[:-1], xs[1:], strict=True):
        after += before @ weight.T
    ys = xs @ design.T + rng.normal(size=(n, task.num_series, m)) @ obs_noise.T
    ys = np.ascontiguousarray(np.swapaxes(ys, 0, 1))
    mask = rng.random(ys.shape) >= task.missing if task.missing else None
    if task.num_series == 1:
        ys, mask = ys[0], None if mask is None else mask[0]
    return Problem(weight, NOISE * np.eye(d), design, obs_noise, prior, ys, mask)


def retrodict_model(given: Problem, dtype: Any = jnp.float64) -> rd.StateSpaceModel:
    """Return the model of the problem."""
    weight, noise, design, obs_noise, prior = (jnp.asarray(a, dtype) for a in given[:5])
    zeros = jnp.zeros(weight.shape[0], dtype)
    return rd.StateSpaceModel(
        prior=rd.Gaussian(zeros, prior),
        transition=rd.LinearGaussianKernel(weight, zeros, noise),
        emission=rd.LinearGaussianKernel(design, jnp.zeros(design.shape[0], dtype), obs_noise),
    )


def retrodict_smoother(given: Problem, task: Task) -> Program:
    def smooth(model: rd.StateSpaceModel, data: tuple[Any, Any]) -> Any:
        ys, mask = data
        mask = True if mask is None else mask  # True promises that nothing is missing
        exact = rd.kalman_smoother(model, ys, mask=mask, parallel=task.parallel)
        marginals = exact.chain.marginals(parallel=task.parallel)
        return exact.log_evidence, marginals.mean, marginals.covariance

    data = jax.tree.map(jnp.asarray, (given.ys, given.mask))
    return Program(smooth, (retrodict_model(given), data), _read_moments)


def retrodict_gradient(given: Problem, task: Task) -> Program:
    def log_evidence(model: rd.StateSpaceModel, ys: Any) -> Any:
        return rd.kalman_smoother(model, ys, mask=True, parallel=task.parallel).log_evidence

    def read(gradient: rd.StateSpaceModel) -> dict[str, Any]:
        transition: Any = gradient.transition
        emission: Any = gradient.emission
        return _named_gradient(gradient.prior.mean, transition, emission)

    arguments = (retrodict_model(given), jnp.asarray(given.ys))
    return Program(jax.grad(log_evidence), arguments, read)


def dynamax_smoother(given: Problem, task: Task) -> Program:
    del task
    model, parameters = _dynamax_model(given)

    def smooth(parameters: Any, ys: Any) -> Any:
        posterior = model.smoother(parameters, ys)
        means, covariances = posterior.smoothed_means, posterior.smoothed_covariances
        return posterior.marginal_loglik, means, covariances

    return Program(smooth, (parameters, jnp.asarray(given.ys)), _read_moments)


def dynamax_gradient(given: Problem, task: Task) -> Program:
    del task
    model, parameters = _dynamax_model(given)

    def read(gradient: Any) -> dict[str, Any]:
        transition = _Affine(gradient.dynamics.weights, gradient.dynamics.bias)
        emission = _Affine(gradient.emissions.weights, gradient.emissions.bias)
        return _named_gradient(gradient.initial.mean, transition, emission)

    function = jax.grad(model.marginal_log_prob)
    return Program(function, (parameters, jnp.asarray(given.ys)), read)


def cuthbert_smoother(given: Problem, task: Task) -> Program:
    del task
    import cuthbert
    from cuthbert.gaussian import kalman

    def smooth(parameters: tuple[Any, ...], ys: Any) -> Any:
        weight, noise, design, obs_noise, prior = parameters
        zeros, obs_zeros = jnp.zeros(weight.shape[0]), jnp.zeros(design.shape[0])

        def dynamics(y: Any) -> Any:
            del y
            return weight, zeros, noise

        def observation(y: Any) -> Any:
            return design, obs_zeros, obs_noise, y

        # Its row 0 is a state before the first observation, which has the same stationary law.
        kalman_filter = kalman.build_filter(zeros, prior, dynamics, observation)
        start = kalman_filter.init_prepare()
        filtered: Any = cuthbert.filter(kalman_filter, ys, start, parallel=False)
        smoother = kalman.build_smoother(dynamics)
        smoothed: Any = cuthbert.smoother(smoother, filtered, parallel=False)
        return filtered.log_normalizing_constant[-1], smoothed.mean, smoothed.chol_cov

    def read(result: Any) -> dict[str, Any]:
        evidence, means, factors = (np.asarray(array) for array in result)
        return _named_moments(evidence, means[1:], np.sum(factors[1:] ** 2, axis=-1))

    parameters = tuple(jnp.asarray(array) for array in given[:5])
    return Program(smooth, (parameters, jnp.asarray(given.ys)), read)


def statsmodels_smoother(given: Problem, task: Task) -> Prepared:
    from statsmodels.tsa.statespace.kalman_smoother import (
        SMOOTHER_STATE,
        SMOOTHER_STATE_COV,
        KalmanSmoother,
    )

    smoother = KalmanSmoother(k_endog=task.obs_dim, k_states=task.state_dim)
    smoother.bind(given.ys.copy())
    smoother["transition"] = given.weight
    smoother["selection"] = np.eye(task.state_dim)
    smoother["state_cov"] = given.noise @ given.noise.T
    smoother["design"] = given.design
    smoother["obs_cov"] = given.obs_noise @ given.obs_noise.T
    smoother.initialize_known(np.zeros(task.state_dim), given.prior @ given.prior.T)

    def call() -> Any:
        # The default would also smooth disturbances and autocovariances.
        return smoother.smooth(smoother_output=SMOOTHER_STATE | SMOOTHER_STATE_COV)

    result = call()
    variances = np.diagonal(result.smoothed_state_cov)
    answer = _named_moments(result.llf, result.smoothed_state.T, variances)
    return Prepared(call, None, answer, {})


PROGRAMS: dict[tuple[str, str], Callable[[Problem, Task], Program]] = {
    ("retrodict", "smoother"): retrodict_smoother,
    ("retrodict", "gradient"): retrodict_gradient,
    ("dynamax", "smoother"): dynamax_smoother,
    ("dynamax", "gradient"): dynamax_gradient,
    ("cuthbert", "smoother"): cuthbert_smoother,
}


def prepare(task: Task) -> Prepared:
    """Compile the call of a task and run it once."""
    if task.library == "statsmodels":
        return _as_json(statsmodels_smoother(problem(task), task))
    if not task.memory:
        return _as_json(_compiled(task)[0])
    # The library, the compiler and a small run set the baseline that a long series adds to.
    _compiled(replace(task, num_times=16))
    before = _peak_bytes()
    prepared, jitted, arguments = _compiled(task)
    for _ in range(2):
        prepared.call()
    peak = _peak_bytes() - before
    counted = jitted.lower(*arguments).compile().memory_analysis()
    facts = {
        "resident_bytes": peak,
        "xla_bytes": counted.argument_size_in_bytes
        + counted.output_size_in_bytes
        + counted.temp_size_in_bytes,
    }
    # So long an answer is not worth sending: the short series are compared elsewhere.
    return prepared._replace(facts=facts, answer={})


def _compiled(task: Task) -> tuple[Prepared, Any, tuple[Any, ...]]:
    function, arguments, read = PROGRAMS[task.library, task.what](problem(task), task)
    if task.num_series > 1:
        function = jax.vmap(function, in_axes=(*(None,) * (len(arguments) - 1), 0))
    jitted = jax.jit(function)

    def call() -> Any:
        return jax.block_until_ready(jitted(*arguments))

    start = time.perf_counter()
    result = call()
    first = time.perf_counter() - start
    start = time.perf_counter()
    call()
    run = time.perf_counter() - start
    return Prepared(call, max(first - run, 0.0), read(result), {}), jitted, arguments


class _Affine(NamedTuple):
    weight: Any
    bias: Any


def _dynamax_model(given: Problem) -> tuple[Any, Any]:
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    weight, noise, design, obs_noise, prior = (jnp.asarray(array) for array in given[:5])
    model = LinearGaussianSSM(weight.shape[0], design.shape[0])
    parameters, _ = model.initialize(
        initial_mean=jnp.zeros(weight.shape[0]),
        initial_covariance=prior @ prior.T,
        dynamics_weights=weight,
        dynamics_covariance=noise @ noise.T,
        emission_weights=design,
        emission_covariance=obs_noise @ obs_noise.T,
    )
    return model, parameters


def _read_moments(result: Any) -> dict[str, Any]:
    evidence, means, covariances = result
    return _named_moments(evidence, means, np.diagonal(covariances, axis1=-2, axis2=-1))


def _named_moments(evidence: Any, means: Any, variances: Any) -> dict[str, Any]:
    return {"log-evidence": evidence, "smoothed means": means, "smoothed variances": variances}


def _named_gradient(prior_mean: Any, transition: Any, emission: Any) -> dict[str, Any]:
    """Return the derivatives in the parameters that all libraries share."""
    return {
        "d/d prior mean": prior_mean,
        "d/d transition weight": transition.weight,
        "d/d transition bias": transition.bias,
        "d/d emission weight": emission.weight,
        "d/d emission bias": emission.bias,
    }


def _as_json(prepared: Prepared) -> Prepared:
    answer = {name: np.asarray(array).tolist() for name, array in prepared.answer.items()}
    return prepared._replace(answer=answer)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
