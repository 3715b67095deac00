"""Ways of taking the expectation of a functional under a chain, one file each."""

from retrodict._estimator._base import AbstractEstimator as AbstractEstimator
from retrodict._estimator._base import existing_rows as existing_rows
from retrodict._estimator._base import fill_padding as fill_padding
from retrodict._estimator.backward_sampling import BackwardSampling as BackwardSampling
from retrodict._estimator.backward_sampling import Paths as Paths
from retrodict._estimator.backward_sampling import along_path as along_path
from retrodict._estimator.closed_form import ClosedForm as ClosedForm
from retrodict._estimator.quadrature import Quadrature as Quadrature
from retrodict._estimator.rao_blackwellised import RaoBlackwellised as RaoBlackwellised
from retrodict._estimator.recursive import Recursive as Recursive
from retrodict._estimator.recursive import RecursiveState as RecursiveState
