"""The evidence lower bound: the evidence under exact posteriors, and below it elsewhere."""

from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import joint_gaussian
import numpy as np
import pytest
from linear_models import linear_model, random_model
from nonlinear_models import hide_linearity

import retrodict as rd
from retrodict._exact import KalmanPosterior
from retrodict._expectations.elbo import elbo_of_series
from retrodict._expectations.expectation import check_chain, check_estimator
from retrodict._model import prepare_data

LENGTH = 5


class Case(NamedTuple):
    """A series with missing entries, a missing row, padding of NaN and perhaps inputs."""

    model: rd.StateSpaceModel
    ys: np.ndarray
    inputs: np.ndarray | None
    exact: KalmanPosterior

    def elbo(self, model: rd.StateSpaceModel, **options):
        return rd.elbo(
            model, self.exact.chain, self.ys, inputs=self.inputs, length=LENGTH, **options
        )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 1, 0), id="d1"),
        pytest.param((2, 3, 2), id="d2-inputs", marks=pytest.mark.slow),
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    state, obs, num_inputs = request.param
    rng = np.random.default_rng(1)
    model = random_model(rng, state, obs, num_inputs)
    inputs = rng.normal(size=(LENGTH + 2, num_inputs)) if num_inputs else None
    ys = np.array(model.simulate(jax.random.key(0), LENGTH + 2, inputs=inputs)[1])
    ys[1], ys[3, 0], ys[LENGTH:] = np.nan, np.nan, np.nan
    if inputs is not None:
        inputs[LENGTH:] = np.nan
    return Case(model, ys, inputs, rd.kalman_smoother(model, ys, inputs=inputs, length=LENGTH))


@pytest.mark.parametrize(
    "estimator",
    [rd.ClosedForm(), rd.Recursive(), rd.Quadrature(3), rd.RaoBlackwellised(2)],
    ids=lambda e: type(e).__name__,
)
def test_elbo_of_exact_posterior_equals_log_evidence(case: Case, estimator):
    elbo = case.elbo(case.model, estimator=estimator, key=jax.random.key(0))
    assert float(elbo) == pytest.approx(float(case.exact.log_evidence), abs=1e-9)


def test_every_sampled_path_gives_the_log_evidence(case: Case):
    estimator = rd.BackwardSampling(7)
    elbo, error = case.elbo(
        case.model, estimator=estimator, key=jax.random.key(0), with_standard_error=True
    )
    assert float(elbo) == pytest.approx(float(case.exact.log_evidence), abs=1e-9)
    assert float(error) < 1e-9  # no path differs from another


@pytest.mark.parametrize("rule", ["gauss-hermite", "cubature"])
def test_quadrature_of_quadratics_is_exact(case: Case, rule):
    # Three nodes an axis integrate degree five, cubature degree three: here all terms are of degree
    # two, and none is declared to be.
    hidden = hide_linearity(case.model)
    elbo = case.elbo(hidden, estimator=rd.Quadrature(3, rule))
    assert float(elbo) == pytest.approx(float(case.exact.log_evidence), abs=1e-9)


@pytest.mark.slow
def test_transition_of_unknown_form_uses_pair_quadrature():
    rng = np.random.default_rng(2)
    model = random_model(rng, 1, 1)
    _, ys = model.simulate(jax.random.key(0), 4)
    exact = rd.kalman_smoother(model, ys)
    transition = rd.DistributionKernel(lambda x: model.transition.law(x))
    unknown = replace(model, transition=transition)
    elbo = rd.elbo(unknown, exact.chain, ys)
    assert float(elbo) == pytest.approx(float(exact.log_evidence), abs=1e-9)
    single = rd.elbo(model, rd.kalman_smoother(model, ys[:1]).chain, ys[:1])
    assert float(single) == pytest.approx(float(rd.kalman_smoother(model, ys[:1]).log_evidence))


def test_elbo_gradient_in_model_equals_evidence_gradient(case: Case):
    # By Fisher's identity, with the chain held fixed at the exact posterior.
    def log_evidence(model):
        return rd.kalman_smoother(model, case.ys, inputs=case.inputs, length=LENGTH).log_evidence

    expected = eqx.filter_grad(log_evidence)(case.model)
    data = case.model.series(case.ys, inputs=case.inputs, length=LENGTH)
    score = rd.expectation(case.exact.chain, rd.Score(case.model), data)
    hidden = eqx.filter_grad(lambda m: case.elbo(hide_linearity(m), estimator=rd.Quadrature(3)))
    for gradient in (score, hidden(case.model)):
        assert jax.tree.structure(gradient) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-8)


def test_elbo_gap_equals_divergence_from_posterior():
    # log p(y) − ELBO = KL(q ‖ p(· | y)), between two Gaussians over the whole path.
    rng = np.random.default_rng(3)
    model, other = random_model(rng, 2, 1), random_model(rng, 2, 1)
    _, ys = model.simulate(jax.random.key(0), 5)
    p, q = joint_gaussian.posterior(model, ys), joint_gaussian.posterior(other, ys)
    shift = (p.mean - q.mean).ravel()
    ratio = np.linalg.solve(p.covariance, q.covariance)
    divergence = 0.5 * (
        np.trace(ratio)
        + shift @ np.linalg.solve(p.covariance, shift)
        - shift.size
        - np.linalg.slogdet(ratio)[1]
    )
    chain = rd.kalman_smoother(other, ys).chain
    elbo = float(rd.elbo(model, chain, ys))
    assert elbo == pytest.approx(p.log_evidence - divergence, abs=1e-8)
    by_recursion = float(rd.elbo(model, chain, ys, estimator=rd.Recursive()))
    assert by_recursion == pytest.approx(elbo, abs=1e-9)
    by_nodes = float(rd.elbo(hide_linearity(model), chain, ys, estimator=rd.Quadrature(3)))
    assert by_nodes == pytest.approx(elbo, abs=1e-9)


def grid_elbo(model, chain, ys: np.ndarray, num_points: int, width: float) -> float:
    """The bound by sums over a grid of whole paths of two states: no recursion, no closed form."""
    laws = jax.tree.map(np.asarray, chain.marginals())
    axes = [
        [
            np.linspace(m - width * s, m + width * s, num_points)
            for m, s in zip(mean, std, strict=True)
        ]
        for mean, std in zip(laws.mean, np.asarray(laws.std), strict=True)
    ]
    grids = [np.stack(np.meshgrid(*row, indexing="ij"), -1).reshape(-1, len(row)) for row in axes]
    cell = np.prod([axis[1] - axis[0] for row in axes for axis in row])
    joint = jax.vmap(lambda x: jax.vmap(lambda z: model.log_joint(jnp.stack([x, z]), ys))(grids[1]))
    log_density = jax.vmap(
        lambda x: jax.vmap(lambda z: chain.log_prob(jnp.stack([x, z])))(grids[1])
    )
    log_p, log_q = np.asarray(jax.jit(joint)(grids[0])), np.asarray(jax.jit(log_density)(grids[0]))
    return float(np.sum(np.exp(log_q) * (log_p - log_q)) * cell)


@pytest.mark.parametrize(
    ("dim", "order", "num_points", "width", "tolerance"),
    [(1, 40, 401, 8.0, 1e-7), pytest.param(2, 20, 41, 6.0, 1e-5, marks=pytest.mark.slow)],
)
def test_elbo_of_nonlinear_kernels_equals_grid_sums(dim, order, num_points, width, tolerance):
    # Trapezoidal sums of a smooth integrand that decays at both ends converge exponentially.
    turn = jnp.array([[0.9, -0.4], [0.3, 0.8]])[:dim, :dim]
    model = rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.ones(dim), 0.8 * jnp.eye(dim)),
        transition=rd.NonlinearGaussianKernel(
            lambda x: jnp.sin(jnp.matmul(turn, x)), 0.5 * jnp.eye(dim)
        ),
        emission=rd.NonlinearGaussianKernel(
            lambda x: jnp.cos(x[:1]) + 0.3 * x[-1:], rd.Diagonal(0.4 * jnp.ones(1))
        ),
    )
    linear = replace(
        linear_model(dim, weight=turn, bias=0.1, noise=0.6, design=jnp.ones((1, dim)), error=0.7),
        prior=model.prior,
    )
    ys = np.array([[0.3], [0.6]])
    chain = rd.kalman_smoother(linear, ys).chain
    expected = grid_elbo(model, chain, ys, num_points, width)
    estimator = rd.Quadrature(order)
    assert float(rd.elbo(model, chain, ys, estimator=estimator)) == pytest.approx(
        expected, abs=tolerance
    )


def test_padding_does_not_change_elbo_or_gradients(case: Case):
    hidden = hide_linearity(case.model)
    estimator = rd.Quadrature(3)
    short_inputs = None if case.inputs is None else case.inputs[:LENGTH]
    chain = rd.kalman_smoother(case.model, case.ys[:LENGTH], inputs=short_inputs).chain

    @jax.jit
    def padded(scale, ys):
        changed = eqx.tree_at(lambda m: m.emission.scale_tril, hidden, scale)
        return rd.elbo(
            changed, case.exact.chain, ys, inputs=inputs, length=LENGTH, estimator=estimator
        )

    inputs = None if case.inputs is None else jnp.nan_to_num(case.inputs)
    scale = 1.2 * hidden.emission.scale_tril
    other = eqx.tree_at(lambda m: m.emission.scale_tril, hidden, scale)
    short = rd.elbo(other, chain, case.ys[:LENGTH], inputs=short_inputs, estimator=estimator)
    value, gradients = jax.value_and_grad(padded, argnums=(0, 1))(scale, jnp.asarray(case.ys))
    assert float(value) == pytest.approx(float(short), abs=1e-12)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
    assert np.all(gradients[1][LENGTH:] == 0.0) and np.all(gradients[1][1] == 0.0)


def test_running_elbo_equals_elbo_of_each_prefix(case: Case):
    running = rd.online.RunningPosterior(rd.KalmanFamily(case.model), case.model)
    _, out = running.scan(running.init(), case.ys, inputs=case.inputs, length=LENGTH)
    for k in range(1, LENGTH):
        prefix = rd.kalman_smoother(case.model, case.ys, inputs=case.inputs, length=k + 1)
        assert float(out.elbo[k]) == pytest.approx(float(prefix.log_evidence), abs=1e-10)


@pytest.mark.slow
def test_elbo_works_under_vmap_and_grad():
    model = random_model(np.random.default_rng(5), 1, 1)
    keys = jax.random.split(jax.random.key(0), 3)
    ys = jax.vmap(lambda key: model.simulate(key, 6)[1])(keys)
    lengths = jnp.array([6, 1, 4])
    batch = jax.vmap(lambda y, length: rd.kalman_smoother(model, y, mask=True, length=length))(
        ys, lengths
    )

    @jax.jit
    def loss(chains, scale):
        changed = eqx.tree_at(lambda m: m.emission.scale_tril, model, scale)

        def one(chain, y):
            series = prepare_data(changed, y, mask=True, length=chain.length)
            return elbo_of_series(changed, chain, series, rd.ClosedForm(), None).value

        return jnp.sum(jax.vmap(one)(chains, ys))

    scale = model.emission.scale_tril
    alone = jnp.sum(batch.log_evidence)
    assert float(loss(batch.chain, scale)) == pytest.approx(float(alone), abs=1e-9)
    # `standard` holds the kernels a second time, so that neither can move alone.
    chains = eqx.tree_at(lambda c: c.standard, batch.chain, None)
    value, gradient = eqx.filter_value_and_grad(loss)(chains, scale)
    assert float(value) == pytest.approx(float(alone), abs=1e-9)
    # The exact posterior maximises the bound: the gradient in all that exists of it is zero.
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_allclose(leaf[0], 0.0, atol=1e-8)
        assert np.all(np.isfinite(leaf))


@pytest.mark.slow
def test_elbo_is_stationary_in_the_model_of_its_chain():
    """Here the chain keeps `standard`, and both forms of its kernels move together."""
    model = random_model(np.random.default_rng(5), 2, 2)
    ys = model.simulate(jax.random.key(0), 6)[1]

    @eqx.filter_jit
    @eqx.filter_grad
    def slope(other):
        return rd.elbo(model, rd.kalman_smoother(other, ys).chain, ys)

    for leaf in jax.tree.leaves(slope(model)):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-8)


@pytest.mark.slow
def test_parameters_are_unwrapped_once_and_differentiated_in_their_raw_arrays():
    plain = random_model(np.random.default_rng(7), 1, 1)
    _, ys = plain.simulate(jax.random.key(0), 5)
    std = jnp.diagonal(plain.emission.scale_tril)
    wrapped = eqx.tree_at(lambda m: m.emission.scale_tril, plain, rd.Diagonal(rd.Positive(std)))
    wrapped = eqx.tree_at(lambda m: m.prior, wrapped, rd.Frozen(wrapped.prior))
    exact = rd.kalman_smoother(wrapped, ys)
    assert float(rd.elbo(wrapped, exact.chain, ys)) == pytest.approx(float(exact.log_evidence))
    score = rd.expectation(exact.chain, rd.Score(wrapped), wrapped.series(ys))
    expected = eqx.filter_grad(lambda m: rd.kalman_smoother(m, ys).log_evidence)(wrapped)
    for ours, theirs in zip(jax.tree.leaves(score), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
    assert float(score.emission.scale_tril.std.raw[0]) != 0.0
    assert np.all(score.prior.tree.mean == 0.0)


def test_elbo_refuses_unsupported_requests_with_a_remedy():
    linear, ys = random_model(np.random.default_rng(0), 3, 1), np.zeros((4, 1))
    eyes = jnp.broadcast_to(jnp.eye(3), (4, 3, 3))
    arrays = (jnp.zeros((4, 3)), eyes, eyes[1:], jnp.zeros((3, 3)), eyes[1:])
    chain = rd.LinearGaussianChain.from_arrays(*arrays)
    hidden = hide_linearity(linear)
    with pytest.raises(ValueError, match="3 state dimensions.*RaoBlackwellised"):
        rd.elbo(hidden, chain, ys)
    with pytest.raises(TypeError, match="emission .NonlinearGaussianKernel.*Quadrature"):
        rd.elbo(hidden, chain, ys, estimator=rd.ClosedForm())
    with pytest.raises(ValueError, match=r"60\^3 nodes.*RaoBlackwellised"):
        rd.elbo(hidden, chain, ys, estimator=rd.Quadrature(60))
    with pytest.raises(ValueError, match="unknown.*BackwardSampling"):
        rd.elbo(hidden, chain, ys, estimator=rd.Quadrature(2), with_standard_error=True)
    with pytest.raises(ValueError, match="needs a key"):
        rd.elbo(linear, chain, ys, estimator=rd.BackwardSampling(2))
    with pytest.raises(TypeError, match="typed key"):
        rd.elbo(linear, chain, ys, estimator=rd.BackwardSampling(2), key=0)
    with pytest.raises(TypeError, match="elbo expects an estimator.*got ClosedForm"):
        check_estimator(rd.ClosedForm, None, False, "elbo")
    with pytest.raises(TypeError, match="Pass its .chain"):
        check_chain(KalmanPosterior(chain, jnp.zeros(())), "elbo")
    with pytest.raises(ValueError, match="as many rows as the chain, 4, got 3"):
        rd.elbo(linear, chain, ys[:3])
    with pytest.raises(ValueError, match="no padding"):
        rd.elbo(linear, chain, ys, length=3)
    with pytest.raises(ValueError, match="2 state dimensions, and the chain 3"):
        rd.elbo(random_model(np.random.default_rng(0), 2, 1), chain, ys)
    singular = eqx.tree_at(lambda m: m.transition.scale_tril, linear, jnp.zeros((3, 3)))
    with pytest.raises(ValueError, match="transition with a density.*kalman_smoother"):
        rd.elbo(singular, chain, ys)
    with pytest.raises(ValueError, match="length must be that of the chain, 3, got 2"):
        rd.elbo(linear, rd.LinearGaussianChain.from_arrays(*arrays, 3), ys, length=2)
    with pytest.raises(ValueError, match="vmap"):
        rd.elbo(linear, jax.tree.map(lambda leaf: leaf[None], chain), ys)


@pytest.mark.parametrize(
    "estimator", [rd.ClosedForm(), rd.BackwardSampling(2)], ids=["closed form", "paths"]
)
def test_second_derivatives_equal_finite_differences(case: Case, estimator: rd.AbstractEstimator):
    """Derivatives in a common factor of the weights of transition and emission."""

    def bound(factor: jax.Array) -> jax.Array:
        weights = (case.model.transition.weight, case.model.emission.weight)
        model = eqx.tree_at(
            lambda m: (m.transition.weight, m.emission.weight),
            case.model,
            tuple(factor * weight for weight in weights),
        )
        return case.elbo(model, estimator=estimator, key=jax.random.key(0))

    first, step = jax.jit(jax.grad(bound)), 1e-5
    differences = (first(1.1 + step) - first(1.1 - step)) / (2 * step)
    second = jax.jit(jax.grad(jax.grad(bound)))(1.1)
    np.testing.assert_allclose(second, differences, rtol=1e-6)


@pytest.mark.parametrize("estimator", [rd.ClosedForm(), rd.Quadrature(3)])
@pytest.mark.parametrize("width", [1e-3, 1e-8])
def test_elbo_of_narrow_exact_posterior_equals_log_evidence(estimator, width):
    # The noise has relative width `width` off the axes. Kernels between states omit it below 6e-6.
    noise = jnp.array([[1.0, 0.0], [0.3, width]])
    model = linear_model(
        2,
        prior=noise,
        weight=jnp.array([[0.9, 0.0], [0.1, 0.7]]),
        noise=noise,
        design=jnp.array([[1.0, -0.5]]),
        error=0.7,
    )
    _, ys = model.simulate(jax.random.key(0), 12)
    exact = rd.kalman_smoother(model, ys)
    bound = rd.elbo(model, exact.chain, ys, estimator=estimator)
    assert bound == pytest.approx(float(exact.log_evidence), abs=1e-9)
