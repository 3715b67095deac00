"""Expectations over sampled paths: any functional under any chain."""

from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._chain import AbstractBackwardChain
from retrodict._estimator._base import (
    AbstractEstimator,
    existing_rows,
    fill_padding,
    sum_rows,
)
from retrodict._functional import AbstractInitialTerm, AbstractPairTerm, AbstractTerm, add
from retrodict._validate import check_count


class BackwardSampling(AbstractEstimator):
    """Averages over paths drawn backward in time: unbiased, for any functional and any chain.

    Args:
        num_samples: how many paths; the standard error needs two or more.
    """

    num_samples: int = eqx.field(static=True)

    def __init__(self, num_samples: int):
        self.num_samples = check_count(num_samples, "num_samples")

    @property
    def num_replicates(self) -> int:
        """The number of paths."""
        return self.num_samples

    @property
    def error(self) -> Literal["sampled"]:
        """A standard error."""
        return "sampled"

    def view(self, chain: AbstractBackwardChain) -> AbstractBackwardChain:
        """The chain itself."""
        return chain

    def draw(
        self, terms: Sequence[AbstractTerm], view: AbstractBackwardChain, key: Any
    ) -> Float[Array, "sample time state"]:
        """Paths."""
        return view.sample(key, self.num_samples)

    def evaluate(
        self,
        terms: Sequence[AbstractTerm],
        view: AbstractBackwardChain,
        noise: Float[Array, "time state"],
        data: PyTree,
    ) -> PyTree:
        """The sum of the terms along one path."""
        exists = existing_rows(view)
        return add([_along_path(term, noise, data, exists) for term in terms])


def _along_path(
    term: Any, path: Float[Array, "time state"], data: PyTree, exists: Bool[Array, "time"] | None
) -> PyTree:
    if isinstance(term, AbstractInitialTerm):
        return term(path[0], jax.tree.map(lambda leaf: leaf[0], data))
    if isinstance(term, AbstractPairTerm):
        later = None if exists is None else exists[1:]
        data = jax.tree.map(lambda leaf: leaf[1:], data)
        before, after = fill_padding((path[:-1], path[1:]), later)
        return sum_rows(jax.vmap(term)(before, after, data), later)
    return sum_rows(jax.vmap(term)(fill_padding(path, exists), data), exists)
