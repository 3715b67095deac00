"""The dense-grid smoother, exact up to its grid, for states of dimension 1 and 2."""

from retrodict._grid.mesh import Grid as Grid
from retrodict._grid.posterior import GridPosterior as GridPosterior
from retrodict._grid.smoother import grid_smoother as grid_smoother
