"""Permutations of regimes, a canonical order, and matching."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd
from retrodict.models import named_parameters
from retrodict.switching import (
    Regimes,
    SwitchingModel,
    canonical_order,
    forward_backward,
    log_evidence,
    match_regimes,
    permute,
)


def recurrent_model():
    rng = np.random.default_rng(0)
    eye, zero = jnp.eye(2), jnp.zeros(2)
    regimes = Regimes(
        rng.normal(size=3),
        rng.normal(size=(3, 3)),
        rng.normal(size=(3, 2)),
        rd.Frozen(rng.normal(size=(3, 1))),
    )
    return SwitchingModel(
        regimes,
        prior=rd.Gaussian(zero, eye),
        transition=[rd.LinearGaussianKernel(0.9 * eye, zero + b, eye) for b in (2.0, -1.0, 0.5)],
        emission=rd.Frozen(rd.LinearGaussianKernel(eye, zero, eye)),
    )


def test_a_permuted_model_is_the_same_law_of_relabelled_paths():
    model, order = recurrent_model(), np.array([2, 0, 1])
    us = jnp.ones((5, 1))
    zs, xs, ys = model.simulate(jax.random.key(0), 5, inputs=us)
    permuted = permute(model, order)
    new = jnp.argsort(order)[zs]
    got = permuted.log_joint(new, xs, ys, inputs=us)
    np.testing.assert_allclose(got, model.log_joint(zs, xs, ys, inputs=us), rtol=1e-12)


@pytest.mark.parametrize("form", ["mean", "intercept"])
def test_a_permuted_autoregression_has_the_same_evidence(form):
    model = rd.models.markov_switching(
        regimes=3, order=1, switching=f"{form},variance,autoregression"
    )
    ys = jax.random.normal(jax.random.key(0), (12, 1))
    permuted = permute(model, [1, 2, 0])
    np.testing.assert_allclose(log_evidence(permuted, ys), log_evidence(model, ys), rtol=1e-12)
    before, after = (np.asarray(named_parameters(each)[form]) for each in (model, permuted))
    np.testing.assert_array_equal(after, before[[1, 2, 0]])


def test_the_canonical_order_does_not_depend_on_the_order_given():
    model = recurrent_model()
    wanted = canonical_order(model)
    biases = [kernel.bias[0] for kernel in wanted.transition]
    assert biases == sorted(biases)
    again = canonical_order(permute(model, [1, 2, 0]))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    down = canonical_order(model, key=lambda m, j: -m.transition[j].bias[0])
    assert [kernel.bias[0] for kernel in down.transition] == biases[::-1]


def test_regimes_are_matched_by_their_probabilities():
    laws = [rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 5.0, 10.0)]
    regimes = Regimes.from_probabilities(np.full(3, 1 / 3), 0.1 + 0.7 * np.eye(3))
    model, order = SwitchingModel(regimes, emission=laws), [2, 0, 1]
    zs, _, ys = model.simulate(jax.random.key(0), 100)
    p = forward_backward(permute(model, order), ys).chain.marginals().probabilities
    back = match_regimes(p, forward_backward(model, ys).chain.marginals().probabilities)
    np.testing.assert_array_equal(back, np.argsort(order))
    np.testing.assert_array_equal(match_regimes(p, zs), back)


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1], [1, 2, 3]])
def test_refuses_what_is_not_a_permutation(order):
    with pytest.raises(ValueError, match="`order` must be a permutation"):
        permute(recurrent_model(), order)
