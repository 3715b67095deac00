"""Products of independent components."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd


def component(shift: float, num_regimes: int = 2) -> rd.switching.SwitchingModel:
    eye, zero = jnp.eye(1), jnp.zeros(1)
    rows = np.full((num_regimes, num_regimes), 0.2 / num_regimes) + 0.8 * np.eye(num_regimes)
    return rd.switching.SwitchingModel(
        rd.switching.Regimes.from_probabilities(rows[0], rows),
        prior=rd.Gaussian(zero + shift, eye),
        transition=[
            rd.LinearGaussianKernel((0.5 + 0.1 * j) * eye, zero + shift * j, (j + 1.0) * eye)
            for j in range(num_regimes)
        ],
        emission=rd.LinearGaussianKernel(eye, zero, 0.5 * eye),
    )


def test_components_that_are_observed_apart_are_independent():
    components = [component(0.5), component(-1.0, 3)]
    both = rd.LinearGaussianKernel(jnp.eye(2), jnp.zeros(2), 0.5 * jnp.eye(2))
    model = rd.switching.product_model(components, both)
    ys = model.simulate(jax.random.key(0), 4)[2]
    exact = rd.switching.enumerate_regimes(model, ys)
    apart = [
        rd.switching.enumerate_regimes(one, ys[:, i : i + 1]) for i, one in enumerate(components)
    ]
    np.testing.assert_allclose(exact.log_evidence, sum(one.log_evidence for one in apart))
    first, second = (one.marginals.probabilities for one in apart)
    joint = (first[:, :, None] * second[:, None]).reshape(4, 6)
    np.testing.assert_allclose(exact.marginals.probabilities, joint, atol=1e-10)
    means = jnp.concatenate([one.marginals.mean for one in apart], axis=1)
    np.testing.assert_allclose(exact.marginals.mean, means, atol=1e-10)


def test_learning_keeps_the_components_independent(tmp_path):
    both = rd.LinearGaussianKernel(jnp.eye(2), jnp.zeros(2), 0.5 * jnp.eye(2))
    model = rd.switching.product_model([component(0.5), component(-1.0)], both)
    learned = jax.tree.map(lambda leaf: leaf + 0.1, model)
    for kernel in rd.unwrap(learned).transition:
        np.testing.assert_array_equal(kernel.weight * (1 - jnp.eye(2)), 0.0)
    rd.save(tmp_path / "model.rd", model)
    loaded = rd.load(tmp_path / "model.rd")
    ys = model.simulate(jax.random.key(0), 4)[2]
    one, other = (rd.switching.gpb2_smoother(each, ys).log_evidence for each in (model, loaded))
    np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("untyped")
def test_other_components_are_refused():
    with pytest.raises(ValueError, match="one component or more"):
        rd.switching.product_model([], component(0.0).emission)
    nonlinear = rd.switching.SwitchingModel(
        component(0.0).regimes,
        component(0.0).emission,
        rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(jnp.ones(1))),
    )
    with pytest.raises(TypeError, match="linear and Gaussian given"):
        rd.switching.product_model([nonlinear], nonlinear.emission)
