"""Exact smoothers: Kalman for linear-Gaussian models, grids for states of dimension 1 or 2."""

from retrodict._exact.grid.diagnosis import Status as Status
from retrodict._exact.grid.diagnosis import first_violation as first_violation
from retrodict._exact.grid.mesh import Grid as Grid
from retrodict._exact.grid.posterior import GridPosterior as GridPosterior
from retrodict._exact.grid.smoother import grid_smoother as grid_smoother
from retrodict._exact.grid.smoother import increments as increments
from retrodict._exact.grid.smoother import log_emission as log_emission
from retrodict._exact.grid.smoother import log_prior as log_prior
from retrodict._exact.grid.transition import Kind as Kind
from retrodict._exact.grid.transition import blocked_operator as blocked_operator
from retrodict._exact.grid.transition import densities as densities
from retrodict._exact.grid.transition import kind_of as kind_of
from retrodict._exact.grid.transition import operators as operators
from retrodict._exact.kalman_filter import Filtered as Filtered
from retrodict._exact.kalman_filter import Prior as Prior
from retrodict._exact.kalman_filter import Transition as Transition
from retrodict._exact.kalman_filter import Whitened as Whitened
from retrodict._exact.kalman_filter import backward_kernels as backward_kernels
from retrodict._exact.kalman_filter import reduce_rows as reduce_rows
from retrodict._exact.kalman_filter import whiten as whiten
from retrodict._exact.kalman_smoother import KalmanPosterior as KalmanPosterior
from retrodict._exact.kalman_smoother import check_linear_gaussian as check_linear_gaussian
from retrodict._exact.kalman_smoother import kalman_smoother as kalman_smoother
from retrodict._exact.kalman_smoother import log_evidence_of as log_evidence_of
from retrodict._exact.kalman_smoother import smooth_series as smooth_series
from retrodict._exact.parallel_filter import filter_laws_in_parallel as filter_laws_in_parallel
