"""Importance sampling of paths of regimes and states, against enumeration."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import raises_with
from switching_models import hidden_markov, linear, recurrent

import retrodict as rd

sample = rd.switching.importance_smoother


@pytest.fixture(scope="module")
def graded():
    model = linear(2, 1, 1)
    ys = model.simulate(jax.random.key(0), num_times=8)[2]
    chain = rd.switching.imm_smoother(model, ys).chain
    corrected = sample(jax.random.key(1), model, chain, ys, 4000)
    return corrected, rd.switching.enumerate_regimes(model, ys)


def test_weights_correct_a_rough_chain(graded):
    """All within 4.5 standard errors: the false-alarm rate is below 1e-3."""
    corrected, exact = graded
    assert corrected.k_hat < 0.7 and not corrected.messages
    error = corrected.log_evidence - exact.log_evidence
    assert abs(error) < 4.5 * corrected.log_evidence_standard_error
    moments, truth = corrected.marginals, exact.marginals
    for name in ("probabilities", "mean"):
        error = np.abs(getattr(moments, name) - getattr(truth, name))
        # The standard error of a regime that few paths visit is too small.
        rare = 2e-3 if name == "probabilities" else 0.0
        assert np.all(error < 4.5 * getattr(moments, f"{name}_standard_error") + rare), name
    assert np.abs(moments.covariance - truth.covariance).max() < 0.1
    assert np.abs(moments.pairs - truth.pairs).max() < 0.05


def test_the_elbo_is_below_the_evidence_by_the_divergence(graded):
    corrected, exact = graded
    assert corrected.elbo < exact.log_evidence - 4.5 * corrected.elbo_standard_error
    # The mean of log(p/q) under q falls short of the log-evidence by half the variance of log(p/q),
    # up to third moments.
    gap = exact.log_evidence - corrected.elbo
    assert 0.2 < gap / np.var(corrected.raw_log_weights) < 1.0


def test_an_exact_chain_has_equal_weights():
    model = hidden_markov(2)
    ys = model.simulate(jax.random.key(0), num_times=6)[2]
    posterior = rd.switching.forward_backward(model, ys)
    corrected = sample(jax.random.key(1), model, posterior.chain, ys, 50)
    np.testing.assert_allclose(corrected.ess, 50, rtol=1e-10)
    np.testing.assert_allclose(corrected.elbo, posterior.log_evidence, rtol=1e-12)


def test_a_chain_of_other_data_is_flagged():
    model = recurrent(2, 2)
    ys = model.simulate(jax.random.key(0), num_times=12)[2]
    chain = rd.switching.gpb2_smoother(model, ys[::-1] + 5.0).chain
    corrected = sample(jax.random.key(1), model, chain, ys, 200)
    assert corrected.k_hat > 0.7
    assert "unreliable" in corrected.messages[0]


def test_what_does_not_match_is_refused():
    model = linear(2, 1, 1)
    ys = jnp.zeros((4, 1))
    chain = rd.switching.gpb2_smoother(model, ys).chain
    with raises_with(ValueError, "(4, 2, 1) does not fit", "(5, 2, 1)"):
        sample(jax.random.key(0), model, chain, jnp.zeros((5, 1)))
    with raises_with(TypeError, "concrete", "jax.jit"):
        eqx.filter_jit(sample)(jax.random.key(0), model, chain, ys, 30)
