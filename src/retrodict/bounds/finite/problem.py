"""A model on a finite space, an approximation of it and a functional."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict._chains import LinearGaussianChain
from retrodict._exact import Grid
from retrodict._expectations import AbstractFunctional
from retrodict._model import StateSpaceModel
from retrodict._types import ArrayLike
from retrodict._validate import as_real_array, check_finite, is_concrete
from retrodict.bounds.finite.tables import tabulate


class FiniteProblem(eqx.Module):
    """A model on S states with its observations, a backward chain, and an additive functional.

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

    initial: Array
    potentials: Array
    transitions: Array
    kernels: Array
    filters: Array
    functional: Array

    def __init__(
        self,
        *,
        initial: ArrayLike,
        potentials: ArrayLike,
        transitions: ArrayLike,
        kernels: ArrayLike,
        filters: ArrayLike,
        functional: ArrayLike,
    ):
        values = {
            "initial": initial,
            "potentials": potentials,
            "transitions": transitions,
            "kernels": kernels,
            "filters": filters,
            "functional": functional,
        }
        arrays = {name: as_real_array(value, name) for name, value in values.items()}
        dtype = jnp.result_type(*arrays.values())
        _check_shapes(arrays)
        _check_values(arrays)
        for name, array in arrays.items():
            setattr(self, name, array.astype(dtype))

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
        tables = tabulate(model, chain, ys, grid, functional, data, mask, inputs)
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
