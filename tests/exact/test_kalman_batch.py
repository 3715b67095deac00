"""Many series at once: each posterior is that of its series, and covariances are computed once."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_models import random_model

import retrodict as rd

COUNT, ROWS = 3, 12


def problem(num_inputs=0):
    rng = np.random.default_rng(0)
    ys = rng.normal(size=(COUNT, ROWS, 2))
    inputs = rng.normal(size=(COUNT, ROWS, num_inputs))
    return random_model(rng, 2, 2, num_inputs), ys, inputs


def cases():
    rng = np.random.default_rng(1)
    gap = np.ones((COUNT, ROWS, 2), bool)
    gap[:, 4:7] = False
    return {
        "all observed": ({}, True),
        "the same gap": ({"mask": gap}, True),
        "different gaps": ({"mask": rng.random((COUNT, ROWS, 2)) < 0.8}, False),
        "the same length": ({"length": 7}, True),
        "different lengths": ({"length": np.array([12, 7, 1])}, False),
    }


@pytest.mark.parametrize("name", cases())
def test_batch_posteriors_equal_single_series(name):
    options, shared = cases()[name]
    model, ys, _ = problem()
    batch = rd.kalman_smoother_batch(model, ys, **options)
    assert batch.shared is shared
    assert len(batch) == COUNT
    marginals = batch.marginals()
    for i in range(COUNT):
        of_series = {key: value[i] if np.ndim(value) else value for key, value in options.items()}
        single = rd.kalman_smoother(model, ys[i], **of_series)
        expected = single.chain.marginals()
        np.testing.assert_allclose(marginals.mean[i], expected.mean, atol=1e-12)
        np.testing.assert_allclose(marginals.covariance[i], expected.covariance, atol=1e-12)
        np.testing.assert_allclose(batch.log_evidence[i], single.log_evidence, rtol=1e-12)
        path = single.chain.sample(jax.random.key(i), 1)[0]
        assert batch[i].chain.log_prob(path) == pytest.approx(float(single.chain.log_prob(path)))


def test_nan_marks_missing_values_in_batches():
    model, ys, _ = problem()
    ys[:, 4:7] = np.nan
    batch = rd.kalman_smoother_batch(model, ys)
    expected = rd.kalman_smoother(model, ys[1])
    assert batch.shared
    assert batch.log_evidence[1] == pytest.approx(float(expected.log_evidence))


def test_inputs_of_each_series_move_means_alone():
    model, ys, inputs = problem(num_inputs=1)
    batch = rd.kalman_smoother_batch(model, ys, inputs=inputs)
    assert batch.shared
    single = rd.kalman_smoother(model, ys[2], inputs=inputs[2])
    np.testing.assert_allclose(
        batch[2].chain.marginals().mean, single.chain.marginals().mean, atol=1e-12
    )

    def scaled(u):
        return 0.5 * jnp.eye(2), jnp.zeros(2), rd.Diagonal(jnp.exp(u) * jnp.ones(2))

    varying = eqx.tree_at(lambda m: m.transition, model, rd.VaryingLinearGaussianKernel(scaled))
    batch = rd.kalman_smoother_batch(varying, ys, inputs=inputs)
    assert not batch.shared
    single = rd.kalman_smoother(varying, ys[2], inputs=inputs[2])
    assert batch.log_evidence[2] == pytest.approx(float(single.log_evidence))
    assert rd.kalman_smoother_batch(varying, ys, inputs=inputs[0]).shared


def test_batch_derivatives_equal_single_series():
    model, ys, _ = problem()

    def total(weight, smoother):
        moved = eqx.tree_at(lambda m: m.transition.weight, model, weight)
        return smoother(moved)

    weight = model.transition.weight
    batch = jax.grad(total)(
        weight, lambda model: jnp.sum(rd.kalman_smoother_batch(model, ys).log_evidence)
    )
    single = jax.grad(total)(
        weight, lambda model: sum(rd.kalman_smoother(model, y).log_evidence for y in ys)
    )
    np.testing.assert_allclose(batch, single, atol=1e-10)


def test_batch_samples_and_maps_each_chain():
    model, ys, _ = problem()
    batch = rd.kalman_smoother_batch(model, ys)
    paths = batch.sample(jax.random.key(0), 400)
    assert paths.shape == (COUNT, 400, ROWS, 2)
    spread = batch.marginals().std / 20  # a standard error of a mean of 400 draws
    assert np.max(np.abs(np.mean(paths, axis=1) - batch.marginals().mean) / spread) < 5
    densities = batch.map(lambda chain, path: chain.log_prob(path), paths[:, 0])
    assert densities[1] == pytest.approx(float(batch[1].chain.log_prob(paths[1, 0])))


def test_shared_covariances_have_no_batch_axis():
    model, ys, _ = problem()
    chain = rd.kalman_smoother_batch(model, ys).chain
    assert chain.laws.mean.shape == (COUNT, ROWS, 2)
    assert chain.laws.scale_tril.shape == (ROWS, 2, 2)


def test_kalman_smoother_batch_refuses_bad_arguments():
    model, ys, _ = problem()
    with pytest.raises(ValueError, match="columns"):
        rd.kalman_smoother_batch(model, ys[:, :, :1])
    with pytest.raises(IndexError, match="between 0 and 2"):
        rd.kalman_smoother_batch(model, ys)[3]
    nonlinear = eqx.tree_at(
        lambda m: m.emission, model, rd.NonlinearGaussianKernel(jnp.tanh, jnp.eye(2))
    )
    with pytest.raises(TypeError, match="linear-Gaussian emission"):
        rd.kalman_smoother_batch(nonlinear, ys)


def test_kalman_smoother_batch_accepts_traced_observations():
    model, ys, _ = problem()
    evidence = jax.jit(lambda ys: rd.kalman_smoother_batch(model, ys).log_evidence)(jnp.asarray(ys))
    np.testing.assert_allclose(evidence, rd.kalman_smoother_batch(model, ys).log_evidence)


@pytest.mark.slow
def test_large_batches_with_masks_of_their_own_do_not_hang_on_two_cores():
    """With one thread per core, jaxlib 0.10 hangs in this batch."""
    code = """
import jax.numpy as jnp, numpy as np, retrodict as rd
rng, eye = np.random.default_rng(0), jnp.eye(10)
model = rd.StateSpaceModel(
    rd.Gaussian(jnp.zeros(10), eye),
    rd.LinearGaussianKernel(0.9 * eye, jnp.zeros(10), eye),
    rd.LinearGaussianKernel(eye, jnp.zeros(10), eye),
)
mask = rng.random((64, 500, 10)) > 0.1
batch = rd.kalman_smoother_batch(model, rng.normal(size=mask.shape), mask=mask)
print(batch.marginals().mean.shape)
"""
    environment = {name: v for name, v in os.environ.items() if name != "PJRT_NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=300
    )
    assert done.stdout.split() == [b"(64,", b"500,", b"10)"], done.stderr
