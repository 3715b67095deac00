"""Parameters keep their value, their domain and, if frozen, their place."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import retrodict as rd


@given(exponent=st.floats(-8, 8))
def test_positive_keeps_its_value_over_sixteen_orders(exponent: float):
    value = 10.0**exponent
    np.testing.assert_allclose(rd.Positive(value).value, value, rtol=1e-12)
    factor = np.array([[value, 0.0], [-3.0, 1.0]])
    np.testing.assert_allclose(rd.PositiveTril(factor).value, factor, rtol=1e-12)


@pytest.mark.usefixtures("x32")
def test_positive_keeps_its_value_in_float32():
    values = 10.0 ** np.arange(-8, 9)
    got = rd.Positive(values).value
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, values, rtol=5e-6)


def test_shapes_are_kept_and_integers_accepted():
    assert rd.Positive(2).value == 2.0
    assert rd.Positive(np.ones((2, 3))).value.shape == (2, 3)
    np.testing.assert_array_equal(rd.PositiveTril([[1, 0], [2, 3]]).value[0, 1], 0.0)


@pytest.mark.parametrize("step", [-1e8, -1e4, -1e2, -1.0, 1.0, 1e8])
def test_any_step_stays_in_the_domain(step: float, dtype: np.dtype):
    """An optimiser may add anything to what is stored: values stay positive and finite."""
    start = (
        rd.Positive(np.array([1e-3, 1.0, 50.0])),
        rd.PositiveTril(np.array([[1.0, 0], [2, 3]])),
    )
    moved = jax.tree.map(lambda raw: raw + jnp.asarray(step, raw.dtype), start)
    positive, tril = rd.unwrap(moved)
    assert positive.dtype == tril.dtype == dtype
    assert np.all(np.isfinite(positive)) and np.all(positive > 0)
    assert np.all(np.isfinite(tril)) and np.all(np.diagonal(tril) > 0)
    assert tril[0, 1] == 0


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_values_outside_the_domain_are_refused(bad: float):
    with pytest.raises(ValueError, match=r"Positive expects a value that is positive and finite"):
        rd.Positive([1.0, bad])
    with pytest.raises(ValueError, match=r"PositiveTril expects a diagonal that is positive"):
        rd.PositiveTril(np.diag([1.0, bad]))


def test_a_factor_that_is_not_square_is_refused():
    with pytest.raises(ValueError, match=r"square matrix, got shape \(2, 3\)"):
        rd.PositiveTril(np.ones((2, 3)))


# --- in models ------------------------------------------------------------------------------------


def make_model() -> rd.StateSpaceModel:
    """Parameters at every level: in a law, in a kernel, in a `Diagonal`, around a kernel."""
    network = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    network = eqx.tree_at(lambda n: n.weight, network, replace_fn=rd.Frozen)
    return rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.zeros(2), rd.PositiveTril(jnp.eye(2)))),
        transition=rd.LinearGaussianKernel(
            0.5 * jnp.eye(2), rd.Frozen(jnp.ones(2)), rd.PositiveTril(0.3 * jnp.eye(2))
        ),
        emission=rd.NonlinearGaussianKernel(network, rd.Diagonal(rd.Positive(jnp.array([0.7])))),
    )


def plain_model() -> rd.StateSpaceModel:
    network = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    return rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.zeros(2), jnp.eye(2)),
        transition=rd.LinearGaussianKernel(0.5 * jnp.eye(2), jnp.ones(2), 0.3 * jnp.eye(2)),
        emission=rd.NonlinearGaussianKernel(network, rd.Diagonal(jnp.array([0.7]))),
    )


RNG = np.random.default_rng(0)
XS, YS = RNG.normal(size=(4, 2)), RNG.normal(size=(4, 1))


@eqx.filter_jit
def loss_and_gradient(model: rd.StateSpaceModel):
    return eqx.filter_value_and_grad(
        lambda model: -model.log_joint(jnp.asarray(XS), jnp.asarray(YS))
    )(model)


def test_a_model_with_parameters_is_the_model_of_their_values():
    wrapped, _ = loss_and_gradient(make_model())
    plain, _ = loss_and_gradient(plain_model())
    np.testing.assert_allclose(wrapped, plain, rtol=1e-14)
    assert make_model().state_dim == 2 and not make_model().takes_input


def test_unwrap_replaces_all_parameters():
    once = rd.unwrap(make_model())
    is_parameter = lambda leaf: isinstance(leaf, rd.AbstractParameter)  # noqa: E731
    leaves = jax.tree.leaves(once, is_leaf=is_parameter)
    assert not any(is_parameter(leaf) for leaf in leaves)
    assert eqx.tree_equal(rd.unwrap(once), once)
    nested = rd.Frozen(rd.Frozen({"a": rd.Positive(2.0), "b": jnp.ones(3, int)}))
    values: Any = rd.unwrap(nested)
    np.testing.assert_allclose(values["a"], 2.0)
    assert values["b"].dtype == int


def test_frozen_parameters_have_zero_gradient():
    _, gradient = loss_and_gradient(make_model())
    frozen = (gradient.prior, gradient.transition.bias, gradient.emission.fn.weight)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(frozen))
    learned = (
        gradient.transition.weight,
        gradient.transition.scale_tril.raw,
        gradient.emission.scale_tril.std.raw,
        gradient.emission.fn.bias,
    )
    assert all(np.any(np.asarray(leaf) != 0) for leaf in learned)
    _, plain = loss_and_gradient(plain_model())
    np.testing.assert_allclose(gradient.transition.weight, plain.transition.weight, rtol=1e-12)
    # By the chain rule through softplus, whose derivative is 1 - exp(-value).
    np.testing.assert_allclose(
        gradient.emission.scale_tril.std.raw,
        plain.emission.scale_tril.std * -np.expm1(-0.7),
        rtol=1e-12,
    )


@pytest.mark.parametrize("rate", [1e-3, 10.0])
def test_frozen_stays_where_it_is_under_an_optimiser(rate: float):
    model = make_model()
    optimiser = optax.adam(rate)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    _, gradient = loss_and_gradient(model)
    updates, _ = optimiser.update(gradient, state)
    moved = eqx.apply_updates(model, updates)
    for part in (lambda m: m.prior, lambda m: m.transition.bias, lambda m: m.emission.fn.weight):
        assert eqx.tree_equal(part(moved), part(model))
    assert not eqx.tree_equal(moved.transition.scale_tril, model.transition.scale_tril)
    values = rd.unwrap(moved)
    assert np.all(np.diagonal(values.transition.scale_tril) > 0)
    assert np.all(np.asarray(values.emission.scale_tril.std) > 0)
    assert np.isfinite(loss_and_gradient(moved)[0])


def test_parameters_pass_through_jit_and_vmap():
    stds = jax.jit(jax.vmap(lambda s: rd.Positive(s).value))(jnp.array([0.1, 2.0]))
    np.testing.assert_allclose(stds, [0.1, 2.0], rtol=1e-14)


# --- between bounds -------------------------------------------------------------------------------


@given(share=st.floats(1e-9, 1 - 1e-9), lower=st.floats(-50, 50), width=st.floats(1e-3, 50))
def test_bounded_keeps_its_value(share: float, lower: float, width: float):
    value = lower + share * width
    upper = lower + width
    if lower < value < upper:
        got = rd.Bounded(value, lower, upper).value
        np.testing.assert_allclose(got, value, rtol=0, atol=1e-12 * (abs(lower) + width))


@pytest.mark.parametrize("step", [-1e8, -1e2, -1.0, 1.0, 1e8])
def test_any_step_stays_between_the_bounds(step: float, dtype: np.dtype):
    start = rd.Bounded(np.array([-0.9, 0.0, 0.999]), -1.0, 1.0)
    moved = jax.tree.map(lambda raw: raw + jnp.asarray(step, raw.dtype), start).value
    assert moved.dtype == dtype and np.all(np.abs(np.asarray(moved)) < 1)


def test_bounded_derivative_equals_logistic_derivative():
    slope = jax.grad(lambda p: p.value)(rd.Bounded(0.5, -1.0, 2.0)).raw
    np.testing.assert_allclose(slope, 1.5 * 1.5 / 3, rtol=1e-12)


@pytest.mark.parametrize("bad", [-1.0, 1.0, 3.0, np.nan])
def test_values_outside_the_bounds_are_refused(bad: float):
    with pytest.raises(ValueError, match=r"strictly between -1.0 and 1.0"):
        rd.Bounded([0.0, bad], -1.0, 1.0)
    with pytest.raises(ValueError, match=r"the lower one first, got 1.0 and -1.0"):
        rd.Bounded(0.0, 1.0, -1.0)
