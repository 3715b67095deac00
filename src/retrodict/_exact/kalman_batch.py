"""Exact smoothing of many series at once, with covariances computed once for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import PRNGKey, check_key, is_concrete
from retrodict._chains import LinearGaussianChain
from retrodict._exact.kalman_smoother import (
    KalmanPosterior,
    check_linear_gaussian,
    check_values,
    smooth_series,
)
from retrodict._model import (
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    prepare_data_batch,
    unwrap,
)
from retrodict.distributed import Parallel

SeriesArrays = tuple[Array, Array | None, Array | None, Array | None]
"""Observations, mask, inputs and length of a batch; only the first surely has a batch axis."""


class SeriesAxes(NamedTuple):
    """The batch axis of the arrays of a batch of series: 0, or `None` if all series share one."""

    mask: int | None
    inputs: int | None
    length: int | None


class KalmanBatch(eqx.Module):
    """The exact posteriors of many series under one linear-Gaussian model.

    `batch[i]` is the posterior of one series, and `map` evaluates a function of each chain.

    Attributes:
        chain: the backward chains. Arrays that depend on the series have a leading axis `batch`.
            Arrays that do not (covariances, gains) lack it if `shared`.
        log_evidence: log p(y_{0:n-1}) of each series, of shape `(batch,)`.
        shared: whether all series have the same covariances. They do if the same entries are
            missing in all of them and no weight or scale depends on their inputs.
    """

    chain: LinearGaussianChain
    log_evidence: Float[Array, "batch"]
    shared: bool = eqx.field(static=True)

    def __len__(self) -> int:
        """Return the number of series."""
        return self.log_evidence.shape[0]

    def __getitem__(self, index: int) -> KalmanPosterior:
        """Return the posterior of one series."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be between 0 and {len(self) - 1}, got {index}.")
        chain = jax.tree.map(
            lambda axis, leaf: leaf if axis is None else leaf[index],
            self._axes(),
            self.chain,
            is_leaf=lambda axis: axis is None,
        )
        return KalmanPosterior(chain, self.log_evidence[index])

    def map(self, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """Compute `function(chain, *rows)` for each series, with the shared part computed once.

        Args:
            function: a function of one chain and of one row of each further argument.
            arguments: arrays or pytrees of arrays with a leading axis `batch`.
        """
        axes = (self._axes(), *[0] * len(arguments))
        return jax.vmap(function, in_axes=axes)(self.chain, *arguments)

    def marginals(self, *, parallel: Parallel = False) -> Gaussian:
        """Compute the marginal laws of all states, with leading axes `batch` and `time`.

        Covariances follow from the scales, series by series. Those that all series share are
        computed once in `batch.map(lambda chain: chain.marginals().covariance)`.
        """
        return self.map(lambda chain: chain.marginals(parallel=parallel))

    def sample(self, key: PRNGKey, num_samples: int) -> Float[Array, "batch sample time state"]:
        """Draw paths of each series."""
        check_key(key, "KalmanBatch.sample")
        keys = jax.random.split(key, len(self))
        return self.map(lambda chain, key: chain.sample(key, num_samples), keys)

    def _axes(self) -> LinearGaussianChain:
        """Return the batch axis of each array of the chain: 0, or `None` if it has none."""
        axes = jax.tree.map(lambda leaf: None if self.shared else 0, self.chain)
        return eqx.tree_at(_means, axes, (0, 0, 0), is_leaf=lambda axis: axis is None)


def kalman_smoother_batch(
    model: StateSpaceModel,
    ys: Any,
    *,
    parallel: Parallel = False,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> KalmanBatch:
    """Smooth many series exactly under one linear-Gaussian model.

    Covariances and gains depend on the model and on which entries are missing, not on the observed
    values. If the same entries are missing in all series, they are computed once.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> keys = jax.random.split(jax.random.key(0), 8)
        >>> ys = jnp.stack([model.simulate(key, num_times=50)[1] for key in keys])
        >>> exact = rd.kalman_smoother_batch(model, ys)
        >>> exact.marginals().mean.shape, exact.log_evidence.shape, exact.shared
        ((8, 50, 1), (8,), True)
        >>> exact[3].chain.marginals().mean.shape
        (50, 1)

    Args:
        model: a model with a `Gaussian` prior and linear-Gaussian kernels.
        ys: observations, of shape `(batch, time, obs)`; NaN where missing.
        parallel: as in `kalman_smoother`.
        mask: true where an entry was observed, of shape `(batch, time, obs)`; a single `True`
            declares all entries observed, which need not be searched for NaN then.
        inputs: inputs of shape `(batch, time, input)`, or `(time, input)` for all series.
        length: the number of rows that exist, one integer per series or one for all.

    Returns:
        The posteriors of all series.

    Raises:
        TypeError: if the model is not linear Gaussian.
        ValueError: if shapes do not match, or the emission scale is singular.
    """
    model = unwrap(model)
    check_linear_gaussian(model, "kalman_smoother_batch")
    series = prepare_data_batch(model, ys, mask=mask, inputs=inputs, length=length)
    check_values(model, series, parallel, "kalman_smoother_batch")
    arrays, axes = _without_copies(series)
    kernels = (model.transition, model.emission)
    constant = all(isinstance(kernel, LinearGaussianKernel) for kernel in kernels)
    shared = axes.mask is None and axes.length is None and (constant or axes.inputs is None)
    return _smooth_batch(model, arrays, axes, parallel, shared)


def _without_copies(batch: Series) -> tuple[SeriesArrays, SeriesAxes]:
    """Return the arrays of a batch and their axes; equal ones are replaced by one copy."""

    def reduce(leaf: Array | None) -> tuple[Array | None, int | None]:
        if leaf is None:
            return None, None
        same = is_concrete(leaf) and bool((leaf == leaf[:1]).all())
        return (leaf[0], None) if same else (leaf, 0)

    others = [reduce(leaf) for leaf in (batch.mask, batch.inputs, batch.length)]
    (mask, mask_axis), (inputs, inputs_axis), (length, length_axis) = others
    return (batch.ys, mask, inputs, length), SeriesAxes(mask_axis, inputs_axis, length_axis)


@eqx.filter_jit
def _smooth_batch(
    model: StateSpaceModel, arrays: SeriesArrays, axes: SeriesAxes, parallel: Parallel, shared: bool
) -> KalmanBatch:
    def one(*arrays: Any) -> tuple[tuple, LinearGaussianChain]:
        posterior = smooth_series(model, Series(*arrays), parallel)
        rest = eqx.tree_at(_means, posterior.chain, replace_fn=lambda _: None)
        return (_means(posterior.chain), posterior.log_evidence), rest

    smooth_all = jax.vmap(one, in_axes=(0, *axes), out_axes=(0, None if shared else 0))
    (means, log_evidence), rest = smooth_all(*arrays)
    chain = eqx.tree_at(_means, rest, means, is_leaf=lambda leaf: leaf is None)
    return KalmanBatch(chain, log_evidence, shared)


def _means(chain: LinearGaussianChain) -> tuple[Any, Any, Any]:
    """Return the arrays that depend on the observed values."""
    standard: Any = chain.standard  # exact smoothers provide it
    return chain.laws.mean, chain.kernels.bias, standard.offset
