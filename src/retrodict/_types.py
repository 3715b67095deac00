"""Names of array types.

Dimensions are called `time`, `state`, `obs`, `input`, `sample` and `batch` everywhere.
"""

from typing import TypeAlias

from jaxtyping import Array, Float, Key
from numpy.typing import ArrayLike as ArrayLike

PRNGKey: TypeAlias = Key[Array, ""]
Scalar: TypeAlias = Float[Array, ""]
State: TypeAlias = Float[Array, "state"]
Input: TypeAlias = Float[Array, "input"]
Value: TypeAlias = Float[Array, "out"]
"""A value of a kernel: a state or an observation."""
