"""Smoothing and learning in nonlinear state-space models with backward-factorised posteriors."""

from retrodict._chain import AbstractBackwardChain as AbstractBackwardChain
from retrodict._chain import LinearGaussianChain as LinearGaussianChain
from retrodict._gaussian import Diagonal as Diagonal
from retrodict._gaussian import Gaussian as Gaussian
from retrodict._gaussian import NaturalGaussian as NaturalGaussian
from retrodict._gaussian import kl_divergence as kl_divergence
from retrodict._grid import Grid as Grid
from retrodict._grid import GridPosterior as GridPosterior
from retrodict._grid import grid_smoother as grid_smoother
from retrodict._kalman import KalmanPosterior as KalmanPosterior
from retrodict._kalman import kalman_smoother as kalman_smoother
from retrodict._kernel import AbstractGaussianKernel as AbstractGaussianKernel
from retrodict._kernel import AbstractKernel as AbstractKernel
from retrodict._kernel import AbstractLinearGaussianKernel as AbstractLinearGaussianKernel
from retrodict._kernel import DistributionKernel as DistributionKernel
from retrodict._kernel import LinearGaussianKernel as LinearGaussianKernel
from retrodict._kernel import NonlinearGaussianKernel as NonlinearGaussianKernel
from retrodict._kernel import VaryingLinearGaussianKernel as VaryingLinearGaussianKernel
from retrodict._model import StateSpaceModel as StateSpaceModel
from retrodict._parameters import AbstractParameter as AbstractParameter
from retrodict._parameters import Frozen as Frozen
from retrodict._parameters import Positive as Positive
from retrodict._parameters import PositiveTril as PositiveTril
from retrodict._parameters import unwrap as unwrap
