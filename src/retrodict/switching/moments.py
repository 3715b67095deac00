"""Expected sufficient statistics of switching models, from sampled paths of regimes.

Given a path of regimes that ignore the state, the states of a model with linear-Gaussian kernels
have an exact Gaussian law. Paths are drawn from the chain of GPB2, and the moments of their Kalman
smoothers averaged (Rao–Blackwell), so that only the regimes are sampled. With one regime the
moments are exact. Recurrent regimes inform the states, and no such law exists: then paths of
regimes and states are drawn together, with the moments of each state given the next one.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey
from retrodict._exact import smooth_series
from retrodict._model import Series
from retrodict.switching.chain import SwitchingTrace
from retrodict.switching.enumeration import given_regimes
from retrodict.switching.gaussian_sum import default_rule, smooth_by_merging
from retrodict.switching.model import SwitchingModel


class RegimeMoments(eqx.Module):
    """Expected moments of regimes and states, row by row.

    Moments of a row are conditional on the regime of that row. Where a regime has no probability
    they are zero.

    Attributes:
        probabilities: P(z_k = j), zero where there is no row.
        pairs: P(z_{k-1} = i, z_k = j), zero where there is no row.
        means: E[x_k | z_k = j].
        covariances: Cov[x_k | z_k = j].
        pair_means: E[(x_{k-1}, x_k) | z_k = j].
        pair_covariances: Cov[(x_{k-1}, x_k) | z_k = j].
        paths: states x_{k-1} at which the law of the regimes is learned.
        moves: for each of them, the joint probability of z_{k-1} and z_k; zero without a row.
    """

    probabilities: Float[Array, "*batch time regime"]
    pairs: Float[Array, "*batch time-1 regime regime"]
    means: Float[Array, "*batch time regime state"]
    covariances: Float[Array, "*batch time regime state state"]
    pair_means: Float[Array, "*batch time-1 regime pair"]
    pair_covariances: Float[Array, "*batch time-1 regime pair pair"]
    paths: Float[Array, "*batch sample time-1 state"]
    moves: Float[Array, "*batch sample time-1 regime regime"]


class Paths(eqx.Module):
    """Sampled paths of regimes, and the laws of the states given each.

    Attributes:
        zs: regimes.
        probabilities: P(z_k | z_{k+1}, x_{k+1}) along each path.
        xs: one draw of the states per path.
        means: E[x_k | z].
        covariances: Cov[x_k | z].
        pair_means: E[(x_{k-1}, x_k) | z].
        pair_covariances: Cov[(x_{k-1}, x_k) | z].
        log_evidence: log p(y) by GPB2.
        increments: its terms, one per row.
    """

    zs: Int[Array, "*batch sample time"]
    probabilities: Float[Array, "*batch sample time regime"]
    xs: Float[Array, "*batch sample time state"]
    means: Float[Array, "*batch sample time state"]
    covariances: Float[Array, "*batch sample time state state"]
    pair_means: Float[Array, "*batch sample time-1 pair"]
    pair_covariances: Float[Array, "*batch sample time-1 pair pair"]
    log_evidence: Float[Array, "*batch"]
    increments: Float[Array, "*batch time"]


@eqx.filter_jit
def draw_paths(model: SwitchingModel, batch: Series, key: PRNGKey, num_samples: int) -> Paths:
    """Draw paths of regimes from GPB2's chain, and smooth the states given each.

    Args:
        model: an unwrapped model with linear-Gaussian kernels.
        batch: series with a leading axis `batch`.
        key: a typed key; the same key gives common random numbers.
        num_samples: the number of paths per series.
    """
    keys = jax.random.split(key, batch.num_series)
    return jax.vmap(lambda series, key: _draw(model, series, key, num_samples))(batch, keys)


def _draw(model: SwitchingModel, series: Series, key: PRNGKey, num_samples: int) -> Paths:
    posterior = smooth_by_merging(model, series, "after", default_rule(model))
    regime_key, state_key = jax.random.split(key)
    trace = posterior.chain.trace(regime_key, num_samples)
    if model.regimes.takes_state:
        states = _along(trace)
    else:
        states = _given_paths(model, series, trace.zs, state_key)
    xs, means, covariances, pair_means, pair_covariances = states
    return Paths(
        trace.zs,
        trace.probabilities,
        xs,
        means,
        covariances,
        pair_means,
        pair_covariances,
        posterior.log_evidence,
        posterior.log_evidence_increments,
    )


def _given_paths(
    model: SwitchingModel, series: Series, zs: Int[Array, "sample time"], key: PRNGKey
) -> tuple[Array, ...]:
    """Return draws and moments of the states given each path of regimes."""

    def of_path(zs: Array, key: PRNGKey) -> tuple[Array, ...]:
        chain = smooth_series(*given_regimes(model, series, zs), False).chain
        laws, pairs = chain.marginals(), chain.pairwise()
        xs = chain.sample(key, 1)[0]
        return xs, laws.mean, laws.covariance, pairs.mean, pairs.covariance

    return jax.vmap(of_path)(zs, jax.random.split(key, zs.shape[0]))


def _along(trace: SwitchingTrace) -> tuple[Array, ...]:
    """Return the sampled states, and the moments of each given the regime and state after it."""
    xs, dim = trace.xs, trace.xs.shape[-1]
    pair_means = jnp.concatenate([trace.means[:, :-1], xs[:, 1:]], axis=-1)
    padding = ((0, 0), (0, 0), (0, dim), (0, dim))
    certain = jnp.zeros_like(trace.covariances)
    return xs, xs, certain, pair_means, jnp.pad(trace.covariances[:, :-1], padding)


@eqx.filter_jit
def pool(
    paths: Paths, batch: Series, num_regimes: int, forced: Int[Array, "batch time"] | None = None
) -> RegimeMoments:
    """Average over paths.

    Args:
        paths: the paths of a batch.
        batch: the series.
        num_regimes: the number K of regimes.
        forced: a regime per row that replaces the sampled one, or -1 where none does.
    """
    return jax.vmap(lambda paths, series, z: _pool(paths, series, num_regimes, z))(
        paths, batch, forced
    )


def _pool(
    paths: Paths, series: Series, count: int, forced: Int[Array, "time"] | None
) -> RegimeMoments:
    zs, earlier = paths.zs, paths.probabilities
    if forced is not None:
        zs = jnp.where(forced[None, :] >= 0, forced[None, :], zs)
        certain = jax.nn.one_hot(forced, count, dtype=earlier.dtype)
        earlier = jnp.where(forced[None, :, None] >= 0, certain[None], earlier)
    members = jax.nn.one_hot(zs, count, dtype=paths.means.dtype)
    exists = series.exists()
    if exists is not None:
        members = jnp.where(exists[None, :, None], members, 0.0)
    means, covariances = _conditional(members, paths.means, paths.covariances)
    pair_means, pair_covariances = _conditional(
        members[:, 1:], paths.pair_means, paths.pair_covariances
    )
    return RegimeMoments(
        jnp.mean(members, axis=0),
        jnp.mean(earlier[:, :-1, :, None] * members[:, 1:, None, :], axis=0),
        means,
        covariances,
        pair_means,
        pair_covariances,
        paths.xs[:, :-1],
        members[:, :-1, :, None] * members[:, 1:, None, :] / zs.shape[0],
    )


def _conditional(
    members: Float[Array, "sample row regime"],
    means: Float[Array, "sample row size"],
    covariances: Float[Array, "sample row size size"],
) -> tuple[Float[Array, "row regime size"], Float[Array, "row regime size size"]]:
    """Return the moments given the regime: averages over the paths that are in it at that row."""
    shares = members / jnp.maximum(jnp.sum(members, axis=0), 1.0)[None]
    mean = jnp.einsum("srj,srd->rjd", shares, means, precision="highest")
    shifts = means[:, :, None, :] - mean[None]
    within = jnp.einsum("srj,srde->rjde", shares, covariances, precision="highest")
    between = jnp.einsum("srj,srjd,srje->rjde", shares, shifts, shifts, precision="highest")
    return mean, within + between
