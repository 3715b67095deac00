"""Regimes together with those of the last rows, for models that depend on several of them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._arrays import Input, State
from retrodict._model import as_parameter, unwrap
from retrodict.switching.regimes import FORBIDDEN, AbstractRegimes


class RegimeHistories(AbstractRegimes):
    """A stationary Markov chain of K regimes whose state holds its last p + 1 values.

    State e of the K^(p+1) states stands for (z_k, z_{k-1}, ..., z_{k-p}), with z_{k-l} the l-th
    digit of e to the base K, the lowest digit first. The first law is the stationary one.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> regimes = rd.switching.RegimeHistories(jnp.log(jnp.array([[0.9, 0.1], [0.3, 0.7]])), 1)
        >>> regimes.num_regimes
        4
        >>> [f"{probability:.3f}" for probability in jnp.exp(regimes.log_initial())]
        ['0.675', '0.075', '0.075', '0.175']

    Args:
        transition_logits: logits of p(z_k = j | z_{k-1} = i), of shape `(K, K)`, one row per i.
        order: the number p of earlier regimes that the state holds.
    """

    transition_logits: Any = eqx.field(
        converter=lambda value: as_parameter(value, "transition_logits")
    )
    order: int = eqx.field(static=True, default=0)

    @property
    def num_base_regimes(self) -> int:
        """The number K of regimes."""
        return jnp.shape(unwrap(self.transition_logits))[-1]

    @property
    def num_regimes(self) -> int:
        """The number K^(p+1) of states."""
        return self.num_base_regimes ** (self.order + 1)

    @property
    def takes_input(self) -> bool:
        """Never."""
        return False

    @property
    def takes_state(self) -> bool:
        """Never."""
        return False

    @property
    def digits(self) -> Int[np.ndarray, "regime lag"]:
        """The regimes of each state, the latest first."""
        powers = self.num_base_regimes ** np.arange(self.order + 1)
        return np.arange(self.num_regimes)[:, None] // powers % self.num_base_regimes

    def base_transition(self) -> Float[Array, "base base"]:
        """Return log p(z_k = j | z_{k-1} = i)."""
        return jax.nn.log_softmax(unwrap(self.transition_logits), axis=-1)

    def base_initial(self) -> Float[Array, "base"]:
        """Return the log of the stationary law."""
        matrix = jnp.exp(self.base_transition())
        count = matrix.shape[0]
        # π (I − A + 1 1ᵀ) = 1ᵀ, since π A = π and π 1 = 1.
        system = jnp.eye(count, dtype=matrix.dtype) - matrix.T + jnp.ones_like(matrix)
        law = jnp.linalg.solve(system, jnp.ones(count, matrix.dtype))
        return jnp.log(jnp.maximum(law, jnp.finfo(matrix.dtype).tiny))

    def log_initial(self) -> Float[Array, "regime"]:
        """Return the log probability of each history under the stationary law."""
        matrix, digits = self.base_transition(), self.digits
        oldest = self.base_initial()[digits[:, -1]]
        return oldest + jnp.sum(matrix[digits[:, 1:], digits[:, :-1]], axis=1)

    def log_transition(
        self, x: State | None = None, u: Input | None = None
    ) -> Float[Array, "regime regime"]:
        """Return the log probabilities of the moves, which shift the history by one row."""
        digits = self.digits
        shifted = np.all(digits[:, None, :-1] == digits[None, :, 1:], axis=-1)
        moves = self.base_transition()[digits[:, None, 0], digits[None, :, 0]]
        return jnp.where(shifted, moves, FORBIDDEN)

    def of_base(self, probabilities: Float[Array, "*time regime"]) -> Float[Array, "*time base"]:
        """Return the probabilities of z_k from those of the histories."""
        count = self.num_base_regimes
        shape = (*probabilities.shape[:-1], -1, count)
        return jnp.sum(probabilities.reshape(shape), axis=-2)


def base_probabilities(
    model: Any, probabilities: Float[Array, "*time regime"]
) -> Float[Array, "*time base"]:
    """Return probabilities of the regimes z_k of a model whose states hold earlier regimes too.

    For models without histories they are the given ones.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.markov_autoregression(2, order=1)
        >>> law = rd.switching.forward_backward(model, jnp.zeros((5, 1))).chain.marginals()
        >>> law.probabilities.shape, rd.switching.base_probabilities(model, law.probabilities).shape
        ((5, 4), (5, 2))

    Args:
        model: the model.
        probabilities: probabilities of its states, of shape `(time, regime)`.
    """
    regimes = unwrap(model).regimes
    return regimes.of_base(probabilities) if isinstance(regimes, RegimeHistories) else probabilities
