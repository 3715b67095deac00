"""Learning of families and models from data, and standard errors of learned parameters."""

from retrodict._learning.coordinates import ModelCoordinates as ModelCoordinates
from retrodict._learning.coordinates import coordinates_of as coordinates_of
from retrodict._learning.dataset import batch_for as batch_for
from retrodict._learning.elbo_of_rows import elbo_of_rows as elbo_of_rows
from retrodict._learning.em import EMResult as EMResult
from retrodict._learning.em import beside_inputs as beside_inputs
from retrodict._learning.em import em as em
from retrodict._learning.em import is_frozen as is_frozen
from retrodict._learning.em import refuse_partly_missing_rows as refuse_partly_missing_rows
from retrodict._learning.em import regression as regression
from retrodict._learning.em import scale_like as scale_like
from retrodict._learning.fit import default_estimator as default_estimator
from retrodict._learning.fit import fit as fit
from retrodict._learning.fit_evidence import EvidenceResult as EvidenceResult
from retrodict._learning.fit_evidence import fit_evidence as fit_evidence
from retrodict._learning.fit_result import FitResult as FitResult
from retrodict._learning.information.parameter_errors import (
    errors_of_evidence as errors_of_evidence,
)
from retrodict._learning.information.parameter_errors import parameter_errors as parameter_errors
from retrodict._learning.information.result import ParameterErrors as ParameterErrors
from retrodict._learning.on_disk import AbstractSeriesStore as AbstractSeriesStore
from retrodict._learning.on_disk import Arrays as Arrays
from retrodict._learning.options import Objective as Objective
from retrodict._learning.options import Optimisation as Optimisation
from retrodict._learning.partition import Learn as Learn
from retrodict._learning.partition import Parts as Parts
from retrodict._learning.partition import partition as partition
from retrodict._learning.quasi_newton import minimise as minimise
from retrodict._learning.shared import SharedSeries as SharedSeries
from retrodict._learning.train import ProgressLine as ProgressLine
