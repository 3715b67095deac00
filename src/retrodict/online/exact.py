"""Quadratic statistics T_k along a stream, exact under linear-Gaussian backward kernels.

Statistics are stored relative to their mean. What a row adds to E_{q_k} T_k is then a small number,
and not the difference of two numbers that grow with the stream.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from retrodict._expectations import LogJoint, Recursive, RecursiveState
from retrodict._families import AbstractFamily, AbstractLinearGaussianFamily
from retrodict._laws import Gaussian
from retrodict._types import Scalar
from retrodict.online.followed import Arrival, Followed, Sums


class BoundState(eqx.Module):
    """The statistic of the evidence lower bound.

    Attributes:
        joint: the expected log joint density as a function of the last state.
        entropy: the entropy of the backward kernels that is not yet part of the total.
        terminal_entropy: the entropy of the last filtering law.
    """

    joint: RecursiveState
    entropy: Scalar
    terminal_entropy: Scalar


class ExactStatistics(eqx.Module):
    """The statistics after a row, each less its expectation.

    Attributes:
        bound: the statistic of the lower bound; `None` if it is not requested.
        functionals: the statistics of the functionals, by name.
    """

    bound: BoundState | None
    functionals: dict[str, RecursiveState]


def check_exact(family: AbstractFamily, followed: Followed) -> None:
    """Raise unless the quadratic recursion applies.

    Raises:
        TypeError: if the family draws samples, or a term is not quadratic in the states.
    """
    remedy = " Use method=WeightedSamples(num_samples) and init(key)."
    if not isinstance(family, AbstractLinearGaussianFamily):
        raise TypeError(
            "Recursive() expects a family with linear-Gaussian kernels, got"
            f" {type(family).__name__}.{remedy}"
        )
    named: dict[str, Any] = dict(followed.functionals)
    if followed.model is not None:
        named["the lower bound"] = LogJoint(followed.model)
    for name, functional in named.items():
        for term in functional.terms():
            if not term.quadratic:
                raise TypeError(
                    f"Recursive() expects terms that are quadratic in the states: {term.name}, a"
                    f" part of {name}, is not.{remedy}"
                )


class ExactRecursion(NamedTuple):
    """The recursion of quadratic statistics.

    Attributes:
        followed: the lower bound and functionals to compute.
    """

    followed: Followed

    def start(self, at: Arrival, key: Any) -> tuple[ExactStatistics, Sums, None]:
        """Return the statistics after the first row, and their expectations."""
        bound = None
        if self.followed.model is not None:
            joint = Recursive().init(LogJoint(self.followed.model), at.law, at.seen)
            bound = BoundState(joint, jnp.zeros((), joint.mean.dtype), at.law.entropy())
        states = {
            name: Recursive().init(functional, at.law, at.data[name])
            for name, functional in self.followed.functionals.items()
        }
        return *_centred(bound, states), None

    def advance(
        self, statistics: ExactStatistics, at: Arrival, key: Any
    ) -> tuple[ExactStatistics, Sums, None]:
        """Return the statistics after one more row, and what it adds to their expectations."""
        bound = statistics.bound
        if self.followed.model is not None and bound is not None:
            joint = Recursive().update(
                LogJoint(self.followed.model), bound.joint, at.law, at.step, at.seen
            )
            kernel = Gaussian(at.step.bias, at.step.scale_tril)
            bound = BoundState(joint, bound.entropy + kernel.entropy(), at.law.entropy())
        states = {
            name: Recursive().update(
                functional, statistics.functionals[name], at.law, at.step, at.data[name]
            )
            for name, functional in self.followed.functionals.items()
        }
        return *_centred(bound, states), None

    def estimate(self, totals: Sums) -> tuple[Sums, Sums]:
        """Return the expectations, and standard errors of zero."""
        return totals, jax.tree.map(jnp.zeros_like, totals)


def _centred(
    bound: BoundState | None, states: dict[str, RecursiveState]
) -> tuple[ExactStatistics, Sums]:
    """Subtract the expectations of the statistics, and return both."""
    elbo = None
    if bound is not None:
        elbo = Recursive().value(bound.joint) + bound.entropy + bound.terminal_entropy
        joint = _shifted(bound.joint, elbo - bound.entropy)
        bound = BoundState(joint, jnp.zeros_like(bound.entropy), bound.terminal_entropy)
    values = {name: Recursive().value(state) for name, state in states.items()}
    states = {name: _shifted(state, values[name]) for name, state in states.items()}
    return ExactStatistics(bound, states), Sums(elbo, values)


def _shifted(state: RecursiveState, by: PyTree) -> RecursiveState:
    constant: Array = jax.tree.map(jnp.subtract, state.constant, by)
    return RecursiveState(state.mean, state.scale, constant, state.gradient, state.hessian)
