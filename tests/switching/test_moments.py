"""Expected sufficient statistics, against enumeration, a dense grid and explicit averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_close

import retrodict as rd
from retrodict.switching.moments import RegimeMoments, draw_paths, pool

NUM_SAMPLES = 2000


def model(**regimes: object) -> rd.switching.SwitchingModel:
    eye = jnp.eye(1)
    options = {"transition_logits": jnp.array([[2.0, 0.0], [0.0, 1.0]]), **regimes}
    return rd.switching.SwitchingModel(
        rd.switching.Regimes(jnp.zeros(2), **options),
        prior=rd.Gaussian(jnp.zeros(1), eye),
        transition=[
            rd.LinearGaussianKernel(0.9 * eye, jnp.full(1, b), s * eye)
            for b, s in ((0.5, 0.3), (-0.5, 0.8))
        ],
        emission=rd.LinearGaussianKernel(eye, jnp.zeros(1), 0.4 * eye),
    )


def moments_of(law: rd.switching.SwitchingModel, ys: jax.Array, **options: object) -> RegimeMoments:
    batch = jax.tree.map(lambda leaf: leaf[None], law.series(ys, **options))
    paths = draw_paths(rd.unwrap(law), batch, jax.random.key(1), NUM_SAMPLES)
    return jax.tree.map(lambda leaf: leaf[0], pool(paths, batch, 2))


@pytest.fixture(scope="module")
def simulated():
    return model().simulate(jax.random.key(0), 6)


def test_moments_agree_with_enumeration(simulated):
    _, _, ys = simulated
    ys = ys.at[2].set(jnp.nan)
    exact = rd.switching.enumerate_regimes(model(), ys).marginals
    moments = moments_of(model(), ys)
    # The standard error of a probability is at most 0.5 / √2000 = 0.011; GPB2 merges laws as well.
    assert_close(moments.probabilities, exact.probabilities, 0.06)
    assert_close(moments.pairs, exact.pairs, 0.06)
    weights = np.asarray(moments.probabilities)
    mean = np.einsum("tj,tjd->td", weights, moments.means)
    assert_close(mean, exact.mean, 0.05)
    shifts = np.asarray(moments.means) - mean[:, None]
    covariance = np.einsum("tj,tjde->tde", weights, moments.covariances)
    covariance += np.einsum("tj,tjd,tje->tde", weights, shifts, shifts)
    assert_close(covariance, exact.covariance, 0.05)
    pair_mean = np.einsum("tj,tjd->td", weights[1:], moments.pair_means)
    assert_close(pair_mean, np.concatenate([mean[:-1], mean[1:]], axis=1), 1e-9)


@pytest.mark.slow
def test_paths_and_forced_regimes_are_averaged(simulated):
    _, _, ys = simulated
    batch = jax.tree.map(lambda leaf: leaf[None], model().series(ys, length=5))
    paths = draw_paths(model(), batch, jax.random.key(1), 7)
    forced = jnp.full((1, 6), -1).at[0, 2].set(1)
    moments = pool(paths, batch, 2, forced)
    zs = np.array(paths.zs[0])
    zs[:, 2] = 1
    for k in range(5):
        for j in range(2):
            inside = zs[:, k] == j
            assert_close(moments.probabilities[0, k, j], inside.mean())
            if inside.any():
                means = np.asarray(paths.means[0])[inside, k]
                assert_close(moments.means[0, k, j], means.mean(axis=0))
                within = np.asarray(paths.covariances[0])[inside, k].mean(axis=0)
                spread = np.cov(means.T, bias=True).reshape(1, 1)
                assert_close(moments.covariances[0, k, j], within + spread)
    assert np.all(moments.probabilities[0, 5] == 0) and np.all(moments.moves[0, :, 4] == 0)
    assert_close(moments.pairs.sum(axis=(-2, -1))[0, :4], np.ones(4))


def test_recurrent_regimes_inform_the_states():
    """One step, whose posterior is computed on a grid of both states."""
    law = model(state_weight=jnp.array([[-5.0], [5.0]]), transition_logits=jnp.zeros((1, 2)))
    ys = jnp.array([[jnp.nan], [0.3]])
    moments = moments_of(law, ys)
    points = jnp.linspace(-6, 6, 601)
    log_prior = jax.vmap(lambda x: law.prior.log_prob(x[None]))(points)
    log_rows = jax.vmap(lambda x: law.regimes.log_transition(x[None])[0])(points)
    emit = jax.vmap(lambda x: law.emission.log_prob(x[None], ys[1]))(points)
    pairs = []
    for j, kernel in enumerate(law.transition):
        moved = jax.vmap(
            lambda x, kernel=kernel: jax.vmap(lambda y: kernel.log_prob(x[None], y[None]))(points)
        )(points)
        pairs.append(np.exp((log_prior + log_rows[:, j])[:, None] + moved + emit[None]))
    joint = np.stack(pairs)
    joint /= joint.sum()
    assert_close(moments.probabilities[1], joint.sum(axis=(1, 2)), 0.05)
    for j in range(2):
        before = joint[j].sum(axis=1) / joint[j].sum()
        assert_close(moments.pair_means[0, j, 0], before @ np.asarray(points), 0.06)
