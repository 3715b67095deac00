"""Exact inference in linear-Gaussian models on plain arrays: filter, backward kernels, score.

Observations are whitened first, so that their noise has unit covariance. A missing entry is then a
row of zeros, and the functions after `whiten` need no mask.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._kernels import LinearGaussianKernel
from retrodict._laws import LOG_2PI, Scale, masked_scale, scale_log_det, scale_solve
from retrodict._numerics import (
    Factored,
    StandardKernel,
    affine_suffix_scan,
    condition,
    condition_columns,
    in_parts,
    linalg,
    narrowest,
    predict,
    propagate,
    reverse_rows,
    reverse_standardised,
)
from retrodict._types import Scalar
from retrodict.distributed import Parallel, appended, prepended


class Prior(NamedTuple):
    """The law N(mean, scale scaleᵀ) of x_0."""

    mean: Float[Array, "state"]
    scale: Float[Array, "state noise"]


class Transition(NamedTuple):
    """The transition x_k = weight x_{k-1} + bias + scale ε.

    Each array may have a leading axis `time-1`.
    """

    weight: Float[Array, "*time state state"]
    bias: Float[Array, "*time state"]
    scale: Float[Array, "*time state noise"]


class Whitened(NamedTuple):
    """Whitened observations value_k = design x_k + ε with standard normal ε.

    The design may have a leading time axis.
    """

    design: Float[Array, "*time whitened state"]
    value: Float[Array, "time whitened"]

    def reduced(self) -> "Whitened":
        """Return the data with at most d + 1 entries per row: see `reduce_rows`."""
        if self.value.shape[-1] <= self.design.shape[-1] + 1:
            return self
        design_axis = 0 if self.design.ndim == 3 else None
        return Whitened(*jax.vmap(reduce_rows, in_axes=(design_axis, 0))(*self))


def whiten(
    weight: Float[Array, "obs state"],
    scale: Scale,
    residual: Float[Array, "obs"],
    mask: Bool[Array, "obs"] | None,
) -> tuple[Float[Array, "obs state"], Float[Array, "obs"], Scalar]:
    """Transform y − b = w x + s ε into observations with unit noise.

    Returns:
        The design, the values, and the constant that the change of variables adds to the log
        density.
    """
    count = jnp.asarray(residual.shape[0], residual.dtype)
    if mask is not None:
        observed = mask.astype(residual.dtype)
        count = jnp.sum(observed)
        scale = masked_scale(scale, observed)
        weight, residual = weight * observed[:, None], residual * observed
    design, value = scale_solve(scale, weight), scale_solve(scale, residual)
    constant = -0.5 * LOG_2PI * count - scale_log_det(scale)
    return design, value, constant


def reduce_rows(
    design: Float[Array, "obs state"], value: Float[Array, "obs"]
) -> tuple[Float[Array, "whitened state"], Float[Array, "whitened"]]:
    """Rotate observations with unit noise so that at most d + 1 of them remain.

    With B an orthonormal basis of the span of [H, v], the entries B v with design B H have the
    likelihood of v with design H, up to a constant (Jungbacker and Koopman 2015). Differentiation
    treats B as a constant: the likelihood depends on [H, v] only through its Gram matrix, which a
    change out of the span affects to second order only. Second derivatives would therefore be
    wrong, and raise an error.
    """
    if design.shape[0] <= design.shape[1] + 1:
        return design, value
    reduced = _reduced(jnp.concatenate([design, value[:, None]], axis=1))
    return reduced[:, :-1], reduced[:, -1]


@jax.custom_jvp
def _reduced(columns: Float[Array, "obs c"]) -> Float[Array, "c c"]:
    return linalg.matmul(_row_basis(columns.T), columns)


@_reduced.defjvp
def _reduced_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    basis = _first_order_only(_row_basis(primals[0].T))
    return _reduced(primals[0]), linalg.matmul(basis, tangents[0])


@jax.custom_jvp
def _first_order_only(basis: Array) -> Array:
    return basis


@_first_order_only.defjvp
def _reject_second_derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    raise TypeError(
        "Filtering laws and chains can be differentiated only once where a row has more than d + 1"
        " entries (d is the state dimension), and the log-evidence only twice. For higher"
        " derivatives process the entries of a row as separate rows, with no transition between"
        " them."
    )


def _row_basis(rows: Float[Array, "r c"]) -> Float[Array, "r c"]:
    """Return orthonormal rows with the same span as `rows`; dependent rows become zero."""
    basis: list[Array] = []
    tiny = jnp.finfo(rows.dtype).eps
    for row in rows:
        size = jnp.sqrt(jnp.sum(row**2))
        for _ in range(2):  # two passes give orthogonality to rounding
            for other in basis:
                row = row - other * jnp.sum(other * row)
        remainder = jnp.sqrt(jnp.sum(row**2))
        keep = remainder > 10 * rows.shape[1] * tiny * size
        basis.append(jnp.where(keep, row / jnp.where(keep, remainder, 1.0), 0.0))
    return jnp.stack(basis)


class Filtered(NamedTuple):
    """The output of a filter.

    Attributes:
        laws: the filtering laws.
        predicted: the laws of x_1, …, x_{n-1} given the rows before them.
        rows: the rows q that `predict` returned with `predicted`. Both are `None` if the factors
            of `laws` were not computed from each other.
    """

    laws: Factored
    predicted: Factored | None = None
    rows: Float[Array, "steps state state_plus_noise"] | None = None


def filter_laws(
    prior: Prior, transition: Transition, data: Whitened, exists: Bool[Array, "time"] | None
) -> tuple[Filtered, Scalar]:
    """Return the filtering laws at all times, and the log density of the whitened values."""
    design_varies = data.design.ndim == 3
    fixed, varying = _split(transition)
    first_design = data.design[0] if design_varies else data.design
    first, innovations = condition(Factored.from_scale(*prior), first_design, data.value[0])

    def move(law: Factored, row: tuple) -> tuple[Factored, tuple]:
        moving, design, value, real = row
        design = design if design_varies else data.design
        predicted, directions = predict(law, *_join(fixed, moving))
        after, innovations = condition(predicted, design, value)
        if real is not None:
            after = jax.tree.map(lambda new, old: jnp.where(real, new, old), after, law)
        # For d = 1 factors are unique: `backward_kernels` recomputes them and the loop stays small.
        return after, (after, innovations, *((predicted, directions) if law.dim > 1 else ()))

    rows = (
        varying,
        data.design[1:] if design_varies else None,
        data.value[1:],
        None if exists is None else exists[1:],
    )
    _, (laws, later, *predictions) = lax.scan(
        move, first, rows, unroll=linalg.steps_per_loop(first.dim)
    )
    laws, innovations = jax.tree.map(
        lambda start, rest: jnp.concatenate([start[None], rest]),
        (first, innovations),
        (laws, later),
    )
    return Filtered(laws, *predictions), innovations.log_prob()


def with_closed_form_score(
    run: Callable[..., tuple[Filtered, Scalar]], *, parallel: Parallel
) -> Callable[..., tuple[tuple[Filtered, Whitened], Scalar]]:
    """Return a filter whose log density is differentiated by `score`.

    Rows of more than d + 1 entries are reduced first. `score` maps its result back to all entries,
    so that it can be differentiated again: the Hessian of the log density is exact. If the laws are
    differentiated as well, the filter itself is differentiated.

    The filter also returns the reduced data. Reducing the data again outside of the filter would
    differentiate the reduction twice in a Hessian of the log density.
    """
    zero = jax.custom_derivatives.SymbolicZero

    def is_zero(leaf: object) -> bool:
        return isinstance(leaf, zero)

    def run_reduced(prior: Prior, transition: Transition, data: Whitened, exists: Array | None):
        reduced = data.reduced()
        filtered, log_prob = run(prior, transition, reduced, exists)
        return (filtered, reduced), log_prob

    filtered = jax.custom_vjp(run_reduced)

    def forward(*primals):
        arguments = jax.tree.map(lambda primal: primal.value, primals)
        outputs, log_prob = run_reduced(*arguments)
        return (outputs, log_prob), (arguments, outputs[0].laws)

    def backward(residuals, cotangents):
        (prior, transition, data, exists), laws = residuals
        outputs_bar, log_prob_bar = cotangents
        if all(is_zero(leaf) for leaf in jax.tree.leaves(outputs_bar, is_leaf=is_zero)):
            scores = score(prior, transition, data, exists, laws, parallel=parallel)
            if is_zero(log_prob_bar):
                log_prob_bar = jnp.zeros((), data.value.dtype)
            return (*jax.tree.map(lambda leaf: leaf * log_prob_bar, scores), None)
        dense = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if is_zero(leaf) else leaf,
            cotangents,
            is_leaf=is_zero,
        )
        _, pull = jax.vjp(partial(run_reduced, exists=exists), prior, transition, data)
        return (*pull(dense), None)

    filtered.defvjp(forward, backward, symbolic_zeros=True)
    return filtered


def score(
    prior: Prior,
    transition: Transition,
    data: Whitened,
    exists: Bool[Array, "time"] | None,
    laws: Factored,
    *,
    parallel: Parallel = False,
) -> tuple[Prior, Transition, Whitened]:
    """Compute the gradient of the log density in every argument, by one backward pass.

    Let r_k and N_k be the derivative and the curvature of the log density of y_{k:} in the
    predicted mean at time k. With Ψ_k the map from a predicted mean to the next one,

        r_k = j_k + Ψ_kᵀ r_{k+1},   N_k = J_k + Ψ_kᵀ N_{k+1} Ψ_k.

    The derivative in a predicted covariance is ½ (r rᵀ − N). The chain rule through w m + b and
    w P wᵀ + s sᵀ gives the other derivatives (Koopman and Shephard 1992). No inverse of a state
    covariance is needed, so that the noise and the prior may be singular.
    """
    weight, bias, scale = over_time(transition, data.value.shape[0] - 1)
    reduced = data.reduced()
    design, value = repeat_over_time(reduced.design, 3, data.value.shape[0]), reduced.value
    d = laws.dim
    if exists is not None:
        real = exists[1:, None, None]
        weight = jnp.where(real, weight, jnp.eye(d, dtype=weight.dtype))
        scale = jnp.where(real, scale, 0.0)
        bias = jnp.where(exists[1:, None], bias, 0.0)
    before = jax.tree.map(lambda leaf: leaf[:-1], laws)
    later = jax.vmap(propagate)(before, weight, bias, scale)
    predicted = prepended(Factored.from_scale(*prior), later, parallel)
    reading = jax.vmap(read)(predicted, design, value)
    product, apply = jax.vmap(linalg.matmul), jax.vmap(linalg.matvec)
    zero_vector, zero_matrix = jnp.zeros(d, weight.dtype), jnp.zeros((d, d), weight.dtype)
    onward = appended(product(weight, reading.carry[:-1]), zero_matrix, parallel)

    adjoint = jnp.swapaxes(onward, -1, -2)
    rows = (adjoint, reading.slope, reading.curvature)
    r, big_n = affine_suffix_scan(*rows, parallel) if parallel else _affine_suffix_loop(*rows)
    outer = r[:, :, None] * r[:, None, :] - big_n

    covariance = jax.vmap(lambda s: linalg.outer_gram(s))(laws.scale_tril)
    weight_bar = r[1:, :, None] * before.mean[:, None, :] + product(
        outer[1:], product(weight, covariance[:-1])
    )
    transition_bar = Transition(weight_bar, r[1:], product(outer[1:], scale))
    if exists is not None:
        transition_bar = jax.tree.map(
            lambda leaf: jnp.where(exists[1:].reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0.0),
            transition_bar,
        )
    # Smoothed moments, from the filtering law and the derivatives of the later log density.
    transposed = jnp.swapaxes(weight, -1, -2)
    r_after = appended(apply(transposed, r[1:]), zero_vector, parallel)
    n_after = appended(product(transposed, product(big_n[1:], weight)), zero_matrix, parallel)
    mean = laws.mean + apply(covariance, r_after)
    # With unit noise H P = Kᵀ after conditioning, so that H times the smoothed covariance needs
    # no difference of covariances.
    gain = jnp.swapaxes(reading.gain, -1, -2)
    misfit = reading.residual - apply(gain, r_after)
    shrinkage = product(n_after, covariance)
    design_covariance = gain - product(gain, shrinkage)
    if reduced is not data:
        smoothed = covariance - product(covariance, shrinkage)
        at_all_entries = jax.vmap(
            _at_all_entries, in_axes=(0 if data.design.ndim == 3 else None, 0)
        )
        misfit, design_covariance = at_all_entries(
            data.design, (data.value, mean, smoothed, misfit, design_covariance)
        )
    design_bar = misfit[:, :, None] * mean[:, None, :] - design_covariance
    return (
        Prior(r[0], linalg.matmul(outer[0], prior.scale)),
        Transition(
            *(_reduce(bar, leaf) for bar, leaf in zip(transition_bar, transition, strict=True))
        ),
        Whitened(_reduce(design_bar, data.design), -misfit),
    )


def _at_all_entries(
    design: Float[Array, "obs state"], row: tuple[Array, Array, Array, Array, Array]
) -> tuple[Float[Array, "obs"], Float[Array, "obs state"]]:
    """Return v − H m and H P for all entries of a row, given those of its reduced entries.

    With the basis B of `reduce_rows`, v − H m = Bᵀ (B v − B H m) + (I − BᵀB)(v − H m). This holds
    for any B, so that B may be a constant. The second term is zero, but its derivative is not.
    """
    value, mean, covariance, misfit, design_covariance = row
    columns = jnp.concatenate([design, value[:, None]], axis=1)
    basis = lax.stop_gradient(_row_basis(columns.T))

    def whole(reduced: Float[Array, "c k"], full: Float[Array, "obs k"]) -> Float[Array, "obs k"]:
        return full + linalg.matmul(basis.T, reduced - linalg.matmul(basis, full))

    full_misfit = value - linalg.matvec(design, mean)
    return (
        whole(misfit[:, None], full_misfit[:, None])[:, 0],
        whole(design_covariance, linalg.matmul(design, covariance)),
    )


def _affine_suffix_loop(
    weights: Float[Array, "time d d"],
    biases: Float[Array, "time d"],
    covariances: Float[Array, "time d d"],
) -> tuple[Float[Array, "time d"], Float[Array, "time d d"]]:
    """Compute the result of `affine_suffix_scan` by a sequential loop."""

    def back(state: tuple[Array, Array], row: tuple[Array, Array, Array]):
        (mean, spread), (weight, bias, covariance) = state, row
        spread = linalg.matmul(linalg.matmul(weight, spread), weight.T) + covariance
        state = (linalg.matvec(weight, mean) + bias, spread)
        return state, state

    start = (jnp.zeros_like(biases[0]), jnp.zeros_like(covariances[0]))
    return lax.scan(back, start, (weights, biases, covariances), reverse=True)[1]


class Reading(NamedTuple):
    """The conditional law and the likelihood terms of an observation of a state of law N(m, P).

    The observation has design H. S = H P Hᵀ + I is the covariance of the innovation v = y − H m,
    and K = P Hᵀ S⁻¹ is the gain.

    Attributes:
        law: the conditional law.
        slope: Hᵀ S⁻¹ v.
        curvature: Hᵀ S⁻¹ H.
        carry: I − K H.
        gain: K.
        residual: S⁻¹ v, which equals y − H m at the conditional mean.
    """

    law: Factored
    slope: Float[Array, "*time state"]
    curvature: Float[Array, "*time state state"]
    carry: Float[Array, "*time state state"]
    gain: Float[Array, "*time state whitened"]
    residual: Float[Array, "*time whitened"]


def read(
    law: Factored, design: Float[Array, "whitened state"], value: Float[Array, "whitened"]
) -> Reading:
    """Condition a law on an observation, and return the conditional law and likelihood terms.

    Identity matrices for the state and for the observation are updated together with the mean by
    the scalar updates. All results are sums of squares or differences of innovations. The textbook
    formulas subtract covariances, or subtract fitted values from observations.
    """
    d, dtype = law.dim, law.columns.dtype
    p = value.shape[0]
    columns = jnp.concatenate(
        [law.columns, jnp.eye(d, dtype=dtype), jnp.zeros((d, p), dtype)], axis=1
    )
    offsets = jnp.concatenate(
        [value[:, None], jnp.zeros((p, d), dtype), jnp.eye(p, dtype=dtype)], axis=1
    )
    columns, diagonal, rows, variances = condition_columns(columns, law.diagonal, design, offsets)
    # Decorrelating the innovations transforms v, H and I to these rows, divided by the variances.
    gains, designs, roots = -rows[:, d], rows[:, d + 1 : 2 * d + 1], -rows[:, 2 * d + 1 :]
    weighted = designs * variances[:, None]
    return Reading(
        Factored(columns[:, : d + 1], diagonal),
        linalg.matvec(weighted.T, gains),
        linalg.matmul(weighted.T, designs),
        columns[:, d + 1 : 2 * d + 1],
        columns[:, 2 * d + 1 :],
        linalg.matvec((roots * variances[:, None]).T, gains),
    )


def backward_kernels(
    filtered: Filtered,
    transition: Transition,
    reduced: Whitened,
    exists: Bool[Array, "time"] | None,
    *,
    parallel: Parallel = False,
) -> tuple[LinearGaussianKernel, StandardKernel]:
    """Return all backward kernels, between states and between their standard coordinates.

    The kernels do not depend on each other. By default they are computed in chunks that fit into
    the cache of a CPU; with `parallel`, all at once.
    """
    laws, predicted, directions = filtered
    fixed, varying = _split(transition)
    design_varies = reduced.design.ndim == 3
    tolerance = narrowest(laws.columns.dtype)

    def kernel(row: tuple) -> tuple[tuple, StandardKernel]:
        before, after, moving, predicted, directions, design, value = row
        arrays = _join(fixed, moving)
        design = design if design_varies else reduced.design
        resolved = predict(before, *arrays, tolerance=tolerance)
        between_states = reverse_rows(before, *resolved)
        if directions is None:
            return between_states, reverse_standardised(*resolved, design, value, after)
        return between_states, reverse_standardised(predicted, directions, design, value)

    rows = (
        jax.tree.map(lambda leaf: leaf[:-1], laws),
        jax.tree.map(lambda leaf: leaf[1:], laws),
        varying,
        predicted,
        directions,
        reduced.design[1:] if design_varies else None,
        reduced.value[1:],
    )
    kernels, standard = jax.vmap(kernel)(rows) if parallel else in_parts(kernel, rows, CHUNK)
    if exists is not None:
        eye = jnp.eye(laws.dim, dtype=laws.columns.dtype)
        identity_kernel = (eye, jnp.zeros_like(eye[0]), jnp.zeros_like(eye))
        kernels, standard = jax.tree.map(
            lambda leaf, identity: jnp.where(
                exists[1:].reshape(-1, *[1] * (leaf.ndim - 1)), leaf, identity
            ),
            (kernels, standard),
            (identity_kernel, StandardKernel(*identity_kernel)),
        )
    return jax.vmap(LinearGaussianKernel)(*kernels), standard


CHUNK = 32
"""The number of backward kernels per chunk."""

_RANKS = (2, 1, 2)
"""The ranks of a transition's weight, bias and scale at one time."""


def _split(transition: Transition) -> tuple[tuple, tuple]:
    """Split into arrays that are constant in time and arrays that vary; `None` elsewhere."""
    varies = [leaf.ndim > rank for leaf, rank in zip(transition, _RANKS, strict=True)]
    fixed = tuple(None if v else leaf for v, leaf in zip(varies, transition, strict=True))
    varying = tuple(leaf if v else None for v, leaf in zip(varies, transition, strict=True))
    return fixed, varying


def _join(fixed: tuple, moving: tuple) -> tuple[Array, Array, Array]:
    weight, bias, scale = (m if f is None else f for f, m in zip(fixed, moving, strict=True))
    return weight, bias, scale


def over_time(transition: Transition, steps: int) -> Transition:
    """Return the transition with a time axis on each of its arrays."""
    return Transition(
        *(
            repeat_over_time(leaf, rank + 1, steps)
            for leaf, rank in zip(transition, _RANKS, strict=True)
        )
    )


def repeat_over_time(array: Array, rank: int, count: int) -> Array:
    """Return the array if it has this rank, else `count` copies of it along a new first axis."""
    return array if array.ndim == rank else jnp.broadcast_to(array, (count, *array.shape))


def _reduce(bar: Array, leaf: Array) -> Array:
    """Sum a derivative over time if its primal `leaf` is constant in time."""
    return bar if bar.ndim == leaf.ndim else jnp.sum(bar, axis=0)
