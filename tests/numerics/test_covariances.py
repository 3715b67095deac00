"""Steps on covariances, and whether the check of their precision is to be trusted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._numerics import condition_covariance, factor_if_precise, linalg, propagate

D, STEPS = 7, 30


def random_steps(seed):
    """Draw the start, weights, noises and designs of a recursion of random difficulty."""
    rng = np.random.default_rng(seed)
    widths, precision, noise = 10.0 ** rng.uniform([-1, -2, -2], [0, 2, 0.5])
    start = np.tril(rng.normal(size=(D, D))) * np.geomspace(1.0, widths, D)
    weight = np.eye(D) + rng.normal(size=(D, D)) * 10.0 ** rng.uniform(-2, -0.3) / np.sqrt(D)
    noises = noise * rng.normal(size=(STEPS, D, D))
    designs = precision * rng.normal(size=(STEPS, 2, D))
    return start, weight, noises, designs


def run(start, weight, noises, designs, dtype):
    start, weight, noises, designs = (
        jnp.asarray(array, dtype) for array in (start, weight, noises, designs)
    )

    def step(covariance, row):
        noise, design = row
        after = condition_covariance(propagate(covariance, weight, noise), design)
        return after, after

    first = linalg.outer_gram(start)
    _, after = jax.lax.scan(step, first, (noises, designs))
    before = jnp.concatenate([first[None], after[:-1]])
    return factor_if_precise(before, weight, noises, after)


def test_one_step_equals_the_joint_law():
    start, weight, noises, designs = random_steps(0)
    start, weight, noise, design = map(jnp.asarray, (start, weight, noises[0], designs[0]))
    covariance = start @ start.T
    predicted = weight @ covariance @ weight.T + noise @ noise.T
    np.testing.assert_allclose(propagate(covariance, weight, noise), predicted, rtol=1e-12)
    information = np.linalg.inv(predicted) + design.T @ design
    np.testing.assert_allclose(
        condition_covariance(predicted, design),
        np.linalg.inv(information),
        rtol=1e-7,
        atol=1e-12,
    )


def test_what_is_called_precise_in_float32_is_precise():
    verdicts = []
    bound = float(jnp.finfo(jnp.float32).eps) ** 0.75
    single, double = jax.jit(run, static_argnums=4), jax.jit(run, static_argnums=4)
    for seed in range(150):
        steps = random_steps(seed)
        scales, precise = single(*steps, jnp.float32)
        verdicts.append(bool(precise))
        if precise:
            exact, _ = double(*steps, jnp.float64)
            whitened = np.linalg.solve(np.asarray(exact), np.asarray(scales, np.float64))
            errors = whitened @ np.swapaxes(whitened, -1, -2) - np.eye(D)
            # The bound is of the error of one step.
            assert np.abs(np.linalg.eigvalsh(errors)).max() < STEPS * bound
    assert 10 < sum(verdicts) < 140  # both verdicts occur


@pytest.mark.parametrize("lost", ["precise rows", "cancelling weights", "NaN"])
def test_lost_directions_are_reported(lost):
    eye = jnp.eye(D)[None]
    weight, after = jnp.eye(D), 0.5 * eye
    assert factor_if_precise(eye, weight, 0 * eye, after)[1]
    if lost == "precise rows":
        after = after.at[0, 2, 2].set(1e-9)
    elif lost == "cancelling weights":
        weight = weight.at[0, 1].set(1e4)
    else:
        after = after.at[0, 0, 0].set(jnp.nan)
    assert not factor_if_precise(eye, weight, 0 * eye, after)[1]
