"""Backward chains: laws of whole paths that factorise backward in time."""

from retrodict._chains.base import AbstractBackwardChain as AbstractBackwardChain
from retrodict._chains.base import AbstractKernelChain as AbstractKernelChain
from retrodict._chains.defensive import defensive_mixture as defensive_mixture
from retrodict._chains.linear_gaussian import LinearGaussianChain as LinearGaussianChain
from retrodict._chains.linear_gaussian import pair_laws as pair_laws
from retrodict._chains.sampled import AbstractBackwardKernel as AbstractBackwardKernel
from retrodict._chains.sampled import SampledChain as SampledChain
from retrodict._chains.sampled import Trace as Trace
