"""Forward–backward against a sum over all paths of regimes."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.flatten_util import ravel_pytree

import retrodict as rd
from retrodict.switching import Regimes, SwitchingModel, forward_backward, most_probable_path

NUM_TIMES = 6


def gaussian_model(count: int, forbidden: bool = False) -> SwitchingModel:
    rng = np.random.default_rng(count)
    transition = rng.dirichlet(np.ones(count), size=count)
    if forbidden:
        # Left to right: regimes never return, and the last one is absorbing.
        transition = np.triu(transition) + np.diag(np.full(count, 1e-3))
        transition /= transition.sum(1, keepdims=True)
    regimes = Regimes.from_probabilities(rng.dirichlet(np.ones(count)), transition)
    laws = [rd.Gaussian(rng.normal(size=2), np.diag(rng.uniform(0.5, 2, 2))) for _ in range(count)]
    return SwitchingModel(regimes, emission=laws)


def lagged_model(count: int) -> SwitchingModel:
    rng = np.random.default_rng(10 + count)
    regimes = Regimes(
        rng.normal(size=count),
        rng.normal(size=(count, count)),
        input_weight=rng.normal(size=(count, 1)),
    )
    kernels = [
        rd.LinearGaussianKernel(
            0.4 * rng.normal(size=(1, 2)), rng.normal(size=1), [[1.0 + j]], rng.normal(size=(1, 1))
        )
        for j in range(count)
    ]
    return SwitchingModel(regimes, emission=kernels, num_lags=2)


def density(mean, scale, y, observed):
    terms = scipy.stats.norm.logpdf(np.where(observed, y, 0.0), mean, scale)
    return np.sum(np.where(observed, terms, 0.0))


def emission_tables(model, ys, us, observed):
    """Return log g_j(y_k) and log p(z_k | z_{k-1}) by scipy, from the arrays of the model."""
    count, n, lags = model.num_regimes, len(ys), model.num_lags
    table, moves = np.zeros((n, count)), np.zeros((n, count, count))
    for k in range(n):
        logits = np.asarray(model.regimes.transition_logits)
        if model.regimes.takes_input:
            logits = logits + np.asarray(model.regimes.input_weight) @ us[k]
        moves[k] = scipy.special.log_softmax(logits, axis=1)
        for j in range(count):
            part = model.emission[j]
            if not lags:
                scales = np.diagonal(part.scale_tril)
                table[k, j] = density(np.asarray(part.mean), scales, ys[k], observed[k])
            elif k >= lags:
                past = np.concatenate([ys[k - lag] for lag in range(1, lags + 1)])
                mean = part.weight @ past + part.bias + part.input_weight @ us[k]
                table[k, j] = density(np.asarray(mean), part.scale_tril[0, 0], ys[k], True)
    return table, moves


def brute_force(model, ys, us=None, observed=None):
    """Return all paths, their joint log probabilities, and those of the first rows alone."""
    observed = np.ones(ys.shape, bool) if observed is None else observed
    table, moves = emission_tables(model, ys, us, observed)
    initial = scipy.special.log_softmax(np.asarray(model.regimes.initial_logits))
    paths = list(itertools.product(range(model.num_regimes), repeat=len(ys)))
    totals = []
    for path in paths:
        total = [initial[path[0]] + table[0, path[0]]]
        for k in range(1, len(ys)):
            total.append(total[-1] + moves[k, path[k - 1], path[k]] + table[k, path[k]])
        totals.append(total)
    return np.array(paths), np.array(totals)


def expected(model, ys, us=None, observed=None):
    """Return evidence, filtering, smoothing and pair probabilities, and the path weights."""
    paths, totals = brute_force(model, ys, us, observed)
    count, n = model.num_regimes, totals.shape[1]
    log_evidence = scipy.special.logsumexp(totals[:, -1])
    weights = np.exp(totals[:, -1] - log_evidence)
    member = np.eye(count)[paths]
    smoothed = np.einsum("p,pkj->kj", weights, member)
    pairs = np.einsum("p,pki,pkj->kij", weights, member[:, :-1], member[:, 1:])
    filtered = np.stack([scipy.special.softmax(totals[:, k]) @ member[:, k] for k in range(n)])
    # A prefix occurs in count^(n-1-k) paths.
    copies = np.log(count) * np.arange(n - 1, -1, -1)
    evidences = scipy.special.logsumexp(totals, axis=0) - copies
    return log_evidence, np.diff(evidences, prepend=0.0), filtered, smoothed, pairs, weights


@eqx.filter_jit
def answers(model, ys, inputs=None, mask=None, length=None, parallel=False):
    options = {"inputs": inputs, "mask": mask, "length": length}
    posterior = forward_backward(model, ys, parallel=parallel, **options)
    law = posterior.chain.marginals(parallel=parallel)
    return (
        posterior.log_evidence,
        posterior.log_evidence_increments,
        posterior.chain.filtered,
        law.probabilities,
        law.pairs,
    )


def assert_close(got, wanted, tolerance=1e-10):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def data(model, n=NUM_TIMES):
    us = jax.random.normal(jax.random.key(3), (n, 1)) if model.takes_input else None
    return model.simulate(jax.random.key(1), n, inputs=us)[2], us


MODELS = {
    "K=1": lambda: gaussian_model(1),
    "K=2": lambda: gaussian_model(2),
    "K=3": lambda: gaussian_model(3),
    "forbidden": lambda: gaussian_model(3, forbidden=True),
    "lags and inputs": lambda: lagged_model(2),
}


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_all_probabilities_are_sums_over_paths(name, parallel):
    model = MODELS[name]()
    ys, us = data(model)
    wanted = expected(model, np.asarray(ys), None if us is None else np.asarray(us))
    assert_close(answers(model, ys, us, parallel=parallel), wanted[:-1])


def test_eight_rows_and_missing_entries():
    model = gaussian_model(2)
    ys, _ = data(model, 8)
    observed = np.array(jax.random.bernoulli(jax.random.key(2), 0.6, ys.shape))
    observed[3] = False
    wanted = expected(model, np.asarray(ys), observed=observed)
    assert_close(answers(model, ys, mask=observed), wanted[:-1])
    assert_close(answers(model, jnp.where(observed, ys, jnp.nan), parallel=True), wanted[:-1])


def test_the_chain_gives_the_probability_of_each_path_and_draws_from_it():
    """Each cell of 4,000 draws deviates by 4.5 standard errors at most (false alarms: 1e-4)."""
    model = gaussian_model(2)
    ys, _ = data(model, 4)
    weights = expected(model, np.asarray(ys))[-1]
    chain = forward_backward(model, ys).chain
    paths = np.array(list(itertools.product(range(2), repeat=4)))
    got = np.exp(jax.vmap(chain.log_prob)(jnp.asarray(paths)))
    np.testing.assert_allclose(got, weights, rtol=1e-10, atol=1e-12)
    zs, _ = chain.sample(jax.random.key(0), 4000)
    shares = np.bincount(np.asarray(zs) @ (8, 4, 2, 1), minlength=16) / 4000
    assert np.all(np.abs(shares - weights) < 4.5 * np.sqrt(weights * (1 - weights) / 4000) + 1e-3)


@pytest.mark.parametrize("parallel", [False, True])
def test_padding_changes_nothing(parallel):
    model = gaussian_model(3)
    ys, _ = data(model)
    wanted = answers(model, ys, parallel=parallel)
    padded = jnp.concatenate([ys, jnp.full((4, 2), jnp.nan)])
    got = answers(model, padded, length=jnp.asarray(NUM_TIMES), parallel=parallel)
    n = NUM_TIMES
    trimmed = (got[0], got[1][:n], got[2][:n], got[3][:n], got[4][: n - 1])
    assert_close(trimmed, wanted)
    assert np.all(np.asarray(got[1][n:]) == 0)


@pytest.mark.parametrize("parallel", [False, True])
def test_one_observation(parallel):
    model = gaussian_model(3)
    ys, _ = data(model, 1)
    assert_close(answers(model, ys, parallel=parallel), expected(model, np.asarray(ys))[:-1])


def test_a_batch_equals_its_series():
    model = gaussian_model(2)
    batch = jnp.stack([data(model)[0], data(model)[0] + 1.0])
    together = jax.vmap(lambda ys: answers(model, ys))(batch)
    for row in range(2):
        assert_close([leaf[row] for leaf in together], answers(model, batch[row]))


@pytest.mark.parametrize("parallel", [False, True])
def test_many_rows_in_both_forms(dtype, parallel):
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), gaussian_model(3))
    ys = model.simulate(jax.random.key(1), 3000)[2].astype(dtype)
    got = answers(model, ys, parallel=parallel)
    exact = answers(model, ys)
    tolerance = 1e-9 if dtype == jnp.float64 else 2e-3
    assert_close(got[:1], exact[:1], tolerance)
    assert_close(got[2:], exact[2:], tolerance)
    assert all(leaf.dtype == dtype for leaf in got)


@pytest.mark.parametrize("parallel", [False, True])
def test_regimes_far_apart_stay_finite(dtype, parallel):
    """Regimes that do not communicate are mixture components: log p(y) = log Σ_j π_j Π g_j."""
    laws = [rd.Gaussian(jnp.full(1, mean), jnp.eye(1)) for mean in (0.0, 100.0)]
    model = SwitchingModel(Regimes.from_probabilities([0.5, 0.5], np.eye(2)), emission=laws)
    # The first row excludes the second regime by 5,000 nats, the others favour it by 30,000.
    ys = jnp.array([[0.0], [100.0], [100.0], [100.0], [100.0], [100.0], [100.0]])
    got = answers(model, ys, parallel=parallel)
    table = scipy.stats.norm.logpdf(np.asarray(ys), [0.0, 100.0], 1.0)
    wanted: Any = scipy.special.logsumexp(table.sum(0) + np.log(0.5))
    np.testing.assert_allclose(got[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(got[3], np.tile([0.0, 1.0], (7, 1)), atol=1e-6)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", ["forbidden", "lags and inputs"])
def test_gradients_are_finite_and_right(name, parallel):
    model = MODELS[name]()
    ys, us = data(model)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)

    @jax.jit
    def loss(flat):
        return answers(eqx.combine(unravel(flat), rest), ys, us, parallel=parallel)[0]

    slope = jax.grad(loss)(flat)
    direction = jnp.sin(jnp.arange(flat.shape[0]) + 1.0)
    step = 1e-5 * direction
    wanted = (loss(flat + step) - loss(flat - step)) / 2e-5
    np.testing.assert_allclose(slope @ direction, wanted, rtol=1e-6)


def test_the_most_probable_path_is_the_best_of_all():
    model = lagged_model(2)
    ys, us = data(model)
    paths, totals = brute_force(model, np.asarray(ys), np.asarray(us))
    path, log_joint = most_probable_path(model, ys, inputs=us)
    np.testing.assert_array_equal(path, paths[np.argmax(totals[:, -1])])
    np.testing.assert_allclose(log_joint, totals[:, -1].max(), rtol=1e-12)
    np.testing.assert_allclose(log_joint, model.log_joint(path, None, ys, inputs=us), rtol=1e-12)


def test_the_most_probable_path_repeats_its_end_in_padding():
    model = gaussian_model(3)
    ys, _ = data(model)
    padded = jnp.concatenate([ys, jnp.full((3, 2), jnp.nan)])
    path, value = most_probable_path(model, ys)
    longer, same = most_probable_path(model, padded, length=NUM_TIMES)
    np.testing.assert_array_equal(longer, [*path, *[path[-1]] * 3])
    np.testing.assert_allclose(value, same, rtol=1e-12)
