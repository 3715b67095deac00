"""Reference posteriors that are computed independently of the chain to check.

A reference must not share the blind spots of the chain. A grid covers every mode inside its box.
Tempered particles follow every mode that the prediction reaches, also under a sensor so sharp that
a bootstrap filter degenerates; several independent runs must agree. Linearised smoothers that start
from paths of the prior and from reflections of the first solution find modes that a filter lost
before later rows supported them.
"""

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, Scalar
from retrodict._chains import LinearGaussianChain
from retrodict._exact import Grid, GridPosterior, Status, grid_smoother
from retrodict._linearised import check_moments, iterated_smoother, smooth_from_paths
from retrodict._model import Series, StateSpaceModel, check_densities
from retrodict.particles import (
    ParticlePosterior,
    log_weights_of,
    status_words,
    tempered_smoother,
)

ATTEMPTS = ((3, 1000), (6, 4000))
"""The numbers of independent particle smoothers that must agree, and of particles of each; and the
same for a second attempt."""

MAX_NOISE = 0.1
"""The largest error of the mean of the runs, as a root mean square of Kolmogorov distances."""

DOUBT = 0.1
"""The probability that the runs agree by chance although their mean has a larger error."""

GRIDS = {1: (512, 2048, 4096), 2: (48, 96)}
"""Numbers of points per coordinate, by state dimension, from coarse to fine."""

MAX_WORK = {1: 2**32, 2: 2**36}
"""The largest number of pairs of points times rows, by state dimension."""

MAX_GRID_ERROR = 0.5
"""The largest estimated error of a grid, in nats and in standard deviations. The estimate is the
error of a grid with three quarters of the points, far above that of the grid itself."""

NUM_PRIOR_PATHS = (256, 4096)
"""The least and the largest number of paths of the prior. They determine the box of a grid, which
must cover also the states that few paths reach: the data may favour these."""

MAX_PRIOR_VALUES = 2**22
"""The number of values of these paths from which on there are fewer."""

MARGIN = 0.25
"""The margin of the box on either side, as a fraction of the range of these paths. Of Gaussian laws
the box then covers about 6 standard deviations."""

NUM_STARTS = 12
"""The number of these paths from which linearised smoothers start."""

NUM_MODE_PATHS = 200
"""The number of paths from which the evidence of a mode is estimated."""


class Mode(NamedTuple):
    """Paths around a local solution, and the evidence they account for."""

    paths: Float[Array, "sample time state"]
    log_evidence: float


class Reference(eqx.Module):
    """A posterior that was computed independently of any chain.

    Attributes:
        states: draws from the smoothed marginals; paths, for particles.
        log_evidence: an estimate of the log-evidence.
        log_evidence_standard_error: its standard error.
        method: how it was computed.
        problem: why it cannot be trusted; `None` if it can.
        modes: local solutions of linearised smoothers with other starts.
    """

    states: Float[Array, "sample time state"]
    log_evidence: Scalar
    log_evidence_standard_error: Scalar
    method: Literal["grid", "particles"] = eqx.field(static=True)
    problem: str | None = eqx.field(static=True)
    modes: tuple[Mode, ...] = ()


def find_reference(key: PRNGKey, model: StateSpaceModel, series: Series) -> Reference:
    """Compute a reference, on a grid if one is affordable and fine enough, else by particles.

    Args:
        key: a typed key.
        model: an unwrapped model whose parts have densities.
        series: a prepared series.
    """
    check_densities(model, "A check by particles or a grid")
    box_key, particle_key, mode_key = jax.random.split(key, 3)
    paths = _prior_paths(box_key, model, series)
    if model.state_dim in GRIDS:
        posterior = _on_grid(model, series, np.asarray(paths))
        if posterior is not None:
            return from_grid(posterior)
    modes = tuple(_modes(mode_key, model, series, paths))
    keys = jax.random.split(particle_key, len(ATTEMPTS))
    reference = _from_runs(keys[0], model, series, *ATTEMPTS[0], modes)
    if reference.problem is not None:
        reference = _from_runs(keys[1], model, series, *ATTEMPTS[1], modes)
    return reference


def from_grid(posterior: GridPosterior, num_states: int = 1000) -> Reference:
    """Turn a posterior on a grid into a reference.

    Args:
        posterior: the result of `grid_smoother`.
        num_states: the number of states per time, at evenly spread quantiles.
    """
    levels = (jnp.arange(num_states) + 0.5) / num_states
    sums = jnp.cumsum(posterior.weights, axis=1)
    indices = jax.vmap(lambda sums: jnp.searchsorted(sums, levels * sums[-1]))(sums)
    states = posterior.points[jnp.minimum(indices, sums.shape[1] - 1)]
    # Spread over the cells: laws on points are far from laws with densities.
    within = jax.random.uniform(jax.random.key(0), states.shape, states.dtype, -0.5, 0.5)
    states = states + within * posterior.grid.spacing[None, None]
    code = int(posterior.status)
    problem = None if code == Status.FINE else f"the grid smoother reports status {code}"
    return Reference(
        jnp.swapaxes(states, 0, 1),
        posterior.log_evidence,
        posterior.error.log_evidence,
        "grid",
        problem,
    )


def from_particles(posterior: ParticlePosterior) -> Reference:
    """Turn one run of a particle smoother into a reference."""
    problem = None
    if int(posterior.status) != 0:
        words = status_words(posterior.status, posterior.status_time)
        problem = f"the particle smoother failed: {words}"
    return Reference(
        posterior.samples,
        posterior.log_evidence,
        posterior.filtered.log_evidence_standard_error(),
        "particles",
        problem,
    )


@eqx.filter_jit
def distances(
    xs: Float[Array, "sample time state"], zs: Float[Array, "other time state"]
) -> Float[Array, "time"]:
    """Return Kolmogorov distances of two samples at each time, the largest over some directions.

    The directions are the coordinates and, in several dimensions, four fixed ones of standardised
    states: the laws of coordinates do not depend on whether two of them have the same sign.
    """
    dim = xs.shape[2]
    directions = jnp.eye(dim, dtype=xs.dtype)
    if dim > 1:
        more = jax.random.normal(jax.random.key(0), (4, dim), xs.dtype)
        directions = jnp.concatenate([directions, more])

    def along(a: Array, b: Array) -> Array:
        a, b = jnp.sort(a), jnp.sort(b)
        both = jnp.concatenate([a, b])
        share_a = jnp.searchsorted(a, both, side="right") / a.shape[0]
        share_b = jnp.searchsorted(b, both, side="right") / b.shape[0]
        return jnp.max(jnp.abs(share_a - share_b))

    def at_time(x: Array, z: Array) -> Array:
        mean, std = jnp.mean(z, axis=0), jnp.std(z, axis=0)
        std = jnp.where(std > 0, std, 1.0)
        a, b = ((each - mean[None]) / std[None] for each in (x, z))
        a, b = (jnp.matmul(each, directions.T, precision="highest") for each in (a, b))
        return jnp.max(jax.vmap(along, in_axes=1)(a, b))

    by_time = (jnp.swapaxes(xs, 0, 1), jnp.swapaxes(zs, 0, 1))
    largest = jax.lax.map(lambda at: at_time(*at), by_time)
    return jnp.where(jnp.isnan(largest), 1.0, largest)


def root_mean_square(values: Any) -> float:
    """Return the square root of the mean square."""
    return float(np.sqrt(np.mean(np.asarray(values) ** 2)))


def log_mean_exp(values: np.ndarray) -> float:
    """Return log(mean(exp(values)))."""
    return float(np.logaddexp.reduce(values) - np.log(len(values)))


def _rows(series: Series) -> int:
    return series.num_times if series.length is None else int(series.length)


@eqx.filter_jit
def _prior_paths(key: PRNGKey, model: StateSpaceModel, series: Series) -> Array:
    n, us = series.num_times, series.inputs
    least, most = NUM_PRIOR_PATHS
    count = min(most, max(least, MAX_PRIOR_VALUES // (n * model.state_dim)))
    keys = jax.random.split(key, count)
    return jax.vmap(lambda key: model.simulate(key, n, inputs=us)[0])(keys)


# --- grid -----------------------------------------------------------------------------------------


def _on_grid(model: StateSpaceModel, series: Series, paths: np.ndarray) -> GridPosterior | None:
    """Smooth on a grid over the states that the prior reaches; `None` if no grid is good."""
    dim, rows = paths.shape[2], _rows(series)
    states = paths[:, :rows]
    states = states[np.all(np.isfinite(states), axis=(1, 2))].reshape(-1, dim)
    if not len(states):
        return None
    low, high = np.min(states, axis=0), np.max(states, axis=0)
    margin = MARGIN * np.maximum(high - low, 1e-6 * (1 + np.abs(low)))
    low, high = low - margin, high + margin
    level, wider = 0, 0
    while level < len(GRIDS[dim]) and wider < 3:
        points = GRIDS[dim][level]
        if series.num_times * float(points) ** (2 * dim) > MAX_WORK[dim]:
            return None
        grid = Grid(jnp.asarray(low), jnp.asarray(high), points)
        try:
            posterior = grid_smoother(model, series.ys, grid, throw=False, **series.options())
        except (TypeError, ValueError):
            return None
        code = int(posterior.status)
        if code == Status.FINE and float(posterior.discretisation_error) < MAX_GRID_ERROR:
            return posterior
        if code in (Status.EDGE, Status.ESCAPING):
            wider, margin = wider + 1, 0.5 * (high - low)
            low, high = low - margin, high + margin
        else:
            level += 1
    return None


# --- particles ------------------------------------------------------------------------------------


def _from_runs(
    key: PRNGKey,
    model: StateSpaceModel,
    series: Series,
    num_runs: int,
    count: int,
    modes: tuple[Mode, ...],
) -> Reference:
    """Run several tempered particle smoothers, and check that they agree."""
    keys = jax.random.split(key, num_runs)
    runs = [tempered_smoother(run_key, model, series, count) for run_key in keys]
    evidences = np.array([float(run.log_evidence) for run in runs])
    codes, problem = [int(run.status) for run in runs], None
    if any(codes):
        failed = runs[int(np.argmax(codes))]
        words = status_words(failed.status, failed.status_time)
        problem = f"a particle smoother with {count} tempered particles failed: {words}"
    else:
        apart = []
        for i, run in enumerate(runs):
            others = jnp.concatenate([each.samples for j, each in enumerate(runs) if j != i])
            apart.append(root_mean_square(distances(run.samples, others)[: _rows(series)]))
        difference = root_mean_square(apart)
        if _largest_error(difference, num_runs) > MAX_NOISE:
            problem = (
                f"{num_runs} particle smoothers with {count} tempered particles disagree: their"
                f" marginals differ by {difference:.0%} on average"
            )
    spread = np.std(evidences, ddof=1) if np.all(np.isfinite(evidences)) else np.inf
    errors = [float(run.filtered.log_evidence_standard_error()) for run in runs]
    return Reference(
        jnp.concatenate([run.samples for run in runs]),
        jnp.asarray(log_mean_exp(evidences)),
        jnp.asarray(max(float(spread), root_mean_square(errors)) / np.sqrt(num_runs)),
        "particles",
        problem,
        modes,
    )


def _largest_error(difference: float, num_runs: int) -> float:
    """Return an upper limit of the error of the mean of K runs.

    1. A run and the mean of the K − 1 others differ by √(K / (K − 1)) times the error of one run.
    2. The mean of all K runs has 1 / √K of that error.
    3. If the share of a mode is noisy, this estimate has K − 1 degrees of freedom, so that few runs
       often agree by chance: the limit holds with probability 1 − `DOUBT`.
    """
    from scipy.special import gammaincinv  # here, since this import takes 0.1 s

    freedom = num_runs - 1
    error = difference * np.sqrt(freedom) / num_runs
    return float(error * np.sqrt(0.5 * freedom / gammaincinv(0.5 * freedom, DOUBT)))


# --- modes ----------------------------------------------------------------------------------------


def _modes(key: PRNGKey, model: StateSpaceModel, series: Series, paths: Array) -> list[Mode]:
    """Find local solutions of linearised smoothers from prior paths and reflections."""
    try:
        check_moments(model, series)
        first = iterated_smoother(model, series.ys, **series.options()).chain.marginals()
    except (TypeError, ValueError):
        return []
    centre, spread = jnp.mean(paths, axis=0), jnp.std(paths, axis=0)
    mean, scales = first.mean, first.scale_tril
    starts = list(paths[:NUM_STARTS])
    if bool(jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(scales))):
        reflections = [centre + signs[None] * (mean - centre) for signs in _flips(mean.shape[1])]
        starts = [mean, *reflections, *starts]
    else:
        scales = jax.vmap(jnp.diag)(0.1 * spread)
    chains = smooth_from_paths(model, series, jnp.stack(starts).astype(mean.dtype), scales)
    laws = jax.vmap(lambda chain: chain.marginals())(chains)
    means, stds = np.asarray(laws.mean), np.linalg.norm(np.asarray(laws.scale_tril), axis=3)
    modes: list[Mode] = []
    distinct: list[int] = []
    for i in range(len(starts)):
        # Convergence is not checked: the weights measure the evidence of a solution.
        finite = np.isfinite(means[i]).all() and np.isfinite(stds[i]).all()
        apart = [np.abs(means[i] - means[j]) / np.maximum(stds[j], 1e-300) for j in distinct]
        if finite and all(np.max(each) >= 2 for each in apart):
            distinct.append(i)
            chain = jax.tree.map(lambda leaf, i=i: leaf[i] if eqx.is_array(leaf) else leaf, chains)
            modes.append(_weigh(jax.random.fold_in(key, i), model, chain, series))
    return [mode for mode in modes if np.isfinite(mode.log_evidence)]


def _flips(dim: int) -> np.ndarray:
    """Return signs that reflect all coordinates, and each one separately if they are few."""
    alone = 1.0 - 2.0 * np.eye(dim) if dim <= 6 else np.zeros((0, dim))
    return np.unique(np.concatenate([-np.ones((1, dim)), alone]), axis=0)


def _weigh(
    key: PRNGKey, model: StateSpaceModel, chain: LinearGaussianChain, series: Series
) -> Mode:
    """Draw paths of a local solution, and average their importance weights."""
    paths = chain.sample(key, NUM_MODE_PATHS)
    logs = np.asarray(log_weights_of(model, chain, paths, series))
    return Mode(paths, log_mean_exp(np.where(np.isfinite(logs), logs, -np.inf)))
