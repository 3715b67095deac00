"""Expectations that sample only terms without a closed form."""

from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from retrodict._chains import AbstractBackwardChain
from retrodict._expectations.closed_form import closed_form
from retrodict._expectations.estimator import AbstractEstimator, Moments
from retrodict._expectations.functionals import AbstractTerm, add
from retrodict._expectations.integrand import integrand, noise_dim
from retrodict._validate import check_count
from retrodict.distributed import Parallel


class RaoBlackwellised(AbstractEstimator):
    """Expectations with quadratic terms in closed form and the others by reparameterised draws.

    A term at one state is averaged over draws m_k + S_k ε of its marginal law, independent between
    times. A transition with additive Gaussian noise is averaged over draws of x_{k-1}, with x_k
    given x_{k-1} in closed form, and any other term of a pair over draws of the pair. The estimate
    is unbiased; its variance grows linearly in the length of the series, not quadratically.

    Args:
        num_samples: draws per row; the standard error needs two or more.
    """

    num_samples: int = eqx.field(static=True)

    def __init__(self, num_samples: int = 1):
        self.num_samples = check_count(num_samples, "num_samples")

    @property
    def num_replicates(self) -> int:
        """The number of draws per row."""
        return self.num_samples

    @property
    def error(self) -> Literal["sampled"]:
        """A standard error."""
        return "sampled"

    def view(self, chain: AbstractBackwardChain, *, parallel: Parallel = False) -> Moments:
        """Return the moments of states and pairs."""
        return Moments.of(chain, "RaoBlackwellised", parallel=parallel)

    def draw(
        self, terms: Sequence[AbstractTerm], view: Moments, key: Any, *, parallel: Parallel = False
    ) -> tuple[Float[Array, "sample _ _"] | None, ...]:
        """Return standard normal noise for each term without a closed form.

        Terms of one state and of a pair differ in the number of rows and of variates in a row.
        """
        d, dtype = view.states.mean.shape[1], view.states.mean.dtype

        def noise(term: AbstractTerm, key: Any) -> Array | None:
            if term.quadratic:
                return None
            shape = (self.num_samples, view.num_rows(term), noise_dim(term, d))
            return jax.random.normal(key, shape, dtype)

        keys = jax.random.split(key, len(terms))
        return tuple(noise(term, k) for term, k in zip(terms, keys, strict=True))

    def evaluate(
        self,
        terms: Sequence[AbstractTerm],
        view: Moments,
        noise: tuple[Float[Array, "_ _"] | None, ...],
        data: PyTree,
    ) -> PyTree:
        """Return the sum over terms: closed form where it exists, one draw per row elsewhere."""

        def value(term: AbstractTerm, z: Array | None) -> PyTree:
            if z is None:
                return closed_form(term, view, data)
            return view.total(term, lambda row, data, z: integrand(term, row, data)(z), data, z)

        return add([value(term, z) for term, z in zip(terms, noise, strict=True)])
