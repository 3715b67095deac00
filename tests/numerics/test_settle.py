"""Settling scans and maps equal the plain loops, and skip repeated steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._numerics.settle import QuickStep, scales_agree, settling_scan

COUNT = 400


def riccati(fixed, scale, row):
    """One step of the filter of a scalar state: x' = w x + q ε, observed with gain h."""
    weight, noise = fixed
    predicted = (weight * scale) ** 2 + noise**2
    return jnp.sqrt(predicted / (1.0 + row**2 * predicted))


def carries(step, fixed, init, rows, reverse=False):
    """Return the carries of a plain loop."""

    def step_twice(carry, row):
        carry = step(fixed, carry, row)
        return carry, carry

    return jax.lax.scan(step_twice, init, rows, reverse=reverse)[1]


def run(weight, rows, reverse=False, start=1.0):
    fixed, init = (jnp.asarray(weight), jnp.asarray(0.5)), jnp.full((1, 1), start)
    rows = jnp.asarray(rows)[:, None, None]
    return settling_scan(riccati, scales_agree, fixed, init, rows, len(rows), reverse=reverse)


def plain(weight, rows, reverse=False, start=1.0):
    fixed, init = (jnp.asarray(weight), jnp.asarray(0.5)), jnp.full((1, 1), start)
    rows = jnp.asarray(rows)[:, None, None]
    return carries(riccati, fixed, init, rows, reverse)


def designs():
    rng = np.random.default_rng(0)
    gaps = np.ones(COUNT)
    gaps[[50, 51, 200]] = 0.0
    return {
        "constant": np.ones(COUNT),
        "with gaps": gaps,
        "at random": rng.uniform(size=COUNT),
        "periodic": np.tile([1.0, 0.2], COUNT // 2),
        "one row": np.ones(1),
    }


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", designs())
def test_a_settling_scan_equals_the_plain_scan(name, reverse):
    rows = designs()[name]
    np.testing.assert_allclose(run(0.9, rows, reverse), plain(0.9, rows, reverse), rtol=1e-14)


def test_a_carry_that_never_settles_is_computed_to_the_end():
    # A random walk without observations: its variance grows at every step.
    rows = np.zeros(COUNT)
    np.testing.assert_allclose(run(1.0, rows), plain(1.0, rows), rtol=1e-14)


@pytest.mark.parametrize("weight", [1.0 + 2**-22, 1.0 - 2**-20])
def test_slow_drift_is_not_treated_as_settled(weight, x32):
    # One step changes the scale by two or eight roundings, and thousands of them by percents.
    def drift(fixed, scale, row):
        return fixed * scale

    fixed, init = jnp.asarray(weight, jnp.float32), jnp.ones((1, 1), jnp.float32)
    scales = settling_scan(drift, scales_agree, fixed, init, jnp.zeros((20_000, 1)), 20_000)
    assert scales[-1, 0, 0] == pytest.approx(weight**20_000, rel=2e-3)


def count_steps(rows):
    """Run the recursion, and count the steps that were computed."""
    calls = []

    def counted(fixed, scale, row):
        jax.debug.callback(lambda: calls.append(1))
        return riccati(fixed, scale, row)

    fixed, init = (jnp.asarray(0.9), jnp.asarray(0.5)), jnp.ones((1, 1))
    rows = jnp.asarray(rows)[:, None, None]
    settling_scan(counted, scales_agree, fixed, init, rows, len(rows))
    jax.effects_barrier()
    return len(calls)


def test_repeated_steps_are_skipped_until_the_next_change():
    once = count_steps(np.ones(COUNT))
    assert once < 80
    gap = np.ones(COUNT)
    gap[200:210] = 0.0
    # The recursion settles at the start, within the gap or at its end, and after it.
    assert once < count_steps(gap) < 3 * once
    assert count_steps(np.tile([1.0, 0.2], COUNT // 2)) == COUNT


def test_derivatives_and_batches_are_those_of_the_plain_scan():
    rows = designs()["with gaps"]

    def total(scan, weight):
        return jnp.sum(scan(weight, rows))

    for order in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        assert order(partial(total, run))(0.9) == pytest.approx(order(partial(total, plain))(0.9))
    weights = jnp.array([0.3, 0.9, 1.0])
    np.testing.assert_allclose(
        jax.vmap(partial(total, run))(weights), jax.vmap(partial(total, plain))(weights), rtol=1e-13
    )


def weigh_by_square(fixed, rows, before, after):
    return fixed[0] * rows**2 * before * after


@pytest.mark.parametrize("series", [3, 40])
def test_derivatives_of_compiled_batches_are_those_of_each_series(series):
    # As many series as steps as well: then swapped axes fit, and give wrong numbers.
    rows = jnp.asarray(np.random.default_rng(0).uniform(size=(series, 40, 1, 1)))

    def total(weight, rows):
        fixed, init = (weight, jnp.asarray(0.5)), jnp.ones((1, 1))
        scan = partial(settling_scan, riccati, scales_agree, fixed, init, rows, 40)
        last, out = scan()[-1], scan(finish=weigh_by_square)
        return jnp.sum(jnp.sin(last)) + jnp.sum(jnp.arange(40.0) * out[:, 0, 0])

    def of_all(weight):
        return jnp.sum(jax.vmap(jax.jit(total), in_axes=(None, 0))(weight, rows))

    def nested(weight):
        return jax.vmap(jax.vmap(jax.jit(total), (None, 0)), (0, None))(weight[None], rows).sum()

    for order in (jax.grad, jax.hessian):
        expected = sum(order(total)(0.9, row) for row in rows)
        for batched in (of_all, nested):
            np.testing.assert_allclose(order(batched)(0.9), expected, rtol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", designs())
def test_what_follows_a_step_equals_that_of_the_plain_scan(name, reverse):
    rows = jnp.asarray(designs()[name])[:, None, None]
    fixed, init = (jnp.asarray(0.9), jnp.asarray(0.5)), jnp.ones((1, 1))

    def finish(fixed, rows, before, after):
        # Not finite on padding, whose values must not be read.
        return fixed[0] * rows * before + 1.0 / after

    def finished(rows):
        return settling_scan(
            riccati, scales_agree, fixed, init, rows, len(rows), finish=finish, reverse=reverse
        )

    def expected(rows):
        after = carries(riccati, fixed, init, rows, reverse)
        before = [after[1:], init[None]] if reverse else [init[None], after[:-1]]
        return 0.9 * rows * jnp.concatenate(before) + 1.0 / after

    np.testing.assert_allclose(finished(rows), expected(rows), rtol=1e-14)
    slopes, wanted = (
        jax.grad(lambda rows, f=f: jnp.sum(f(rows)))(rows) for f in (finished, expected)
    )
    np.testing.assert_allclose(slopes, wanted, rtol=1e-12)
    both = jnp.stack([rows, 2.0 * rows])
    np.testing.assert_allclose(jax.vmap(finished)(both)[1], expected(2.0 * rows), rtol=1e-14)


def square(fixed, variance, row):
    """Compute `riccati` on variances."""
    weight, noise = fixed
    predicted = weight**2 * variance + noise**2
    return predicted / (1.0 + row**2 * predicted)


@pytest.mark.parametrize("precise", [True, False])
def test_a_cheaper_step_is_used_only_where_it_is_precise(precise):
    # Its values are marked, to tell the two forms from each other.
    def read(fixed, rows, before, after):
        return 3.0 * jnp.sqrt(after), jnp.all(after < (1.0 if precise else 0.2))

    quick = QuickStep(jnp.square, square, read)
    fixed, init = (jnp.asarray(0.9), jnp.asarray(0.5)), jnp.ones((1, 1))

    def scan(rows):
        return settling_scan(riccati, scales_agree, fixed, init, rows, COUNT, quick=quick)

    rows = jnp.asarray(designs()["at random"])[:, None, None]
    expected = carries(riccati, fixed, init, rows)
    factor = 3.0 if precise else 1.0
    np.testing.assert_allclose(scan(rows), factor * expected, rtol=1e-13)
    # Where steps repeat they are skipped instead.
    few = jnp.asarray(designs()["with gaps"])[:, None, None]
    np.testing.assert_allclose(scan(few), carries(riccati, fixed, init, few), rtol=1e-13)
    # In a batch, one series that needs the original step decides for all.
    both = jax.vmap(scan)(jnp.stack([rows, 2.0 * rows]))
    np.testing.assert_allclose(both[0], factor * expected, rtol=1e-13)
    # Derivatives are those of the original step.
    slope = jax.grad(lambda rows: jnp.sum(scan(rows)))(rows)
    wanted = jax.grad(lambda rows: jnp.sum(carries(riccati, fixed, init, rows)))(rows)
    np.testing.assert_allclose(slope, wanted, rtol=1e-12)
