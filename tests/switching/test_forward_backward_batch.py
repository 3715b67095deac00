"""Forward–backward of many series against that of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd
from retrodict.switching import (
    Regimes,
    SwitchingModel,
    forward_backward,
    forward_backward_batch,
    markov_autoregression,
)


def gaussian_model(matrix, spread=1.0):
    count = len(matrix)
    means = spread * np.arange(count)
    laws = [rd.Gaussian(jnp.full(1, mean), jnp.eye(1)) for mean in means]
    return SwitchingModel(
        Regimes.from_probabilities(np.full(count, 1 / count), matrix), emission=laws
    )


def input_model():
    regimes = Regimes(np.zeros(2), np.eye(2), input_weight=[[0.5], [-0.5]])
    return SwitchingModel(regimes, emission=gaussian_model(np.full((2, 2), 0.5)).emission)


MODELS = {
    "two": lambda: gaussian_model(np.array([[0.9, 0.1], [0.2, 0.8]])),
    "one": lambda: gaussian_model(np.ones((1, 1))),
    "many": lambda: gaussian_model(np.full((9, 9), 0.1 / 9) + 0.9 * np.eye(9)),
    "forbidden": lambda: gaussian_model(np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0, 0, 1.0]])),
    "histories": lambda: markov_autoregression(2, order=2),
    "inputs": input_model,
    # A regime that is excluded by 5,000 nats and then favoured: probabilities underflow.
    "far apart": lambda: gaussian_model(np.eye(2), spread=100.0),
}


def data(model, num_series=3, n=12):
    if float(rd.unwrap(model).regimes.log_transition(u=jnp.zeros(1))[0, -1]) < -100.0:
        ys = jnp.stack([jnp.full((n, 1), 100.0).at[0].set(first) for first in (0.0, 100.0, 3.0)])
        if model.num_regimes == 2:
            return ys, None
    us = jax.random.normal(jax.random.key(1), (num_series, n, 1)) if model.takes_input else None
    keys = jax.random.split(jax.random.key(0), num_series)
    draw = lambda key, us: model.simulate(key, n, inputs=us)[2]  # noqa: E731
    return jax.vmap(draw)(keys, us), us


def one_by_one(model, ys, us=None, mask=None, length=None):
    def one(ys, us, mask, length):
        posterior = forward_backward(model, ys, inputs=us, mask=mask, length=length)
        smoothed = posterior.chain.marginals().probabilities
        return posterior.log_evidence, posterior.chain.filtered, smoothed

    return jax.vmap(one)(ys, us, mask, length)


def assert_same(result, wanted, tolerance=1e-10):
    got = (result.log_evidence, result.filtered, result.smoothed)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_equals_its_series(name):
    model = MODELS[name]()
    ys, us = data(model)
    assert_same(forward_backward_batch(model, ys, inputs=us), one_by_one(model, ys, us))


def test_gaps_and_lengths():
    model = MODELS["two"]()
    ys, _ = data(model)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, ys.shape)
    length = jnp.array([12, 5, 1])
    got = forward_backward_batch(model, ys, mask=mask, length=length)
    assert_same(got, one_by_one(model, ys, None, mask, length))


def test_both_precisions_keep_regimes_that_are_far_apart(dtype):
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), MODELS["far apart"]())
    ys = jnp.full((2, 7, 1), 100.0, dtype).at[:, 0].set(0.0)
    result = forward_backward_batch(model, ys)
    np.testing.assert_allclose(result.smoothed[..., 1], 1.0, atol=1e-6)
    assert result.smoothed.dtype == dtype


def test_gradients_are_those_of_the_series():
    model = MODELS["two"]()
    ys, _ = data(model)

    def total(logits, batch):
        regimes = Regimes(jnp.zeros(2), logits)
        new = SwitchingModel(regimes, emission=model.emission)
        if batch:
            return jnp.sum(forward_backward_batch(new, ys).log_evidence)
        return jnp.sum(one_by_one(new, ys)[0])

    logits = model.regimes.transition_logits
    got, wanted = (jax.grad(total)(logits, batch) for batch in (True, False))
    np.testing.assert_allclose(got, wanted, rtol=1e-9)
