"""Gaussian laws against scipy, closed forms in numpy and Monte Carlo."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import retrodict as rd

# Its stub takes no array for the covariance.
multivariate_normal: Any = scipy.stats.multivariate_normal

# Monte Carlo averages are held to Z standard errors. One exceeds them with probability 5.7e-7 under
# the null hypothesis; seeds are fixed, so that a test that passes goes on passing.
Z = 5.0

TOLERANCE = {"float64": 1e-11, "float32": 3e-4}


def dense_factor(rng: np.random.Generator, d: int) -> np.ndarray:
    return np.tril(0.5 * rng.normal(size=(d, d)), -1) + np.diag(rng.uniform(0.5, 1.5, d))


def make(d: int, kind: str, seed: int = 0) -> tuple[rd.Gaussian, np.ndarray, np.ndarray]:
    """A law, with its mean and covariance in numpy as they were rounded."""
    rng = np.random.default_rng(100 * d + seed)
    mean, lower = jnp.asarray(rng.normal(size=d)), dense_factor(rng, d)
    if kind == "diagonal":
        std = jnp.asarray(np.diagonal(lower))
        return (
            rd.Gaussian(mean, rd.Diagonal(std)),
            np.asarray(mean, float),
            np.diag(np.asarray(std, float) ** 2),
        )
    # The constructor refuses entries above the diagonal where it sees them. What a compiled program
    # cannot refuse is ignored by everything.
    law = rd.Gaussian(mean, jnp.asarray(lower))
    scale = law.scale_tril + np.triu(np.full((d, d), 9.0, law.scale_tril.dtype), 1)
    law = eqx.tree_at(lambda law: law.scale_tril, law, scale)
    exact = np.tril(np.asarray(scale, float))
    return law, np.asarray(mean, float), exact @ exact.T


KINDS = pytest.mark.parametrize("kind", ["dense", "diagonal"])
SIZES = pytest.mark.parametrize("d", [1, 3, 7])


@jax.jit
def summary(law: rd.Gaussian, x: jax.Array) -> dict[str, jax.Array]:
    natural = law.to_natural()
    back = natural.to_moments()
    return {
        "log_prob": law.log_prob(x),
        "entropy": law.entropy(),
        "covariance": law.covariance,
        "std": law.std,
        "precision": natural.precision,
        "precision_mean": natural.precision_mean,
        "mean_again": back.mean,
        "covariance_again": back.covariance,
        "scale_again": back.scale_tril,
    }


@KINDS
@SIZES
def test_densities_and_natural_parameters_equal_scipy(d: int, kind: str, dtype: np.dtype):
    law, mean, covariance = make(d, kind)
    x = jnp.asarray(np.random.default_rng(1).normal(size=d))
    got = summary(law, x)
    assert all(leaf.dtype == dtype for leaf in got.values())
    reference = multivariate_normal(mean, covariance)
    precision = np.linalg.inv(covariance)
    expected = {
        "log_prob": reference.logpdf(np.asarray(x)),
        "entropy": reference.entropy(),
        "covariance": covariance,
        "std": np.sqrt(np.diagonal(covariance)),
        "precision": precision,
        "precision_mean": precision @ mean,
        "mean_again": mean,
        "covariance_again": covariance,
        "scale_again": np.linalg.cholesky(covariance),
    }
    for name, value in expected.items():
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(
            got[name], value, rtol=0, atol=TOLERANCE[dtype.name] * scale, err_msg=name
        )


kl_divergence = jax.jit(rd.kl_divergence)


@pytest.mark.parametrize("kinds", list(itertools.product(["dense", "diagonal"], repeat=2)))
def test_kl_divergence_equals_formula(kinds: tuple[str, str]):
    d = 3
    q, q_mean, q_covariance = make(d, kinds[0], seed=0)
    p, p_mean, p_covariance = make(d, kinds[1], seed=1)
    precision = np.linalg.inv(p_covariance)
    gap = p_mean - q_mean
    expected = 0.5 * (
        np.trace(precision @ q_covariance)
        + gap @ precision @ gap
        - d
        + np.linalg.slogdet(p_covariance)[1]
        - np.linalg.slogdet(q_covariance)[1]
    )
    np.testing.assert_allclose(kl_divergence(q, p), expected, rtol=1e-11)
    assert abs(float(kl_divergence(q, q))) < 1e-13
    assert expected > 0.1 and abs(float(kl_divergence(p, q)) - expected) > 1e-3


@given(
    entries=hnp.arrays(np.float64, (3, 3), elements=st.floats(-5, 5, width=32)),
    mean=hnp.arrays(np.float64, 3, elements=st.floats(-100, 100, width=32)),
    pivots=hnp.arrays(np.float64, 3, elements=st.floats(0.125, 8, width=32)),
)
def test_natural_parameters_round_trip(entries: np.ndarray, mean: np.ndarray, pivots: np.ndarray):
    scale = np.tril(entries, -1) + np.diag(pivots)
    got = summary(rd.Gaussian(jnp.asarray(mean), jnp.asarray(scale)), jnp.zeros(3))
    tolerance = 1e-14 * np.linalg.cond(scale) ** 2
    np.testing.assert_allclose(got["mean_again"], mean, atol=100 * tolerance)
    np.testing.assert_allclose(
        got["covariance_again"], scale @ scale.T, rtol=tolerance, atol=100 * tolerance
    )


def test_sum_of_natural_parameters_is_product_of_densities():
    (p, *_), (q, *_) = make(3, "dense", 0), make(3, "diagonal", 1)
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))

    @jax.jit
    def gaps(p: rd.Gaussian, q: rd.Gaussian, xs: jax.Array) -> jax.Array:
        product = (p.to_natural() + q.to_natural()).to_moments()
        return jax.vmap(lambda x: p.log_prob(x) + q.log_prob(x) - product.log_prob(x))(xs)

    np.testing.assert_allclose(np.ptp(gaps(p, q, xs)), 0, atol=1e-12)


# --- draws ----------------------------------------------------------------------------------------


@KINDS
def test_samples_have_the_moments_of_the_law(kind: str, key: jax.Array):
    """3 means and 6 covariances at Z = 5: false alarms at a rate below 6e-6."""
    count = 20_000
    law, mean, covariance = make(3, kind)
    xs = np.asarray(jax.jit(lambda key: law.sample(key, (count,)))(key))
    assert xs.shape == (count, 3)
    deviations = xs - mean
    variances = np.diagonal(covariance)
    assert np.all(np.abs(deviations.mean(0)) < Z * np.sqrt(variances / count))
    # The variance of a product of two centred Gaussians is c_ii c_jj + c_ij².
    spread = np.sqrt((np.outer(variances, variances) + covariance**2) / count)
    assert np.all(np.abs(deviations.T @ deviations / count - covariance) < Z * spread)


def test_samples_have_expected_shapes_and_dtypes(key: jax.Array, dtype: np.dtype):
    law, *_ = make(3, "dense")
    for shape in ((), (4,), (2, 5)):
        samples = jax.eval_shape(lambda key, shape=shape: law.sample(key, shape), key)
        assert samples.shape == (*shape, 3) and samples.dtype == dtype


# --- marginals under a mask -----------------------------------------------------------------------


@jax.jit
def masked_with_gradients(law: rd.Gaussian, x: jax.Array, masks: jax.Array):
    """The masked density and its derivatives in the value and in the law, a row for each mask."""

    def one(mask: jax.Array):
        return jax.value_and_grad(lambda x, law: law.masked_log_prob(x, mask), argnums=(0, 1))(
            x, law
        )

    return jax.vmap(one)(masks)


@KINDS
@pytest.mark.parametrize("d", [3, 13])
def test_masked_log_prob_equals_marginal_log_prob(d: int, kind: str):
    law, mean, covariance = make(d, kind)
    rng = np.random.default_rng(0)
    x = rng.normal(size=d)
    masks = (
        np.array(list(itertools.product([False, True], repeat=3)))
        if d == 3
        else np.concatenate([rng.random((6, d)) < 0.5, [np.zeros(d, bool), np.ones(d, bool)]])
    )
    values, (x_slopes, law_slopes) = masked_with_gradients(
        law, jnp.asarray(x), jnp.asarray(masks, float)
    )
    for mask, value, slope in zip(masks, values, x_slopes, strict=True):
        if not mask.any():
            assert value == 0
            continue
        marginal = covariance[np.ix_(mask, mask)]
        expected = multivariate_normal(mean[mask], marginal).logpdf(x[mask])
        np.testing.assert_allclose(value, expected, rtol=1e-11)
        np.testing.assert_allclose(
            slope[mask], -np.linalg.solve(marginal, (x - mean)[mask]), atol=1e-10
        )
        np.testing.assert_array_equal(slope[~mask], 0.0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(law_slopes))
    np.testing.assert_allclose(law_slopes.mean, -x_slopes, atol=1e-12)


def test_masked_density_of_nearly_dependent_coordinates():
    # Covariances would lose the difference of the first two coordinates, of width 1e-9.
    scale = np.eye(8) + np.tril(np.random.default_rng(0).normal(size=(8, 8)), -1)
    scale[1] = scale[0] + 1e-9 * scale[1]
    law = rd.Gaussian(jnp.zeros(8), jnp.asarray(scale))
    mask = jnp.array([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    x = jnp.asarray(scale) @ jnp.array([0.5, 1.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    expected = -0.5 * (0.5**2 + 1.5**2) - np.log(2 * np.pi) - np.log(1e-9)
    assert float(law.masked_log_prob(x, mask)) == pytest.approx(expected, rel=1e-6)


@KINDS
def test_a_masked_value_has_no_influence_even_if_it_is_nan(kind: str):
    law, *_ = make(3, kind)
    masks = jnp.tile(jnp.array([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), (4, 1))
    clean = masked_with_gradients(law, jnp.array([0.3, 0.0, -1.0]), masks)
    dirty = masked_with_gradients(law, jnp.array([0.3, jnp.nan, -1.0]), masks)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


# --- constructors and batches ---------------------------------------------------------------------


@KINDS
def test_batched_gaussian_has_batched_moments(kind: str):
    laws = [make(3, kind, seed) for seed in range(4)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(law for law, *_ in laws))
    covariances = np.stack([covariance for *_, covariance in laws])
    assert batch.dim == 3
    np.testing.assert_allclose(batch.covariance, covariances, atol=1e-14)
    np.testing.assert_allclose(
        batch.std, np.sqrt(np.diagonal(covariances, axis1=1, axis2=2)), atol=1e-14
    )
    built = jax.vmap(lambda m: rd.Gaussian(m, rd.Diagonal(jnp.ones(3))))(jnp.zeros((4, 3)))
    np.testing.assert_array_equal(built.covariance, np.broadcast_to(np.eye(3), (4, 3, 3)))


@pytest.mark.parametrize("d", [1, 3, 7])
def test_from_covariance_restores_the_covariance(d: int):
    _, mean, covariance = make(d, "dense")
    law = rd.Gaussian.from_covariance(jnp.asarray(mean), jnp.asarray(covariance))
    np.testing.assert_allclose(law.scale_tril, np.linalg.cholesky(covariance), atol=1e-13)
    kernel = rd.LinearGaussianKernel.from_covariance(
        jnp.eye(d), jnp.asarray(mean), jnp.asarray(covariance)
    )
    np.testing.assert_allclose(kernel.scale_tril, np.linalg.cholesky(covariance), atol=1e-13)


def test_from_covariance_works_in_any_units():
    """Symmetry and positivity are judged relative to the entries."""
    covariance = np.array([[2.0, 0.5], [0.5, 1.0]])
    for unit in (1e-12, 1e12):
        law = rd.Gaussian.from_covariance(jnp.zeros(2), jnp.asarray(unit * covariance))
        np.testing.assert_allclose(law.covariance, unit * covariance, rtol=1e-12)


def test_from_covariance_works_under_jit_and_grad():
    """Values are not known there, so that nothing is checked and everything is differentiable."""
    slope = jax.jit(
        jax.grad(lambda c: rd.Gaussian.from_covariance(jnp.zeros(2), c).log_prob(jnp.zeros(2)))
    )(jnp.diag(jnp.array([2.0, 4.0])))
    # d/dc of -1/2 log det c is -1/2 c⁻¹, spread over the triangle that is read.
    np.testing.assert_allclose(np.diagonal(slope), [-0.25, -0.125], rtol=1e-12)


@pytest.mark.parametrize("scale", ["tril", "diagonal"])
def test_wrapped_parameters_give_the_same_law(scale: str):
    """`Gaussian` and `Diagonal` say that they take parameters such as `Positive`."""
    std = jnp.array([0.5, 2.0])
    plain: Any = jnp.diag(std) if scale == "tril" else rd.Diagonal(std)
    wrapped: Any = rd.PositiveTril(plain) if scale == "tril" else rd.Diagonal(rd.Positive(std))
    law, learned = rd.Gaussian(jnp.ones(2), plain), rd.Gaussian(rd.Frozen(jnp.ones(2)), wrapped)
    x, mask = jnp.array([0.3, -0.2]), jnp.array([1.0, 0.0])
    assert learned.dim == 2
    np.testing.assert_allclose(learned.log_prob(x), law.log_prob(x), rtol=1e-14)
    np.testing.assert_allclose(learned.entropy(), law.entropy(), rtol=1e-14)
    np.testing.assert_allclose(learned.covariance, law.covariance, rtol=1e-14)
    np.testing.assert_allclose(learned.std, law.std, rtol=1e-14)
    np.testing.assert_allclose(
        learned.masked_log_prob(x, mask), law.masked_log_prob(x, mask), rtol=1e-14
    )


EYE, BAD_EYE = np.eye(2), np.array([[1.0, 0.0], [np.nan, 1.0]])
NON_FINITE: dict[str, tuple[str, Any]] = {
    "Diagonal": ("std", lambda: rd.Diagonal([1.0, np.inf])),
    "Diagonal of NaN": ("std", lambda: rd.Diagonal([np.nan, 1.0])),
    "frozen": ("std", lambda: rd.Diagonal(rd.Frozen(jnp.array([np.nan, 1.0])))),
    "mean": ("mean", lambda: rd.Gaussian([0.0, np.nan], EYE)),
    "scale": ("scale_tril", lambda: rd.Gaussian(np.zeros(2), BAD_EYE)),
    "above the diagonal": ("scale_tril", lambda: rd.Gaussian(np.zeros(2), BAD_EYE.T)),
    "frozen scale": ("scale_tril", lambda: rd.Gaussian(np.zeros(2), rd.Frozen(BAD_EYE))),
    "weight": ("weight", lambda: rd.LinearGaussianKernel(BAD_EYE, np.zeros(2), EYE)),
    "bias": ("bias", lambda: rd.LinearGaussianKernel(EYE, [np.inf, 0.0], EYE)),
    "input": ("input_weight", lambda: rd.LinearGaussianKernel(EYE, EYE[0], EYE, BAD_EYE)),
    "nonlinear": ("scale_tril", lambda: rd.NonlinearGaussianKernel(jnp.tanh, BAD_EYE)),
    "PositiveTril": ("PositiveTril", lambda: rd.PositiveTril(BAD_EYE)),
    "mixture": ("means", lambda: rd.GaussianMixture([0.0], [[np.nan]], np.ones((1, 1, 1)))),
    "mixture scale": (
        "scale_trils",
        lambda: rd.GaussianMixture([0.0], [[0.0]], np.full((1, 1, 1), np.inf)),
    ),
    "ready model": ("starting value", lambda: rd.models.autoregressive(mean=np.nan)),
}


@pytest.mark.parametrize("case", NON_FINITE)
def test_constructors_refuse_known_values_that_are_not_finite(case: str):
    name, build = NON_FINITE[case]
    with pytest.raises(ValueError, match=rf"{name}.* must be finite, got (nan|inf) at index"):
        build()


def test_a_mixture_refuses_weights_of_nan():
    with pytest.raises(ValueError, match="exponentials sum to 1, got a sum of nan"):
        rd.GaussianMixture([np.nan], [[0.0]], np.ones((1, 1, 1)))


def test_traced_values_that_are_not_finite_are_computed_with():
    """Inside a transformation values are unknown, and a result may be NaN."""

    def log_density(std: jax.Array) -> jax.Array:
        return rd.Gaussian(jnp.zeros(1), rd.Diagonal(std)).log_prob(jnp.ones(1))

    bad = jnp.array([[jnp.nan], [2.0]])
    expected = [np.nan, scipy.stats.norm.logpdf(1.0, scale=2.0)]
    np.testing.assert_allclose(jax.vmap(log_density)(bad), expected, rtol=1e-12)
    assert np.isnan(jax.jit(log_density)(bad[0]))
    assert np.isnan(jax.grad(log_density)(bad[0])).all()
