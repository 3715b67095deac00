"""Online inference and learning, one row at a time.

All streams follow one protocol, `AbstractStream`: `init`, `update` and `scan`.
"""

from retrodict.online.fixed_lag import FixedLag as FixedLag
from retrodict.online.fixed_lag import LagOutput as LagOutput
from retrodict.online.fixed_lag import LagRows as LagRows
from retrodict.online.fixed_lag import LagState as LagState
from retrodict.online.gradient import AbstractRecursiveGradient as AbstractRecursiveGradient
from retrodict.online.gradient import RowGradient as RowGradient
from retrodict.online.gradient import recursive_gradient as recursive_gradient
from retrodict.online.kalman import KalmanScore as KalmanScore
from retrodict.online.learner import LaggedLearner as LaggedLearner
from retrodict.online.learner import LaggedLearnerState as LaggedLearnerState
from retrodict.online.learner import LearnerOutput as LearnerOutput
from retrodict.online.learner import LearnerState as LearnerState
from retrodict.online.learner import OnlineLearner as OnlineLearner
from retrodict.online.particle_smoother import OnlineOutput as OnlineOutput
from retrodict.online.particle_smoother import OnlineSmoother as OnlineSmoother
from retrodict.online.pathwise import AbstractFeatures as AbstractFeatures
from retrodict.online.pathwise import QuadraticFeatures as QuadraticFeatures
from retrodict.online.pathwise import RandomFeatures as RandomFeatures
from retrodict.online.pathwise import RecursivePathwise as RecursivePathwise
from retrodict.online.running import RunningOutput as RunningOutput
from retrodict.online.running import RunningPosterior as RunningPosterior
from retrodict.online.running import RunningState as RunningState
from retrodict.online.samples import WeightedSamples as WeightedSamples
from retrodict.online.schedules import robbins_monro as robbins_monro
from retrodict.online.score import RecursiveScore as RecursiveScore
from retrodict.online.stream import AbstractStream as AbstractStream
from retrodict.online.truncated import TruncatedBackprop as TruncatedBackprop

__all__ = [
    "AbstractFeatures",
    "AbstractRecursiveGradient",
    "AbstractStream",
    "FixedLag",
    "KalmanScore",
    "LaggedLearner",
    "OnlineLearner",
    "OnlineSmoother",
    "QuadraticFeatures",
    "RandomFeatures",
    "RecursivePathwise",
    "RecursiveScore",
    "RunningPosterior",
    "TruncatedBackprop",
    "WeightedSamples",
    "recursive_gradient",
    "robbins_monro",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__.copy()
