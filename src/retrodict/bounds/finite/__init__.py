"""Error bounds on a finite state space, where every quantity of the theory is a sum.

The state takes values 0, ..., S-1 at times 0, ..., n-1. The model gives χ(x) g_0(x) and the kernels
L_k(x, y) = m_k(x, y) g_{k+1}(y); the approximation is a terminal law q_{n-1} and backward kernels
q_{k|k+1}. The bounds are of the error on an additive functional,

    q h - φ h,   h(x_{0:n-1}) = Σ_k h_k(x_k, x_{k+1}),

with φ the law of the states given the observations. The page on theory has statements and proofs.
"""

from retrodict.bounds.finite.bounds import RIGOROUS as RIGOROUS
from retrodict.bounds.finite.bounds import FiniteBounds as FiniteBounds
from retrodict.bounds.finite.bounds import finite_bounds as finite_bounds
from retrodict.bounds.finite.coefficients import birkhoff as birkhoff
from retrodict.bounds.finite.coefficients import dobrushin as dobrushin
from retrodict.bounds.finite.coefficients import tilted_distance as tilted_distance
from retrodict.bounds.finite.coefficients import total_variation as total_variation
from retrodict.bounds.finite.problem import FiniteProblem as FiniteProblem
from retrodict.bounds.finite.problem import two_state_counterexample as two_state_counterexample
from retrodict.bounds.finite.quantities import mixing_constants as mixing_constants
