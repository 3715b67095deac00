"""Kalman workloads: one linear-Gaussian problem, and the call of each library.

Every library gets the same arrays, as arguments of the compiled function and not as constants. Each
returns the log-evidence with the smoothed means and covariances (as Cholesky factors where the
library has those), or the gradient of the log-evidence in every parameter. Peers are imported only
in the function that calls them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from measure import Prepared, Task, prepared

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
    rates: Any  # (time, 1), factors of the transition into each row; None if it is constant


class Program(NamedTuple):
    """Function to compile, its arguments, and a reader of its result as named arrays.

    The last argument holds the observations. It alone has an axis of series, if there are several.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    read: Callable[[Any], dict[str, Any]]


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
    rates = 1 + 0.1 * np.sin(np.arange(n))[:, None] if task.varying else None
    for t in range(1, n):
        xs[t] += xs[t - 1] @ (weight.T if rates is None else rates[t] * weight.T)
    ys = xs @ design.T + rng.normal(size=(n, task.num_series, m)) @ obs_noise.T
    ys = np.ascontiguousarray(np.swapaxes(ys, 0, 1))
    mask = rng.random(ys.shape) >= task.missing if task.missing else None
    if task.num_series == 1:
        ys, mask = ys[0], None if mask is None else mask[0]
    return Problem(weight, NOISE * np.eye(d), design, obs_noise, prior, ys, mask, rates)


class ScaledTransition(eqx.Module):
    """The linear-Gaussian transition whose weight is multiplied by the input."""

    weight: Any
    scale_tril: Any

    def __call__(self, rate: Any) -> tuple[Any, Any, Any]:
        return rate * self.weight, jnp.zeros(self.weight.shape[0]), self.scale_tril


def retrodict_model(given: Problem, dtype: Any = jnp.float64) -> rd.StateSpaceModel:
    """Return the model of the problem."""
    weight, noise, design, obs_noise, prior = (jnp.asarray(a, dtype) for a in given[:5])
    zeros = jnp.zeros(weight.shape[0], dtype)
    transition = rd.LinearGaussianKernel(weight, zeros, noise)
    if given.rates is not None:
        transition = rd.VaryingLinearGaussianKernel(ScaledTransition(weight, noise))
    return rd.StateSpaceModel(
        prior=rd.Gaussian(zeros, prior),
        transition=transition,
        emission=rd.LinearGaussianKernel(design, jnp.zeros(design.shape[0], dtype), obs_noise),
    )


def tanh_model(state_dim: int, obs_dim: int, dtype: Any = jnp.float64) -> rd.StateSpaceModel:
    """Return the model of a problem, observed through a hyperbolic tangent."""
    linear = retrodict_model(problem(Task("retrodict", "smoother", state_dim, obs_dim, 2)), dtype)
    design, noise = linear.emission.weight, linear.emission.scale_tril
    emission = rd.NonlinearGaussianKernel(lambda x: jnp.tanh(design @ x), noise)
    return rd.StateSpaceModel(linear.prior, linear.transition, emission)


def retrodict_smoother(given: Problem) -> Program:
    def smooth(model: rd.StateSpaceModel, data: tuple[Any, Any, Any]) -> Any:
        ys, mask, inputs = data
        mask = True if mask is None else mask  # True promises that nothing is missing
        if ys.ndim == 2:
            exact = rd.kalman_smoother(model, ys, mask=mask, inputs=inputs)
            return exact.log_evidence, *moments(exact.chain)
        batch = rd.kalman_smoother_batch(model, ys, mask=mask, inputs=inputs)
        return batch.log_evidence, *batch.map(moments)

    def moments(chain: rd.LinearGaussianChain) -> tuple[Any, Any]:
        marginals = chain.marginals()
        return marginals.mean, marginals.covariance

    data = jax.tree.map(jnp.asarray, (given.ys, given.mask, given.rates))
    return Program(smooth, (retrodict_model(given), data), _read_moments)


def retrodict_gradient(given: Problem) -> Program:
    def log_evidence(model: rd.StateSpaceModel, ys: Any) -> Any:
        return rd.kalman_smoother(model, ys, mask=True).log_evidence

    def read(gradient: rd.StateSpaceModel) -> dict[str, Any]:
        transition: Any = gradient.transition
        emission: Any = gradient.emission
        return _named_gradient(gradient.prior.mean, transition, emission)

    arguments = (retrodict_model(given), jnp.asarray(given.ys))
    return Program(jax.grad(log_evidence), arguments, read)


def dynamax_smoother(given: Problem) -> Program:
    from dynamax.linear_gaussian_ssm import lgssm_smoother

    def smooth(parameters: Any, ys: Any) -> Any:
        posterior = lgssm_smoother(parameters, ys)
        means, covariances = posterior.smoothed_means, posterior.smoothed_covariances
        return posterior.marginal_loglik, means, covariances

    return Program(smooth, (_dynamax_model(given)[1], jnp.asarray(given.ys)), _read_moments)


def dynamax_gradient(given: Problem) -> Program:
    model, parameters = _dynamax_model(given)

    def read(gradient: Any) -> dict[str, Any]:
        transition = _Affine(gradient.dynamics.weights, gradient.dynamics.bias)
        emission = _Affine(gradient.emissions.weights, gradient.emissions.bias)
        return _named_gradient(gradient.initial.mean, transition, emission)

    function = jax.grad(model.marginal_log_prob)
    return Program(function, (parameters, jnp.asarray(given.ys)), read)


def cuthbert_smoother(given: Problem) -> Program:
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


def statsmodels_smoother(given: Problem) -> Prepared:
    """Prepare its smoother; it takes one series after the other."""
    from statsmodels.tsa.statespace.kalman_smoother import (
        SMOOTHER_STATE,
        SMOOTHER_STATE_COV,
        KalmanSmoother,
    )

    obs_dim, state_dim = given.design.shape

    def smoother(ys: Any) -> Any:
        smoother = KalmanSmoother(k_endog=obs_dim, k_states=state_dim)
        smoother.bind(ys.copy())
        smoother["transition"] = given.weight
        smoother["selection"] = np.eye(state_dim)
        smoother["state_cov"] = given.noise @ given.noise.T
        smoother["design"] = given.design
        smoother["obs_cov"] = given.obs_noise @ given.obs_noise.T
        smoother.initialize_known(np.zeros(state_dim), given.prior @ given.prior.T)
        return smoother

    smoothers = [smoother(ys) for ys in given.ys.reshape(-1, *given.ys.shape[-2:])]
    # The default would also smooth disturbances and autocovariances.
    outputs = SMOOTHER_STATE | SMOOTHER_STATE_COV

    def call() -> list[Any]:
        return [each.smooth(smoother_output=outputs) for each in smoothers]

    def read(results: list[Any]) -> dict[str, Any]:
        moments = [
            (each.llf, each.smoothed_state.T, np.moveaxis(each.smoothed_state_cov, -1, 0))
            for each in results
        ]
        arrays = moments[0] if given.ys.ndim == 2 else map(np.stack, zip(*moments, strict=True))
        return _read_moments(arrays)

    return prepared(call, read)


PROGRAMS: dict[tuple[str, str], Callable[[Problem], Program]] = {
    ("retrodict", "smoother"): retrodict_smoother,
    ("retrodict", "gradient"): retrodict_gradient,
    ("dynamax", "smoother"): dynamax_smoother,
    ("dynamax", "gradient"): dynamax_gradient,
    ("cuthbert", "smoother"): cuthbert_smoother,
}


def prepare(task: Task) -> Prepared:
    """Compile the call of a task and run it."""
    given = problem(task)
    if task.library == "statsmodels":
        return statsmodels_smoother(given)
    function, arguments, read = PROGRAMS[task.library, task.what](given)
    if task.num_series > 1 and task.library != "retrodict":  # which has a verb for batches
        function = jax.vmap(function, in_axes=(*(None,) * (len(arguments) - 1), 0))
    jitted = jax.jit(function)
    return prepared(lambda: jax.block_until_ready(jitted(*arguments)), read)


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
    if given.rates is not None:
        weights = given.rates[..., None] * given.weight
        parameters = parameters._replace(dynamics=parameters.dynamics._replace(weights=weights))
    return model, parameters


def _read_moments(result: Any) -> dict[str, Any]:
    evidence, means, covariances = result
    return _named_moments(evidence, means, np.diagonal(covariances, axis1=-2, axis2=-1))


def _named_moments(evidence: Any, means: Any, variances: Any) -> dict[str, Any]:
    """Name the moments, at no more than 1,000 to 2,000 rows of a series, which are sent as text."""
    rows = slice(None, None, max(1, means.shape[-2] // 1000))
    return {
        "log-evidence": evidence,
        "smoothed means": means[..., rows, :],
        "smoothed variances": variances[..., rows, :],
    }


def _named_gradient(prior_mean: Any, transition: Any, emission: Any) -> dict[str, Any]:
    """Return the derivatives in the parameters that all libraries share."""
    return {
        "d/d prior mean": prior_mean,
        "d/d transition weight": transition.weight,
        "d/d transition bias": transition.bias,
        "d/d emission weight": emission.weight,
        "d/d emission bias": emission.bias,
    }
