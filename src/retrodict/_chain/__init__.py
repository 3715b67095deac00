"""Backward chains."""

from retrodict._chain._base import AbstractBackwardChain as AbstractBackwardChain
from retrodict._chain._base import AbstractKernelChain as AbstractKernelChain
from retrodict._chain.defensive import covered as covered
from retrodict._chain.linear_gaussian import LinearGaussianChain as LinearGaussianChain
from retrodict._chain.linear_gaussian import marginals_with_density as marginals_with_density
from retrodict._chain.sampled import AbstractBackwardKernel as AbstractBackwardKernel
from retrodict._chain.sampled import SampledChain as SampledChain
from retrodict._chain.sampled import Trace as Trace
