"""The contract of every family in the registry, and what is particular to each kind."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import numpyro.distributions as dist
import pytest

import retrodict as rd
from linear_models import random_model
from registry import FAMILIES

EVERY = pytest.mark.parametrize("name", FAMILIES)
WITH_NETWORK = pytest.mark.parametrize("name", [n for n, c in FAMILIES.items() if c.has_network])
PARALLEL = pytest.mark.parametrize("name", [n for n, c in FAMILIES.items() if c.parallel])

N, LENGTH, CHANGED = 6, 4, 3


class Dims(NamedTuple):
    """Dimensions of a model."""

    state: int
    obs: int
    input: int


SIZES = {"d1": Dims(1, 1, 0), "d2-inputs": Dims(2, 3, 2)}


class Rows(NamedTuple):
    """A series as `infer` takes it, or several along a leading axis."""

    ys: np.ndarray
    mask: np.ndarray
    inputs: np.ndarray | None
    length: Any


@functools.cache
def model_of(size: str) -> rd.StateSpaceModel:
    return random_model(np.random.default_rng(3), *SIZES[size])


@functools.cache
def rows_of(size: str) -> dict[str, Rows]:
    """What is done to one series: each change has its own name."""
    dims, rng = SIZES[size], np.random.default_rng(4)
    inputs = rng.normal(size=(N, dims.input)) if dims.input else None
    ys = np.array(model_of(size).simulate(jax.random.key(5), N, inputs=inputs)[1])
    full = np.ones((N, dims.obs), bool)

    def with_junk(value: float) -> np.ndarray:
        """A row and the first entry of another hidden, and this value put there."""
        return np.where(hidden, value, ys)

    hidden = ~full
    hidden[1], hidden[3, 0] = True, True
    changed = np.where(np.arange(N)[:, None] >= CHANGED, ys + 1.0, ys)
    outlier = ys.copy()
    outlier[2] = 1e6 * ys.std()
    padded = np.where(np.arange(N)[:, None] >= LENGTH, np.nan, with_junk(np.nan))
    junk_inputs = None
    if inputs is not None:
        junk_inputs = np.where(np.arange(N)[:, None] >= LENGTH, 1e3, inputs)
    return {
        "whole": Rows(ys, full, inputs, N),
        "nan": Rows(with_junk(np.nan), full, inputs, N),
        "masked": Rows(with_junk(0.0), ~hidden, inputs, N),
        "masked_junk": Rows(with_junk(1e9), ~hidden, inputs, N),
        "padded": Rows(padded, full, junk_inputs, LENGTH),
        "changed": Rows(changed, full, inputs, N),
        "outlier": Rows(outlier, full, inputs, N),
        "nothing_seen": Rows(np.full_like(ys, np.nan), full, inputs, N),
    }


@functools.cache
def family_of(name: str, size: str) -> rd.AbstractLinearGaussianFamily:
    """A prepared family with weights large enough for its networks to matter."""
    model, rows = model_of(size), rows_of(size)["whole"]
    family = FAMILIES[name].make(model, *SIZES[size]).prepare(model, rows.ys, inputs=rows.inputs)
    return louder(family, 0.3) if FAMILIES[name].has_network else family


def is_network(node: Any) -> bool:
    return isinstance(node, (eqx.nn.MLP, eqx.nn.GRUCell))


def louder(family: Any, scale: float) -> Any:
    """The family with noise of this scale added to the weights of its networks."""
    rng = np.random.default_rng(6)

    def shake(leaf: Any) -> Any:
        return leaf + scale * rng.normal(size=leaf.shape) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(
        lambda node: jax.tree.map(shake, node) if is_network(node) else node,
        family,
        is_leaf=is_network,
    )


class Answer(NamedTuple):
    """What is asked of a family and a series: the chain, the bound and its gradient."""

    chain: rd.LinearGaussianChain
    elbo: jax.Array
    gradient: Any


def answer(family: Any, model: rd.StateSpaceModel, rows: Rows) -> Answer:
    learned, fixed = eqx.partition(family, eqx.is_inexact_array)

    def bound(learned: Any) -> tuple[jax.Array, rd.LinearGaussianChain]:
        ys, mask, inputs, length = rows
        chain = eqx.combine(learned, fixed).infer(ys, mask=mask, inputs=inputs, length=length)
        return rd.elbo(model, chain, ys, mask=mask, inputs=inputs), chain

    (value, chain), gradient = jax.value_and_grad(bound, has_aux=True)(learned)
    return Answer(chain, value, gradient)


jitted_answer = eqx.filter_jit(answer)


@eqx.filter_jit
def answers(family: Any, model: rd.StateSpaceModel, rows: Rows) -> Answer:
    return jax.vmap(lambda one: answer(family, model, one))(rows)


@functools.cache
def answers_of(name: str, size: str) -> dict[str, Answer]:
    """One program for all series of `rows_of`."""
    every = rows_of(size)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *every.values())
    got = answers(family_of(name, size), model_of(size), stacked)
    return {case: jax.tree.map(lambda leaf: leaf[i], got) for i, case in enumerate(every)}


def assert_close(got: Any, expected: Any, tol: float = 1e-12) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tol, atol=tol)


def assert_finite(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        assert np.all(np.isfinite(leaf)), leaf


def differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(np.any(np.abs(np.asarray(a) - np.asarray(b)) > 1e-9) for a, b in pairs)


def first(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:count], tree)


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> str:
    return request.param


# --- one family, stored, streamed and batched -----------------------------------------------------


@EVERY
def test_a_stream_gives_the_chain_of_the_stored_series(name: str, size: str):
    """Row after row, with NaN and without, and the first rows alone."""
    family, rows = family_of(name, size), rows_of(size)["nan"]
    step = eqx.filter_jit(lambda family, state, y, u: family.step(state, y, u=u))
    state, factors = family.init(), []
    for k in range(N):
        u = None if rows.inputs is None else rows.inputs[k]
        state, factor = step(family, state, rows.ys[k], u)
        factors.append(factor)
    stream = jax.tree.map(lambda *leaves: jnp.stack(leaves), *factors)
    chain = answers_of(name, size)["nan"].chain
    assert_close(stream.law, chain.laws)
    assert_close(jax.tree.map(lambda leaf: leaf[1:], stream.kernel), chain.kernels)


@EVERY
def test_infer_of_one_series_and_of_its_first_rows(name: str, size: str):
    """What `vmap` gave for the batch; and a prefix of the chain is the chain of the prefix."""
    family, rows = family_of(name, size), rows_of(size)["whole"]
    batched = answers_of(name, size)["whole"].chain
    whole = family.infer(rows.ys, inputs=rows.inputs)
    assert whole.length is None
    assert_close((whole.laws, whole.kernels), (batched.laws, batched.kernels))
    inputs = None if rows.inputs is None else rows.inputs[:LENGTH]
    assert_close(family.infer(rows.ys[:LENGTH], inputs=inputs), whole.prefix(LENGTH))


@EVERY
def test_a_batch_gives_what_its_series_give_one_by_one(name: str, size: str):
    family = family_of(name, size)
    for case in ("nan", "padded"):
        ys, mask, inputs, length = rows_of(size)[case]
        alone = family.infer(ys, mask=mask, inputs=inputs, length=length)
        assert_close(alone, answers_of(name, size)[case].chain)


@EVERY
def test_padding_changes_nothing(name: str, size: str):
    """Rows beyond the length repeat the terminal law and lead back to where one is."""
    got = answers_of(name, size)
    padded, whole = got["padded"].chain, got["nan"].chain
    assert int(padded.length) == LENGTH
    assert_close(first(padded.laws, LENGTH), first(whole.laws, LENGTH))
    assert_close(first(padded.kernels, LENGTH - 1), first(whole.kernels, LENGTH - 1))
    for k in range(LENGTH, N):
        law, terminal = (jax.tree.map(lambda leaf: leaf[i], padded.laws) for i in (k, LENGTH - 1))
        assert_close(law, terminal)
    beyond = jax.tree.map(lambda leaf: np.asarray(leaf[LENGTH - 1 :]), padded.kernels)
    eye = np.broadcast_to(np.eye(padded.state_dim), beyond.weight.shape)
    np.testing.assert_array_equal(beyond.weight, eye)
    np.testing.assert_array_equal(beyond.bias, 0.0)
    np.testing.assert_array_equal(beyond.scale_tril, 0.0)


@EVERY
def test_a_missing_value_is_nan_or_masked_and_has_no_influence(name: str, size: str):
    got = answers_of(name, size)
    for case in ("masked", "masked_junk"):
        assert_close(got[case].chain, got["nan"].chain)
        assert_close(got[case].elbo, got["nan"].elbo)
    assert differ(got["nan"].chain.laws, got["whole"].chain.laws)


@EVERY
def test_no_factor_sees_the_future(name: str, size: str):
    """q_k reads y_0..y_k, and q_{k-1|k} reads y_0..y_{k-1}: no further and no less."""
    got = answers_of(name, size)
    before, after = got["whole"].chain, got["changed"].chain
    jax.tree.map(
        np.testing.assert_array_equal, first(before.laws, CHANGED), first(after.laws, CHANGED)
    )
    # Row k-1 holds q_{k-1|k}; that of k = CHANGED is the last which has not seen the change.
    jax.tree.map(
        np.testing.assert_array_equal,
        first(before.kernels, CHANGED),
        first(after.kernels, CHANGED),
    )
    for k in range(CHANGED, N):
        assert differ(before.laws.mean[k], after.laws.mean[k])
    assert differ(before.kernels.bias[CHANGED], after.kernels.bias[CHANGED])


@EVERY
def test_scales_are_lower_factors_with_positive_diagonals(name: str, size: str):
    for case, got in answers_of(name, size).items():
        existing = LENGTH if case == "padded" else N
        for scales in (
            first(got.chain.laws.scale_tril, existing),
            first(got.chain.kernels.scale_tril, existing - 1),
        ):
            np.testing.assert_array_equal(scales, np.tril(scales))
            assert np.all(np.diagonal(scales, axis1=1, axis2=2) > 0)


@EVERY
def test_chains_bounds_and_gradients_are_finite(name: str, size: str):
    """With missing rows, padding, an outlier of a million deviations, and nothing seen at all."""
    for got in answers_of(name, size).values():
        assert_finite(got)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(answers_of(name, size)["nan"][2]))


@EVERY
def test_units_are_not_learned(name: str):
    gradient = answers_of(name, "d1")["whole"].gradient
    if FAMILIES[name].has_network:
        for leaf in jax.tree.leaves(gradient.coordinates):
            np.testing.assert_array_equal(leaf, 0.0)


@EVERY
def test_float32_stays_float32(name: str, x32: None):
    dims = SIZES["d2-inputs"]
    model = random_model(np.random.default_rng(3), *dims)
    rows = rows_of("d2-inputs")["nan"]
    ys, inputs = (np.asarray(leaf, np.float32) for leaf in (rows.ys, rows.inputs))
    family = FAMILIES[name].make(model, *dims).prepare(model, ys, inputs=inputs)
    rows = jax.tree.map(jnp.asarray, Rows(ys, rows.mask, inputs, LENGTH))
    got = jitted_answer(family, model, rows)
    assert_finite(got)
    for leaf in jax.tree.leaves((family, got)):
        if eqx.is_inexact_array(leaf):
            assert leaf.dtype == np.float32
    state, factor = family.step(family.init(), ys[0], u=inputs[0])
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == jax.tree.map(
        lambda leaf: leaf.dtype, family.init()
    )
    np.testing.assert_allclose(factor.law.mean, got.chain.laws.mean[0], rtol=1e-5, atol=1e-5)


@EVERY
def test_a_file_gives_the_family_back_bit_by_bit(name: str, tmp_path: Path):
    family = family_of(name, "d2-inputs")
    rd.save(tmp_path / "family.rd", family)
    back = rd.load(tmp_path / "family.rd")
    assert type(back) is type(family)
    assert jax.tree.structure(back) == jax.tree.structure(family)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(family), strict=True):
        if eqx.is_array(one):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    ys, mask, inputs, length = rows_of("d2-inputs")["nan"]
    again, before = (f.infer(ys, mask=mask, inputs=inputs, length=length) for f in (back, family))
    jax.tree.map(np.testing.assert_array_equal, again, before)


# --- where a family starts ------------------------------------------------------------------------

START_N = 12


def autoregression(
    weight: float = 0.9,
    noise: float | None = None,
    *,
    obs_scale: float = 1.0,
    state_scale: float = 1.0,
    mean: float = 0.0,
) -> rd.StateSpaceModel:
    """A scalar model with a prior of deviation `state_scale`, stationary unless told otherwise."""
    noise = state_scale * (np.sqrt(1 - weight**2) if noise is None else noise)
    eye = jnp.eye(1)
    return rd.StateSpaceModel(
        rd.Gaussian(jnp.full(1, mean), state_scale * eye),
        rd.LinearGaussianKernel(weight * eye, jnp.full(1, (1 - weight) * mean), noise * eye),
        rd.LinearGaussianKernel(obs_scale / state_scale * eye, jnp.zeros(1), 0.5 * obs_scale * eye),
    )


class Pull(eqx.Module):
    """A drift with two stable points."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + 0.3 * jnp.sin(x)


def two_wells() -> rd.StateSpaceModel:
    linear = autoregression()
    kernel = rd.NonlinearGaussianKernel(Pull(), 0.3 * jnp.eye(1))
    return rd.StateSpaceModel(linear.prior, kernel, linear.emission)


def simulated(model: rd.StateSpaceModel) -> np.ndarray:
    return np.array(model.simulate(jax.random.key(7), START_N)[1])


class Start(NamedTuple):
    """A model and data that a family is prepared for; `near` if its prior is stationary."""

    make: Callable[[], rd.StateSpaceModel]
    data: Callable[[rd.StateSpaceModel], np.ndarray] = simulated
    near: bool = True


STARTS: dict[str, Start] = {
    "stationary": Start(autoregression),
    "small_data": Start(lambda: autoregression(obs_scale=1e-8)),
    "large_data": Start(lambda: autoregression(obs_scale=1e8)),
    "small_state": Start(lambda: autoregression(state_scale=1e-6)),
    "large_state": Start(lambda: autoregression(state_scale=1e6)),
    "far_from_zero": Start(lambda: autoregression(mean=1e5)),
    "noise_alone": Start(lambda: autoregression(0.0)),
    "persistent": Start(lambda: autoregression(0.9999)),
    "constant_data": Start(autoregression, lambda _: np.full((START_N, 1), 3e5)),
    "zero_data": Start(autoregression, lambda _: np.zeros((START_N, 1))),
    "nothing_seen": Start(autoregression, lambda _: np.full((START_N, 1), np.nan)),
    "one_value_seen": Start(
        autoregression, lambda m: np.where(np.arange(START_N)[:, None] == 4, simulated(m), np.nan)
    ),
    "outliers": Start(
        autoregression, lambda m: simulated(m) * np.where(np.arange(START_N) == 5, 1e6, 1.0)[:, None]
    ),
    "random_walk": Start(lambda: autoregression(1.0, 0.3), near=False),
    "unstable": Start(lambda: autoregression(1.05, 0.3), near=False),
    "two_wells": Start(two_wells, near=False),
}


def prior_moments(model: rd.StateSpaceModel) -> tuple[np.ndarray, np.ndarray]:
    """Means and deviations of the states before anything is seen, by simulation of many paths."""
    keys = jax.random.split(jax.random.key(8), 4000)
    paths = jax.vmap(lambda key: model.simulate(key, START_N)[0])(keys)
    return np.mean(paths, axis=0), np.std(paths, axis=0)


@functools.cache
def start_of(case: str) -> tuple[rd.StateSpaceModel, np.ndarray]:
    model = STARTS[case].make()
    return model, STARTS[case].data(model)


@functools.cache
def cached_prior_moments(case: str) -> tuple[np.ndarray, np.ndarray]:
    return prior_moments(start_of(case)[0])


@pytest.mark.parametrize("case", STARTS)
@WITH_NETWORK
def test_an_untrained_family_is_near_the_prior_chain(name: str, case: str):
    """Whatever the units of data and states; where the prior is stationary, within its spread."""
    model, ys = start_of(case)
    family = FAMILIES[name].make(model, 1, 1, 0).prepare(model, ys)
    assert_finite(eqx.filter(family, eqx.is_inexact_array))
    rows = Rows(jnp.asarray(ys), jnp.ones(ys.shape, bool), None, None)
    got = jitted_answer(family, model, rows)
    assert_finite(got)
    mean, std = cached_prior_moments(case)
    marginals = got.chain.marginals()
    away = np.abs(marginals.mean - mean) / std
    ratio = np.log2(np.asarray(marginals.std) / std)
    limit = 1.0 if STARTS[case].near else 1.7
    assert away.max() < 1.0
    assert np.abs(ratio).max() < limit
