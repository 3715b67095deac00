"""The result of a check of a posterior: findings and figures, and how they are worded."""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict.bounds.reference import root_mean_square
from retrodict.particles import K_HAT_GOOD

MANY_MISSED = 0.05
"""The largest share of reference states outside of the chain before a mode counts as lost."""

MANY_NATS = 3.0
"""The largest gap of the ELBO to the evidence, unless `MANY_NATS_PER_ROW` allows more."""

MANY_NATS_PER_ROW = 0.05
"""The gap of a Gaussian law that is off by 0.3 standard deviations, or by a third in its scale."""

MAX_DISTANCE = 0.15
"""The largest Kolmogorov distance to the reference, as a root mean square over time. A mean that is
off by 0.4 standard deviations has this distance."""

Kind = Literal["particles", "evidence below", "mode loss", "wrong law", "loose ELBO", "thin tails"]
"""The findings of a check. The first two concern the reference, not the chain."""

AGAINST_REFERENCE: tuple[Kind, ...] = ("particles", "evidence below")

AGAINST_CHAIN: tuple[Kind, ...] = ("mode loss", "wrong law", "loose ELBO")
"""The findings that fail a check. Thin tails do not: path weights degenerate for long series."""

Verdict = Literal["passed", "failed", "not checked"]


class PosteriorCheck(eqx.Module):
    """The result of `check_posterior`.

    Attributes:
        k_hat: the Pareto shape of the weights p(x, y) / q(x) of its paths. Below 0.7 the weights
            can correct the chain; above, its tails are too thin or its mass is elsewhere. It grows
            with the length of the series.
        elbo: the ELBO of the chain by sampled paths.
        elbo_standard_error: its standard error.
        log_evidence: the reference's estimate of the log-evidence.
        log_evidence_standard_error: its standard error.
        missed: at each time, the share of the reference's states outside of the chain: further out,
            in Mahalanobis distance, than all but 0.1% of a Gaussian law with the chain's moments.
        distance: at each time, the largest Kolmogorov distance between the chain and the reference
            over coordinates, and in several dimensions over some other directions.
        kinds: the findings. `"particles"` and `"evidence below"` concern the reference; `"mode
            loss"`, `"wrong law"` and `"loose ELBO"` the chain. `"thin tails"` is a warning that
            weights would not correct whole paths. Empty if there is no finding.
        messages: one message per finding.
        reference: the method of the reference: `"grid"` or `"particles"`.
        meaning_of_gap: the interpretation of `gap`, in words.
        meaning_of_k_hat: the interpretation of `k_hat`.
    """

    meaning_of_gap: ClassVar[str] = "an estimate of KL(q ‖ posterior)"
    meaning_of_k_hat: ClassVar[str] = (
        f"importance weights can correct whole paths if it is below {K_HAT_GOOD}; it grows with the"
        " series length"
    )

    k_hat: Scalar
    elbo: Scalar
    elbo_standard_error: Scalar
    log_evidence: Scalar
    log_evidence_standard_error: Scalar
    missed: Float[Array, "time"]
    distance: Float[Array, "time"]
    kinds: tuple[Kind, ...] = eqx.field(static=True)
    messages: tuple[str, ...] = eqx.field(static=True)
    reference: Literal["grid", "particles"] = eqx.field(static=True)

    @property
    def gap(self) -> Scalar:
        """The estimated gap: log-evidence minus ELBO, in nats; an estimate of KL(q ‖ posterior)."""
        return self.log_evidence - self.elbo

    @property
    def verdict(self) -> Verdict:
        """`"failed"`, `"not checked"` or `"passed"`.

        Failed if a finding concerns the chain, not checked if only the reference failed.
        """
        if any(kind in AGAINST_CHAIN for kind in self.kinds):
            return "failed"
        return "not checked" if any(kind in AGAINST_REFERENCE for kind in self.kinds) else "passed"


def describe_figures(checks: Sequence[PosteriorCheck]) -> str:
    """Describe the worst figures of several series, with their limits."""
    shape = max(float(check.k_hat) for check in checks)
    words = f"{shape:.2f}" if math.isfinite(shape) else ("infinite" if shape > 0 else "none")
    of = f" of {len(checks)} series, at worst," if len(checks) > 1 else ""
    methods = " or ".join(sorted({check.reference for check in checks}))
    # Both ELBO and evidence are estimates, so that a gap of zero may come out negative.
    gap = max(0.0, *(float(check.gap) for check in checks))
    missed = max(float(np.max(check.missed)) for check in checks)
    distance = max(root_mean_square(check.distance) for check in checks)
    return (
        f"compared with a reference ({methods}), the Kolmogorov distance of its"
        f" marginals{of} is {distance:.2f} on average over time, up to {missed:.0%} of the states"
        f" are where it has no mass, and its ELBO is {gap:.1f} nats below the evidence (good: up"
        f" to {MAX_DISTANCE}, {MANY_MISSED:.0%}, and {MANY_NATS:.0f} nats or {MANY_NATS_PER_ROW}"
        f" nats per row); the Pareto shape of its path weights is {words}"
        f" ({PosteriorCheck.meaning_of_k_hat})"
    )
