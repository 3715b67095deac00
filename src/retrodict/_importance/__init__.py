"""Chains corrected by weights: exact in the limit, whatever the chain."""

from retrodict._importance.bound import importance_weighted_bound as importance_weighted_bound
from retrodict._importance.guided import guided_smoother as guided_smoother
from retrodict._importance.guided_posterior import GuidedPosterior as GuidedPosterior
from retrodict._importance.smoother import ImportancePosterior as ImportancePosterior
from retrodict._importance.smoother import importance_smoother as importance_smoother
