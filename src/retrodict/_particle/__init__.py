"""Particle filters and smoothers."""

from retrodict._particle.backward import AbstractBackwardSampler as AbstractBackwardSampler
from retrodict._particle.backward import ExactBackward as ExactBackward
from retrodict._particle.backward import Genealogy as Genealogy
from retrodict._particle.backward import MCMCBackward as MCMCBackward
from retrodict._particle.backward import RejectionBackward as RejectionBackward
from retrodict._particle.filter import ParticleFilterPosterior as ParticleFilterPosterior
from retrodict._particle.filter import particle_filter as particle_filter
from retrodict._particle.online import AdditivePosterior as AdditivePosterior
from retrodict._particle.online import OnlineSmoother as OnlineSmoother
from retrodict._particle.online import OnlineState as OnlineState
from retrodict._particle.online import forward_smoother as forward_smoother
from retrodict._particle.online import paris as paris
from retrodict._particle.proposal import AbstractProposal as AbstractProposal
from retrodict._particle.proposal import ChainProposal as ChainProposal
from retrodict._particle.proposal import Guided as Guided
from retrodict._particle.proposal import mean_lookahead as mean_lookahead
from retrodict._particle.smoother import ParticlePosterior as ParticlePosterior
from retrodict._particle.smoother import ffbsi as ffbsi
