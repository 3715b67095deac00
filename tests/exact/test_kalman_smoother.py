"""Exact smoothing: singular noise, diffuse priors, padding, gradients, and a peer."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import joint_gaussian
import numpy as np
import pytest
from jax.test_util import check_grads
from linear_models import (
    linear_model,
    linear_transition_model,
    random_mask,
    random_model,
    singular_models,
)

import retrodict as rd
from retrodict._numerics import SETTLED_ROWS


@pytest.mark.parametrize(
    ("state", "obs", "parallel"),
    [
        (2, 1, False),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(8, 3, False, marks=pytest.mark.slow),
        pytest.param(8, 3, True, marks=pytest.mark.slow),
    ],
)
def test_semidefinite_noise_and_prior_equal_joint_gaussian(state, obs, parallel):
    rng = np.random.default_rng(3)
    model = random_model(rng, state, obs, singular=True)
    known = jnp.zeros((state, state)).at[-1, -1].set(1.0)
    model = eqx.tree_at(lambda m: m.prior.scale_tril, model, known)
    _, ys = model.simulate(jax.random.key(0), 6)
    check_against_joint_gaussian(model, ys, parallel=parallel, atol=1e-9)


def check_against_joint_gaussian(model, ys, *, parallel, atol):
    exact = rd.kalman_smoother(model, ys, parallel=parallel)
    oracle = joint_gaussian.posterior(model, ys)
    marginals = exact.chain.marginals(parallel=parallel)
    np.testing.assert_allclose(marginals.mean, oracle.mean, atol=atol)
    np.testing.assert_allclose(marginals.covariance, oracle.marginal_covariances(), atol=atol)
    assert exact.log_evidence == pytest.approx(oracle.log_evidence, abs=1e-9)


@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", singular_models())
def test_singular_models_equal_joint_gaussian(name, parallel):
    model = singular_models()[name]
    _, ys = model.simulate(jax.random.key(0), 40)
    check_against_joint_gaussian(model, ys, parallel=parallel, atol=1e-8)


def test_sampled_shares_of_a_singular_model_sum_to_one():
    model = singular_models()["shares"]
    _, ys = model.simulate(jax.random.key(0), 40)
    paths = rd.kalman_smoother(model, ys).chain.sample(jax.random.key(1), 20)
    np.testing.assert_allclose(jnp.sum(paths, axis=-1), 1.0, atol=1e-10)


def test_parallel_smoother_with_many_states_equals_joint_gaussian():
    # More rows than one block of the scan, whose neutral element has a covariance of zero.
    model = random_model(np.random.default_rng(0), 8, 2)
    _, ys = model.simulate(jax.random.key(0), 20)
    check_against_joint_gaussian(model, ys, parallel=True, atol=1e-10)


def log_evidence_of_one_vector(theta, ys):
    """The log density of all observations as one Gaussian vector; states start at N(0, I)."""
    design, noise, weight = theta
    n, d = ys.shape[0], weight.shape[0]
    powers = [jnp.eye(d)]
    for _ in range(n - 1):
        powers.append(weight @ powers[-1])
    zero = jnp.zeros((d, d))
    maps = jnp.block([[powers[i - j] if i >= j else zero for j in range(n)] for i in range(n)])
    rows = jnp.kron(jnp.eye(n), design) @ maps
    covariance = rows @ rows.T + jnp.kron(jnp.eye(n), jnp.diag(noise**2))
    return jax.scipy.stats.multivariate_normal.logpdf(ys.ravel(), jnp.zeros(ys.size), covariance)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_second_derivatives_are_exact_with_more_entries_than_states(hidden, parallel):
    # Rows of 5 entries are reduced to 3; with `hidden` the second state is not observed at all.
    rng = np.random.default_rng(0)
    ys = jnp.asarray(rng.normal(size=(4, 5)))
    design = rng.normal(size=(5, 2)) * np.array([1.0, 0.0 if hidden else 1.0])
    theta = (jnp.asarray(design), jnp.asarray(rng.uniform(0.5, 1.0, 5)), 0.4 * jnp.eye(2))

    def log_evidence(theta):
        design, noise, weight = theta
        model = linear_model(2, weight=weight, design=design, error=rd.Diagonal(noise))
        return rd.kalman_smoother(model, ys, parallel=parallel).log_evidence

    hessian = jax.jit(jax.hessian(log_evidence))(theta)
    expected = jax.jit(jax.hessian(lambda theta: log_evidence_of_one_vector(theta, ys)))(theta)
    for one, other in zip(jax.tree.leaves(hessian), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("series", [2, 3])
def test_derivatives_of_a_sum_over_series_with_masks_are_exact(series):
    # With three series of four rows, swapped axes would fit.
    rng = np.random.default_rng(0)
    ys = jnp.asarray(rng.normal(size=(series, 4, 2)))
    mask = jnp.asarray(rng.uniform(size=ys.shape) > 0.3)

    def log_evidence(weight, ys, mask):
        model = linear_model(2, weight=weight)
        return rd.kalman_smoother(model, ys, mask=mask).log_evidence

    def mean(weight, ys, mask):
        model = linear_model(2, weight=weight)
        marginals = rd.kalman_smoother(model, ys, mask=mask).chain.marginals()
        return jnp.sum(jnp.sin(marginals.mean)) + jnp.sum(jnp.sin(marginals.covariance))

    for function, order in ((log_evidence, jax.hessian), (mean, jax.grad)):
        total = order(
            lambda weight, function=function: jnp.sum(
                jax.vmap(function, in_axes=(None, 0, 0))(weight, ys, mask)
            )
        )(0.7)
        singly = [order(function)(0.7, y, m) for y, m in zip(ys, mask, strict=True)]
        assert total == pytest.approx(float(sum(singly)), rel=1e-10)


def test_unsupported_second_derivatives_are_refused():
    ys = jnp.ones((3, 4))

    def mean(weight):
        model = linear_model(weight=0.5, design=weight * jnp.ones((4, 1)))
        return rd.kalman_smoother(model, ys).chain.laws.mean[-1, 0]

    weight, step = jnp.array(0.7), 1e-5
    slope = (mean(weight + step) - mean(weight - step)) / (2 * step)
    assert jax.grad(mean)(weight) == pytest.approx(float(slope), rel=1e-8)
    with pytest.raises(TypeError, match="differentiated only once"):
        jax.grad(jax.grad(mean))(weight)


def test_first_derivatives_of_chain_are_exact_with_more_entries_than_states():
    # Rows of 5 entries are reduced to 2. Paths drawn from given noise use the kernels alone.
    rng = np.random.default_rng(1)
    ys, design = jnp.asarray(rng.normal(size=(3, 5))), jnp.asarray(rng.normal(size=(5, 2)))
    noise = jnp.asarray(rng.normal(size=(1, 3, 2)))

    def moments(design):
        model = linear_model(2, weight=0.7, noise=0.5, design=design, error=0.6)
        chain = rd.kalman_smoother(model, ys, mask=True).chain
        marginals = chain.marginals()
        return jnp.sum(jnp.sin(marginals.mean)) + jnp.sum(jnp.sin(chain.from_noise(noise)))

    moments = jax.jit(moments)
    slope, step = jax.jit(jax.grad(moments))(design), 1e-5
    for index in np.ndindex(5, 2):
        shift = jnp.zeros((5, 2)).at[index].set(step)
        difference = (moments(design + shift) - moments(design - shift)) / (2 * step)
        assert slope[index] == pytest.approx(float(difference), abs=1e-8)


@pytest.mark.slow
def test_singular_models_are_accurate_in_float32(x32):
    def small(tree):
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)

    for name in ("common factor", "weight and noise of rank one", "shares"):
        with jax.enable_x64(True):
            model = singular_models()[name]
            _, ys = model.simulate(jax.random.key(0), 40)
            expected = rd.kalman_smoother(model, ys).chain.marginals()
        marginals = rd.kalman_smoother(small(model), small(ys)).chain.marginals()
        np.testing.assert_allclose(marginals.mean, expected.mean, atol=2e-4)
        np.testing.assert_allclose(marginals.covariance, expected.covariance, atol=2e-4)


@pytest.mark.parametrize("prior_scale", [1e3, 1e6, 1e9])
def test_diffuse_priors_keep_their_accuracy(prior_scale):
    # With three observations of a 2-state the posterior under a prior of scale s differs from the
    # limit by O(s^-2): two scales a factor 10 apart must agree to that order, or to rounding.
    rng = np.random.default_rng(1)
    model = random_model(rng, 2, 2)
    _, ys = model.simulate(jax.random.key(2), 8)
    means = []
    for scale in (prior_scale, 10 * prior_scale):
        wide = eqx.tree_at(lambda m: m.prior.scale_tril, model, scale * jnp.eye(2))
        chain = rd.kalman_smoother(wide, ys).chain
        means.append(chain.marginals())
    tolerance = max(500.0 / prior_scale**2, 1e-11)
    np.testing.assert_allclose(means[0].mean, means[1].mean, atol=tolerance)
    np.testing.assert_allclose(means[0].covariance, means[1].covariance, atol=tolerance)


@pytest.mark.parametrize(("width", "bound"), [(1e4, 0.3), (1e5, 20.0)])
def test_evidence_and_means_in_float32_under_a_wide_prior(x32, width: float, bound: float):
    """The docstring states errors of means of 0.1 and 6 posterior standard deviations."""
    # Six rows of one sensor determine the state, and gains are large until then.
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    weight, design = axes @ np.diag(np.linspace(0.5, 0.95, 6)) @ axes.T, rng.normal(size=(1, 6))
    states = [width * rng.normal(size=6)]
    for _ in range(39):
        states.append(weight @ states[-1] + 0.3 * rng.normal(size=6))
    ys = np.stack(states) @ design.T + 0.5 * rng.normal(size=(40, 1))

    def smoothed(dtype):
        def array(values):
            return np.asarray(np.asarray(values, np.float32), dtype)

        model = rd.StateSpaceModel(
            rd.Gaussian(array(np.zeros(6)), array(width * np.eye(6))),
            rd.LinearGaussianKernel(array(weight), array(np.zeros(6)), array(0.3 * np.eye(6))),
            rd.LinearGaussianKernel(array(design), array(np.zeros(1)), array([[0.5]])),
        )
        posterior = rd.kalman_smoother(model, array(ys))
        marginals = posterior.chain.marginals()
        return float(posterior.log_evidence), np.asarray(marginals.mean), np.asarray(marginals.std)

    with jax.enable_x64(True):
        expected, mean, std = smoothed(np.float64)
    with pytest.warns(UserWarning, match="as large as their noise, and float32 rounds them"):
        log_evidence, mean_32, std_32 = smoothed(np.float32)
    assert log_evidence == pytest.approx(expected, abs=0.5)
    assert np.max(np.abs(mean_32 - mean) / std) < bound
    # Without XLA's optimisations, as in tests, deviations are off by up to 0.4%.
    np.testing.assert_allclose(std_32, std, rtol=1e-2)


@pytest.mark.parametrize("call", [rd.kalman_smoother, rd.kalman_smoother_batch, rd.smooth])
def test_large_data_cause_a_warning_in_float32_alone(call, x32):
    model = rd.models.local_level(obs_scale=0.1, prior_scale=1e7)
    ys = np.full((2, 4, 1) if call is rd.kalman_smoother_batch else (4, 1), 2e3)
    with pytest.warns(UserWarning, match=f"{call.__name__}: .* 2e[+]04 times as large"):
        call(model, ys)
    call(model, ys / 10)
    call(model, np.where(np.arange(4)[:, None] < 2, np.nan, ys / 10))  # with a mask
    with jax.enable_x64(True):
        call(rd.models.local_level(obs_scale=0.1, prior_scale=1e7), ys)


@pytest.mark.slow
def test_kalman_smoother_equals_statsmodels():
    from statsmodels.tsa.statespace.kalman_smoother import KalmanSmoother

    rng = np.random.default_rng(5)
    model = random_model(rng, 3, 4)
    _, ys = model.simulate(jax.random.key(5), 200)
    ys = np.array(ys)
    ys[~random_mask(rng, 200, 4, 0.8)] = np.nan
    arrays = joint_gaussian.arrays_of(model, 2, None)
    peer = KalmanSmoother(k_endog=4, k_states=3, k_posdef=3)
    peer.bind(ys.copy())
    peer["transition"], peer["state_intercept"] = arrays.weights[0], arrays.biases[0][:, None]
    peer["design"], peer["obs_intercept"] = arrays.designs[0], arrays.shifts[0][:, None]
    peer["selection"], peer["state_cov"] = np.eye(3), arrays.noises[0]
    peer["obs_cov"] = arrays.errors[0]
    peer.initialize_known(arrays.mean, arrays.covariance)
    result: Any = peer.smooth()
    exact = rd.kalman_smoother(model, ys)
    marginals = exact.chain.marginals()
    np.testing.assert_allclose(marginals.mean, result.smoothed_state.T, atol=1e-10)
    np.testing.assert_allclose(
        marginals.covariance, np.moveaxis(result.smoothed_state_cov, -1, 0), atol=1e-10
    )
    np.testing.assert_allclose(exact.chain.laws.mean, result.filtered_state.T, atol=1e-10)
    assert float(exact.log_evidence) == pytest.approx(result.llf, abs=1e-9)


@pytest.mark.slow
def test_varying_kernels_equal_joint_gaussian():
    def move(u):
        return jnp.array([[jnp.cos(u[0]), 0.1], [0.0, 0.9]]), u[:2], rd.Diagonal(0.5 + u[:2] ** 2)

    def see(u):
        return jnp.array([[1.0, u[1]]]), u[:1], jnp.array([[1.0 + u[0] ** 2]])

    model = rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.ones(2), jnp.eye(2)),
        transition=rd.VaryingLinearGaussianKernel(move),
        emission=rd.VaryingLinearGaussianKernel(see),
    )
    inputs = np.random.default_rng(0).normal(size=(7, 2))
    _, ys = model.simulate(jax.random.key(0), 7, inputs=inputs)
    oracle = joint_gaussian.posterior(model, ys, inputs)
    for parallel in (False, True):
        exact = rd.kalman_smoother(model, ys, inputs=inputs, parallel=parallel)
        np.testing.assert_allclose(exact.chain.marginals().mean, oracle.mean, atol=1e-10)
        assert float(exact.log_evidence) == pytest.approx(oracle.log_evidence, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
def test_padding_changes_nothing_and_a_missing_row_is_not_padding(parallel):
    rng = np.random.default_rng(7)
    model = random_model(rng, 2, 2)
    _, ys = model.simulate(jax.random.key(7), 9)
    full = rd.kalman_smoother(model, ys[:6], parallel=parallel)
    padding = jnp.full((3, 2), jnp.nan)
    padded = rd.kalman_smoother(
        model, jnp.concatenate([ys[:6], padding]), length=6, parallel=parallel
    )
    assert float(padded.log_evidence) == pytest.approx(float(full.log_evidence), abs=1e-12)
    ours, theirs = padded.chain.marginals(), full.chain.marginals()
    np.testing.assert_allclose(ours.mean[:6], theirs.mean, atol=1e-12)
    np.testing.assert_allclose(ours.covariance[:6], theirs.covariance, atol=1e-12)
    np.testing.assert_allclose(padded.chain.entropy(), full.chain.entropy(), atol=1e-12)
    np.testing.assert_allclose(padded.chain.terminal.mean, full.chain.terminal.mean, atol=1e-12)
    xs = full.chain.sample(jax.random.key(0), 1)[0]
    longer = jnp.concatenate([xs, jnp.full((3, 2), jnp.nan)])
    np.testing.assert_allclose(padded.chain.log_prob(longer), full.chain.log_prob(xs), atol=1e-12)
    missing = rd.kalman_smoother(model, jnp.concatenate([ys[:6], padding]), parallel=parallel)
    assert float(missing.log_evidence) == pytest.approx(float(full.log_evidence), abs=1e-12)
    assert not np.allclose(missing.chain.terminal.covariance, full.chain.terminal.covariance)


@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_rows_missing_gives_the_prior(parallel):
    model = random_model(np.random.default_rng(0), 2, 1)
    exact = rd.kalman_smoother(model, jnp.full((4, 1), jnp.nan), parallel=parallel)
    oracle = joint_gaussian.posterior(model, np.full((4, 1), np.nan))
    assert float(exact.log_evidence) == 0.0
    marginals = exact.chain.marginals()
    np.testing.assert_allclose(marginals.mean, oracle.mean, atol=1e-12)
    np.testing.assert_allclose(marginals.covariance[3], oracle.block(3, 3), atol=1e-12)


@pytest.mark.slow
def test_evidence_gradient_equals_finite_differences():
    rng = np.random.default_rng(11)
    model = random_model(rng, 2, 4, num_inputs=1)
    inputs = jnp.asarray(rng.normal(size=(5, 1)))
    _, ys = model.simulate(jax.random.key(1), 5, inputs=inputs)
    ys = ys.at[1].set(jnp.nan).at[3, 0].set(jnp.nan)
    arrays, static = eqx.partition(model, eqx.is_array)

    def log_evidence(arrays, ys, parallel=False):
        return rd.kalman_smoother(
            eqx.combine(arrays, static), ys, inputs=inputs, parallel=parallel, length=4
        ).log_evidence

    check_grads(jax.jit(log_evidence), (arrays, ys), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
    grads = jax.grad(log_evidence, argnums=(0, 1))(arrays, ys)
    assert np.all(np.isfinite(grads[1])) and np.all(grads[1][1] == 0.0)
    in_parallel = jax.grad(lambda *args: log_evidence(*args, parallel=True), argnums=(0, 1))
    for ours, theirs in zip(
        jax.tree.leaves(in_parallel(arrays, ys)), jax.tree.leaves(grads), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)


@pytest.mark.slow
def test_closed_form_score_with_singular_noise_equals_joint_gaussian():
    # Derivatives of square roots do not exist here; those of covariances do.
    model = random_model(np.random.default_rng(2), 3, 1, singular=True)
    model = eqx.tree_at(lambda m: m.prior.scale_tril, model, jnp.zeros((3, 3)).at[1, 1].set(1.0))
    _, ys = model.simulate(jax.random.key(3), 4)

    def at(step):
        scale = model.transition.scale_tril + step * jnp.tril(jnp.ones((3, 3)))
        return eqx.tree_at(lambda m: m.transition.scale_tril, model, scale)

    def oracle(step):
        return joint_gaussian.posterior(at(step), ys).log_evidence

    slope = jax.grad(lambda step: rd.kalman_smoother(at(step), ys).log_evidence)(0.0)
    assert float(slope) == pytest.approx((oracle(1e-5) - oracle(-1e-5)) / 2e-5, rel=1e-6)


@pytest.mark.slow
def test_gradients_of_smoothed_moments_equal_finite_differences():
    rng = np.random.default_rng(4)
    model = random_model(rng, 2, 2)
    _, ys = model.simulate(jax.random.key(1), 4)
    arrays, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def moments(arrays):
        exact = rd.kalman_smoother(eqx.combine(arrays, static), ys, mask=True)
        marginals = exact.chain.marginals()
        return exact.log_evidence, marginals.mean, marginals.covariance

    check_grads(moments, (arrays,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_evidence_score_is_unchanged_when_the_chain_is_used():
    # Once the laws are differentiated too, the derivative of the scan replaces the closed form.
    model = random_model(np.random.default_rng(9), 2, 1)
    _, ys = model.simulate(jax.random.key(1), 6)
    alone = eqx.filter_grad(lambda m: rd.kalman_smoother(m, ys).log_evidence)(model)

    def beside(m):
        exact = rd.kalman_smoother(m, ys)
        return exact.log_evidence + 0.0 * jnp.sum(exact.chain.laws.mean)

    for a, b in zip(
        jax.tree.leaves(alone), jax.tree.leaves(eqx.filter_grad(beside)(model)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.slow
def test_kalman_smoother_handles_batches_and_a_single_row():
    model = random_model(np.random.default_rng(0), 2, 2)
    keys = jax.random.split(jax.random.key(0), 3)
    ys = jax.vmap(lambda key: model.simulate(key, 5)[1])(keys)
    lengths = jnp.array([5, 1, 3])
    batch = jax.vmap(lambda y, length: rd.kalman_smoother(model, y, length=length))(ys, lengths)
    for y, length, evidence in zip(ys, [5, 1, 3], batch.log_evidence, strict=True):
        alone = rd.kalman_smoother(model, y[:length])
        assert float(alone.log_evidence) == pytest.approx(float(evidence), abs=1e-12)
    with pytest.raises(ValueError, match="vmap"):
        batch.chain.marginals()


def test_an_emission_without_noise_at_one_row_is_refused():
    model = linear_transition_model(
        rd.VaryingLinearGaussianKernel(lambda u: (jnp.eye(1), jnp.zeros(1), u[:, None]))
    )
    inputs = jnp.ones((4, 1)).at[2].set(0.0)
    with pytest.raises(ValueError, match="emission scale with a positive diagonal"):
        rd.kalman_smoother(model, jnp.ones((4, 1)), inputs=inputs)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("weight", "num_times"), [(0.5, 100), (0.9, 400)])
def test_noise_free_decay_to_fixed_point_is_exact(weight, num_times, parallel):
    """The state becomes narrower than the rounding error of its mean; its past stays known.

    Without noise the path is a line in x_0, so that its posterior is a regression on one number.
    """
    ys = np.random.default_rng(0).normal(size=num_times) + 1 / (1 - weight)
    model = linear_model(weight=weight, bias=1.0, noise=0.0)
    powers = weight ** np.arange(num_times)
    shifts = (1 - powers) / (1 - weight)
    precision = 1 + np.sum(powers**2)
    start = np.sum(powers * (ys - shifts)) / precision
    exact = rd.kalman_smoother(model, ys[:, None], parallel=parallel).chain.marginals()
    np.testing.assert_allclose(exact.mean[:, 0], shifts + powers * start, rtol=0, atol=3e-3)
    np.testing.assert_allclose(exact.std[:, 0], powers / precision**0.5, rtol=1e-9)


@pytest.mark.slow
def test_noise_free_model_with_fast_mode_is_exact():
    """Backward gains of 1 / 0.05 would turn rounding errors into the answer within a few rows."""
    rng = np.random.default_rng(5)
    basis, n = rng.normal(size=(3, 3)), 20
    weight = basis @ np.diag([0.9, 0.8, 0.05]) @ np.linalg.inv(basis)
    design, ys = rng.normal(size=(2, 3)), rng.normal(size=(n, 2))
    model = linear_model(3, mean=1.0, weight=weight, bias=1.0, noise=0.0, design=design)
    # Each row sees x_0 = 1 + e through the powers of the weight.
    powers, centres = [np.eye(3)], [np.ones(3)]
    for _ in range(n - 1):
        powers.append(weight @ powers[-1])
        centres.append(weight @ centres[-1] + 1)
    stacked_design = np.concatenate([design @ power for power in powers])
    residual = (ys - np.stack(centres) @ design.T).ravel()
    covariance = np.linalg.inv(np.eye(3) + stacked_design.T @ stacked_design)
    start = covariance @ stacked_design.T @ residual
    exact = rd.kalman_smoother(model, ys).chain.marginals()
    np.testing.assert_allclose(exact.mean[0], 1 + start, rtol=0, atol=1e-3)
    np.testing.assert_allclose(exact.covariance[0], covariance, rtol=0, atol=1e-6)


def test_prior_decaying_off_the_noise_plane_is_exact():
    """No coordinate becomes narrow, but a direction across them does, by half at each row."""
    rng = np.random.default_rng(6)
    prior, noise = np.tril(rng.normal(size=(3, 3))), np.tril(rng.normal(size=(3, 3)))
    prior[:, 2], noise[:, 2] = 0, 0
    model = linear_model(
        3,
        mean=1.0,
        prior=prior,
        weight=0.5,
        bias=1.0,
        noise=noise,
        design=rng.normal(size=(1, 3)),
    )
    ys = np.asarray(model.simulate(jax.random.key(0), 70)[1])
    check_against_joint_gaussian(model, ys, parallel=False, atol=1e-3)


def test_a_prior_too_wide_for_covariances_is_refused_in_parallel():
    model = random_model(np.random.default_rng(0), 2, 1, prior_scale=1e9)
    ys = jnp.ones((20, 1))
    assert np.isfinite(rd.kalman_smoother(model, ys).log_evidence)
    with pytest.raises(ValueError, match="parallel=True forms covariances"):
        rd.kalman_smoother(model, ys, parallel=True)


@pytest.mark.parametrize("kind", ["settles", "does not settle"])
def test_long_series_in_parallel_equal_the_sequential_form(kind):
    # Long enough that gains which have settled are repeated. The variance of the second model's
    # second state, which is not observed, grows without bound.
    weight = np.diag([0.9, 1.0])
    design = np.array([[1.0, 0.5 if kind == "settles" else 0.0]])
    model = rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.zeros(2), jnp.eye(2)),
        transition=rd.LinearGaussianKernel(jnp.asarray(weight), jnp.zeros(2), 0.3 * jnp.eye(2)),
        emission=rd.LinearGaussianKernel(jnp.asarray(design), jnp.zeros(1), jnp.eye(1)),
    )
    _, ys = model.simulate(jax.random.key(0), 3 * SETTLED_ROWS + 100)

    @jax.jit
    def moments(model, ys):
        results = []
        for parallel in (True, False):
            exact = rd.kalman_smoother(model, ys, mask=True, parallel=parallel)
            marginals = exact.chain.marginals(parallel=parallel)
            results.append((exact.log_evidence, marginals.mean, marginals.covariance))
        return results

    for one, other in zip(*moments(model, ys), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)

    def evidence(model, parallel):
        return rd.kalman_smoother(model, ys, mask=True, parallel=parallel).log_evidence

    slopes = [jax.jit(jax.grad(evidence), static_argnums=1)(model, flag) for flag in (True, False)]
    for one, other in zip(*map(jax.tree.leaves, slopes), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)
