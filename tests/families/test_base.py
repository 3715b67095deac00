"""The contract of every family in the registry, and what is particular to each kind."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_close
from linear_models import linear_kernel, linear_model, random_model
from nonlinear_models import nonlinear_kernel, poisson_emission
from registry import FAMILIES

import retrodict as rd
from retrodict._families.perceptron import centres

# Quick runs try the exact family, one with gates and one that draws: all of them share their base,
# and each compiles every test anew. The others are run with the slow tests.
OTHERS = (
    "conjugate",
    "gated_scale",
    "recurrent_free",
    "recurrent_tied",
    "scan",
    "nonlinear",
    "nonlinear_mixture",
)


def _marked(names: Iterable[str]) -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(name, marks=slow) if name in OTHERS else name for name in names]


EVERY = pytest.mark.parametrize("name", _marked(FAMILIES))
# For tests that compile for long: one family in closed form and one that draws are quick.
COSTLY = pytest.mark.parametrize(
    "name",
    [
        name if name in ("gated_natural", "mixture") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
WITH_NETWORK = pytest.mark.parametrize(
    "name", _marked(name for name, case in FAMILIES.items() if case.has_network)
)

# Larger programs take long to compile.
D2_IS_SLOW = pytest.mark.parametrize(
    "size", ["d1", pytest.param("d2-inputs", marks=pytest.mark.slow)]
)

N, LENGTH, CHANGED = 8, 5, 3


class Dims(NamedTuple):
    """Dimensions of a model."""

    state: int
    obs: int
    input: int


SIZES = {"d1": Dims(1, 1, 0), "d2-inputs": Dims(2, 3, 2), "d8": Dims(8, 2, 0)}


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
        "whole": Rows(ys, full, inputs, np.asarray(N)),
        "nan": Rows(with_junk(np.nan), full, inputs, np.asarray(N)),
        "masked": Rows(with_junk(0.0), ~hidden, inputs, np.asarray(N)),
        "masked_junk": Rows(with_junk(1e9), ~hidden, inputs, np.asarray(N)),
        "padded": Rows(padded, full, junk_inputs, np.asarray(LENGTH)),
        "changed": Rows(changed, full, inputs, np.asarray(N)),
        "outlier": Rows(outlier, full, inputs, np.asarray(N)),
        "nothing_seen": Rows(np.full_like(ys, np.nan), full, inputs, np.asarray(N)),
    }


@functools.cache
def family_of(name: str, size: str) -> Any:
    """A prepared family with weights large enough for its networks to matter."""
    model, rows = model_of(size), rows_of(size)["whole"]
    family = FAMILIES[name].make(model, *SIZES[size]).prepare(model, rows.ys, inputs=rows.inputs)
    return louder(family, 0.3) if FAMILIES[name].has_network else family


def is_network(node: Any) -> bool:
    return isinstance(node, (eqx.nn.MLP, eqx.nn.GRUCell, eqx.nn.Linear))


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


Chain: TypeAlias = rd.LinearGaussianChain | rd.SampledChain

PATHS = rd.BackwardSampling(2, by_component=True, stop_score=True)
"""How the bound of a chain that is drawn is taken."""


class Answer(NamedTuple):
    """What is asked of a family and a series: the chain, the bound and its gradient."""

    chain: Chain
    elbo: jax.Array
    gradient: Any


@eqx.filter_jit
def answer(family: Any, model: rd.StateSpaceModel, rows: Rows) -> Answer:
    learned, fixed = eqx.partition(family, eqx.is_inexact_array)

    def bound(learned: Any) -> tuple[jax.Array, Chain]:
        ys, mask, inputs, length = rows
        chain = infer(eqx.combine(learned, fixed), rows)
        is_sampled = isinstance(chain, rd.SampledChain)
        options = {"estimator": PATHS, "key": jax.random.key(0)} if is_sampled else {}
        return rd.elbo(model, chain, ys, mask=mask, inputs=inputs, **options), chain

    (value, chain), gradient = jax.value_and_grad(bound, has_aux=True)(learned)
    return Answer(chain, value, gradient)


def infer(family: Any, rows: Rows) -> Chain:
    return family.infer(rows.ys, mask=rows.mask, inputs=rows.inputs, length=rows.length)


@eqx.filter_jit
def infer_batch(family: Any, rows: Rows) -> Chain:
    return jax.vmap(lambda one: infer(family, one))(rows)


@functools.cache
def chains_of(name: str, size: str) -> dict[str, Any]:
    """One program for all series of `rows_of`."""
    every = rows_of(size)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *every.values())
    got = infer_batch(family_of(name, size), stacked)
    return {case: row(got, i) for i, case in enumerate(every)}


@functools.cache
def answer_of(name: str, size: str, case: str) -> Answer:
    """One program for all series of a size, and for those that families start with."""
    rows = jax.tree.map(jnp.asarray, rows_of(size)[case])
    return answer(family_of(name, size), model_of(size), rows)


def assert_finite(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        assert np.all(np.isfinite(leaf)), leaf


def differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(np.any(np.abs(np.asarray(a) - np.asarray(b)) > 1e-9) for a, b in pairs)


def row(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def first(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:count], tree)


@pytest.fixture(scope="module", params=["d1", pytest.param("d2-inputs", marks=pytest.mark.slow)])
def size(request: pytest.FixtureRequest) -> str:
    return request.param


# --- one family, stored, streamed and batched -----------------------------------------------------


@COSTLY
def test_stream_equals_chain_of_whole_series(name: str, size: str):
    family, rows = family_of(name, size), rows_of(size)["nan"]
    step = eqx.filter_jit(lambda family, state, y, u: family.step(state, y, inputs=u))
    state, factors = family.init(), []
    for k in range(N):
        u = None if rows.inputs is None else rows.inputs[k]
        state, factor = step(family, state, rows.ys[k], u)
        factors.append(factor)
    stream = jax.tree.map(lambda *leaves: jnp.stack(leaves), *factors)
    chain = chains_of(name, size)["nan"]
    assert_close(stream.law, chain.laws)
    assert_close(jax.tree.map(lambda leaf: leaf[1:], stream.kernel), chain.steps)


@pytest.mark.parametrize(
    "name", ["gated_natural", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS[:4])]
)
def test_stream_of_large_states_equals_chain_of_whole_series(name: str):
    """States beyond the unrolled sizes, whose factors are read in the scan."""
    test_stream_equals_chain_of_whole_series(name, "d8")


@EVERY
def test_chain_of_first_rows_equals_prefix(name: str):
    """And an array without NaN needs neither mask nor length."""
    rows, full_chain = rows_of("d1")["whole"], chains_of(name, "d1")["whole"]
    alone = family_of(name, "d1").infer(rows.ys[:LENGTH])
    assert alone.length is None
    prefix = full_chain.prefix(LENGTH)
    assert_close((alone.laws, alone.steps), (prefix.laws, prefix.steps))


@EVERY
@D2_IS_SLOW
def test_batch_equals_series_one_by_one(name: str, size: str):
    for case in ("nan", "padded"):
        alone = infer(family_of(name, size), rows_of(size)[case])
        assert_close(alone, chains_of(name, size)[case])


@EVERY
def test_padding_changes_nothing(name: str, size: str):
    """Rows beyond the length repeat the terminal law and lead back to where one is.

    A chain that is drawn keeps what its kernels hold there, and a path stays where it ended.
    """
    padded, unpadded = chains_of(name, size)["padded"], chains_of(name, size)["nan"]
    np.testing.assert_array_equal(padded.length, LENGTH)
    assert_close(first(padded.laws, LENGTH), first(unpadded.laws, LENGTH))
    assert_close(first(padded.steps, LENGTH - 1), first(unpadded.steps, LENGTH - 1))
    for k in range(LENGTH, N):
        assert_close(row(padded.laws, k), row(padded.laws, LENGTH - 1))
    if FAMILIES[name].sampled:
        path = padded.sample(jax.random.key(0), 1)[0]
        np.testing.assert_array_equal(path[LENGTH:], np.stack([path[LENGTH - 1]] * (N - LENGTH)))
        short = unpadded.prefix(LENGTH)
        np.testing.assert_allclose(padded.log_prob(path), short.log_prob(path[:LENGTH]), rtol=1e-10)
        return
    beyond = jax.tree.map(lambda leaf: np.asarray(leaf[LENGTH - 1 :]), padded.kernels)
    eye = np.broadcast_to(np.eye(padded.state_dim), beyond.weight.shape)
    np.testing.assert_array_equal(beyond.weight, eye)
    np.testing.assert_array_equal(beyond.bias, 0.0)
    np.testing.assert_array_equal(beyond.scale_tril, 0.0)


@EVERY
def test_a_missing_value_is_nan_or_masked_and_has_no_influence(name: str, size: str):
    got = chains_of(name, size)
    for case in ("masked", "masked_junk"):
        jax.tree.map(np.testing.assert_array_equal, got[case], got["nan"])
    assert differ(got["nan"].laws, got["whole"].laws)
    assert differ(got["nan"].laws, got["nothing_seen"].laws)


@EVERY
def test_no_factor_sees_the_future(name: str, size: str):
    """q_k reads y_0..y_k, and q_{k-1|k} reads y_0..y_{k-1}: no further and no less."""
    before, after = (chains_of(name, size)[case] for case in ("whole", "changed"))
    # Row k-1 holds q_{k-1|k}; that of k = CHANGED is the last which has not seen the change.
    for one, other in ((before.laws, after.laws), (before.steps, after.steps)):
        same = jax.tree.map(lambda leaf: leaf[:CHANGED], (one, other))
        jax.tree.map(np.testing.assert_array_equal, *same)
    for k in range(CHANGED, N):
        assert differ(before.laws.mean[k], after.laws.mean[k])
    assert differ(row(before.steps, CHANGED), row(after.steps, CHANGED))


@EVERY
def test_scales_are_lower_factors_with_positive_diagonals(name: str, size: str):
    """And everything is finite: an outlier of a million deviations, nothing seen at all."""
    for case, chain in chains_of(name, size).items():
        assert_finite(chain)
        existing = LENGTH if case == "padded" else N
        for scales in (
            *scales_of(first(chain.laws, existing)),
            *scales_of(first(chain.steps, existing - 1)),
        ):
            np.testing.assert_array_equal(scales, np.tril(scales))
            assert np.all(np.diagonal(scales, axis1=-2, axis2=-1) > 0)


def scales_of(tree: Any) -> list[jax.Array]:
    """Every scale of the laws and kernels in a pytree."""

    def is_law(node: Any) -> bool:
        return isinstance(node, (rd.Gaussian, rd.GaussianMixture, rd.LinearGaussianKernel))

    laws = filter(is_law, jax.tree.leaves(tree, is_leaf=is_law))
    return [law.scale_trils if hasattr(law, "scale_trils") else law.scale_tril for law in laws]


def coordinates_of(family: Any) -> Any:
    """The units of a family; a nonlinear one has those of the family that it corrects."""
    return family.base.coordinates if hasattr(family, "base") else family.coordinates


@COSTLY
@D2_IS_SLOW
def test_elbo_gradient_is_finite(name: str, size: str):
    """With missing rows and padding; it reaches the networks, and leaves the units alone."""
    for case in rows_of(size):
        got = answer_of(name, size, case)
        assert_finite((got.elbo, got.gradient))
    gradient = answer_of(name, size, "padded").gradient
    if FAMILIES[name].has_network:
        networks = [node for node in jax.tree.leaves(gradient, is_leaf=is_network)]
        for network in filter(is_network, networks):
            assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(network))
        for leaf in jax.tree.leaves(coordinates_of(gradient)):
            np.testing.assert_array_equal(leaf, 0.0)
        return
    if FAMILIES[name].holds_model:
        for leaf in jax.tree.leaves(gradient.model):
            np.testing.assert_array_equal(leaf, 0.0)
        gradient = eqx.tree_at(lambda g: g.model, gradient, None)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradient))


@EVERY
def test_masked_values_do_not_change_the_gradient(name: str):
    masked, junk = (answer_of(name, "d1", case) for case in ("masked", "masked_junk"))
    jax.tree.map(np.testing.assert_array_equal, masked.gradient, junk.gradient)


@COSTLY
@D2_IS_SLOW
@pytest.mark.usefixtures("x32")
def test_float32_stays_float32(name: str, size: str):
    dims = SIZES[size]
    model = random_model(np.random.default_rng(3), *dims)
    rows = jax.tree.map(jnp.asarray, rows_of(size)["padded"])
    family = FAMILIES[name].make(model, *dims)
    family = family.prepare(model, rows.ys, inputs=rows.inputs, length=LENGTH)
    u = None if rows.inputs is None else rows.inputs[0]
    step = eqx.filter_eval_shape(_first_step, family, rows.ys[0], u)
    chain = infer(family, rows)
    assert_finite(chain)
    for leaf in jax.tree.leaves((family, step, chain)):
        assert getattr(leaf, "dtype", None) != np.float64
    assert chain.laws.mean.dtype == np.float32
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(step[1]))


def _first_step(family: Any, y: Any, u: Any) -> Any:
    return family.step(family.init(), y, inputs=u)


@EVERY
def test_saved_family_loads_bit_for_bit(name: str, tmp_path: Path):
    family = family_of(name, "d2-inputs")
    rd.save(tmp_path / "family.rd", family)
    back = rd.load(tmp_path / "family.rd")
    assert type(back) is type(family)
    assert jax.tree.structure(back) == jax.tree.structure(family)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(family), strict=True):
        if eqx.is_array(one):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


# --- where a family starts ------------------------------------------------------------------------


def autoregression(
    weight: float = 0.9,
    noise: float | None = None,
    *,
    obs_scale: float = 1.0,
    state_scale: float = 1.0,
    mean: float = 0.0,
) -> rd.StateSpaceModel:
    """A scalar model with a prior of deviation `state_scale`, stationary unless told otherwise."""
    ratio = float(np.sqrt(1 - weight**2)) if noise is None else noise
    return linear_model(
        mean=mean,
        prior=state_scale,
        weight=weight,
        bias=(1 - weight) * mean,
        noise=state_scale * ratio,
        design=obs_scale / state_scale,
        error=0.5 * obs_scale,
    )


def with_drift(drift: Callable[[jax.Array], jax.Array]) -> rd.StateSpaceModel:
    return replace(autoregression(), transition=nonlinear_kernel(drift, 0.3))


def simulated(model: rd.StateSpaceModel) -> np.ndarray:
    return np.array(model.simulate(jax.random.key(7), N)[1])


def simulated_at(model: rd.StateSpaceModel, k: int, elsewhere: float) -> np.ndarray:
    """A simulated series of which all rows but k are multiplied by `elsewhere`."""
    return simulated(model) * np.where(np.arange(N) == k, 1.0, elsewhere)[:, None]


Moments: TypeAlias = tuple[np.ndarray, np.ndarray]


class Start(NamedTuple):
    """A model and data to prepare a family for, and how far in octaves its spread may be off."""

    make: Callable[[], rd.StateSpaceModel]
    data: Callable[[rd.StateSpaceModel], np.ndarray] = simulated
    octaves: float = 1.0


STARTS: dict[str, Start] = {
    "stationary": Start(autoregression),
    "small_data": Start(lambda: autoregression(obs_scale=1e-8)),
    "large_data": Start(lambda: autoregression(obs_scale=1e8)),
    "small_state": Start(lambda: autoregression(state_scale=1e-6)),
    "large_state": Start(lambda: autoregression(state_scale=1e6)),
    "far_from_zero": Start(lambda: autoregression(mean=1e5)),
    "independent": Start(lambda: autoregression(0.0)),
    "persistent": Start(lambda: autoregression(0.9999)),
    "constant_data": Start(autoregression, lambda _: np.full((N, 1), 3e5)),
    "zero_data": Start(autoregression, lambda _: np.zeros((N, 1))),
    "nothing_seen": Start(autoregression, lambda _: np.full((N, 1), np.nan)),
    "one_value_seen": Start(autoregression, lambda m: simulated_at(m, 4, np.nan)),
    "one_value_huge": Start(autoregression, lambda m: simulated_at(m, 4, 1e-6)),
    "random_walk": Start(lambda: autoregression(1.0, 0.3)),
    "unstable": Start(lambda: autoregression(1.05, 0.3)),
}


def prior_moments(model: rd.StateSpaceModel, inputs: np.ndarray | None = None) -> Moments:
    """Means and deviations of the states before anything is seen, over many simulated paths."""
    keys = jax.random.split(jax.random.key(8), 4000)
    paths = jax.vmap(lambda key: model.simulate(key, N, inputs=inputs)[0])(keys)
    return np.mean(paths, axis=0), np.std(paths, axis=0)


def linear_moments(model: rd.StateSpaceModel) -> Moments:
    """The same of a scalar linear model, from their recursion."""
    weight, bias, noise = (
        np.asarray(leaf).item()
        for leaf in (model.transition.weight, model.transition.bias, model.transition.scale_tril)
    )
    means, variances = [model.prior.mean.item()], [model.prior.scale_tril.item() ** 2]
    for _ in range(1, N):
        means.append(weight * means[-1] + bias)
        variances.append(weight**2 * variances[-1] + noise**2)
    return np.array(means)[:, None], np.sqrt(variances)[:, None]


@functools.cache
def start_of(case: str) -> tuple[rd.StateSpaceModel, np.ndarray, Moments]:
    model = STARTS[case].make()
    return model, STARTS[case].data(model), linear_moments(model)


def assert_near_prior(chain: Chain, moments: Any, octaves: float = 1.0) -> None:
    """Means within a prior deviation, and deviations within a factor."""
    mean, std = moments
    if isinstance(chain, rd.SampledChain):
        marginals = rd.marginals(chain, estimator=rd.BackwardSampling(256), key=jax.random.key(0))
        means, stds = marginals.mean, np.sqrt(marginals.covariance[:, :, 0])
    else:
        means, stds = chain.marginals().mean, chain.marginals().std
    assert np.max(np.abs(means - mean) / std) < 1.0
    assert np.max(np.abs(np.log2(np.asarray(stds) / std))) < octaves


@functools.cache
def fresh(name: str) -> Any:
    return FAMILIES[name].make(autoregression(), 1, 1, 0)


@pytest.mark.parametrize(
    "case",
    [
        c if c in ("stationary", "large_state") else pytest.param(c, marks=pytest.mark.slow)
        for c in STARTS
    ],
)
@WITH_NETWORK
def test_an_untrained_family_is_near_the_prior_chain(name: str, case: str):
    """Whatever the units of data and states are, and its gradient is finite."""
    model, ys, moments = start_of(case)
    family = fresh(name).prepare(model, ys)
    assert_finite(eqx.filter(family, eqx.is_inexact_array))
    rows = jax.tree.map(jnp.asarray, Rows(ys, np.ones(ys.shape, bool), None, np.asarray(N)))
    got = answer(family, model, rows)
    assert_finite(got)
    assert_near_prior(got.chain, moments, STARTS[case].octaves)


@functools.cache
def two_wells() -> tuple[rd.StateSpaceModel, np.ndarray, Moments]:
    """A nonlinear transition, and counts of which a row is missing."""
    model = replace(with_drift(lambda x: x + 0.3 * jnp.sin(x)), emission=poisson_emission())
    ys = np.array(model.simulate(jax.random.key(9), N)[1])
    ys[2] = np.nan
    return model, ys, prior_moments(model)


@pytest.mark.slow
@WITH_NETWORK
def test_a_nonlinear_transition_is_approximated_by_a_linear_one(name: str):
    model, ys, moments = two_wells()
    family = fresh(name).prepare(model, ys)
    rows = Rows(ys, np.ones(ys.shape, bool), None, np.asarray(N))
    assert_near_prior(infer(family, rows), moments)


@pytest.mark.slow
def test_elbo_gradient_of_counts_is_finite():
    model, ys, _ = two_wells()
    family = fresh("gated_scale").prepare(model, ys, length=LENGTH)
    rows = Rows(ys, np.ones(ys.shape, bool), None, np.asarray(LENGTH))
    assert_finite(answer(family, model, jax.tree.map(jnp.asarray, rows)))


@WITH_NETWORK
def test_exploding_transition_leaves_start_finite(name: str):
    """Its paths overflow: nothing of them can be used, and nothing of them is."""
    model = with_drift(lambda x: x + 10.0 * x**3)
    family = fresh(name).prepare(model, np.ones((N, 1)))
    assert_finite(eqx.filter(family, eqx.is_inexact_array))
    assert_finite(infer(family, rows_of("d1")["whole"]))


def irregular() -> rd.StateSpaceModel:
    """A stationary process seen at uneven times, the time step as its input."""

    def over(step: jax.Array):
        weight = jnp.exp(-0.5 * step)
        return weight[:, None], jnp.zeros(1), rd.Diagonal(jnp.sqrt(1.0 - weight**2))

    return replace(autoregression(), transition=rd.VaryingLinearGaussianKernel(over))


@pytest.mark.parametrize(
    "name",
    [
        "conjugate",
        "recurrent_free",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gated_scale", "gated_natural")),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("recurrent_tied", "scan", "mixture")),
    ],
)
def test_variational_transition_follows_irregular_time(name: str):
    """With steps from 1e-3 to 1e3, and padding in which the steps are not known."""
    model = irregular()
    steps = np.array([1.0, 1e-3, 0.1, 1.0, 1e3, 0.3, 2.0, 0.5])[:, None]
    ys = np.array(model.simulate(jax.random.key(9), N, inputs=steps)[1])
    moments = prior_moments(model, steps)
    family = FAMILIES[name].make(model, 1, 1, 1)
    prepared = family.prepare(model, ys, inputs=steps)
    rows = Rows(ys, np.ones(ys.shape, bool), steps, np.asarray(N))
    assert_near_prior(infer(prepared, rows), moments)
    padded = steps.copy()
    padded[LENGTH:] = np.nan
    family = family.prepare(model, ys, inputs=padded, length=LENGTH)
    assert_finite(eqx.filter(family, eqx.is_inexact_array))
    assert_near_prior(infer(family, rows), moments)


def test_untrained_family_follows_inputs_of_the_state():
    """The mean of the prior chain follows a step in the input."""
    model = replace(autoregression(), transition=linear_kernel(0.5, scale=0.1, input_weight=2.0))
    inputs = np.where(np.arange(N) < N // 2, -1.0, 1.0)[:, None]
    ys = np.array(model.simulate(jax.random.key(9), N, inputs=inputs)[1])
    mean = np.zeros((N, 1))
    for k in range(1, N):
        mean[k] = 0.5 * mean[k - 1] + 2.0 * inputs[k]
    family = rd.ConjugateFamily(jax.random.key(0), 1, 1, input_dim=1)
    family = family.prepare(model, ys, inputs=inputs)
    got = family.infer(np.full_like(ys, np.nan), inputs=inputs).marginals().mean
    np.testing.assert_allclose(got, mean, atol=0.2)


@WITH_NETWORK
def test_prepare_on_batch_equals_prepare_on_rows(name: str):
    """Units come from the rows that exist in any of the series."""
    model, ys, _ = start_of("stationary")
    batch = np.stack([ys, np.full_like(ys, 1e7)])
    batch[1, 0] = np.nan
    one = fresh(name).prepare(model, ys[:LENGTH])
    for other in (
        fresh(name).prepare(model, batch, length=[LENGTH, 1]),
        fresh(name).prepare(
            model, batch, mask=(np.arange(N) < LENGTH)[None, :, None] & (batch < 1e7)
        ),
    ):
        got, expected = coordinates_of(other), coordinates_of(one)
        assert_close(got.obs_location, expected.obs_location)
        assert_close(got.obs_scale, expected.obs_scale)


@pytest.mark.slow
@WITH_NETWORK
def test_redraw_changes_the_weights_and_keeps_the_units(name: str):
    family = family_of(name, "d2-inputs")
    other = family.redraw(jax.random.key(1))
    assert jax.tree.structure(other) == jax.tree.structure(family)
    changed, same = ([n for n in jax.tree.leaves(f, is_leaf=is_network)] for f in (family, other))
    for one, two in zip(changed, same, strict=True):
        if is_network(one):
            pairs = (jax.tree.leaves(eqx.filter(n, eqx.is_array)) for n in (one, two))
            assert all(np.any(a != b) for a, b in zip(*pairs, strict=True) if np.any(b != 0))
        elif one is getattr(family, "entry", None):
            assert np.any(one != two)
        elif eqx.is_array(one):
            np.testing.assert_array_equal(one, two)
    again = family.redraw(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, *eqx.filter((other, again), eqx.is_array))


def test_kalman_family_ignores_redraw_and_prepare():
    family, rows = family_of("kalman", "d1"), rows_of("d1")["whole"]
    assert family.redraw(jax.random.key(1)) is family
    assert family.prepare(model_of("d1"), rows.ys) is family


# --- the Kalman family ----------------------------------------------------------------------------


def test_kalman_family_equals_exact_posterior(size: str):
    model = model_of(size)
    for case in ("whole", "nan", "masked_junk", "padded"):
        ys, mask, inputs, length = rows_of(size)[case]
        exact = rd.kalman_smoother(model, ys, mask=mask, inputs=inputs, length=length).chain
        got = chains_of("kalman", size)[case]
        assert_close(
            (got.laws.mean, got.laws.covariance), (exact.laws.mean, exact.laws.covariance), 1e-10
        )
        assert_close(got.kernels.weight, exact.kernels.weight, 1e-10)
        assert_close(got.kernels.bias, exact.kernels.bias, 1e-10)
        spreads = [
            k.scale_tril @ jnp.swapaxes(k.scale_tril, 1, 2) for k in (got.kernels, exact.kernels)
        ]
        assert_close(spreads[0], spreads[1], 1e-10)


def test_elbo_of_large_states_is_the_evidence_with_its_gradient():
    """With two padded series; the exact posterior is stationary, so that its gradient is too."""
    model, rows = model_of("d8"), rows_of("d8")["padded"]
    family = rd.KalmanFamily(model)
    lengths = jnp.array([LENGTH, 1])

    @jax.jit
    @jax.vmap
    def evidence(length):
        return rd.kalman_smoother(model, rows.ys, length=length).log_evidence

    @jax.jit
    def slopes(family):
        def bound(family):
            def one(length):
                return rd.elbo(model, family.infer(rows.ys, length=length), rows.ys, length=length)

            bounds = jax.vmap(one)(lengths)
            return jnp.sum(bounds), bounds

        return eqx.filter_grad(bound, has_aux=True)(family)

    gradient, bounds = slopes(family)
    assert_close(bounds, evidence(lengths), 1e-9)
    for leaf in jax.tree.leaves(gradient):
        assert_close(leaf, jnp.zeros_like(leaf), 1e-7)


def test_kalman_family_copies_its_model():
    """No buffer is shared: `fit` may overwrite the one's and keep the other's."""
    model = model_of("d2-inputs")
    family = rd.KalmanFamily(model)
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model)}
    assert not theirs & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(family)}
    assert_close(rd.unwrap(family.model), rd.unwrap(model), 1e-14)


def test_a_kalman_family_keeps_what_is_frozen():
    model = autoregression()
    frozen = replace(model, prior=rd.Frozen(model.prior))
    family = rd.KalmanFamily(frozen)
    assert isinstance(family.model.prior, rd.Frozen)
    assert_close(family.init().law.scale, model.prior.scale_tril)


def test_kalman_family_handles_irregular_time():
    model = irregular()
    steps = np.linspace(0.1, 3.0, N)[:, None]
    ys = np.array(model.simulate(jax.random.key(9), N, inputs=steps)[1])
    with pytest.raises(
        ValueError, match="cannot infer the dimension of the inputs .*: pass input_dim"
    ):
        rd.KalmanFamily(model)
    chain = rd.KalmanFamily(model, input_dim=1).infer(ys, inputs=steps)
    exact = rd.kalman_smoother(model, ys, inputs=steps).chain
    assert_close(chain.marginals().mean, exact.marginals().mean, 1e-10)


# --- parallel in time, and gains ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("kalman", "d1"),
        ("conjugate", "d1"),
        ("scan", "d1"),
        pytest.param("scan", "d2-inputs", marks=pytest.mark.slow),
        pytest.param("conjugate", "d2-inputs", marks=pytest.mark.slow),
        pytest.param("kalman", "d2-inputs", marks=pytest.mark.slow),
    ],
)
def test_parallel_inference_equals_sequential_inference(name: str, size: str):
    ys, mask, inputs, length = rows_of(size)["padded"]
    family = family_of(name, size)
    got = family.infer(ys, mask=mask, inputs=inputs, length=length, parallel=True)
    assert_close(got, chains_of(name, size)["padded"], 1e-10)


@pytest.mark.parametrize("name", _marked(n for n, case in FAMILIES.items() if not case.parallel))
def test_sequential_families_refuse_parallel(name: str):
    with pytest.raises(ValueError, match="Family has no parallel form.* Use parallel=False"):
        family_of(name, "d1").infer(rows_of("d1")["whole"].ys, parallel=True)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mixture", "d1"),
        ("recurrent_tied", "d1"),
        pytest.param("recurrent_free", "d2-inputs", marks=pytest.mark.slow),
        pytest.param("gated_natural", "d2-inputs", marks=pytest.mark.slow),
    ],
)
def test_loops_of_accelerators_give_the_same_answers(
    name: str, size: str, monkeypatch: pytest.MonkeyPatch
):
    expected, rows = answer_of(name, size, "padded"), rows_of(size)["padded"]
    jax.clear_caches()
    for module in ("_families.base", "_chains.linear_gaussian"):
        monkeypatch.setattr(f"retrodict.{module}.on_accelerator", lambda: True)
    got = answer(family_of(name, size), model_of(size), rows)
    jax.clear_caches()
    assert_close(got, expected, 1e-9)


@pytest.mark.parametrize("loudness", [1.0, 100.0, 1e6])
@pytest.mark.slow
def test_gains_of_a_recurrent_family_cannot_explode(loudness: float):
    """In standard coordinates they are contractions, whatever the weights are."""
    family, rows = family_of("recurrent_free", "d2-inputs"), rows_of("d2-inputs")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows.values())
    chain = row(infer_batch(louder(family, loudness), stacked), list(rows).index("whole"))
    assert_finite(chain)
    spread = np.asarray(family.coordinates.state_scale.value)
    gains = np.linalg.solve(spread, chain.kernels.weight @ spread)
    assert np.all(np.linalg.norm(gains, 2, axis=(1, 2)) < 1.0 + 1e-9)
    assert np.linalg.norm(gains, 2, axis=(1, 2)).max() > 0.5


# --- mixtures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "d"), [(1, 1), (2, 1), (5, 1), (4, 2), (6, 2), (3, 4)])
def test_components_start_apart_and_around_the_prior_mean(count: int, d: int):
    # One program a size: outside of jit each of its operations would be compiled alone.
    places = np.asarray(jax.jit(centres, static_argnums=(0, 1))(count, d))
    assert places.shape == (count, d)
    np.testing.assert_allclose(places.mean(axis=0), 0.0, atol=1e-12)
    assert np.max(np.abs(places)) < 3.0
    assert len({tuple(centre) for centre in (places + 0.0).tolist()}) == count


def test_a_mixture_family_can_be_built_inside_of_jit():
    shapes = eqx.filter_eval_shape(rd.MixtureFamily, jax.random.key(0), 2, 1)
    built = rd.MixtureFamily(jax.random.key(0), 2, 1)
    assert jax.tree.structure(eqx.filter(shapes, lambda leaf: False)) == jax.tree.structure(
        eqx.filter(built, lambda leaf: False)
    )


# --- misuse ---------------------------------------------------------------------------------------


YS, US = np.zeros((N, 3)), np.zeros((N, 2))
MISUSE: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "narrow_ys": (lambda f: f.infer(YS[:, :2], inputs=US), ValueError, "3 columns, got 2"),
    "flat_ys": (lambda f: f.infer(YS[:, 0], inputs=US), ValueError, r"\(time, obs\).*got \(8,\)"),
    "batch_of_ys": (lambda f: f.infer(YS[None], inputs=US), ValueError, "jax.vmap"),
    "infinite_ys": (lambda f: f.infer(YS + np.inf, inputs=US), ValueError, "finite, got inf"),
    "complex_ys": (lambda f: f.infer(YS + 1j, inputs=US), TypeError, "must be real"),
    "no_inputs": (lambda f: f.infer(YS), ValueError, "inputs.*got None"),
    "narrow_inputs": (lambda f: f.infer(YS, inputs=US[:, :1]), ValueError, "2 columns, got 1"),
    "short_inputs": (lambda f: f.infer(YS, inputs=US[:3]), ValueError, "8 rows, got 3"),
    "wrong_mask": (lambda f: f.infer(YS, inputs=US, mask=US > 0), ValueError, "shape of ys"),
    "long_length": (lambda f: f.infer(YS, inputs=US, length=9), ValueError, "between 1 and 8"),
    "step_of_series": (lambda f: f.step(f.init(), YS, inputs=US[0]), ValueError, r"shape \(obs,\)"),
    "step_of_narrow_y": (
        lambda f: f.step(f.init(), YS[0, :2], inputs=US[0]),
        ValueError,
        "3 entries, got 2",
    ),
    "step_of_infinite_y": (
        lambda f: f.step(f.init(), YS[0] + np.inf, inputs=US[0]),
        ValueError,
        "inf",
    ),
    "step_without_inputs": (lambda f: f.step(f.init(), YS[0]), ValueError, "inputs must be given"),
    "step_of_narrow_inputs": (
        lambda f: f.step(f.init(), YS[0], inputs=US[0, :1]),
        ValueError,
        "2 entries, got 1",
    ),
    "step_of_nan_inputs": (
        lambda f: f.step(f.init(), YS[0], inputs=np.nan * US[0]),
        ValueError,
        "finite",
    ),
    "step_of_wrong_mask": (
        lambda f: f.step(f.init(), YS[0], inputs=US[0], mask=YS[0]),
        TypeError,
        "mask must be boolean",
    ),
    "other_model": (
        lambda f: f.prepare(model_of("d1"), YS, inputs=US),
        ValueError,
        "state_dim=2.* has 1 state",
    ),
}


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("case", MISUSE)
@EVERY
def test_misuse_of_a_family_is_refused(name: str, case: str):
    act, kind, message = MISUSE[case]
    with pytest.raises(kind, match="(?s)" + message):
        act(family_of(name, "d2-inputs"))


@pytest.mark.usefixtures("untyped")
@EVERY
def test_unused_inputs_are_refused(name: str):
    family, model = family_of(name, "d1"), model_of("d1")
    with pytest.raises(ValueError, match="inputs must be left out"):
        family.infer(np.zeros((N, 1)), inputs=US)
    with pytest.raises(ValueError, match="inputs must be left out"):
        family.step(family.init(), np.zeros(1), inputs=US[0])
    driven = replace(model, transition=linear_kernel(input_weight=1.0))
    with pytest.raises(ValueError, match="input_dim=0, and the model takes inputs"):
        family.prepare(driven, np.zeros((N, 1)), inputs=US[:, :1])


@pytest.mark.usefixtures("untyped")
@WITH_NETWORK
def test_prepare_refuses_mismatched_arguments(name: str):
    family, model = family_of(name, "d2-inputs"), model_of("d2-inputs")
    for ys, inputs, options, message in (
        (YS[:, :2], US, {}, "ys must have 3 columns, got 2"),
        (YS, US[:, :1], {}, "inputs must have 2 columns, got 1"),
        (YS, None, {}, "inputs must be given"),
        (YS, US[:3], {}, r"inputs must have one row per time step, 8 rows, got 3"),
        (YS[0], US, {}, r"shape \(time, obs\) .* got \(3,\)"),
        (YS + np.inf, US, {}, "finite, got inf"),
        (YS, US + np.inf, {}, "inputs must be finite, got inf"),
        (YS, US, {"mask": US > 0}, "mask must have the shape of ys"),
        (YS, US, {"length": 9}, "length must be between 1 and 8"),
        (YS, US, {"length": [3, 3]}, "length must be one integer"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            family.prepare(model, ys, inputs=inputs, **options)


@pytest.mark.usefixtures("untyped")
@WITH_NETWORK
def test_constructors_validate_dimensions_and_key(name: str):
    kind: Any = type(fresh(name))
    key = jax.random.key(0)
    for arguments, error, message in (
        ((key, 0, 1), ValueError, "state_dim must be at least 1, got 0"),
        ((key, 1.5, 1), TypeError, "state_dim must be a Python integer.*got float"),
        ((key, 1, -1), ValueError, "obs_dim must be at least 1, got -1"),
        ((key, 1, "2"), TypeError, "obs_dim must be a Python integer.*got str"),
        ((0, 1, 1), TypeError, "expects one typed key.*got int"),
        ((jax.random.split(key), 1, 1), TypeError, r"array of keys of shape \(2,\)"),
        ((jnp.zeros(2, jnp.uint32), 1, 1), TypeError, "dtype uint32. Wrap a raw key"),
    ):
        with pytest.raises(error, match=f"(?s){message}"):
            kind(*arguments)
    with pytest.raises(ValueError, match="input_dim must be at least 1, got -1"):
        kind(key, 1, 1, input_dim=-1)
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        kind(key, 1, 1, width=0)
    with pytest.raises(TypeError, match="expects one typed key"):
        fresh(name).redraw(0)


@pytest.mark.usefixtures("untyped")
def test_constructors_validate_options():
    key, model = jax.random.key(0), autoregression()
    with pytest.raises(ValueError, match="gate 'natural' or 'scale', got 'mean'"):
        rd.GatedFamily(key, 1, 1, gate="mean")  # pyright: ignore
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        rd.RecurrentFamily(key, 1, 1, hidden=0)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        rd.ConjugateFamily(key, 1, 1, depth=0)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        rd.NonlinearFamily(key, 1, 1, depth=0)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        rd.ScanFamily(key, 1, 1, depth=0)
    with pytest.raises(ValueError, match="num_components must be at least 1, got 0"):
        rd.MixtureFamily(key, 1, 1, num_components=0)
    with pytest.raises(ValueError, match="num_components must be at least 1, got 0"):
        rd.NonlinearFamily(key, 1, 1, num_components=0)
    with pytest.raises(TypeError, match="expects a StateSpaceModel, got Array"):
        rd.KalmanFamily(jnp.ones(1))  # pyright: ignore
    with pytest.raises(TypeError, match="expects a linear-Gaussian model.*use GatedFamily"):
        rd.KalmanFamily(with_drift(jnp.sin))
    with pytest.raises(
        ValueError, match=r"input_dim must be that of the model's inputs \(0\), got 2"
    ):
        rd.KalmanFamily(model, input_dim=2)
    with pytest.raises(ValueError, match="KalmanFamily expects .* with a density"):
        rd.KalmanFamily(replace(model, transition=linear_kernel(scale=0.0)))
