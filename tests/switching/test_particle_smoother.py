"""The Rao-Blackwellised particle smoother, against the sum over all paths of regimes."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd

switching = rd.switching


def model_of(
    num_regimes: int, dim: int, *, takes_input: bool = False, seed: int = 0
) -> switching.SwitchingModel:
    """Return a model whose regimes overlap, so that their posterior is spread."""
    draw = np.random.default_rng(seed)
    moves = draw.dirichlet(np.full(num_regimes, 4.0), size=num_regimes)
    weights = 0.8 * draw.normal(size=(num_regimes, dim, dim)) / np.sqrt(dim)

    def transition(j: int) -> rd.LinearGaussianKernel:
        driven = {"input_weight": np.full((dim, 1), 0.3 * j)} if takes_input else {}
        return rd.LinearGaussianKernel(
            weights[j], draw.normal(size=dim), (0.3 + 0.2 * j) * np.eye(dim), **driven
        )

    return switching.SwitchingModel(
        switching.Regimes.from_probabilities(np.full(num_regimes, 1 / num_regimes), moves),
        prior=[rd.Gaussian(draw.normal(size=dim), np.eye(dim)) for _ in range(num_regimes)],
        transition=[transition(j) for j in range(num_regimes)],
        emission=[
            rd.LinearGaussianKernel(np.eye(dim), np.full(dim, 0.2 * j), 0.8 * np.eye(dim))
            for j in range(num_regimes)
        ],
    )


def shortened(ys: jax.Array) -> dict:
    return {"length": 4, "mask": jnp.ones(ys.shape, bool).at[1].set(False)}


CASES = {
    "two regimes": (2, 1, 6, lambda ys: {}),
    "three regimes": (3, 2, 5, lambda ys: {}),
    "missing rows": (3, 1, 5, lambda ys: {"mask": jnp.ones(ys.shape, bool).at[0].set(False)}),
    "padding": (2, 2, 6, shortened),
    "one row": (3, 2, 1, lambda ys: {}),
    "one regime": (1, 2, 5, lambda ys: {}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ("two regimes", "padding") else pytest.mark.slow)
        for case in CASES
    ],
)
def test_all_paths_of_regimes_are_kept_and_the_filter_is_exact(case):
    num_regimes, dim, n, options = CASES[case]
    model = model_of(num_regimes, dim)
    ys = model.simulate(jax.random.key(1), n)[2]
    exact = switching.enumerate_regimes(model, ys, **options(ys))
    posterior = switching.rao_blackwellised_smoother(
        jax.random.key(2),
        model,
        ys,
        num_particles=num_regimes**n,
        num_samples=10,
        **options(ys),
    )
    np.testing.assert_allclose(posterior.log_evidence, exact.log_evidence, rtol=1e-10)
    # The filtering law of the last row is the smoothing law; padding repeats it.
    end = options(ys).get("length", n) - 1
    for row in range(end, n):
        laws, moments = posterior.chain.laws, exact.marginals
        filtered = laws.probabilities(num_regimes)[row]
        np.testing.assert_allclose(filtered, moments.probabilities[end], atol=1e-10)
        np.testing.assert_allclose(laws.mean[row], moments.mean[end], atol=1e-10)
        np.testing.assert_allclose(laws.covariance[row], moments.covariance[end], atol=1e-10)
    assert int(posterior.status) == 0
    assert int(posterior.status_time) == -1


def z_scores(estimates: jax.Array, exact: jax.Array) -> np.ndarray:
    """Return means of independent estimates minus exact values, in standard errors."""
    error = jnp.std(estimates, axis=0, ddof=1) / np.sqrt(estimates.shape[0])
    return np.asarray((jnp.mean(estimates, axis=0) - exact) / (error + 1e-12))


@pytest.mark.parametrize(
    "resampling", ["optimal", "systematic", "stratified", "residual", "multinomial"]
)
def test_evidence_is_unbiased(resampling):
    # Each z-score exceeds 4.5 with probability 7e-6.
    model = model_of(2, 1, takes_input=True)
    us = jnp.linspace(-1, 1, 6)[:, None]
    ys = model.simulate(jax.random.key(1), 6, inputs=us)[2]
    exact = switching.enumerate_regimes(model, ys, inputs=us)

    def ratio(key: jax.Array) -> jax.Array:
        posterior = switching.rao_blackwellised_smoother(
            key,
            model,
            ys,
            inputs=us,
            num_particles=6,
            num_samples=1,
            resampling=resampling,
            strict=False,
        )
        return jnp.exp(posterior.log_evidence - exact.log_evidence)

    ratios = jax.jit(jax.vmap(ratio))(jax.random.split(jax.random.key(3), 2000))
    assert jnp.std(ratios) > 1e-3
    assert abs(z_scores(ratios, jnp.ones(()))) < 4.5


@pytest.mark.parametrize("case", ["three regimes", pytest.param("padding", marks=pytest.mark.slow)])
def test_smoothed_moments_agree_with_enumeration(case):
    # At most 60 z-scores, each above 5 with probability 6e-7: 4e-5 in all. With all histories kept,
    # the paths of each of 100 runs are exact draws, so that averages over runs are unbiased.
    num_regimes, dim, n, options = CASES[case]
    model = model_of(num_regimes, dim)
    ys = model.simulate(jax.random.key(1), n)[2]
    exact = switching.enumerate_regimes(model, ys, **options(ys)).marginals

    def run(key: jax.Array) -> tuple:
        posterior = switching.rao_blackwellised_smoother(
            key,
            model,
            ys,
            num_particles=num_regimes**n,
            num_samples=40,
            strict=False,
            **options(ys),
        )
        moments, law = posterior.marginals, posterior.chain.marginals(key, num_samples=40)
        second = [m.covariance + m.mean[:, :, None] * m.mean[:, None] for m in (moments, law)]
        return moments.probabilities, moments.pairs, moments.mean, law.mean, *second, posterior.xs

    keys = jax.random.split(jax.random.key(4), 100)
    probabilities, pairs, mean, mean_of_chain, second, second_of_chain, xs = jax.jit(
        lambda keys: jax.lax.map(run, keys, batch_size=10)
    )(keys)
    rows = options(ys).get("length", n)
    exact = jax.tree.map(lambda leaf: leaf[:rows], exact)
    estimates = (probabilities, mean, mean_of_chain, second, second_of_chain, jnp.mean(xs, axis=1))
    for estimate in estimates:
        np.testing.assert_array_equal(estimate[:, rows:] - estimate[:, rows - 1 : rows], 0.0)
    probabilities, mean, mean_of_chain, second, second_of_chain, paths = (
        leaf[:, :rows] for leaf in estimates
    )
    assert np.abs(z_scores(probabilities, exact.probabilities)).max() < 5
    assert np.abs(z_scores(pairs[:, : rows - 1], exact.pairs[: rows - 1])).max() < 5
    products = exact.covariance + exact.mean[:, :, None] * exact.mean[:, None]
    for means in (mean, mean_of_chain, paths):
        assert np.abs(z_scores(means, exact.mean)).max() < 5
    # Integrating the states out reduces the variance.
    errors, errors_of_paths = ((means - exact.mean[None]) ** 2 for means in (mean, paths))
    assert jnp.mean(errors) < 0.5 * jnp.mean(errors_of_paths)
    # A variance within 40 paths is too small by a share of the variance of the mean: 1/40 at most.
    for moment in (second, second_of_chain):
        np.testing.assert_allclose(jnp.mean(moment, axis=0), products, atol=0.05)


@pytest.mark.slow
def test_few_particles_are_close_on_a_longer_series():
    model = model_of(3, 2)
    zs, xs, ys = model.simulate(jax.random.key(1), 60)
    reference, estimate = (
        switching.rao_blackwellised_smoother(
            jax.random.key(seed), model, ys, num_particles=count, num_samples=400
        )
        for seed, count in ((5, 400), (6, 100))
    )
    error = np.abs(estimate.marginals.probabilities - reference.marginals.probabilities)
    assert error.max() < 0.15
    np.testing.assert_allclose(estimate.log_evidence, reference.log_evidence, atol=0.05)
    assert estimate.ess.shape == (60,)
    assert float(estimate.ess.min()) >= 1


def test_a_failure_is_reported_with_its_time():
    model = model_of(2, 1)
    ys = jnp.zeros((4, 1)).at[2].set(1e200)
    with pytest.raises(FloatingPointError, match="rao_blackwellised_smoother.* time 2"):
        switching.rao_blackwellised_smoother(jax.random.key(0), model, ys, num_particles=10)
    posterior = switching.rao_blackwellised_smoother(
        jax.random.key(0), model, ys, num_particles=10, strict=False
    )
    assert int(posterior.status) == 1
    assert int(posterior.status_time) == 2


def test_misuse_is_refused():
    model = model_of(2, 1)
    run = switching.rao_blackwellised_smoother
    untyped: Any = inspect.unwrap(run)
    key, ys = jax.random.key(0), jnp.zeros((3, 1))
    kernel = rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(jnp.ones(1)))
    curved = switching.SwitchingModel(model.regimes, kernel, model.prior, model.transition)
    with pytest.raises(TypeError, match="gpb2_smoother"):
        run(key, curved, ys)
    with pytest.raises(TypeError, match="forward_backward"):
        run(key, switching.SwitchingModel(model.regimes, list(model.prior)), ys)
    with pytest.raises(ValueError, match="'optimal', 'systematic'"):
        untyped(key, model, ys, resampling="best")
    with pytest.raises(ValueError, match="threshold"):
        run(key, model, ys, threshold=0.0)
    with pytest.raises(ValueError, match="num_particles"):
        run(key, model, ys, num_particles=0)


def test_single_precision(x32):
    model = model_of(2, 1)
    ys = jnp.zeros((5, 1), jnp.float32)
    posterior = switching.rao_blackwellised_smoother(
        jax.random.key(0), model, ys, num_particles=16, num_samples=5
    )
    assert posterior.marginals.mean.dtype == jnp.float32
    assert bool(jnp.isfinite(posterior.log_evidence))
