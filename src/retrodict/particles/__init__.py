"""Particle filters and smoothers, and importance sampling of whole paths."""

from retrodict.particles.backward_samplers import AbstractBackwardSampler as AbstractBackwardSampler
from retrodict.particles.backward_samplers import ExactBackward as ExactBackward
from retrodict.particles.backward_samplers import Genealogy as Genealogy
from retrodict.particles.backward_samplers import MCMCBackward as MCMCBackward
from retrodict.particles.backward_samplers import RejectionBackward as RejectionBackward
from retrodict.particles.backward_samplers import descend as descend
from retrodict.particles.backward_weights import BackwardWeights as BackwardWeights
from retrodict.particles.ffbsi import ParticlePosterior as ParticlePosterior
from retrodict.particles.ffbsi import ffbsi as ffbsi
from retrodict.particles.guided_smoother import GuidedPosterior as GuidedPosterior
from retrodict.particles.guided_smoother import guided_smoother as guided_smoother
from retrodict.particles.importance import AT_ONCE as AT_ONCE
from retrodict.particles.importance import AbstractImportance as AbstractImportance
from retrodict.particles.importance import ImportancePosterior as ImportancePosterior
from retrodict.particles.importance import correction as correction
from retrodict.particles.importance import importance_smoother as importance_smoother
from retrodict.particles.importance import importance_weighted_bound as importance_weighted_bound
from retrodict.particles.importance import log_weights_of as log_weights_of
from retrodict.particles.moments import DEGENERATE as DEGENERATE
from retrodict.particles.moments import FINE as FINE
from retrodict.particles.moments import refuse_failure as refuse_failure
from retrodict.particles.moments import status_of as status_of
from retrodict.particles.moments import status_words as status_words
from retrodict.particles.online import AdditivePosterior as AdditivePosterior
from retrodict.particles.online import AdditiveSmoother as AdditiveSmoother
from retrodict.particles.online import OnlineState as OnlineState
from retrodict.particles.online import average_over_all as average_over_all
from retrodict.particles.online import average_over_draws as average_over_draws
from retrodict.particles.online import forward_smoother as forward_smoother
from retrodict.particles.online import paris as paris
from retrodict.particles.online import plus as plus
from retrodict.particles.online import sum_of_terms as sum_of_terms
from retrodict.particles.pareto import K_HAT_GOOD as K_HAT_GOOD
from retrodict.particles.pareto import pareto_shape as pareto_shape
from retrodict.particles.particle_filter import ParticleFilterPosterior as ParticleFilterPosterior
from retrodict.particles.particle_filter import particle_filter as particle_filter
from retrodict.particles.power_of_two import LOG2_E as LOG2_E
from retrodict.particles.proposal import AbstractProposal as AbstractProposal
from retrodict.particles.proposal import ChainProposal as ChainProposal
from retrodict.particles.proposal import Guided as Guided
from retrodict.particles.proposal import mean_lookahead as mean_lookahead
from retrodict.particles.resampling import Scheme as Scheme
from retrodict.particles.resampling import check_scheme as check_scheme
from retrodict.particles.resampling import check_threshold as check_threshold
from retrodict.particles.resampling import cumulative as cumulative
from retrodict.particles.resampling import resample as resample
from retrodict.particles.resampling import uniforms as uniforms
from retrodict.particles.tempered import tempered_smoother as tempered_smoother

__all__ = [
    "AbstractBackwardSampler",
    "AbstractProposal",
    "ChainProposal",
    "ExactBackward",
    "Genealogy",
    "Guided",
    "MCMCBackward",
    "RejectionBackward",
    "ffbsi",
    "forward_smoother",
    "guided_smoother",
    "importance_smoother",
    "importance_weighted_bound",
    "mean_lookahead",
    "paris",
    "particle_filter",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__.copy()
