"""Prefix sums under an associative operator, with short compilation times.

`jax.lax.associative_scan` traces its operator 2 log₂ n times. The operators of this library contain
a few small factorisations each, so that compilation becomes slow. Here the operator is traced three
times, for any n.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._numerics import linalg
from retrodict.distributed import Parallel, appended, mesh_of, prepended, scan_over_devices

T = TypeVar("T")

BLOCK = 16
"""The number of elements per block: each block is summed sequentially, all blocks in parallel."""

SETTLED_ROWS = 1024
"""The number of rows after which gains of a model that is constant in time are compared."""


def prefix_scan(
    combine: Callable[[T, T], T],
    elements: T,
    neutral: T,
    *,
    reverse: bool = False,
    parallel: Parallel = True,
) -> T:
    """Compute all prefix sums e_0 ∘ … ∘ e_k of an associative operator.

    There are three stages:

    1. Sum each block of `BLOCK` elements sequentially, all blocks in parallel.
    2. Compute prefix sums of the block totals by doubling (distances 1, 2, 4, …).
    3. Combine each block with the sum of the blocks before it, all blocks in parallel.

    The operator is applied about 3n times, in BLOCK + log₂(n/BLOCK) + 1 rounds.

    Args:
        combine: the operator on two single elements; the earlier element is the first argument.
        elements: a pytree of arrays with a leading axis.
        neutral: the neutral element of the operator, without the leading axis.
        reverse: whether to sum from the end; the later element is then the first argument of
            `combine`.
        parallel: a mesh to distribute the scan over several devices; `True` for one device.

    Returns:
        The prefix sums, with the shapes of `elements`.
    """
    mesh = mesh_of(parallel)
    if mesh is not None:
        return scan_over_devices(prefix_scan, combine, elements, neutral, mesh, reverse=reverse)
    n = jax.tree.leaves(elements)[0].shape[0]
    block = min(BLOCK, n)
    blocks = -(-n // block)
    combine_all = jax.vmap(combine)

    def spread(count: int) -> T:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), neutral)

    def flip(tree: T) -> T:
        return jax.tree.map(lambda leaf: leaf[::-1], tree) if reverse else tree

    padded = jax.tree.map(
        lambda leaf, fill: jnp.swapaxes(
            jnp.concatenate([leaf, fill]).reshape(blocks, block, *leaf.shape[1:]), 0, 1
        ),
        flip(elements),
        spread(blocks * block - n),
    )

    def add(total: T, element: T) -> tuple[T, T]:
        total = combine_all(total, element)
        return total, total

    totals, within = lax.scan(add, spread(blocks), padded)

    def double(sums: T, distance: jax.Array) -> tuple[T, None]:
        earlier = jax.tree.map(
            lambda leaf, fill: lax.dynamic_slice_in_dim(
                jnp.concatenate([fill, leaf]), blocks - distance, blocks
            ),
            sums,
            spread(blocks),
        )
        return combine_all(earlier, sums), None

    levels = max(blocks - 1, 0).bit_length()
    sums, _ = lax.scan(double, totals, 2 ** jnp.arange(levels))
    before = jax.tree.map(
        lambda leaf, fill: jnp.concatenate([fill[None], leaf[:-1]]), sums, neutral
    )
    result = jax.vmap(combine_all, in_axes=(None, 0))(before, within)
    return flip(
        jax.tree.map(
            lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(blocks * block, *leaf.shape[2:])[:n],
            result,
        )
    )


def affine_suffix_scan(
    weights: Float[Array, "time d d"],
    biases: Float[Array, "time d"],
    covariances: Float[Array, "time d d"],
    parallel: Parallel = True,
    *,
    reverse: bool = True,
) -> tuple[Float[Array, "time d"], Float[Array, "time d d"]]:
    """Solve m_k = w_k m_{k+1} + b_k and P_k = w_k P_{k+1} w_kᵀ + c_k from m_n = 0, P_n = 0.

    A prefix scan composes the affine maps, so that all times are computed in O(log n) rounds.
    Without `reverse` the recursion starts at the first row, with k − 1 in place of k + 1.
    """

    def compose(first: tuple, second: tuple) -> tuple:
        (weight_1, bias_1, covariance_1), (weight_2, bias_2, covariance_2) = first, second
        spread = linalg.matmul(linalg.matmul(weight_2, covariance_1), weight_2.T)
        return (
            linalg.matmul(weight_2, weight_1),
            linalg.matvec(weight_2, bias_1) + bias_2,
            spread + covariance_2,
        )

    eye = jnp.eye(biases.shape[1], dtype=biases.dtype)
    neutral = (eye, jnp.zeros_like(biases[0]), jnp.zeros_like(eye))
    elements = (weights, biases, covariances)
    _, means, spreads = prefix_scan(compose, elements, neutral, reverse=reverse, parallel=parallel)
    return means, spreads


def affine_moments(
    weights: Float[Array, "steps d d"],
    noise: tuple[Float[Array, "steps d"], Float[Array, "steps d d"]],
    last: tuple[Float[Array, "d"], Float[Array, "d d"]],
    parallel: Parallel,
) -> tuple[Float[Array, "time d"], Float[Array, "time d d"]]:
    """Solve m_k = w_k m_{k+1} + b_k and P_k = w_k P_{k+1} w_kᵀ + c_k from the moments of row n-1.

    The derivative, in reverse mode, is a recursion of the same kind that runs forward. With μ_k and
    Λ_k the cotangents of b_k and c_k, and g_k and h_k those of the results m_k and P_k,

        μ_k = g_k + w_{k-1}ᵀ μ_{k-1},    Λ_k = h_k + w_{k-1}ᵀ Λ_{k-1} w_{k-1},

    and the cotangent of w_k is μ_k m_{k+1}ᵀ + (Λ_k + Λ_kᵀ) w_k P_{k+1}. Nothing but the results is
    stored, and nothing is added up inside of a loop.

    Args:
        weights: w_k, for k = 0..n-2.
        noise: b_k and the symmetric c_k.
        last: m_{n-1} and the symmetric P_{n-1}.
        parallel: whether to compose the maps by an associative scan.

    Returns:
        The moments of all n rows.
    """
    return _affine_moments(weights, noise, last, parallel)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _affine_moments(weights: Array, noise: tuple, last: tuple, parallel: Parallel) -> Any:
    return _moments(weights, noise, last, parallel, reverse=True)


def _moments(
    weights: Array, noise: tuple, start: tuple, parallel: Parallel, *, reverse: bool
) -> tuple[Array, Array]:
    """Solve the recursion of `affine_moments` from either end, and return all rows."""

    def join(start: tuple, rest: tuple) -> tuple:
        return appended(rest, start, parallel) if reverse else prepended(start, rest, parallel)

    if parallel:
        # The start is the image of a constant map.
        zero = jnp.zeros(weights.shape[1:], weights.dtype)
        gains, *added = join((zero, *start), (weights, *noise))
        return affine_suffix_scan(gains, added[0], added[1], parallel, reverse=reverse)

    def move(law: tuple[Array, Array], row: tuple) -> tuple[tuple, tuple]:
        (mean, covariance), (weight, (bias, spread)) = law, row
        # The fence makes the transpose a separate copy: a copy and a plain product are faster than
        # a product that transposes its operand.
        moved = linalg.matmul(linalg.matmul(weight, covariance), linalg.fence(weight.T))
        law = (linalg.matvec(weight, mean) + bias, moved + spread)
        return law, law

    return join(start, lax.scan(move, start, (weights, noise), reverse=reverse)[1])


def _moments_forward(
    weights: Array, noise: tuple, last: tuple, parallel: Parallel
) -> tuple[tuple[Array, Array], tuple]:
    moments = _moments(weights, noise, last, parallel, reverse=True)
    return moments, (weights, *moments)


def _moments_backward(
    parallel: Parallel, residuals: tuple, cotangents: tuple[Array, Array]
) -> tuple[Array, tuple, tuple]:
    weights, means, covariances = residuals
    first = jax.tree.map(lambda leaf: leaf[0], cotangents)
    later = jax.tree.map(lambda leaf: leaf[1:], cotangents)
    adjoints = _moments(jnp.swapaxes(weights, 1, 2), later, first, parallel, reverse=False)
    of_bias, of_covariance = of_noise = jax.tree.map(lambda leaf: leaf[:-1], adjoints)
    product = jax.vmap(linalg.matmul)
    both = of_covariance + jnp.swapaxes(of_covariance, 1, 2)
    of_weights = product(both, product(weights, covariances[1:]))
    of_weights = of_weights + of_bias[:, :, None] * means[1:, None, :]
    return of_weights, of_noise, jax.tree.map(lambda leaf: leaf[-1], adjoints)


_affine_moments.defvjp(_moments_forward, _moments_backward)


def affine_scan(
    weights: Float[Array, "time d d"],
    biases: Float[Array, "time d"],
    start: Float[Array, "d"],
    *,
    reverse: bool = False,
    parallel: Parallel = False,
) -> Float[Array, "time d"]:
    """Solve x_k = w_k x_{k-1} + b_k from x_{-1} = start, or from the end if `reverse`."""
    if not parallel:

        def step(x: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
            x = linalg.matvec(row[0], x) + row[1]
            return x, x

        # XLA compiles a loop of so small a step as one kernel, which unrolling would prevent.
        return lax.scan(step, start, (weights, biases), reverse=reverse)[1]

    count = biases.shape[0]
    compose_all = partial(_compose_affine_maps, reverse=reverse, parallel=parallel)
    if mesh_of(parallel) is not None or count < 2 * SETTLED_ROWS:
        return compose_all(weights, biases, start)

    def after_settling() -> Array:
        weight, k = weights[-1], SETTLED_ROWS
        if reverse:
            later = _powers_scan(weight, biases[k:][::-1], start)[::-1]
            return jnp.concatenate([compose_all(weights[:k], biases[:k], later[0]), later])
        early = compose_all(weights[:k], biases[:k], start)
        return jnp.concatenate([early, _powers_scan(weight, biases[k:], early[-1])])

    return lax.cond(
        has_settled(weights), after_settling, lambda: compose_all(weights, biases, start)
    )


def has_settled(array: Float[Array, "time ..."]) -> Bool[Array, ""]:
    """Return whether the rows from `SETTLED_ROWS` on are equal."""
    return jnp.all(array[SETTLED_ROWS:] == array[-1:])


def repeated_last(array: Float[Array, "time ..."], count: int) -> Float[Array, "more_time ..."]:
    """Return an array with its last row repeated `count` more times."""
    return jnp.concatenate([array, jnp.broadcast_to(array[-1], (count, *array.shape[1:]))])


def _compose_affine_maps(
    weights: Float[Array, "time d d"],
    biases: Float[Array, "time d"],
    start: Float[Array, "d"],
    *,
    reverse: bool,
    parallel: Parallel,
) -> Float[Array, "time d"]:
    def compose(first: tuple, second: tuple) -> tuple:
        (weight_1, bias_1), (weight_2, bias_2) = first, second
        return linalg.matmul(weight_2, weight_1), linalg.matvec(weight_2, bias_1) + bias_2

    neutral = (jnp.eye(start.shape[0], dtype=start.dtype), jnp.zeros_like(start))
    products, sums = prefix_scan(
        compose, (weights, biases), neutral, reverse=reverse, parallel=parallel
    )
    return jax.vmap(linalg.matvec, in_axes=(0, None))(products, start) + sums


def _powers_scan(
    weight: Float[Array, "d d"], biases: Float[Array, "time d"], start: Float[Array, "d"]
) -> Float[Array, "time d"]:
    """Solve x_k = w x_{k-1} + b_k in O(log n) rounds, as in `prefix_scan` with powers of one w."""
    count, d = biases.shape
    num_blocks = -(-count // BLOCK)
    apply = jax.vmap(linalg.matvec, in_axes=(None, 0))
    biases = biases.at[0].add(linalg.matvec(weight, start))
    padding = jnp.zeros((num_blocks * BLOCK - count, d), biases.dtype)
    blocks = jnp.concatenate([biases, padding]).reshape(num_blocks, BLOCK, d)

    def add(state: tuple[Array, Array], bias: Array) -> tuple[tuple, tuple]:
        total, power = state
        state = apply(weight, total) + bias, linalg.matmul(weight, power)
        return state, state

    first = (jnp.zeros_like(blocks[:, 0]), jnp.eye(d, dtype=biases.dtype))
    (totals, power), (within, powers) = lax.scan(add, first, jnp.swapaxes(blocks, 0, 1))

    def double(state: tuple[Array, Array], distance: Array) -> tuple[tuple, None]:
        sums, power = state
        padded = jnp.concatenate([jnp.zeros_like(sums), sums])
        earlier = lax.dynamic_slice_in_dim(padded, num_blocks - distance, num_blocks)
        return (sums + apply(power, earlier), linalg.matmul(power, power)), None

    levels = max(num_blocks - 1, 0).bit_length()
    (sums, _), _ = lax.scan(double, (totals, power), 2 ** jnp.arange(levels))
    before = jnp.concatenate([jnp.zeros_like(sums[:1]), sums[:-1]])
    result = within + jax.vmap(apply, in_axes=(0, None))(powers, before)
    return jnp.swapaxes(result, 0, 1).reshape(-1, d)[:count]


def affine_suffix_paths(
    weights: Float[Array, "time d d"],
    biases: Float[Array, "time d sample"],
    parallel: Parallel = True,
) -> Float[Array, "time d sample"]:
    """Solve x_k = w_k x_{k+1} + b_k from x_n = 0 for many b at once, in O(log n) rounds."""

    def compose(later: tuple, earlier: tuple) -> tuple:
        (weight_1, bias_1), (weight_2, bias_2) = later, earlier
        return linalg.matmul(weight_2, weight_1), linalg.matmul(weight_2, bias_1) + bias_2

    neutral = (jnp.eye(weights.shape[1], dtype=weights.dtype), jnp.zeros_like(biases[0]))
    return prefix_scan(compose, (weights, biases), neutral, reverse=True, parallel=parallel)[1]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear_recurrence(
    decays: Float[Array, "time units"],
    drives: Float[Array, "time units"],
    parallel: Parallel = True,
) -> Float[Array, "time units"]:
    """Solve h_k = a_k h_{k-1} + b_k from h_{-1} = 0 for each unit, in O(log n) rounds.

    Only reverse-mode differentiation is supported. The derivative is a recurrence of the same kind
    that runs backward. With g_k the cotangent of h_k, the cotangent of b_k is
    λ_k = g_k + a_{k+1} λ_{k+1}, and the cotangent of a_k is λ_k h_{k-1}.
    """
    return _recur(decays, drives, parallel, reverse=False)


def _recur(decays: Array, drives: Array, parallel: Parallel, *, reverse: bool) -> Array:
    def compose(first: tuple, second: tuple) -> tuple:
        return first[0] * second[0], second[0] * first[1] + second[1]

    neutral = (jnp.ones_like(decays[0]), jnp.zeros_like(drives[0]))
    return prefix_scan(compose, (decays, drives), neutral, reverse=reverse, parallel=parallel)[1]


def _recurrence_forward(decays: Array, drives: Array, parallel: Parallel) -> tuple[Array, tuple]:
    states = _recur(decays, drives, parallel, reverse=False)
    return states, (decays, states)


def _recurrence_backward(
    parallel: Parallel, residuals: tuple, cotangents: Array
) -> tuple[Array, Array]:
    decays, states = residuals
    onward = appended(decays[1:], jnp.zeros_like(decays[0]), parallel)
    adjoints = _recur(onward, cotangents, parallel, reverse=True)
    before = prepended(jnp.zeros_like(states[0]), states[:-1], parallel)
    return adjoints * before, adjoints


linear_recurrence.defvjp(_recurrence_forward, _recurrence_backward)
