"""Exact smoothing against one big joint Gaussian, over random models, masks, inputs and lengths."""

import equinox as eqx
import jax
import jax.numpy as jnp
import joint_gaussian
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_models import random_mask, random_model

import retrodict as rd

# The larger ones take long to compile, and are run with the slow tests.
SHAPES = [(2, 3), *(pytest.param(*s, marks=pytest.mark.slow) for s in ((1, 1), (3, 5), (5, 2)))]
NUM_TIMES = 50


@eqx.filter_jit
def smooth_both_ways(model, ys, mask, inputs, length, key):
    """One compilation a shape for everything that is compared with the oracle."""
    results = []
    for parallel in (False, True):
        exact = rd.kalman_smoother(
            model, ys, parallel=parallel, mask=mask, inputs=inputs, length=length
        )
        marginals = exact.chain.marginals(parallel=parallel)
        results.append((exact.log_evidence, marginals.mean, marginals.covariance))
    paths = exact.chain.sample(key, 3)
    gaps = jax.vmap(
        lambda xs: (
            model.log_joint(xs, ys, mask=mask, inputs=inputs, length=length)
            - exact.chain.log_prob(xs)
            - exact.log_evidence
        )
    )(paths)
    return results, exact.chain.pairwise().covariance, gaps


@pytest.mark.parametrize(("state", "obs"), SHAPES)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**20), length=st.integers(1, NUM_TIMES), share_observed=st.floats(0.0, 1.0)
)
def test_kalman_smoother_equals_joint_gaussian(state, obs, seed, length, share_observed):
    rng = np.random.default_rng(seed)
    model = random_model(rng, state, obs, num_inputs=2)
    inputs = rng.normal(size=(NUM_TIMES, 2))
    _, ys = model.simulate(jax.random.key(seed), NUM_TIMES, inputs=inputs)
    ys = np.array(ys)
    mask = random_mask(rng, NUM_TIMES, obs, share_observed)
    ys[~mask] = np.nan
    mask[length:] = False
    results, pairwise, gaps = smooth_both_ways(
        model,
        jnp.asarray(ys),
        jnp.asarray(mask),
        jnp.asarray(inputs),
        jnp.asarray(length),
        jax.random.key(1),
    )
    oracle = joint_gaussian.posterior(model, ys[:length], inputs)
    for log_evidence, mean, covariance in results:
        assert log_evidence == pytest.approx(oracle.log_evidence, abs=1e-10 * NUM_TIMES, rel=1e-10)
        np.testing.assert_allclose(mean[:length], oracle.mean, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(
            covariance[:length], oracle.marginal_covariances(), rtol=1e-10, atol=1e-10
        )
    for k in range(1, length):
        np.testing.assert_allclose(pairwise[k - 1], oracle.pair(k), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(gaps, 0.0, atol=1e-9)


@pytest.mark.parametrize("precision", [1.0, 1e3])
def test_states_that_use_covariances_equal_joint_gaussian(precision):
    # Seven states, gaps in most rows, series of unequal length. Covariances are precise enough for
    # the first model, and not for the second, whose rows are 1,000 times as precise.
    rng = np.random.default_rng(3)
    num_times, state, obs = 24, 7, 8
    model = random_model(rng, state, obs)
    model = eqx.tree_at(
        lambda m: m.emission.scale_tril, model, model.emission.scale_tril / precision
    )
    ys = jnp.stack(
        [model.simulate(key, num_times)[1] for key in jax.random.split(jax.random.key(0), 2)]
    )
    mask = rng.random(ys.shape) < 0.7
    lengths = np.array([num_times, 17])

    @jax.jit
    def moments(ys, mask, length):
        exact = rd.kalman_smoother(model, ys, mask=mask, length=length)
        marginals = exact.chain.marginals()
        return exact.log_evidence, marginals.mean, marginals.covariance

    together = jax.vmap(moments)(ys, mask, lengths)
    for i, length in enumerate(lengths):
        observed = np.where(mask[i], ys[i], np.nan)[:length]
        oracle = joint_gaussian.posterior(model, observed)
        alone = moments(ys[i], mask[i], length)
        for log_evidence, mean, covariance in (alone, [part[i] for part in together]):
            assert log_evidence == pytest.approx(oracle.log_evidence, abs=1e-8, rel=1e-9)
            deviations = np.sqrt(np.diagonal(oracle.marginal_covariances(), axis1=1, axis2=2))
            assert np.max(np.abs(mean[:length] - oracle.mean) / deviations) < 1e-7
            unit = deviations[:, :, None] * deviations[:, None, :]
            errors = np.abs(covariance[:length] - oracle.marginal_covariances()) / unit
            assert np.max(errors) < 1e-7
