"""Clustering of local regressions."""

import jax
import jax.numpy as jnp
import numpy as np

from retrodict.switching.clustering import Problem, cluster


def two_lines(num_series: int = 2, num_rows: int = 60) -> tuple[Problem, np.ndarray]:
    """Responses on two lines that alternate in blocks of 15 rows."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(num_series, num_rows, 1))
    labels = np.broadcast_to((np.arange(num_rows) // 15) % 2, (num_series, num_rows))
    slope, level = np.where(labels, 1.0, -1.0), np.where(labels, 5.0, 4.0)
    y = slope[..., None] * x + level[..., None] + 0.1 * rng.normal(size=x.shape)
    used = jnp.ones((num_series, num_rows), bool)
    return Problem(jnp.asarray(x), jnp.asarray(y), used), labels


def agreement(probabilities: np.ndarray, labels: np.ndarray) -> float:
    same = np.mean(np.argmax(probabilities, axis=-1) == labels)
    return max(same, 1 - same)


def test_two_lines_are_found():
    problem, labels = two_lines()
    exists = jnp.ones(labels.shape, bool)
    probabilities, pairs = cluster(jax.random.key(0), (problem,), exists, 2, 4)
    assert agreement(np.asarray(probabilities), labels) > 0.97
    np.testing.assert_allclose(pairs.sum(axis=(-2, -1)), 1.0)
    np.testing.assert_allclose(pairs.sum(axis=-1), probabilities[:, :-1], atol=1e-9)


def test_rows_that_do_not_exist_have_no_effect():
    problem, labels = two_lines(num_series=1)
    short = jax.tree.map(lambda leaf: leaf[:, :40], problem)
    used = jnp.arange(60)[None] < 40
    garbage = jnp.where(used[..., None], problem.responses, 1e6)
    padded = Problem(problem.features, garbage, used)
    probabilities, pairs = cluster(jax.random.key(0), (padded,), used, 2, 4)
    cut, _ = cluster(jax.random.key(0), (short,), jnp.ones((1, 40), bool), 2, 4)
    assert np.all(probabilities[:, 40:] == 0) and np.all(pairs[:, 39:] == 0)
    assert agreement(np.asarray(probabilities[:, :40]), labels[:, :40]) > 0.97
    assert agreement(np.asarray(cut), labels[:, :40]) > 0.97


def test_regimes_that_alternate_are_found():
    """Each value is on the other line than the last one, as in a threshold autoregression."""
    rng = np.random.default_rng(2)
    x = np.zeros(200)
    for k in range(1, 200):
        x[k] = 0.5 * x[k - 1] + np.where(x[k - 1] < 0, 1.5, -1.5) + 0.5 * rng.normal()
    before, after = (jnp.asarray(part)[None, :, None] for part in (x[:-1], x[1:]))
    exists = jnp.ones((1, 199), bool)
    problem = Problem(before, after, exists)
    probabilities, _ = cluster(jax.random.key(0), (problem,), exists, 2, 10)
    assert agreement(np.asarray(probabilities), (x[:-1] < 0)[None]) > 0.97
