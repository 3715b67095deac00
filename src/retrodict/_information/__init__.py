"""How well data determine learned parameters: observed information and standard errors."""

from retrodict._information.driver import parameter_errors as parameter_errors
from retrodict._information.result import ParameterErrors as ParameterErrors
