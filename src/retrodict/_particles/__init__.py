"""Particle filters and smoothers, and importance sampling of whole paths."""

from retrodict._particles.backward import AbstractBackwardSampler as AbstractBackwardSampler
from retrodict._particles.backward import ExactBackward as ExactBackward
from retrodict._particles.backward import Genealogy as Genealogy
from retrodict._particles.backward import MCMCBackward as MCMCBackward
from retrodict._particles.backward import RejectionBackward as RejectionBackward
from retrodict._particles.diagnosis import DEGENERATE as DEGENERATE
from retrodict._particles.diagnosis import FINE as FINE
from retrodict._particles.diagnosis import refuse_failure as refuse_failure
from retrodict._particles.ffbsi import ParticlePosterior as ParticlePosterior
from retrodict._particles.ffbsi import ffbsi as ffbsi
from retrodict._particles.guided_posterior import GuidedPosterior as GuidedPosterior
from retrodict._particles.guided_smoother import guided_smoother as guided_smoother
from retrodict._particles.importance_bound import (
    importance_weighted_bound as importance_weighted_bound,
)
from retrodict._particles.importance_smoother import ImportancePosterior as ImportancePosterior
from retrodict._particles.importance_smoother import importance_smoother as importance_smoother
from retrodict._particles.online import AdditivePosterior as AdditivePosterior
from retrodict._particles.online import OnlineSmoother as OnlineSmoother
from retrodict._particles.online import OnlineState as OnlineState
from retrodict._particles.online import forward_smoother as forward_smoother
from retrodict._particles.online import paris as paris
from retrodict._particles.pairs import Pairs as Pairs
from retrodict._particles.pairs import squared_distance as squared_distance
from retrodict._particles.pareto import K_HAT_GOOD as K_HAT_GOOD
from retrodict._particles.pareto import pareto_shape as pareto_shape
from retrodict._particles.particle_filter import ParticleFilterPosterior as ParticleFilterPosterior
from retrodict._particles.particle_filter import particle_filter as particle_filter
from retrodict._particles.path_weights import log_weights_of as log_weights_of
from retrodict._particles.proposal import AbstractProposal as AbstractProposal
from retrodict._particles.proposal import ChainProposal as ChainProposal
from retrodict._particles.proposal import Guided as Guided
from retrodict._particles.proposal import mean_lookahead as mean_lookahead
from retrodict._particles.tempered import tempered_smoother as tempered_smoother
