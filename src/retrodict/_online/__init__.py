"""Posteriors that are carried along a stream, in memory that does not grow with it."""

from retrodict._online.running import RunningOutput as RunningOutput
from retrodict._online.running import RunningPosterior as RunningPosterior
from retrodict._online.running import RunningState as RunningState
from retrodict._online.samples import WeightedSamples as WeightedSamples
