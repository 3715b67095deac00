"""How far off an answer may be: error bounds, and checks of a posterior."""

from retrodict._bounds.check import PosteriorCheck, check_posterior
from retrodict._bounds.driver import ErrorBound, error_bound
from retrodict._bounds.mixing import Mixing, h1_constants, h2_constants
from retrodict._bounds.problem import AnyBounded, AnyLipschitz

__all__ = [
    "AnyBounded",
    "AnyLipschitz",
    "ErrorBound",
    "Mixing",
    "PosteriorCheck",
    "check_posterior",
    "error_bound",
    "h1_constants",
    "h2_constants",
]
