"""Weighted multinomial logistic regression, against a general optimiser."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from retrodict.switching.logistic import RIDGE, LogisticRows, multinomial_regression


def objective(theta: np.ndarray, rows: LogisticRows) -> float:
    """The penalised log likelihood, term by term."""
    features, weights = np.asarray(rows.features), np.asarray(rows.weights)
    total, square = 0.0, np.average(features**2, axis=0, weights=weights.sum(axis=1))
    for feature, weight in zip(features, weights, strict=True):
        logits = theta @ feature
        total += weight @ (logits - np.log(np.exp(logits).sum()))
    return total - 0.5 * RIDGE * np.sum((theta * np.sqrt(square)) ** 2)


def random_rows(scale: float) -> LogisticRows:
    rng = np.random.default_rng(0)
    features = np.column_stack([np.ones(60), scale * rng.normal(size=(60, 2)) + 1.0])
    weights = rng.dirichlet(np.ones(3), size=60) * rng.uniform(size=(60, 1))
    return LogisticRows(jnp.asarray(features), jnp.asarray(weights))


def test_coefficients_agree_with_a_general_optimiser():
    for scale in (1.0, 30.0):
        rows = random_rows(scale)
        theta = np.asarray(multinomial_regression(rows, jnp.zeros((3, 3))))
        reference = minimize(
            lambda flat, rows=rows: -objective(flat.reshape(3, 3), rows), np.zeros(9), tol=1e-12
        )
        assert objective(theta, rows) >= -reference.fun - 1e-7


def test_separable_classes_give_finite_coefficients():
    features = jnp.stack([jnp.ones(20), jnp.linspace(-1, 1, 20)], axis=1)
    weights = jax.nn.one_hot((features[:, 1] > 0).astype(int), 2)
    theta = multinomial_regression(LogisticRows(features, weights), jnp.zeros((2, 2)))
    assert np.all(np.isfinite(theta))
    assert np.array_equal(np.argmax(features @ theta.T, axis=1), np.argmax(weights, axis=1))
