"""The ELBO in segments is the ELBO, and its gradient needs less memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_options import fit_options
from jaxtyping import Array
from linear_models import random_mask, random_model
from nonlinear_models import nonlinear_kernel
from registry import FAMILIES

import retrodict as rd
from retrodict._expectations.elbo import elbo_of_series
from retrodict._expectations.expectation import Estimate
from retrodict._families import AbstractFactorFamily, infer_series
from retrodict._learning.dataset import Minibatch
from retrodict._learning.elbo_loss import ElboLoss
from retrodict._learning.elbo_of_rows import elbo_of_rows
from retrodict._learning.segments import _segments
from retrodict._model import Series, prepare_batch

N, SEGMENT = 13, 4
LENGTHS = np.array([13, 12, 9, 6, 5, 2, 1])
"""At both ends of a segment and within one, a pair, and a single row."""


def through_tanh(model: rd.StateSpaceModel) -> rd.StateSpaceModel:
    return replace(model, emission=nonlinear_kernel(jnp.tanh, 0.3, 2))


def batch_of(rng: np.random.Generator, inputs: int = 0, lengths: Any = LENGTHS) -> Series:
    count = len(LENGTHS)
    ys = np.where(random_mask(rng, count * N, 2, 0.8), rng.normal(size=(count * N, 2)), np.nan)
    us = rng.normal(size=(count, N, inputs)) if inputs else None
    return prepare_batch(
        ys.reshape(count, N, 2),
        mask=None,
        inputs=us,
        length=lengths,
        takes_input=inputs > 0,
    )


def both_ways(
    family: AbstractFactorFamily,
    model: rd.StateSpaceModel,
    batch: Series,
    estimator: Any,
    segment: int = SEGMENT,
) -> list[tuple[Array, Any]]:
    """The bounds of all series and the gradient of their sum, with all rows and in segments."""
    parameters, fixed = eqx.partition((family, model), eqx.is_inexact_array)

    def at_once(family: Any, model: Any, series: Series) -> Estimate:
        return elbo_of_series(model, infer_series(family, series), series, estimator, None)

    def cut(family: Any, model: Any, series: Series) -> Estimate:
        return elbo_of_rows(model, family, series, estimator, None, segment=segment)

    def total(way: Callable[..., Estimate]) -> Callable[..., tuple[Array, Array]]:
        def run(parameters: Any) -> tuple[Array, Array]:
            family, model = rd.unwrap(eqx.combine(parameters, fixed))
            values = jax.vmap(lambda series: way(family, model, series).value)(batch)
            return jnp.sum(values), values

        return run

    results = []
    for way in (at_once, cut):
        run = jax.jit(jax.value_and_grad(total(way), has_aux=True))
        (_, values), gradient = run(parameters)
        results.append((values, gradient))
    return results


def assert_same(results: list[tuple[Array, Any]]) -> None:
    (values, gradient), (cut_values, cut_gradient) = results
    np.testing.assert_allclose(cut_values, values, rtol=1e-12, atol=1e-10)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(cut_gradient), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-9)


def test_segments_give_exact_elbo_and_gradient_for_any_length():
    rng = np.random.default_rng(0)
    family = rd.ConjugateFamily(jax.random.key(0), 1, 2, width=3, depth=1)
    assert_same(both_ways(family, random_model(rng, 1, 2), batch_of(rng), rd.ClosedForm()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in FAMILIES.items() if not case.sampled])
def test_segments_are_exact_for_every_family_with_closed_form(name: str):
    rng = np.random.default_rng(1)
    model = random_model(rng, 2, 2, 1)
    family = FAMILIES[name].make(model, 2, 2, 1)
    assert_same(both_ways(family, model, batch_of(rng, 1, None), rd.ClosedForm()))


@pytest.mark.slow
@pytest.mark.parametrize("segment", [1, 5, 12, 40])
def test_segments_of_any_size_are_exact_by_quadrature(segment: int):
    rng = np.random.default_rng(2)
    model = random_model(rng, 2, 2)
    results = both_ways(
        rd.KalmanFamily(model), through_tanh(model), batch_of(rng), rd.Quadrature(4), segment
    )
    assert_same(results)


def test_a_segment_is_not_longer_than_the_series():
    """Or ten rows would be filled up to as many as were asked for, and read."""
    family = rd.KalmanFamily(random_model(np.random.default_rng(0), 2, 2))
    series = jax.tree.map(lambda leaf: leaf[0], batch_of(np.random.default_rng(0)))
    cut = jax.eval_shape(lambda: _segments(rd.unwrap(family), family.init(), series, 10**9))
    assert cut.rows.ys.shape == (1, N - 1, 2)


def sampled_in_segments(
    family: Any, model: Any, batch: Series, estimator: Any
) -> Callable[..., Estimate]:
    """The bounds of all series in segments, from the parameters of the family."""

    def run(family: Any) -> Estimate:
        def one(series: Series, key: Any) -> Estimate:
            return elbo_of_rows(model, family, series, estimator, key, segment=SEGMENT)

        return jax.vmap(one)(batch, jax.random.split(jax.random.key(3), batch.ys.shape[0]))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["antithetic", "independent"])
def test_paths_through_segments_give_the_log_evidence(noise: Any):
    """And without the score no path has a gradient in the family."""
    rng = np.random.default_rng(4)
    model, batch = random_model(rng, 1, 2), batch_of(rng)
    exact = jax.vmap(
        lambda s: rd.kalman_smoother(model, s.ys, mask=s.mask, length=s.length).log_evidence
    )(batch)
    estimator = rd.BackwardSampling(4, noise=noise, stop_score=True)
    family = rd.unwrap(rd.KalmanFamily(model))
    run = sampled_in_segments(family, model, batch, estimator)
    slope = eqx.filter_grad(lambda family: jnp.sum(run(family).value))

    bounds, gradient = eqx.filter_jit(lambda family: (run(family), slope(family)))(family)
    np.testing.assert_allclose(bounds.value, exact, rtol=1e-10)
    np.testing.assert_allclose(bounds.standard_error, 0.0, atol=1e-10)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("mixture", rd.BackwardSampling(4000, by_component=True)),
        ("nonlinear_mixture", rd.BackwardSampling(4000)),
        ("recurrent_free", rd.RaoBlackwellised(4000)),
    ],
)
def test_segmented_draws_have_the_mean_of_joint_draws(name: str, estimator: Any):
    """Seven series of each case, |z| < 4: a false alarm in 2,000 by chance, with fixed seeds."""
    rng = np.random.default_rng(5)
    linear, batch = random_model(rng, 2, 2), batch_of(rng)
    family, model = rd.unwrap(FAMILIES[name].make(linear, 2, 2, 0)), through_tanh(linear)
    cut = eqx.filter_jit(sampled_in_segments(family, model, batch, estimator))(family)

    @eqx.filter_jit
    def unsegmented(series: Series, key: Any) -> Estimate:
        return elbo_of_series(model, infer_series(family, series), series, estimator, key)

    at_once = jax.vmap(unsegmented)(batch, jax.random.split(jax.random.key(6), len(LENGTHS)))
    error = jnp.sqrt(cut.standard_error**2 + at_once.standard_error**2)
    assert float(jnp.max(jnp.abs(cut.value - at_once.value) / error)) < 4.0


def temporaries(num_times: int, segment: int | None) -> int:
    """Bytes that a gradient needs beside its arguments."""
    model = random_model(np.random.default_rng(0), 2, 2)
    pair = (rd.ConjugateFamily(jax.random.key(0), 2, 2, width=4, depth=1), model)
    parameters, fixed = eqx.partition(pair, eqx.is_inexact_array)
    objective = ElboLoss(fixed, rd.ClosedForm(), None, 0.0, segment=segment)
    series = jax.ShapeDtypeStruct((1, num_times, 2), jnp.float64)

    def loss(parameters: Any, ys: Array) -> Array:
        batch = Minibatch(jax.vmap(Series)(ys, None, None, None), 1)
        return objective(parameters, batch, jax.random.key(0))

    compiled = jax.jit(jax.grad(loss)).lower(parameters, series).compile()
    return compiled.memory_analysis().temp_size_in_bytes  # pyright: ignore


@pytest.mark.slow
def test_memory_grows_with_the_root_of_the_length():
    """Sixteen times the rows: sixteen times the memory if all are kept, four times in segments.

    The rows themselves are there in both cases, a sixteenth part of what is kept.
    """
    short, long = 1024, 16 * 1024
    assert temporaries(long, None) / temporaries(short, None) > 12
    rows = 8 * 2 * 3  # a row of observations and of what says whether they exist, cut and padded
    few, many = (temporaries(n, int(n**0.5)) for n in (short, long))
    assert (many - rows * long) / (few - rows * short) < 6
    assert many < temporaries(long, None) / 8


FIT: dict[str, Any] = {"num_steps": 10, "chunk_size": 5, "batch_size": 3, "progress": False}


@pytest.mark.slow
def test_rereading_fit_ends_with_the_same_parameters():
    rng = np.random.default_rng(7)
    model, ys = random_model(rng, 1, 2), rng.normal(size=(4, 10, 2))
    family = rd.ConjugateFamily(jax.random.key(0), 1, 2, width=3, depth=1)
    one, other = (
        rd.fit(jax.random.key(1), family, model, ys, **fit_options(**FIT, remat=remat))
        for remat in (False, 3)
    )
    np.testing.assert_allclose(other.history, one.history, rtol=1e-9)
    for a, b in zip(jax.tree.leaves(one.family), jax.tree.leaves(other.family), strict=True):
        if eqx.is_array(a):
            np.testing.assert_allclose(b, a, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_reread_windows_are_the_same_windows():
    rng = np.random.default_rng(8)
    model, ys = random_model(rng, 1, 2), rng.normal(size=(2, 60, 2))
    ys[1, 7:20] = np.nan
    family = rd.ConjugateFamily(jax.random.key(0), 1, 2, width=3, depth=1)
    one, other = (
        rd.fit(jax.random.key(1), family, model, ys, **fit_options(**FIT, window=16, remat=remat))
        for remat in (False, True)
    )
    np.testing.assert_allclose(other.history, one.history, rtol=1e-9)


def test_reading_again_and_in_parallel_exclude_each_other():
    with pytest.raises(ValueError, match="remat=True and parallel=True"):
        rd.Objective(parallel=True, remat=True)
