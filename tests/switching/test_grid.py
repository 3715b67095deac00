"""The grid smoother with regimes, against enumeration and a dense sum over regimes and points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from switching_models import linear, recurrent

import retrodict as rd

switching = rd.switching


def grid_for(dim: int) -> rd.Grid:
    return rd.Grid(np.full(dim, -12.0), np.full(dim, 12.0), 180 if dim == 1 else 72)


def cut(ys: jax.Array) -> dict:
    return {"length": 3, "mask": jnp.ones(ys.shape, bool).at[1].set(False)}


@pytest.mark.parametrize(
    ("num_regimes", "dim", "n", "options"),
    [
        pytest.param(2, 1, 5, lambda ys: {}, id="two regimes"),
        pytest.param(3, 1, 4, cut, id="padding and a gap"),
        pytest.param(1, 1, 4, lambda ys: {}, id="one regime"),
        pytest.param(2, 1, 1, lambda ys: {}, id="one row"),
        pytest.param(2, 2, 3, lambda ys: {}, id="two states", marks=pytest.mark.slow),
    ],
)
def test_conditionally_linear_models_agree_with_enumeration(num_regimes, dim, n, options):
    model = linear(num_regimes, dim, dim)
    ys = model.simulate(jax.random.key(0), n)[2]
    exact = switching.enumerate_regimes(model, ys, **options(ys))
    posterior = switching.grid_smoother(model, ys, grid_for(dim), **options(ys))
    rows, atol = options(ys).get("length", n), 1e-9 if dim == 1 else 1e-6
    np.testing.assert_allclose(posterior.log_evidence, exact.log_evidence, atol=atol)
    for name in ("probabilities", "mean", "covariance"):
        value = getattr(posterior, name)
        expected = getattr(exact.marginals, name)
        np.testing.assert_allclose(value[:rows], expected[:rows], atol=atol)
        np.testing.assert_array_equal(value[rows:] - value[rows - 1 : rows], 0.0)
    pairs = exact.marginals.pairs
    np.testing.assert_allclose(posterior.marginals.pairs[: rows - 1], pairs[: rows - 1], atol=atol)
    mass = jnp.exp(posterior.grid.log_quadrature)
    total = jnp.einsum("tjp,p->t", posterior.density, mass)
    np.testing.assert_allclose(total, 1.0, atol=1e-12)
    assert int(posterior.status) == 0


def curved() -> switching.SwitchingModel:
    """Return a nonlinear model with inputs, whose regimes depend on state and input."""
    regimes = switching.Regimes(
        [0.3, -0.3],
        [[1.0, -1.0], [-0.5, 0.5]],
        state_weight=[[1.2], [-0.8]],
        input_weight=[[0.5], [0.0]],
    )
    return switching.SwitchingModel(
        regimes,
        prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        transition=[
            rd.NonlinearGaussianKernel(lambda x: 0.9 * jnp.sin(x), rd.Diagonal(0.5 * jnp.ones(1))),
            rd.NonlinearGaussianKernel(
                lambda x, u: 0.5 * x + u, rd.Diagonal(0.8 * jnp.ones(1)), takes_input=True
            ),
        ],
        emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.4 * jnp.ones(1))),
    )


def normal(x: np.ndarray, mean: np.ndarray | float, std: float) -> np.ndarray:
    return np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))


def dense_sums(ys: np.ndarray, us: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sum the joint density of `curved` over all regimes and points of three rows, naively."""
    h = x[1] - x[0]
    initial = np.exp([0.3, -0.3])
    initial /= initial.sum()
    means = np.stack([np.repeat(0.9 * np.sin(x)[None], 3, axis=0), 0.5 * x[None] + us], axis=1)
    stds = (0.5, 0.8)

    def regime(i: int, j: int, k: int) -> np.ndarray:
        logits = np.array([[1.0, -1.0], [-0.5, 0.5]])[i][:, None] + np.outer([1.2, -0.8], x)
        logits = logits + np.array([0.5, 0.0])[:, None] * us[k]
        return np.exp(logits[j]) / np.exp(logits).sum(axis=0)

    emitted = [normal(y, np.tanh(x), 0.4) for y in ys[:, 0]]
    joint = np.zeros((2, 2, 2, len(x), len(x), len(x)))
    for i, j, k in np.ndindex(2, 2, 2):
        first = initial[i] * normal(x, 0.0, 1.0) * emitted[0]
        second = regime(i, j, 1)[:, None] * normal(x[None], means[1, j][:, None], stds[j])
        third = regime(j, k, 2)[:, None] * normal(x[None], means[2, k][:, None], stds[k])
        second, third = second * emitted[1], third * emitted[2]
        joint[i, j, k] = first[:, None, None] * second[:, :, None] * third[None]
    return joint * h**3


def test_a_recurrent_nonlinear_model_agrees_with_a_dense_sum():
    us = np.array([[0.1], [-0.4], [0.7]])
    ys = np.array([[0.3], [0.9], [-0.5]])
    grid = rd.Grid([-6.0], [6.0], 97)
    joint = dense_sums(ys, us, np.asarray(grid.points[:, 0]))
    evidence = joint.sum()
    law, x = joint / evidence, np.asarray(grid.points[:, 0])
    posterior = switching.grid_smoother(curved(), ys, grid, inputs=us)
    # Both use the same points; the trapezoidal rule differs at the ends only, where mass is 1e-9.
    np.testing.assert_allclose(posterior.log_evidence, np.log(evidence), atol=1e-7)
    for k in range(3):
        others = tuple(axis for axis in range(6) if axis not in (k, k + 3))
        marginal = law.sum(axis=others)
        np.testing.assert_allclose(posterior.weights[k], marginal, atol=1e-7)
        np.testing.assert_allclose(posterior.mean[k, 0], marginal.sum(axis=0) @ x, atol=1e-7)
    first = law.sum(axis=(2, 3, 4, 5))
    np.testing.assert_allclose(posterior.marginals.pairs[0], first, atol=1e-7)
    np.testing.assert_allclose(posterior.marginals.pairs[1], law.sum(axis=(0, 3, 4, 5)), atol=1e-7)


def test_the_posterior_is_the_joint_density_divided_by_the_evidence():
    # log p(z, x, y) is written independently of the recursions.
    model = recurrent(2, 1)
    ys = model.simulate(jax.random.key(2), 2)[2]
    posterior = switching.grid_smoother(model, ys, grid_for(1))
    points, quadrature = posterior.grid.points, posterior.grid.log_quadrature
    zs = jnp.array([[i, j] for i in range(2) for j in range(2)])
    places = jnp.stack(jnp.meshgrid(*2 * [jnp.arange(len(points))], indexing="ij"), -1)

    def log_joint(z: jax.Array, place: jax.Array) -> jax.Array:
        return model.log_joint(z, points[place], ys) + jnp.sum(quadrature[place])

    table = jax.jit(jax.vmap(jax.vmap(log_joint, (None, 0)), (0, None)))(zs, places.reshape(-1, 2))
    evidence = jax.nn.logsumexp(table)
    np.testing.assert_allclose(posterior.log_evidence, evidence, atol=1e-9)
    law = jnp.exp(table - evidence).reshape(2, 2, len(points), len(points))
    np.testing.assert_allclose(posterior.weights[0], law.sum(axis=(1, 3)), atol=1e-10)
    np.testing.assert_allclose(posterior.marginals.pairs[0], law.sum(axis=(2, 3)), atol=1e-10)


def test_a_shared_transition_equals_copies_of_it():
    model = linear(2)
    shared = switching.SwitchingModel(
        model.regimes, model.emission, model.prior, model.transition[0]
    )
    copied = switching.SwitchingModel(
        model.regimes, model.emission, model.prior, 2 * [model.transition[0]]
    )
    ys = model.simulate(jax.random.key(0), 4)[2]
    one, other = (switching.grid_smoother(each, ys, grid_for(1)) for each in (shared, copied))
    np.testing.assert_allclose(one.weights, other.weights, atol=1e-13)


def test_errors_are_estimated_and_inadequate_grids_are_refused():
    model = linear(2)
    ys = model.simulate(jax.random.key(0), 4)[2]
    exact = switching.enumerate_regimes(model, ys)
    rough = switching.grid_smoother(model, ys, rd.Grid([-12.0], [12.0], 40), throw=False)
    assert abs(rough.log_evidence - exact.log_evidence) <= rough.error.log_evidence
    assert (jnp.abs(rough.mean - exact.marginals.mean) <= rough.error.mean).all()
    with pytest.raises(ValueError, match="does not cover"):
        switching.grid_smoother(model, ys, rd.Grid([-1.0], [0.0], 100))
    with pytest.raises(ValueError, match="too coarse"):
        switching.grid_smoother(model, ys, rd.Grid([-100.0], [100.0], 20))
    status = jax.jit(
        lambda ys: switching.grid_smoother(model, ys, rd.Grid([-1.0], [0.0], 100)).status
    )(ys)
    assert int(status) > 0


def test_misuse_is_refused():
    ys = jnp.zeros((3, 1))
    with pytest.raises(ValueError, match="gpb2_smoother"):
        switching.grid_smoother(linear(2, 3, 1), ys, grid_for(1))
    with pytest.raises(ValueError, match="dimension 2"):
        switching.grid_smoother(linear(2, 2, 1), ys, grid_for(1))
    with pytest.raises(TypeError, match="forward_backward"):
        switching.grid_smoother(
            switching.SwitchingModel(linear(2).regimes, list(linear(2).prior)), ys, grid_for(1)
        )
