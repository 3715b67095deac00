"""Expectation-maximisation of switching models with a continuous state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._learning import ProgressLine
from retrodict._model import (
    AbstractLinearGaussianKernel,
    Gaussian,
    Series,
    unwrap,
)
from retrodict.switching.finite_em import finite_em
from retrodict.switching.fit_result import SwitchingFit, num_rows
from retrodict.switching.initialise import initialise
from retrodict.switching.maximise import least_rows, maximise
from retrodict.switching.model import (
    SwitchingModel,
    each,
    prepare_switching_batch,
    require_switching,
)
from retrodict.switching.moments import Paths, RegimeMoments, draw_paths, pool

PATIENCE = 3
"""EM has converged if the evidence did not improve on its best value in so many iterations."""

MAX_RESTARTS = 2
"""A regime without data is restarted at most this many times per start."""


def em(
    key: PRNGKey,
    model: SwitchingModel,
    ys: Any,
    *,
    num_iterations: int = 50,
    num_starts: int = 1,
    num_samples: int = 20,
    tolerance: float = 1e-6,
    progress: bool = False,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> SwitchingFit:
    """Learn a switching model by expectation-maximisation.

    The E-step draws paths of regimes from GPB2's chain and smooths the states given each path
    exactly. The random numbers are the same in each iteration, so that the iterations settle. The
    M-step is in closed form: weighted regressions per regime, or over all rows for parts that the
    regimes share, and frequencies of moves, or their multinomial logistic regression on states and
    inputs. Noise is kept above 1e-4 of the standard deviation of its variable. Parts in `Frozen`,
    and kernels that are not `LinearGaussianKernel`, are unchanged. A regime that loses its rows is
    restarted twice, from the rows that are explained worst.

    Recurrent regimes inform the states. For them the E-step draws states as well, from the chain of
    GPB2 with points. A model without a continuous state has an exact E-step.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(0.9 * eye, zero + b, eye) for b in (-2.0, 2.0)],
        ...     emission=rd.Frozen(rd.LinearGaussianKernel(eye, zero, 0.1 * eye)),
        ... )
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=40)
        >>> result = rd.switching.em(jax.random.key(1), model, ys, num_iterations=3)
        >>> bool(result.history[-1] > result.history[0])
        True

    Args:
        key: a typed key.
        model: the model to start from.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
        num_iterations: the largest number of M-steps per start.
        num_starts: the number of starts. The first one is the model, the others are drawn by
            `initialise`.
        num_samples: the number of paths of regimes per series in each E-step.
        tolerance: the gain of the evidence, in nats per time step, below which an iteration is no
            improvement.
        progress: whether to show a progress line.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.

    Returns:
        The best model of all starts and iterations. Its history is GPB2's log-evidence before each
        M-step of the best start and after the last one, in nats per time step. The status is
        `"converged"` if the evidence stopped to rise, `"finished"` if all iterations were used,
        `"stopped early"` if the evidence was non-finite. The issues name regimes with fewer rows
        than their kernels have regressors, which restarts did not mend.
    """
    require_switching(model, "switching.em")
    check_key(key, "switching.em")
    num_iterations = check_count(num_iterations, "num_iterations")
    num_starts = check_count(num_starts, "num_starts")
    num_samples = check_count(num_samples, "num_samples")
    options = {"mask": mask, "inputs": inputs, "length": length}
    if model.is_finite:
        count = {"num_iterations": num_iterations, "num_starts": num_starts}
        return finite_em(key, model, ys, tolerance=tolerance, **count, **options)
    _check_linear(model)
    batch = prepare_switching_batch(unwrap(model), ys, **options)
    if batch.mask is not None and not bool(jnp.any(batch.mask)):
        raise ValueError("switching.em expects observed entries in ys, got none: all are missing.")
    line = _progress_line(progress, num_starts * num_iterations)
    runs = []
    for start in range(num_starts):
        if start:
            restart_key = jax.random.fold_in(key, start)
            first = initialise(restart_key, model, ys, **options)
        else:
            first = model
        run = _Run(batch, jax.random.fold_in(key, 0), num_samples, tolerance, first)
        show = (
            None if line is None else lambda i, value, s=start: line(s * num_iterations + i, value)
        )
        runs.append(run.iterate(num_iterations, show))
    best = max(runs, key=lambda run: run.best.evidence)
    return best.result(np.array([run.best.evidence * run.num_rows for run in runs]))


def _progress_line(progress: bool, num_steps: int) -> ProgressLine | None:
    return ProgressLine("log-evidence {:.4f} nats per time step", num_steps) if progress else None


def _check_linear(model: SwitchingModel) -> None:
    """Refuse models whose states are not linear Gaussian given the regimes."""
    fixed = unwrap(model)
    kernels = (*each(fixed.transition), *each(fixed.emission))
    if not all(isinstance(law, Gaussian) for law in each(fixed.prior)) or not all(
        isinstance(kernel, AbstractLinearGaussianKernel) for kernel in kernels
    ):
        raise TypeError(
            "switching.em expects Gaussian priors and linear-Gaussian kernels in each regime. Learn"
            " other models with switching.fit_evidence, or with fit and a SwitchingFamily."
        )


class _Best(NamedTuple):
    """The best iteration so far."""

    evidence: float
    model: SwitchingModel
    occupancy: Float[np.ndarray, "regime"]


class _Run:
    """The iterations from one start."""

    def __init__(
        self,
        batch: Series,
        key: PRNGKey,
        num_samples: int,
        tolerance: float,
        model: SwitchingModel,
    ):
        self.batch, self.key, self.num_samples = batch, key, num_samples
        self.tolerance, self.model = tolerance, model
        self.history: list[float] = []
        self.status = "finished"
        self.restarts = np.zeros(model.num_regimes, int)
        self.least = least_rows(model)
        self.best = _Best(-np.inf, model, np.zeros(model.num_regimes))
        self.num_rows = num_rows(batch)

    def iterate(self, num_iterations: int, show: Any) -> "_Run":
        """Alternate E-steps and M-steps."""
        since_best = 0
        for iteration in range(num_iterations + 1):
            paths = draw_paths(unwrap(self.model), self.batch, self.key, self.num_samples)
            moments = pool(paths, self.batch, self.model.num_regimes)
            evidence = float(jnp.sum(paths.log_evidence)) / self.num_rows
            self.history.append(evidence)
            if show is not None:
                show(min(iteration + 1, num_iterations), -evidence)
            if not np.isfinite(evidence):
                self.status = "stopped early"
                break
            occupancy = np.asarray(jnp.sum(moments.probabilities, axis=(0, 1)))
            since_best = 0 if evidence > self.best.evidence + self.tolerance else since_best + 1
            if evidence > self.best.evidence:
                self.best = _Best(evidence, self.model, occupancy)
            restarted = self._restarted(paths, occupancy) if iteration < num_iterations else None
            if restarted is not None:
                moments, since_best = restarted, 0
            elif since_best >= PATIENCE:
                self.status = "converged"
                break
            if iteration < num_iterations:
                self.model = maximise(self.model, moments, self.batch)
        return self

    def _restarted(
        self, paths: Paths, occupancy: Float[np.ndarray, "regime"]
    ) -> RegimeMoments | None:
        """Return moments in which a regime without data takes the worst-explained rows."""
        dead = np.flatnonzero((occupancy < self.least) & (self.restarts < MAX_RESTARTS))
        if not dead.size:
            return None
        regime = int(dead[0])
        self.restarts[regime] += 1
        count = max(2 * self.least, int(self.num_rows) // (4 * len(occupancy)))
        forced = _worst_rows(paths.increments, self.batch, count)
        forced = jnp.where(forced, regime, -1)
        return pool(paths, self.batch, len(occupancy), forced)

    def result(self, start_values: Float[np.ndarray, "start"]) -> SwitchingFit:
        """Return the best iteration."""
        occupancy = self.best.occupancy
        issues = tuple(
            f"regime {j} has {occupancy[j]:.2g} expected rows, and its kernels need {self.least}:"
            " use fewer regimes"
            for j in np.flatnonzero(occupancy < self.least)
        )
        return SwitchingFit(
            self.best.model,
            np.asarray(self.history),
            self.status,
            start_values,
            self.best.evidence * self.num_rows,
            issues,
        )


def _worst_rows(
    increments: Float[Array, "batch time"], batch: Series, count: int
) -> Bool[Array, "batch time"]:
    """Return which rows have the lowest log p(y_k | y_{0:k-1}), among those that exist."""
    values = np.array(increments)
    if batch.length is not None:
        times = np.arange(values.shape[1])
        values[times[None, :] >= np.asarray(batch.length)[:, None]] = np.inf
    order = np.argsort(values, axis=None)[:count]
    chosen = np.zeros(values.size, bool)
    chosen[order] = True
    return jnp.asarray(chosen.reshape(values.shape) & np.isfinite(values))
