"""The Kalman family: λ is a linear-Gaussian model, and its exact posterior is the chain."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from retrodict._arrays import PRNGKey, check_count
from retrodict._exact import (
    Prior,
    TransitionArrays,
    Whitened,
    filter_laws,
    reduce_rows,
    whiten,
)
from retrodict._families.base import (
    AbstractLinearGaussianFamily,
    AbstractPreparedFamily,
    Factor,
)
from retrodict._model import (
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    check_densities,
    dense_scale,
    is_linear_gaussian,
    unwrap,
)
from retrodict._numerics import GaussianLaw, condition, law_of, predict, reverse
from retrodict.distributed import Parallel


class Evidence(NamedTuple):
    """One whitened row, value = design x + ε, and the transition into it."""

    transition: LinearGaussianKernel
    design: Float[Array, "*time whitened state"]
    value: Float[Array, "*time whitened"]


class FilterState(NamedTuple):
    """The state of the family.

    Attributes:
        law: the filtering law q_k; the prior before the first row.
        num_read: the number of rows that were read.
    """

    law: GaussianLaw
    num_read: Int[Array, "*time"]


class KalmanFamily(AbstractPreparedFamily, AbstractLinearGaussianFamily):
    """The posteriors of a linear-Gaussian model λ, by its Kalman filter and backward kernels.

    λ is a copy of the model it is made from, never tied to another model: `fit` changes one and
    not the other. Its scales are positive parameters; wrap a part in `Frozen` to fix it.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> family = rd.KalmanFamily(model)
        >>> family.infer(jnp.ones((5, 1))).marginals().mean.shape
        (5, 1)

    Args:
        model: the linear-Gaussian model to start from; every scale must have a density.
        input_dim: the dimension of the inputs, needed only if no kernel has an
            `input_weight`.
    """

    model: StateSpaceModel
    state_dim: int = eqx.field(static=True)  # pyright: ignore
    obs_dim: int = eqx.field(static=True)  # pyright: ignore
    input_dim: int = eqx.field(static=True)  # pyright: ignore

    def __init__(self, model: StateSpaceModel, *, input_dim: int | None = None):
        if not isinstance(model, StateSpaceModel):
            raise TypeError(f"KalmanFamily expects a StateSpaceModel, got {type(model).__name__}.")
        plain = unwrap(model)
        if not is_linear_gaussian(plain):
            raise TypeError(
                "KalmanFamily expects a linear-Gaussian model with a Gaussian prior. For other"
                " models use GatedFamily or RecurrentFamily."
            )
        check_densities(plain, "KalmanFamily")
        self.model = jax.tree.map(
            lambda leaf: jnp.array(leaf) if eqx.is_array(leaf) else leaf, model.learnable()
        )
        self.state_dim = plain.state_dim
        self.input_dim = input_dim_of("KalmanFamily", plain, input_dim)
        u = jnp.zeros(self.input_dim) if self.input_dim else None
        self.obs_dim = jax.eval_shape(lambda: plain.emission.at(u).bias).shape[0]

    def started(self, model: StateSpaceModel, batch: Series) -> "KalmanFamily":
        """Return the family unchanged: λ is in original units."""
        return self

    def redraw(self, key: PRNGKey) -> "KalmanFamily":
        """Return the family unchanged: it has no random weights."""
        return self

    def init(self) -> FilterState:
        """Return the prior of λ."""
        prior = unwrap(self.model).prior
        law = law_of(prior.mean, dense_scale(prior.scale_tril))
        return FilterState(law, jnp.zeros((), jnp.int32))

    def embed(self, row: Series) -> Evidence:
        """Return the row with unit noise, and the transition into it."""
        model = self.model
        kernel = model.transition.at(row.inputs)
        emission = model.emission.at(row.inputs)
        design, value, _ = whiten(
            emission.weight, emission.scale_tril, row.ys - emission.bias, row.mask
        )
        design, value = reduce_rows(design, value)
        scale = dense_scale(kernel.scale_tril)
        return Evidence(LinearGaussianKernel(kernel.weight, kernel.bias, scale), design, value)

    def advance(self, state: FilterState, embedded: Evidence) -> FilterState:
        """Predict, and condition on the row."""
        kernel = embedded.transition
        moved = predict(state.law, kernel.weight, kernel.bias, kernel.scale_tril)
        first = state.num_read == 0
        law = jax.tree.map(lambda old, new: jnp.where(first, old, new), state.law, moved)
        law, _ = condition(law, embedded.design, embedded.value)
        return FilterState(law, state.num_read + 1)

    def advance_in_parallel(
        self, embedded: Evidence, exists: Bool[Array, "time"] | None, parallel: Parallel = True
    ) -> FilterState:
        """Compute all filtering laws by an associative scan."""
        prior, kernel = unwrap(self.model).prior, embedded.transition
        arrays = (kernel.weight, kernel.bias, kernel.scale_tril)
        means, scales = filter_laws(
            Prior(prior.mean, dense_scale(prior.scale_tril)),
            TransitionArrays(*(leaf[1:] for leaf in arrays)),
            Whitened(embedded.design, embedded.value),
            exists,
            parallel,
        )
        count = embedded.value.shape[0]
        return FilterState(GaussianLaw(means, scales), jnp.arange(1, count + 1, dtype=jnp.int32))

    def read(self, before: FilterState, after: FilterState, embedded: Evidence) -> Factor:
        """Return the filtering law, and the transition of λ reversed under the law before it."""
        kernel = embedded.transition
        back = reverse(before.law, kernel.weight, kernel.bias, kernel.scale_tril)
        return Factor(Gaussian(*after.law), LinearGaussianKernel(*back))


def input_dim_of(owner: str, model: StateSpaceModel, input_dim: int | None) -> int:
    """Return the dimension of the inputs, from an `input_weight` if there is one."""
    known = None
    for kernel in (model.transition, model.emission):
        if isinstance(kernel, LinearGaussianKernel) and kernel.input_weight is not None:
            known = kernel.input_weight.shape[1]
    if input_dim is not None:
        input_dim = check_count(input_dim, "input_dim")
        if known is not None and known != input_dim or not model.takes_input:
            raise ValueError(
                f"input_dim must be that of the model's inputs ({known or 0}), got {input_dim}."
            )
        return input_dim
    if known is None and model.takes_input:
        raise ValueError(
            f"{owner} cannot infer the dimension of the inputs of this model: pass input_dim."
        )
    return known or 0
