"""How well data determine learned parameters: observed information and standard errors."""
