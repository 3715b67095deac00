"""The optimal reduction: distinct entries, and weights that are right on average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict.switching.reduction import keep_optimally


@pytest.mark.parametrize("num_kept", [3, 10, 40])
def test_optimal_reduction_keeps_distinct_entries_and_every_weight_on_average(num_kept):
    weights = np.random.default_rng(0).dirichlet(np.full(30, 2.0))
    weights[:4] = 0.0
    weights /= weights.sum()

    def kept(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        places, log_kept = keep_optimally(key, jnp.log(weights), num_kept)
        counts = jnp.zeros(30).at[places].add(log_kept > -jnp.inf)
        return jnp.zeros(30).at[places].add(jnp.exp(log_kept)), counts

    values, counts = jax.vmap(kept)(jax.random.split(jax.random.key(7), 4000))
    assert counts.max() <= 1
    assert set(np.asarray(counts.sum(axis=1)).tolist()) == {min(num_kept, 26)}
    # 30 z-scores, each above 5 with probability 6e-7.
    error = jnp.std(values, axis=0, ddof=1) / np.sqrt(values.shape[0])
    scores = (jnp.mean(values, axis=0) - weights) / (error + 1e-12)
    np.testing.assert_array_less(np.abs(scores), 5)
    if num_kept >= 26:
        np.testing.assert_allclose(values, np.broadcast_to(weights, values.shape), atol=1e-12)
