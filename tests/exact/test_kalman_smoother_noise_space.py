"""Smoothing of singular, narrow and decaying models against an oracle in the space of the noise.

The oracle writes every state as x_k = c_k + J_k ε with standard normal ε and conditions ε on the
data in extended precision. It never inverts a covariance of the state.
"""

import os
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import retrodict as rd

NUM_TIMES, OBS = 20, 2
KINDS = ("rank one", "no noise", "decay", "sums to zero", "width 1e-3", "width 1e-6", "width 1e-9")


class Parameters(NamedTuple):
    """Mean and factor of x_0, weight and factor of the transition, design; unit noise times 0.5."""

    mean: np.ndarray
    prior: np.ndarray
    weight: np.ndarray
    noise: np.ndarray
    design: np.ndarray


def parameters(kind: str, d: int, dtype: Any) -> Parameters:
    rng = np.random.default_rng(100 * d + KINDS.index(kind))
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    weight, prior = 0.9 * np.eye(d), np.eye(d)
    noise = np.zeros((d, d))
    if kind == "rank one":
        prior = rng.normal(size=(d, 1))
        noise = 0.3 * prior
    elif kind == "no noise":
        weight = basis @ np.diag(rng.uniform(0.6, 0.98, d)) @ basis.T
        prior = rng.normal(size=(d, d))
    elif kind == "decay":
        weight = basis @ np.diag(np.linspace(0.1, 0.95, d)) @ basis.T
    elif kind == "sums to zero":
        prior = np.eye(d) - 1.0 / d
        noise = 0.3 * prior
    else:
        widths = np.ones(d)
        widths[-1] = float(kind.split()[1])
        prior = basis @ np.diag(widths)
        noise = 0.3 * prior
    mean = prior @ rng.normal(size=prior.shape[1])
    arrays = (mean, lower(prior), weight, lower(noise), rng.normal(size=(OBS, d)))
    return Parameters(*(np.asarray(array, dtype) for array in arrays))


def lower(factor: np.ndarray) -> np.ndarray:
    """Return a square lower factor of the same covariance."""
    missing = np.zeros((factor.shape[0], factor.shape[0] - factor.shape[1]))
    upper = np.linalg.qr(np.concatenate([factor, missing], axis=1).T).R
    return np.tril(upper.T)


def oracle(p: Parameters, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return smoothed means, covariances and the log-evidence."""
    p = Parameters(*(array.astype(np.longdouble) for array in p))
    d, n = len(p.mean), len(ys)
    jacobian, offset = np.zeros((n, d, n * d), np.longdouble), np.zeros((n, d), np.longdouble)
    jacobian[0, :, :d], offset[0] = p.prior, p.mean
    for k in range(1, n):
        jacobian[k], offset[k] = p.weight @ jacobian[k - 1], p.weight @ offset[k - 1]
        jacobian[k, :, k * d : (k + 1) * d] += p.noise
    design = np.concatenate([2 * p.design @ j for j in jacobian])
    residual = np.concatenate([2 * (y - p.design @ c) for y, c in zip(ys, offset, strict=True)])
    precision = np.eye(n * d, dtype=np.longdouble) + design.T @ design
    factor = np.zeros_like(precision)
    for j in range(n * d):
        factor[j, j] = np.sqrt(precision[j, j] - factor[j, :j] @ factor[j, :j])
        factor[j + 1 :, j] = (precision[j + 1 :, j] - factor[j + 1 :, :j] @ factor[j, :j]) / factor[
            j, j
        ]
    root = np.concatenate(
        [jacobian.reshape(n * d, n * d).T, (design.T @ residual)[:, None]], axis=1
    )
    for j in range(n * d):
        root[j] = (root[j] - factor[j, :j] @ root[:j]) / factor[j, j]
    states, data = root[:, :-1], root[:, -1]
    mean = offset + (states.T @ data).reshape(n, d)
    blocks = [states[:, k * d : (k + 1) * d] for k in range(n)]
    log_det = 2 * np.sum(np.log(np.diag(factor)))
    constant = len(residual) * (np.log(2 * np.pi) + 2 * np.log(0.5))
    evidence = -0.5 * (residual @ residual - data @ data + log_det + constant)
    covariance = np.stack([block.T @ block for block in blocks])
    return mean.astype(float), covariance.astype(float), float(evidence)


@pytest.mark.slow
@pytest.mark.skipif(
    "fusion_emitters=false" in os.environ.get("XLA_FLAGS", ""),
    reason="This setting compiles one expression twice with different rounding.",
)
@pytest.mark.parametrize("d", [2, 5, 8])
def test_smoothing_has_the_error_of_rounding(dtype: Any, d: int):
    eps = float(np.finfo(dtype).eps)
    smooth = jax.jit(rd.kalman_smoother)
    for kind in KINDS:
        p = parameters(kind, d, dtype)
        ys = np.random.default_rng(d).normal(size=(NUM_TIMES, OBS)).astype(dtype)
        mean, covariance, evidence = oracle(p, ys)
        zeros = np.zeros(d, dtype)
        model = rd.StateSpaceModel(
            rd.Gaussian(p.mean, p.prior),
            rd.LinearGaussianKernel(p.weight, zeros, p.noise),
            rd.LinearGaussianKernel(p.design, zeros[:OBS], 0.5 * np.eye(OBS, dtype=dtype)),
        )
        exact = smooth(model, ys)
        marginals = exact.chain.marginals()
        size = np.sqrt(covariance.max())
        assert np.abs(marginals.mean - mean).max() < 200 * eps * size, kind
        assert np.abs(marginals.covariance - covariance).max() < 200 * eps * size**2, kind
        assert abs(exact.log_evidence - evidence) < 2000 * eps, kind
        if kind.startswith("width"):
            path = exact.chain.sample(jax.random.key(0), 1)[0]
            gap = model.log_joint(path, ys) - exact.chain.log_prob(path) - exact.log_evidence
            width = float(kind.split()[1])
            assert abs(gap) < 1e5 * eps / width, kind  # the path itself is rounded
