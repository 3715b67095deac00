"""Expectations by quadrature, for few state dimensions."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from retrodict._chains import AbstractBackwardChain
from retrodict._expectations.closed_form import closed_form
from retrodict._expectations.estimator import AbstractDeterministicEstimator, Moments
from retrodict._expectations.functionals import AbstractTerm, add
from retrodict._expectations.integrand import integrand, noise_dim
from retrodict._validate import check_count
from retrodict.distributed import Parallel

MAX_NODES = 100_000
"""The largest number of nodes per term and row."""


class Quadrature(AbstractDeterministicEstimator):
    """Expectations by Gauss–Hermite quadrature, exact for polynomials of degree 2 order − 1.

    Quadratic terms are integrated in closed form. A term at one state takes `order ** state` nodes
    m_k + S_k z. So does a transition with additive Gaussian noise, since x_k given x_{k-1} is
    integrated in closed form. Any other term of a pair takes `order ** (2 state)`.

    The error is deterministic and unknown: an ELBO by quadrature is not a bound. For more than
    about three state dimensions use `RaoBlackwellised`.

    Args:
        order: the number of nodes per axis.
        rule: `"gauss-hermite"`, or `"cubature"` for the spherical-radial rule of third degree, with
            two nodes per axis at distance √d and equal weights, which ignores `order`. It is cheap
            in many dimensions, and exact for polynomials of degree three.
    """

    order: int = eqx.field(static=True)
    rule: str = eqx.field(static=True)

    def __init__(self, order: int = 20, rule: str = "gauss-hermite"):
        if rule not in ("gauss-hermite", "cubature"):
            raise ValueError(
                f"Quadrature expects rule 'gauss-hermite' or 'cubature', got {rule!r}."
            )
        self.order, self.rule = check_count(order, "order"), rule

    @property
    def error(self) -> Literal["unknown"]:
        """It depends on the smoothness of the terms and is unknown."""
        return "unknown"

    def view(self, chain: AbstractBackwardChain, *, parallel: Parallel = False) -> Moments:
        """Return the moments of states and pairs."""
        return Moments.of(chain, "Quadrature", parallel=parallel)

    def evaluate(
        self, terms: Sequence[AbstractTerm], view: Moments, noise: None, data: PyTree
    ) -> PyTree:
        """Return the sum over terms, by closed form where it exists and by nodes elsewhere."""
        return add([self._integrate(term, view, data) for term in terms])

    def _integrate(self, term: AbstractTerm, moments: Moments, data: PyTree) -> PyTree:
        if term.quadratic:
            return closed_form(term, moments, data)
        mean = moments.states.mean
        nodes, weights = self._rule(term, noise_dim(term, mean.shape[1]), mean.dtype)

        def expect(row: Any, data: PyTree) -> PyTree:
            values = jax.vmap(integrand(term, row, data))(nodes)
            return jax.tree.map(lambda leaf: _weighted_sum(weights, leaf), values)

        return moments.total(term, expect, data)

    def _rule(self, term: AbstractTerm, dim: int, dtype: Any) -> tuple[Array, Array]:
        if self.rule == "cubature":
            nodes, weights = _cubature(dim)
        else:
            if self.order**dim > MAX_NODES:
                raise ValueError(
                    f"Quadrature(order={self.order}) would take {self.order}^{dim} nodes per row"
                    f" for {term.name}, more than {MAX_NODES}. Use RaoBlackwellised(num_samples) or"
                    " BackwardSampling(num_samples) with a key, a lower order, or"
                    " rule='cubature'."
                )
            nodes, weights = _gauss_hermite(self.order, dim)
        return jnp.asarray(nodes, dtype), jnp.asarray(weights, dtype)


def _weighted_sum(weights: Array, values: Array) -> Array:
    return jnp.sum(weights.reshape(-1, *[1] * (values.ndim - 1)) * values, axis=0)


@functools.lru_cache(maxsize=16)
def _gauss_hermite(order: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes `(node, dim)` and weights of the tensor product for the standard normal law."""
    axis, weight = np.polynomial.hermite_e.hermegauss(order)
    weight = weight / weight.sum()
    nodes = np.array(list(itertools.product(axis, repeat=dim)))
    weights = np.array(list(itertools.product(weight, repeat=dim))).prod(axis=1)
    return nodes, weights


@functools.lru_cache(maxsize=16)
def _cubature(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes ±√d e_j, each of weight 1/(2d)."""
    axes = np.sqrt(dim) * np.eye(dim)
    return np.concatenate([axes, -axes]), np.full(2 * dim, 0.5 / dim)
