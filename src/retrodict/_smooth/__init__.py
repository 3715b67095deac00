"""Smoothing without choosing a smoother."""

from retrodict._smooth.driver import Smoothed as Smoothed
from retrodict._smooth.driver import smooth as smooth
