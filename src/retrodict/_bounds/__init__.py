"""How far off an answer may be: error bounds, and checks of a posterior."""

from retrodict._bounds.check import PosteriorCheck, check_posterior
from retrodict._bounds.driver import ErrorBound, error_bound
from retrodict._bounds.finite import (
    FiniteBounds,
    FiniteProblem,
    dobrushin,
    finite_bounds,
    total_variation,
    two_state_counterexample,
)
from retrodict._bounds.mixing import Mixing, h1_constants, h2_constants
from retrodict._bounds.problem import AnyBounded, AnyLipschitz

__all__ = [
    "AnyBounded",
    "AnyLipschitz",
    "ErrorBound",
    "FiniteBounds",
    "FiniteProblem",
    "Mixing",
    "PosteriorCheck",
    "check_posterior",
    "dobrushin",
    "error_bound",
    "finite_bounds",
    "h1_constants",
    "h2_constants",
    "total_variation",
    "two_state_counterexample",
]
