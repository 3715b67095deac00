"""Exact inference in linear-Gaussian models, sequential or parallel in time."""

from retrodict._kalman._smoother import KalmanPosterior as KalmanPosterior
from retrodict._kalman._smoother import kalman_smoother as kalman_smoother
