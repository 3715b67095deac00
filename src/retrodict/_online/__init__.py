"""Posteriors that are carried along a stream, in memory that does not grow with it."""

from retrodict._online.gradient import AbstractRecursiveGradient as AbstractRecursiveGradient
from retrodict._online.gradient import RowGradient as RowGradient
from retrodict._online.gradient import recursive_gradient as recursive_gradient
from retrodict._online.kalman import KalmanScore as KalmanScore
from retrodict._online.lagged import LaggedLearner as LaggedLearner
from retrodict._online.lagged import LaggedLearnerOutput as LaggedLearnerOutput
from retrodict._online.lagged import LaggedLearnerState as LaggedLearnerState
from retrodict._online.learner import LearnerOutput as LearnerOutput
from retrodict._online.learner import LearnerState as LearnerState
from retrodict._online.learner import OnlineLearner as OnlineLearner
from retrodict._online.pathwise import AbstractFeatures as AbstractFeatures
from retrodict._online.pathwise import QuadraticFeatures as QuadraticFeatures
from retrodict._online.pathwise import RandomFeatures as RandomFeatures
from retrodict._online.pathwise import RecursivePathwise as RecursivePathwise
from retrodict._online.running import RunningOutput as RunningOutput
from retrodict._online.running import RunningPosterior as RunningPosterior
from retrodict._online.running import RunningState as RunningState
from retrodict._online.samples import WeightedSamples as WeightedSamples
from retrodict._online.schedules import robbins_monro as robbins_monro
from retrodict._online.score import RecursiveScore as RecursiveScore
from retrodict._online.truncated import TruncatedBackprop as TruncatedBackprop
