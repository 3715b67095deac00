"""Estimators: their interface, and those that integrate over the moments of a chain."""

import functools
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import check_count
from retrodict._chains import AbstractBackwardChain
from retrodict._expectations.functionals import (
    AbstractInitialTerm,
    AbstractPairTerm,
    AbstractTerm,
    add,
)
from retrodict._expectations.integrals import expected_value, integrand, noise_dim
from retrodict._expectations.moments import Moments
from retrodict.distributed import Parallel

MAX_NODES = 100_000
"""The largest number of nodes per term and row."""


class AbstractEstimator(eqx.Module):
    """A method for expectations under a chain.

    An estimate is the mean of independent replicates, or a single value for a deterministic
    estimator. `view` computes what all replicates share, `draw` samples their noise, and `evaluate`
    returns the value of one replicate.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> class AtTheFilteredMeans(rd.AbstractEstimator):
        ...     error = "unknown"
        ...     num_replicates = None
        ...     def view(self, chain, *, parallel=False):
        ...         return chain.laws.mean
        ...     def draw(self, terms, view, key, *, parallel=False):
        ...         return None
        ...     def evaluate(self, terms, view, noise, data):
        ...         return sum(term(x, None) for term in terms for x in view)
        >>> model = rd.models.local_level(prior_scale=1.0)
        >>> chain = rd.kalman_smoother(model, jnp.array([[1.0], [2.0], [4.0]])).chain
        >>> value = rd.expectation(chain, rd.StateSum(), estimator=AtTheFilteredMeans())
        >>> print(np.array(value).round(3))
        [4.9]

    Attributes:
        error: whether the value is exact, has an unknown error, or a standard error.
    """

    error: ClassVar[Literal["none", "unknown", "sampled"]]

    @property
    @abstractmethod
    def num_replicates(self) -> int | None:
        """The number of independent replicates; `None` for a deterministic estimator."""

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


class AbstractMomentEstimator(AbstractEstimator):
    """An estimator under linear-Gaussian chains, which takes quadratic terms in closed form."""

    def view(self, chain: AbstractBackwardChain, *, parallel: Parallel = False) -> Moments:
        """Return the moments of states and pairs."""
        return Moments.of(chain, type(self).__name__, parallel=parallel)

    def evaluate(
        self, terms: Sequence[AbstractTerm], view: Moments, noise: Any, data: PyTree
    ) -> PyTree:
        """Return the sum over terms, in closed form where it exists."""

        def value(term: AbstractTerm, z: Array | None) -> PyTree:
            if not term.quadratic:
                return self.integrate(term, view, z, data)
            return view.total(term, functools.partial(expected_value, term), data)

        draws = itertools.repeat(None, len(terms)) if noise is None else noise
        return add([value(term, z) for term, z in zip(terms, draws, strict=True)])

    @abstractmethod
    def integrate(self, term: AbstractTerm, moments: Moments, noise: Any, data: PyTree) -> PyTree:
        """Return the expectation of a term that is not quadratic."""


class ClosedForm(AbstractMomentEstimator, AbstractDeterministicEstimator):
    """Exact expectations, for functionals that are quadratic in the states.

    A quadratic h has E h(x) = h(m) + ½ tr(∇²h Cov x) under a Gaussian law of mean m. Log densities
    of linear-Gaussian kernels are computed as sums of squares, without cancellation.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> chain = rd.LinearGaussianChain.from_arrays(
        ...     jnp.ones((2, 1)), jnp.ones((2, 1, 1)), jnp.ones((1, 1, 1)), jnp.zeros((1, 1)),
        ...     jnp.ones((1, 1, 1)),
        ... )
        >>> rd.expectation(chain, rd.StateSum(), estimator=rd.ClosedForm()).tolist()
        [2.0]
    """

    error = "none"

    def integrate(self, term: AbstractTerm, moments: Moments, noise: Any, data: PyTree) -> PyTree:
        """Refuse the term."""
        refuse_unless_quadratic([term], "ClosedForm")


class Quadrature(AbstractMomentEstimator, AbstractDeterministicEstimator):
    """Expectations by Gauss–Hermite quadrature, exact for polynomials of degree 2 order − 1.

    Quadratic terms are integrated in closed form. A term at one state takes `order ** state` nodes
    m_k + S_k z. So does a transition with additive Gaussian noise, since x_k given x_{k-1} is
    integrated in closed form. Any other term of a pair takes `order ** (2 state)`.

    The error is deterministic and unknown: an ELBO by quadrature is not a bound. For more than
    about three state dimensions use `RaoBlackwellised`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> growth = rd.StateFunctional(lambda x, data: jnp.exp(x))
        >>> value = rd.expectation(chain, growth, estimator=rd.Quadrature(order=20))
        >>> print(np.array(value).round(3))
        [50.233]

    Args:
        order: the number of nodes per axis.
        rule: `"gauss-hermite"`, or `"cubature"` for the spherical-radial rule of third degree, with
            two nodes per axis at distance √d and equal weights, which ignores `order`. It is cheap
            in many dimensions, and exact for polynomials of degree three.
    """

    error = "unknown"
    order: int = eqx.field(static=True)
    rule: str = eqx.field(static=True)

    def __init__(self, order: int = 20, rule: str = "gauss-hermite"):
        if rule not in ("gauss-hermite", "cubature"):
            raise ValueError(
                f"Quadrature expects rule 'gauss-hermite' or 'cubature', got {rule!r}."
            )
        self.order, self.rule = check_count(order, "order"), rule

    def integrate(self, term: AbstractTerm, moments: Moments, noise: Any, data: PyTree) -> PyTree:
        """Return the weighted sum over the nodes of every row."""
        mean = moments.states.mean
        dim = noise_dim(term, mean.shape[1])
        if self.rule == "cubature":
            rule = cubature(dim)
        else:
            if self.order**dim > MAX_NODES:
                raise ValueError(
                    f"Quadrature(order={self.order}) would take {self.order}^{dim} nodes per row"
                    f" for {term.name}, more than {MAX_NODES}. Use RaoBlackwellised(num_samples) or"
                    " BackwardSampling(num_samples) with a key, a lower order, or"
                    " rule='cubature'."
                )
            rule = gauss_hermite(self.order, dim)
        nodes, weights = (jnp.asarray(array, mean.dtype) for array in rule)

        def expect(row: Any, data: PyTree) -> PyTree:
            values = jax.vmap(integrand(term, row, data))(nodes)
            return jax.tree.map(
                lambda leaf: jnp.sum(jnp.expand_dims(weights, range(1, leaf.ndim)) * leaf, axis=0),
                values,
            )

        return moments.total(term, expect, data)


class RaoBlackwellised(AbstractMomentEstimator):
    """Expectations with quadratic terms in closed form and the others by reparameterised draws.

    A term at one state is averaged over draws m_k + S_k ε of its marginal law, independent between
    times. A transition with additive Gaussian noise is averaged over draws of x_{k-1}, with x_k
    given x_{k-1} in closed form, and any other term of a pair over draws of the pair. The estimate
    is unbiased; its variance grows linearly in the length of the series, not quadratically.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> growth = rd.StateFunctional(lambda x, data: jnp.exp(x))
        >>> options = {"estimator": rd.RaoBlackwellised(num_samples=64), "key": jax.random.key(0)}
        >>> value, error = rd.expectation(chain, growth, **options, with_standard_error=True)
        >>> bool(0 < error < value)
        True

    Args:
        num_samples: draws per row; the standard error needs two or more.
    """

    error = "sampled"
    num_samples: int = eqx.field(static=True)

    def __init__(self, num_samples: int = 1):
        self.num_samples = check_count(num_samples, "num_samples")

    @property
    def num_replicates(self) -> int:
        """The number of draws per row."""
        return self.num_samples

    def draw(
        self, terms: Sequence[AbstractTerm], view: Moments, key: Any, *, parallel: Parallel = False
    ) -> tuple[Float[Array, "sample _ _"] | None, ...]:
        """Return standard normal noise for each term without a closed form.

        Terms of one state and of a pair differ in the number of rows and of variates in a row.
        """
        num_times, dim = view.states.mean.shape

        def noise(term: AbstractTerm, key: Any) -> Array | None:
            if term.quadratic:
                return None
            rows = num_times - isinstance(term, AbstractPairTerm)
            rows = 1 if isinstance(term, AbstractInitialTerm) else rows
            shape = (self.num_samples, rows, noise_dim(term, dim))
            return jax.random.normal(key, shape, view.states.mean.dtype)

        keys = jax.random.split(key, len(terms))
        return tuple(noise(term, k) for term, k in zip(terms, keys, strict=True))

    def integrate(self, term: AbstractTerm, moments: Moments, noise: Any, data: PyTree) -> PyTree:
        """Return the sum of one draw per row."""
        return moments.total(term, lambda row, data, z: integrand(term, row, data)(z), data, noise)


def refuse_unless_quadratic(terms: Sequence[AbstractTerm], owner: str) -> None:
    """Refuse terms without a closed form."""
    for term in terms:
        if not term.quadratic:
            raise TypeError(
                f"{owner} expects terms that are quadratic in the states, and {term.name} is not"
                " declared quadratic. Use Quadrature(order), or BackwardSampling(num_samples) or"
                " RaoBlackwellised(num_samples) with a key."
            )


@functools.lru_cache(maxsize=16)
def gauss_hermite(order: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes `(node, dim)` and weights of the tensor product for the standard normal law."""
    axis, weight = np.polynomial.hermite_e.hermegauss(order)
    weight = weight / weight.sum()
    nodes = np.array(list(itertools.product(axis, repeat=dim)))
    weights = np.array(list(itertools.product(weight, repeat=dim))).prod(axis=1)
    return nodes, weights


def cubature(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes ±√d e_j, each of weight 1/(2d)."""
    axes = np.sqrt(dim) * np.eye(dim)
    return np.concatenate([axes, -axes]), np.full(2 * dim, 0.5 / dim)
