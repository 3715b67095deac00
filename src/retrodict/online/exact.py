"""Quadratic statistics T_k along a stream, exact under linear-Gaussian backward kernels.

Statistics are stored relative to their mean. What a row adds to E_{q_k} T_k is then a small number,
and not the difference of two numbers that grow with the stream.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from retrodict._arrays import Scalar
from retrodict._expectations import LogJoint, Recursive, RecursiveState
from retrodict._families import AbstractFamily, AbstractLinearGaussianFamily
from retrodict._model import Gaussian
from retrodict.online.quantities import Quantities, RowFactors, Sums


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


def check_exact(family: AbstractFamily, quantities: Quantities) -> None:
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
    named: dict[str, Any] = dict(quantities.functionals)
    if quantities.model is not None:
        named["the lower bound"] = LogJoint(quantities.model)
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
        quantities: the lower bound and functionals to compute.
    """

    quantities: Quantities

    def start(self, at: RowFactors, key: Any) -> tuple[ExactStatistics, Sums, None]:
        """Return the statistics after the first row, and their expectations."""
        states = self.quantities.map(lambda h, data: Recursive().init(h, at.law, data), at.data)
        terminal = at.law.entropy()
        return *_centred(states, jnp.zeros_like(terminal), terminal), None

    def advance(
        self, statistics: ExactStatistics, at: RowFactors, key: Any
    ) -> tuple[ExactStatistics, Sums, None]:
        """Return the statistics after one more row, and what it adds to their expectations."""
        bound = statistics.bound
        before = Sums(None if bound is None else bound.joint, statistics.functionals)
        states = self.quantities.map(
            lambda h, data, state: Recursive().update(h, state, at.law, at.step, data),
            at.data,
            before,
        )
        kernel = Gaussian(at.step.bias, at.step.scale_tril)
        return *_centred(states, kernel.entropy(), at.law.entropy()), None

    def estimate(self, totals: Sums) -> tuple[Sums, Sums]:
        """Return the expectations, and standard errors of zero."""
        return totals, jax.tree.map(jnp.zeros_like, totals)


def _centred(
    states: Sums, kernel_entropy: Scalar, terminal_entropy: Scalar
) -> tuple[ExactStatistics, Sums]:
    """Subtract the expectations of the statistics, and return both."""

    def is_state(node: Any) -> bool:
        return isinstance(node, RecursiveState)

    def shifted(state: RecursiveState, by: PyTree) -> RecursiveState:
        constant = jax.tree.map(jnp.subtract, state.constant, by)
        return dataclasses.replace(state, constant=constant)

    values = jax.tree.map(Recursive().value, states, is_leaf=is_state)
    values = values.less(-(kernel_entropy + terminal_entropy))
    # The entropy of the last law is no part of the statistic: the next row replaces it.
    centred = jax.tree.map(shifted, states, values.less(kernel_entropy), is_leaf=is_state)
    bound = centred.elbo
    if bound is not None:
        bound = BoundState(bound, jnp.zeros_like(terminal_entropy), terminal_entropy)
    return ExactStatistics(bound, centred.values), values
