"""What runs in logarithmic depth equals what runs row by row: chains, bounds, gradients, fits."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_options import fit_options
from jax.extend.core import jaxprs_in_params
from linear_models import random_model

import retrodict as rd
from retrodict._numerics.associative_scan import linear_recurrence

N, LENGTH = 37, 30
"""More rows than the scan sums one after another, and no power of two."""


def nonlinear_model() -> rd.StateSpaceModel:
    linear = random_model(np.random.default_rng(0), 2, 2)
    return replace(linear, emission=rd.NonlinearGaussianKernel(jnp.tanh, 0.5 * jnp.eye(2)))


@functools.cache
def problem() -> tuple[rd.StateSpaceModel, rd.ScanFamily, np.ndarray]:
    """A model, a family, and a series with gaps and padding."""
    model = nonlinear_model()
    ys = np.array(model.simulate(jax.random.key(1), N)[1])
    family = rd.ScanFamily(jax.random.key(0), 2, 2, hidden=4, depth=2, width=4).prepare(model, ys)
    ys[3], ys[7, 0], ys[LENGTH:] = np.nan, np.nan, np.nan
    return model, family, ys


class Answers(NamedTuple):
    """Everything that takes the option."""

    marginals: Any
    pairwise: Any
    moments: Any
    paths: Any
    expectation: Any
    sampled: Any
    bounds: Any
    gradient: Any


ESTIMATORS = {
    "quadrature": rd.Quadrature(3),
    "paths": rd.BackwardSampling(4, noise="antithetic"),
}


@eqx.filter_jit
def answers(model: rd.StateSpaceModel, family: rd.ScanFamily, ys: Any, parallel: bool) -> Answers:
    key = jax.random.key(2)

    def bounds(family: rd.ScanFamily) -> tuple[Any, Any]:
        chain = family.infer(ys, length=LENGTH, parallel=parallel)
        elbos = {
            name: rd.elbo(model, chain, ys, estimator=each, key=key, parallel=parallel)
            for name, each in ESTIMATORS.items()
        }
        return sum(elbos.values()), (elbos, chain)

    (_, (elbos, chain)), gradient = eqx.filter_value_and_grad(bounds, has_aux=True)(family)
    return Answers(
        chain.marginals(parallel=parallel),
        chain.pairwise(parallel=parallel).covariance,
        rd.marginals(chain, parallel=parallel),
        chain.sample(key, 3, parallel=parallel),
        rd.expectation(chain, rd.SecondMoments(), parallel=parallel),
        rd.marginals(chain, estimator=rd.BackwardSampling(4), key=key, parallel=parallel),
        elbos,
        gradient,
    )


@functools.cache
def answers_of(parallel: bool) -> Answers:
    return answers(*problem(), parallel)


@pytest.mark.parametrize("what", Answers._fields)
def test_parallel_results_equal_sequential_results(what: str):
    """With missing entries, a missing row and padding."""
    got, expected = (jax.tree.leaves(getattr(answers_of(p), what)) for p in (True, False))
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_parallel_program_has_no_loop_over_time():
    """Neither in inference and marginals nor in the gradient of the bound."""
    model, family, _ = problem()
    ys = np.zeros((1000, 2))

    def loss(family: rd.ScanFamily) -> Any:
        chain = family.infer(ys, parallel=True)
        return rd.elbo(model, chain, ys, estimator=rd.Quadrature(2), parallel=True)

    arrays, rest = eqx.partition(family, eqx.is_inexact_array)
    traced = jax.make_jaxpr(jax.grad(lambda arrays: loss(eqx.combine(arrays, rest))))(arrays)
    lengths = list(_loop_lengths(traced.jaxpr))
    assert lengths
    assert max(lengths) <= 16


def _loop_lengths(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        assert equation.primitive.name != "while"
        if equation.primitive.name == "scan":
            yield equation.params["length"]
        for inner in jaxprs_in_params(equation.params):
            yield from _loop_lengths(inner)


@pytest.mark.parametrize("n", [1, 50])
def test_parallel_linear_recurrence_equals_loop(n: int):
    rng = np.random.default_rng(n)
    decays, drives, weights = (jnp.asarray(rng.uniform(-1, 1, size=(n, 2))) for _ in range(3))

    def by_loop(decays: jax.Array, drives: jax.Array) -> jax.Array:
        def move(h: jax.Array, row: tuple) -> tuple:
            h = row[0] * h + row[1]
            return h, h

        return jax.lax.scan(move, jnp.zeros(2), (decays, drives))[1]

    def both(recur: Any) -> Any:
        value, slopes = jax.value_and_grad(
            lambda *a: jnp.sum(weights * recur(*a) ** 2), argnums=(0, 1)
        )(decays, drives)
        return value, *slopes

    for one, other in zip(both(linear_recurrence), both(by_loop), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_parallel_fit_finds_the_same_parameters():
    model, family, ys = problem()
    batch = np.stack([ys, ys[::-1]])
    options: dict[str, Any] = {"num_steps": 10, "chunk_size": 5, "progress": False}
    options |= {"mask": ~np.isnan(batch), "length": [LENGTH, N], "estimator": rd.Quadrature(3)}
    results = [
        rd.fit(jax.random.key(3), family, model, batch, **fit_options(parallel=p, **options))
        for p in (False, True)
    ]
    leaves = [jax.tree.leaves(eqx.filter(each.family, eqx.is_array)) for each in results]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


class Affine(rd.AbstractBackwardKernel):
    """A kernel that is linear Gaussian, which a chain that is sampled does not know."""

    def law(self, step: Any, x: Any) -> rd.Gaussian:
        return step.law(x, None)


@pytest.mark.usefixtures("untyped")
def test_sequential_methods_refuse_parallel():
    model, family, ys = problem()
    key, ones = jax.random.key(0), jnp.ones((2, 1, 1))
    chain = rd.LinearGaussianChain.from_arrays(ones[:, 0], ones, ones[1:], ones[1:, 0], ones[1:])
    sampled = rd.SampledChain(chain.laws, Affine(), chain.kernels)
    with pytest.raises(ValueError, match=r"Recursive has no parallel form\. Use ClosedForm"):
        rd.expectation(chain, rd.StateSum(), estimator=rd.Recursive(), parallel=True)
    with pytest.raises(ValueError, match="window=8 and parallel=True"):
        rd.Objective(window=8, parallel=True)
    with pytest.raises(TypeError, match=r"paths of a SampledChain .* Use parallel=False"):
        rd.marginals(sampled, estimator=rd.BackwardSampling(2), key=key, parallel=True)
