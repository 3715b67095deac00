"""The interface of estimators, and the laws of states and pairs that they integrate over."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._chains import AbstractBackwardChain, LinearGaussianChain, marginals_with_density
from retrodict._expectations.functionals import AbstractInitialTerm, AbstractPairTerm, AbstractTerm
from retrodict._numerics import linalg
from retrodict.distributed import Parallel

T = TypeVar("T")


class AbstractEstimator(eqx.Module):
    """A method for expectations under a chain.

    An estimate is the mean of independent replicates, or a single value for a deterministic
    estimator. `view` computes what all replicates share, `draw` samples their noise, and `evaluate`
    returns the value of one replicate.
    """

    @property
    @abstractmethod
    def num_replicates(self) -> int | None:
        """The number of independent replicates; `None` for a deterministic estimator."""

    @property
    @abstractmethod
    def error(self) -> Literal["none", "unknown", "sampled"]:
        """Whether the value is exact, has an unknown error, or a standard error."""

    @abstractmethod
    def view(self, chain: AbstractBackwardChain, *, parallel: Parallel = False) -> Any:
        """Return what all replicates read from the chain.

        Args:
            chain: the law of paths.
            parallel: whether recursions over time are run in O(log n) depth.
        """

    @abstractmethod
    def draw(
        self, terms: Sequence[AbstractTerm], view: Any, key: Any, *, parallel: Parallel = False
    ) -> Any:
        """Return the noise of all replicates, with a leading axis `sample`; `None` without noise.

        Args:
            terms: the terms that will be evaluated.
            view: the result of `view`.
            key: a typed key; `None` for a deterministic estimator.
            parallel: whether recursions over time are run in O(log n) depth.
        """

    @abstractmethod
    def evaluate(
        self, terms: Sequence[AbstractTerm], view: Any, noise: Any, data: PyTree
    ) -> PyTree:
        """Return the value of one replicate of E Σ terms.

        Args:
            terms: the terms to add up.
            view: the result of `view`.
            noise: one row of the result of `draw`.
            data: a pytree with a leading time axis, finite in padded rows too.
        """


class AbstractDeterministicEstimator(AbstractEstimator):
    """An estimator without noise."""

    @property
    def num_replicates(self) -> None:
        """None."""
        return None

    def draw(
        self, terms: Sequence[AbstractTerm], view: Any, key: Any, *, parallel: Parallel = False
    ) -> None:
        """Draw nothing."""
        return None


class StateRow(eqx.Module):
    """The law N(m_k, S_k S_kᵀ) of one state.

    Attributes:
        mean: m_k.
        scale: S_k, lower triangular.
    """

    mean: Float[Array, "*time state"]
    scale: Float[Array, "*time state state"]


class PairRow(eqx.Module):
    """The law of two neighbours, x_k = m_k + S_k e and x_{k-1} = m_{k-1} + G_k S_k e + s_k e'.

    Attributes:
        before: the mean m_{k-1}.
        before_scale: S_{k-1}, the factor of the marginal law of x_{k-1}.
        after: the mean m_k.
        after_scale: S_k.
        gain: G_k of the backward kernel.
        scale: s_k of the backward kernel.
    """

    before: Float[Array, "*time state"]
    before_scale: Float[Array, "*time state state"]
    after: Float[Array, "*time state"]
    after_scale: Float[Array, "*time state state"]
    gain: Float[Array, "*time state state"]
    scale: Float[Array, "*time state state"]

    def factors(self) -> tuple[Float[Array, "state two_state"], Float[Array, "state two_state"]]:
        """Return the factors [G S, s] of x_{k-1} and [S, 0] of x_k over the same noise (e, e')."""
        past = jnp.concatenate([linalg.matmul(self.gain, self.after_scale), self.scale], axis=1)
        present = jnp.concatenate([self.after_scale, jnp.zeros_like(self.scale)], axis=1)
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
        laws, exists = marginals_with_density(chain, parallel=parallel), existing_rows(chain)
        kernels = chain.kernels
        pairs = PairRow(
            laws.mean[:-1],
            laws.scale_tril[:-1],
            laws.mean[1:],
            laws.scale_tril[1:],
            kernels.weight,
            kernels.scale_tril,
        )
        if exists is not None:
            pairs = fill_padding(pairs, exists[1:])
            # A series of one row has no pair to copy: its kernels would stay without a density.
            eye = jnp.eye(chain.state_dim, dtype=pairs.scale.dtype)
            scale = jnp.where(exists[1:, None, None], pairs.scale, eye[None])
            pairs = eqx.tree_at(lambda row: row.scale, pairs, scale)
        return cls(fill_padding(StateRow(laws.mean, laws.scale_tril), exists), pairs, exists)

    def total(
        self, term: AbstractTerm, expect: Callable[..., PyTree], data: PyTree, *per_row: Any
    ) -> PyTree:
        """Return the sum of `expect(row, data, *extra)` over the rows of a term.

        Args:
            term: decides which rows: that of time 0, all states, or all pairs.
            expect: the expectation of the term in one row.
            data: a pytree with a leading time axis.
            *per_row: more pytrees, with one row per row of the term.
        """
        rows: StateRow | PairRow
        if isinstance(term, AbstractInitialTerm):
            rows, exists = jax.tree.map(lambda leaf: leaf[:1], self.states), None
            data = jax.tree.map(lambda leaf: leaf[:1], data)
        elif isinstance(term, AbstractPairTerm):
            rows, exists = self.pairs, None if self.exists is None else self.exists[1:]
            data = jax.tree.map(lambda leaf: leaf[1:], data)
        else:
            rows, exists = self.states, self.exists
        return sum_rows(jax.vmap(expect)(rows, data, *per_row), exists)

    def num_rows(self, term: AbstractTerm) -> int:
        """Return the number of rows of a term."""
        if isinstance(term, AbstractInitialTerm):
            return 1
        rows = self.pairs.before if isinstance(term, AbstractPairTerm) else self.states.mean
        return rows.shape[0]


def existing_rows(chain: AbstractBackwardChain) -> Bool[Array, "time"] | None:
    """Return which rows of a chain exist; `None` if all of them do."""
    length = getattr(chain, "length", None)
    return None if length is None else jnp.arange(chain.num_times) < length


def fill_padding(tree: T, exists: Bool[Array, "time"] | None) -> T:
    """Replace the rows of a pytree that do not exist by its first row.

    Padding may hold NaN or a degenerate law. A `where` after the arithmetic would leave a NaN
    gradient.
    """
    if exists is None:
        return tree

    def fill(leaf: Array) -> Array:
        keep = exists.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(keep, leaf, leaf[:1])

    return jax.tree.map(fill, tree)


def sum_rows(values: PyTree, exists: Bool[Array, "time"] | None) -> PyTree:
    """Return the sum of a pytree over the existing rows of its leading axis."""

    def add_up(leaf: Array) -> Array:
        if exists is not None:
            leaf = jnp.where(exists.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)
        return jnp.sum(leaf, axis=0)

    return jax.tree.map(add_up, values)
