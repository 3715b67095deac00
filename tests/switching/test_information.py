"""Standard errors of switching models, against differences of their evidence."""

import jax
import numpy as np
import pytest

import retrodict as rd

switching = rd.switching


@pytest.fixture(scope="module")
def fitted() -> tuple:
    model = rd.models.hmm(regimes=2)
    model = rd.models.with_parameters(model, {"mean": [[-2.0], [2.0]]})
    _, _, ys = model.simulate(jax.random.key(0), 80)
    result = switching.fit_evidence(jax.random.key(1), model, ys, num_starts=1, progress=False)
    return result.model, np.asarray(ys)


def read(model: rd.switching.SwitchingModel) -> dict:
    return rd.models.named_parameters(model)


def test_errors_equal_those_of_a_hessian_by_differences(fitted: tuple):
    """In other coordinates, (p_00, p_11, means, scales): errors at a maximum are the same."""
    model, ys = fitted
    errors = switching.parameter_errors(model, ys, read=read)
    assert errors.status == "fine" and errors.distance < 1e-2
    values = {name: np.asarray(value) for name, value in read(model).items()}
    at = np.concatenate([np.diagonal(values["transition"]), *(values[n].ravel() for n in NAMES)])

    @jax.jit
    def evidence(model: rd.switching.SwitchingModel) -> jax.Array:
        return switching.log_evidence(model, ys)

    def value(point: np.ndarray) -> float:
        stay = point[:2]
        matrix = [[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]]
        named = {"mean": point[2:4, None], "scale": point[4:, None], "transition": matrix}
        return float(evidence(rd.models.with_parameters(model, named)))

    step, count = 1e-3, len(at)
    hessian = np.zeros((count, count))
    eye = step * np.eye(count)
    for i in range(count):
        for j in range(i + 1):
            corners = [
                a * b * value(at + a * eye[i] + b * eye[j]) for a in (1, -1) for b in (1, -1)
            ]
            hessian[i, j] = hessian[j, i] = sum(corners) / (4 * step**2)
    expected = np.sqrt(np.diagonal(np.linalg.inv(-hessian)))
    ours = errors.standard_error
    stay_errors = np.diagonal(ours["transition"])
    found = np.concatenate([stay_errors, *(np.ravel(ours[name]) for name in NAMES)])
    np.testing.assert_allclose(found, expected, rtol=1e-3)


NAMES = ("mean", "scale")


def test_two_series_have_the_sum_of_the_information(fitted: tuple):
    model, ys = fitted
    one = switching.parameter_errors(model, ys)
    two = switching.parameter_errors(model, np.stack([ys, ys]))
    np.testing.assert_allclose(two.information, 2 * one.information, rtol=1e-6, atol=1e-6)


def test_frozen_parameters_have_no_errors(fitted: tuple):
    model, ys = fitted
    fixed = rd.models.fix_parameters(model, ["scale", "transition"])
    errors = switching.parameter_errors(fixed, ys)
    assert len(errors.names) == 2
    with pytest.raises(ValueError, match="every floating array is Frozen"):
        switching.parameter_errors(rd.models.fix_parameters(fixed, ["mean"]), ys)
