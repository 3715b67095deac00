"""The dense-grid smoother for states of dimension 1 and 2, exact up to discretisation."""

from retrodict._exact.grid.mesh import Grid as Grid
from retrodict._exact.grid.posterior import GridPosterior as GridPosterior
from retrodict._exact.grid.smoother import grid_smoother as grid_smoother
