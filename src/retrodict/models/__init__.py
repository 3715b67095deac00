"""Ready models, models from files, and parameters by name."""

from retrodict._interface import ModelError as ModelError
from retrodict.models._by_regime import canonical_order as canonical_order
from retrodict.models._by_regime import num_base_regimes as num_base_regimes
from retrodict.models._by_regime import with_regimes as with_regimes
from retrodict.models._coordinates import entry_name as entry_name
from retrodict.models._coordinates import is_memory as is_memory
from retrodict.models._coordinates import regime_names as regime_names
from retrodict.models._coordinates import state_names as state_names
from retrodict.models._counts import binomial_counts as binomial_counts
from retrodict.models._counts import negative_binomial_counts as negative_binomial_counts
from retrodict.models._counts import poisson_counts as poisson_counts
from retrodict.models._equations import MODELS as MODELS
from retrodict.models._neural import neural_decoder as neural_decoder
from retrodict.models._parameters import fix_parameters as fix_parameters
from retrodict.models._parameters import named_parameters as named_parameters
from retrodict.models._parameters import parameter_domains as parameter_domains
from retrodict.models._parameters import with_parameters as with_parameters
from retrodict.models._registry import READY as READY
from retrodict.models._registry import Option as Option
from retrodict.models._registry import from_options as from_options
from retrodict.models._registry import start_from as start_from
from retrodict.models._structural import autoregressive as autoregressive
from retrodict.models._structural import local_level as local_level
from retrodict.models._structural import local_trend as local_trend
from retrodict.models._structural import seasonal as seasonal
from retrodict.models._switching import hmm as hmm
from retrodict.models._switching import markov_switching as markov_switching
from retrodict.models._switching import recurrent_switching as recurrent_switching
from retrodict.models._switching import switching_level as switching_level
from retrodict.models._toml import ModelSpec as ModelSpec
from retrodict.models._toml import load as load
from retrodict.models._toml import read_toml as read_toml
from retrodict.models._tracking import constant_velocity as constant_velocity
from retrodict.models._tracking import range_bearing as range_bearing
from retrodict.models._volatility import stochastic_volatility as stochastic_volatility

__all__ = [
    "ModelError",
    "autoregressive",
    "binomial_counts",
    "constant_velocity",
    "fix_parameters",
    "from_options",
    "hmm",
    "load",
    "local_level",
    "local_trend",
    "markov_switching",
    "named_parameters",
    "negative_binomial_counts",
    "neural_decoder",
    "parameter_domains",
    "poisson_counts",
    "range_bearing",
    "read_toml",
    "recurrent_switching",
    "seasonal",
    "start_from",
    "state_names",
    "stochastic_volatility",
    "switching_level",
    "with_parameters",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__.copy()
