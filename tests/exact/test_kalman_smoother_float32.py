"""The sequential smoother in float32 against itself in float64, over sixteen orders of R/Q.

Both see the same numbers: series and parameters are rounded to float32 first. A mean can be no
better than float32 stores it, so that the bound is 0.02 posterior standard deviations or four units
of that rounding, whichever is larger.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd

# log10 of the variance of the emission over that of the transition
RATIOS = [-8, -4, 0, 4, 8]


def rotation(angle: float) -> np.ndarray:
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    turn = np.array(
        [[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]]
    )
    return basis @ turn @ basis.T


MODELS = {
    "four observations": (0.95 * rotation(0.1), np.eye(3), 4),
    "one observation": (0.95 * rotation(0.1), np.eye(3), 1),
    "random walks": (np.eye(3), np.tril(np.random.default_rng(5).normal(size=(3, 3))), 2),
    "singular noise": (
        np.array([[0.5, 0.2, 0.1], [1.0, 0, 0], [0, 1.0, 0]]),
        np.diag([1.0, 0, 0]),
        1,
    ),
}


def case(name: str, log_ratio: float, num_times: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Parameters and a simulated series, rounded to float32."""
    weight, noise, obs = MODELS[name]
    rng = np.random.default_rng(0)
    design = rng.normal(size=(obs, 3))
    r, q = min(1.0, 10 ** (log_ratio / 2)), min(1.0, 10 ** (-log_ratio / 2))
    x, xs = np.zeros(3), np.empty((num_times, 3))
    for k, shock in enumerate(q * rng.normal(size=(num_times, 3)) @ noise.T):
        xs[k] = x = weight @ x + shock
    ys = xs @ design.T + r * rng.normal(size=(num_times, obs))
    parameters = {
        "weight": weight, "noise": q * noise, "design": design, "error": r * np.eye(obs),
        "prior": max(q, r) * np.eye(3),
    }  # fmt: skip
    rounded = {key: value.astype(np.float32) for key, value in parameters.items()}
    return rounded, ys.astype(np.float32)


def build(parameters: dict[str, np.ndarray], dtype: jnp.dtype) -> rd.StateSpaceModel:
    p = {name: jnp.asarray(value, dtype) for name, value in parameters.items()}
    zeros = jnp.zeros(3, dtype)
    return rd.StateSpaceModel(
        rd.Gaussian(zeros, p["prior"]),
        rd.LinearGaussianKernel(p["weight"], zeros, p["noise"]),
        rd.LinearGaussianKernel(p["design"], zeros[: len(p["design"])], p["error"])
        if len(p["design"]) <= 3
        else rd.LinearGaussianKernel(p["design"], jnp.zeros(4, dtype), p["error"]),
    )


@eqx.filter_jit
def smooth(model, ys, parallel):
    exact = rd.kalman_smoother(model, ys, mask=True, parallel=parallel)
    marginals = exact.chain.marginals(parallel=parallel)
    return marginals.mean, marginals.scale_tril, exact.log_evidence


@eqx.filter_jit
def score(model, ys):
    return eqx.filter_grad(lambda m: rd.kalman_smoother(m, ys, mask=True).log_evidence)(model)


def compare(name: str, log_ratio: float, num_times: int, parallel: bool = False):
    """Errors in means over their bound and in standard deviations, and the float32 factors."""
    parameters, series = case(name, log_ratio, num_times)
    results = [
        [np.float64(a) for a in smooth(build(parameters, t), jnp.asarray(series, t), parallel)]
        for t in (jnp.float32, jnp.float64)
    ]
    (mean, scale, evidence), (exact_mean, exact_scale, exact_evidence) = results
    std, exact_std = np.linalg.norm(scale, axis=-1), np.linalg.norm(exact_scale, axis=-1)
    rounding = np.finfo(np.float32).eps / 2 * np.max(np.abs(exact_mean), axis=0) / exact_std
    bound = np.maximum(0.02, 4 * rounding)
    mean_error = np.max(np.abs(mean - exact_mean) / exact_std / bound)
    std_error = np.max(np.abs(std / exact_std - 1))
    return mean_error, std_error, scale, abs(evidence / exact_evidence - 1)


def check(name: str, log_ratio: float, num_times: int) -> None:
    mean_error, std_error, scale, evidence_error = compare(name, log_ratio, num_times)
    assert mean_error < 1 and std_error < 0.01 and evidence_error < 1e-3
    # positive definite: a factor with a positive diagonal, by construction and not by repair
    if name != "singular noise":
        assert np.all(np.diagonal(scale, axis1=1, axis2=2) > 0)
    parameters, series = case(name, log_ratio, num_times)
    grads = score(build(parameters, jnp.float32), jnp.asarray(series))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four observations", "one observation"])
def test_float32_is_accurate_on_short_series(name):
    for log_ratio in RATIOS:
        check(name, log_ratio, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("log_ratio", RATIOS)
def test_float32_is_accurate_on_long_series(name, log_ratio):
    check(name, log_ratio, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("log_ratio", [-4, -2, 0, 2, 4])
@pytest.mark.parametrize("name", ["four observations", "one observation"])
def test_parallel_form_is_accurate_to_its_stated_limit(name, log_ratio):
    # Covariances are formed here, so that R/Q may span four orders either way and no more:
    # see docs/decisions/0002-gaussian-numerics.md.
    mean_error, std_error, _, _ = compare(name, log_ratio, 100_000, parallel=True)
    assert mean_error < 1 and std_error < 0.01
