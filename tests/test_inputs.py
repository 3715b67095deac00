"""Odd inputs give the answer of plain floating-point arrays, or are refused by name.

One table of verbs, one of ways to hold numbers, one of things that are not numbers. Shape
annotations are off: the checks of the library must do the work.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd

pytestmark = pytest.mark.usefixtures("untyped")

KEY = jax.random.key(0)
N = 5
# Zeros and ones, so that booleans and half precision hold the same numbers.
YS = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
US = np.array([[1.0], [0.0], [1.0], [1.0], [0.0]])
XS = np.array([[0.0], [1.0], [1.0], [0.0], [1.0]])
HOLES = np.zeros(YS.shape, bool)
HOLES[1, 0] = HOLES[3] = True

MODEL = rd.StateSpaceModel(
    rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
    rd.LinearGaussianKernel(0.7 * jnp.eye(1), jnp.zeros(1), 0.8 * jnp.eye(1), 0.1 * jnp.ones((1, 1))),
    rd.LinearGaussianKernel(
        jnp.array([[1.0], [0.5]]),
        jnp.zeros(2),
        jnp.array([[0.6, 0.0], [0.2, 0.7]]),
        0.2 * jnp.ones((2, 1)),
    ),
)
FAMILY = rd.GatedFamily(KEY, state_dim=1, obs_dim=2, input_dim=1)
LAGGED = rd.FixedLag(FAMILY, 1)
RUNNING = rd.RunningPosterior(FAMILY, MODEL)
LEARNER = rd.OnlineLearner(None, MODEL, rd.KalmanScore())
ONLINE = rd.OnlineSmoother(MODEL, rd.StateSum(), 8)


def chain() -> rd.LinearGaussianChain:
    return rd.kalman_smoother(MODEL, YS, inputs=US).chain


class Verb(NamedTuple):
    """A verb and what the tests must know of it.

    Attributes:
        call: `call(ys, us, **options)` returns arrays to compare; for verbs of single rows, of the
            second row.
        rows: whether it takes one row at a time, as `y` and `u`.
        batch: whether it takes several series, and lengths of them.
        traceable: whether it runs under `jax.jit`.
        length: whether it takes a `length`.
    """

    call: Callable[..., Any]
    rows: bool = False
    batch: bool = False
    traceable: bool = True
    length: bool = True


def _gradient(ys: Any, us: Any, **options: Any) -> Any:
    found = rd.recursive_gradient(
        rd.KalmanScore(), None, MODEL, ys, key=KEY, learn="model", inputs=us, **options
    )
    return found.value


VERBS: dict[str, Verb] = {
    "log_joint": Verb(lambda ys, us, **o: MODEL.log_joint(XS, ys, inputs=us, **o)),
    "kalman_smoother": Verb(lambda ys, us, **o: rd.kalman_smoother(MODEL, ys, inputs=us, **o).log_evidence),
    "grid_smoother": Verb(
        lambda ys, us, **o: rd.grid_smoother(
            MODEL, ys, rd.Grid([-6.0], [6.0], 32), inputs=us, **o
        ).log_evidence
    ),
    "extended_smoother": Verb(lambda ys, us, **o: rd.extended_smoother(MODEL, ys, inputs=us, **o).log_evidence),
    "unscented_smoother": Verb(lambda ys, us, **o: rd.unscented_smoother(MODEL, ys, inputs=us, **o).log_evidence),
    "iterated_smoother": Verb(lambda ys, us, **o: rd.iterated_smoother(MODEL, ys, inputs=us, num_iterations=1, **o).log_evidence),
    "particle_filter": Verb(lambda ys, us, **o: rd.particle_filter(KEY, MODEL, ys, 8, inputs=us, **o).log_evidence),
    "ffbsi": Verb(lambda ys, us, **o: rd.ffbsi(KEY, MODEL, ys, 8, 2, inputs=us, **o).log_evidence),
    "paris": Verb(lambda ys, us, **o: rd.paris(KEY, MODEL, ys, rd.StateSum(), 8, inputs=us, **o).log_evidence),
    "forward_smoother": Verb(lambda ys, us, **o: rd.forward_smoother(KEY, MODEL, ys, rd.StateSum(), 8, inputs=us, **o).log_evidence),
    "infer": Verb(lambda ys, us, **o: FAMILY.infer(ys, inputs=us, **o).laws.mean),
    "elbo": Verb(lambda ys, us, **o: rd.elbo(MODEL, chain(), ys, inputs=us, **o)),
    "observations": Verb(
        lambda ys, us, **o: rd.expectation(
            chain(), rd.LogJoint(MODEL), rd.observations(MODEL, ys, inputs=us, **o)
        )
    ),
    "importance_smoother": Verb(lambda ys, us, **o: rd.importance_smoother(KEY, MODEL, chain(), ys, 8, inputs=us, **o).log_evidence, traceable=False),
    "guided_smoother": Verb(lambda ys, us, **o: rd.guided_smoother(KEY, MODEL, chain(), ys, 8, 2, inputs=us, **o).log_evidence),
    "importance_weighted_bound": Verb(lambda ys, us, **o: rd.importance_weighted_bound(KEY, MODEL, chain(), ys, 4, num_replicates=2, inputs=us, **o).value),
    "impute": Verb(lambda ys, us, **o: rd.impute(KEY, MODEL, chain(), ys, 2, inputs=us, **o)),
    "error_bound": Verb(lambda ys, us, **o: rd.error_bound(MODEL, chain(), ys, rd.StateSum(), inputs=us, **o).value, traceable=False),
    "check_posterior": Verb(lambda ys, us, **o: rd.check_posterior(KEY, MODEL, chain(), ys, num_samples=64, inputs=us, **o).gap, traceable=False),
    "recursive_gradient": Verb(_gradient),
    "FixedLag.scan": Verb(lambda ys, us, **o: LAGGED.scan(LAGGED.init(), ys, inputs=us, **o)[1].current.mean),
    "RunningPosterior.scan": Verb(lambda ys, us, **o: RUNNING.scan(RUNNING.init(), ys, inputs=us, **o)[1].elbo),
    "OnlineLearner.scan": Verb(lambda ys, us, **o: LEARNER.scan(LEARNER.init(KEY), ys, inputs=us, **o)[1].objective),
    "step": Verb(lambda y, u, **o: FAMILY.step(FAMILY.init(), y, u=u, **o)[1].law.mean, rows=True),
    "FixedLag.update": Verb(lambda y, u, **o: LAGGED.update(LAGGED.init(), y, u=u, **o)[1].current.mean, rows=True),
    "RunningPosterior.update": Verb(lambda y, u, **o: RUNNING.update(RUNNING.init(), y, u=u, **o)[1].elbo, rows=True),
    "OnlineLearner.update": Verb(lambda y, u, **o: LEARNER.update(LEARNER.init(KEY), y, u=u, **o)[1].objective, rows=True),
    "OnlineSmoother.init": Verb(lambda y, u, **o: ONLINE.init(KEY, y, u=u, **o).log_evidence, rows=True),
    "fit": Verb(
        lambda ys, us, **o: rd.fit(KEY, FAMILY, MODEL, ys, inputs=us, num_steps=1, progress=False, **o).history,
        batch=True, traceable=False,
    ),
    "fit_evidence": Verb(
        lambda ys, us, **o: rd.fit_evidence(KEY, MODEL, ys, inputs=us, num_steps=1, progress=False, **o).history,
        batch=True, traceable=False,
    ),
    "em": Verb(lambda ys, us, **o: rd.em(KEY, MODEL, ys, inputs=us, num_iterations=1, **o).history, batch=True, traceable=False),
    "smooth": Verb(lambda ys, us, **o: rd.smooth(MODEL, ys, inputs=us, check=False, progress=False, **o).mean, batch=True, traceable=False),
    "simulate_like": Verb(lambda ys, us, **o: rd.simulate_like(KEY, MODEL, ys, 2, inputs=us, **o).ys, batch=True, traceable=False),
    "parameter_errors": Verb(lambda ys, us, **o: rd.parameter_errors(KEY, MODEL, ys, inputs=us, **o).covariance, batch=True, traceable=False),
    "prepare": Verb(lambda ys, us, **o: FAMILY.prepare(MODEL, ys, inputs=us, **o).infer(YS, inputs=US).laws.mean, batch=True, traceable=False),
}
