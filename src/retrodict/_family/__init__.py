"""Amortised variational families: from observations to backward chains."""

from retrodict._family._base import AbstractFactorFamily as AbstractFactorFamily
from retrodict._family._base import AbstractFamily as AbstractFamily
from retrodict._family._base import AbstractLinearGaussianFamily as AbstractLinearGaussianFamily
from retrodict._family._base import AbstractSampledFamily as AbstractSampledFamily
from retrodict._family._base import Factor as Factor
from retrodict._family._base import Row as Row
from retrodict._family._base import advance_over as advance_over
from retrodict._family._base import factors as factors
from retrodict._family._base import infer_series as infer_series
from retrodict._family._base import rows_of as rows_of
from retrodict._family.assimilation import AssimilationFamily as AssimilationFamily
from retrodict._family.conjugate import ConjugateFamily as ConjugateFamily
from retrodict._family.gated import GatedFamily as GatedFamily
from retrodict._family.kalman import KalmanFamily as KalmanFamily
from retrodict._family.mixture import MixtureFamily as MixtureFamily
from retrodict._family.nonlinear import NonlinearFamily as NonlinearFamily
from retrodict._family.recurrent import RecurrentFamily as RecurrentFamily
from retrodict._family.scan import ScanFamily as ScanFamily
