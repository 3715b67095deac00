"""Conditional laws x, u ↦ distribution, one file a kind."""

from retrodict._kernel._base import AbstractGaussianKernel as AbstractGaussianKernel
from retrodict._kernel._base import AbstractKernel as AbstractKernel
from retrodict._kernel._base import Distribution as Distribution
from retrodict._kernel.distribution import DistributionKernel as DistributionKernel
from retrodict._kernel.linear_gaussian import (
    AbstractLinearGaussianKernel as AbstractLinearGaussianKernel,
)
from retrodict._kernel.linear_gaussian import LinearGaussianKernel as LinearGaussianKernel
from retrodict._kernel.linear_gaussian import (
    VaryingLinearGaussianKernel as VaryingLinearGaussianKernel,
)
from retrodict._kernel.nonlinear_gaussian import NonlinearGaussianKernel as NonlinearGaussianKernel
