"""Smoothers that linearise a model along a path."""

from retrodict._linearised.moments import check_moments as check_moments
from retrodict._linearised.moments import law_moments as law_moments
from retrodict._linearised.posterior import LinearisedPosterior as LinearisedPosterior
from retrodict._linearised.recursion import linearise as linearise
from retrodict._linearised.recursion import whiten_emission as whiten_emission
from retrodict._linearised.rules import AbstractRule as AbstractRule
from retrodict._linearised.rules import AbstractSigmaPoints as AbstractSigmaPoints
from retrodict._linearised.rules import Affine as Affine
from retrodict._linearised.rules import Cubature as Cubature
from retrodict._linearised.rules import GaussHermite as GaussHermite
from retrodict._linearised.rules import Taylor as Taylor
from retrodict._linearised.rules import Unscented as Unscented
from retrodict._linearised.smoother import extended_smoother as extended_smoother
from retrodict._linearised.smoother import iterated_smoother as iterated_smoother
from retrodict._linearised.smoother import smooth_from_paths as smooth_from_paths
from retrodict._linearised.smoother import unscented_smoother as unscented_smoother
