"""Chains whose backward kernels are drawn: against closed forms, brute force and each other."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backward_chains import OpaqueChain
from linear_models import linear_model, lower_factor, random_model
from scipy import stats

import retrodict as rd
from retrodict._expectations.backward_sampling import _quantiles

N, LENGTH = 5, 4


class Affine(rd.AbstractBackwardKernel):
    """A linear-Gaussian backward kernel, as a user would write it."""

    def law(self, step: rd.LinearGaussianKernel, x: jax.Array) -> rd.Gaussian:
        return rd.Gaussian(step.weight @ x + step.bias, step.scale_tril)


class Forked(rd.AbstractBackwardKernel):
    """A kernel with two branches behind filtering laws that are Gaussian: it takes more noise."""

    def law(self, step: jax.Array, x: jax.Array) -> rd.GaussianMixture:
        means = jnp.stack([0.5 * x + step, 0.5 * x - step])
        log_weights = jax.nn.log_softmax(jnp.array([1.0, -1.0]) * x[0])
        return rd.GaussianMixture(log_weights, means, jnp.stack([0.3 * jnp.eye(x.size)] * 2))


@functools.cache
def smoothed(d: int, length: int | None = None) -> tuple[rd.StateSpaceModel, Any, Any]:
    """A linear-Gaussian model, a series and its exact posterior."""
    model = random_model(np.random.default_rng(d), d, 2)
    ys = np.array(model.simulate(jax.random.key(0), N)[1])
    ys[1, 0] = np.nan
    if length is not None:
        ys[length:] = np.nan
    return model, ys, rd.kalman_smoother(model, ys, length=length)


def linear(d: int, length: int | None = None) -> rd.LinearGaussianChain:
    return smoothed(d, length)[2].chain


def sampled(chain: rd.LinearGaussianChain) -> rd.SampledChain:
    """The same chain, of which nothing but draws and densities is known."""
    return rd.SampledChain(chain.laws, Affine(), chain.kernels, chain.length)


def with_nan_in_padding(chain: rd.SampledChain, length: int) -> rd.SampledChain:
    def spoil(leaf: jax.Array, real: int) -> jax.Array:
        keep = jnp.arange(leaf.shape[0]) < real
        return jnp.where(keep.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.nan)

    return rd.SampledChain(
        jax.tree.map(lambda leaf: spoil(leaf, length), chain.laws),
        chain.shared,
        jax.tree.map(lambda leaf: spoil(leaf, length - 1), chain.steps),
        chain.length,
    )


# --- a chain that has a closed form ---------------------------------------------------------------


@pytest.mark.parametrize("length", [pytest.param(None, marks=pytest.mark.slow), LENGTH])
def test_sampled_chain_of_linear_kernels_equals_linear_gaussian_chain(length: int | None):
    """The same density, and the same paths of the same noise; in padding a path stays."""
    theirs = linear(2, length)
    ours = sampled(theirs)
    paths = theirs.sample(jax.random.key(0), 3)
    noise = jnp.swapaxes(jax.random.normal(jax.random.key(0), (N, 3, 2)), 0, 1)
    np.testing.assert_allclose(ours.from_noise(noise), paths, atol=1e-12)
    if length is not None:
        paths = paths.at[:, length:].set(jnp.nan)
    for path in paths[:2]:
        np.testing.assert_allclose(ours.log_prob(path), theirs.log_prob(path), rtol=1e-11)
    assert ours.num_times == N and ours.state_dim == ours.noise_dim == 2
    assert ours.sample(jax.random.key(1), 3).shape == (3, N, 2)


def test_values_in_padding_are_ignored():
    """Neither of the laws nor of the kernels: NaN there changes no value and no gradient."""
    clean = sampled(linear(2, LENGTH))
    noise = jax.random.normal(jax.random.key(0), (3, N, 2))
    path = jnp.full((N, 2), jnp.nan).at[:LENGTH].set(0.3)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def value(chain: rd.SampledChain) -> jax.Array:
        trace = chain.trace(noise)
        total = jnp.sum(jnp.sin(trace.paths)) + jnp.sum(trace.means) + jnp.sum(trace.covariances)
        return total + chain.log_prob(path)

    expected, there = value(clean)
    value_with_nan, gradient = value(with_nan_in_padding(clean, LENGTH))
    np.testing.assert_allclose(value_with_nan, expected, rtol=1e-12)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.slow
def test_prefix_keeps_the_first_rows():
    chain, exact = sampled(linear(1)), linear(1)
    for count in (1, 3):
        prefix, path = chain.prefix(count), jnp.linspace(-1.0, 1.0, count)[:, None]
        assert prefix.num_times == count
        np.testing.assert_allclose(
            prefix.log_prob(path), exact.prefix(count).log_prob(path), rtol=1e-11
        )
        assert prefix.sample(jax.random.key(0), 2).shape == (2, count, 1)
    for count, expected in ((3, 3), (N, LENGTH)):
        length: Any = sampled(linear(1, LENGTH)).prefix(count).length
        assert int(length) == expected
    with pytest.raises(ValueError, match=r"at most the number of rows \(5\), got 6"):
        chain.prefix(6)


@pytest.mark.slow
def test_batch_of_chains_works_under_vmap():
    lengths = [2, LENGTH, N]
    chains = [sampled(smoothed(1, length)[2].chain) for length in lengths]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chains)
    path = jnp.linspace(-1.0, 1.0, N)[:, None]
    noise = jax.random.normal(jax.random.key(0), (2, N, 1))
    values, paths = jax.jit(jax.vmap(lambda c: (c.log_prob(path), c.from_noise(noise))))(batch)
    for i, chain in enumerate(chains):
        np.testing.assert_allclose(values[i], chain.log_prob(path), rtol=1e-12)
        np.testing.assert_allclose(paths[i], chain.from_noise(noise), rtol=1e-12)
    with pytest.raises(ValueError, match="holds a batch of series.*jax.vmap"):
        batch.sample(jax.random.key(0), 2)


SAMPLERS = {
    "independent": rd.BackwardSampling(320),
    "antithetic": rd.BackwardSampling(320, noise="antithetic"),
    "stratified": rd.BackwardSampling(320, noise="stratified"),
}


# Independent noise is run by the tests of expectations.
SLOW_UNLESS_SHARED = pytest.mark.parametrize(
    "noise", [pytest.param("independent", marks=pytest.mark.slow), "antithetic", "stratified"]
)


@SLOW_UNLESS_SHARED
def test_conditional_moments_have_the_marginals_of_the_closed_form(noise: str):
    """15 means at 5 standard errors, and 15 covariances: one false alarm in 20,000 sets of draws.

    With 320 paths, 20 groups of them if stratified: tails of Student's t with 19 degrees.
    """
    exact, key = rd.marginals(linear(1, LENGTH)), jax.random.key(2)
    marginals = rd.marginals(sampled(linear(1, LENGTH)), estimator=SAMPLERS[noise], key=key)
    off = np.abs(marginals.mean - exact.mean)
    assert np.all(off <= 5 * marginals.mean_standard_error + 1e-12)
    off = np.abs(marginals.covariance - exact.covariance)
    assert np.all(off <= 5 * marginals.covariance_standard_error + 1e-12)
    # The law of the last state is known, and padding repeats it.
    np.testing.assert_allclose(marginals.mean[LENGTH - 1 :], exact.mean[LENGTH - 1 :], rtol=1e-12)
    np.testing.assert_allclose(marginals.mean_standard_error[LENGTH - 1 :], 0.0, atol=1e-12)
    if noise == "antithetic":
        # A mean under a linear kernel is linear in the noise: pairs remove all of its error.
        np.testing.assert_allclose(marginals.mean, exact.mean, rtol=1e-10)


def test_conditional_moments_vary_less_than_states():
    options = {"estimator": rd.BackwardSampling(320), "key": jax.random.key(2)}
    by_states = rd.marginals(linear(1), **options)
    by_moments = rd.marginals(sampled(linear(1)), **options)
    assert np.all(by_moments.mean_standard_error < by_states.mean_standard_error)


@pytest.mark.slow
@pytest.mark.parametrize("noise", SAMPLERS)
def test_elbo_of_exact_chain_has_zero_variance(noise: str):
    """Each path gives the log-evidence, by any noise: log p − log q is the same everywhere."""
    model, ys, exact = smoothed(1, LENGTH)
    estimator = rd.BackwardSampling(32, noise=SAMPLERS[noise].noise)
    value, error = rd.elbo(
        model,
        sampled(exact.chain),
        ys,
        estimator=estimator,
        key=jax.random.key(0),
        with_standard_error=True,
    )
    assert float(value) == pytest.approx(float(exact.log_evidence), abs=1e-9)
    assert float(error) < 1e-9


def test_score_free_gradients_of_exact_chain_vanish():
    """The value is the same; with the score, the gradient of a few paths is not zero."""
    model, ys, exact = smoothed(1)

    def bound(chain: rd.SampledChain, stop: bool) -> jax.Array:
        estimator = rd.BackwardSampling(2, stop_score=stop)
        return rd.elbo(model, chain, ys, estimator=estimator, key=jax.random.key(0))

    chain = sampled(exact.chain)
    (plain, noisy), (stopped, quiet) = (
        eqx.filter_jit(eqx.filter_value_and_grad(bound))(chain, stop) for stop in (False, True)
    )
    assert float(plain) == float(stopped)
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(quiet)) < 1e-9
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(noisy)) > 1e-2


# --- kernels of any form --------------------------------------------------------------------------


def test_kernels_may_use_more_noise_than_filtering_laws():
    laws = jax.vmap(rd.Gaussian)(jnp.zeros((3, 1)), jnp.ones((3, 1, 1)))
    chain = rd.SampledChain(laws, Forked(), jnp.array([[1.0], [2.0]]))
    assert chain.noise_dim == 2
    paths = chain.sample(jax.random.key(0), 4000)
    assert paths.shape == (4000, 3, 1)
    # x_1 = ±2 + x_2 / 2 + 0.3 ε, the upper branch with probability σ(2 x_2).
    middle, last = np.asarray(paths[:, 1, 0]), np.asarray(paths[:, 2, 0])
    share = 1 / (1 + np.exp(-2 * last))
    branch = middle - 0.5 * last > 0
    # Four thousand independent branches: one false alarm in 1.7 million.
    assert abs(np.mean(branch - share)) < 5 * np.sqrt(np.mean(share * (1 - share)) / 4000)


def mixture_family(model: rd.StateSpaceModel, ys: Any, count: int, **options: Any) -> Any:
    """A prepared family with weights that are not small."""
    family = rd.MixtureFamily(
        jax.random.key(3),
        model.state_dim,
        ys.shape[1],
        num_components=count,
        hidden=4,
        width=4,
        **options,
    ).prepare(model, ys)
    last = family.readout.layers[-1]
    noise = 0.5 * jax.random.normal(jax.random.key(4), last.weight.shape)
    return eqx.tree_at(lambda f: f.readout.layers[-1].weight, family, noise)


def in_other_units(d: int) -> tuple[rd.StateSpaceModel, np.ndarray]:
    """A linear-Gaussian model far from the origin and of another scale than one."""
    rng = np.random.default_rng(11)
    model = linear_model(
        d,
        mean=50.0,
        prior=20.0 * lower_factor(rng, d),
        weight=0.8,
        bias=10.0,
        noise=12.0 * lower_factor(rng, d),
        design=jnp.ones((1, d)),
        error=5.0,
    )
    return model, np.array(model.simulate(jax.random.key(5), N)[1])


@pytest.mark.parametrize("d", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mixture_kernel_equals_reversed_variational_transition(d: int):
    """q_{k-1|k}(x, ·) ∝ m̄(·, x) q_{k-1}, normalised over a grid, in the units of the model."""
    model, ys = in_other_units(d)
    family = mixture_family(model, ys, 3)
    chain = family.infer(ys)
    move = model.transition  # that of an untrained family is the model's own
    k, x = 3, jnp.full(d, 42.0)
    before = jax.tree.map(lambda leaf: leaf[k - 1], chain.laws)
    step = jax.tree.map(lambda leaf: leaf[k - 1], chain.steps)
    law = chain.kernel_law(step, x)
    points, cell = grid_around(law, 400 if d == 1 else 120)

    @jax.jit
    @jax.vmap
    def both(point: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = move.law(point).log_prob(x) + before.log_prob(point)
        return law.log_prob(point), weight

    ours, unnormalised = (np.asarray(leaf) for leaf in both(points))
    density = np.exp(unnormalised - unnormalised.max())
    density = density / (density.sum() * cell)
    np.testing.assert_allclose(np.exp(ours), density, atol=1e-8 * density.max())
    assert np.sum(np.exp(ours)) * cell == pytest.approx(1.0, abs=1e-8)
    assert np.all(np.exp(law.log_weights) > 1e-3)


def grid_around(law: rd.GaussianMixture, num: int) -> tuple[jax.Array, float]:
    """Points over nine deviations of every component, and the volume of a cell."""
    spread = np.sqrt(np.asarray(jnp.diagonal(law.components.covariance, axis1=1, axis2=2)))
    low = np.min(np.asarray(law.means) - 9 * spread, axis=0)
    high = np.max(np.asarray(law.means) + 9 * spread, axis=0)
    axes = [np.linspace(a, b, num) for a, b in zip(low, high, strict=True)]
    cells = np.prod([axis[1] - axis[0] for axis in axes])
    points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, law.dim)
    return jnp.asarray(points), float(cells)


@pytest.mark.slow
def test_mixture_of_one_component_is_a_linear_gaussian_chain():
    """Its kernels are then the reversed transition, and its density that of the closed form."""
    model, ys = in_other_units(2)
    chain = mixture_family(model, ys, 1).infer(ys)
    laws = jax.vmap(lambda m, s: rd.Gaussian(m[0], s[0]))(chain.laws.means, chain.laws.scale_trils)
    # x_{k-1} = m + G (x_k − w m − b) + noise, with G = S wᵀ (w S wᵀ + Q)⁻¹.
    weight, bias = np.asarray(model.transition.weight), np.asarray(model.transition.bias)
    noise = np.asarray(model.transition.scale_tril)
    gains, offsets, scales = [], [], []
    for mean, spread in zip(np.asarray(laws.mean[:-1]), np.asarray(laws.covariance), strict=False):
        gain = spread @ weight.T @ np.linalg.inv(weight @ spread @ weight.T + noise @ noise.T)
        gains.append(gain)
        offsets.append(mean - gain @ (weight @ mean + bias))
        scales.append(np.linalg.cholesky(spread - gain @ weight @ spread))
    exact = rd.LinearGaussianChain.from_arrays(
        laws.mean, laws.scale_tril, *(jnp.asarray(np.stack(a)) for a in (gains, offsets, scales))
    )
    for path in exact.sample(jax.random.key(0), 2):
        np.testing.assert_allclose(chain.log_prob(path), exact.log_prob(path), rtol=1e-9)


@pytest.mark.slow
def test_nonlinear_family_with_zero_correction_equals_recurrent_family():
    model, ys, _ = smoothed(2)
    family: Any = rd.NonlinearFamily(
        jax.random.key(0), 2, 2, num_components=1, hidden=4, width=4
    ).prepare(model, ys)
    last = family.correction.layers[-1]
    silent = eqx.tree_at(
        lambda f: f.correction.layers[-1].weight, family, jnp.zeros_like(last.weight)
    )
    chain, base = silent.infer(ys), silent.base.infer(ys)
    noise = jax.random.normal(jax.random.key(0), (2, N, 2))
    paths = chain.from_noise(noise)
    np.testing.assert_allclose(paths, base.from_noise(noise), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(chain.log_prob(paths[0]), base.log_prob(paths[0]), rtol=1e-9)
    # With weights, the kernel bends: the mean is no linear function of the later state.
    loud = eqx.tree_at(lambda f: f.correction.layers[-1].weight, family, last.weight + 1.0)
    step = jax.tree.map(lambda leaf: leaf[0], loud.infer(ys).steps)
    kernel = rd.unwrap(loud).shared()
    means = [kernel.law(step, x * jnp.ones(2)).mean for x in (-2.0, 0.0, 2.0)]
    assert np.max(np.abs(means[0] - 2 * means[1] + means[2])) > 1e-3


def bent_family(d: int, count: int, weights: float) -> tuple[Any, Any]:
    """A prepared nonlinear family of several components, whose networks end in noise, and data."""
    model, ys = in_other_units(d)
    family: Any = rd.NonlinearFamily(
        jax.random.key(0), d, 1, num_components=count, hidden=4, width=4
    ).prepare(model, ys)

    def last(f: Any) -> list[Any]:
        return [f.correction.kernel.layers[-1].weight, f.correction.law.layers[-1].weight]

    keys = jax.random.split(jax.random.key(4), 2)
    noise = [
        weights * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, last(family), strict=True)
    ]
    return eqx.tree_at(last, family, noise), ys


@pytest.mark.slow
@pytest.mark.parametrize("d", [1, 2])
def test_uncorrected_components_have_moments_of_recurrent_family(d: int):
    """Each stands elsewhere: gradients tell them apart from the first step on."""
    family, ys = bent_family(d, 3, 0.0)
    # A law that was read from the data would be narrower than the units that the components
    # stand apart in.
    silent: Any = eqx.tree_at(
        lambda f: f.base.law.layers[-1].weight, family, replace_fn=jnp.zeros_like
    )
    chain, base = silent.infer(ys), silent.base.infer(ys)
    np.testing.assert_allclose(chain.laws.mean, base.laws.mean, rtol=1e-10)
    np.testing.assert_allclose(chain.laws.covariance, base.laws.covariance, rtol=1e-10)
    assert chain.noise_dim == d + 1
    x = jnp.full(d, 42.0)
    for k in range(N - 1):
        law = chain.kernel_law(jax.tree.map(lambda leaf, k=k: leaf[k], chain.steps), x)
        other = jax.tree.map(lambda leaf, k=k: leaf[k], base.kernels)
        np.testing.assert_allclose(law.mean, other.weight @ x + other.bias, rtol=1e-10)
        covariance = other.scale_tril @ other.scale_tril.T
        np.testing.assert_allclose(law.covariance, covariance, rtol=1e-9, atol=1e-9)
        for means in (law.means, chain.laws.means[k]):
            gaps = np.linalg.norm(np.asarray(means)[:, None] - np.asarray(means)[None], axis=-1)
            assert np.all(gaps[~np.eye(3, dtype=bool)] > 1.0)


def test_multi_component_kernel_is_nonlinear_in_the_later_state():
    family, ys = bent_family(1, 2, 0.7)
    chain = family.infer(ys)
    assert family.num_components == chain.laws.num_components == 2
    step = jax.tree.map(lambda leaf: leaf[2], chain.steps)
    laws = [chain.kernel_law(step, jnp.array([x])) for x in (20.0, 45.0, 70.0)]
    for law in laws:
        points, cell = grid_around(law, 2000)
        density = np.exp(np.asarray(jax.vmap(law.log_prob)(points)))
        assert density.sum() * cell == pytest.approx(1.0, abs=1e-8)
        mean = np.sum(density * np.asarray(points)[:, 0]) * cell
        assert float(law.mean[0]) == pytest.approx(mean, rel=1e-8)
    weights = [np.exp(np.asarray(law.log_weights)) for law in laws]
    ratios = [np.ravel(law.scale_trils[0] / law.scale_trils[1]) for law in laws]
    apart = [np.ravel(law.means[0] - law.means[1]) for law in laws]
    for parts in (weights, ratios, apart):
        assert np.max(np.abs(parts[0] - 2 * parts[1] + parts[2])) > 1e-3


def test_nonlinear_family_of_one_component_has_gaussian_laws():
    """Gaussian laws and kernels, and no array more: files of one component stay readable."""
    key = jax.random.key(0)
    one: Any = rd.NonlinearFamily(key, 2, 1, num_components=1)
    assert one.num_components == 1 and isinstance(one.correction, eqx.nn.MLP)
    assert isinstance(one.infer(np.ones((3, 1))).laws, rd.Gaussian)
    assert rd.NonlinearFamily(key, 2, 1).num_components == 2
    several: Any = rd.NonlinearFamily(key, 2, 1, num_components=3).redraw(jax.random.key(1))
    assert several.num_components == 3
    assert several.infer(np.ones((3, 1))).laws.means.shape == (3, 3, 2)


# --- how paths are drawn --------------------------------------------------------------------------


@functools.cache
def forked() -> rd.SampledChain:
    """Mixtures with two modes at every time, in closed form, of one state."""
    model, ys = in_other_units(1)
    return mixture_family(model, ys, 2).infer(ys)


def shape_of_states(before: jax.Array, x: jax.Array, data: Any) -> jax.Array:
    """Neither odd nor even in the states, and of order one."""
    return jnp.tanh((x[0] - 45.0) / 10.0) + jnp.cos(before[0] / 15.0)


FUNCTIONAL = rd.AdditiveFunctional(shape_of_states)


@functools.cache
def estimates(estimator: rd.BackwardSampling) -> tuple[np.ndarray, np.ndarray]:
    """200 estimates of one expectation, and the errors that they report."""
    chain = forked()

    @jax.jit
    @jax.vmap
    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rd.expectation(
            chain, FUNCTIONAL, estimator=estimator, key=key, with_standard_error=True
        )

    values, errors = one(jax.random.split(jax.random.key(6), 200))
    return np.asarray(values), np.asarray(errors)


@functools.cache
def reference() -> tuple[float, float]:
    estimator = rd.BackwardSampling(100_000)
    value, error = rd.expectation(
        forked(), FUNCTIONAL, estimator=estimator, key=jax.random.key(7), with_standard_error=True
    )
    return float(value), float(error)


@pytest.mark.statistical
@pytest.mark.parametrize("by_component", [False, True])
@pytest.mark.parametrize("noise", SAMPLERS)
def test_noise_schemes_are_unbiased_with_calibrated_errors(noise: Any, by_component: bool):
    """Over 200 seeds, against 100,000 paths: each of six is a false alarm with probability 6e-5.

    With 32 groups an estimate, z-scores have the variance 31/29 of Student's t, known to 10% from
    200 of them: the bounds are five deviations off. With 8 groups, errors that
    happen to miss one of two modes would give far larger ones.
    """
    size = {"independent": 32, "antithetic": 64, "stratified": 512}[noise]
    estimator = rd.BackwardSampling(size, noise=noise, by_component=by_component)
    values, errors = estimates(estimator)
    target, uncertain = reference()
    deviation = np.hypot(values.std(ddof=1) / np.sqrt(200), uncertain)
    assert abs(values.mean() - target) < 4 * deviation
    assert 0.55 < np.var((values - values.mean()) / errors) < 1.6
    assert 0.75 < values.std(ddof=1) / np.sqrt(np.mean(errors**2)) < 1.25


@pytest.mark.statistical
def test_shared_noise_and_enumerated_components_lower_the_variance():
    """At the same number of paths; the ratio of two variances of 200 has a deviation of 15%."""
    plain = np.var(estimates(rd.BackwardSampling(128))[0])
    stratified = np.var(estimates(rd.BackwardSampling(128, noise="stratified"))[0])
    assert stratified < 0.6 * plain
    assert np.var(estimates(rd.BackwardSampling(128, noise="antithetic"))[0]) < 0.9 * plain
    # Twice as many paths, one for each component: less than half the variance.
    assert np.var(estimates(rd.BackwardSampling(128, by_component=True))[0]) < 0.45 * plain


@pytest.mark.slow
def test_components_that_are_enumerated_have_their_weights():
    """The law of the last state is then exact but for the noise within each component."""
    chain = forked()
    estimator = rd.BackwardSampling(4, by_component=True)
    trace, weights = estimator.trace(chain, jax.random.key(0))
    assert trace.paths.shape == (4, 2, N, 1)
    np.testing.assert_allclose(weights, np.tile(np.exp(chain.terminal.log_weights), (4, 1)))
    means, scales = (
        np.asarray(leaf).ravel() for leaf in (chain.terminal.means, chain.terminal.scale_trils)
    )
    assert np.all(np.abs((np.asarray(trace.paths[:, :, -1, 0]) - means) / scales) < 5)
    # A group of sixteen for each component, in which each component has every sixteenth once.
    estimator = rd.BackwardSampling(32, noise="stratified", by_component=True)
    trace, weights = estimator.trace(chain, jax.random.key(0))
    assert trace.paths.shape == (2, 32, N, 1)
    np.testing.assert_allclose(np.sum(weights, axis=1), 1.0)
    residuals = (np.asarray(trace.paths[:, :, -1, 0]).reshape(2, 16, 2) - means) / scales
    bins = np.floor(16 * stats.norm.cdf(residuals)).astype(int)
    expected = np.broadcast_to(np.arange(16)[:, None], (2, 16, 2))
    np.testing.assert_array_equal(np.sort(bins, axis=1), expected)


def test_quantiles_of_float32_levels_near_one_are_finite(x32):
    """(15 + u) / 16 is rounded to one for one u in two million: a path would be infinite."""
    levels = (jnp.array([15.0, 0.0]) + jnp.array([1 - 2**-23, 0.0])) / 16
    np.testing.assert_array_equal(levels, [1.0, 0.0])
    quantiles = _quantiles(levels)
    assert quantiles.dtype == jnp.float32 and np.all(np.isfinite(quantiles))
    np.testing.assert_allclose(quantiles[0], -quantiles[1], rtol=1e-3)


@pytest.mark.statistical
def test_gradients_without_the_score_have_the_same_mean():
    """Of a chain that is not exact, over 4,000 keys.

    Each entry is compared at 4.5 joint standard errors; 26 entries are one false alarm in 5,000.
    """
    model, ys = in_other_units(1)
    family = mixture_family(model, ys, 2)
    parameters, fixed = eqx.partition(family.readout.layers[-1].weight, eqx.is_inexact_array)

    def bound(weight: jax.Array, key: jax.Array, estimator: rd.BackwardSampling) -> jax.Array:
        moved = eqx.tree_at(lambda f: f.readout.layers[-1].weight, family, weight)
        return rd.elbo(model, moved.infer(ys), ys, estimator=estimator, key=key)

    keys = jax.random.split(jax.random.key(8), 4000)
    gradients = []
    every: list[Any] = [{}, {"stop_score": True}, {"stop_score": True, "by_component": True}]
    for options in every:
        estimator = rd.BackwardSampling(1, **options)
        slope = jax.jit(
            jax.vmap(jax.grad(functools.partial(bound, estimator=estimator)), (None, 0))
        )
        gradients.append(np.asarray(slope(parameters, keys)))
    means = [g.mean(0) for g in gradients]
    errors = [g.std(0) / np.sqrt(4000) for g in gradients]
    for mean, error in zip(means[1:], errors[1:], strict=True):
        assert np.all(np.abs(mean - means[0]) <= 4.5 * np.hypot(error, errors[0]))


# --- tolerances and misuse ------------------------------------------------------------------------


def test_tolerance_is_reached_or_raises():
    chain, key = sampled(linear(1)), jax.random.key(0)
    options: dict[str, Any] = {"estimator": rd.BackwardSampling(64), "key": key}
    once = rd.marginals(chain, **options)
    tolerance = 0.5 * float(jnp.max(once.mean_standard_error))
    marginals = rd.marginals(chain, tolerance=tolerance, **options)
    assert float(jnp.max(marginals.mean_standard_error)) <= tolerance
    assert np.all(np.abs(marginals.mean - rd.marginals(linear(1)).mean) < 6 * tolerance)
    value, error = rd.expectation(
        chain, rd.StateSum(), tolerance=0.05, with_standard_error=True, **options
    )
    assert float(error[0]) <= 0.05
    assert abs(float(value[0] - jnp.sum(rd.marginals(linear(1)).mean))) < 0.3
    with pytest.raises(ValueError, match="needs about [0-9]+ paths, and max_samples is 100"):
        rd.marginals(chain, tolerance=tolerance, max_samples=100, **options)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be a positive standard error"):
            rd.marginals(chain, tolerance=bad, **options)
        with pytest.raises(ValueError, match="must be a positive standard error"):
            rd.marginals(linear(1), tolerance=bad)
    with pytest.raises(ValueError, match="draws two replicates or more"):
        rd.marginals(chain, tolerance=1.0, estimator=rd.BackwardSampling(1), key=key)
    with pytest.raises(ValueError, match="not inside jax.jit"):
        jax.jit(
            lambda key: rd.expectation(
                chain, rd.StateSum(), estimator=rd.BackwardSampling(64), key=key, tolerance=1.0
            )
        )(key)


def test_tolerance_counts_paths_not_groups():
    chain, key = sampled(linear(1)), jax.random.key(0)
    estimator = rd.BackwardSampling(64, noise="stratified")
    once = rd.marginals(chain, estimator=estimator, key=key)
    tolerance = 0.5 * float(jnp.max(once.mean_standard_error))
    with pytest.raises(ValueError, match="after 64 it is"):
        rd.marginals(chain, estimator=estimator, key=key, tolerance=tolerance, max_samples=128)


def test_unavailable_standard_error_fails_any_tolerance():
    chain = sampled(linear(1))
    broken = eqx.tree_at(lambda c: c.laws.mean, chain, jnp.full((N, 1), jnp.nan))
    with pytest.raises(ValueError, match="standard error is nan"):
        rd.expectation(
            broken,
            rd.StateSum(),
            estimator=rd.BackwardSampling(64),
            key=jax.random.key(0),
            tolerance=1.0,
        )


def test_exact_results_meet_any_tolerance():
    value = rd.expectation(linear(1), rd.StateSum(), tolerance=1e-9)
    np.testing.assert_allclose(value, jnp.sum(rd.marginals(linear(1), tolerance=1e-9).mean))
    with pytest.raises(ValueError, match="draws two replicates or more"):
        rd.expectation(linear(1), rd.StateSum(), estimator=rd.Quadrature(2), tolerance=1.0)


def test_one_group_of_paths_has_means_and_nan_errors():
    marginals = rd.marginals(
        sampled(linear(1)),
        estimator=rd.BackwardSampling(16, noise="stratified"),
        key=jax.random.key(0),
    )
    assert np.all(np.isfinite(marginals.mean))
    assert np.all(np.isnan(marginals.mean_standard_error)) and np.all(
        np.isnan(marginals.covariance)
    )


@pytest.mark.usefixtures("untyped")
def test_unsupported_requests_are_refused_with_a_remedy():
    model, ys, exact = smoothed(1)
    chain = sampled(exact.chain)
    with pytest.raises(TypeError, match="ClosedForm.*got SampledChain.*BackwardSampling"):
        rd.expectation(chain, rd.StateSum())
    with pytest.raises(TypeError, match="SampledChain have no closed form.*BackwardSampling"):
        rd.marginals(chain)
    with pytest.raises(ValueError, match="SampledChain needs sampled paths.*BackwardSampling"):
        rd.elbo(model, chain, ys)
    with pytest.raises(TypeError, match="got SampledChain|SampledChain has no closed form"):
        rd.elbo(model, chain, ys, estimator=rd.Quadrature(3))
    with pytest.raises(TypeError, match="typed key"):
        chain.sample(0, 2)  # pyright: ignore
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        chain.sample(jax.random.key(0), 0)
    with pytest.raises(
        ValueError, match="'independent', 'antithetic' or 'stratified', got 'sobol'"
    ):
        rd.BackwardSampling(2, noise="sobol")  # pyright: ignore
    with pytest.raises(ValueError, match="groups of 16 paths.* got 20"):
        rd.BackwardSampling(20, noise="stratified")
    with pytest.raises(ValueError, match="groups of 2 paths.* got 3"):
        rd.BackwardSampling(3, noise="antithetic")

    key = jax.random.key(0)
    with pytest.raises(TypeError, match="OpaqueChain has no map from noise to paths"):
        rd.marginals(
            OpaqueChain(chain), estimator=rd.BackwardSampling(2, noise="antithetic"), key=key
        )
    with pytest.raises(TypeError, match="got MixtureFamily. Use fit"):
        rd.em(key, model, ys, family=rd.MixtureFamily(key, 1, 2))


def test_defensive_mixture_density_equals_its_formula():
    mean, scale = jnp.array([[0.5], [-0.2]]), jnp.full((2, 1, 1), 0.3)
    inner = rd.LinearGaussianChain.from_arrays(
        mean, scale, jnp.full((1, 1, 1), 0.8), jnp.full((1, 1), 0.1), jnp.full((1, 1, 1), 0.2)
    )
    wide = rd.Gaussian(jnp.zeros(1), 2.0 * jnp.eye(1))
    chain = rd.defensive_mixture(inner, wide, 0.25)
    path = jnp.array([[0.4], [-0.6]])

    def normal(x, m, s):
        return np.exp(-0.5 * ((x - m) / s) ** 2) / (s * np.sqrt(2 * np.pi))

    last = 0.75 * normal(-0.6, -0.2, 0.3) + 0.25 * normal(-0.6, 0.0, 2.0)
    first = 0.75 * normal(0.4, 0.8 * -0.6 + 0.1, 0.2) + 0.25 * normal(0.4, 0.0, 2.0)
    assert float(chain.log_prob(path)) == pytest.approx(np.log(last * first), abs=1e-10)
    ends = chain.sample(jax.random.key(0), 20_000)[:, -1, 0]
    law = chain.terminal
    # Five standard errors of a mean: a false alarm in two million.
    assert float(ends.mean()) == pytest.approx(float(law.mean[0]), abs=5 * float(ends.std()) / 141)
    assert float(ends.var()) == pytest.approx(float(law.covariance[0, 0]), rel=0.1)
    # The filtering laws of the chain itself: that of the earlier time is what its kernel gets.
    chain = rd.defensive_mixture(inner, None, 0.25)
    last = normal(-0.6, -0.2, 0.3)
    first = 0.75 * normal(0.4, 0.8 * -0.6 + 0.1, 0.2) + 0.25 * normal(0.4, 0.5, 0.3)
    assert float(chain.log_prob(path)) == pytest.approx(np.log(last * first), abs=1e-10)
    with pytest.raises(ValueError, match="between zero and one, got 1.5"):
        rd.defensive_mixture(inner, wide, 1.5)
    with pytest.raises(ValueError, match=r"mean of shape \(1,\).*shape \(2,\)"):
        rd.defensive_mixture(inner, rd.Gaussian(jnp.zeros(2), jnp.eye(2)))
