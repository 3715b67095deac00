"""Laws of regimes: probabilities, their dependence on state and input, and refused arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import raises_with
from scipy.special import log_softmax

import retrodict as rd

Regimes = rd.switching.Regimes


def test_logits_are_linear_in_state_and_input():
    draw = np.random.default_rng(0)
    first, logits = draw.normal(size=3), draw.normal(size=(3, 3))
    weight, input_weight = draw.normal(size=(3, 2)), draw.normal(size=(3, 4))
    x, u = draw.normal(size=2), draw.normal(size=4)
    regimes = Regimes(first, logits, state_weight=weight, input_weight=input_weight)
    expected = log_softmax(logits + weight @ x + input_weight @ u, axis=1)
    np.testing.assert_allclose(regimes.log_transition(jnp.array(x), jnp.array(u)), expected)
    np.testing.assert_allclose(regimes.log_initial(), log_softmax(first))
    assert (regimes.num_regimes, regimes.takes_state, regimes.takes_input) == (3, True, True)


def test_probabilities_are_recovered_and_zeros_are_allowed():
    matrix = np.array([[0.7, 0.3, 0.0], [0.0, 0.6, 0.4], [0.0, 0.0, 1.0]])
    regimes = Regimes.from_probabilities([1.0, 0.0, 0.0], matrix)
    np.testing.assert_allclose(np.exp(regimes.log_transition()), matrix, atol=1e-15)
    np.testing.assert_allclose(np.exp(regimes.log_initial()), [1, 0, 0], atol=1e-15)
    slope = jax.grad(lambda r: jnp.sum(jnp.exp(r.log_transition()) ** 2))(regimes)
    assert np.all(np.isfinite(slope.transition_logits))


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (([0.0, 0.0], np.zeros((3, 3))), ("transition_logits of shape (2, 2)", "(3, 3)")),
        ((np.zeros((2, 2)), np.zeros((2, 2))), ("initial_logits of shape (regime,)", "(2, 2)")),
        (([0.0], [[0.0]], np.zeros((2, 1))), ("state_weight of shape (1, state)", "(2, 1)")),
        (([0.0], [[0.0]], None, np.zeros(1)), ("input_weight of shape (1, input)", "(1,)")),
    ],
)
def test_wrong_shapes_are_refused(arguments, phrases):
    with raises_with(ValueError, *phrases):
        Regimes(*arguments)


@pytest.mark.parametrize("row", [[0.5, 0.6], [-0.1, 1.1]])
def test_invalid_probabilities_are_refused(row):
    with raises_with(ValueError, "`transition`", "sum to 1 per row"):
        Regimes.from_probabilities([0.5, 0.5], [row, [0.5, 0.5]])


def test_a_missing_state_is_refused():
    regimes = Regimes(jnp.zeros(2), jnp.zeros((2, 2)), state_weight=jnp.ones((2, 1)))
    with raises_with(ValueError, "depend on the state", "None"):
        regimes.log_transition()
