"""Bounds on the error of a chain's expectations, and checks of a posterior."""

from retrodict.bounds.check import check_posterior as check_posterior
from retrodict.bounds.error_bound import ErrorBound as ErrorBound
from retrodict.bounds.error_bound import error_bound as error_bound
from retrodict.bounds.findings import AGAINST_CHAIN as AGAINST_CHAIN
from retrodict.bounds.findings import Kind as Kind
from retrodict.bounds.findings import PosteriorCheck as PosteriorCheck
from retrodict.bounds.findings import describe_figures as describe_figures
from retrodict.bounds.finite import FiniteBounds as FiniteBounds
from retrodict.bounds.finite import FiniteProblem as FiniteProblem
from retrodict.bounds.finite import dobrushin as dobrushin
from retrodict.bounds.finite import finite_bounds as finite_bounds
from retrodict.bounds.finite import total_variation as total_variation
from retrodict.bounds.finite import two_state_counterexample as two_state_counterexample
from retrodict.bounds.functional_classes import AnyBounded as AnyBounded
from retrodict.bounds.functional_classes import AnyLipschitz as AnyLipschitz
from retrodict.bounds.hypotheses import Mixing as Mixing
from retrodict.bounds.hypotheses import h1_constants as h1_constants
from retrodict.bounds.hypotheses import h2_constants as h2_constants
from retrodict.bounds.reference import Reference as Reference
from retrodict.bounds.reference import find_reference as find_reference

__all__ = [
    "AnyBounded",
    "AnyLipschitz",
    "FiniteBounds",
    "FiniteProblem",
    "Mixing",
    "check_posterior",
    "dobrushin",
    "error_bound",
    "finite_bounds",
    "h1_constants",
    "h2_constants",
    "total_variation",
    "two_state_counterexample",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__.copy()
