"""Names of array types.

Dimensions are called `time`, `state`, `obs`, `input`, `sample` and `batch` everywhere.
"""

from typing import TypeAlias

from jaxtyping import Array, Bool, Float, Int, Key
from numpy.typing import ArrayLike as ArrayLike

PRNGKey: TypeAlias = Key[Array, ""]
Scalar: TypeAlias = Float[Array, ""]
State: TypeAlias = Float[Array, "state"]
Obs: TypeAlias = Float[Array, "obs"]
Input: TypeAlias = Float[Array, "input"]
States: TypeAlias = Float[Array, "time state"]
Observations: TypeAlias = Float[Array, "time obs"]
Inputs: TypeAlias = Float[Array, "time input"]
Mask: TypeAlias = Bool[Array, "time obs"]
Length: TypeAlias = int | Int[Array, ""]
