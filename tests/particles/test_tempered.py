"""Tempered particles and other starts: references for checks where a bootstrap filter fails."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonlinear_models import nonlinear_emission_model

import retrodict as rd
from retrodict._linearised.smoother import smooth_from_paths
from retrodict._model import prepare_data
from retrodict.bounds import reference
from retrodict.particles.particle_filter import run_filter
from retrodict.particles.tempered import TemperedFilter, tempered_smoother

ERROR = 0.02
MODEL = nonlinear_emission_model(jnp.square, ERROR, mean=0.2, noise=0.3)
YS = jnp.array([[2.0], [2.3], [jnp.nan], [1.8], [2.1], [2.4]])


@pytest.fixture(scope="module")
def exact():
    return rd.grid_smoother(MODEL, YS, rd.Grid([-5.0], [5.0], 3000))


@pytest.mark.statistical
def test_tempered_filter_survives_sharp_observations(exact):
    """False-alarm rate below 1e-4: four standard errors; the key is fixed."""
    posterior = tempered_smoother(jax.random.key(0), MODEL, prepare_data(MODEL, YS), 1000)
    assert int(posterior.status) == 0 and int(jnp.min(posterior.num_distinct)) > 200
    error = float(posterior.filtered.log_evidence_standard_error())
    assert abs(float(posterior.log_evidence - exact.log_evidence)) < 4 * error
    negative = exact.weights[:, exact.points[:, 0] < 0].sum(axis=1)
    np.testing.assert_allclose((posterior.samples < 0).mean(axis=0)[:, 0], negative, atol=4 * 0.04)


@pytest.mark.slow
def test_tempered_filter_ignores_padding():
    options = {"mask": None, "length": 3}
    padded = tempered_smoother(jax.random.key(0), MODEL, prepare_data(MODEL, YS, **options), 200)
    assert padded.samples.shape == (200, 6, 1)
    np.testing.assert_array_equal(padded.filtered.log_evidence_increments[3:], 0.0)


def test_tempered_filter_reports_impossible_observation():
    series = prepare_data(MODEL, YS[:4].at[3].set(1e200))
    # The filter alone: the program of the smoother takes several times as long to compile.
    run = eqx.filter_jit(lambda machine, key: run_filter(machine, key, series))
    filtered = run(TemperedFilter(MODEL, 100), jax.random.key(0))
    assert int(filtered.status) == 1 and int(filtered.status_time) == 3


def test_linearising_around_paths_finds_both_roots():
    series = prepare_data(MODEL, YS)
    paths = jnp.stack([jnp.full((6, 1), value) for value in (1.0, -1.0)])
    chains = smooth_from_paths(MODEL, series, paths, jnp.full((6, 1, 1), 0.05))
    means = jax.vmap(lambda chain: chain.marginals().mean)(chains)
    roots = np.sqrt(np.asarray(YS[:2, 0]))
    np.testing.assert_allclose(means[0, :2, 0], roots, atol=0.02)
    np.testing.assert_allclose(means[1, :2, 0], -roots, atol=0.02)


@pytest.mark.slow
def test_reference_finds_the_modes_of_the_grid(exact, monkeypatch):
    monkeypatch.setattr(reference, "GRIDS", {})
    result = reference.find_reference(jax.random.key(0), MODEL, prepare_data(MODEL, YS))
    assert result.method == "particles" and result.problem is None
    assert {bool(jnp.mean(mode.paths[:, 0]) > 0) for mode in result.modes} >= {True, False}
    shares = [np.exp(mode.log_evidence - float(exact.log_evidence)) for mode in result.modes]
    assert max(shares) < 1.2 and sum(share > 0.05 for share in shares) >= 2


def test_distances_detect_mode_masses_and_signs_of_products():
    xs = np.random.default_rng(0).normal(size=(1000, 1, 2)) * 0.1
    signs = np.where(np.arange(1000) < 500, 1.0, -1.0)[:, None, None]
    same, opposite = xs + signs * np.array([1.0, 1.0]), xs + signs * np.array([1.0, -1.0])
    alike = reference.distances(jnp.asarray(same[::2]), jnp.asarray(same[1::2]))
    assert float(alike[0]) < 0.12
    assert float(reference.distances(jnp.asarray(same), jnp.asarray(opposite))[0]) > 0.4
    moved = np.concatenate([same[:300], same[500:]])
    assert 0.08 < float(reference.distances(jnp.asarray(moved), jnp.asarray(same))[0]) < 0.2
