"""Switching models: regimes and continuous states together."""

from retrodict.switching.autoregression import markov_autoregression as markov_autoregression
from retrodict.switching.chain import SwitchingChain as SwitchingChain
from retrodict.switching.chain import SwitchingMarginals as SwitchingMarginals
from retrodict.switching.elbo import elbo as elbo
from retrodict.switching.elbo_of_rows import switching_elbo_of_rows as switching_elbo_of_rows
from retrodict.switching.em import em as em
from retrodict.switching.enumeration import enumerate_regimes as enumerate_regimes
from retrodict.switching.evidence import log_evidence as log_evidence
from retrodict.switching.family import SwitchingFamily as SwitchingFamily
from retrodict.switching.fit_evidence import fit_evidence as fit_evidence
from retrodict.switching.fit_result import SwitchingFit as SwitchingFit
from retrodict.switching.forecast import SwitchingForecast as SwitchingForecast
from retrodict.switching.forecast import forecast as forecast
from retrodict.switching.forecast import impute as impute
from retrodict.switching.forecast import predictive as predictive
from retrodict.switching.forward_backward import forward_backward as forward_backward
from retrodict.switching.forward_backward_batch import RegimeProbabilities as RegimeProbabilities
from retrodict.switching.forward_backward_batch import (
    forward_backward_batch as forward_backward_batch,
)
from retrodict.switching.gaussian_sum import SwitchingPosterior as SwitchingPosterior
from retrodict.switching.gaussian_sum import gpb2_smoother as gpb2_smoother
from retrodict.switching.gaussian_sum import imm_smoother as imm_smoother
from retrodict.switching.grid import SwitchingGridPosterior as SwitchingGridPosterior
from retrodict.switching.grid import grid_smoother as grid_smoother
from retrodict.switching.histories import RegimeHistories as RegimeHistories
from retrodict.switching.histories import base_probabilities as base_probabilities
from retrodict.switching.importance import SwitchingImportance as SwitchingImportance
from retrodict.switching.importance import importance_smoother as importance_smoother
from retrodict.switching.information import parameter_errors as parameter_errors
from retrodict.switching.initialise import initialise as initialise
from retrodict.switching.mixture import Mixture as Mixture
from retrodict.switching.mixture import Moves as Moves
from retrodict.switching.model import SwitchingModel as SwitchingModel
from retrodict.switching.ordering import canonical_order as canonical_order
from retrodict.switching.ordering import match_regimes as match_regimes
from retrodict.switching.ordering import permute as permute
from retrodict.switching.particle_smoother import (
    RaoBlackwellisedPosterior as RaoBlackwellisedPosterior,
)
from retrodict.switching.particle_smoother import (
    rao_blackwellised_smoother as rao_blackwellised_smoother,
)
from retrodict.switching.product import product_model as product_model
from retrodict.switching.regimes import AbstractRegimes as AbstractRegimes
from retrodict.switching.regimes import Regimes as Regimes
from retrodict.switching.viterbi import most_probable_path as most_probable_path

__all__ = [
    "AbstractRegimes",
    "Mixture",
    "Moves",
    "RegimeHistories",
    "RegimeProbabilities",
    "Regimes",
    "SwitchingChain",
    "SwitchingFamily",
    "SwitchingFit",
    "SwitchingForecast",
    "SwitchingImportance",
    "SwitchingMarginals",
    "SwitchingModel",
    "SwitchingPosterior",
    "base_probabilities",
    "canonical_order",
    "elbo",
    "em",
    "enumerate_regimes",
    "fit_evidence",
    "forecast",
    "forward_backward",
    "forward_backward_batch",
    "gpb2_smoother",
    "grid_smoother",
    "imm_smoother",
    "importance_smoother",
    "impute",
    "initialise",
    "log_evidence",
    "markov_autoregression",
    "match_regimes",
    "most_probable_path",
    "parameter_errors",
    "permute",
    "predictive",
    "product_model",
    "rao_blackwellised_smoother",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__.copy()
