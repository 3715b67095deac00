"""Learning: families, models, or both, from data."""

from retrodict._fit.em import EMResult as EMResult
from retrodict._fit.em import em as em
from retrodict._fit.evidence import EvidenceResult as EvidenceResult
from retrodict._fit.evidence import fit_evidence as fit_evidence
from retrodict._fit.shared import SharedSeries as SharedSeries
from retrodict._fit.shared import own_share as own_share
from retrodict._fit.stored import AbstractSeriesStore as AbstractSeriesStore
from retrodict._fit.stored import Arrays as Arrays
from retrodict._fit.variational import FitResult as FitResult
from retrodict._fit.variational import fit as fit
