"""Reference posteriors, against posteriors that are known exactly."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd
from retrodict.bounds import reference


def noisy_runs(seed: int, mode_noise: float) -> Any:
    """Smoothers whose share of one of two equal modes is off by a normal number of this scale."""
    rng = np.random.default_rng(seed)

    def smoother(key: Any, model: Any, series: Any, count: int) -> Any:
        share = np.clip(0.5 + mode_noise * rng.normal(), 0.0, 1.0)
        signs = np.where(rng.random((count, 1, 1)) < share, -1.0, 1.0)
        return SimpleNamespace(
            samples=jnp.asarray(3.0 * signs + 0.1 * rng.normal(size=(count, 1, 1))),
            log_evidence=jnp.zeros(()),
            status=jnp.zeros((), int),
            filtered=SimpleNamespace(log_evidence_standard_error=lambda: jnp.zeros(())),
        )

    return smoother


def one_row() -> Any:
    model = rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        rd.NonlinearGaussianKernel(jnp.square, rd.Diagonal(jnp.ones(1))),
    )
    return model, model.series(jnp.ones((1, 1)))


def test_runs_that_agree_by_chance_are_no_reference(monkeypatch: pytest.MonkeyPatch):
    """A share of a mode that is off by 0.25 in each run: three runs are often close together."""
    model, series = one_row()
    used, wrong = 0, 0
    for seed in range(100):
        monkeypatch.setattr(reference, "tempered_smoother", noisy_runs(seed, 0.25))
        result = reference._from_runs(jax.random.key(0), model, series, 3, 500, ())
        if result.problem is None:
            used += 1
            wrong += abs(float(jnp.mean(result.states < 0)) - 0.5) > 0.15
    assert used <= 15 and wrong <= 5


@pytest.mark.parametrize("num_runs", [3, 6])
def test_runs_that_differ_by_finite_samples_alone_are_a_reference(
    monkeypatch: pytest.MonkeyPatch, num_runs: int
):
    model, series = one_row()
    for seed in range(20):
        monkeypatch.setattr(reference, "tempered_smoother", noisy_runs(seed, 0.0))
        result = reference._from_runs(jax.random.key(0), model, series, num_runs, 1000, ())
        assert result.problem is None
        assert float(jnp.mean(result.states < 0)) == pytest.approx(0.5, abs=0.04)


def test_a_grid_covers_what_few_paths_of_the_prior_reach():
    """The far mode has a mass of 0.002 before the data, and of 0.2 given them."""
    rare, far, step = 0.002, 30.0, 0.03
    model = rd.StateSpaceModel(
        rd.GaussianMixture(
            jnp.log(jnp.array([1 - rare, rare])),
            jnp.array([[0.0], [far]]),
            0.1 * jnp.ones((2, 1, 1)),
        ),
        rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), step * jnp.eye(1)),
        rd.NonlinearGaussianKernel(lambda x: jnp.abs(x - 16.0), rd.Diagonal(jnp.ones(1))),
    )
    ys = np.full(12, 14.8)
    # Far from 16 the sensor is linear: both modes are Gaussian, with these evidences.
    moves = step**2 * np.minimum(np.arange(12)[:, None], np.arange(12)[None, :])
    covariance = 0.01 + moves + np.eye(12)
    near, away = (-0.5 * (ys - m) @ np.linalg.solve(covariance, ys - m) for m in (16.0, 14.0))
    odds = rare / (1 - rare) * np.exp(away - near)
    assert 0.1 < odds / (1 + odds) < 0.4
    result = reference.find_reference(jax.random.key(0), model, model.series(ys[:, None]))
    assert result.problem is None
    assert float(jnp.mean(result.states > 16)) == pytest.approx(odds / (1 + odds), abs=0.05)


@pytest.mark.slow
def test_the_reference_of_a_very_sharp_sensor_is_right_or_has_a_problem():
    """By symmetry both signs have probability ½. Each run of 1,000 particles is off by 0.2.

    Without a problem, the standard deviation of their mean is at most 0.1 with probability 0.9. The
    limit of 0.3 is three of them, and a lost mode is off by 0.5.
    """
    model = rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(1), 3.0 * jnp.eye(1)),
        rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), 0.3 * jnp.eye(1)),
        rd.NonlinearGaussianKernel(jnp.square, rd.Diagonal(0.003 * jnp.ones(1))),
    )
    rng = np.random.default_rng(4)
    ys = (3.0 + 0.3 * np.cumsum(rng.normal(size=30))) ** 2 + 0.003 * rng.normal(size=30)
    for seed in range(4):
        result = reference.find_reference(jax.random.key(seed), model, model.series(ys[:, None]))
        off = abs(float(jnp.mean(result.states[:, 0] < 0)) - 0.5)
        assert result.problem is not None or off < 0.3
