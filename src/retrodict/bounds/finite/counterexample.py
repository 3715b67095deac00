"""A counterexample to Proposition 3.1 as printed."""

import numpy as np

from retrodict.bounds.finite.problem import FiniteProblem


def two_state_counterexample(e: float = 0.05, filed: int = 0) -> FiniteProblem:
    """Return the smallest counterexample to Proposition 3.1 of the paper as printed.

    Three independent fair coins with uninformative observations; the approximation is exact, except
    for P(x_1 = 0) = ½ + e. The error on f(x_1), f = ±1, is 2e, and the printed right-hand side
    is 16 e² / (1 - 2e): smaller for every e < 1/10.

    Example:
        >>> import retrodict as rd
        >>> bounds = rd.bounds.finite_bounds(rd.bounds.two_state_counterexample())
        >>> f"{float(bounds.error):.4f} > {float(bounds.printed_proposition):.4f}"
        '0.1000 > 0.0444'

    Args:
        e: the error of the middle coin, between 0 and ½.
        filed: the increment that contains f(x_1): 0 for h_0(x_0, x_1), with the fair coin as q̃_1,
            or 1 for h_1(x_1, x_2), with the coin of the approximation as q̃_1.
    """
    if not 0 < e < 0.5:
        raise ValueError(f"e must lie between 0 and ½, got {e}.")
    if filed not in (0, 1):
        raise ValueError(
            f"filed must be 0, for h_0(x_0, x_1), or 1, for h_1(x_1, x_2), got {filed}."
        )
    fair, biased, sign = np.full(2, 0.5), np.array([0.5 + e, 0.5 - e]), np.array([1.0, -1.0])
    functional = np.zeros((2, 2, 2))
    functional[filed] = sign[None, :] if filed == 0 else sign[:, None]
    return FiniteProblem.from_model(
        prior=fair,
        transitions=np.full((2, 2, 2), 0.5),
        likelihoods=np.ones((3, 2)),
        kernels=np.stack([np.tile(fair, (2, 1)), np.tile(biased, (2, 1))]),
        filters=np.stack([fair, fair if filed == 0 else biased, fair]),
        functional=functional,
    )
