"""Series that several processes share, as one process alone has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd
from retrodict.distributed import all_gather_object, by_all, sum_over_processes

KEY = jax.random.key(0)


def local_level() -> rd.StateSpaceModel:
    def walk(scale: float) -> rd.LinearGaussianKernel:
        scales = rd.Diagonal(rd.Positive(jnp.full(1, scale)))
        return rd.LinearGaussianKernel(rd.Frozen(jnp.eye(1)), rd.Frozen(jnp.zeros(1)), scales)

    prior = rd.Frozen(rd.Gaussian(jnp.zeros(1), jnp.eye(1)))
    return rd.StateSpaceModel(prior, walk(1.0), walk(0.5))


@pytest.fixture(scope="module")
def ys() -> np.ndarray:
    keys = jax.random.split(KEY, 5)
    draws = np.array(jax.vmap(lambda key: local_level().simulate(key, 12)[1])(keys))
    draws[1, 4] = np.nan
    return draws


LENGTH = np.array([12, 12, 7, 9, 3])


def test_single_process_owns_all_series() -> None:
    assert rd.distributed.process_slice(7) == slice(0, 7)
    assert all_gather_object({"a": [1, None]}) == [{"a": [1, None]}]
    assert by_all(lambda: 3) == 3
    np.testing.assert_array_equal(sum_over_processes(np.arange(3.0)), np.arange(3.0))


def test_fit_on_shared_series_uses_all_series(ys: np.ndarray) -> None:
    shared = rd.data.SharedSeries(ys, length=LENGTH)
    assert repr(shared) == "SharedSeries(5 series, 12 rows, 1 columns; 5 local)"
    shared_fit, full_fit = (
        rd.fit_evidence(KEY, local_level(), series, num_steps=3, progress=False, length=length)
        for series, length in ((shared, None), (ys, LENGTH))
    )
    assert shared_fit.log_evidence == full_fit.log_evidence
    errors, by_all_series = (
        rd.parameter_errors(KEY, shared_fit.model, series, length=length)
        for series, length in ((shared, None), (ys, LENGTH))
    )
    np.testing.assert_array_equal(errors.information, by_all_series.information)


def test_mismatched_shared_series_are_refused(ys: np.ndarray) -> None:
    shared = rd.data.SharedSeries(ys)
    with pytest.raises(
        ValueError, match=r"expects ys of shape \(local, time, obs\), got \(12, 1\)"
    ):
        rd.data.SharedSeries(ys[0])
    with pytest.raises(ValueError, match="at least one series in all processes"):
        rd.data.SharedSeries(ys[:0])
    with pytest.raises(ValueError, match="reads length from the shared series; leave out `length`"):
        rd.fit_evidence(KEY, local_level(), shared, length=LENGTH)
    with pytest.raises(ValueError, match="shared over the devices of its mesh"):
        mesh = jax.make_mesh((1,), ("batch",))
        rd.fit_evidence(KEY, local_level(), shared, mesh=mesh)
    with pytest.raises(ValueError, match="must have 1 columns, got 2"):
        rd.fit_evidence(KEY, local_level(), rd.data.SharedSeries(np.ones((3, 4, 2))))
    with pytest.raises(ValueError, match="give all series to each process"):
        rd.parameter_errors(KEY, local_level(), shared, method="louis")
