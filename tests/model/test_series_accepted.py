"""Odd inputs give the answer of plain floating-point arrays, or are refused by name.

One table of verbs, one of ways to hold numbers, one of things that are not numbers. Shape
annotations are off: the checks of the library must do the work.
"""

import datetime
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow
import pytest
import xarray
from linear_models import linear_model
from scipy.stats import multivariate_normal

import retrodict as rd
from retrodict._model import NaturalGaussian

pytestmark = pytest.mark.usefixtures("untyped")

KEY = jax.random.key(0)
N = 5
# Zeros and ones, so that booleans and half precision hold the same numbers.
YS = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
US = np.array([[1.0], [0.0], [1.0], [1.0], [0.0]])
XS = np.array([[0.0], [1.0], [1.0], [0.0], [1.0]])
HOLES = np.zeros(YS.shape, bool)
HOLES[1, 0] = HOLES[3] = True

MODEL = linear_model(
    weight=0.7,
    noise=0.8,
    input_weight=0.1,
    design=jnp.array([[1.0], [0.5]]),
    error=jnp.array([[0.6, 0.0], [0.2, 0.7]]),
    design_input=0.2 * jnp.ones((2, 1)),
)
FAMILY = rd.GatedFamily(KEY, state_dim=1, obs_dim=2, input_dim=1)
LAGGED = rd.online.FixedLag(FAMILY, 1)
RUNNING = rd.online.RunningPosterior(FAMILY, MODEL)
LEARNER = rd.online.OnlineLearner(None, MODEL, rd.online.KalmanScore())
ONLINE = rd.online.OnlineSmoother(MODEL, rd.StateSum(), 8)


@cache
def chain() -> rd.LinearGaussianChain:
    return rd.kalman_smoother(MODEL, YS, inputs=US).chain


@cache
def initial() -> tuple[Any, Any, Any, Any]:
    """The states of the streams before anything was read."""
    return LAGGED.init(), RUNNING.init(), LEARNER.init(KEY), ONLINE.init(KEY)


@pytest.fixture(scope="module", autouse=True)
def _computed() -> None:
    """Computes the chain and the states before any test traces a verb."""
    chain()
    initial()


class Verb(NamedTuple):
    """A verb and what the tests must know of it.

    Attributes:
        call: `call(ys, us, **options)` returns arrays to compare; for verbs of single rows, of the
            second row.
        rows: whether it takes one row at a time, as `y` and `u`.
        batch: whether it takes several series, and lengths of them.
        traceable: whether it runs under `jax.jit`.
    """

    call: Callable[..., Any]
    rows: bool = False
    batch: bool = False
    traceable: bool = True


def _gradient(ys: Any, us: Any, **options: Any) -> Any:
    rows = rd.online.recursive_gradient(
        rd.online.KalmanScore(), None, MODEL, ys, key=KEY, learn="model", inputs=us, **options
    )
    return rows.elbo_increment


VERBS: dict[str, Verb] = {
    "log_joint": Verb(lambda ys, us, **o: MODEL.log_joint(XS, ys, inputs=us, **o)),
    "kalman_smoother": Verb(
        lambda ys, us, **o: rd.kalman_smoother(MODEL, ys, inputs=us, **o).log_evidence
    ),
    "kalman_smoother in parallel": Verb(
        lambda ys, us, **o: (
            rd.kalman_smoother(MODEL, ys, inputs=us, parallel=True, **o).log_evidence
        )
    ),
    "grid_smoother": Verb(
        lambda ys, us, **o: (
            rd.grid_smoother(MODEL, ys, rd.Grid([-6.0], [6.0], 32), inputs=us, **o).log_evidence
        )
    ),
    "extended_smoother": Verb(
        lambda ys, us, **o: rd.extended_smoother(MODEL, ys, inputs=us, **o).log_evidence
    ),
    "unscented_smoother": Verb(
        lambda ys, us, **o: rd.unscented_smoother(MODEL, ys, inputs=us, **o).log_evidence
    ),
    "iterated_smoother": Verb(
        lambda ys, us, **o: (
            rd.iterated_smoother(MODEL, ys, inputs=us, num_iterations=1, **o).log_evidence
        )
    ),
    "particle_filter": Verb(
        lambda ys, us, **o: rd.particle_filter(KEY, MODEL, ys, 8, inputs=us, **o).log_evidence
    ),
    "ffbsi": Verb(lambda ys, us, **o: rd.ffbsi(KEY, MODEL, ys, 8, 2, inputs=us, **o).log_evidence),
    "paris": Verb(
        lambda ys, us, **o: rd.paris(KEY, MODEL, ys, rd.StateSum(), 8, inputs=us, **o).log_evidence
    ),
    "forward_smoother": Verb(
        lambda ys, us, **o: (
            rd.particles.forward_smoother(
                KEY, MODEL, ys, rd.StateSum(), 8, inputs=us, **o
            ).log_evidence
        )
    ),
    "infer": Verb(lambda ys, us, **o: FAMILY.infer(ys, inputs=us, **o).laws.mean),
    "elbo": Verb(lambda ys, us, **o: rd.elbo(MODEL, chain(), ys, inputs=us, **o)),
    "expectation": Verb(
        lambda ys, us, **o: rd.expectation(
            chain(), rd.LogJoint(MODEL), MODEL.series(ys, inputs=us, **o)
        )
    ),
    "importance_smoother": Verb(
        lambda ys, us, **o: (
            rd.importance_smoother(KEY, MODEL, chain(), ys, 8, inputs=us, **o).log_evidence
        ),
        traceable=False,
    ),
    "guided_smoother": Verb(
        lambda ys, us, **o: (
            rd.guided_smoother(KEY, MODEL, chain(), ys, 8, 2, inputs=us, **o).log_evidence
        )
    ),
    "importance_weighted_bound": Verb(
        lambda ys, us, **o: (
            rd.particles.importance_weighted_bound(
                KEY, MODEL, chain(), ys, 4, num_replicates=2, inputs=us, **o
            ).value
        )
    ),
    "impute": Verb(lambda ys, us, **o: rd.impute(KEY, MODEL, chain(), ys, 2, inputs=us, **o)),
    "error_bound": Verb(
        lambda ys, us, **o: rd.error_bound(MODEL, chain(), ys, rd.StateSum(), inputs=us, **o).value,
        traceable=False,
    ),
    "check_posterior": Verb(
        lambda ys, us, **o: (
            rd.check_posterior(KEY, MODEL, chain(), ys, num_samples=200, inputs=us, **o).gap
        ),
        traceable=False,
    ),
    "recursive_gradient": Verb(_gradient),
    "FixedLag.scan": Verb(
        lambda ys, us, **o: LAGGED.scan(initial()[0], ys, inputs=us, **o)[1].filtered.mean
    ),
    "RunningPosterior.scan": Verb(
        lambda ys, us, **o: RUNNING.scan(initial()[1], ys, inputs=us, **o)[1].elbo
    ),
    "OnlineLearner.scan": Verb(
        lambda ys, us, **o: LEARNER.scan(initial()[2], ys, inputs=us, **o)[1].elbo_increment
    ),
    "step": Verb(
        lambda y, u, **o: FAMILY.step(FAMILY.init(), y, inputs=u, **o)[1].law.mean, rows=True
    ),
    "FixedLag.update": Verb(
        lambda y, u, **o: LAGGED.update(initial()[0], y, inputs=u, **o)[1].filtered.mean, rows=True
    ),
    "RunningPosterior.update": Verb(
        lambda y, u, **o: RUNNING.update(initial()[1], y, inputs=u, **o)[1].elbo, rows=True
    ),
    "OnlineLearner.update": Verb(
        lambda y, u, **o: LEARNER.update(initial()[2], y, inputs=u, **o)[1].elbo_increment,
        rows=True,
    ),
    "OnlineSmoother.update": Verb(
        lambda y, u, **o: ONLINE.update(initial()[3], y, inputs=u, **o)[1].log_evidence,
        rows=True,
    ),
    "fit": Verb(
        lambda ys, us, **o: (
            rd.fit(KEY, FAMILY, MODEL, ys, inputs=us, num_steps=1, progress=False, **o).history
        ),
        batch=True,
        traceable=False,
    ),
    "fit_evidence": Verb(
        lambda ys, us, **o: (
            rd.fit_evidence(KEY, MODEL, ys, inputs=us, num_steps=1, progress=False, **o).history
        ),
        batch=True,
        traceable=False,
    ),
    "em": Verb(
        lambda ys, us, **o: rd.em(KEY, MODEL, ys, inputs=us, num_iterations=1, **o).history,
        batch=True,
        traceable=False,
    ),
    "smooth": Verb(
        lambda ys, us, **o: rd.smooth(MODEL, ys, inputs=us, check=False, progress=False, **o).mean,
        batch=True,
        traceable=False,
    ),
    "simulate_like": Verb(
        lambda ys, us, **o: rd.simulate_like(KEY, MODEL, ys, 2, inputs=us, **o).ys,
        batch=True,
        traceable=False,
    ),
    "parameter_errors": Verb(
        lambda ys, us, **o: rd.parameter_errors(KEY, MODEL, ys, inputs=us, **o).covariance,
        batch=True,
        traceable=False,
    ),
    "prepare": Verb(
        lambda ys, us, **o: (
            FAMILY.prepare(MODEL, ys, inputs=us, **o).infer(YS, inputs=US).laws.mean
        ),
        batch=True,
        traceable=False,
    ),
}

STREAMS_THAT_SKIP = ("FixedLag.scan", "RunningPosterior.scan")
"""They skip rows that are not finite, and say so in their output."""

EACH_VERB = pytest.mark.parametrize("verb", list(VERBS.values()), ids=list(VERBS))
QUICK = ("log_joint", "kalman_smoother", "infer", "elbo", "step")
EACH_QUICK_VERB = pytest.mark.parametrize("verb", [VERBS[name] for name in QUICK], ids=QUICK)


# --- ways to hold numbers -------------------------------------------------------------------------


class Frame:
    """A stand-in for a frame of polars: named columns, and values by `to_numpy`."""

    def __init__(self, values: np.ndarray):
        self.values = values

    @property
    def columns(self) -> list[str]:
        return [f"y{i}" for i in range(self.values.shape[-1])]

    def to_numpy(self) -> np.ndarray:
        return self.values

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("not an array")


def _read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def _pandas(array: np.ndarray) -> Any:
    return pd.DataFrame(array) if array.ndim == 2 else pd.Series(array)


WHOLE: dict[str, Callable[[np.ndarray], Any]] = {
    "integers": lambda a: a.astype(int),
    "small integers": lambda a: a.astype(np.uint8),
    "booleans": lambda a: a.astype(bool),
    "nullable integers": lambda a: _pandas(a.astype(int)).astype("Int64"),
}
"""Ways to hold zeros and ones."""

WAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "list": lambda a: a.tolist(),
    "tuple of arrays": lambda a: tuple(a),
    "float16": lambda a: a.astype(np.float16),
    "bfloat16": lambda a: jnp.asarray(a, jnp.bfloat16),
    "bfloat16 of numpy": lambda a: a.astype(jnp.bfloat16),
    "Fortran order": np.asfortranarray,
    "read only": _read_only,
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "every other row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "long double": lambda a: a.astype(np.longdouble),
    "masked nowhere": np.ma.array,
    "pandas": _pandas,
    "nullable pandas": lambda a: _pandas(a).astype("Float64"),
    "frame": Frame,
    "xarray": lambda a: xarray.DataArray(a),
}
"""Ways to hold any numbers."""


def _given(verb: Verb) -> tuple[np.ndarray, np.ndarray]:
    return (YS[1], US[1]) if verb.rows else (YS, US)


@EACH_QUICK_VERB
def test_array_containers_give_the_same_result(verb: Verb):
    ys, us = _given(verb)
    plain = verb.call(ys, us)
    for name, convert in (WHOLE | WAYS).items():
        for answer in (verb.call(convert(ys), us), verb.call(ys, convert(us))):
            np.testing.assert_array_equal(answer, plain, err_msg=name)
            assert answer.dtype == plain.dtype


@EACH_QUICK_VERB
def test_float32_data_with_float64_model_is_accepted(verb: Verb):
    ys, us = _given(verb)
    answer = verb.call(ys.astype(np.float32), us.astype(np.float32))
    np.testing.assert_allclose(answer, verb.call(ys, us), rtol=1e-4, atol=1e-6)


def test_float64_arrays_are_accepted_without_x64(x32: None):
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), MODEL)
    evidence = rd.kalman_smoother(model, YS, inputs=US).log_evidence
    assert evidence.dtype == jnp.float32
    np.testing.assert_allclose(evidence, -10.71808325, rtol=1e-5)


@EACH_VERB
def test_verbs_convert_array_containers(verb: Verb):
    """Told by a refusal that comes after the conversion, and before anything is compiled."""
    name, other = "y" if verb.rows else "ys", "inputs"
    ys, us = (array.copy() for array in _given(verb))
    where = (1,) if verb.rows else (2, 1)
    ys[where] = np.inf
    if verb.batch:
        message = rf"{name} must be finite, got inf at index \((0, )?2, 1\)"
    else:
        message = rf"{name} must be finite, got inf at index {re.escape(str(where))}"
    for convert in WAYS.values():
        with pytest.raises(ValueError, match=message):
            verb.call(convert(ys), us)
    ys, us = (array.copy() for array in _given(verb))
    us[-1] = np.inf
    for convert in WAYS.values():
        with pytest.raises(ValueError, match=f"{other} must be finite, got inf"):
            verb.call(ys, convert(us))


# --- missing entries ------------------------------------------------------------------------------


def _missing(array: np.ndarray, holes: np.ndarray, fill: float = 99.0) -> dict[str, Any]:
    """The array with holes, in every way to say so."""
    filled, nan = np.where(holes, fill, array), np.where(holes, np.nan, array)
    return {
        "NaN": nan,
        "masked": np.ma.array(filled, mask=holes),
        "masked integers": np.ma.array(filled.astype(int), mask=holes),
        "masked bfloat16": np.ma.array(filled.astype(jnp.bfloat16), mask=holes),
        "masked rows": [np.ma.array(a, mask=m) for a, m in zip(filled, holes, strict=True)],
        "pandas": _pandas(nan),
        "nullable pandas": _pandas(nan).astype("Float64"),
    }


@EACH_QUICK_VERB
def test_masked_array_entries_are_missing(verb: Verb):
    ys, us = _given(verb)
    holes = HOLES[1] if verb.rows else HOLES
    plain = verb.call(ys, us, mask=~holes)
    assert not np.array_equal(plain, verb.call(ys, us))
    for name, container in _missing(ys, holes).items():
        np.testing.assert_allclose(verb.call(container, us), plain, rtol=1e-12, err_msg=name)


@EACH_VERB
def test_verbs_respect_numpy_masks(verb: Verb):
    """The first infinite entry is masked: the refusal names the second one."""
    ys, us = (array.copy() for array in _given(verb))
    holes = np.zeros(ys.shape, bool)
    first, second = ((0,), (1,)) if verb.rows else ((1, 0), (2, 1))
    ys[first] = ys[second] = np.inf
    holes[first] = True
    index = re.escape(str(second)[1:])
    with pytest.raises(ValueError, match=rf"must be finite, got inf at index \((0, )?{index}"):
        verb.call(np.ma.array(ys, mask=holes), us)
    with pytest.raises(ValueError, match="(inputs|u) must not have missing entries"):
        verb.call(YS[1] if verb.rows else YS, np.ma.array(us, mask=np.ones(us.shape, bool)))


def test_evidence_of_masked_array_equals_joint_gaussian():
    """Of the entries that were seen, written out: states are L ε, observations C x + noise."""
    lower = np.array(
        [[0.7 ** (i - j) * (1.0 if j == 0 else 0.8) for j in range(N)] for i in range(N)]
    )
    states = np.tril(lower)
    drift = np.array(
        [sum(0.7 ** (k - j) * 0.1 * US[j, 0] for j in range(1, k + 1)) for k in range(N)]
    )
    design = np.kron(np.eye(N), np.array([[1.0], [0.5]]))
    noise = np.array([[0.6, 0.0], [0.2, 0.7]])
    mean = design @ drift + np.repeat(0.2 * US[:, 0], 2)
    covariance = design @ states @ states.T @ design.T + np.kron(np.eye(N), noise @ noise.T)
    observed = ~HOLES.ravel()
    law = multivariate_normal(mean[observed], covariance[np.ix_(observed, observed)])  # pyright: ignore
    log_evidence = rd.kalman_smoother(MODEL, np.ma.array(YS, mask=HOLES), inputs=US).log_evidence
    np.testing.assert_allclose(log_evidence, law.logpdf(YS.ravel()[observed]), rtol=1e-10)


def test_mask_true_with_nan_is_refused():
    with pytest.raises(ValueError, match="mask=True declares .* ys holds NaN"):
        rd.kalman_smoother(MODEL, np.ma.array(YS, mask=HOLES), inputs=US, mask=True)
    with pytest.raises(ValueError, match="mask=True declares .* y holds NaN"):
        FAMILY.step(FAMILY.init(), np.array([np.nan, 0.0]), inputs=US[0], mask=True)


# --- what holds no numbers ------------------------------------------------------------------------


def _dated(array: np.ndarray) -> Any:
    return _pandas(array).assign(date=pd.Timestamp("2020")) if array.ndim == 2 else _dates(array)


def _dates(array: np.ndarray) -> np.ndarray:
    return array.astype(int).astype("datetime64[D]")


WRONG: dict[str, Callable[[np.ndarray], Any]] = {
    "complex": lambda a: a * 1j,
    "objects": lambda a: a.astype(object),
    "strings": lambda a: a.astype(str),
    "string": lambda a: "a string",
    "none": lambda a: np.full(a.shape, None),
    "dates": _dates,
    "frame with dates": _dated,
    "mapping": lambda a: {"y": a},
    "ragged": lambda a: [[1.0], [1.0, 2.0]],
    "one number": lambda a: 1.0,
    "records": lambda a: np.zeros(a.shape, "f8,i4"),
    "one axis less": lambda a: a[0],
    "two axes more": lambda a: a[None, None],
}


@EACH_VERB
def test_verbs_name_the_bad_argument(verb: Verb):
    name, other = "y" if verb.rows else "ys", "inputs"
    ys, us = _given(verb)
    for what, wrong in WRONG.items():
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b") as caught:
            verb.call(wrong(ys), us)
        assert "inputs" not in str(caught.value), what
        with pytest.raises((TypeError, ValueError), match=rf"\b{other}\b"):
            verb.call(ys, wrong(us))


@EACH_VERB
def test_verbs_refuse_bad_masks(verb: Verb):
    ys, us = _given(verb)
    mask = np.ones(ys.shape, bool)
    for wrong in (mask.astype(int), mask.astype(float), mask.astype(str), mask[..., :1], "all", 1):
        with pytest.raises((TypeError, ValueError), match=r"\bmask\b"):
            verb.call(ys, us, mask=wrong)
    with pytest.raises(ValueError, match="mask must not have missing entries"):
        verb.call(ys, us, mask=np.ma.array(mask, mask=mask))


Mistake = tuple[Callable[[np.ndarray], Any], Callable[[np.ndarray], Any], dict[str, Any], type]

MISTAKES: dict[str, Mistake] = {
    "complex ys": (lambda y: y * 1j, np.asarray, {}, TypeError),
    "infinite ys": (lambda y: np.full(y.shape, np.inf), np.asarray, {}, ValueError),
    "ys with an axis missing": (lambda y: y[0], np.asarray, {}, ValueError),
    "ys without rows": (lambda y: y[:0], np.asarray, {}, ValueError),
    "ys with a column too many": (
        lambda y: np.concatenate([y, y], axis=-1),
        np.asarray,
        {},
        ValueError,
    ),
    "no inputs": (np.asarray, lambda u: None, {}, ValueError),
    "infinite inputs": (np.asarray, lambda u: np.full(u.shape, np.inf), {}, ValueError),
    "inputs as strings": (np.asarray, lambda u: u.astype(str), {}, TypeError),
    "inputs with a row missing": (np.asarray, lambda u: u[:-1], {}, ValueError),
    "inputs with a column too many": (
        np.asarray,
        lambda u: np.concatenate([u, u], axis=-1),
        {},
        ValueError,
    ),
    "integer mask": (np.asarray, np.asarray, {"mask": np.ones(YS.shape, int)}, TypeError),
    "mask of another shape": (np.asarray, np.asarray, {"mask": np.ones(3, bool)}, ValueError),
    "mask=True with NaN": (lambda y: y * np.nan, np.asarray, {"mask": True}, ValueError),
    "length as a number": (np.asarray, np.asarray, {"length": 2.0}, TypeError),
    "length out of range": (np.asarray, np.asarray, {"length": 9}, ValueError),
}
"""Changes of `ys` and `inputs`, options, and the exception that they cause in every verb."""


def _refusal(name: str, mistake: Mistake) -> tuple[type, str]:
    verb = VERBS[name]
    change_ys, change_us, options, _ = mistake
    ys, us = _given(verb)
    if verb.rows and isinstance(options.get("mask"), np.ndarray):
        options = {"mask": options["mask"][0]}
    try:
        verb.call(change_ys(ys), change_us(us), **options)
    except (TypeError, ValueError) as error:
        return type(error), re.sub(r"index \(0, (\d+, \d+)\)", r"index (\1)", str(error))
    raise AssertionError(f"{name} accepts the mistake.")


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("rows", [False, True], ids=["series", "row"])
def test_verbs_raise_the_same_exception_for_a_mistake(mistake: str, rows: bool):
    options = MISTAKES[mistake][2]
    if rows and (
        "length" in options or mistake in ("ys without rows", "inputs with a row missing")
    ):
        pytest.skip("A single row has neither a length nor rows.")
    names = [name for name, verb in VERBS.items() if verb.rows == rows]
    refusals = {name: _refusal(name, MISTAKES[mistake]) for name in names}
    assert set(refusals.values()) == {refusals[names[0]]}, refusals
    assert refusals[names[0]][0] is MISTAKES[mistake][3]


# --- lengths --------------------------------------------------------------------------------------


@EACH_VERB
def test_verbs_refuse_bad_lengths(verb: Verb):
    if verb.rows:
        pytest.skip("takes no length")
    for wrong in (0, -1, N + 1, 2.0, True, "3", [2, 3], np.array([[2]]), np.array(0)):
        with pytest.raises(
            (TypeError, ValueError), match=r"\blength (must|was given, but the chain)\b"
        ):
            verb.call(YS, US, length=wrong)


def _traced(verb: Verb, length: int) -> Any:
    return jax.jit(lambda length: verb.call(YS, US, length=length))(length)


@pytest.mark.parametrize("name", ["log_joint", "kalman_smoother", "infer"])
def test_traced_length_out_of_range_gives_nan(name: str):
    verb = VERBS[name]
    for length in (0, -3, N + 1):
        assert np.all(np.isnan(_traced(verb, length))), length
    np.testing.assert_allclose(
        _traced(verb, 3), verb.call(YS, US, length=3), rtol=1e-12, atol=1e-15
    )


def test_derivatives_in_a_traced_length_stay_finite():
    gradient = jax.jit(
        jax.grad(lambda m, k: rd.kalman_smoother(m, YS, inputs=US, length=k).log_evidence)
    )(MODEL, 3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
@EACH_VERB
def test_verbs_give_the_same_result_for_other_containers(verb: Verb):
    ys, us = _given(verb)
    for convert in (WHOLE["integers"], WAYS["pandas"], WAYS["float16"]):
        np.testing.assert_array_equal(verb.call(convert(ys), convert(us)), verb.call(ys, us))
    holes = HOLES[1] if verb.rows else HOLES
    if verb is VERBS["em"]:  # which refuses rows of which a part is missing
        holes = np.broadcast_to(holes.all(-1, keepdims=True), holes.shape)
    masked = np.ma.array(np.where(holes, 99.0, ys), mask=holes)
    np.testing.assert_allclose(verb.call(masked, us), verb.call(ys, us, mask=~holes), rtol=1e-12)


@pytest.mark.parametrize("name", [n for n, v in VERBS.items() if v.traceable])
def test_verbs_can_be_jitted_with_constant_model(name: str):
    """The model is concrete here, and what is computed from it is not: checks must not mix them."""
    ys, us = _given(VERBS[name])
    answer = jax.eval_shape(VERBS[name].call, ys, us)
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(answer))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n for n, v in VERBS.items() if v.traceable and not v.rows and n not in STREAMS_THAT_SKIP],
)
def test_traced_length_out_of_range_gives_no_finite_result(name: str):
    """NaN, or minus infinity and a status from particles; chains without padding refuse."""
    for length in (0, N + 1):
        try:
            answer = _traced(VERBS[name], length)
        except ValueError as error:
            assert "length was given, but the chain has 5 rows" in str(error)
        else:
            assert not np.all(np.isfinite(answer))


@pytest.mark.parametrize("place", [0, 1], ids=STREAMS_THAT_SKIP)
def test_streams_skip_all_rows_of_a_traced_length_out_of_range(place: int):
    stream, state = (LAGGED, RUNNING)[place], initial()[place]

    @jax.jit
    def scan(length: Any) -> Any:
        return stream.scan(state, YS, inputs=US, length=length)[1].skipped

    for length, expected in ((0, 1), (N + 1, N), (N, 0), (2, 0)):
        assert int(np.sum(scan(length))) == expected, length


# --- constructors ---------------------------------------------------------------------------------

ONES = np.ones((1, 1))


def _kernel(**change: Any) -> rd.LinearGaussianKernel:
    parts: dict[str, Any] = {"weight": ONES, "bias": ONES[0], "scale_tril": ONES}
    return rd.LinearGaussianKernel(**(parts | change))


def _stacked(**change: Any) -> rd.LinearGaussianChain:
    parts: dict[str, Any] = {
        "means": np.ones((2, 1)),
        "scales": np.ones((2, 1, 1)),
        "gains": np.ones((1, 1, 1)),
        "offsets": ONES,
        "kernel_scales": np.ones((1, 1, 1)),
    }
    return rd.LinearGaussianChain.from_arrays(**(parts | change))


def _mixture(**change: Any) -> rd.GaussianMixture:
    parts = {"log_weights": np.zeros(1), "means": ONES, "scale_trils": np.ones((1, 1, 1))}
    return rd.GaussianMixture(**(parts | change))


CONSTRUCTORS: dict[str, tuple[Callable[[Any], Any], np.ndarray, str]] = {
    "Gaussian mean": (lambda v: rd.Gaussian(v, ONES), ONES[0], "mean"),
    "Gaussian scale": (lambda v: rd.Gaussian(ONES[0], v), ONES, "scale_tril"),
    "Gaussian frozen": (lambda v: rd.Gaussian(rd.Frozen(v), ONES), ONES[0], "mean"),
    "Gaussian frozen scale": (lambda v: rd.Gaussian(ONES[0], rd.Frozen(v)), ONES, "scale_tril"),
    "Gaussian covariance": (
        lambda v: rd.Gaussian.from_covariance(ONES[0], v),
        ONES,
        "covariance",
    ),
    "Diagonal": (rd.Diagonal, np.ones(2), "std"),
    "natural mean": (lambda v: NaturalGaussian(v, ONES), ONES[0], "precision_mean"),
    "natural precision": (lambda v: NaturalGaussian(ONES[0], v), ONES, "precision"),
    "kernel weight": (lambda v: _kernel(weight=v), ONES, "weight"),
    "kernel bias": (lambda v: _kernel(bias=v), ONES[0], "bias"),
    "kernel scale": (lambda v: _kernel(scale_tril=v), ONES, "scale_tril"),
    "kernel input_weight": (lambda v: _kernel(input_weight=v), ONES, "input_weight"),
    "nonlinear kernel": (lambda v: rd.NonlinearGaussianKernel(jnp.sin, v), ONES, "scale_tril"),
    "mixture means": (lambda v: _mixture(means=v), ONES, "means"),
    "mixture log_weights": (lambda v: _mixture(log_weights=v), np.zeros(1), "log_weights"),
    "chain means": (lambda v: _stacked(means=v), np.ones((2, 1)), "means"),
    "chain offsets": (lambda v: _stacked(offsets=v), ONES, "offsets"),
    "Positive": (rd.Positive, ONES, "Positive"),
    "PositiveTril": (rd.PositiveTril, ONES, "PositiveTril"),
    "Bounded": (lambda v: rd.Bounded(v, 0.0, 2.0), ONES, "Bounded"),
    "Grid": (lambda v: rd.Grid(v, np.full(1, 2.0), 8), ONES[0], "lower"),
}
EACH_CONSTRUCTOR = pytest.mark.parametrize(
    ("make", "value", "name"), list(CONSTRUCTORS.values()), ids=list(CONSTRUCTORS)
)


@EACH_CONSTRUCTOR
def test_constructors_convert_or_refuse(make: Callable, value: np.ndarray, name: str):
    plain = make(value)
    for way, convert in (WHOLE | WAYS).items():
        built = make(convert(value))
        arrays = [jax.tree.leaves(eqx.filter(tree, eqx.is_array_like)) for tree in (built, plain)]
        for leaf, expected in zip(*arrays, strict=True):
            assert isinstance(leaf, jax.Array), way
            assert leaf.dtype == expected.dtype, way
            np.testing.assert_array_equal(leaf, expected, err_msg=way)
    for what, wrong in WRONG.items():
        if what in ("one number", "two axes more") and name in ("Positive", "Bounded"):
            continue
        if what == "one axis less" and name in ("Positive", "Bounded"):
            continue
        with pytest.raises((TypeError, ValueError), match=f"{name}|{name.replace('_', ' ')}"):
            make(wrong(value))
    with pytest.raises(ValueError, match=f"{name} must not have missing entries"):
        make(np.ma.array(value, mask=np.ones(value.shape, bool)))


def test_constructors_copy_their_arrays():
    """A change of the user's array afterwards does not reach the model."""
    weight = np.full((64, 64), 0.5)
    kernel = rd.LinearGaussianKernel(weight, np.zeros(64), np.eye(64))
    weight[:] = 0.0
    assert np.all(kernel.weight == 0.5)


def integer_model() -> rd.StateSpaceModel:
    return rd.StateSpaceModel(
        rd.Gaussian([0], [[1]]),
        rd.LinearGaussianKernel([[1]], [0], [[1]]),
        rd.LinearGaussianKernel(np.array([[1], [2]]), [0, 0], np.eye(2, dtype=int)),
    )


def test_integer_parameters_have_gradients():
    gradient = eqx.filter_grad(lambda m: rd.kalman_smoother(m, YS).log_evidence)(integer_model())
    assert len(jax.tree.leaves(gradient)) == 8
    assert np.all(gradient.transition.weight != 0)


@pytest.mark.slow
def test_integer_weight_is_fitted():
    fitted = rd.fit_evidence(KEY, integer_model(), YS, num_steps=2, progress=False).model
    assert np.all(np.asarray(fitted.transition.weight) != 1.0)


# --- scales ---------------------------------------------------------------------------------------

COVARIANCE = np.array([[2.0, 0.6], [0.6, 1.0]])
LOWER = np.linalg.cholesky(COVARIANCE)
TWO = np.zeros(2)

SCALES: dict[str, Callable[[Any], Any]] = {
    "Gaussian": lambda s: rd.Gaussian(TWO, s),
    "frozen": lambda s: rd.Gaussian(TWO, rd.Frozen(s)),
    "LinearGaussianKernel": lambda s: rd.LinearGaussianKernel(np.eye(2), TWO, s),
    "NonlinearGaussianKernel": lambda s: rd.NonlinearGaussianKernel(jnp.sin, s),
    "function kernel": lambda s: rd.VaryingLinearGaussianKernel(
        lambda u: (jnp.eye(2), jnp.zeros(2), s)
    ).at(jnp.ones(1)),
    "law of a kernel": lambda s: rd.DistributionKernel(lambda x: rd.Gaussian(x, s)).law(
        jnp.zeros(2)
    ),
    "PositiveTril": rd.PositiveTril,
    "positive matrix": lambda s: rd.Gaussian(TWO, rd.Positive(np.abs(s) + 1e-3)),
    "GaussianMixture": lambda s: rd.GaussianMixture(np.zeros(1), TWO[None], s[None]),
    "filtering laws": lambda s: rd.LinearGaussianChain.from_arrays(
        TWO[None], s[None], np.zeros((0, 2, 2)), np.zeros((0, 2)), np.zeros((0, 2, 2))
    ),
    "backward kernels": lambda s: rd.LinearGaussianChain.from_arrays(
        np.zeros((2, 2)), np.stack([LOWER] * 2), np.eye(2)[None], TWO[None], s[None]
    ),
}


@pytest.mark.parametrize("make", list(SCALES.values()), ids=list(SCALES))
@pytest.mark.parametrize("scale", [COVARIANCE, LOWER.T], ids=["covariance", "upper factor"])
def test_scale_that_is_not_lower_triangular_is_refused(make: Callable, scale: np.ndarray):
    with pytest.raises(ValueError, match=r"lower Cholesky factor[\s\S]*from_covariance"):
        make(scale)
    if make is SCALES["positive matrix"]:
        return  # computed from a parameter, which a compiled program traces
    with pytest.raises(ValueError, match="lower Cholesky factor"):
        jax.jit(
            lambda: jax.tree.leaves(make(scale))[0]
        )()  # a constant of a compiled program is known too


@pytest.mark.parametrize("part", ["transition", "emission"])
def test_a_function_that_returns_a_covariance_is_refused_by_verbs(part: str):
    kernels: dict[str, Any] = {
        "transition": rd.LinearGaussianKernel(np.eye(2), TWO, LOWER),
        "emission": rd.LinearGaussianKernel(np.eye(2), TWO, LOWER),
    }
    kernels[part] = rd.VaryingLinearGaussianKernel(
        lambda u: (jnp.eye(2), jnp.zeros(2), jnp.asarray(COVARIANCE) * u[0])
    )
    model = rd.StateSpaceModel(rd.Gaussian(TWO, LOWER), **kernels)
    for call in (
        lambda: rd.kalman_smoother(model, YS, inputs=1 + US),
        lambda: rd.ffbsi(KEY, model, YS, 8, inputs=1 + US),
        lambda: rd.fit_evidence(KEY, model, YS, inputs=1 + US, num_steps=1, progress=False),
    ):
        with pytest.raises(ValueError, match="lower Cholesky factor"):
            call()


@pytest.mark.parametrize("part", ["prior", "transition", "emission"])
def test_a_scale_replaced_in_a_model_is_checked_by_verbs(part: str):
    """`equinox.tree_at` replaces an array without a constructor."""
    kernel = rd.LinearGaussianKernel(np.eye(2), TWO, LOWER)
    model = rd.StateSpaceModel(rd.Gaussian(TWO, LOWER), kernel, kernel)
    model = eqx.tree_at(lambda m: getattr(m, part).scale_tril, model, jnp.asarray(LOWER.T))
    for call in (
        lambda: rd.kalman_smoother(model, YS),
        lambda: rd.extended_smoother(model, YS),
        lambda: rd.ffbsi(KEY, model, YS, 8),
        lambda: model.log_joint(YS, YS),
        lambda: rd.fit_evidence(KEY, model, YS, num_steps=1, progress=False),
    ):
        with pytest.raises(ValueError, match="lower Cholesky factor"):
            call()


@pytest.mark.parametrize("make", [*SCALES][:5])
def test_sign_of_scale_column_is_normalised(make: str):
    """A factor from a QR decomposition has any signs: its law is that of the turned one."""
    turned = LOWER * np.array([[-1.0, 1.0]])
    built = SCALES[make](turned)
    scale = rd.unwrap(built).scale_tril
    np.testing.assert_allclose(scale, LOWER, rtol=1e-15)
    np.testing.assert_allclose(np.asarray(scale) @ np.asarray(scale).T, COVARIANCE, rtol=1e-12)


def test_negative_standard_deviations_are_refused():
    for std in (np.array([1.0, -1.0]), rd.Frozen(np.array([1.0, -1.0]))):
        with pytest.raises(ValueError, match="standard deviations of at least zero"):
            rd.Diagonal(std)


def test_singular_scales_are_allowed():
    assert rd.Diagonal(np.array([1.0, 0.0])).std.tolist() == [1.0, 0.0]
    noise = np.array([[1.0, 0.0], [0.3, 0.0]])
    model = linear_model(2, noise=noise)
    assert np.isfinite(rd.kalman_smoother(model, YS).log_evidence)


def test_weights_of_a_mixture_sum_to_one():
    with pytest.raises(ValueError, match="log_weights whose exponentials sum to 1"):
        rd.GaussianMixture(np.zeros(2), np.zeros((2, 1)), np.ones((2, 1, 1)))


# --- tables ---------------------------------------------------------------------------------------


def test_arrow_table_is_read_by_columns():
    """Frames of polars offer the same protocol."""
    frame = pd.DataFrame(
        {"date": pd.date_range("2020-01-01", periods=4), "y": [1.0, np.nan, 3.0, 4.0]}
    )
    for source in (frame, pyarrow.table(frame)):
        table = rd.data.read(source)
        np.testing.assert_array_equal(table.ys[0], [[1.0], [np.nan], [3.0], [4.0]])


def test_masked_column_is_missing_in_a_table():
    column = np.ma.array([1.0, 99.0, 3.0], mask=[False, True, False])
    for source in (column, {"y": column}, {"t": np.arange(3), "y": column.astype(int)}):
        table = rd.data.read(source)
        np.testing.assert_array_equal(table.ys[0], [[1.0], [np.nan], [3.0]])


def test_polars_frames_are_accepted():
    polars = pytest.importorskip("polars")
    dates = [datetime.date(2020, 1, day) for day in range(1, 6)]
    frame = polars.DataFrame({"date": dates, "y": [1.0, None, 0.0, 1.0, 1.0]})
    table = rd.data.read(frame)
    np.testing.assert_array_equal(table.ys[0], [[1.0], [np.nan], [0.0], [1.0], [1.0]])
    np.testing.assert_array_equal(rd.data.read(frame["y"]).ys, table.ys)
    with pytest.raises(rd.data.DataError, match="collect"):
        rd.data.read(frame.lazy())
    with pytest.raises(TypeError, match="ys must be an array of numbers, got DataFrame"):
        rd.kalman_smoother(MODEL, frame, inputs=US)
    columns = polars.DataFrame({"a": YS[:, 0], "b": YS[:, 1].astype(int)})
    holes = columns.with_columns(polars.when(columns["a"] > 0).then(columns["a"]).alias("a"))
    for polars_frame, mask in (
        (columns, None),
        (holes, np.stack([YS[:, 0] > 0, YS[:, 1] >= 0], 1)),
    ):
        log_evidence = rd.kalman_smoother(MODEL, polars_frame, inputs=US).log_evidence
        plain = rd.kalman_smoother(MODEL, YS, inputs=US, mask=mask).log_evidence
        np.testing.assert_allclose(log_evidence, plain, rtol=1e-12)
