"""Gaussian-sum smoothing with recurrent regimes, against a dense grid of states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd

switching = rd.switching


def recurrent(noise: float) -> rd.switching.SwitchingModel:
    """Regimes that depend on the sign of the state before, observed with some noise."""
    weight = jnp.array([[-4.0], [4.0]])
    return switching.SwitchingModel(
        switching.Regimes(jnp.zeros(2), jnp.array([[0.5, 0.0], [0.0, 0.5]]), weight),
        prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        transition=[
            rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.full(1, b), 0.3 * jnp.eye(1))
            for b in (0.5, -0.5)
        ],
        emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), noise * jnp.eye(1)),
    )


def on_grid(model: rd.switching.SwitchingModel, ys: np.ndarray) -> tuple[float, np.ndarray]:
    """The log-evidence and the filtering probabilities, on a dense grid of states."""
    points = jnp.linspace(-6.0, 6.0, 601)
    step = float(points[1] - points[0])
    emit = jax.vmap(lambda x, y: model.emission.log_prob(x[None], y[None]), in_axes=(0, None))
    kernels = np.stack(
        [
            jax.vmap(
                lambda before, k=k: jax.vmap(lambda x: k.log_prob(before[None], x[None]))(points)
            )(points)
            for k in model.transition
        ]
    )
    chances = np.exp(jax.vmap(lambda x: model.regimes.log_transition(x[None]))(points))
    prior = np.exp(jax.vmap(lambda x: model.prior.log_prob(x[None]))(points))
    law = 0.5 * np.stack([prior, prior])
    evidence, probabilities = 0.0, []
    for k, y in enumerate(jnp.asarray(ys)[:, 0]):
        if k:
            law = step * np.einsum("ix,xij,jxy->jy", law, chances, np.exp(kernels), optimize=True)
        law = law * np.exp(np.asarray(emit(points, y)))[None]
        total = step * law.sum()
        evidence += np.log(total)
        law = law / total
        probabilities.append(step * law.sum(axis=1))
    return evidence, np.asarray(probabilities)


@pytest.mark.parametrize("noise", [0.05, 1.0])
def test_points_bring_recurrent_regimes_closer_to_the_grid(noise):
    model = recurrent(noise)
    _, _, ys = model.simulate(jax.random.key(0), 40)
    evidence, probabilities = on_grid(model, np.asarray(ys))

    def errors(rule: rd.Taylor | rd.GaussHermite) -> tuple[float, float]:
        posterior = switching.gpb2_smoother(model, ys, rule=rule)
        off = np.abs(np.asarray(posterior.chain.filtered) - probabilities).mean()
        return abs(float(posterior.log_evidence) - evidence), float(off)

    at_mean, at_points = errors(rd.Taylor()), errors(rd.GaussHermite(5))
    print(noise, evidence, at_mean, at_points)
    assert at_points[0] < max(at_mean[0], 0.1)
    assert at_points[1] < max(at_mean[1], 0.01)


def test_probabilities_remain_a_distribution():
    posterior = switching.gpb2_smoother(recurrent(1.0), jnp.zeros((5, 1)), rule=rd.Unscented())
    totals = np.exp(posterior.chain.moves.log_probabilities).sum(axis=-1)
    np.testing.assert_allclose(totals, 1.0, atol=1e-12)
