"""A model on a finite space, an approximation of it and a functional."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import ArrayLike, as_real_array, check_finite, is_concrete
from retrodict._chains import LinearGaussianChain
from retrodict._exact import Grid, log_prior
from retrodict._expectations import AbstractFunctional, LogJoint, check_model, series_of_chain
from retrodict._model import Series, StateSpaceModel, prepare_rows, unwrap
from retrodict.bounds.grid_bounds import check_unpadded, kernel_on, law_on, likelihood_on

MAX_POINTS = 600
"""The largest number of points: bounds cost its cube at every time."""

MAX_ENTRIES = 2e7
"""The largest number of entries of a table over times and pairs of points: 160 MB of float64."""


def _real(name: str) -> Callable[[ArrayLike], Array]:
    """Return the conversion of a field to a real array."""
    return lambda value: as_real_array(value, name)


class FiniteProblem(eqx.Module):
    """A model on S states with its observations, a backward chain, and an additive functional.

    Example:
        Two states and two rows:

        >>> import numpy as np, retrodict as rd
        >>> move = np.array([[0.9, 0.1], [0.2, 0.8]])
        >>> problem = rd.bounds.FiniteProblem.from_model(
        ...     prior=[0.5, 0.5],
        ...     transitions=[move],
        ...     likelihoods=[[0.7, 0.1], [0.3, 0.6]],
        ...     kernels=[[[0.95, 0.05], [0.4, 0.6]]],  # q_{0|1}, one row per state at time 1
        ...     filters=[[0.8, 0.2], [0.6, 0.4]],
        ...     functional=[[[0.0, 1.0], [1.0, 2.0]]],  # the number of times in the second state
        ... )
        >>> print(np.array(problem.terminal))
        [0.6 0.4]

    Args:
        initial: χ(x) g_0(x), unnormalised, of shape `(S,)`.
        potentials: L_k(x, y) = m_k(x, y) g_{k+1}(y), unnormalised, of shape `(n-1, S, S)`.
        transitions: m_k(x, y) alone, of shape `(n-1, S, S)`.
        kernels: `kernels[k, y, x]` is q_{k|k+1}(y, x), each row summing to 1, of shape
            `(n-1, S, S)`.
        filters: the auxiliary laws q̃_k of assumption H1, of shape `(n, S)`; the last one is the
            terminal law q_{n-1} of the chain.
        functional: h_k(x, y), of x_k = x and x_{k+1} = y, of shape `(n-1, S, S)`.
    """

    initial: Array = eqx.field(converter=_real("initial"), kw_only=True)
    potentials: Array = eqx.field(converter=_real("potentials"), kw_only=True)
    transitions: Array = eqx.field(converter=_real("transitions"), kw_only=True)
    kernels: Array = eqx.field(converter=_real("kernels"), kw_only=True)
    filters: Array = eqx.field(converter=_real("filters"), kw_only=True)
    functional: Array = eqx.field(converter=_real("functional"), kw_only=True)

    def __check_init__(self) -> None:
        _check_shapes(vars(self))
        _check_values(vars(self))

    @classmethod
    def from_model(
        cls,
        *,
        prior: ArrayLike,
        transitions: ArrayLike,
        likelihoods: ArrayLike,
        kernels: ArrayLike,
        filters: ArrayLike,
        functional: ArrayLike,
    ) -> "FiniteProblem":
        """Build a problem from a prior, transitions and likelihoods of the observations.

        Args:
            prior: χ(x), of shape `(S,)`.
            transitions: m_k(x, y), of shape `(n-1, S, S)`.
            likelihoods: g_k(x), of shape `(n, S)`; the scale of each row is free.
            kernels: q_{k|k+1}(y, x), of shape `(n-1, S, S)`.
            filters: q̃_k, of shape `(n, S)`.
            functional: h_k(x, y), of shape `(n-1, S, S)`.
        """
        chi, m = as_real_array(prior, "prior"), as_real_array(transitions, "transitions")
        g = as_real_array(likelihoods, "likelihoods")
        if chi.ndim != 1 or g.ndim != 2 or g.shape[1:] != chi.shape:
            raise ValueError(
                "prior must have shape (S,) and likelihoods shape (n, S), got"
                f" {chi.shape} and {g.shape}."
            )
        expected = (g.shape[0] - 1, *chi.shape, *chi.shape)
        if m.shape != expected:
            raise ValueError(
                f"transitions must have shape (n-1, S, S) = {expected}, got {m.shape}."
            )
        return cls(
            initial=chi * g[0],
            potentials=m * g[1:, None, :],
            transitions=m,
            kernels=kernels,
            filters=filters,
            functional=functional,
        )

    @classmethod
    def from_grid(
        cls,
        model: StateSpaceModel,
        chain: LinearGaussianChain,
        ys: Any,
        grid: Grid,
        functional: AbstractFunctional,
        data: PyTree = None,
        *,
        mask: Any = None,
        inputs: Any = None,
    ) -> "FiniteProblem":
        """Restrict a model, a chain and a functional to the points of a grid.

            m_k(x_i, x_j) ∝ m(x_i, x_j) w_j,   q_{k|k+1}(x_j, x_i) ∝ q_{k|k+1}(x_j, x_i) w_i

        with the weights w of the trapezoidal rule, and rows that sum to 1: no state leaves the box.
        This is a model on a compact domain, where assumption H2 can hold, and every bound is
        rigorous for it. It is close to the model on the whole space if the box contains the
        states and its spacing is below the standard deviations of the kernels, as checked by
        `grid_smoother`. The laws q̃_k are the filtering laws of the chain.

        With `measure=jnp.exp(grid.log_quadrature)` the densities that `finite_bounds` takes for H2
        are those with respect to Lebesgue measure.

        Example:
            >>> import jax, jax.numpy as jnp, retrodict as rd
            >>> model = rd.StateSpaceModel(
            ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
            ...     transition=rd.LinearGaussianKernel(0.5 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
            ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, 0.5 * jnp.eye(1)),
            ... )
            >>> _, ys = model.simulate(jax.random.key(0), num_times=4)
            >>> chain = rd.extended_smoother(model, ys).chain
            >>> grid = rd.Grid([-5.0], [5.0], 40)
            >>> problem = rd.bounds.FiniteProblem.from_grid(model, chain, ys, grid, rd.StateSum())
            >>> bounds = rd.bounds.finite_bounds(problem)
            >>> bool(jnp.abs(bounds.error) <= bounds.s2_phi)
            True

        Args:
            model: a model with a state of dimension 1 or 2, whose transition has a density.
            chain: a linear-Gaussian chain, with one row for each of n ≥ 2 rows of `ys`.
            ys: observations, of shape `(time, obs)`; NaN where missing.
            grid: S points, at most 600; arrays of n S² entries are made, at most 2e7.
            functional: an additive functional whose value is one number. Its value at x_0 is
                added to the first pair.
            data: a pytree with one row per time step, which the functional reads; by default the
                observations for `LogJoint`.
            mask: true where an entry was observed.
            inputs: inputs of shape `(time, input)`, if a kernel takes them.
        """
        check_unpadded(chain, "from_grid")
        for value, expected in ((grid, Grid), (functional, AbstractFunctional)):
            if not isinstance(value, expected):
                raise TypeError(
                    f"from_grid expects a {expected.__name__}, got {type(value).__name__}."
                )
        model = unwrap(model)
        check_model(model, chain, "from_grid")
        if grid.dim != chain.state_dim:
            raise ValueError(
                f"The grid has {grid.dim} dimensions, and the chain {chain.state_dim} state"
                " dimensions."
            )
        series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs)
        _check_sizes(series, grid)
        if isinstance(functional, LogJoint) and data is None:
            data = series.rows
        data = prepare_rows(data, series.num_times)
        _check_scalar(functional, grid, data)
        tables = _tabulate(model, chain, series, grid, functional, data)
        for name in ("transitions", "kernels", "filters"):
            if is_concrete(tables[name]) and not np.asarray(tables[name]).any(axis=-1).all():
                whose = "transition" if name == "transitions" else "chain"
                raise ValueError(
                    f"The points of the grid have no mass of a law of the {whose}: it is outside of"
                    " the box or between two points. Widen or refine the grid."
                )
        return cls.from_model(**tables)

    @property
    def terminal(self) -> Float[Array, "state"]:
        """The law q_{n-1} of the last state under the chain."""
        return self.filters[-1]


def _check_shapes(arrays: dict[str, Array]) -> None:
    filters = arrays["filters"]
    if filters.ndim != 2 or filters.shape[0] < 2 or filters.shape[1] < 1:
        batch = " For a batch of problems, build them under jax.vmap." if filters.ndim == 3 else ""
        raise ValueError(
            "filters must have shape (n, S), one law for each of n ≥ 2 times, got"
            f" {filters.shape}.{batch}"
        )
    n, size = filters.shape
    for name, array in arrays.items():
        expected = {"filters": (n, size), "initial": (size,)}.get(name, (n - 1, size, size))
        words = {"filters": "(n, S)", "initial": "(S,)"}.get(name, "(n-1, S, S)")
        if array.shape != expected:
            raise ValueError(
                f"{name} must have shape {words} = {expected}, as filters has shape"
                f" {filters.shape}, got {array.shape}."
            )


def _check_values(arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        check_finite(array, name)
        if name == "functional" or not is_concrete(array):
            continue
        values = np.asarray(array)
        if (values < 0).any():
            raise ValueError(f"{name} must not be negative, got {values.min()}.")
        if name in ("kernels", "filters"):
            totals = values.sum(axis=-1)
            worst = totals.flat[np.argmax(np.abs(totals - 1.0))]
            if abs(worst - 1.0) > np.sqrt(np.finfo(values.dtype).eps):
                raise ValueError(f"Rows of {name} must sum to 1, got a sum of {worst}.")
        elif not values.reshape(len(values) if values.ndim == 3 else 1, -1).any(axis=1).all():
            raise ValueError(f"{name} must not be zero everywhere at any time.")


@eqx.filter_jit
def _tabulate(
    model: StateSpaceModel,
    chain: LinearGaussianChain,
    series: Series,
    grid: Grid,
    functional: AbstractFunctional,
    data: PyTree,
) -> dict[str, Array]:
    points = grid.points

    def increments(row: PyTree) -> Float[Array, "before now"]:
        def value(before: Array, x: Array) -> Array:
            return _number(functional.increment(before, x, row), points.dtype)

        return jax.vmap(lambda before: jax.vmap(lambda x: value(before, x))(points))(points)

    def step(at: tuple) -> tuple[Array, Array, Array]:
        kernel, u, row = at
        transition, _ = kernel_on(grid, model.transition, u)
        return transition, kernel_on(grid, kernel, None)[0], increments(row)

    rows = (series.ys, series.mask, series.inputs)
    us, later = jax.tree.map(lambda leaf: leaf[1:], (series.inputs, data))
    transitions, kernels, functionals = lax.map(step, (chain.kernels, us, later))
    first = jax.tree.map(lambda leaf: leaf[0], data)
    start = jax.vmap(lambda x: _number(functional.initial(x, first), points.dtype))(points)
    log_first = log_prior(model, points) + grid.log_quadrature
    return {
        "prior": jnp.exp(log_first - jnp.max(log_first)),
        "transitions": transitions,
        "likelihoods": lax.map(lambda row: likelihood_on(grid, model, row), rows),
        "kernels": kernels,
        "filters": lax.map(lambda law: law_on(grid, law)[0], chain.laws),
        "functional": functionals.at[0].add(start[:, None]),
    }


def _number(value: PyTree, dtype: Any) -> Array:
    (leaf,) = jax.tree.leaves(value)
    return jnp.asarray(leaf, dtype).reshape(())


def _check_sizes(series: Series, grid: Grid) -> None:
    n, size = series.num_times, grid.size
    if n < 2:
        raise ValueError(f"from_grid expects a series of two rows or more, got {n}.")
    if size > MAX_POINTS or n * size**2 > MAX_ENTRIES:
        raise ValueError(
            f"from_grid tabulates all pairs of points at all times: at most {MAX_POINTS} points"
            f" and {MAX_ENTRIES:.0e} entries, got {size} points and {n} · {size}² ="
            f" {n * size**2:.1e} entries. Take a coarser grid, or error_bound with a GridPosterior"
            " as its reference."
        )


def _check_scalar(functional: AbstractFunctional, grid: Grid, data: PyTree) -> None:
    row = jax.tree.map(lambda leaf: leaf[0], data)
    value = jax.eval_shape(lambda x: functional.increment(x, x, row), grid.lower)
    shapes = [leaf.shape for leaf in jax.tree.leaves(value)]
    if [math.prod(shape) for shape in shapes] != [1]:
        raise ValueError(
            "from_grid expects a functional whose value is one number, got arrays of shapes"
            f" {shapes}. Write one for a single entry, with AdditiveFunctional or StateFunctional."
        )


def two_state_counterexample(e: float = 0.05, filed: int = 0) -> FiniteProblem:
    """Return the smallest counterexample to Proposition 3.1 of the paper as printed.

    Three independent fair coins with uninformative observations; the approximation is exact, except
    for P(x_1 = 0) = ½ + e. The error on f(x_1), f = ±1, is 2e, and the printed right-hand side
    is 16 e² / (1 - 2e): smaller for every e < 1/10.

    Example:
        >>> import retrodict as rd
        >>> bounds = rd.bounds.finite_bounds(rd.bounds.two_state_counterexample())
        >>> f"{float(bounds.error):.4f} > {float(bounds.printed_proposition):.4f}"
        '0.1000 > 0.0444'

    Args:
        e: the error of the middle coin, between 0 and ½.
        filed: the increment that contains f(x_1): 0 for h_0(x_0, x_1), with the fair coin as q̃_1,
            or 1 for h_1(x_1, x_2), with the coin of the approximation as q̃_1.
    """
    if not 0 < e < 0.5:
        raise ValueError(f"e must lie between 0 and ½, got {e}.")
    if filed not in (0, 1):
        raise ValueError(
            f"filed must be 0, for h_0(x_0, x_1), or 1, for h_1(x_1, x_2), got {filed}."
        )
    fair, biased, sign = np.full(2, 0.5), np.array([0.5 + e, 0.5 - e]), np.array([1.0, -1.0])
    functional = np.zeros((2, 2, 2))
    functional[filed] = sign[None, :] if filed == 0 else sign[:, None]
    return FiniteProblem.from_model(
        prior=fair,
        transitions=np.full((2, 2, 2), 0.5),
        likelihoods=np.ones((3, 2)),
        kernels=np.stack([np.tile(fair, (2, 1)), np.tile(biased, (2, 1))]),
        filters=np.stack([fair, fair if filed == 0 else biased, fair]),
        functional=functional,
    )
