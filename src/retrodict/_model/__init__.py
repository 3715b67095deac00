"""State-space models: series, parameters, laws, kernels, and the model that joins them."""

from retrodict._model.distribution_kernel import DistributionKernel as DistributionKernel
from retrodict._model.gaussian import LOG_2PI as LOG_2PI
from retrodict._model.gaussian import Diagonal as Diagonal
from retrodict._model.gaussian import Gaussian as Gaussian
from retrodict._model.gaussian import NaturalGaussian as NaturalGaussian
from retrodict._model.gaussian import Scale as Scale
from retrodict._model.gaussian import dense_scale as dense_scale
from retrodict._model.gaussian import kl_divergence as kl_divergence
from retrodict._model.gaussian import masked_scale as masked_scale
from retrodict._model.gaussian import scale_diagonal as scale_diagonal
from retrodict._model.gaussian import scale_inverse as scale_inverse
from retrodict._model.gaussian import scale_log_det as scale_log_det
from retrodict._model.gaussian import scale_solve as scale_solve
from retrodict._model.gaussian import shape_of as shape_of
from retrodict._model.gaussian import whitened_log_density as whitened_log_density
from retrodict._model.gaussian_kernel import (
    AbstractLinearGaussianKernel as AbstractLinearGaussianKernel,
)
from retrodict._model.gaussian_kernel import LinearGaussianKernel as LinearGaussianKernel
from retrodict._model.gaussian_kernel import NonlinearGaussianKernel as NonlinearGaussianKernel
from retrodict._model.gaussian_kernel import (
    VaryingLinearGaussianKernel as VaryingLinearGaussianKernel,
)
from retrodict._model.kernel import AbstractGaussianKernel as AbstractGaussianKernel
from retrodict._model.kernel import AbstractKernel as AbstractKernel
from retrodict._model.kernel import Distribution as Distribution
from retrodict._model.kernel import require_input as require_input
from retrodict._model.mixture import GaussianMixture as GaussianMixture
from retrodict._model.model import AbstractModel as AbstractModel
from retrodict._model.model import StateSpaceModel as StateSpaceModel
from retrodict._model.model import check_densities as check_densities
from retrodict._model.model import is_linear_gaussian as is_linear_gaussian
from retrodict._model.model import prepare_data as prepare_data
from retrodict._model.model import prepare_data_batch as prepare_data_batch
from retrodict._model.model import prepare_data_row as prepare_data_row
from retrodict._model.model import prepare_path as prepare_path
from retrodict._model.model import require_model as require_model
from retrodict._model.model import shape_of_draw as shape_of_draw
from retrodict._model.parameters import UNBOUNDED as UNBOUNDED
from retrodict._model.parameters import AbstractConstrained as AbstractConstrained
from retrodict._model.parameters import AbstractParameter as AbstractParameter
from retrodict._model.parameters import AbstractTied as AbstractTied
from retrodict._model.parameters import AbstractWhole as AbstractWhole
from retrodict._model.parameters import Bounded as Bounded
from retrodict._model.parameters import Frozen as Frozen
from retrodict._model.parameters import Positive as Positive
from retrodict._model.parameters import PositiveTril as PositiveTril
from retrodict._model.parameters import StationaryCoefficients as StationaryCoefficients
from retrodict._model.parameters import as_parameter as as_parameter
from retrodict._model.parameters import check_lower as check_lower
from retrodict._model.parameters import partial_autocorrelations as partial_autocorrelations
from retrodict._model.parameters import unwrap as unwrap
from retrodict._model.series import Series as Series
from retrodict._model.series import convert_row as convert_row
from retrodict._model.series import fill_padding as fill_padding
from retrodict._model.series import prepare_batch as prepare_batch
from retrodict._model.series import prepare_inputs as prepare_inputs
from retrodict._model.series import prepare_length as prepare_length
from retrodict._model.series import prepare_row as prepare_row
from retrodict._model.series import prepare_rows as prepare_rows
from retrodict._model.series import prepare_series as prepare_series
from retrodict._model.series import repeat_last_row as repeat_last_row
