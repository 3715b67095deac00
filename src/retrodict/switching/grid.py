"""The grid smoother for one or two continuous states with K regimes, exact up to discretisation."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._arrays import Scalar, is_concrete
from retrodict._exact import (
    Diagnostics,
    ErrorEstimate,
    Grid,
    Kind,
    Operator,
    Passes,
    at_points,
    check_grid,
    correction,
    diagnose,
    estimate_errors,
    judge,
    kind_of,
    mass_outside,
    moments_on_points,
    operators,
    refuse_inadequate,
)
from retrodict._model import Series, unwrap
from retrodict.switching.chain import SwitchingMarginals
from retrodict.switching.model import (
    SwitchingModel,
    emission_log_probs,
    of_regime,
    prepare_switching,
    prior_log_probs,
    require_state,
)

Law: TypeAlias = Float[Array, "regime point"]
"""Probabilities of regimes and points, or a function of both."""


Kinds: TypeAlias = tuple[Kind, ...]
"""How the transition of each regime is applied."""


class SwitchingGridPosterior(eqx.Module):
    """The law of regimes and states given the whole series, on the points of a grid.

    Attributes:
        grid: the grid.
        weights: P(z_k = j, x_k = point | y), of shape `(time, regime, point)`.
        filter_weights: the same given y_{0:k}.
        marginals: smoothed moments of regimes and states.
        log_evidence: log p(y), the sum of the increments.
        log_evidence_increments: log p(y_k | y_{0:k-1}), zero where there is no row.
        error: estimated errors of the log-evidence, the means and the covariances.
        diagnostics: measures of how well the grid represents the posterior, per time.
        status: 0 if the grid is good enough; otherwise as for `retrodict.grid_smoother`. `check`
            raises an error with the explanation.
        status_time: the time at which the criterion of the status is violated most.
        tolerance: the largest mass allowed at the edge.
    """

    grid: Grid
    weights: Float[Array, "time regime point"]
    filter_weights: Float[Array, "time regime point"]
    marginals: SwitchingMarginals
    log_evidence: Scalar
    log_evidence_increments: Float[Array, "time"]
    error: ErrorEstimate
    diagnostics: Diagnostics
    status: Int[Array, ""]
    status_time: Int[Array, ""]
    tolerance: Scalar

    @property
    def probabilities(self) -> Float[Array, "time regime"]:
        """P(z_k = j | y)."""
        return self.marginals.probabilities

    @property
    def mean(self) -> Float[Array, "time state"]:
        """E[x_k | y]."""
        return self.marginals.mean

    @property
    def covariance(self) -> Float[Array, "time state state"]:
        """Cov[x_k | y]."""
        return self.marginals.covariance

    @property
    def density(self) -> Float[Array, "time regime point"]:
        """The smoothing density at the points: the weights divided by the quadrature weights."""
        return self.weights * jnp.exp(-self.grid.log_quadrature)[None, None]

    def check(self) -> "SwitchingGridPosterior":
        """Return the posterior; raise a `ValueError` with the remedy if the grid is inadequate."""
        refuse_inadequate(self)
        return self


def grid_smoother(
    model: SwitchingModel,
    ys: Any,
    grid: Grid,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    tolerance: float = 1e-4,
    throw: bool = True,
) -> SwitchingGridPosterior:
    """Smooth a series on a grid of states, for any switching model with densities.

    Regimes may depend on the state, and kernels may be of any kind. The integrals over the state in

        p(z_k, x_k | y_{0:k-1})
            = Σ_i ∫ p(z_k | z_{k-1} = i, x) m_{z_k}(x, x_k) p(z_{k-1} = i, x | y_{0:k-1}) dx

    and in its reversal are computed by the trapezoidal rule, as in `retrodict.grid_smoother`, which
    describes the accuracy and the diagnosis of a grid.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes(zero.repeat(2), 2 * jnp.eye(2), state_weight=[[1.0], [-1.0]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in (0.5, 1.0)],
        ...     emission=rd.LinearGaussianKernel(eye, zero, 0.5 * eye),
        ... )
        >>> grid = rd.Grid([-9.0], [9.0], 100)
        >>> posterior = rd.switching.grid_smoother(model, jnp.array([[1.0], [2.0], [-1.0]]), grid)
        >>> posterior.probabilities.shape, posterior.mean.shape
        ((3, 2), (3, 1))

    Args:
        model: a model with a state of dimension 1 or 2.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        grid: the points, over a box that contains the states at all times.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the rest is padding.
        tolerance: the largest mass of a posterior marginal allowed in the outer 2% of the box.
        throw: whether to raise an error for a grid that is not good enough; inside `jax.jit` only
            the status of the result is set.

    Raises:
        ValueError: if shapes do not match, or the grid does not cover the mass or is too coarse.
    """
    require_state(model, "grid_smoother")
    model = unwrap(model)
    check_grid(grid, model.state_dim, "gpb2_smoother or rao_blackwellised_smoother")
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    u = None if series.inputs is None else series.inputs[0]
    kernels = _kernels(model)
    fine: Kinds = tuple(kind_of(kernel, grid, u) for kernel in kernels)
    rough: Kinds = tuple(kind_of(kernel, grid.coarser(), u) for kernel in kernels)
    # An array, so that a different tolerance does not trigger a new compilation.
    limit = jnp.asarray(tolerance, jnp.result_type(float))
    posterior = _run(model, series, grid, (fine, rough), limit)
    if throw and is_concrete(posterior.status):
        posterior.check()
    return posterior


class _Moves(NamedTuple):
    """The moves of one step.

    Attributes:
        operators: the transition of each regime.
        row_sums: those of each operator.
        transition: p(z_k = j | z_{k-1} = i, x), with one entry per point or a single one.
    """

    operators: tuple[Operator, ...]
    row_sums: Law
    transition: Float[Array, "regime regime point"]

    def push(self, law: Law) -> Law:
        """Return the density of the next regime and state."""
        moved = jnp.sum(law[:, None] * self.transition, axis=0)
        pairs = zip(self.operators, moved, strict=True)
        return jnp.stack([operator.push(mass) for operator, mass in pairs])

    def pull(self, values: Law) -> Law:
        """Return the integral of a function of the next state, for each next regime j."""
        pairs = zip(self.operators, values, strict=True)
        return jnp.stack([operator.pull(value) for operator, value in pairs])


class _Smoothed(NamedTuple):
    """Both passes over a series: the law of the states alone, and those with regimes."""

    passes: Passes
    filter_weights: Float[Array, "time regime point"]
    weights: Float[Array, "time regime point"]
    pairs: Float[Array, "pair regime regime"]


@eqx.filter_jit
def _run(
    model: SwitchingModel, series: Series, grid: Grid, kinds: tuple[Kinds, Kinds], tolerance: Scalar
) -> SwitchingGridPosterior:
    grid = _in_common_precision(model, series, grid)
    smoothed = _smooth(model, series, grid, kinds[0])
    passes = smoothed.passes
    rough = _smooth(model, series, grid.coarser(), kinds[1]).passes
    first = jax.tree.map(lambda leaf: leaf[0], series.rows)

    def log_joint(points: Array) -> Array:
        table = _log_prior(model, points) + _log_emission(model, points, first)
        return jax.nn.logsumexp(table, axis=0)

    diagnostics = diagnose(passes, grid, mass_outside(log_joint, grid))
    status, time = judge(passes.increments, diagnostics, tolerance)
    probabilities = jnp.sum(smoothed.weights, axis=2)
    marginals = SwitchingMarginals(
        probabilities,
        passes.mean,
        passes.covariance,
        smoothed.pairs,
        jnp.zeros_like(probabilities),
        jnp.zeros_like(passes.mean),
    )
    return SwitchingGridPosterior(
        grid,
        smoothed.weights,
        smoothed.filter_weights,
        marginals,
        jnp.sum(passes.increments),
        passes.increments,
        estimate_errors(passes, rough, diagnostics.boundary_mass, grid),
        diagnostics,
        status,
        time,
        tolerance,
    )


def _in_common_precision(model: SwitchingModel, series: Series, grid: Grid) -> Grid:
    """Return the grid in the widest data type of its corners, the observations and the prior."""
    density = jax.eval_shape(lambda x: prior_log_probs(model, x), grid.lower)
    dtype = jnp.result_type(grid.lower.dtype, series.ys.dtype, density.dtype)
    return Grid(grid.lower.astype(dtype), grid.upper.astype(dtype), grid.num_points)


def _kernels(model: SwitchingModel) -> tuple[Any, ...]:
    """Return the transition of every regime."""
    return tuple(of_regime(model.transition, j) for j in range(model.num_regimes))


def _moves(
    model: SwitchingModel, grid: Grid, kinds: Kinds
) -> Callable[[Float[Array, "input"] | None], _Moves]:
    """Return a function from the input to the moves; what takes no input is built once."""
    kernels = _kernels(model)
    shared = not isinstance(model.transition, tuple)
    builders = [
        operators(kernel, grid, kind)
        for kernel, kind in list(zip(kernels, kinds, strict=True))[: 1 if shared else None]
    ]

    def transition(u: Array | None) -> Array:
        regimes = model.regimes
        if not regimes.takes_state:
            return jnp.exp(regimes.log_transition(u=u))[:, :, None].astype(grid.lower.dtype)
        table = at_points(lambda x: regimes.log_transition(x, u), grid.points)
        return jnp.moveaxis(jnp.exp(table), 0, -1)

    fixed = None if model.regimes.takes_input else transition(None)

    def at(u: Array | None) -> _Moves:
        built = [build(u) for build in builders] * (len(kernels) if shared else 1)
        ops, row_sums = zip(*built, strict=True)
        return _Moves(ops, jnp.stack(row_sums), transition(u) if fixed is None else fixed)

    return at


def _smooth(model: SwitchingModel, series: Series, grid: Grid, kinds: Kinds) -> _Smoothed:
    """Run the forward and the backward pass.

    With quadrature weights q, filter probabilities f and densities p_k(j, ·) of `_Moves.push`,

        f_k(j, b) = q_b p_k(j, b) g_j(x_b, y_k) / Z_k,
        s_{k-1}(i, a) = f_{k-1}(i, a) Σ_j p(j | i, x_a) Σ_b m_j(x_a, x_b) s_k(j, b) / p_k(j, b).

    The sum over b is that of a column of the backward kernel, which sums to 1 on any grid.
    """
    move = _moves(model, grid, kinds)
    filtered, predicted, increments = _forward(model, series, grid, move)
    exists = series.exists()
    exists = jnp.ones(series.num_times, bool) if exists is None else exists

    def back(smoothed: Law, step: tuple) -> tuple[Law, tuple]:
        before, density, u, real = step
        moves = move(u)
        pulled = moves.pull(correction(smoothed, density))
        joint = before[:, None] * moves.transition * pulled[None]
        earlier, into = jnp.sum(joint, axis=1), jnp.sum(joint, axis=0)
        escaping = jnp.sum(into * jnp.maximum(1.0 - moves.row_sums, 0.0))
        excess = jnp.sum(into * jnp.maximum(moves.row_sums - 1.0, 0.0))
        earlier = jnp.where(real, earlier, smoothed)
        # Beyond the end the regime stays, as the laws do.
        pair = jnp.where(real, jnp.sum(joint, axis=2), jnp.diag(jnp.sum(smoothed, axis=1)))
        return earlier, (
            earlier,
            pair,
            jnp.where(real, escaping, 0.0),
            jnp.where(real, excess, 0.0),
        )

    later = None if series.inputs is None else series.inputs[1:]
    steps = (filtered[:-1], predicted, later, exists[1:])
    _, (weights, pairs, escaping, excess) = jax.lax.scan(back, filtered[-1], steps, reverse=True)
    weights = jnp.concatenate([weights, filtered[-1:]])
    of_states = jnp.sum(weights, axis=1)
    moments = moments_on_points(of_states, grid.points)
    passes = Passes(jnp.sum(filtered, axis=1), of_states, *moments, increments, escaping, excess)
    return _Smoothed(passes, filtered, weights, pairs)


def _forward(
    model: SwitchingModel, series: Series, grid: Grid, move: Callable[..., _Moves]
) -> tuple[
    Float[Array, "time regime point"], Float[Array, "pair regime point"], Float[Array, "time"]
]:
    """Return filter probabilities, predicted densities and increments of the log-evidence."""
    log_quadrature = grid.log_quadrature[None]

    def update(log_predicted: Law, row: Series) -> tuple[Law, Scalar]:
        log_joint = log_predicted + log_quadrature + _log_emission(model, grid.points, row)
        peak = jax.lax.stop_gradient(jnp.max(log_joint))
        joint = jnp.exp(log_joint - peak)
        total = jnp.sum(joint)
        return joint / total, peak + jnp.log(total)

    def step(before: Law, at: tuple) -> tuple[Law, tuple]:
        row, real = at
        density = move(row.inputs).push(before)
        # The gradient of the logarithm is infinite at zero: exclude such points.
        positive = density > 0
        log_density = jnp.where(positive, jnp.log(jnp.where(positive, density, 1.0)), -jnp.inf)
        after, increment = update(log_density, row)
        if real is not None:
            after, increment = jnp.where(real, after, before), jnp.where(real, increment, 0.0)
        return after, (after, density, increment)

    rows = (series.rows, series.exists())
    initial, increment = update(
        _log_prior(model, grid.points), jax.tree.map(lambda leaf: leaf[0], series.rows)
    )
    later = jax.tree.map(lambda leaf: leaf[1:], rows)
    _, (weights, predicted, increments) = jax.lax.scan(step, initial, later)
    weights = jnp.concatenate([initial[None], weights])
    return weights, predicted, jnp.concatenate([increment[None], increments])


def _log_prior(model: SwitchingModel, points: Float[Array, "point state"]) -> Law:
    """Return log p(z_0, x_0) at the points."""
    table = at_points(lambda x: prior_log_probs(model, x), points)
    return table.T + model.regimes.log_initial().astype(points.dtype)[:, None]


def _log_emission(model: SwitchingModel, points: Float[Array, "point state"], row: Series) -> Law:
    """Return the log densities of the observed entries of one row, at the points."""
    return at_points(lambda x: emission_log_probs(model, x, row), points).T
