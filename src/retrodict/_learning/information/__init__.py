"""How well data determine learned parameters: observed information and standard errors."""

from retrodict._learning.information.parameter_errors import parameter_errors as parameter_errors
from retrodict._learning.information.result import ParameterErrors as ParameterErrors
