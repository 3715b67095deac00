"""Expectations of additive functionals: estimators against oracles and against each other."""

from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import joint_gaussian
import numpy as np
import pytest
from backward_chains import OpaqueChain
from linear_models import linear_model, random_mask, random_model
from nonlinear_models import hide_linearity, nonlinear_emission_model, nonlinear_kernel

import retrodict as rd

NUM_TIMES, LENGTH = 7, 6


class Smoothed(NamedTuple):
    """A padded chain, the data it was made from, and the joint Gaussian of what exists."""

    model: rd.StateSpaceModel
    data: rd.Series
    chain: rd.LinearGaussianChain
    oracle: joint_gaussian.Posterior


@pytest.fixture(scope="module")
def smoothed() -> Smoothed:
    return smooth(2)


@pytest.fixture(scope="module")
def narrow() -> Smoothed:
    """One state dimension: derivatives of the chain are compiled quickly."""
    return smooth(1)


def smooth(state: int) -> Smoothed:
    rng = np.random.default_rng(0)
    model = random_model(rng, state, 2)
    ys = np.array(model.simulate(jax.random.key(0), NUM_TIMES)[1])
    mask = random_mask(rng, NUM_TIMES, 2, 0.7)
    ys[~mask] = np.nan
    ys[LENGTH:] = np.nan
    oracle = joint_gaussian.posterior(model, ys[:LENGTH])
    chain = rd.kalman_smoother(model, ys, length=LENGTH).chain
    return Smoothed(model, model.series(ys, length=LENGTH).rows, chain, oracle)


def crossed(before, x, data):
    """A quadratic with cross terms, a linear part, a constant and data."""
    return {"a": data["w"] * (before @ x + x[0]) + 1.0, "b": x - before * data["w"]}


def started(x, data):
    return {"a": data["w"] * (x @ x), "b": x}


USERS = rd.AdditiveFunctional(crossed, started, quadratic=True)


def users_data(fill: float = np.nan) -> dict[str, np.ndarray]:
    """One weight a row; padding holds `fill`."""
    weights = np.linspace(0.5, 2.0, NUM_TIMES)
    weights[LENGTH:] = fill
    return {"w": weights}


EXACT = [rd.ClosedForm(), rd.Recursive(), rd.Quadrature(2), rd.RaoBlackwellised(2)]


def name_of(estimator: rd.AbstractEstimator) -> str:
    return type(estimator).__name__


@pytest.mark.parametrize("estimator", EXACT, ids=name_of)
def test_sums_and_second_moments_equal_joint_gaussian(smoothed, estimator):
    _, _, chain, oracle = smoothed
    options = {"estimator": estimator, "key": jax.random.key(0)}
    total = rd.expectation(chain, rd.StateSum(), **options)
    np.testing.assert_allclose(total, oracle.mean.sum(axis=0), atol=1e-10)
    moments = rd.expectation(chain, rd.SecondMoments(), **options)
    m = oracle.mean
    within = sum(oracle.block(k, k) + np.outer(m[k], m[k]) for k in range(LENGTH))
    between = sum(oracle.block(k - 1, k) + np.outer(m[k - 1], m[k]) for k in range(1, LENGTH))
    np.testing.assert_allclose(moments.within, within, atol=1e-10)
    np.testing.assert_allclose(moments.between, between, atol=1e-10)


@pytest.mark.parametrize("estimator", EXACT, ids=name_of)
def test_user_functional_ignores_nan_data_in_padding(smoothed, estimator):
    _, _, chain, oracle = smoothed
    options = {"estimator": estimator, "key": jax.random.key(0)}
    value = rd.expectation(chain, USERS, users_data(), **options)
    m, w = oracle.mean, users_data()["w"]
    a = w[0] * (np.trace(oracle.block(0, 0)) + m[0] @ m[0])
    b = m[0]
    for k in range(1, LENGTH):
        a += w[k] * (np.trace(oracle.block(k - 1, k)) + m[k - 1] @ m[k] + m[k][0]) + 1.0
        b = b + m[k] - m[k - 1] * w[k]
    np.testing.assert_allclose(value["a"], a, atol=1e-10)
    np.testing.assert_allclose(value["b"], b, atol=1e-10)


@pytest.mark.parametrize(
    "functional",
    [USERS, rd.AdditiveFunctional(lambda before, x, data: jnp.sqrt(jnp.sum((x - before) ** 2)))],
    ids=["quadratic", "distance"],
)
def test_padding_does_not_change_expectations_or_gradients(narrow, functional):
    # The distance has no derivative at zero, which is where a padded path stands.
    chain, short = narrow.chain, narrow.chain.prefix(LENGTH)
    key = jax.random.key(0)
    arrays, static = eqx.partition(chain, eqx.is_inexact_array)
    quadratic = functional is USERS
    estimators = [rd.ClosedForm(), rd.Recursive()] if quadratic else [rd.Quadrature(4)]

    for estimator in [*estimators, rd.BackwardSampling(2)]:

        def value(arrays, data, estimator=estimator):
            chain = eqx.combine(arrays, static)
            estimate = rd.expectation(chain, functional, data, estimator=estimator, key=key)
            return jnp.sum(estimate["a"]) if quadratic else estimate

        data = jax.tree.map(jnp.asarray, users_data())
        estimate, gradients = jax.value_and_grad(value, argnums=(0, 1))(arrays, data)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
        if isinstance(estimator, rd.BackwardSampling):
            continue  # another length draws other paths
        rows = {"w": users_data()["w"][:LENGTH]}
        expected = rd.expectation(short, functional, rows, estimator=estimator)
        expected = expected["a"] if quadratic else expected
        np.testing.assert_allclose(estimate, expected, atol=1e-12)


@pytest.mark.parametrize(
    "functional", ["moments", "log joint", pytest.param("score", marks=pytest.mark.slow)]
)
def test_recursive_statistics_equal_prefix_expectations(narrow, functional):
    # Online, with one law and one kernel at a time, it equals the closed form of every prefix.
    model, data, chain, _ = narrow
    recursive = rd.Recursive()
    h = {
        "moments": rd.SecondMoments(),
        "log joint": rd.LogJoint(model),
        "score": rd.Score(model),
    }[functional]

    def row(tree, k):
        return jax.tree.map(lambda leaf: leaf[k], tree)

    @eqx.filter_jit
    def init(law, data):
        return recursive.init(h, law, data)

    @eqx.filter_jit
    def update(state, law, kernel, data):
        return recursive.update(h, state, law, kernel, data)

    # One chain of fixed shape stands for all prefixes, so that it is compiled once.
    ys = jnp.where(data.mask, data.ys, jnp.nan)
    state = init(row(chain.laws, 0), row(data, 0))
    for k in range(LENGTH):
        if k:
            law, kernel = row(chain.laws, k), row(chain.kernels, k - 1)
            state = update(state, law, kernel, row(data, k))
        prefix = rd.kalman_smoother(model, ys, length=k + 1).chain
        expected = rd.expectation(prefix, h, data)
        for ours, theirs in zip(
            jax.tree.leaves(recursive.value(state)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-10)


@pytest.mark.slow
def test_em_quantity_equals_joint_gaussian(smoothed):
    # Q(θ, θ') of another model, by every exact estimator and by the sum over the joint Gaussian.
    other = random_model(np.random.default_rng(9), 2, 2)
    chain, oracle, data = smoothed.chain, smoothed.oracle, smoothed.data
    # A quadratic is integrated exactly by the 2D symmetric points around the mean of the path.
    size = oracle.mean.size
    factor = np.sqrt(size) * np.linalg.cholesky(oracle.covariance)
    steps = np.concatenate([factor.T, -factor.T]).reshape(-1, *oracle.mean.shape)
    ys, mask = data.ys[:LENGTH], data.mask[:LENGTH]
    log_joint = jax.jit(jax.vmap(lambda xs: other.log_joint(xs, ys, mask=mask)))
    expected = float(jnp.mean(log_joint(jnp.asarray(oracle.mean[None] + steps))))
    for estimator in (rd.ClosedForm(), rd.Recursive()):
        value = rd.expectation(chain, rd.LogJoint(other), data, estimator=estimator)
        assert float(value) == pytest.approx(expected, abs=1e-9)


def test_sampled_marginals_agree_with_closed_form(smoothed):
    exact = rd.marginals(smoothed.chain)
    np.testing.assert_allclose(exact.mean[:LENGTH], smoothed.oracle.mean, atol=1e-10)
    np.testing.assert_allclose(exact.covariance[2], smoothed.oracle.block(2, 2), atol=1e-10)
    assert np.all(exact.mean_standard_error == 0) and np.all(exact.covariance_standard_error == 0)
    key = jax.random.key(1)
    sampled = rd.marginals(smoothed.chain, estimator=rd.BackwardSampling(4000), key=key)
    # 42 comparisons at 5 standard errors: a false alarm in 40,000 sets of draws.
    z = (sampled.mean - exact.mean) / sampled.mean_standard_error
    assert np.max(np.abs(z)) < 5
    z = (sampled.covariance - exact.covariance) / sampled.covariance_standard_error
    assert np.max(np.abs(z)) < 5


def test_pair_terms_are_integrated_over_both_states():
    # E |x_1 − x_0| under a pair of Gaussians is √(2/π) times a standard deviation, if centred.
    chain = rd.LinearGaussianChain.from_arrays(
        jnp.zeros((2, 1)),
        jnp.array([[[1.0]], [[0.8]]]),
        jnp.array([[[0.6]]]),
        jnp.zeros((1, 1)),
        jnp.array([[[0.5]]]),
    )
    std = np.sqrt((1 - 0.6) ** 2 * 0.8**2 + 0.5**2)
    smooth = rd.AdditiveFunctional(lambda before, x, data: jnp.cos(x[0] - before[0]))
    estimate = rd.expectation(chain, smooth, estimator=rd.Quadrature(20))
    assert float(estimate) == pytest.approx(np.exp(-0.5 * std**2), abs=1e-12)
    travelled = rd.AdditiveFunctional(lambda before, x, data: jnp.abs(x[0] - before[0]))
    key = jax.random.key(0)
    estimator = rd.RaoBlackwellised(20_000)
    value, error = rd.expectation(
        chain, travelled, estimator=estimator, key=key, with_standard_error=True
    )
    # 5 standard errors: a false alarm in 1.7 million draws.
    assert abs(float(value) - np.sqrt(2 / np.pi) * std) < 5 * float(error)
    assert float(error) < 0.01


NONLINEAR = replace(
    nonlinear_emission_model(jnp.tanh, 0.5), transition=nonlinear_kernel(jnp.sin, 0.6)
)


@pytest.mark.statistical
@pytest.mark.parametrize(
    "estimator", [rd.BackwardSampling(20), rd.RaoBlackwellised(20)], ids=name_of
)
@pytest.mark.parametrize("functional", ["log joint", "score"])
def test_sampled_estimates_are_unbiased_with_calibrated_errors(estimator, functional):
    """Over 200 seeds: the mean within 4 standard errors of quadrature, and the spread as reported.

    The mean of 200 estimates is a false alarm with probability 6e-5 a component, 4e-4 in all. The
    ratio of the standard deviation over seeds to the mean reported error has itself a relative
    deviation of about 1/√400 = 5%, and more for skewed values: 25% is far beyond it.
    """
    linear = linear_model(weight=0.7, bias=0.1, noise=0.7, error=0.8)
    _, ys = NONLINEAR.simulate(jax.random.key(1), 6)
    ys = ys.at[2].set(jnp.nan)
    chain = rd.kalman_smoother(linear, ys).chain
    data = NONLINEAR.series(ys)
    h = rd.LogJoint(NONLINEAR) if functional == "log joint" else rd.Score(NONLINEAR)
    expected = rd.expectation(chain, h, data, estimator=rd.Quadrature(40))
    keys = jax.random.split(jax.random.key(3), 200)

    @jax.jit
    @jax.vmap
    def estimate(key):
        return rd.expectation(
            chain, h, data, estimator=estimator, key=key, with_standard_error=True
        )

    values, errors = estimate(keys)
    leaves = zip(*map(jax.tree.leaves, (values, errors, expected)), strict=True)
    num_drawn = 0
    for value, error, exact in leaves:
        flat, reported = value.reshape(200, -1), error.reshape(200, -1)
        for j, target in enumerate(np.ravel(exact)):
            spread = float(np.std(flat[:, j], ddof=1))
            if spread < 1e-12:  # what is in closed form does not vary
                np.testing.assert_allclose(flat[:, j], target, atol=1e-9)
                continue
            num_drawn += 1
            assert abs(np.mean(flat[:, j]) - target) < 4 * spread / np.sqrt(200)
            assert 0.75 < spread / np.mean(reported[:, j]) < 1.25
    assert num_drawn > 0


def test_a_single_sample_has_no_standard_error(smoothed):
    key = jax.random.key(0)
    for estimator in (rd.BackwardSampling(1), rd.RaoBlackwellised(1)):
        options = {"estimator": estimator, "key": key, "with_standard_error": True}
        value, error = rd.expectation(smoothed.chain, rd.StateSum(), **options)
        assert np.all(np.isfinite(value)) and np.all(np.isnan(error))
    value, error = rd.expectation(smoothed.chain, rd.StateSum(), with_standard_error=True)
    assert np.all(error == 0)


def test_increments_and_terms_agree_with_the_log_joint_density(narrow):
    model, data = narrow.model, narrow.data
    xs = narrow.chain.sample(jax.random.key(0), 1)[0, :LENGTH]
    h = rd.LogJoint(model)
    rows = [jax.tree.map(lambda leaf, k=k: leaf[k], data) for k in range(LENGTH)]
    total = h.initial(xs[0], rows[0])
    for k in range(1, LENGTH):
        total = total + h.increment(xs[k - 1], xs[k], rows[k])
    expected = model.log_joint(xs, data.ys[:LENGTH], mask=data.mask[:LENGTH])
    assert float(total) == pytest.approx(float(expected), abs=1e-10)
    only = rd.AdditiveFunctional(lambda before, x, data: {"d": x - before})
    assert np.all(only.initial(xs[0])["d"] == 0)


def test_elbo_in_float32_stays_float32(x32):
    model = random_model(np.random.default_rng(0), 1, 1)
    _, ys = model.simulate(jax.random.key(0), 5)
    exact = rd.kalman_smoother(model, ys)
    hidden = replace(model, emission=hide_linearity(model).emission)
    elbo = rd.elbo(hidden, exact.chain, ys)
    assert elbo.dtype == jnp.float32
    assert float(elbo) == pytest.approx(float(exact.log_evidence), rel=1e-5)


def test_expectation_refuses_unsupported_requests_with_a_remedy(smoothed):
    model, data, chain, _ = smoothed
    key = jax.random.key(0)
    cube = rd.AdditiveFunctional(lambda before, x, data: jnp.sum(x**3))
    for estimator in (rd.ClosedForm(), rd.Recursive()):
        with pytest.raises(TypeError, match="increment of AdditiveFunctional.*Quadrature"):
            rd.expectation(chain, cube, estimator=estimator)
    with pytest.raises(ValueError, match=r"20\^4 nodes.*RaoBlackwellised"):
        rd.expectation(chain, cube, estimator=rd.Quadrature())
    with pytest.raises(ValueError, match="7 rows, got an array of shape .3,"):
        rd.expectation(chain, USERS, {"w": np.ones(3)})
    with pytest.raises(TypeError, match="model.series.ys., got NoneType"):
        rd.expectation(chain, rd.LogJoint(model))
    with pytest.raises(ValueError, match="1 state dimensions, and the chain has 2"):
        rd.expectation(chain, rd.Score(NONLINEAR), data)
    with pytest.raises(ValueError, match="needs a key"):
        rd.expectation(chain, rd.StateSum(), estimator=rd.RaoBlackwellised())
    with pytest.raises(ValueError, match="needs a key"):
        rd.marginals(chain, estimator=rd.BackwardSampling(3))
    with pytest.raises(TypeError, match="typed key"):
        rd.expectation(chain, rd.StateSum(), estimator=rd.BackwardSampling(2), key=3)
    with pytest.raises(ValueError, match="unknown"):
        estimator = rd.Quadrature(3)
        rd.expectation(chain, rd.StateSum(), estimator=estimator, with_standard_error=True)
    with pytest.raises(ValueError, match="'gauss-hermite' or 'cubature', got 'simpson'"):
        rd.Quadrature(3, "simpson")
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        rd.BackwardSampling(0)
    with pytest.raises(ValueError, match="vmap"):
        batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), chain)
        rd.expectation(batch, rd.StateSum(), estimator=rd.BackwardSampling(2), key=key)


@pytest.mark.slow
def test_any_chain_with_samples_has_expectations(narrow):
    model, data, chain, _ = narrow
    general, short = OpaqueChain(chain.prefix(LENGTH)), chain.prefix(LENGTH)
    options = {"estimator": rd.BackwardSampling(3), "key": jax.random.key(0)}
    ys = jnp.where(data.mask, data.ys, jnp.nan)[:LENGTH]
    exact = rd.kalman_smoother(model, ys)
    assert float(rd.elbo(model, general, ys, **options)) == pytest.approx(
        float(exact.log_evidence), abs=1e-9
    )
    value = rd.expectation(general, rd.StateSum(), **options)
    np.testing.assert_allclose(value, rd.expectation(short, rd.StateSum(), **options))
    assert rd.marginals(general, **options).mean.shape == (LENGTH, 1)
    for estimator in (rd.ClosedForm(), rd.Recursive()):
        with pytest.raises(TypeError, match="BackwardSampling.num_samples. with a key"):
            rd.expectation(general, rd.StateSum(), estimator=estimator)
    with pytest.raises(TypeError, match="no closed form"):
        rd.marginals(general)
