"""The result of learning a switching model, and what may be wrong with its regimes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._model import Series, unwrap
from retrodict.switching.evidence import smooth_any
from retrodict.switching.histories import base_probabilities
from retrodict.switching.model import SwitchingModel, emission_table

SAME = 1e-3
"""Regimes coincide if all log densities and log transitions differ by less than this."""

NARROW = 3e-4
"""A scale below this fraction of the spread of the data has shrunk to a point."""


class SwitchingFit(eqx.Module):
    """The result of `switching.fit_evidence` and `switching.em`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.markov_autoregression(2)
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=50)
        >>> result = rd.switching.em(jax.random.key(1), model, ys, num_iterations=2)
        >>> result.status, result.issues
        ('finished', ())

    Attributes:
        model: the best model of all starts.
        history: the log-evidence after each step of the best start, in nats per time step.
        status: `"converged"` if no step increases the evidence, `"finished"` if all steps were
            taken, `"stopped early"` if a line search failed or rounding lowered the evidence, and
            `"diverged"` if the evidence is non-finite.
        start_values: the log-evidence that each start reached, in nats.
        log_evidence: the log-evidence of the model, in nats; GPB2's for a model with a continuous
            state, which is approximate.
        issues: what is wrong with the regimes of the model, in words: a regime without data, two
            regimes that coincide, a scale that shrank to a point. Empty if nothing is.
    """

    model: SwitchingModel
    history: Float[np.ndarray, "step"]
    status: str = eqx.field(static=True)
    start_values: Float[np.ndarray, "start"]
    log_evidence: float
    issues: tuple[str, ...] = eqx.field(static=True, default=())


def num_rows(batch: Series) -> float:
    """Return the number of existing rows of a batch."""
    if batch.length is None:
        return float(batch.ys.shape[0] * batch.ys.shape[1])
    return float(jnp.sum(batch.length))


def with_issues(result: SwitchingFit, batch: Series) -> SwitchingFit:
    """Return a result with the issues of its regimes."""
    if not np.isfinite(result.log_evidence):
        return result
    model = unwrap(result.model)
    issues = (*_empty(model, batch), *_equal(model, batch), *_narrow(model, batch))
    return SwitchingFit(
        result.model,
        result.history,
        result.status,
        result.start_values,
        result.log_evidence,
        issues,
    )


def best_of(results: list[SwitchingFit]) -> SwitchingFit:
    """Return the result with the greatest evidence, with the evidence of all.

    The evidence of a regime that shrinks to a point has no bound, so that starts without issues
    come first.
    """
    best = max(results, key=lambda result: (not result.issues, result.log_evidence))
    values = np.array([result.log_evidence for result in results])
    return eqx.tree_at(lambda result: result.start_values, best, values)


def _empty(model: SwitchingModel, batch: Series) -> list[str]:
    counts = np.asarray(_occupancy(model, batch))
    return [
        f"regime {j} has {count:.2g} expected rows: use fewer regimes"
        for j, count in enumerate(counts)
        if count < 1.0
    ]


@eqx.filter_jit
def _occupancy(model: SwitchingModel, batch: Series) -> Float[Array, "regime"]:
    """Return the expected number of rows of each regime; filtered if there is a state."""

    def one(series: Series) -> Array:
        chain, exists = smooth_any(model, series).chain, series.exists()
        shares = chain.marginals().probabilities if model.is_finite else chain.filtered
        if exists is not None:
            shares = jnp.where(exists[:, None], shares, 0.0)
        return jnp.sum(base_probabilities(model, shares), axis=0)

    return jnp.sum(jax.vmap(one)(batch), axis=0)


def _equal(model: SwitchingModel, batch: Series) -> list[str]:
    """Report pairs of regimes with the same emission and the same transitions."""
    if not model.is_finite or model.regimes.takes_input:
        return []
    table = np.asarray(jax.vmap(lambda series: emission_table(model, series))(batch))
    matrix = np.exp(np.asarray(model.regimes.log_transition()))
    found = []
    for i in range(model.num_regimes):
        for j in range(i):
            # Two regimes are one if they emit the same and move on in the same way.
            if (
                np.max(np.abs(table[..., i] - table[..., j])) < SAME
                and np.max(np.abs(matrix[i] - matrix[j])) < SAME
            ):
                found.append(f"regimes {j} and {i} coincide: use fewer regimes")
    return found


def _narrow(model: SwitchingModel, batch: Series) -> list[str]:
    """Report regimes whose density at their own best row is far above that of the data."""
    if not model.is_finite:
        return []
    table = np.asarray(jax.vmap(lambda series: emission_table(model, series))(batch))
    mask = None if batch.mask is None else np.asarray(batch.mask)
    spread = np.std(np.asarray(batch.ys), axis=(0, 1), where=True if mask is None else mask)
    # The density of a normal law at its mean, of the scale at which it counts as a point.
    limit = -np.sum(np.log(NARROW * np.where(spread > 0, spread, 1.0) * np.sqrt(2 * np.pi)))
    peaks = table.max(axis=(0, 1))
    return [
        f"regime {j} shrank to a few equal rows: its evidence has no bound"
        for j in np.flatnonzero(peaks > limit)
    ]
