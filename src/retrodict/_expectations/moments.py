"""The laws of states and of pairs under a linear-Gaussian chain, and sums over rows that exist."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._arrays import where_rows
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain, pair_laws
from retrodict._expectations.functionals import AbstractInitialTerm, AbstractPairTerm, AbstractTerm
from retrodict._model import fill_padding
from retrodict._numerics import linalg
from retrodict.distributed import Parallel, on_accelerator


class StateRow(eqx.Module):
    """The law N(m_k, S_k S_kᵀ) of one state.

    Attributes:
        mean: m_k.
        scale: S_k, lower triangular.
    """

    mean: Float[Array, "*time state"]
    scale: Float[Array, "*time state state"]


class PairRow(eqx.Module):
    """The law of two neighbours, x_k = m_k + S_k e and x_{k-1} = m_{k-1} + R_k e + s_k e'.

    With the gain G_k of the backward kernel, R_k = G_k S_k.

    Attributes:
        before: the marginal law of x_{k-1}.
        after: the marginal law of x_k.
        reach: R_k.
        scale: s_k, the scale of the backward kernel.
    """

    before: StateRow
    after: StateRow
    reach: Float[Array, "*time state state"]
    scale: Float[Array, "*time state state"]

    def factors(self) -> tuple[Float[Array, "state two_state"], Float[Array, "state two_state"]]:
        """Return the factors [R, s] of x_{k-1} and [S, 0] of x_k over the same noise (e, e')."""
        past = jnp.concatenate([self.reach, self.scale], axis=1)
        present = jnp.concatenate([self.after.scale, jnp.zeros_like(self.scale)], axis=1)
        return past, present


class Moments(eqx.Module):
    """The laws of states and of pairs under a linear-Gaussian chain, one row per time.

    Rows that do not exist hold a copy of the first, so that values computed in them are finite if
    those of the first row are.

    Attributes:
        states: n rows.
        pairs: n-1 rows; row k-1 is the pair (x_{k-1}, x_k).
        exists: which of the n rows exist; `None` if all of them do.
    """

    states: StateRow
    pairs: PairRow
    exists: Bool[Array, "time"] | None

    @classmethod
    def of(
        cls, chain: AbstractBackwardChain, owner: str, *, parallel: Parallel = False
    ) -> "Moments":
        """Compute the moments of a chain, refused unless it is linear Gaussian."""
        if not isinstance(chain, LinearGaussianChain):
            raise TypeError(
                f"{owner} expects a LinearGaussianChain, got {type(chain).__name__}. For other"
                " chains use BackwardSampling(num_samples) with a key."
            )
        laws, reach, scale = pair_laws(chain, parallel=parallel)
        exists = existing_rows(chain)
        states = StateRow(laws.mean, laws.scale_tril)
        before, after = (
            jax.tree.map(lambda leaf, rows=rows: leaf[rows], states)
            for rows in (slice(None, -1), slice(1, None))
        )
        pairs = PairRow(before, after, reach, scale)
        if exists is not None:
            pairs = fill_padding(pairs, exists[1:])
            # A series of one row has no pair to copy: its kernels would stay without a density.
            eye = jnp.eye(chain.state_dim, dtype=pairs.scale.dtype)
            scale = jnp.where(exists[1:, None, None], pairs.scale, eye[None])
            pairs = PairRow(pairs.before, pairs.after, pairs.reach, scale)
        return cls(fill_padding(states, exists), pairs, exists)

    def total(
        self, term: AbstractTerm, expect: Callable[..., PyTree], data: PyTree, *per_row: Any
    ) -> PyTree:
        """Return the sum of `expect(row, data, *per_row)` over the rows of a term."""
        rows = (self.states, self.pairs)
        large = self.states.mean.shape[1] > linalg.UNROLLED
        over_rows = _one_by_one if large and not on_accelerator() else jax.vmap
        return sum_over_rows(term, expect, rows, data, self.exists, *per_row, over_rows=over_rows)


def _one_by_one(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the map of a function over rows, one at a time and without residuals.

    For a batch of series with large states, arrays of all rows exceed the caches: writing them
    takes longer than computing them twice.
    """
    return lambda *rows: lax.map(jax.checkpoint(lambda row: fn(*row)), rows)


def sum_over_rows(
    term: AbstractTerm,
    fn: Callable[..., PyTree],
    rows: tuple[PyTree, PyTree],
    data: PyTree,
    exists: Bool[Array, "time"] | None,
    *per_row: Any,
    over_rows: Callable[..., Callable[..., PyTree]] = jax.vmap,
) -> PyTree:
    """Return the sum of `fn(row, data, *per_row)` over the rows of a term that exist.

    Args:
        term: decides which rows: that of time 0, all states, or all pairs.
        fn: the summand of one row.
        rows: a pytree with one row per state, and one with one row per pair.
        data: a pytree with one row per state.
        exists: which states exist; `None` if all of them do.
        *per_row: more pytrees, with one row per row of the term.
        over_rows: maps a function over rows.
    """
    chosen, pairs = rows
    if isinstance(term, AbstractInitialTerm):
        chosen, data = jax.tree.map(lambda leaf: leaf[:1], (chosen, data))
        exists = None
    elif isinstance(term, AbstractPairTerm):
        chosen, data = pairs, jax.tree.map(lambda leaf: leaf[1:], data)
        exists = None if exists is None else exists[1:]

    def add_up(leaf: Array) -> Array:
        if exists is not None:
            leaf = where_rows(exists, leaf, 0)
        return jnp.sum(leaf, axis=0)

    return jax.tree.map(add_up, over_rows(fn)(chosen, data, *per_row))


def existing_rows(chain: AbstractBackwardChain) -> Bool[Array, "time"] | None:
    """Return which rows of a chain exist; `None` if all of them do."""
    length = getattr(chain, "length", None)
    return None if length is None else jnp.arange(chain.num_times) < length
