"""Chains over regimes and states: densities, paths, moments, prefixes and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import raises_with
from switching_models import hidden_markov, linear

import retrodict as rd

Mixture, Moves = rd.switching.Mixture, rd.switching.Moves


@pytest.fixture(scope="module")
def two_rows():
    """A model, two rows and their chain, which is exact: nothing but the last law is merged."""
    model = linear(3, 2, 2)
    ys = model.simulate(jax.random.key(0), num_times=2)[2]
    posterior = rd.switching.gpb2_smoother(model, ys)
    return model, ys, posterior


@pytest.fixture(scope="module")
def series():
    model = linear(2, 1, 1)
    ys = model.simulate(jax.random.key(0), num_times=8)[2]
    return model, ys, rd.switching.gpb2_smoother(model, ys).chain


def test_the_density_of_the_first_row_given_the_second_is_exact(two_rows):
    """q_{0|1} is the model's own reversal, so that p(path, y) / q(path) depends on row 1 alone."""
    model, ys, posterior = two_rows
    chain = posterior.chain
    zs, xs = chain.sample(jax.random.key(1), 6)
    kernels = []
    for z, x in zip(zs, xs, strict=True):
        terminal = chain.terminal.log_prob(z[1], x[1])
        kernels.append(model.log_joint(z, x, ys) - (chain.log_prob(z, x) - terminal))
    # The same second row with other first rows has the same value.
    z, x = zs[0], xs[0]
    for other in range(1, 6):
        z_other = jnp.array([zs[other, 0], z[1]])
        x_other = jnp.stack([xs[other, 0], x[1]])
        terminal = chain.terminal.log_prob(z[1], x[1])
        value = model.log_joint(z_other, x_other, ys) - chain.log_prob(z_other, x_other) + terminal
        np.testing.assert_allclose(value, kernels[0], rtol=1e-11)


def test_the_importance_weights_of_paths_average_to_the_evidence(series):
    """A z-test with a false-alarm rate of 7e-6."""
    model, ys, chain = series
    zs, xs = chain.sample(jax.random.key(1), 4000)
    weights = jax.vmap(lambda z, x: model.log_joint(z, x, ys) - chain.log_prob(z, x))(zs, xs)
    exact = rd.switching.enumerate_regimes(model, ys)
    ratios = np.exp(np.array(weights) - float(exact.log_evidence))
    assert abs(ratios.mean() - 1) < 4.5 * ratios.std() / np.sqrt(len(ratios))


def test_moments_are_those_of_the_paths(series):
    """Conditional moments and states agree within 4.5 standard errors: false alarms below 1e-3."""
    _, _, chain = series
    trace = chain.trace(jax.random.key(2), 4000)
    moments = chain.marginals(jax.random.key(2), num_samples=4000)
    count = np.sqrt(4000)
    members = np.eye(2)[np.array(trace.zs)]
    shares = np.array(moments.probabilities)
    # A regime that is expected in fewer than one path in a thousand may occur in none.
    error = np.sqrt(np.maximum(shares * (1 - shares), 1e-3)) / count
    assert np.all(np.abs(members.mean(0) - moments.probabilities) < 4.5 * error)
    xs = np.array(trace.xs)
    assert np.all(np.abs(xs.mean(0) - moments.mean) < 4.5 * xs.std(0) / count)
    squares = (xs[..., 0] - np.array(moments.mean)[None, :, 0]) ** 2
    variance = np.array(moments.covariance)[:, 0, 0]
    assert np.all(np.abs(squares.mean(0) - variance) < 4.5 * squares.std(0) / count)
    # The average of conditional moments varies less than that of the draws.
    assert np.all(np.array(moments.mean_standard_error)[:-1] < xs.std(0)[:-1] / count)


def test_pairs_have_the_marginals_of_the_regimes(series):
    chain = series[2]
    moments = chain.marginals(jax.random.key(0), num_samples=500)
    np.testing.assert_allclose(moments.pairs.sum(2), moments.probabilities[:-1], atol=1e-12)


def test_a_component_may_be_split(series):
    """Two copies of a component, each with half of its weight, are the same law."""
    _, _, chain = series
    laws, moves = chain.laws, chain.moves

    def split(leaf, axis):
        return jnp.concatenate([leaf, leaf], axis=axis)

    weights = split(laws.log_weights - jnp.log(2.0), 1)
    other = rd.switching.SwitchingChain(
        Mixture(weights, split(laws.means, 1), split(laws.scale_trils, 1), split(laws.regimes, 1)),
        Moves(split(moves.log_probabilities, 1), moves.weights, moves.biases, moves.scale_trils),
    )
    zs, xs = chain.sample(jax.random.key(3), 3)
    np.testing.assert_allclose(
        jax.vmap(other.log_prob)(zs, xs), jax.vmap(chain.log_prob)(zs, xs), rtol=1e-12
    )
    np.testing.assert_allclose(other.filtered, chain.filtered, atol=1e-12)


def test_a_prefix_is_the_chain_of_the_first_rows(series):
    model, ys, chain = series
    prefix, short = chain.prefix(5), rd.switching.gpb2_smoother(model, ys[:5]).chain
    zs, xs = short.sample(jax.random.key(0), 1)
    np.testing.assert_allclose(
        prefix.log_prob(zs[0], xs[0]), short.log_prob(zs[0], xs[0]), rtol=1e-12
    )
    with raises_with(ValueError, "num_times", "(8)", "9"):
        chain.prefix(9)


def test_padded_rows_repeat_the_last_state(series):
    model, ys, _ = series
    chain = rd.switching.gpb2_smoother(model, ys, length=5).chain
    trace = chain.trace(jax.random.key(0), 4)
    np.testing.assert_array_equal(trace.zs[:, 5:], np.repeat(trace.zs[:, 4:5], 3, axis=1))
    np.testing.assert_array_equal(trace.xs[:, 5:], np.repeat(trace.xs[:, 4:5], 3, axis=1))
    assert np.all(np.isfinite(chain.marginals(jax.random.key(0)).mean))


def test_paths_of_a_finite_chain_have_the_posterior_probability():
    model = hidden_markov(3)
    ys = model.simulate(jax.random.key(0), num_times=6)[2]
    posterior = rd.switching.forward_backward(model, ys)
    zs, _ = posterior.chain.sample(jax.random.key(1), 3)
    for path in zs:
        expected = model.log_joint(path, None, ys) - posterior.log_evidence
        np.testing.assert_allclose(posterior.chain.log_prob(path), expected, rtol=1e-10)


def test_sampled_moments_need_a_key(series):
    with raises_with(ValueError, "sampled", "`key`"):
        series[2].marginals()
