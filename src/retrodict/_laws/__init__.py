"""Laws on state space: Gaussians, their scales, and mixtures."""

from retrodict._laws.gaussian import LOG_2PI as LOG_2PI
from retrodict._laws.gaussian import Diagonal as Diagonal
from retrodict._laws.gaussian import Gaussian as Gaussian
from retrodict._laws.gaussian import NaturalGaussian as NaturalGaussian
from retrodict._laws.gaussian import Scale as Scale
from retrodict._laws.gaussian import as_scale as as_scale
from retrodict._laws.gaussian import check_scale as check_scale
from retrodict._laws.gaussian import dense_scale as dense_scale
from retrodict._laws.gaussian import factor_of_covariance as factor_of_covariance
from retrodict._laws.gaussian import kl_divergence as kl_divergence
from retrodict._laws.gaussian import masked_scale as masked_scale
from retrodict._laws.gaussian import scale_diagonal as scale_diagonal
from retrodict._laws.gaussian import scale_dim as scale_dim
from retrodict._laws.gaussian import scale_inverse as scale_inverse
from retrodict._laws.gaussian import scale_log_det as scale_log_det
from retrodict._laws.gaussian import scale_matvec as scale_matvec
from retrodict._laws.gaussian import scale_solve as scale_solve
from retrodict._laws.gaussian import shape_of as shape_of
from retrodict._laws.gaussian import whitened_log_density as whitened_log_density
from retrodict._laws.mixture import GaussianMixture as GaussianMixture
