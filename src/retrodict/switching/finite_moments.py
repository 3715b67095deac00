"""Expected sufficient statistics of hidden Markov models, which are exact."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._model import Series
from retrodict.switching.forward_backward import smooth_regimes
from retrodict.switching.model import SwitchingModel, lagged
from retrodict.switching.moments import RegimeMoments


@eqx.filter_jit
def regime_moments(model: SwitchingModel, batch: Series) -> tuple[RegimeMoments, Float[Array, ""]]:
    """Return the moments of regimes, with lagged observations as states, and the evidence."""

    def one(series: Series) -> tuple[RegimeMoments, Array]:
        posterior = smooth_regimes(model, series)
        law, exists = posterior.chain.marginals(), series.exists()
        probabilities, pairs = law.probabilities, law.pairs
        if exists is not None:
            probabilities = jnp.where(exists[:, None], probabilities, 0.0)
            pairs = jnp.where(exists[1:, None, None], pairs, 0.0)
        lags, count = lagged(series.ys, model.num_lags), model.num_regimes
        n, dim = lags.shape
        means = jnp.broadcast_to(lags[:, None, :], (n, count, dim))
        moments = RegimeMoments(
            probabilities,
            pairs,
            means,
            jnp.zeros((n, count, dim, dim), means.dtype),
            jnp.zeros((n - 1, count, 2 * dim), means.dtype),
            jnp.zeros((n - 1, count, 2 * dim, 2 * dim), means.dtype),
            lags[None, :-1],
            pairs[None],
        )
        return moments, posterior.log_evidence

    moments, evidences = jax.vmap(one)(batch)
    return moments, jnp.sum(evidences)
