"""The enumeration of regimes against one joint Gaussian per path, in numpy."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import joint_gaussian
import numpy as np
import pytest
from assertions import raises_with
from scipy.special import logsumexp
from switching_models import hidden_markov, linear, recurrent

import retrodict as rd


def arrays_given(model, zs):
    """Return the parameters of a linear-Gaussian model along one path of regimes."""

    def covariance(kernel):
        scale = kernel.scale_tril
        scale = np.diag(scale.std) if isinstance(scale, rd.Diagonal) else np.array(scale)
        return scale @ scale.T

    moves = [model.transition[z] for z in zs[1:]]
    looks = [model.emission[z] for z in zs]
    d = model.state_dim
    return joint_gaussian.Linear(
        np.array(model.prior[zs[0]].mean),
        np.array(model.prior[zs[0]].covariance),
        np.array([kernel.weight for kernel in moves]).reshape(-1, d, d),
        np.array([kernel.bias for kernel in moves]).reshape(-1, d),
        np.array([covariance(kernel) for kernel in moves]).reshape(-1, d, d),
        np.array([kernel.weight for kernel in looks]),
        np.array([kernel.bias for kernel in looks]),
        np.array([covariance(kernel) for kernel in looks]),
    )


@pytest.mark.parametrize(("regimes", "state_dim", "n"), [(2, 2, 5), (3, 1, 4), (1, 1, 3)])
def test_enumeration_is_the_sum_over_joint_gaussians(regimes, state_dim, n):
    model = linear(regimes, state_dim, 2)
    _, _, ys = model.simulate(jax.random.key(0), num_times=n)
    ys = np.array(ys)
    ys[1, 0] = np.nan
    exact = rd.switching.enumerate_regimes(model, ys)

    paths = np.array(list(itertools.product(range(regimes), repeat=n)))
    first, moves = np.array(model.regimes.log_initial()), np.array(model.regimes.log_transition())
    laws = [
        joint_gaussian.condition(arrays_given(model, zs), np.nan_to_num(ys), ~np.isnan(ys))
        for zs in paths
    ]
    joint = first[paths[:, 0]] + moves[paths[:, :-1], paths[:, 1:]].sum(axis=1)
    joint += np.array([law.log_evidence for law in laws])
    weights = np.exp(joint - logsumexp(joint))
    means = np.stack([law.mean for law in laws])
    spreads = np.stack([law.marginal_covariances() for law in laws])
    mean = np.einsum("p,pti->ti", weights, means)
    second = np.einsum("p,ptij->tij", weights, spreads + means[..., :, None] * means[..., None, :])
    members = np.eye(regimes)[paths]
    total: Any = logsumexp(joint)
    np.testing.assert_allclose(exact.log_evidence, total, rtol=1e-11)
    marginals = exact.marginals
    np.testing.assert_allclose(marginals.mean, mean, atol=1e-10)
    covariance = second - mean[:, :, None] * mean[:, None, :]
    np.testing.assert_allclose(marginals.covariance, covariance, atol=1e-10)
    expected = np.einsum("p,ptj->tj", weights, members)
    np.testing.assert_allclose(marginals.probabilities, expected, atol=1e-10)
    pairs = np.einsum("p,pti,ptj->tij", weights, members[:, :-1], members[:, 1:])
    np.testing.assert_allclose(marginals.pairs, pairs, atol=1e-10)


def test_padding_is_ignored():
    model = linear(2, 1, 1)
    ys = model.simulate(jax.random.key(1), num_times=5)[2]
    padded = rd.switching.enumerate_regimes(model, ys.at[3:].set(jnp.nan), length=3)
    short = rd.switching.enumerate_regimes(model, ys[:3])
    np.testing.assert_allclose(padded.log_evidence, short.log_evidence, rtol=1e-12)
    for name in ("probabilities", "mean", "covariance"):
        one, other = getattr(padded.marginals, name)[:3], getattr(short.marginals, name)
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_what_cannot_be_enumerated_is_refused():
    with raises_with(ValueError, "3^40", "gpb2_smoother"):
        rd.switching.enumerate_regimes(linear(3, 1, 1), jnp.zeros((40, 1)))
    with raises_with(TypeError, "linear and Gaussian given its regimes", "grid_smoother"):
        rd.switching.enumerate_regimes(recurrent(2, 1), jnp.zeros((3, 1)))
    with raises_with(TypeError, "continuous state", "forward_backward"):
        rd.switching.enumerate_regimes(hidden_markov(2), jnp.zeros((3, 1)))
