"""Options of `fit`: what is maximised, and how."""

import dataclasses
import math
from collections.abc import Callable

import optax

from retrodict._arrays import Scalar, check_count
from retrodict._expectations import AbstractEstimator
from retrodict._model import AbstractModel
from retrodict.distributed import Parallel


@dataclasses.dataclass(frozen=True)
class Objective:
    """The objective of `fit`: the ELBO, the rows that a step reads, and how they are computed.

    Example:
        >>> import retrodict as rd
        >>> rd.Objective(estimator=rd.BackwardSampling(4), window=128).window
        128

    Attributes:
        estimator: how the ELBO is estimated. By default in closed form for linear-Gaussian models,
            by quadrature for one or two state dimensions, and with one draw of the emission term
            for more; for families whose chains are sampled, with one path per series, or one per
            component of a terminal mixture, without the score of the chain.
        log_prior: a log density of the model's parameters, for maximum a posteriori estimates;
            called with the unwrapped model.
        window: the number of rows of each series per step, for long series. The family runs up to
            the window without a gradient, and the step ascends the increment of the ELBO over the
            window. `None` for all rows.
        growing: whether to train on prefixes that double in length first, for half of the steps.
        parallel: whether series are processed in O(log n) depth, for long series on accelerators
            and a family that is parallel in time; or a `time_mesh`, over whose devices the rows are
            sharded. Not with a `window` or `remat`.
        remat: whether rows are recomputed for derivatives instead of stored, so that memory grows
            with the square root of the number of rows per step; or the number of rows to store at a
            time. A step takes longer for short series.

    Raises:
        ValueError: if an option is out of range, or two options exclude each other.
        TypeError: if an option is of the wrong type.
    """

    estimator: AbstractEstimator | None = None
    log_prior: Callable[[AbstractModel], Scalar] | None = None
    window: int | None = None
    growing: bool = False
    parallel: Parallel = False
    remat: bool | int = False

    def __post_init__(self) -> None:
        if self.window is not None:
            object.__setattr__(self, "window", check_count(self.window, "window"))
        if not isinstance(self.remat, bool):
            check_count(self.remat, "remat")
        for name, value in (("window", self.window is not None), ("remat", self.remat)):
            if self.parallel and value:
                raise ValueError(
                    f"`{name}` processes a series row by row and excludes `parallel`, got"
                    f" {name}={getattr(self, name)!r} and parallel={self.parallel!r}. Leave out one"
                    " of them."
                )

    def segment(self, num_times: int) -> int | None:
        """Return the number of rows to store at a time, about √n by default; `None` for all."""
        if self.remat is True:
            rows = num_times if self.window is None else min(self.window, num_times)
            return max(1, math.isqrt(rows))
        return int(self.remat) or None


@dataclasses.dataclass(frozen=True)
class Optimisation:
    """The optimisation of `fit`: minibatches, optimiser, starts and evaluations.

    Example:
        >>> import retrodict as rd
        >>> rd.Optimisation(batch_size=32, restarts=4).learning_rate
        0.01

    Attributes:
        batch_size: the number of series per step.
        learning_rate: the largest rate of the default optimiser, which is Adam with warm-up, cosine
            decay and clipping.
        optimiser: an optax transformation to use instead.
        restarts: the number of starts to train side by side: the given one and random ones. A
            family without random weights has one.
        tournament: the fraction of the steps after which only the best start continues; 1 to train
            all of them to the end.
        patience: the number of chunks without a better evaluation after which the fit stops;
            `None` for no limit.
        chunk_size: the number of steps between two evaluations.
        prepare: whether to set the units of the family first; `False` continues with a family that
            was trained before.

    Raises:
        ValueError: if an option is out of range.
        TypeError: if an option is of the wrong type.
    """

    batch_size: int = 64
    learning_rate: float = 1e-2
    optimiser: optax.GradientTransformation | None = None
    restarts: int = 1
    tournament: float = 0.3
    patience: int | None = None
    chunk_size: int = 100
    prepare: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "restarts", "chunk_size"):
            object.__setattr__(self, name, check_count(getattr(self, name), name))
        if not 0 < self.tournament <= 1:
            raise ValueError(
                f"`tournament` must be a fraction of the steps in (0, 1], got {self.tournament}."
            )
