"""Frozen leaves are fixed, whatever the optimiser adds to their gradient of zero."""

import jax
import jax.numpy as jnp
import optax
import pytest

import retrodict as rd

WALK = rd.LinearGaussianKernel(0.9 * jnp.eye(1), 0.1 * jnp.ones(1), jnp.eye(1))
MODEL = rd.StateSpaceModel(rd.Gaussian(jnp.ones(1), jnp.eye(1)), rd.Frozen(WALK), WALK)
DECAY = optax.adamw(0.1, weight_decay=0.5)


def assert_fixed(model: rd.StateSpaceModel):
    for one, other in zip(*map(jax.tree.leaves, (model.transition, MODEL.transition)), strict=True):
        assert jnp.array_equal(one, other)
    assert not jnp.array_equal(rd.unwrap(model).emission.weight, WALK.weight)


def test_fit_with_weight_decay_leaves_frozen_parts_unchanged():
    result = rd.fit(
        jax.random.key(0),
        rd.KalmanFamily(MODEL),
        MODEL,
        jnp.ones((2, 4, 1)),
        num_steps=2,
        learn="both",
        optimisation=rd.Optimisation(optimiser=DECAY, chunk_size=2, prepare=False),
        progress=False,
        mesh=None,
    )
    assert_fixed(result.model)
    assert isinstance(result.family, rd.KalmanFamily)
    assert_fixed(result.family.model)


def test_fit_evidence_with_weight_decay_leaves_frozen_parts_unchanged():
    result = rd.fit_evidence(
        jax.random.key(0),
        MODEL,
        jnp.ones((2, 4, 1)),
        num_steps=2,
        optimiser=DECAY,
        progress=False,
        mesh=None,
    )
    assert_fixed(result.model)


@pytest.mark.parametrize("learn", ["all", (True, [True])])
def test_fit_and_streams_refuse_the_same_choices(learn):
    key, family = jax.random.key(0), rd.KalmanFamily(MODEL)
    for call in (
        lambda: rd.fit(key, family, MODEL, jnp.ones((4, 1)), learn=learn),
        lambda: rd.online.OnlineLearner(None, MODEL, rd.online.KalmanScore(), learn=learn),
    ):
        with pytest.raises(ValueError, match="expects `learn` to be"):
            call()
