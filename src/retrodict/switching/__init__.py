"""Switching models: regimes and continuous states together."""

from retrodict.switching.chain import Mixture as Mixture
from retrodict.switching.chain import Moves as Moves
from retrodict.switching.chain import SwitchingChain as SwitchingChain
from retrodict.switching.chain import SwitchingMarginals as SwitchingMarginals
from retrodict.switching.elbo import elbo as elbo
from retrodict.switching.elbo_of_rows import switching_elbo_of_rows as switching_elbo_of_rows
from retrodict.switching.em import SwitchingEMResult as SwitchingEMResult
from retrodict.switching.em import em as em
from retrodict.switching.enumeration import enumerate_regimes as enumerate_regimes
from retrodict.switching.family import SwitchingFamily as SwitchingFamily
from retrodict.switching.forward_backward import forward_backward as forward_backward
from retrodict.switching.gaussian_sum import SwitchingPosterior as SwitchingPosterior
from retrodict.switching.gaussian_sum import gpb2_smoother as gpb2_smoother
from retrodict.switching.gaussian_sum import imm_smoother as imm_smoother
from retrodict.switching.importance import SwitchingImportance as SwitchingImportance
from retrodict.switching.importance import importance_smoother as importance_smoother
from retrodict.switching.initialise import initialise as initialise
from retrodict.switching.model import SwitchingModel as SwitchingModel
from retrodict.switching.particle_smoother import (
    RaoBlackwellisedPosterior as RaoBlackwellisedPosterior,
)
from retrodict.switching.particle_smoother import (
    rao_blackwellised_smoother as rao_blackwellised_smoother,
)
from retrodict.switching.regimes import AbstractRegimes as AbstractRegimes
from retrodict.switching.regimes import Regimes as Regimes

__all__ = [
    "AbstractRegimes",
    "Mixture",
    "Moves",
    "RaoBlackwellisedPosterior",
    "Regimes",
    "SwitchingChain",
    "SwitchingEMResult",
    "SwitchingFamily",
    "SwitchingMarginals",
    "SwitchingModel",
    "SwitchingPosterior",
    "elbo",
    "em",
    "enumerate_regimes",
    "forward_backward",
    "gpb2_smoother",
    "imm_smoother",
    "importance_smoother",
    "initialise",
    "rao_blackwellised_smoother",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__.copy()
