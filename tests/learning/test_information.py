"""Standard errors of learned parameters: against joint Gaussians, grids and statsmodels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd
from retrodict._learning.information.louis import cannot_be_resolved
from retrodict._learning.information.result import Inverse


def _scale(kernel: rd.LinearGaussianKernel) -> jax.Array:
    return rd.unwrap(kernel).scale_tril[0, 0]


def level(weight: float = 0.8, move: float = 0.5, noise: float = 0.7) -> rd.StateSpaceModel:
    """A stable local level of which the weight and both scales are learned."""
    return rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.zeros(1), jnp.eye(1))),
        transition=rd.LinearGaussianKernel(
            jnp.array([[weight]]), rd.Frozen(jnp.zeros(1)), jnp.array([[move]])
        ),
        emission=rd.LinearGaussianKernel(
            rd.Frozen(jnp.eye(1)),
            rd.Frozen(jnp.zeros(1)),
            rd.Diagonal(rd.Positive(jnp.array([noise]))),
        ),
    )


def softplus(raw: float) -> float:
    return float(np.log1p(np.exp(raw)))


def inverse_softplus(value: float) -> float:
    return float(np.log(np.expm1(value)))


def derivatives(fn: Callable[[np.ndarray], float], theta: np.ndarray, step: float = 1e-3):
    """Gradient and Hessian by central differences of fourth order in products of directions."""
    offsets, weights = np.array([-2, -1, 1, 2]), np.array([1, -8, 8, -1]) / 12.0
    n = len(theta)
    basis = step * np.eye(n)
    gradient = np.array(
        [sum(w * fn(theta + o * b) for o, w in zip(offsets, weights, strict=True)) for b in basis]
    )
    hessian = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1):
            hessian[i, j] = hessian[j, i] = sum(
                v * w * fn(theta + o * basis[i] + p * basis[j])
                for o, v in zip(offsets, weights, strict=True)
                for p, w in zip(offsets, weights, strict=True)
            )
    return gradient / step, hessian / step**2


def log_density(weight: float, move: float, noise: float, ys: np.ndarray) -> float:
    """The density of a series under `level`, from the covariances of its AR(1) states."""
    times = np.arange(len(ys))
    decay = weight ** (2.0 * times)
    variances = decay + move**2 * (1.0 - decay) / (1.0 - weight**2)
    gaps = np.abs(times[:, None] - times)
    covariance = weight**gaps * variances[np.minimum.outer(times, times)]
    observed = ~np.isnan(ys)
    covariance = (covariance + noise**2 * np.eye(len(ys)))[np.ix_(observed, observed)]
    fit = ys[observed] @ np.linalg.solve(covariance, ys[observed])
    return -0.5 * (fit + np.linalg.slogdet(2 * np.pi * covariance)[1])


@pytest.fixture(scope="module")
def series() -> np.ndarray:
    """Two series, with entries missing and padding at the end of the second."""
    keys = jax.random.split(jax.random.key(0), 2)
    ys = np.array(jax.vmap(lambda key: level().simulate(key, num_times=120)[1])(keys))
    ys[0, 4] = ys[1, 7] = np.nan
    return ys


LENGTHS = np.array([120, 100])


@pytest.fixture(scope="module")
def maximum(series: np.ndarray) -> rd.StateSpaceModel:
    """The maximum of the likelihood of both series, by Newton's method."""
    model = level()
    for _ in range(6):
        estimate = exact(model, series)
        theta = estimate.theta + np.linalg.solve(estimate.information, estimate.score)
        model = level(theta[0], softplus(theta[1]), softplus(theta[2]))
    return model


def exact(model: rd.StateSpaceModel, series: np.ndarray, **options: Any) -> rd.ParameterErrors:
    return rd.parameter_errors(jax.random.key(0), model, series, length=LENGTHS, **options)


@pytest.fixture(scope="module")
def errors(maximum: rd.StateSpaceModel, series: np.ndarray) -> rd.ParameterErrors:
    return exact(maximum, series)


def test_exact_information_equals_joint_gaussian(errors: rd.ParameterErrors, series: np.ndarray):
    def log_evidence(theta: np.ndarray) -> float:
        weight, move, noise = theta[0], softplus(theta[1]), softplus(theta[2])
        return sum(
            log_density(weight, move, noise, ys[:length, 0])
            for ys, length in zip(series, LENGTHS, strict=True)
        )

    gradient, hessian = derivatives(log_evidence, errors.theta)
    assert errors.method == "exact" and errors.status == "fine" and errors.messages == ()
    assert np.max(np.abs(gradient)) < 1e-6 and np.max(np.abs(errors.score)) < 1e-6
    np.testing.assert_allclose(errors.information, -hessian, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(errors.covariance, np.linalg.inv(-hessian), rtol=1e-6, atol=1e-8)
    assert not errors.information_error.any() and not errors.score_error.any()
    assert errors.distance < 1e-6


def test_gradient_differences_equal_second_derivatives(
    errors: rd.ParameterErrors,
    maximum: rd.StateSpaceModel,
    series: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
):
    """What larger states get on a CPU."""
    monkeypatch.setattr("retrodict._learning.information.exact.UNROLLED", 0)
    differenced = exact(maximum, series)
    np.testing.assert_allclose(differenced.information, errors.information, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(differenced.score, errors.score, atol=1e-9)
    assert np.any(differenced.information != errors.information)


def test_coordinates_are_the_learned_parameters(
    errors: rd.ParameterErrors, maximum: rd.StateSpaceModel
):
    assert errors.names == (
        "transition.weight[0,0]",
        "transition.scale_tril[0,0]",
        "emission.scale_tril.std[0]",
    )
    plain = rd.unwrap(maximum)
    assert errors.theta[0] == pytest.approx(float(plain.transition.weight[0, 0]))
    assert softplus(errors.theta[1]) == pytest.approx(float(plain.transition.scale_tril[0, 0]))


def test_natural_parameter_errors_follow_the_delta_method(errors: rd.ParameterErrors):
    raw = np.sqrt(np.diagonal(errors.covariance))
    slope = 1.0 / (1.0 + np.exp(-errors.theta))
    standard_errors = errors.standard_error
    np.testing.assert_allclose(standard_errors["transition.weight"], [[raw[0]]], rtol=1e-9)
    np.testing.assert_allclose(
        standard_errors["transition.scale_tril"], [[raw[1] * slope[1]]], rtol=1e-9
    )
    np.testing.assert_allclose(
        standard_errors["emission.scale_tril.std"], [raw[2] * slope[2]], rtol=1e-9
    )


def test_scale_intervals_are_computed_in_logarithms(errors: rd.ParameterErrors):
    raw = np.sqrt(np.diagonal(errors.covariance))
    scale, error = errors.value["transition.scale_tril"], errors.standard_error
    for end, sign in ((errors.lower, -1), (errors.upper, 1)):
        z = sign * 1.959963984540054
        np.testing.assert_allclose(
            end["transition.weight"], [[errors.theta[0] + z * raw[0]]], rtol=1e-9
        )
        expected = scale * np.exp(z * error["transition.scale_tril"] / scale)
        np.testing.assert_allclose(end["transition.scale_tril"], expected, rtol=1e-9)


def test_scale_at_zero_has_no_interval():
    """Autoregressions without noise: what is left is least squares, in closed form."""
    keys = jax.random.split(jax.random.key(8), 2)
    ys = np.array(jax.vmap(lambda key: level(0.8, 0.7, 1e-9).simulate(key, num_times=120)[1])(keys))
    rows = [one[:length, 0] for one, length in zip(ys, LENGTHS, strict=True)]
    before = np.concatenate([one[:-1] for one in rows])
    after = np.concatenate([one[1:] for one in rows])
    weight = before @ after / (before @ before)
    move = np.sqrt(np.mean((after - weight * before) ** 2))
    for noise in (1e-4, 1e-150, 1e-300):  # the last two have squares that are none
        result = exact(level(float(weight), float(move), noise), ys)
        assert result.status == "at an edge" and "at the edge of zero" in result.messages[0]
        assert result.at_edge.tolist() == [False, False, True]
        assert result.identified.tolist() == [True, True, False]
        errors = result.standard_error
        expected = move / np.sqrt(before @ before)
        np.testing.assert_allclose(errors["transition.weight"], expected, rtol=1e-5)
        expected = move / np.sqrt(2 * after.size)
        np.testing.assert_allclose(errors["transition.scale_tril"], expected, rtol=1e-5)
        for field in (errors, result.lower, result.upper):
            assert np.isnan(field["emission.scale_tril.std"]).all()


def test_the_interval_of_a_hardly_determined_scale_is_positive():
    ys = level(0.5, 0.2, 1.0).simulate(jax.random.key(3), num_times=12)[1]

    def read(model: rd.StateSpaceModel) -> dict[str, jax.Array]:
        scale = rd.unwrap(model).emission.scale_tril.std[0]
        return {"scale": scale, "variance": scale**2, "log": jnp.log(scale)}

    model = eqx.tree_at(lambda m: m.transition, level(0.5, 0.2, 0.3), replace_fn=rd.Frozen)
    wide = rd.parameter_errors(jax.random.key(0), model, ys[:2], read=read, level=0.999)
    assert wide.standard_error["scale"] * 3.29 > wide.value["scale"]  # Wald's would be negative
    assert 0 < wide.lower["scale"] < wide.value["scale"] < wide.upper["scale"]
    assert wide.lower["variance"] == pytest.approx(wide.lower["scale"] ** 2)
    assert wide.upper["log"] == pytest.approx(np.log(wide.upper["scale"]))


@pytest.mark.slow
def test_nile_standard_errors_equal_statsmodels():
    data = pytest.importorskip("statsmodels.datasets").nile.load_pandas().data["volume"].to_numpy()
    structural = pytest.importorskip("statsmodels.tsa.statespace.structural")
    peer = structural.UnobservedComponents(data, "llevel")
    peer.initialize_known(np.array([1000.0]), np.array([[1e4]]))
    variances = np.array([15099.0, 1469.0])  # of the observation and of the level
    # The peer differentiates its log-likelihood divided by the number of rows.
    curvature = len(data) * peer.hessian(variances, transformed=True, method="approx")
    covariance = np.linalg.inv(-curvature)
    model = rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.array([1000.0]), jnp.array([[100.0]]))),
        transition=rd.LinearGaussianKernel(
            rd.Frozen(jnp.eye(1)), rd.Frozen(jnp.zeros(1)), jnp.sqrt(variances[1:])[:, None]
        ),
        emission=rd.LinearGaussianKernel(
            rd.Frozen(jnp.eye(1)), rd.Frozen(jnp.zeros(1)), jnp.sqrt(variances[:1])[:, None]
        ),
    )
    ours = rd.parameter_errors(
        jax.random.key(0),
        model,
        data[:, None],
        read=lambda m: jnp.stack([_scale(m.emission), _scale(m.transition)]) ** 2,
    )
    # Hessians in variances and in raw coordinates differ by a multiple of the score, which is
    # nearly zero here.
    np.testing.assert_allclose(ours.standard_error, np.sqrt(np.diagonal(covariance)), rtol=0.01)
    assert ours.status == "fine"


@pytest.mark.slow
@pytest.mark.statistical
def test_louis_identity_agrees_with_the_exact_information(
    errors: rd.ParameterErrors, maximum: rd.StateSpaceModel, series: np.ndarray
):
    estimate = exact(maximum, series, method="louis", num_particles=200, num_samples=200)
    assert estimate.method == "louis"
    # Nine figures within 5 standard errors from 20 replicates (Student's t with 19 degrees of
    # freedom): a false alarm in 1 of 1,400 seeds.
    upper = np.triu_indices(3)
    difference = (estimate.information - errors.information) / estimate.information_error
    assert np.max(np.abs(difference[upper])) < 5
    assert np.max(np.abs(estimate.score - errors.score) / estimate.score_error) < 5
    # The test has power: the errors are a small share of what is estimated.
    share = np.diagonal(estimate.information_error) / np.diagonal(errors.information)
    assert np.max(share) < 0.3


@pytest.mark.slow
@pytest.mark.statistical
def test_replicates_are_drawn_until_identification_is_clear(
    errors: rd.ParameterErrors, maximum: rd.StateSpaceModel, series: np.ndarray
):
    """Four Monte Carlo standard errors of three quantities: false alarms in one of 5,000."""
    options = {"method": "louis", "num_particles": 200, "num_samples": 100, "num_replicates": 4}
    few = exact(maximum, series, **options)
    assert few.status == "not identified"
    more = exact(maximum, series, **options, most_replicates=4096)
    # So many replicates may tell the score, as 200 particles give it, from zero.
    assert more.status in ("fine", "not at a maximum")
    for name, error in errors.standard_error.items():
        noise = more.monte_carlo_error[name]
        assert np.all(np.abs(more.standard_error[name] - error) < 4 * noise)
        assert np.all(noise < 0.2 * error)


@pytest.mark.slow
@pytest.mark.statistical
def test_louis_identity_accepts_weighted_paths(maximum: rd.StateSpaceModel):
    ys = maximum.simulate(jax.random.key(5), num_times=15)[1]
    near = level(0.75, 0.55, 0.75)
    chain = rd.kalman_smoother(near, ys).chain
    options = {"chain": chain, "num_samples": 500}
    estimate = rd.parameter_errors(jax.random.key(6), maximum, ys, **options)
    truth = rd.parameter_errors(jax.random.key(0), maximum, ys)
    difference = (estimate.information - truth.information) / estimate.information_error
    # Six figures within 5 standard errors from 20 replicates: a false alarm in 1 of 2,000 seeds.
    assert np.max(np.abs(difference)) < 5
    assert np.all(estimate.information_error < 0.3 * np.diagonal(truth.information).max())


def volatile(x: jax.Array) -> rd.Gaussian:
    return rd.Gaussian(jnp.zeros(1), rd.Diagonal(jnp.exp(x / 2)))


def volatility(weight: float, bias: float, scale: float) -> rd.StateSpaceModel:
    """An AR(1) log scale of observations, with a weight, an offset and a scale to learn."""
    return rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.zeros(1), jnp.eye(1))),
        transition=rd.LinearGaussianKernel(
            jnp.array([[weight]]), jnp.array([bias]), rd.Diagonal(rd.Positive(jnp.array([scale])))
        ),
        emission=rd.DistributionKernel(volatile),
    )


@pytest.mark.slow
@pytest.mark.statistical
def test_information_of_nonlinear_model_equals_grid_differences():
    ys = volatility(0.8, 0.1, 0.8).simulate(jax.random.key(2), num_times=80)[1]
    theta = np.array([0.8, 0.1, inverse_softplus(0.8)])
    grid = rd.Grid([-9.0], [10.0], 200)

    def log_evidence(theta: np.ndarray) -> float:
        model = volatility(theta[0], theta[1], softplus(theta[2]))
        return float(rd.grid_smoother(model, ys, grid, throw=False).log_evidence)

    gradient, hessian = derivatives(log_evidence, theta, step=1e-2)
    model = volatility(0.8, 0.1, 0.8)
    estimate = rd.parameter_errors(jax.random.key(1), model, ys, num_particles=300, num_samples=300)
    assert estimate.method == "louis"
    # Nine figures within 5 standard errors: a false alarm in 1 of 1,400 seeds.
    upper = np.triu_indices(3)
    difference = (estimate.information + hessian) / estimate.information_error
    assert np.max(np.abs(difference[upper])) < 5
    assert np.max(np.abs(estimate.score - gradient) / estimate.score_error) < 5


@pytest.mark.slow
@pytest.mark.statistical
def test_standard_errors_match_scatter_of_estimates():
    """Estimates of 200 simulated series scatter as their standard errors say."""
    truth = level(0.7, 0.6, 0.5)
    fixed = eqx.tree_at(
        lambda m: (m.transition.scale_tril, m.emission), truth, replace_fn=rd.Frozen
    )
    keys = jax.random.split(jax.random.key(4), 200)
    ys = jax.vmap(lambda key: truth.simulate(key, num_times=150)[1])(keys)
    error = rd.parameter_errors(jax.random.key(0), fixed, ys).standard_error["transition.weight"]

    @jax.jit
    @jax.vmap
    def maximise(ys: jax.Array) -> jax.Array:
        def slope(weight: jax.Array) -> jax.Array:
            def value(weight: jax.Array) -> jax.Array:
                at = eqx.tree_at(lambda m: m.transition.weight, fixed, weight.reshape(1, 1))
                return rd.kalman_smoother(at, ys, mask=True).log_evidence

            return jax.grad(value)(weight)

        def newton(weight: jax.Array, _: None) -> tuple[jax.Array, None]:
            value, curvature = jax.jvp(slope, (weight,), (jnp.ones(()),))
            return weight - value / curvature, None

        return jax.lax.scan(newton, jnp.asarray(0.7), None, length=5)[0]

    estimates = np.asarray(maximise(ys))
    # The error is that of all 200 series together; one series has √200 times as much. The standard
    # deviation of 200 normal draws is within 20% of its own but for 1 of 15,000 seeds.
    assert np.std(estimates) == pytest.approx(float(error[0, 0]) * 200**0.5, rel=0.2)


def test_hopeless_directions_get_no_more_replicates():
    def hopeless(value: float, most: int) -> bool:
        directions = (np.ones((1, 1)), np.array([value]), np.ones(1))
        return cannot_be_resolved(Inverse(np.eye(1), np.ones(1), *directions), 20, most)

    # With eight times the replicates noise is 0.35; three times as much is to be told from zero.
    assert hopeless(-1.0, 160) and not hopeless(-0.9, 160)
    assert hopeless(0.5, 20) and not hopeless(0.5, 80)


def redundant(theta: np.ndarray) -> rd.StateSpaceModel:
    """The scale of the state and the weight of the emission enter as a product."""
    return eqx.tree_at(
        lambda m: (m.prior, m.emission.weight),
        level(theta[0], softplus(theta[1]), softplus(theta[2])),
        (rd.Frozen(rd.Gaussian(jnp.zeros(1), 1e-9 * jnp.eye(1))), jnp.eye(1)),
        is_leaf=lambda node: isinstance(node, rd.Frozen),
    )


def product(model: rd.StateSpaceModel) -> jax.Array:
    plain = rd.unwrap(model)
    return plain.emission.weight[0, 0] * plain.transition.scale_tril[0, 0]


def test_grid_information_equals_exact_information(series: np.ndarray):
    """Of a linear model, of which both are known, with two series of unequal length and a gap."""
    ys = np.array(series[:2, :40])
    ys[0, 5] = np.nan
    model, length, key = level(), np.array([40, 25]), jax.random.key(0)
    exact = rd.parameter_errors(key, model, ys, length=length)
    grid = rd.Grid(np.array([-8.0]), np.array([8.0]), 120)
    errors = rd.parameter_errors(key, model, ys, length=length, grid=grid)
    assert (errors.method, errors.status) == ("grid", exact.status)
    np.testing.assert_allclose(errors.information, exact.information, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(errors.score, exact.score, rtol=1e-6, atol=1e-6)
    for reach in (1.0, 300.0):  # too narrow, and too coarse
        poor = rd.Grid(np.array([-reach]), np.array([reach]), 120)
        with pytest.raises(ValueError, match=r"does not cover the states of the series \[0"):
            rd.parameter_errors(key, model, ys, length=length, grid=poor)
    with pytest.raises(TypeError, match="expects a Grid"):
        rd.parameter_errors(key, model, ys, method="grid")
    with pytest.raises(ValueError, match="leave out `grid`"):
        rd.parameter_errors(key, model, ys, method="louis", grid=grid)


@pytest.mark.slow
def test_unidentified_direction_is_named(errors: rd.ParameterErrors, series: np.ndarray):
    theta, key, ys = errors.theta, jax.random.key(0), series[0]

    def with_weight_known(theta: np.ndarray) -> rd.ParameterErrors:
        known = eqx.tree_at(lambda m: m.emission.weight, redundant(theta), replace_fn=rd.Frozen)
        return rd.parameter_errors(key, known, ys, read=product)

    one = with_weight_known(theta)
    for _ in range(7):
        theta = theta + np.linalg.solve(one.information, one.score)
        one = with_weight_known(theta)
    assert one.status == "fine"
    both = rd.parameter_errors(key, redundant(theta), ys)
    assert both.status == "not identified" and len(both.messages) == 1
    by_name = dict(zip(both.names, both.identified, strict=True))
    assert not by_name["transition.scale_tril[0,0]"] and not by_name["emission.weight[0,0]"]
    assert by_name["transition.weight[0,0]"] and by_name["emission.scale_tril.std[0]"]
    assert "emission.weight[0,0]" in both.messages[0]
    assert "transition.scale_tril[0,0]" in both.messages[0]
    assert np.isposinf(both.standard_error["emission.weight"]).all()
    assert np.isnan(both.lower["emission.weight"]).all()
    place = both.names.index("emission.weight[0,0]")
    assert np.isposinf(both.covariance[place, place])
    # What is identified has the standard error that it has with the weight known, the product too.
    assert np.sqrt(both.covariance[0, 0]) == pytest.approx(np.sqrt(one.covariance[0, 0]))
    of_product = rd.parameter_errors(key, redundant(theta), ys, read=product)
    assert float(of_product.standard_error) == pytest.approx(float(one.standard_error))


def test_unused_parameter_is_not_identified(series: np.ndarray):
    class Idle(eqx.Module):
        used: jax.Array
        idle: jax.Array

        def __call__(self, u: jax.Array) -> tuple[Any, Any, Any]:
            return jnp.eye(1), self.used + 0.0 * u, rd.Diagonal(jnp.ones(1))

    model = eqx.tree_at(
        lambda m: (m.transition, m.emission),
        level(),
        (
            rd.Frozen(level().transition),
            rd.VaryingLinearGaussianKernel(Idle(jnp.zeros(1), jnp.zeros(()))),
        ),
    )
    errors = rd.parameter_errors(
        jax.random.key(0), model, series[0, 10:40], inputs=np.zeros((30, 1))
    )
    assert errors.names == ("emission.fn.used[0]", "emission.fn.idle")
    assert errors.identified.tolist() == [True, False]
    assert np.isinf(errors.standard_error["emission.fn.idle"])
    assert np.isfinite(errors.standard_error["emission.fn.used"]).all()


def test_status_reports_distance_from_maximum(errors: rd.ParameterErrors, series: np.ndarray):
    theta = errors.theta + np.array([0.5, 0.0, 0.0]) * np.sqrt(np.diagonal(errors.covariance))
    moved = exact(level(theta[0], softplus(theta[1]), softplus(theta[2])), series)
    assert moved.status == "not at a maximum" and "Newton" in moved.messages[0]
    # In the metric of the information the step back is at least half a standard error long.
    step = theta - errors.theta
    assert moved.distance == pytest.approx(np.sqrt(step @ errors.information @ step), rel=0.3)


@pytest.mark.slow
@pytest.mark.slow
def test_triangular_scales_have_no_coordinates_above_the_diagonal():
    ys = jnp.zeros((3, 2))
    model = rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.zeros(2), jnp.eye(2))),
        transition=rd.Frozen(rd.LinearGaussianKernel(jnp.eye(2), jnp.zeros(2), jnp.eye(2))),
        emission=rd.NonlinearGaussianKernel(jnp.sin, jnp.eye(2)),
    )
    errors = rd.parameter_errors(
        jax.random.key(0), model, ys, num_particles=20, num_samples=20, num_replicates=4
    )
    assert errors.names == tuple(f"emission.scale_tril[{i}]" for i in ("0,0", "1,0", "1,1"))
    assert errors.value["emission.scale_tril"].shape == (2, 2)
    assert errors.standard_error["emission.scale_tril"][0, 1] == 0


@pytest.mark.slow
def test_parameter_errors_in_float32_are_accurate(x32: None):
    ys = jnp.asarray(np.random.default_rng(0).normal(size=(30, 1)), jnp.float32)
    errors = rd.parameter_errors(jax.random.key(0), level(), ys)
    assert np.all(np.isfinite(errors.information))
    assert errors.standard_error["transition.weight"].dtype == np.float32


def test_parameter_errors_refuses_bad_arguments(untyped: None):
    key, ys = jax.random.key(0), np.zeros((5, 1))
    model = level()
    frozen = replace(
        model, transition=rd.Frozen(model.transition), emission=rd.Frozen(model.emission)
    )
    with pytest.raises(ValueError, match="every floating array is Frozen"):
        rd.parameter_errors(key, frozen, ys)
    network = eqx.nn.MLP(1, 1, 80, 1, key=key)
    large = replace(model, emission=rd.NonlinearGaussianKernel(network, jnp.eye(1)))
    with pytest.raises(ValueError, match="at most 200 parameters, got a model with 244"):
        rd.parameter_errors(key, large, ys)
    with pytest.raises(ValueError, match="level between 0 and 1"):
        rd.parameter_errors(key, model, ys, level=95.0)
    with pytest.raises(ValueError, match="method 'exact', 'grid', 'louis'"):
        rd.parameter_errors(key, model, ys, method="fisher")  # pyright: ignore
    with pytest.raises(TypeError, match="linear-Gaussian emission"):
        rd.parameter_errors(key, volatility(0.5, 0.0, 1.0), ys, method="exact")
    with pytest.raises(ValueError, match="at least 4 replicates"):
        rd.parameter_errors(key, model, ys, method="louis", num_replicates=3)
    chain = rd.kalman_smoother(model, ys).chain
    with pytest.raises(ValueError, match="takes no chain"):
        rd.parameter_errors(key, model, ys, method="exact", chain=chain)
    with pytest.raises(ValueError, match="expects one series, got 2"):
        rd.parameter_errors(key, model, np.zeros((2, 5, 1)), chain=chain)
    with pytest.raises(TypeError, match="read to be a function"):
        rd.parameter_errors(key, model, ys, read="scale")  # pyright: ignore
    with pytest.raises(TypeError, match="StateSpaceModel"):
        rd.parameter_errors(key, chain, ys)  # pyright: ignore
