"""Conditional laws: transitions, emissions and backward kernels."""

from retrodict._kernels.base import AbstractGaussianKernel as AbstractGaussianKernel
from retrodict._kernels.base import AbstractKernel as AbstractKernel
from retrodict._kernels.base import Distribution as Distribution
from retrodict._kernels.distribution import DistributionKernel as DistributionKernel
from retrodict._kernels.gaussian import AbstractLinearGaussianKernel as AbstractLinearGaussianKernel
from retrodict._kernels.gaussian import LinearGaussianKernel as LinearGaussianKernel
from retrodict._kernels.gaussian import NonlinearGaussianKernel as NonlinearGaussianKernel
from retrodict._kernels.gaussian import VaryingLinearGaussianKernel as VaryingLinearGaussianKernel
