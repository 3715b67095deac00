"""Expectations over sampled paths: any functional under any chain."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import PRNGKey, check_count
from retrodict._chains import (
    AbstractBackwardChain,
    AbstractKernelChain,
    LinearGaussianChain,
    SampledChain,
    Trace,
)
from retrodict._expectations.estimators import AbstractEstimator
from retrodict._expectations.functionals import AbstractTerm, add
from retrodict._expectations.moments import existing_rows, sum_over_rows
from retrodict._model import GaussianMixture, fill_padding
from retrodict.distributed import Parallel

Noise = Literal["independent", "antithetic", "stratified"]

GROUP = {"independent": 1, "antithetic": 2, "stratified": 16}
"""The number of paths that share noise and form one replicate."""


class Paths(NamedTuple):
    """The weighted paths of one replicate.

    Attributes:
        paths: the states.
        weights: nonnegative, with sum one.
    """

    paths: Float[Array, "*replicate path time state"]
    weights: Float[Array, "*replicate path"]


class BackwardSampling(AbstractEstimator):
    """Averages over paths drawn backward in time: unbiased, for any functional and any chain.

    Paths may share noise in groups, which lowers the variance of functionals that are smooth in the
    noise. `antithetic` pairs ε with −ε, which cancels odd functions of the noise, such as the error
    of a mean under a linear kernel. `stratified` uses groups of 16 in which every noise variable
    has one draw in each sixteenth of its law (Latin hypercubes), which nearly cancels sums of
    functions of single variables. Standard errors are computed from the means of groups.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> size = rd.StateFunctional(lambda x, data: jnp.abs(x))
        >>> estimator = rd.BackwardSampling(64, noise="antithetic")
        >>> value, error = rd.expectation(
        ...     chain, size, estimator=estimator, key=jax.random.key(0), with_standard_error=True
        ... )
        >>> bool(0 < error < value)
        True

    Args:
        num_samples: the number of paths; the standard error needs two groups or more.
        noise: `"independent"`, `"antithetic"` or `"stratified"`.
        by_component: whether each component of a terminal `GaussianMixture` gets `num_samples`
            paths, weighted by its probability, instead of being sampled.
        stop_score: whether gradients leave out the score ∇ log q of the chain at fixed paths. Its
            expectation is zero, so that gradients of the ELBO stay unbiased, and without it their
            variance vanishes as the chain becomes exact (Roeder, Wu and Duvenaud, 2017).
    """

    error = "sampled"
    num_samples: int = eqx.field(static=True)
    noise: Noise = eqx.field(static=True)
    by_component: bool = eqx.field(static=True)
    stop_score: bool = eqx.field(static=True)

    def __init__(
        self,
        num_samples: int,
        *,
        noise: Noise = "independent",
        by_component: bool = False,
        stop_score: bool = False,
    ):
        self.num_samples = check_count(num_samples, "num_samples")
        if noise not in GROUP:
            raise ValueError(
                "BackwardSampling expects noise 'independent', 'antithetic' or 'stratified', got"
                f" {noise!r}."
            )
        if num_samples % GROUP[noise]:
            raise ValueError(
                f"BackwardSampling with {noise} noise draws groups of {GROUP[noise]} paths:"
                f" num_samples must be a multiple of it, got {num_samples}."
            )
        self.noise, self.by_component, self.stop_score = noise, by_component, stop_score

    @property
    def num_replicates(self) -> int:
        """The number of groups of paths that share noise."""
        return self.num_samples // GROUP[self.noise]

    def view(
        self, chain: AbstractBackwardChain, *, parallel: Parallel = False
    ) -> AbstractBackwardChain:
        """Return the chain itself."""
        return chain

    def draw(
        self, terms: Sequence[AbstractTerm], view: Any, key: Any, *, parallel: Parallel = False
    ) -> Paths:
        """Draw paths, in groups."""
        if parallel and not isinstance(view, LinearGaussianChain):
            raise TypeError(
                f"The paths of a {type(view).__name__} cannot be drawn in parallel, since its"
                " kernels do not compose. Use parallel=False."
            )
        options = {"parallel": True} if parallel else {}
        if isinstance(view, SampledChain):
            trace, weights = self.trace(view, key)
            return Paths(trace.paths, weights)
        if self.noise == "independent":
            paths = view.sample(key, self.num_samples, **options)
        elif isinstance(view, AbstractKernelChain):
            shape = (self.num_samples, view.num_times, view.noise_dim)
            noise = self._noise(key, shape, view.laws.mean.dtype)
            paths = view.from_noise(noise, **options)
        else:
            raise TypeError(
                f"{type(view).__name__} has no map from noise to paths. Use"
                " BackwardSampling(num_samples) with independent noise."
            )
        grouped = self._grouped(paths)
        return Paths(grouped, jnp.full(grouped.shape[:2], 1 / GROUP[self.noise], paths.dtype))

    def trace(
        self,
        chain: SampledChain,
        key: PRNGKey,
        last: Callable[[Float[Array, "path state"]], Float[Array, "path state"]] | None = None,
    ) -> tuple[Trace, Float[Array, "replicate path"]]:
        """Draw paths and the laws of their states, in groups, and return them with their weights.

        Args:
            chain: the law of paths.
            key: a typed key.
            last: maps the sampled terminal states to those that paths start from.
        """
        terminal, width = chain.terminal, chain.noise_dim
        each = self.by_component and isinstance(terminal, GaussianMixture)
        count = terminal.num_components if each else 1
        shape = (self.num_samples, chain.num_times, count * width)
        noise = self._noise(key, shape, chain.laws.mean.dtype)
        noise = noise.reshape(*shape[:2], count, width).swapaxes(1, 2)
        final = noise[:, :, -1, : terminal.noise_dim]
        if each:
            # The first variate of a mixture would select the component.
            draw = jax.vmap(lambda law, e: jax.vmap(law.from_noise)(e), (0, 1), 1)
            ends, shares = draw(terminal.components, final[..., 1:]), jnp.exp(terminal.log_weights)
        else:
            ends, shares = jax.vmap(jax.vmap(terminal.from_noise))(final), jnp.ones(1, noise.dtype)
        noise, ends = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in (noise, ends))
        trace = chain.trace(noise, ends if last is None else last(ends))
        grouped = Trace(*(self._grouped(leaf) for leaf in trace))
        size = GROUP[self.noise]
        weights = jnp.tile(shares / size, size)
        return grouped, jnp.broadcast_to(weights, grouped.paths.shape[:2])

    def evaluate(
        self, terms: Sequence[AbstractTerm], view: AbstractBackwardChain, noise: Any, data: PyTree
    ) -> PyTree:
        """Return the sum of the terms along each path, averaged over one group."""
        return self.over_group(lambda path: along_path(terms, view, path, data), noise)

    def over_group(self, fn: Callable[[Array], PyTree], group: Paths) -> PyTree:
        """Return the weighted mean of a function of paths over one group."""
        values = jax.vmap(fn)(group.paths)
        return jax.tree.map(
            lambda leaf: jnp.tensordot(group.weights, leaf, axes=1, precision="highest"), values
        )

    def _grouped(self, leaf: Float[Array, "sample *rest"]) -> Array:
        return leaf.reshape(self.num_replicates, -1, *leaf.shape[1:])

    def _noise(self, key: PRNGKey, shape: tuple[int, ...], dtype: Any) -> Array:
        """Draw standard normal noise, with groups contiguous along the first axis."""
        size, rest = GROUP[self.noise], shape[1:]
        groups = (shape[0] // size, size, *rest)
        if self.noise == "independent":
            return jax.random.normal(key, shape, dtype)
        if self.noise == "antithetic":
            half = jax.random.normal(key, (groups[0], 1, *rest), dtype)
            return jnp.concatenate([half, -half], axis=1).reshape(shape)
        order_key, within_key = jax.random.split(key)
        order = jnp.argsort(jax.random.uniform(order_key, groups), axis=1)
        within = jax.random.uniform(within_key, groups, dtype)
        return _quantiles((order.astype(dtype) + within) / size).reshape(shape)


def _quantiles(levels: Array) -> Array:
    """Return standard normal quantiles, finite also at levels that were rounded to zero or one."""
    half = 0.5 * jnp.finfo(levels.dtype).eps
    return ndtri(jnp.clip(levels, half, 1.0 - half))


def along_path(
    terms: Sequence[AbstractTerm],
    chain: AbstractBackwardChain,
    path: Float[Array, "time state"],
    data: PyTree,
) -> PyTree:
    """Return the sum of the terms along one path, over the rows that exist."""
    exists = existing_rows(chain)
    states = fill_padding((path,), exists)
    pairs = fill_padding((path[:-1], path[1:]), None if exists is None else exists[1:])

    def total(term: Any) -> PyTree:
        return sum_over_rows(
            term, lambda states, data: term(*states, data), (states, pairs), data, exists
        )

    return add([total(term) for term in terms])
