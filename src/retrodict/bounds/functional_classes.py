"""Classes of functionals, for bounds that hold for all of their members at once."""

import math
from typing import Any

import equinox as eqx

from retrodict._expectations import Variation, check_constant, variation


class AnyLipschitz(eqx.Module):
    """The functionals Σ_k f_k(x_k) whose functions are all Lipschitz with one constant.

    A bound for the class holds for each member: Σ_k x_k, Σ_k |x_k|, and the worst one.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(rd.models.local_level(prior_scale=1.1), ys).chain
        >>> bound = rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz())
        >>> bound.rigorous, bool(bound.value < 0.5)
        (True, True)

    Args:
        constant: the Lipschitz constant of every f_k.
    """

    constant: float = eqx.field(static=True, default=1.0)

    def __check_init__(self) -> None:
        check_constant(math.nan if self.constant is None else self.constant, "constant")


class AnyBounded(eqx.Module):
    """The functionals Σ_k f_k(x_k) with sup f_k − inf f_k at most one constant.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(rd.models.local_level(prior_scale=1.1), ys).chain
        >>> bound = rd.error_bound(model, chain, ys, rd.bounds.AnyBounded(oscillation=1.0))
        >>> bound.rigorous, bool(bound.value < 1.0)
        (True, True)

    Args:
        oscillation: the bound of sup − inf.
    """

    oscillation: float = eqx.field(static=True, default=1.0)

    def __check_init__(self) -> None:
        check_constant(math.nan if self.oscillation is None else self.oscillation, "oscillation")


def variation_of(functional: Any) -> tuple[Variation, Variation]:
    """Return the declared constants of h_0 and of the later increments."""
    if isinstance(functional, AnyLipschitz):
        same = Variation(0.0, functional.constant, math.inf)
        return same, same
    if isinstance(functional, AnyBounded):
        same = Variation(0.0, math.inf, functional.oscillation)
        return same, same
    return variation(functional)
