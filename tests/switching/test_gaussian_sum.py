"""Gaussian-sum smoothers: exact where nothing is merged, close to enumeration elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_close, raises_with
from scipy.stats import multivariate_normal as normal
from switching_models import hidden_markov, linear, recurrent

import retrodict as rd

SMOOTHERS = {"gpb2": rd.switching.gpb2_smoother, "imm": rd.switching.imm_smoother}


def observed(model, n, seed=0):
    return model.simulate(jax.random.key(seed), num_times=n)[2]


@pytest.mark.parametrize("num_times", [1, 2])
def test_two_rows_are_exact(num_times):
    """GPB2 merges for the first time after the second row, which the evidence does not need."""
    model = linear(3, 2, 2)
    ys = observed(model, num_times)
    posterior = rd.switching.gpb2_smoother(model, ys)
    exact = rd.switching.enumerate_regimes(model, ys)
    np.testing.assert_allclose(posterior.log_evidence, exact.log_evidence, rtol=1e-12)
    probabilities = posterior.chain.filtered[-1]
    np.testing.assert_allclose(probabilities, exact.marginals.probabilities[-1], atol=1e-12)
    law = posterior.chain.terminal
    np.testing.assert_allclose(law.mean, exact.marginals.mean[-1], atol=1e-12)
    np.testing.assert_allclose(law.covariance, exact.marginals.covariance[-1], atol=1e-12)


@pytest.mark.parametrize("name", SMOOTHERS)
@pytest.mark.parametrize("num_regimes", [1, 3])
def test_equal_regimes_give_the_kalman_smoother(name, num_regimes):
    one = linear(1, 2, 2)
    model = rd.switching.SwitchingModel(
        linear(num_regimes, 2, 2).regimes, one.emission[0], one.prior[0], one.transition[0]
    )
    plain = rd.StateSpaceModel(one.prior[0], one.transition[0], one.emission[0])
    ys = np.array(observed(model, 20))
    ys[4, 0], ys[7:10] = np.nan, np.nan
    posterior, exact = SMOOTHERS[name](model, ys), rd.kalman_smoother(plain, ys)
    np.testing.assert_allclose(posterior.log_evidence, exact.log_evidence, rtol=1e-11)
    np.testing.assert_allclose(posterior.chain.laws.mean, exact.chain.laws.mean, atol=1e-10)
    # The path of states has the density of the exact chain, whatever the regimes.
    zs, xs = posterior.chain.sample(jax.random.key(0), 2)
    total = posterior.chain.log_prob(zs[0], xs[0]) - model.log_joint(zs[0], xs[0], ys)
    np.testing.assert_allclose(total, -exact.log_evidence, rtol=1e-10)


def covariance(kernel):
    scale = kernel.scale_tril
    return np.diag(scale.std**2) if isinstance(scale, rd.Diagonal) else np.array(scale @ scale.T)


def naive_filter(model, ys, merge):
    """Run GPB2 or the IMM in covariance form, with Python loops; return weights and evidence."""
    count, moves = model.num_regimes, np.exp(model.regimes.log_transition())

    def merged(weights, means, covariances):
        weights = weights / weights.sum()
        mean = np.einsum("c,ci->i", weights, means)
        shifts = means - mean
        spread = np.einsum("c,ci,cj->ij", weights, shifts, shifts)
        return mean, np.einsum("c,cij->ij", weights, covariances) + spread

    def update(j, mean, spread, y):
        look = model.emission[j]
        weight = np.array(look.weight)
        residual = y - weight @ mean - np.array(look.bias)
        total = weight @ spread @ weight.T + covariance(look)
        gain = spread @ weight.T @ np.linalg.inv(total)
        likelihood = normal.pdf(residual, np.zeros(len(y)), total)
        return mean + gain @ residual, spread - gain @ weight @ spread, likelihood

    def predict(j, mean, spread):
        weight = np.array(model.transition[j].weight)
        moved = weight @ mean + np.array(model.transition[j].bias)
        return moved, weight @ spread @ weight.T + covariance(model.transition[j])

    laws = [(np.array(law.mean), np.array(law.covariance)) for law in model.prior]
    starts = [update(j, *laws[j], ys[0]) for j in range(count)]
    weights = np.exp(model.regimes.log_initial()) * np.array([like for _, _, like in starts])
    laws, total = [start[:2] for start in starts], np.log(weights.sum())
    weights = weights / weights.sum()
    for y in ys[1:]:
        joint, new = np.zeros((count, count)), []
        for j in range(count):
            into = weights * moves[:, j]
            means, spreads = (np.array(leaf) for leaf in zip(*laws, strict=True))
            if merge == "before":
                mean, spread, likelihood = update(j, *predict(j, *merged(into, means, spreads)), y)
                joint[0, j] = into.sum() * likelihood
                new.append((mean, spread))
                continue
            parts = [update(j, *predict(j, *law), y) for law in laws]
            joint[:, j] = into * np.array([like for _, _, like in parts])
            means, spreads, _ = (np.array(leaf) for leaf in zip(*parts, strict=True))
            new.append(merged(joint[:, j], means, spreads))
        laws, total = new, total + np.log(joint.sum())
        weights = joint.sum(axis=0) / joint.sum()
    return weights, total


@pytest.mark.parametrize(("name", "merge"), [("gpb2", "after"), ("imm", "before")])
def test_the_filters_are_their_textbook_recursions(name, merge):
    model = linear(3, 2, 2)
    ys = observed(model, 8)
    weights, evidence = naive_filter(model, np.array(ys), merge)
    posterior = SMOOTHERS[name](model, ys)
    np.testing.assert_allclose(posterior.log_evidence, evidence, rtol=1e-10)
    np.testing.assert_allclose(posterior.chain.filtered[-1], weights, atol=1e-10)


def test_gpb2_is_close_to_enumeration():
    model = linear(2, 2, 2)
    ys = observed(model, 8)
    posterior = rd.switching.gpb2_smoother(model, ys)
    exact = rd.switching.enumerate_regimes(model, ys)
    assert abs(posterior.log_evidence - exact.log_evidence) < 0.01
    probabilities = posterior.chain.filtered[-1]
    assert np.abs(probabilities - exact.marginals.probabilities[-1]).max() < 0.01


@pytest.mark.parametrize("name", SMOOTHERS)
def test_padding_changes_nothing(name):
    model = linear(2, 1, 2)
    ys = observed(model, 9)
    padded = SMOOTHERS[name](model, ys.at[6:].set(jnp.nan), length=6)
    short = SMOOTHERS[name](model, ys[:6])
    np.testing.assert_allclose(padded.log_evidence, short.log_evidence, rtol=1e-13)
    assert_close(padded.chain.terminal, short.chain.terminal)
    zs, xs = short.chain.sample(jax.random.key(0), 1)
    filler = jnp.full((3, 1), jnp.nan)
    density = padded.chain.log_prob(
        jnp.concatenate([zs[0], jnp.zeros(3, zs.dtype)]), jnp.concatenate([xs[0], filler])
    )
    np.testing.assert_allclose(density, short.chain.log_prob(zs[0], xs[0]), rtol=1e-12)


def test_inputs_drive_regimes_and_kernels():
    """A model with inputs equals one whose parameters were computed by hand for each row."""
    model = linear(2, 1, 1)
    moves = [
        rd.LinearGaussianKernel(kernel.weight, kernel.bias, kernel.scale_tril, jnp.ones((1, 1)))
        for kernel in model.transition
    ]
    regimes = rd.switching.Regimes(
        model.regimes.initial_logits,
        model.regimes.transition_logits,
        input_weight=jnp.array([[0.5], [-0.5]]),
    )
    driven = rd.switching.SwitchingModel(regimes, model.emission, model.prior, moves)
    ys, us = observed(model, 2), jnp.array([[3.0], [0.7]])
    logits = model.regimes.transition_logits + jnp.array([[0.35, -0.35]])
    shifted = [
        rd.LinearGaussianKernel(kernel.weight, kernel.bias + 0.7, kernel.scale_tril)
        for kernel in model.transition
    ]
    by_hand = rd.switching.SwitchingModel(
        rd.switching.Regimes(model.regimes.initial_logits, logits),
        model.emission,
        model.prior,
        shifted,
    )
    value = rd.switching.gpb2_smoother(driven, ys, inputs=us).log_evidence
    exact = rd.switching.enumerate_regimes(driven, ys, inputs=us).log_evidence
    expected = rd.switching.enumerate_regimes(by_hand, ys).log_evidence
    np.testing.assert_allclose([value, exact], expected, rtol=1e-12)


def test_one_regime_of_a_nonlinear_model_is_the_extended_smoother():
    prior = rd.Gaussian(jnp.zeros(1), jnp.eye(1))
    move = rd.NonlinearGaussianKernel(lambda x: jnp.sin(x), rd.Diagonal(0.3 * jnp.ones(1)))
    look = rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.2 * jnp.ones(1)))
    plain = rd.StateSpaceModel(prior, move, look)
    regimes = rd.switching.Regimes(jnp.zeros(1), jnp.zeros((1, 1)))
    model = rd.switching.SwitchingModel(regimes, look, prior, move)
    ys = observed(model, 12)
    posterior = rd.switching.gpb2_smoother(model, ys)
    extended = rd.extended_smoother(plain, ys)
    np.testing.assert_allclose(posterior.chain.laws.mean, extended.chain.laws.mean, atol=1e-10)


def test_single_precision_agrees():
    model = linear(2, 2, 2)
    ys = observed(model, 40)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (model, ys))
    posterior = rd.switching.gpb2_smoother(*single)
    assert posterior.log_evidence.dtype == jnp.float32
    exact = rd.switching.gpb2_smoother(model, ys)
    np.testing.assert_allclose(posterior.log_evidence, exact.log_evidence, rtol=1e-5)
    np.testing.assert_allclose(posterior.chain.filtered, exact.chain.filtered, atol=1e-4)


def test_the_evidence_has_finite_and_right_derivatives():
    model = linear(2, 1, 1)
    ys = observed(model, 10)

    def evidence(shift):
        moves = [
            rd.LinearGaussianKernel(kernel.weight, kernel.bias + shift, kernel.scale_tril)
            for kernel in model.transition
        ]
        moved = rd.switching.SwitchingModel(model.regimes, model.emission, model.prior, moves)
        return rd.switching.gpb2_smoother(moved, ys).log_evidence

    step = 1e-5
    difference = (evidence(step) - evidence(-step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(evidence)(0.0), difference, rtol=1e-6)


def test_a_batch_is_mapped():
    model = linear(2, 1, 1)
    batch = jnp.stack([observed(model, 6, seed) for seed in range(3)])
    chains = jax.vmap(lambda ys: rd.switching.gpb2_smoother(model, ys).chain)(batch)
    one = rd.switching.gpb2_smoother(model, batch[1]).chain
    np.testing.assert_allclose(chains.filtered[1], one.filtered, atol=1e-12)
    with raises_with(ValueError, "batch of series", "vmap"):
        chains.sample(jax.random.key(0), 2)


def test_regimes_that_depend_on_the_state_give_a_proper_chain():
    """Importance weights of the chain average to the evidence, here by a grid over two rows."""
    model = recurrent(2, 1)
    ys = observed(model, 2)
    chain = rd.switching.gpb2_smoother(model, ys).chain
    zs, xs = chain.sample(jax.random.key(0), 20_000)
    weights = jax.vmap(lambda z, x: model.log_joint(z, x, ys) - chain.log_prob(z, x))(zs, xs)
    axis = jnp.linspace(-8.0, 8.0, 321)
    grid = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2, 1)
    paths = jnp.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    table = jax.vmap(lambda z: jax.vmap(lambda x: model.log_joint(z, x, ys))(grid))(paths)
    evidence = jax.nn.logsumexp(table) + 2 * jnp.log(axis[1] - axis[0])
    ratios = np.exp(np.array(weights) - evidence)
    # A z-test with a false-alarm rate of 7e-6.
    assert abs(ratios.mean() - 1) < 4.5 * ratios.std() / np.sqrt(len(ratios))


def test_hidden_markov_models_are_refused():
    with raises_with(TypeError, "gpb2_smoother", "forward_backward"):
        rd.switching.gpb2_smoother(hidden_markov(2), jnp.zeros((3, 1)))


def test_noise_without_a_density_is_refused():
    model = linear(2, 2, 2)
    move = rd.LinearGaussianKernel(jnp.eye(2), jnp.zeros(2), rd.Diagonal(jnp.array([1.0, 0.0])))
    singular = rd.switching.SwitchingModel(
        model.regimes, model.emission, model.prior, [model.transition[0], move]
    )
    with raises_with(ValueError, "transition with a density", "[1. 0.]"):
        rd.switching.gpb2_smoother(singular, jnp.zeros((3, 2)))
