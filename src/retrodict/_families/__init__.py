"""Amortised variational families: maps from a series to a backward chain."""

from retrodict._families.assimilation import AssimilationFamily as AssimilationFamily
from retrodict._families.base import AbstractFactorFamily as AbstractFactorFamily
from retrodict._families.base import AbstractFamily as AbstractFamily
from retrodict._families.base import AbstractLinearGaussianFamily as AbstractLinearGaussianFamily
from retrodict._families.base import AbstractSampledFamily as AbstractSampledFamily
from retrodict._families.base import Factor as Factor
from retrodict._families.base import advance_over as advance_over
from retrodict._families.base import check_fits as check_fits
from retrodict._families.base import factors as factors
from retrodict._families.base import infer_series as infer_series
from retrodict._families.base import prepare_for as prepare_for
from retrodict._families.base import prepare_row as prepare_row
from retrodict._families.base import read_row as read_row
from retrodict._families.conjugate import ConjugateFamily as ConjugateFamily
from retrodict._families.gated import GatedFamily as GatedFamily
from retrodict._families.kalman import KalmanFamily as KalmanFamily
from retrodict._families.kalman import input_dim_of as input_dim_of
from retrodict._families.mixture import MixtureFamily as MixtureFamily
from retrodict._families.nonlinear import NonlinearFamily as NonlinearFamily
from retrodict._families.recurrent import RecurrentFamily as RecurrentFamily
from retrodict._families.scan import ScanFamily as ScanFamily
