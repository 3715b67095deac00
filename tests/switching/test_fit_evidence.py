"""Maximum likelihood of switching models by L-BFGS, and their log-evidence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd
from retrodict.switching import (
    Regimes,
    SwitchingModel,
    enumerate_regimes,
    fit_evidence,
    gpb2_smoother,
    log_evidence,
)

REGIMES = Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]])


def switching_level(scales=(0.1, 2.0)):
    eye, zero = jnp.eye(1), jnp.zeros(1)
    return SwitchingModel(
        REGIMES,
        prior=rd.Frozen(rd.Gaussian(zero, eye)),
        transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in scales],
        emission=rd.Frozen(rd.LinearGaussianKernel(eye, zero, 0.1 * eye)),
    )


def test_the_evidence_is_that_of_gpb2_with_a_state_and_near_the_exact_one():
    model = switching_level()
    ys = model.simulate(jax.random.key(0), 6)[2]
    got = log_evidence(model, ys)
    np.testing.assert_allclose(got, gpb2_smoother(model, ys).log_evidence, rtol=1e-12)
    np.testing.assert_allclose(got, enumerate_regimes(model, ys).log_evidence, atol=0.1)


def test_the_evidence_ignores_padding_and_honours_masks():
    model = SwitchingModel(
        REGIMES, emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 3.0)]
    )
    ys = model.simulate(jax.random.key(0), 8)[2]
    padded = jnp.concatenate([ys[:5], jnp.full((3, 1), 7.0)])
    np.testing.assert_allclose(
        log_evidence(model, padded, length=5), log_evidence(model, ys[:5]), rtol=1e-12
    )
    hidden = ys.at[3].set(jnp.nan)
    mask = jnp.arange(8)[:, None] != 3
    np.testing.assert_allclose(
        log_evidence(model, hidden), log_evidence(model, ys, mask=mask), rtol=1e-12
    )


@pytest.mark.slow
def test_learns_a_model_with_a_state_and_leaves_frozen_parts():
    truth = switching_level()
    ys = truth.simulate(jax.random.key(2), 200)[2]
    start = switching_level(scales=(0.5, 0.6))
    result = fit_evidence(jax.random.key(0), start, ys, num_starts=2, num_steps=60, progress=False)
    assert result.start_values.shape == (2,)
    assert result.log_evidence == result.start_values.max()
    assert result.log_evidence > log_evidence(truth, ys)
    np.testing.assert_allclose(result.log_evidence, log_evidence(result.model, ys), rtol=1e-9)
    learned = rd.unwrap(result.model)
    scales = sorted(abs(kernel.scale_tril[0, 0]) for kernel in learned.transition)
    np.testing.assert_allclose(scales, (0.1, 2.0), rtol=0.5)
    assert learned.emission.scale_tril[0, 0] == 0.1


def test_the_history_ends_at_the_evidence_per_row():
    model = SwitchingModel(
        REGIMES, emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 1.0)]
    )
    ys = model.simulate(jax.random.key(0), 100)[2] * 3.0
    result = fit_evidence(jax.random.key(0), model, ys, num_starts=1, progress=False)
    assert result.status == "converged"
    np.testing.assert_allclose(result.history[-1] * 100, result.log_evidence, rtol=1e-9)


def test_refuses_series_without_data():
    with pytest.raises(ValueError, match="observed entries"):
        fit_evidence(jax.random.key(0), switching_level(), jnp.full((5, 1), jnp.nan))
