"""Error bounds on a finite state space, where every quantity of the theory is a sum.

The state takes values 0, ..., S-1 at times 0, ..., n-1. The model gives χ(x) g_0(x) and the kernels
L_k(x, y) = m_k(x, y) g_{k+1}(y); the approximation is a terminal law q_{n-1} and backward kernels
q_{k|k+1}. The bounds are of the error on an additive functional,

    q h - φ h,   h(x_{0:n-1}) = Σ_k h_k(x_k, x_{k+1}),

with φ the law of the states given the observations. The page on theory has statements and proofs.
"""

from retrodict.bounds.finite.bounds import (
    RIGOROUS,
    FiniteBounds,
    FiniteContributions,
    finite_bounds,
)
from retrodict.bounds.finite.coefficients import (
    birkhoff,
    dobrushin,
    oscillation,
    tilted_distance,
    total_variation,
)
from retrodict.bounds.finite.counterexample import two_state_counterexample
from retrodict.bounds.finite.problem import FiniteProblem
from retrodict.bounds.finite.quantities import FiniteQuantities, mixing_constants

__all__ = [
    "RIGOROUS",
    "FiniteBounds",
    "FiniteContributions",
    "FiniteProblem",
    "FiniteQuantities",
    "birkhoff",
    "dobrushin",
    "finite_bounds",
    "mixing_constants",
    "oscillation",
    "tilted_distance",
    "total_variation",
    "two_state_counterexample",
]
