"""Exact smoothing of linear-Gaussian models."""

from retrodict._kalman._smoother import KalmanPosterior as KalmanPosterior
from retrodict._kalman._smoother import check_linear_gaussian as check_linear_gaussian
from retrodict._kalman._smoother import kalman_smoother as kalman_smoother
from retrodict._kalman._smoother import log_evidence_of as log_evidence_of
from retrodict._kalman._smoother import smooth_series as smooth_series
