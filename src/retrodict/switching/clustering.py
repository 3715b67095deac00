"""Clustering of local regressions: a hidden Markov model whose regimes are linear regressions."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, Scalar
from retrodict._model import LOG_2PI
from retrodict._numerics import linalg
from retrodict.switching.forward_backward import finite_chain

NUM_ITERATIONS = 40
"""The number of iterations of EM from each seed."""

STAY = 0.9
"""The probability with which a regime stays, at the start."""

PRIOR_ROWS = 0.1
"""The weight, in rows, of the pooled covariance of the residuals in that of each regime."""

WINDOW = 0.02
"""The length of the stretch that seeds a regression, as a fraction of the rows."""

MAX_ROWS = 200_000
"""Seeds are processed together up to this number of rows, counted once per seed."""


class Problem(NamedTuple):
    """A regression whose coefficients and noise depend on the regime.

    Attributes:
        features: regressors, without the constant.
        responses: what is regressed on them.
        used: which rows count.
    """

    features: Float[Array, "batch time feature"]
    responses: Float[Array, "batch time response"]
    used: Bool[Array, "batch time"]


class _State(NamedTuple):
    """Probabilities of regimes and moves, the law of the moves, and the log-evidence."""

    probabilities: Float[Array, "batch time regime"]
    log_initial: Float[Array, "regime"]
    log_matrix: Float[Array, "regime regime"]
    log_evidence: Scalar


def cluster(
    key: PRNGKey,
    problems: tuple[Problem, ...],
    exists: Bool[Array, "batch time"],
    num_regimes: int,
    num_restarts: int,
) -> tuple[Float[Array, "batch time regime"], Float[Array, "batch time-1 regime regime"]]:
    """Assign rows to regimes, each with a regression of its own, by EM from several seeds.

    A seed is drawn like those of k-means++: the first regression is that of a random stretch of
    rows; each further one is that of a stretch around a row that is drawn in proportion to its
    squared residual from the regressions before. Every other seed takes similar rows in place of
    stretches, for regimes that do not persist.

    Args:
        key: a typed key.
        problems: the regressions.
        exists: which rows exist.
        num_regimes: the number K of regimes.
        num_restarts: the number of seeds.

    Returns:
        The probabilities of regimes and of their moves from the seed with the highest evidence,
        zero where no row exists.
    """
    problems = tuple(_standardised(problem) for problem in problems)
    keys = jax.random.split(key, num_restarts)
    return _cluster(keys, problems, exists, num_regimes)


def _standardised(problem: Problem) -> Problem:
    """Return features and responses with mean 0 and variance 1, and a constant feature."""

    def scaled(values: Array) -> Array:
        used = problem.used[..., None]
        mean = jnp.mean(values, axis=(0, 1), where=used)[None, None]
        std = jnp.std(values, axis=(0, 1), where=used)[None, None]
        return jnp.where(used, (values - mean) / jnp.where(std > 0, std, 1.0), 0.0)

    features = scaled(problem.features)
    ones = jnp.ones((*features.shape[:2], 1), features.dtype)
    features = jnp.concatenate([features, ones], axis=-1)
    return Problem(features, scaled(problem.responses), problem.used)


@eqx.filter_jit
def _cluster(
    keys: Array, problems: tuple[Problem, ...], exists: Array, count: int
) -> tuple[Array, Array]:
    pooled = [
        _fit(problem, problem.used[None].astype(problem.features.dtype)) for problem in problems
    ]
    priors = [covariance[0] for _, covariance in pooled]
    dtype = problems[0].features.dtype
    uniform = jnp.full(count, -jnp.log(count), dtype)
    stay = jnp.where(jnp.eye(count, dtype=bool), STAY, (1.0 - STAY) / max(count - 1, 1))
    log_matrix = jnp.log(stay).astype(dtype)

    def iterate(state: _State, _: None) -> tuple[_State, None]:
        return _iterate(problems, priors, exists, state)[0], None

    def run(at: tuple[PRNGKey, Array]) -> tuple[_State, Array]:
        key, persistent = at
        seeds = _seed(key, problems, exists, count, persistent)
        moves = jnp.where(persistent, log_matrix, uniform[None, :])
        start = _State(seeds, uniform, moves, jnp.zeros((), dtype))
        state, _ = lax.scan(iterate, start, None, length=NUM_ITERATIONS)
        return _iterate(problems, priors, exists, state)

    # Each step of a scan is small, so that seeds share it as far as memory allows.
    together = max(1, min(keys.shape[0], MAX_ROWS // exists.size))
    # Every other seed expects regimes that persist.
    persistent = jnp.arange(keys.shape[0]) % 2 == 0
    states, pairs = lax.map(run, (keys, persistent), batch_size=together)
    best = jnp.argmax(jnp.nan_to_num(states.log_evidence, nan=-jnp.inf))
    return states.probabilities[best], pairs[best]


def _iterate(
    problems: tuple[Problem, ...], priors: list[Array], exists: Array, state: _State
) -> tuple[_State, Array]:
    """Fit the regressions, then compute the probabilities of regimes and moves."""
    weights = jnp.moveaxis(state.probabilities, -1, 0)
    table = sum(
        _log_probs(problem, *_fit(problem, weights * problem.used[None], prior))
        for problem, prior in zip(problems, priors, strict=True)
    )
    smooth = jax.vmap(lambda rows, real: _smooth(state.log_initial, state.log_matrix, rows, real))
    probabilities, pairs, evidence = smooth(table, exists)
    # One move per pair of regimes is added, so that none becomes impossible.
    moves = jnp.sum(pairs, axis=(0, 1)) + 1.0 / pairs.shape[-1]
    first = jnp.mean(probabilities[:, 0], axis=0) + 1.0 / pairs.shape[-1]
    log_matrix = jnp.log(moves / jnp.sum(moves, axis=1, keepdims=True))
    log_initial = jnp.log(first / jnp.sum(first))
    return _State(probabilities, log_initial, log_matrix, jnp.sum(evidence)), pairs


def _fit(
    problem: Problem, weights: Float[Array, "regime batch time"], prior: Array | None = None
) -> tuple[Array, Array]:
    """Return coefficients and residual covariances, one of each per regime."""
    features, responses = problem.features, problem.responses
    grams = jnp.einsum("kbt,bti,btj->kij", weights, features, features, precision="highest")
    cross = jnp.einsum("kbt,bti,btj->kij", weights, features, responses, precision="highest")
    eye = jnp.eye(features.shape[-1], dtype=features.dtype)
    coefficients = jnp.linalg.solve(grams + 1e-6 * eye[None], cross)
    residuals = _residuals(problem, coefficients)
    scatter = jnp.einsum("kbt,kbti,kbtj->kij", weights, residuals, residuals, precision="highest")
    total = jnp.sum(weights, axis=(1, 2))
    floor = 1e-8 * jnp.eye(responses.shape[-1], dtype=features.dtype)
    prior = floor if prior is None else prior + floor
    scatter = scatter + PRIOR_ROWS * prior[None]
    return coefficients, scatter / (total + PRIOR_ROWS)[:, None, None] + floor[None]


def _residuals(problem: Problem, coefficients: Array) -> Float[Array, "regime batch time response"]:
    predicted = jnp.einsum("bti,kij->kbtj", problem.features, coefficients, precision="highest")
    return problem.responses[None] - predicted


def _log_probs(
    problem: Problem, coefficients: Array, covariances: Array
) -> Float[Array, "batch time regime"]:
    """Return the log density of each row under each regression; zero where it does not count."""
    residuals = _residuals(problem, coefficients)

    def one(residual: Array, covariance: Array) -> Array:
        factor = linalg.cholesky(covariance)
        white = jnp.linalg.solve(factor, residual.reshape(-1, residual.shape[-1]).T)
        log_det = jnp.sum(jnp.log(jnp.diagonal(factor)))
        value = -0.5 * jnp.sum(white**2 + LOG_2PI, axis=0) - log_det
        return value.reshape(residual.shape[:-1])

    table = jnp.moveaxis(jax.vmap(one)(residuals, covariances), 0, -1)
    return jnp.where(problem.used[..., None], table, 0.0)


def _smooth(
    log_initial: Array, log_matrix: Array, table: Array, exists: Array
) -> tuple[Array, Array, Scalar]:
    """Return the probabilities of regimes and moves, and the log-evidence, of one series."""

    def step(law: Array, at: tuple) -> tuple[Array, tuple]:
        row, real = at
        joint = jax.nn.logsumexp(law[:, None] + log_matrix, axis=0) + row
        increment = jax.nn.logsumexp(joint)
        new = jnp.where(real, joint - increment, law)
        return new, (new, jnp.where(real, increment, 0.0))

    joint = log_initial + table[0]
    increment = jax.nn.logsumexp(joint)
    _, (rest, increments) = lax.scan(step, joint - increment, (table[1:], exists[1:]))
    laws = jnp.concatenate([(joint - increment)[None], rest])
    steps = jnp.broadcast_to(log_matrix, (table.shape[0] - 1, *log_matrix.shape))
    marginals = finite_chain(laws, steps, jnp.sum(exists)).marginals()
    probabilities = jnp.where(exists[:, None], marginals.probabilities, 0.0)
    pairs = jnp.where(exists[1:, None, None], marginals.pairs, 0.0)
    return probabilities, pairs, increment + jnp.sum(increments)


def _seed(
    key: PRNGKey, problems: tuple[Problem, ...], exists: Array, count: int, persistent: Array
) -> Float[Array, "batch time regime"]:
    """Return a hard assignment of rows to the regressions of `count` groups of rows.

    If regimes persist, a group is a stretch, and a row is assigned together with its neighbours.
    Otherwise a group has similar features and responses.
    """
    times = jnp.arange(exists.shape[1])
    needed = 2 * max(problem.features.shape[-1] + 1 for problem in problems)
    width = jnp.maximum(needed, WINDOW * jnp.sum(exists))
    keys = jax.random.split(key, count)
    distances = jnp.ones(exists.shape)
    all_distances = []
    for j in range(count):
        chances = jnp.where(exists, distances, 0.0)
        centre = jax.random.categorical(keys[j], jnp.log(chances).reshape(-1))
        series, time = centre // exists.shape[1], centre % exists.shape[1]
        near = (jnp.abs(times - time) <= width / 2)[None, :]
        near = near & (jnp.arange(exists.shape[0]) == series)[:, None]
        near = jnp.where(persistent, near, _closest(problems, exists, centre, width))
        new = jnp.sum(jnp.stack([_distance(each, near & exists) for each in problems]), axis=0)
        all_distances.append(jnp.where(persistent, _averaged(new, needed), new))
        distances = jnp.minimum(distances, new) if j else new
    nearest = jnp.argmin(jnp.stack(all_distances, axis=-1), axis=-1)
    members = jax.nn.one_hot(nearest, count, dtype=problems[0].features.dtype)
    return jnp.where(exists[..., None], members, 0.0)


def _closest(
    problems: tuple[Problem, ...], exists: Array, centre: Array, count: Array
) -> Bool[Array, "batch time"]:
    """Return the rows with the features and responses closest to those of a row."""
    values = [part for problem in problems for part in (problem.features, problem.responses)]
    flat = jnp.concatenate(values, axis=-1).reshape(exists.size, -1)
    squared = jnp.sum((flat - flat[centre][None, :]) ** 2, axis=-1)
    squared = jnp.where(exists.reshape(-1), squared, jnp.inf)
    last = jnp.minimum(count.astype(int), exists.size - 1)
    return (squared <= jnp.sort(squared)[last]).reshape(exists.shape) & exists


def _distance(problem: Problem, near: Array) -> Float[Array, "batch time"]:
    """Return the squared residuals from the regression of some rows."""
    weights = (near & problem.used).astype(problem.features.dtype)[None]
    coefficients, _ = _fit(problem, weights)
    squared = jnp.sum(_residuals(problem, coefficients)[0] ** 2, axis=-1)
    return jnp.where(problem.used, squared, 0.0)


def _averaged(values: Float[Array, "batch time"], width: int) -> Float[Array, "batch time"]:
    """Return moving averages, which a regime that persists shares with its neighbours."""
    width = min(width, values.shape[1])
    kernel = jnp.ones(width, values.dtype) / width
    return jax.vmap(lambda row: jnp.convolve(row, kernel, mode="same"))(values)
