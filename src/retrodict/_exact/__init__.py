"""Exact smoothers: Kalman for linear-Gaussian models, grids for states of dimension 1 or 2."""

from retrodict._exact.gains import Prior as Prior
from retrodict._exact.gains import Transition as Transition
from retrodict._exact.gains import backward_gains as backward_gains
from retrodict._exact.grid.diagnosis import Status as Status
from retrodict._exact.grid.mesh import Grid as Grid
from retrodict._exact.grid.posterior import GridPosterior as GridPosterior
from retrodict._exact.grid.recursion import increments as increments
from retrodict._exact.grid.recursion import log_emission as log_emission
from retrodict._exact.grid.recursion import log_prior as log_prior
from retrodict._exact.grid.smoother import grid_smoother as grid_smoother
from retrodict._exact.grid.transition import BlockedTransition as BlockedTransition
from retrodict._exact.grid.transition import Kind as Kind
from retrodict._exact.grid.transition import densities as densities
from retrodict._exact.grid.transition import kind_of as kind_of
from retrodict._exact.grid.transition import operators as operators
from retrodict._exact.kalman_filter import backward_kernels as backward_kernels
from retrodict._exact.kalman_filter import filter_laws as filter_laws
from retrodict._exact.kalman_smoother import KalmanPosterior as KalmanPosterior
from retrodict._exact.kalman_smoother import check_linear_gaussian as check_linear_gaussian
from retrodict._exact.kalman_smoother import kalman_smoother as kalman_smoother
from retrodict._exact.kalman_smoother import log_evidence_of as log_evidence_of
from retrodict._exact.kalman_smoother import smooth_series as smooth_series
from retrodict._exact.whiten import Whitened as Whitened
from retrodict._exact.whiten import reduce_rows as reduce_rows
from retrodict._exact.whiten import whiten as whiten
