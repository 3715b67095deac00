"""Resampling schemes: expected counts, their spread, and cumulative weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict.particles import resampling

SCHEMES = ("systematic", "stratified", "residual", "multinomial")
more = pytest.mark.statistical
WEIGHTS = np.array([0.0, 3.0, 0.001, 0.0, 1.0, 8.0, 0.5, 0.5, 0.0, 2.0, 4.0, 0.0, 1.7, 0.9, 0.0])
WEIGHTS = WEIGHTS * 0.7  # they need not sum to one


@pytest.fixture(scope="module")
def draws() -> Callable[[str, int], np.ndarray]:
    """Counts of `num_draws` draws, of shape `(key, particle)`, remembered."""
    known: dict[tuple[str, int], np.ndarray] = {}
    keys = jax.random.split(jax.random.key(3), 4000)

    def draw(scheme: Any, num_draws: int) -> np.ndarray:
        if (scheme, num_draws) not in known:
            one = jax.vmap(
                lambda k: resampling.resample(scheme, k, jnp.asarray(WEIGHTS), num_draws)
            )
            indices = np.asarray(jax.jit(one)(keys))
            assert indices.shape == (4000, num_draws)
            assert np.all(np.diff(indices, axis=1) >= 0), "not in increasing order"
            assert indices.min() >= 0 and indices.max() < len(WEIGHTS)
            known[scheme, num_draws] = np.stack([(indices == i).sum(1) for i in range(15)], axis=1)
        return known[scheme, num_draws]

    return draw


@pytest.mark.parametrize(
    "num_draws", [pytest.param(15, marks=more), pytest.param(7, marks=more), 40]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_expected_counts_are_proportional_to_weights(draws: Callable, scheme: str, num_draws: int):
    # 10 cells in each of 12 cases at 5 standard errors: a false alarm in 7e-5.
    counts = draws(scheme, num_draws)
    expected = num_draws * WEIGHTS / WEIGHTS.sum()
    error = np.abs(counts.mean(0) - expected)
    # A count that varies by rarely more than one may have varied in none of the keys.
    share = expected - np.floor(expected)
    spread = np.maximum(counts.std(0), np.sqrt(share * (1 - share)))
    assert np.all(error <= 5 * spread / np.sqrt(len(counts)) + 1e-12)
    assert counts[:, WEIGHTS == 0].sum() == 0


@pytest.mark.parametrize(
    "num_draws", [pytest.param(15, marks=more), pytest.param(7, marks=more), 40]
)
def test_resampling_counts_stay_near_their_expectation(draws: Callable, num_draws: int):
    expected = num_draws * WEIGHTS / WEIGHTS.sum()
    assert np.abs(draws("systematic", num_draws) - expected).max() < 1 + 1e-9
    assert np.abs(draws("stratified", num_draws) - expected).max() < 2
    assert (draws("residual", num_draws) - np.floor(expected)).min() >= 0


def test_multinomial_counts_have_binomial_variances(draws: Callable):
    # The relative standard deviation of a variance over 4000 keys is 0.022 and more for few counts.
    share = WEIGHTS / WEIGHTS.sum()
    variance = draws("multinomial", 40).var(0)
    frequent = 40 * share > 0.5
    expected = (40 * share * (1 - share))[frequent]
    np.testing.assert_allclose(variance[frequent], expected, rtol=0.15)


def resampled(scheme: Any, weights: Any, num_draws: int) -> list[int]:
    @jax.jit
    def draw(key: jax.Array, weights: jax.Array) -> jax.Array:
        return resampling.resample(scheme, key, weights, num_draws)

    return draw(jax.random.key(0), jnp.asarray(weights)).tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_resampling_handles_a_single_weighted_particle(scheme: str):
    assert resampled(scheme, [0.3], 4) == [0] * 4
    assert resampled(scheme, [0.0, 0.0, 5.0, 0.0], 6) == [2] * 6


@pytest.mark.parametrize("count", [100, pytest.param(25, marks=more)])
@pytest.mark.parametrize("scheme", ["systematic", "stratified", "residual"])
def test_equal_weights_leave_every_particle_one_offspring(scheme: str, count: int):
    # As a filter makes them where nothing was seen: exp(-log N).
    weights = np.exp(np.full(count, -np.log(count)))
    assert resampled(scheme, weights, count) == list(range(count))


@pytest.mark.parametrize("count", [1, 33, 1025])
def test_cumulative_sums_are_monotone_and_accurate(count: int, dtype: jnp.dtype):
    values = np.random.default_rng(count).gamma(0.3, size=count).astype(dtype)
    sums = np.asarray(resampling.cumulative(jnp.asarray(values)))
    assert sums.dtype == dtype and np.all(np.diff(sums) >= 0)
    accuracy = 1e-14 if dtype == np.float64 else 1e-6
    np.testing.assert_allclose(sums, np.cumsum(values.astype(np.float64)), rtol=accuracy * 10)


def test_cumulative_sums_do_not_grow_where_there_is_no_weight(dtype: jnp.dtype):
    # Where they do, a particle of no weight is drawn: in float32 once in some ten million draws.
    rng = np.random.default_rng(0)
    values = rng.random((200, 100)) * (rng.random((200, 100)) < 0.5)
    values[:, 64:70], values[:, 90:] = 0, 0
    sums = jax.vmap(resampling.cumulative)(jnp.asarray(values.astype(dtype)))
    grown = np.diff(np.asarray(sums), axis=1)[values[:, 1:] == 0]
    assert np.all(grown == 0), f"{(grown > 0).sum()} of {grown.size} grew, by up to {grown.max()}"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_extreme_positions_select_weighted_particles(share: float):
    sums = jnp.cumsum(jnp.array([0.0, 0.0, 1.0, 0.0, 2.0, 0.0]))
    indices = resampling.inverse(sums, jnp.array([share, np.nextafter(share, 0.5)]))
    assert indices.tolist() == ([2, 2] if share == 0 else [4, 4])


@pytest.mark.parametrize("count", [1, 2, 3, 16, 31, 1000])
def test_inverse_selects_as_a_search_of_numpy(count: int):
    rng = np.random.default_rng(count)
    weights = np.where(rng.random(count) < 0.3, 0.0, rng.random(count) ** 4)
    weights[rng.integers(count)] = 1.0
    sums = np.cumsum(weights)
    # Inside and on the edges of the particles' shares, and on both sides of (0, 1).
    positions = np.concatenate([rng.random(500), sums[:-1] / sums[-1], [0.0, 1.0]])
    below_total = np.nextafter(sums[-1], 0.0)
    expected = np.searchsorted(sums, np.minimum(positions * sums[-1], below_total), side="right")
    got = resampling.inverse(jnp.asarray(sums), jnp.asarray(positions).reshape(1, -1))
    np.testing.assert_array_equal(got[0], expected)
