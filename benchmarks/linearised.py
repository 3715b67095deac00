"""The extended and the unscented smoother, and those of dynamax, on a pendulum.

Both libraries linearise the same model at the same points, so that they must agree up to the
constant 1e-9 that dynamax adds to the diagonal of matrices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from dynamax.nonlinear_gaussian_ssm import (
    ParamsNLGSSM,
    UKFHyperParams,
    extended_kalman_smoother,
    unscented_kalman_smoother,
)

import retrodict as rd
from measure import Prepared, Task, prepared

STEP = 0.05
ALPHA, BETA, KAPPA = 1.2, 2.0, 1.0


def swing(x: jax.Array) -> jax.Array:
    return jnp.stack([x[0] + STEP * x[1], x[1] - 9.81 * STEP * jnp.sin(x[0])])


def observe(x: jax.Array) -> jax.Array:
    return jnp.sin(x[:1])


NOISE = jnp.array([[0.02, 0.0], [0.01, 0.1]])
PENDULUM = rd.StateSpaceModel(
    rd.Gaussian(jnp.array([0.8, 0.0]), 0.3 * jnp.eye(2)),
    rd.NonlinearGaussianKernel(swing, NOISE),
    rd.NonlinearGaussianKernel(observe, 0.2 * jnp.eye(1)),
)
PARAMETERS = ParamsNLGSSM(
    initial_mean=jnp.array([0.8, 0.0]),
    initial_covariance=0.09 * jnp.eye(2),
    dynamics_function=swing,
    dynamics_covariance=NOISE @ NOISE.T,
    emission_function=observe,
    emission_covariance=0.04 * jnp.eye(1),
)


def prepare(task: Task) -> Prepared:
    """Return the call of an extended or unscented smoother of the pendulum."""
    _, ys = PENDULUM.simulate(jax.random.key(0), task.num_times)
    run = jax.jit(SMOOTHERS[task.library, task.option])
    return prepared(lambda: jax.block_until_ready(run(ys)), lambda moments: moments)


def of_retrodict(posterior: Any) -> dict[str, Any]:
    laws = posterior.chain.marginals()
    return _moments(posterior.log_evidence, laws.mean, laws.covariance)


def of_dynamax(posterior: Any) -> dict[str, Any]:
    means, covariances = posterior.smoothed_means, posterior.smoothed_covariances
    return _moments(posterior.marginal_loglik, means, covariances)


def _moments(evidence: Any, means: Any, covariances: Any) -> dict[str, Any]:
    return {"log-evidence": evidence, "means": means, "covariances": covariances}


# The sigma points of d = 2 with these parameters, in either library's terms.
RULE = rd.Unscented(ALPHA, BETA, KAPPA)
THEIR_RULE = UKFHyperParams(ALPHA, BETA, KAPPA)
SMOOTHERS: dict[tuple[str, str], Callable[[Any], dict[str, Any]]] = {
    ("retrodict", "extended"): lambda ys: of_retrodict(
        rd.extended_smoother(PENDULUM, ys, mask=True)
    ),
    ("retrodict", "unscented"): lambda ys: of_retrodict(
        rd.unscented_smoother(PENDULUM, ys, rule=RULE, mask=True)
    ),
    ("dynamax", "extended"): lambda ys: of_dynamax(extended_kalman_smoother(PARAMETERS, ys)),
    ("dynamax", "unscented"): lambda ys: of_dynamax(
        unscented_kalman_smoother(PARAMETERS, ys, THEIR_RULE)
    ),
}
