"""Exact smoothing with one joint Gaussian over all states and observations, in numpy.

The path of states is a linear map of the prior draw and of all noises, its covariance is one
matrix, and smoothing conditions that matrix once. There is no recursion.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import retrodict as rd


class Linear(NamedTuple):
    """A linear-Gaussian model with parameters at every time; transitions lead into times 1..n-1."""

    mean: np.ndarray
    covariance: np.ndarray
    weights: np.ndarray
    biases: np.ndarray
    noises: np.ndarray
    designs: np.ndarray
    shifts: np.ndarray
    errors: np.ndarray


class Posterior(NamedTuple):
    """Means `(time, state)`, the covariance of the stacked path, and the log-evidence."""

    mean: np.ndarray
    covariance: np.ndarray
    log_evidence: float

    def block(self, i: int, j: int) -> np.ndarray:
        """Return the covariance between the states at times i and j."""
        d = self.mean.shape[1]
        return self.covariance[i * d : (i + 1) * d, j * d : (j + 1) * d]

    def pair(self, k: int) -> np.ndarray:
        """Return the joint covariance of the states at times k-1 and k."""
        d = self.mean.shape[1]
        return self.covariance[(k - 1) * d : (k + 1) * d, (k - 1) * d : (k + 1) * d]

    def marginal_covariances(self) -> np.ndarray:
        """Return the covariance of each state, of shape `(time, state, state)`."""
        return np.stack([self.block(k, k) for k in range(len(self.mean))])

    def cross_covariances(self) -> np.ndarray:
        """Return the covariances of neighbours, of shape `(time-1, state, state)`."""
        return np.stack([self.block(k - 1, k) for k in range(1, len(self.mean))])


def posterior(model: rd.StateSpaceModel, ys: Any, inputs: np.ndarray | None = None) -> Posterior:
    """Return the law of the path of a linear-Gaussian model; NaN marks missing entries."""
    ys = np.asarray(ys)
    return condition(arrays_of(model, len(ys), inputs), np.nan_to_num(ys), ~np.isnan(ys))


def condition(model: Linear, ys: np.ndarray, mask: np.ndarray) -> Posterior:
    """Return the law of the path given the entries of `ys` where `mask` is true."""
    n, d = ys.shape[0], len(model.mean)
    # path = maps @ (x_0, w_1, .., w_{n-1}) + drift, with w_k the transition noise into k
    maps = np.zeros((n * d, n * d))
    drift = np.zeros((n, d))
    maps[:d, :d] = np.eye(d)
    for k in range(1, n):
        maps[k * d : (k + 1) * d] = model.weights[k - 1] @ maps[(k - 1) * d : k * d]
        maps[k * d : (k + 1) * d, k * d : (k + 1) * d] += np.eye(d)
        drift[k] = model.weights[k - 1] @ drift[k - 1] + model.biases[k - 1]
    sources = np.zeros((n * d, n * d))
    sources[:d, :d] = model.covariance
    for k in range(1, n):
        sources[k * d : (k + 1) * d, k * d : (k + 1) * d] = model.noises[k - 1]
    start = np.concatenate([model.mean, np.zeros((n - 1) * d)])
    mean = maps @ start + drift.ravel()
    spread = maps @ sources @ maps.T

    m = ys.shape[1]
    design = np.zeros((n * m, n * d))
    error = np.zeros((n * m, n * m))
    for k in range(n):
        design[k * m : (k + 1) * m, k * d : (k + 1) * d] = model.designs[k]
        error[k * m : (k + 1) * m, k * m : (k + 1) * m] = model.errors[k]
    observed = mask.ravel()
    residual = (ys.ravel() - design @ mean - model.shifts.ravel())[observed]
    total = (design @ spread @ design.T + error)[np.ix_(observed, observed)]
    cross = (spread @ design.T)[:, observed]
    if not observed.any():
        return Posterior(mean.reshape(n, d), spread, 0.0)
    solved = np.linalg.solve(total, np.concatenate([residual[:, None], cross.T], axis=1))
    log_evidence = -0.5 * (
        residual @ solved[:, 0] + np.linalg.slogdet(total)[1] + observed.sum() * np.log(2 * np.pi)
    )
    return Posterior(
        (mean + cross @ solved[:, 0]).reshape(n, d), spread - cross @ solved[:, 1:], log_evidence
    )


def arrays_of(model: rd.StateSpaceModel, num_times: int, inputs: np.ndarray | None) -> Linear:
    """Return the parameters of a model's kernels at every time."""

    def over_time(kernel: rd.AbstractLinearGaussianKernel, times: range) -> list[np.ndarray]:
        if kernel.takes_input and inputs is not None:
            kernels = [kernel.at(jnp.asarray(inputs[k])) for k in times]
        else:
            kernels = [kernel.at(None)] * len(times)
        return [
            np.asarray([np.asarray(kernel.weight) for kernel in kernels]),
            np.asarray([np.asarray(kernel.bias) for kernel in kernels]),
            np.asarray([covariance(kernel.scale_tril) for kernel in kernels]),
        ]

    def covariance(scale: object) -> np.ndarray:
        if isinstance(scale, rd.Diagonal):
            return np.diag(np.asarray(scale.std) ** 2)
        lower = np.tril(np.asarray(scale))
        return lower @ lower.T

    model = rd.unwrap(model)
    return Linear(
        np.asarray(model.prior.mean),
        covariance(model.prior.scale_tril),
        *over_time(model.transition, range(1, num_times)),
        *over_time(model.emission, range(num_times)),
    )
