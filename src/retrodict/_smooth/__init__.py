"""Smoothing without choosing a smoother."""

from retrodict._smooth.driver import Smoothed as Smoothed
from retrodict._smooth.driver import smooth as smooth
from retrodict._smooth.likeness import Simulated as Simulated
from retrodict._smooth.likeness import simulate_like as simulate_like
