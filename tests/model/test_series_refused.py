"""Misuse is refused at the call, in words that say what was expected and what came.

These tests see what users see: the shape annotations, which the other tests execute, are switched
off here, so that a message comes from a check of the library or not at all.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import raises_with

import retrodict as rd

pytestmark = pytest.mark.usefixtures("untyped")


def linear(out: int, state: int, inputs: int | None = None) -> rd.LinearGaussianKernel:
    return rd.LinearGaussianKernel(
        jnp.full((out, state), 0.5),
        jnp.zeros(out),
        jnp.eye(out),
        None if inputs is None else jnp.ones((out, inputs)),
    )


PRIOR = rd.Gaussian(jnp.zeros(2), jnp.eye(2))
MODEL = rd.StateSpaceModel(PRIOR, linear(2, 2), linear(3, 2))
DRIVEN = rd.StateSpaceModel(PRIOR, linear(2, 2, 1), linear(3, 2, 1))
N = 4
XS, YS, US = np.zeros((N, 2)), np.zeros((N, 3)), np.zeros((N, 1))


def smooth(ys: Any, *, model: rd.StateSpaceModel = MODEL, **options: Any) -> Any:
    return rd.kalman_smoother(model, ys, **options)


def joint(ys: Any, *, model: rd.StateSpaceModel = MODEL, **options: Any) -> Any:
    return model.log_joint(XS, ys, **options)


VERBS = pytest.mark.parametrize("verb", [smooth, joint])


# --- series ---------------------------------------------------------------------------------------


@VERBS
@pytest.mark.parametrize(
    ("ys", "kind", "phrases"),
    [
        (np.zeros(4), ValueError, ("ys must have shape (time, obs)", "(4,)", "ys[:, None]")),
        (np.zeros((2, 4, 3)), ValueError, ("one series", "(2, 4, 3)", "jax.vmap")),
        (np.float64(1.0), ValueError, ("(time, obs)", "got ()")),
        (np.zeros((0, 3)), ValueError, ("at least one row", "(0, 3)", "empty")),
        (np.zeros((4, 3)) * 1j, TypeError, ("ys must be real", "complex128", "imaginary")),
        (np.full((4, 3), None), TypeError, ("ys must be an array of numbers",)),
        (np.full((4, 3), "a"), TypeError, ("ys must be an array of numbers",)),
        ("a string", TypeError, ("ys must be an array of numbers", "str")),
        (None, TypeError, ("ys must be an array of numbers", "NoneType")),
        ([[1.0, 2.0, 3.0], [4.0]], TypeError, ("ys must be an array of numbers", "list")),
    ],
    ids=["1d", "3d", "0d", "empty", "complex", "object", "strings", "string", "none", "ragged"],
)
def test_ys_of_wrong_shape_or_type_are_refused(
    verb: Callable, ys: Any, kind: type[Exception], phrases: tuple
):
    with raises_with(kind, *phrases):
        verb(ys)


@VERBS
@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_infinite_observations_are_located(verb: Callable, bad: float):
    ys = YS.copy()
    ys[2, 1] = bad
    with raises_with(ValueError, "ys must be finite", f"got {bad} at index (2, 1)", "missing"):
        verb(ys)


@VERBS
@pytest.mark.parametrize("width", [1, 2, 5])
def test_ys_of_wrong_width_are_refused(verb: Callable, width: int):
    """One column in particular, which would broadcast."""
    with raises_with(ValueError, "ys must have 3 columns", f"got {width}"):
        verb(np.zeros((N, width)))


@VERBS
def test_bad_masks_are_refused(verb: Callable):
    with raises_with(ValueError, "mask must have the shape of ys, (4, 3)", "got (4, 2)"):
        verb(YS, mask=np.ones((N, 2), bool))
    with raises_with(ValueError, "mask must have the shape of ys, (4, 3)", "got (4,)"):
        verb(YS, mask=np.ones(N, bool))
    for dtype in (float, int):
        with raises_with(TypeError, "mask must be boolean, true where an entry was", "dtype"):
            verb(YS, mask=np.ones((N, 3), dtype))


@VERBS
def test_bad_inputs_are_refused(verb: Callable):
    with raises_with(ValueError, "inputs must be given, of shape (4, input)", "got None"):
        verb(YS, model=DRIVEN)
    with raises_with(ValueError, "inputs must be left out", "takes_input=True"):
        verb(YS, inputs=US)
    with raises_with(ValueError, "one row per time step, 4 rows", "got 3"):
        verb(YS, model=DRIVEN, inputs=US[:3])
    with raises_with(ValueError, "inputs must have shape (time, input)", "(4,)", "inputs[:, None]"):
        verb(YS, model=DRIVEN, inputs=US[:, 0])
    holes = US.copy()
    holes[3, 0] = np.nan
    with raises_with(ValueError, "inputs must be finite", "nan at index (3, 0)"):
        verb(YS, model=DRIVEN, inputs=holes)


@VERBS
@pytest.mark.parametrize("width", [2, 5])
def test_inputs_of_wrong_width_are_refused(verb: Callable, width: int):
    with raises_with(ValueError, "input", "1", f"{width}"):
        verb(YS, model=DRIVEN, inputs=np.zeros((N, width)))


@VERBS
@pytest.mark.parametrize("length", [0, -1, N + 1])
def test_lengths_out_of_range_are_refused(verb: Callable, length: int):
    with raises_with(ValueError, "length must be between 1 and 4 rows", f"got {length}"):
        verb(YS, length=length)


@VERBS
@pytest.mark.parametrize("length", [2.0, True, np.array([2, 3])])
def test_non_integer_lengths_are_refused(verb: Callable, length: Any):
    with raises_with(TypeError, "length must be one integer", "got shape"):
        verb(YS, length=length)


@pytest.mark.parametrize(
    ("shape", "phrases"),
    [
        ((N, 1), ("(time, state) = (4, 2)", "got (4, 1)")),
        ((3, 2), ("(time, state) = (4, 2)", "got (3, 2)")),
        ((N,), ("(time, state)", "(4,)")),
        ((2, N, 2), ("one series", "(2, 4, 2)", "jax.vmap")),
    ],
)
def test_paths_of_wrong_shape_are_refused(shape: tuple[int, ...], phrases: tuple[str, ...]):
    with raises_with(ValueError, "xs must have shape", *phrases):
        MODEL.log_joint(np.zeros(shape), YS)
    chain = rd.kalman_smoother(MODEL, YS).chain
    with raises_with(ValueError, "xs must have shape", *phrases):
        chain.log_prob(np.zeros(shape))


# --- laws, kernels and models ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "phrases"),
    [
        (lambda: rd.Gaussian(jnp.zeros(2), jnp.eye(3)), ("(2, 2)", "got (3, 3)", "Diagonal")),
        (lambda: rd.Gaussian(jnp.zeros(2), jnp.ones((2, 3))), ("(2, 2)", "got (2, 3)")),
        (lambda: rd.Gaussian(jnp.zeros(2), jnp.ones(2)), ("(2, 2)", "got (2,)", "Diagonal(std)")),
        (lambda: rd.Gaussian(jnp.zeros((3, 2)), jnp.eye(2)), ("mean of shape (d,)", "jax.vmap")),
        (
            lambda: rd.Gaussian(jnp.zeros(2), rd.Diagonal(jnp.ones(3))),
            ("Diagonal scale of shape (2,)", "got (3,)"),
        ),
        (lambda: rd.Diagonal(jnp.eye(2)), ("vector of standard deviations", "(2, 2)")),
        (
            lambda: rd.Gaussian(jnp.zeros(2), rd.PositiveTril(jnp.eye(3))),
            ("(2, 2)", "got (3, 3)"),
        ),
    ],
)
def test_mismatched_parts_of_gaussians_are_refused(make: Callable, phrases: tuple[str, ...]):
    with raises_with(ValueError, *phrases):
        make()


@pytest.mark.parametrize(
    ("change", "phrases"),
    [
        ({"weight": jnp.ones(2)}, ("weight of shape (out, state)", "got (2,)")),
        ({"bias": jnp.zeros(3)}, ("bias of shape (2,)", "got (3,)")),
        ({"scale_tril": jnp.eye(3)}, ("scale_tril of shape (2, 2)", "got (3, 3)")),
        ({"scale_tril": jnp.ones((2, 1))}, ("scale_tril of shape (2, 2)", "got (2, 1)")),
        ({"scale_tril": rd.Diagonal(jnp.ones(3))}, ("Diagonal scale of shape (2,)", "(3,)")),
        ({"input_weight": jnp.ones((3, 1))}, ("input_weight of shape (2, input)", "(3, 1)")),
        ({"input_weight": jnp.ones(2)}, ("input_weight of shape (2, input)", "got (2,)")),
    ],
)
def test_mismatched_parts_of_linear_kernels_are_refused(change: dict, phrases: tuple[str, ...]):
    parts = {"weight": jnp.eye(2), "bias": jnp.zeros(2), "scale_tril": jnp.eye(2)}
    with raises_with(ValueError, "LinearGaussianKernel expects", *phrases):
        rd.LinearGaussianKernel(**(parts | change))


def test_kernels_of_non_functions_are_refused():
    with raises_with(TypeError, "function of the state", "LinearGaussianKernel"):
        rd.NonlinearGaussianKernel(jnp.eye(2), jnp.eye(2))  # pyright: ignore
    with raises_with(TypeError, "function x -> distribution"):
        rd.DistributionKernel(jnp.eye(2))  # pyright: ignore


def test_non_square_scale_of_nonlinear_kernel_is_refused():
    with raises_with(ValueError, "scale_tril", "(2, 3)"):
        rd.NonlinearGaussianKernel(lambda x: x, jnp.ones((2, 3))).law(jnp.zeros(2))


FROM_COVARIANCE = pytest.mark.parametrize(
    "make",
    [
        lambda c: rd.Gaussian.from_covariance(jnp.zeros(2), c),
        lambda c: rd.LinearGaussianKernel.from_covariance(jnp.eye(2), jnp.zeros(2), c),
    ],
    ids=["gaussian", "kernel"],
)


@FROM_COVARIANCE
@pytest.mark.parametrize(
    ("covariance", "phrases"),
    [
        (np.ones((2, 3)), ("square covariance", "(2, 3)")),
        (np.ones(2), ("square covariance", "(2,)")),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), ("positive-definite covariance", "2.", "singular")),
        (np.diag([1.0, 0.0]), ("positive-definite covariance", "scale_tril")),
        (np.array([[1.0, 0.2], [0.3, 1.0]]), ("symmetric covariance", "0.3")),
        (np.diag([1.0, np.nan]), ("covariance", "nan")),
        (np.diag([1.0, np.inf]), ("positive-definite covariance", "inf")),
    ],
)
def test_invalid_covariances_are_refused(make: Callable, covariance: np.ndarray, phrases: tuple):
    with raises_with(ValueError, "from_covariance expects", *phrases):
        make(jnp.asarray(covariance))


@pytest.mark.parametrize(
    ("transition", "emission", "phrases"),
    [
        (linear(3, 2), linear(3, 2), ("transition must return shape (2,)", "got (3,)")),
        (linear(2, 3), linear(3, 2), ("prior over 2 coordinates", "transition")),
        (linear(2, 1), linear(3, 2), ("prior over 2 coordinates", "transition")),
        (linear(2, 8), linear(3, 2), ("prior over 2 coordinates", "transition")),
        (linear(2, 2), linear(3, 1), ("prior over 2 coordinates", "emission")),
        (linear(2, 2), linear(3, 4), ("prior over 2 coordinates", "emission")),
        (linear(2, 2), linear(3, 8), ("prior over 2 coordinates", "emission")),
        (
            linear(2, 2),
            rd.NonlinearGaussianKernel(lambda x: x[:1], jnp.eye(2)),
            ("must return shape (2,)", "got (1,)"),
        ),
        (
            linear(2, 2),
            rd.DistributionKernel(lambda x: x),
            ("emission", "log_prob and sample"),
        ),
    ],
)
def test_mismatched_parts_of_models_are_refused(
    transition: Any, emission: Any, phrases: tuple[str, ...]
):
    with raises_with(ValueError, *phrases):
        rd.StateSpaceModel(PRIOR, transition, emission)


def test_models_of_wrong_types_are_refused():
    with raises_with(TypeError, "kernel as its transition", "NonlinearGaussianKernel"):
        rd.StateSpaceModel(PRIOR, jnp.tanh, linear(3, 2))  # pyright: ignore
    with raises_with(TypeError, "kernel as its emission"):
        rd.StateSpaceModel(PRIOR, linear(2, 2), PRIOR)  # pyright: ignore
    with raises_with(TypeError, "prior with log_prob and sample", "int"):
        rd.StateSpaceModel(3, linear(2, 2), linear(3, 2))


# --- kalman_smoother ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("kalman_smoother", rd.kalman_smoother),
        ("kalman_smoother_batch", lambda model, ys: rd.kalman_smoother_batch(model, ys[None])),
        ("em", lambda model, ys: rd.em(jax.random.key(0), model, ys[None])),
        ("fit_evidence", lambda model, ys: rd.fit_evidence(jax.random.key(0), model, ys[None])),
        (
            "parameter_errors",
            lambda model, ys: rd.parameter_errors(
                jax.random.key(0), model, ys[None], method="exact"
            ),
        ),
    ],
)
def test_exact_functions_refuse_a_nonlinear_model_by_their_own_name(name: str, call: Callable):
    nonlinear = rd.NonlinearGaussianKernel(jnp.tanh, jnp.eye(2))
    model = rd.StateSpaceModel(PRIOR, linear(2, 2), nonlinear)
    with raises_with(TypeError, name, "linear-Gaussian emission", "grid_smoother"):
        call(model, np.zeros((N, 2)))


def test_a_nonlinear_transition_is_refused_by_kalman_smoother():
    nonlinear = rd.NonlinearGaussianKernel(jnp.tanh, jnp.eye(2))
    with raises_with(TypeError, "linear-Gaussian transition", "NonlinearGaussian", "grid_smoother"):
        rd.kalman_smoother(rd.StateSpaceModel(PRIOR, nonlinear, linear(3, 2)), YS)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["prior", "transition", "emission"])
def test_non_finite_parameters_are_refused(part: str, bad: float):
    """Constructors refuse them; they may be replaced afterwards, or come out of a program."""
    parts = {"prior": PRIOR, "transition": linear(2, 2), "emission": linear(3, 2)}
    name = "mean" if part == "prior" else "bias"
    vector = getattr(parts[part], name).at[1].set(bad)
    parts[part] = eqx.tree_at(lambda law: getattr(law, name), parts[part], vector)
    with raises_with(ValueError, f"The {part}'s parameters must be finite", f"{bad} at index (1,)"):
        rd.kalman_smoother(rd.StateSpaceModel(**parts), YS)


@pytest.mark.parametrize("diagonal", [False, True])
def test_singular_emission_scale_is_refused(diagonal: bool):
    stds = jnp.array([1.0, 0.0, 1.0])
    scale = rd.Diagonal(stds) if diagonal else jnp.diag(stds)
    emission = rd.LinearGaussianKernel(jnp.ones((3, 2)), jnp.zeros(3), scale)
    with raises_with(ValueError, "emission scale with a positive diagonal", "0", "density"):
        rd.kalman_smoother(rd.StateSpaceModel(PRIOR, linear(2, 2), emission), YS)


def test_unobserved_series_gives_the_prior():
    """Not misuse but an answer: evidence of nothing is 0, and the law is that of the model."""
    exact = rd.kalman_smoother(MODEL, np.full((N, 3), np.nan))
    assert exact.log_evidence == 0
    marginals = exact.chain.marginals()
    covariance = np.eye(2)
    for k in range(N):
        np.testing.assert_allclose(marginals.mean[k], 0.0, atol=1e-12)
        np.testing.assert_allclose(marginals.covariance[k], covariance, atol=1e-12)
        weight = np.full((2, 2), 0.5)
        covariance = weight @ covariance @ weight.T + np.eye(2)


# --- keys and counts ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain() -> rd.LinearGaussianChain:
    return rd.kalman_smoother(MODEL, YS).chain


@pytest.mark.parametrize(
    ("bad", "phrases"),
    [
        (lambda: jnp.zeros(2, jnp.uint32), ("dtype uint32", "jax.random.wrap_key_data")),
        (lambda: jax.random.split(jax.random.key(0), 3), ("keys of shape (3,)", "jax.vmap")),
        (lambda: 0, ("got int",)),
        (lambda: None, ("got NoneType",)),
    ],
    ids=["raw", "many", "int", "none"],
)
def test_anything_but_one_typed_key_is_refused(
    bad: Callable, phrases: tuple[str, ...], chain: rd.LinearGaussianChain
):
    with raises_with(TypeError, "simulate expects one typed key", "jax.random.key(0)", *phrases):
        MODEL.simulate(bad(), 3)
    with raises_with(TypeError, "sample expects one typed key", "jax.random.key(0)", *phrases):
        chain.sample(bad(), 3)


@pytest.mark.parametrize(
    ("count", "kind", "phrase"),
    [
        (0, ValueError, "at least 1, got 0"),
        (-1, ValueError, "at least 1, got -1"),
        (2.5, TypeError, "must be a Python integer, known when the program is traced, got float"),
        (True, TypeError, "must be a Python integer, known when the program is traced, got bool"),
        (np.arange(2), TypeError, "must be a Python integer"),
    ],
)
def test_bad_counts_are_refused(
    count: Any,
    kind: type[Exception],
    phrase: str,
    key: jax.Array,
    chain: rd.LinearGaussianChain,
):
    with raises_with(kind, "num_times", phrase):
        MODEL.simulate(key, count)
    with raises_with(kind, "num_samples", phrase):
        chain.sample(key, count)
    with raises_with(kind, "num_times", phrase):
        chain.prefix(count)


def test_traced_count_is_refused(key: jax.Array):
    with raises_with(TypeError, "num_times must be a Python integer, known when", "Tracer"):
        jax.jit(lambda n: MODEL.simulate(key, n))(3)


# --- chains ---------------------------------------------------------------------------------------


def test_prefix_longer_than_the_chain_is_refused(chain: rd.LinearGaussianChain):
    with raises_with(ValueError, "at most the number of rows (4)", "got 5"):
        chain.prefix(5)


@pytest.mark.parametrize(
    "call",
    [
        lambda chain: chain.num_times,
        lambda chain: chain.terminal,
        lambda chain: chain.marginals(),
        lambda chain: chain.marginals(parallel=True),
        lambda chain: chain.pairwise(),
        lambda chain: chain.entropy(),
        lambda chain: chain.log_prob(XS),
        lambda chain: chain.prefix(2),
        lambda chain: chain.sample(jax.random.key(0), 2),
    ],
)
def test_methods_of_a_batch_of_chains_point_to_vmap(call: Callable, chain: rd.LinearGaussianChain):
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), chain)
    with raises_with(ValueError, "batch of series", "(2, 4, 2)", "jax.vmap"):
        call(batch)
