"""Quadratic statistics T_k along a stream, exact under linear-Gaussian backward kernels.

Statistics are carried around their mean: what a row adds to E_{q_k} T_k is then a small number of
its own, and not the difference of two that grow with the stream.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from retrodict._expectations import (
    LogJoint,
    Recursive,
    RecursiveState,
    RunningElbo,
    RunningElboState,
    advance_elbo,
    start_elbo,
)
from retrodict._families import AbstractFamily, AbstractLinearGaussianFamily
from retrodict._model import StateSpaceModel
from retrodict.online.followed import Arrival, Followed, Sums


class ExactStatistics(eqx.Module):
    """The statistics after a row, each less its expectation.

    Attributes:
        bound: that of the lower bound; `None` if it is not followed.
        functionals: those of the functionals, by name.
    """

    bound: RunningElboState | None
    functionals: dict[str, RecursiveState]


def refuse_unless_exact(family: AbstractFamily, followed: Followed) -> None:
    """Refuses what the quadratic recursion does not follow.

    Raises:
        TypeError: if the family draws, or a term is not quadratic in the states.
    """
    remedy = " Use method=WeightedSamples(num_samples) and init(key)."
    if not isinstance(family, AbstractLinearGaussianFamily):
        raise TypeError(
            "Recursive() follows families with linear-Gaussian kernels, got"
            f" {type(family).__name__}.{remedy}"
        )
    named: dict[str, Any] = dict(followed.functionals)
    if followed.model is not None:
        named["the lower bound"] = LogJoint(followed.model)
    for name, functional in named.items():
        for term in functional.terms():
            if not term.quadratic:
                raise TypeError(
                    f"Recursive() follows terms that are quadratic in the states, and {term.name},"
                    f" a part of {name}, is not.{remedy}"
                )


class ExactRecursion(NamedTuple):
    """The recursion of quadratic statistics.

    Attributes:
        followed: what they are of.
    """

    followed: Followed

    def start(self, at: Arrival, key: Any) -> tuple[ExactStatistics, Sums, None]:
        """The statistics after the first row, and their expectations."""
        model = self.followed.model
        bound = None if model is None else start_elbo(model, at.law, at.seen)
        states = {
            name: Recursive().init(functional, at.law, at.data[name])
            for name, functional in self.followed.functionals.items()
        }
        return *_centred(model, bound, states), None

    def advance(
        self, statistics: ExactStatistics, at: Arrival, key: Any
    ) -> tuple[ExactStatistics, Sums, None]:
        """The statistics after one more row, and what it adds to their expectations."""
        model, bound = self.followed.model, statistics.bound
        if model is not None and bound is not None:
            bound = advance_elbo(model, bound, at.law, at.step, at.seen)
        states = {
            name: Recursive().update(
                functional, statistics.functionals[name], at.law, at.step, at.data[name]
            )
            for name, functional in self.followed.functionals.items()
        }
        return *_centred(model, bound, states), None

    def estimate(self, totals: Sums) -> tuple[Sums, Sums]:
        """The expectations themselves, without an error."""
        return totals, jax.tree.map(jnp.zeros_like, totals)


def _centred(
    model: StateSpaceModel | None,
    bound: RunningElboState | None,
    states: dict[str, RecursiveState],
) -> tuple[ExactStatistics, Sums]:
    """The statistics less their expectations, and these."""
    elbo = None
    if model is not None and bound is not None:
        elbo = RunningElbo(model).value(bound)
        joint = _shifted(bound.joint, elbo - bound.entropy)
        bound = RunningElboState(joint, jnp.zeros_like(bound.entropy), bound.terminal_entropy)
    values = {name: Recursive().value(state) for name, state in states.items()}
    states = {name: _shifted(state, values[name]) for name, state in states.items()}
    return ExactStatistics(bound, states), Sums(elbo, values)


def _shifted(state: RecursiveState, by: PyTree) -> RecursiveState:
    constant: Array = jax.tree.map(jnp.subtract, state.constant, by)
    return RecursiveState(state.mean, state.scale, constant, state.gradient, state.hessian)
