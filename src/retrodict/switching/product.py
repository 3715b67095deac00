"""Products of independent components: one switching model whose regimes are tuples."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Float

from retrodict._arrays import Input, State
from retrodict._model import (
    AbstractParameter,
    Gaussian,
    LinearGaussianKernel,
    dense_scale,
    unwrap,
)
from retrodict.switching.model import SwitchingModel, of_regime, require_state
from retrodict.switching.regimes import AbstractRegimes


def product_model(components: Sequence[SwitchingModel], emission: Any) -> SwitchingModel:
    """Join independent components with a state into one model, observed together.

    Component i has K_i regimes and a state of its own. The product has ∏ K_i regimes, tuples of
    those of the components in lexicographic order; its state stacks theirs, with block-diagonal
    kernels. The parameters are those of the components, so that learning keeps them independent.
    With a network as the emission this is structured nonlinear independent component analysis
    (Hälvä et al. 2021).

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> component = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in (0.1, 1.0)],
        ...     emission=rd.LinearGaussianKernel(eye, zero, eye),
        ... )
        >>> mixing = rd.LinearGaussianKernel(jnp.ones((4, 2)), jnp.zeros(4), jnp.eye(4))
        >>> model = rd.switching.product_model([component, component], mixing)
        >>> model.num_regimes, model.state_dim
        (4, 2)

    Args:
        components: models that are linear and Gaussian given their regimes, without inputs; their
            own emissions are not used.
        emission: the kernel from the stacked state to the observations.
    """
    if not components:
        raise ValueError("product_model expects one component or more, got none.")
    for component in components:
        require_state(component, "product_model")
        if component.takes_input or not component.is_conditionally_linear_gaussian:
            raise TypeError(
                "product_model expects components without inputs that are linear and Gaussian given"
                " their regimes."
            )
    learned = tuple(component.learnable() for component in components)
    return SwitchingModel(
        ProductRegimes(tuple(component.regimes for component in learned)),
        emission,
        ProductPrior(tuple(component.prior for component in learned), _counts(learned)),
        ProductTransition(tuple(component.transition for component in learned), _counts(learned)),
    )


def _counts(components: Sequence[SwitchingModel]) -> tuple[int, ...]:
    return tuple(component.num_regimes for component in components)


class ProductRegimes(AbstractRegimes):
    """Independent regimes of several components, as one regime.

    Attributes:
        components: the laws of the regimes of the components.
    """

    components: tuple[Any, ...]

    @property
    def num_regimes(self) -> int:
        """The product of the numbers of regimes."""
        return int(np.prod([unwrap(law).num_regimes for law in self.components]))

    @property
    def takes_input(self) -> bool:
        """False."""
        return False

    @property
    def takes_state(self) -> bool:
        """False."""
        return False

    def log_initial(self) -> Float[Array, "regime"]:
        """Return log p(z_0), the sum over the components."""
        total = jnp.zeros(1)
        for law in self.components:
            total = (total[:, None] + law.log_initial()[None]).reshape(-1)
        return total

    def log_transition(
        self, x: State | None = None, u: Input | None = None
    ) -> Float[Array, "regime regime"]:
        """Return log p(z_k = j | z_{k-1} = i), the sum over the components."""
        total = jnp.zeros((1, 1))
        for law in self.components:
            row = law.log_transition()
            joint = total[:, None, :, None] + row[None, :, None, :]
            total = joint.reshape(joint.shape[0] * joint.shape[1], -1)
        return total


class ProductPrior(AbstractParameter):
    """The priors of the tuples of regimes, from those of the components.

    Attributes:
        components: the priors of the components, each one law or a tuple with one per regime.
        counts: the numbers of regimes of the components.
    """

    components: tuple[Any, ...]
    counts: tuple[int, ...] = eqx.field(static=True)

    @property
    def value(self) -> tuple[Gaussian, ...]:
        """One Gaussian per tuple of regimes."""
        return tuple(
            Gaussian(
                jnp.concatenate([law.mean for law in laws]),
                block_diag(*(dense_scale(law.scale_tril) for law in laws)),
            )
            for laws in _tuples(self.components, self.counts)
        )


class ProductTransition(AbstractParameter):
    """The transitions into the tuples of regimes, from those of the components.

    Attributes:
        components: the transitions of the components, each one kernel or a tuple of them.
        counts: the numbers of regimes of the components.
    """

    components: tuple[Any, ...]
    counts: tuple[int, ...] = eqx.field(static=True)

    @property
    def value(self) -> tuple[LinearGaussianKernel, ...]:
        """One kernel per tuple of regimes."""
        return tuple(
            LinearGaussianKernel(
                block_diag(*(kernel.weight for kernel in kernels)),
                jnp.concatenate([kernel.bias for kernel in kernels]),
                block_diag(*(dense_scale(kernel.scale_tril) for kernel in kernels)),
            )
            for kernels in _tuples(self.components, self.counts)
        )


def _tuples(components: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Return the parts of the components for each tuple of regimes."""
    parts = unwrap(tuple(components))
    return [
        [of_regime(part, int(j)) for part, j in zip(parts, index, strict=True)]
        for index in np.ndindex(*counts)
    ]
