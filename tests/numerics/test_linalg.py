"""Small linear algebra against numpy, on both sides of the thresholds where loops are unrolled.

Everything is compiled once for each size and precision, and run on a batch of two: a regular
problem and a semidefinite one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from retrodict._numerics import linalg

SIZES = (1, 2, 3, 5, 6, 7, 13)
CASES = pytest.mark.parametrize(
    ("d", "dtype"),
    [*((d, "float64") for d in SIZES), *((d, "float32") for d in (2, 6, 13))],
    indirect=["dtype"],
)
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}
REGULAR, SEMIDEFINITE = 0, 1


class Problem(NamedTuple):
    lower: Any  # a lower factor, with junk above its diagonal
    covariance: Any  # its product, with junk above its diagonal
    vector: Any
    matrix: Any
    wide: Any  # more columns than rows
    narrow: Any  # two columns: read below and above the threshold, once each


def regular_factor(rng: np.random.Generator, d: int) -> np.ndarray:
    """A lower factor whose condition number stays below a hundred or so."""
    return np.tril(0.3 * rng.normal(size=(d, d)), -1) + np.diag(rng.uniform(0.7, 1.5, d))


def problem(d: int, kind: int) -> Problem:
    rng = np.random.default_rng(d)
    lower = regular_factor(rng, d)
    vector, matrix = rng.normal(size=d), rng.normal(size=(d, 4))
    wide, narrow = rng.normal(size=(d, d + 2)), rng.normal(size=(d, 2))
    wide *= np.sqrt(rng.uniform(0.1, 3.0, d + 2))
    if kind == SEMIDEFINITE:
        lower[0] = 0.0  # a coordinate without noise
        wide[0] = narrow[0] = 0.0
        wide[:, d + 1] = 0.0
        if d > 2:
            wide[2] = 2.0 * wide[1]  # two rows that are multiples of each other
    junk = np.triu(np.full((d, d), 7.0), 1)
    return Problem(lower + junk, lower @ lower.T + junk, vector, matrix, wide, narrow)


def tall_and_wide(p: Problem) -> tuple:
    return (p.wide, p.narrow) if p.narrow.shape[-2] in (3, 13) else (p.wide,)


class Solution(NamedTuple):
    cholesky: jax.Array
    semidefinite_cholesky: jax.Array
    solves: tuple[jax.Array, jax.Array]
    transposed_solves: tuple[jax.Array, jax.Array]
    products: tuple[jax.Array, jax.Array, jax.Array]
    tria: tuple[jax.Array, ...]
    gram_schmidt: tuple[jax.Array, jax.Array, jax.Array]
    split: tuple[jax.Array, jax.Array]


@jax.jit
@jax.vmap
def solve_all(p: Problem) -> Solution:
    solve = linalg.solve_triangular
    return Solution(
        linalg.cholesky(p.covariance),
        linalg.semidefinite_cholesky(jnp.tril(p.covariance) + jnp.tril(p.covariance, -1).T),
        (solve(p.lower, p.vector), solve(p.lower, p.matrix)),
        (solve(p.lower, p.vector, transpose=True), solve(p.lower, p.matrix, transpose=True)),
        (
            linalg.matmul(p.matrix.T, p.wide),
            linalg.matvec(p.matrix.T, p.vector),
            linalg.outer_gram(p.matrix.T),
        ),
        tuple(linalg.tria(w) for w in tall_and_wide(p)),
        linalg.gram_schmidt(p.wide),
        linalg.unit_lower_and_diagonal(jnp.tril(p.lower)),
    )


@functools.cache
def solved(d: int, dtype: str, kind: int) -> tuple[Problem, Solution]:
    """The problem as it was rounded, in double precision, and what came out."""
    problems = [problem(d, REGULAR), problem(d, SEMIDEFINITE)]
    batch = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves), dtype), *problems)
    solutions = solve_all(batch)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(solutions))
    return (
        jax.tree.map(lambda leaf: np.asarray(leaf[kind], float), batch),
        jax.tree.map(lambda leaf: np.asarray(leaf[kind], float), solutions),
    )


def assert_close(got: Any, expected: np.ndarray, dtype: np.dtype) -> None:
    scale = max(float(np.max(np.abs(expected), initial=0.0)), 1.0)
    tolerance = TOLERANCE[np.dtype(dtype).name]
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale)


def assert_lower(a: Any) -> None:
    np.testing.assert_array_equal(a, np.tril(a))


def test_tested_sizes_straddle_the_thresholds():
    assert {linalg.UNROLLED, linalg.UNROLLED + 1, 2 * linalg.UNROLLED + 1} <= set(SIZES)


@CASES
def test_cholesky_and_solves_of_regular_matrices_equal_numpy(d: int, dtype: np.dtype):
    p, got = solved(d, dtype.name, REGULAR)
    lower = np.tril(p.lower)
    covariance = np.tril(p.covariance) + np.tril(p.covariance, -1).T
    assert_lower(got.cholesky)
    assert_close(got.cholesky, np.linalg.cholesky(covariance), dtype)
    root = got.semidefinite_cholesky  # which adds a little to the diagonal of a large matrix
    assert_close(root @ root.T, covariance, dtype)
    for b, x, y in zip((p.vector, p.matrix), got.solves, got.transposed_solves, strict=True):
        assert_close(x, np.linalg.solve(lower, b), dtype)
        assert_close(y, np.linalg.solve(lower.T, b), dtype)
    product, image, gram = got.products
    assert_close(product, p.matrix.T @ p.wide, dtype)
    assert_close(image, p.matrix.T @ p.vector, dtype)
    assert_close(gram, p.matrix.T @ p.matrix, dtype)

    assert_close(got.tria[0], np.linalg.cholesky(p.wide @ p.wide.T), dtype)
    root = np.linalg.cholesky(p.wide @ p.wide.T)
    unit_lower, diagonal, _ = got.gram_schmidt
    assert_close(diagonal, np.diagonal(root) ** 2, dtype)
    assert_close(unit_lower, root / np.diagonal(root), dtype)

    unit_lower, diagonal = got.split
    assert_close(diagonal, np.diagonal(lower) ** 2, dtype)
    assert_close(unit_lower, lower / np.diagonal(lower), dtype)


@pytest.mark.parametrize("kind", [REGULAR, SEMIDEFINITE])
@CASES
def test_factors_reproduce_products_of_any_rank(d: int, kind: int, dtype: np.dtype):
    """Zero rows, dependent rows, more rows than columns: no NaN, and the right product."""
    p, got = solved(d, dtype.name, kind)
    for w, root in zip(tall_and_wide(p), got.tria, strict=True):
        assert_lower(root)
        assert np.all(np.diagonal(root) >= 0)
        assert_close(root @ root.T, w @ w.T, dtype)
    lower = np.tril(p.lower)
    products = (p.wide @ p.wide.T, lower @ lower.T)
    for (unit_lower, diagonal), product in zip(
        (got.gram_schmidt[:2], got.split), products, strict=True
    ):
        assert_lower(unit_lower)
        np.testing.assert_array_equal(np.diagonal(unit_lower), 1.0)
        assert np.all(diagonal >= 0)
        assert_close((unit_lower * diagonal) @ unit_lower.T, product, dtype)


@CASES
def test_semidefinite_cholesky_reproduces_the_matrix(d: int, dtype: np.dtype):
    p, got = solved(d, dtype.name, SEMIDEFINITE)
    covariance = np.tril(p.covariance) + np.tril(p.covariance, -1).T
    root = got.semidefinite_cholesky
    assert np.all(np.isfinite(root))
    assert_lower(root)
    assert_close(root @ root.T, covariance, dtype)
    if d <= linalg.UNROLLED:  # beyond, the plain form says that it is NaN
        assert_close(got.cholesky @ got.cholesky.T, covariance, dtype)


@pytest.mark.parametrize("shape", [(1, 5), (3, 40), (4, 2), (14, 20)])
def test_tria_handles_few_and_many_columns(shape: tuple[int, int]):
    w = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    factor = np.asarray(jax.jit(linalg.tria)(w))
    assert_lower(factor)
    np.testing.assert_allclose(factor @ factor.T, w @ w.T, atol=1e-12)
    np.testing.assert_array_equal(jax.jit(linalg.tria)(0 * w), 0.0)


def test_zero_pivot_with_nonzero_column_keeps_the_product():
    scale = np.array([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 3.0, 0.0]])
    lower, diagonal = map(np.asarray, linalg.unit_lower_and_diagonal(jnp.asarray(scale)))
    assert diagonal[2] == 0
    np.testing.assert_allclose((lower * diagonal) @ lower.T, scale @ scale.T, atol=1e-13)


def test_solving_with_a_zero_pivot_gives_zero_there():
    lower = jnp.asarray(np.array([[2.0, 0, 0], [0, 0, 0], [1.0, 0, 4.0]]))
    x = linalg.solve_triangular(lower, jnp.asarray(np.array([2.0, 0.0, 9.0])))
    np.testing.assert_array_equal(x, [1.0, 0.0, 2.0])


def test_safe_functions_at_zero_have_finite_gradients():
    zero = jnp.zeros(())
    for function in (linalg.safe_reciprocal, linalg.safe_sqrt):
        value, slope = jax.value_and_grad(function)(zero)
        assert value == 0 and slope == 0
    assert linalg.safe_sqrt(-jnp.ones(())) == 0
    assert linalg.safe_reciprocal(jnp.asarray(-4.0)) == -0.25


@pytest.mark.usefixtures("x32")
def test_gram_schmidt_keeps_small_eigenvalues():
    """Nearly parallel rows in float32: one eigenvalue about 1, the other 1e-12 of it."""
    w = np.array([[1.0, 3e-6], [1.0 + 1e-6, -1e-6]], np.float32)
    exact = np.linalg.cholesky(w.astype(float) @ w.T.astype(float))
    pivots = np.diagonal(exact) ** 2
    assert 1e-12 < pivots[1] / pivots[0] < 3e-11

    lower, diagonal, _ = linalg.gram_schmidt(jnp.asarray(w))
    assert lower.dtype == diagonal.dtype == jnp.float32
    np.testing.assert_allclose(diagonal, pivots, rtol=1e-2)
    np.testing.assert_allclose(linalg.tria(jnp.asarray(w))[1, 1], exact[1, 1], rtol=1e-2)

    formed = np.asarray(linalg.cholesky(linalg.outer_gram(jnp.asarray(w))), float)
    assert abs(formed[1, 1] ** 2 - pivots[1]) > 0.9 * pivots[1]


# --- any values -----------------------------------------------------------------------------------

ENTRIES = st.floats(-10, 10, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)

tria = jax.jit(linalg.tria)
cholesky = jax.jit(linalg.cholesky)
solve_triangular = jax.jit(linalg.solve_triangular)


gram_schmidt = jax.jit(lambda w: linalg.gram_schmidt(w)[:2])


@given(w=hnp.arrays(np.float64, (3, 5), elements=ENTRIES))
def test_tria_reproduces_the_product(w: np.ndarray):
    root = np.asarray(tria(jnp.asarray(w)))
    assert np.all(np.isfinite(root)) and np.all(np.diagonal(root) >= 0)
    np.testing.assert_allclose(root @ root.T, w @ w.T, atol=1e-11 * (1 + np.abs(w).max()) ** 2)


@given(
    w=hnp.arrays(np.float64, (4, 3), elements=ENTRIES),
    widths=hnp.arrays(np.float64, 3, elements=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 1e3])),
)
def test_gram_schmidt_reproduces_the_product_of_columns_of_any_size(
    w: np.ndarray, widths: np.ndarray
):
    lower, diagonal = map(np.asarray, gram_schmidt(jnp.asarray(w * widths)))
    assert np.all(np.isfinite(lower)) and np.all(diagonal >= 0)
    scale = (1 + np.abs(w * widths).max()) ** 2
    np.testing.assert_allclose(
        (lower * diagonal) @ lower.T, (w * widths) @ (w * widths).T, atol=1e-11 * scale
    )


@pytest.mark.parametrize("d", [3, 7])
@given(data=st.data())
def test_cholesky_and_solves_hold_for_random_matrices(d: int, data: st.DataObject):
    a = data.draw(hnp.arrays(np.float64, (d, d), elements=ENTRIES))
    covariance = a @ a.T + np.eye(d)
    lower = np.asarray(cholesky(jnp.asarray(covariance)))
    np.testing.assert_allclose(lower, np.linalg.cholesky(covariance), rtol=1e-8, atol=1e-8)
    x = np.asarray(solve_triangular(jnp.asarray(lower), jnp.asarray(a)))
    np.testing.assert_allclose(lower @ x, a, atol=1e-9)


# --- derivatives ----------------------------------------------------------------------------------


def check_derivatives(function: Callable[..., object], *args: np.ndarray) -> None:
    """Forward and reverse derivatives along a random direction against central differences.

    The arguments have a leading batch axis and the function is mapped over it, so that the rules
    for batching run as well. One program, where `jax.test_util.check_grads` compiles four.
    """
    rng = np.random.default_rng(0)
    point = tuple(jnp.asarray(arg) for arg in args)
    direction = tuple(jnp.asarray(rng.normal(size=arg.shape)) for arg in args)

    def loss(point: tuple[jax.Array, ...]) -> jax.Array:
        leaves = jax.tree.leaves(jax.vmap(function)(*point))
        return linalg.sum_of([jnp.sum(jnp.sin(leaf + 0.3)) for leaf in leaves])

    @jax.jit
    def derivatives(point, direction):
        def along(t: jax.Array) -> jax.Array:
            return loss(jax.tree.map(lambda a, v: a + t * v, point, direction))

        _, forward = jax.jvp(along, (jnp.zeros(()),), (jnp.ones(()),))
        slopes = jax.tree.map(lambda g, v: jnp.sum(g * v), jax.grad(loss)(point), direction)
        steps = jax.lax.map(along, jnp.array([-1e-5, 1e-5]))
        return forward, linalg.sum_of(slopes), (steps[1] - steps[0]) / 2e-5

    forward, backward, difference = derivatives(point, direction)
    np.testing.assert_allclose(forward, difference, rtol=1e-6)
    np.testing.assert_allclose(backward, forward, rtol=1e-10)


def batch_of_factors(d: int) -> np.ndarray:
    rng = np.random.default_rng(d)
    return np.stack([regular_factor(rng, d) for _ in range(2)])


@pytest.mark.parametrize("d", [2, 7])
def test_derivatives_of_factors_and_solves_equal_finite_differences(d: int):
    lower = batch_of_factors(d)

    def both(lower: jax.Array, b: jax.Array):
        solve = linalg.solve_triangular
        covariance = jnp.matmul(lower, lower.T) + jnp.eye(d)
        return (
            linalg.cholesky(covariance),
            solve(lower, b),
            solve(lower, b[:, 0], transpose=True),
            linalg.unit_lower_and_diagonal(lower),
            linalg.matvec(linalg.matmul(lower, lower), b[:, 1]),
        )

    check_derivatives(both, lower, np.random.default_rng(1).normal(size=(2, d, 2)))


@pytest.mark.parametrize("d", [2, 13])
def test_derivatives_of_orthogonalisation_equal_finite_differences(d: int):
    rng = np.random.default_rng(d)

    def both(w: jax.Array):
        return linalg.tria(w), linalg.gram_schmidt(w)[:2]

    check_derivatives(both, rng.normal(size=(2, d, d + 2)))


# Beyond the unrolled sizes the factor is LAPACK's, whose derivative needs independent rows.
@pytest.mark.parametrize("d", [3, 6])
def test_gradients_are_finite_for_dependent_rows(d: int):
    w = problem(d, SEMIDEFINITE).wide

    @jax.jit
    @jax.grad
    def gradient(w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(linalg.outer_gram(linalg.tria(w))))

    assert np.all(np.isfinite(gradient(jnp.asarray(w))))


@pytest.mark.parametrize("d", [3, 8])
@pytest.mark.parametrize("dependent", [False, True])
def test_derivatives_of_semidefinite_factors_are_those_of_their_products(d: int, dependent: bool):
    """Along a change of b in a = b bᵀ: l dlᵀ + dl lᵀ = da, in any order of differentiation."""
    rng = np.random.default_rng(d)
    b, change = (np.tril(rng.normal(size=(d, d))) + 2 * np.eye(d) for _ in range(2))
    if dependent:  # row 1 stays twice row 0
        b[:, 1], change[:, 1] = 0.0, 0.0
        b[1], change[1] = 2 * b[0], 2 * change[0]

    def product(t):
        moved = jnp.asarray(b) + t * jnp.asarray(change)
        return linalg.matmul(moved, moved.T)

    def factor(t):
        return linalg.semidefinite_cholesky(product(t))

    lower, slope = jax.jvp(factor, (0.1,), (1.0,))
    assert int((jnp.diagonal(lower) == 0).sum()) == int(dependent)
    np.testing.assert_allclose(jnp.triu(slope, 1), 0.0, atol=1e-14)

    def rebuilt(t):
        return linalg.matmul(factor(t), factor(t).T)

    for order in (jax.jacfwd, jax.jacrev, lambda f: jax.jacfwd(jax.jacrev(f))):
        np.testing.assert_allclose(order(rebuilt)(0.1), order(product)(0.1), rtol=1e-9, atol=1e-9)
