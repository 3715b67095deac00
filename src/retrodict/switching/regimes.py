"""Laws of the regime: its first law, and its transition probabilities.

The regime z_k is an integer from 0 to K-1. Its transition into time k may depend on the input u_k
and on the state x_{k-1}; if it depends on the state, the switching is called recurrent.
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import Input, State, known_values
from retrodict._model import as_parameter, require_input, shape_of, unwrap
from retrodict._numerics import linalg

FORBIDDEN = -1e6
"""The logit of a transition of probability zero: finite, so that derivatives are finite too."""


class AbstractRegimes(eqx.Module):
    """The law of the regimes: p(z_0) and p(z_k | z_{k-1}, x_{k-1}, u_k).

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> class Periodic(rd.switching.AbstractRegimes):
        ...     # Two regimes, of which the input selects the next one.
        ...     num_regimes: int = 2
        ...     takes_input = True
        ...     takes_state = False
        ...     def log_initial(self): return jnp.log(jnp.ones(2) / 2)
        ...     def log_transition(self, x=None, u=None):
        ...         row = jax.nn.log_softmax(jnp.array([u[0], -u[0]]))
        ...         return jnp.broadcast_to(row, (2, 2))
        >>> Periodic().log_transition(u=jnp.zeros(1)).shape
        (2, 2)
    """

    @property
    @abstractmethod
    def num_regimes(self) -> int:
        """The number K of regimes."""

    @property
    @abstractmethod
    def takes_input(self) -> bool:
        """Whether the transition depends on the input."""

    @property
    @abstractmethod
    def takes_state(self) -> bool:
        """Whether the transition depends on the previous state."""

    @abstractmethod
    def log_initial(self) -> Float[Array, "regime"]:
        """Return log p(z_0)."""

    @abstractmethod
    def log_transition(
        self, x: State | None = None, u: Input | None = None
    ) -> Float[Array, "regime regime"]:
        """Return log p(z_k = j | z_{k-1} = i, x_{k-1} = x, u_k = u), with one row per i."""


class Regimes(AbstractRegimes):
    """Regimes whose transition logits are linear in state and input.

    p(z_0 = j) ∝ exp(a_j) and p(z_k = j | z_{k-1} = i, x, u) ∝ exp(A_ij + R_j x + V_j u).

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> regimes = rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]])
        >>> print(np.exp(np.array(regimes.log_transition())).round(3).tolist())
        [[0.9, 0.1], [0.2, 0.8]]

    Args:
        initial_logits: a, of shape `(regime,)`.
        transition_logits: A, of shape `(regime, regime)`, with one row per previous regime, or
            `(1, regime)` if the next regime does not depend on the previous one.
        state_weight: R, of shape `(regime, state)`, for recurrent switching.
        input_weight: V, of shape `(regime, input)`; the transition takes inputs if it is given.
    """

    initial_logits: Any = eqx.field(converter=lambda value: as_parameter(value, "initial_logits"))
    transition_logits: Any = eqx.field(
        converter=lambda value: as_parameter(value, "transition_logits")
    )
    state_weight: Any = eqx.field(
        default=None,
        converter=lambda value: None if value is None else as_parameter(value, "state_weight"),
    )
    input_weight: Any = eqx.field(
        default=None,
        converter=lambda value: None if value is None else as_parameter(value, "input_weight"),
    )

    def __check_init__(self) -> None:
        initial, transition = shape_of(self.initial_logits), shape_of(self.transition_logits)
        if initial is None or transition is None:
            return
        if len(initial) != 1 or not initial[0]:
            raise ValueError(f"Regimes expects initial_logits of shape (regime,), got {initial}.")
        count = initial[0]
        if transition not in ((count, count), (1, count)):
            raise ValueError(
                f"Regimes expects transition_logits of shape ({count}, {count}) or (1, {count})"
                f" beside {count} initial_logits, got {transition}."
            )
        for name in ("state_weight", "input_weight"):
            shape = shape_of(getattr(self, name))
            if shape is not None and (len(shape) != 2 or shape[0] != count):
                dim = name.removesuffix("_weight")
                raise ValueError(f"Regimes expects {name} of shape ({count}, {dim}), got {shape}.")

    @classmethod
    def from_probabilities(cls, initial: Any, transition: Any) -> "Regimes":
        """Build the law from probabilities.

        Args:
            initial: p(z_0), of shape `(regime,)`.
            transition: p(z_k = j | z_{k-1} = i), with one row per i; entries may be zero.
        """
        return cls(_logits(initial, "initial"), _logits(transition, "transition"))

    @property
    def num_regimes(self) -> int:
        """The number K of regimes."""
        return jnp.shape(unwrap(self.initial_logits))[-1]

    @property
    def takes_input(self) -> bool:
        """Whether there is an input_weight."""
        return self.input_weight is not None

    @property
    def takes_state(self) -> bool:
        """Whether there is a state_weight."""
        return self.state_weight is not None

    def log_initial(self) -> Float[Array, "regime"]:
        """Return log p(z_0)."""
        return jax.nn.log_softmax(unwrap(self.initial_logits))

    def log_transition(
        self, x: State | None = None, u: Input | None = None
    ) -> Float[Array, "regime regime"]:
        """Return log p(z_k = j | z_{k-1} = i, x, u), with one row per i."""
        regimes = unwrap(self)
        logits = regimes.transition_logits
        if regimes.state_weight is not None:
            if x is None:
                raise ValueError("The regimes depend on the state: pass x, got None.")
            logits = logits + linalg.matvec(regimes.state_weight, x)[None, :]
        if regimes.input_weight is not None:
            logits = logits + linalg.matvec(regimes.input_weight, require_input(u))[None, :]
        count = logits.shape[-1]
        return jnp.broadcast_to(jax.nn.log_softmax(logits, axis=-1), (count, count))


def _logits(probabilities: Any, name: str) -> Array:
    """Return logits of probabilities, which must be non-negative and sum to one per row."""
    array = as_parameter(probabilities, name)
    values = known_values(array)
    if values is not None and (
        values.ndim == 0
        or not np.all(values >= 0)
        or not np.allclose(values.sum(axis=-1), 1, atol=1e-6)
    ):
        raise ValueError(
            f"`{name}` must hold probabilities that are non-negative and sum to 1 per row, got"
            f" {values}."
        )
    return jnp.where(array > 0, jnp.log(jnp.where(array > 0, array, 1.0)), FORBIDDEN)
