"""Expectation-maximisation (EM) with a closed-form M-step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._chains import LinearGaussianChain
from retrodict._exact import check_linear_gaussian, smooth_series
from retrodict._families import AbstractFamily, AbstractLinearGaussianFamily, infer_series
from retrodict._learning.dataset import Minibatch, batch_for
from retrodict._learning.fit import fit
from retrodict._learning.options import Optimisation
from retrodict._model import (
    AbstractParameter,
    Diagonal,
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    dense_scale,
    scale_solve,
    unwrap,
)
from retrodict._numerics import linalg

MAX_GROWTH = 1.01
"""The growth per iteration of the signal-to-noise ratio at which exact EM has not converged."""


class EMResult(eqx.Module):
    """The result of `em`.

    Attributes:
        model: the model after the last M-step.
        family: the family of the last E-step; `None` if it was exact.
        history: the log-evidence of all series before each M-step, or its lower bound by the
            family, in nats per time step.
        status: `"converged"` if the last gain was below the tolerance and the ratio of signal to
            noise did not grow; `"stopped early"` if the noise of the emission reached zero, as on
            constant data, where the evidence has no maximum, or if the evidence decreased, which
            only rounding can cause: the model is then the previous one; else `"finished"`.
    """

    model: StateSpaceModel
    family: AbstractFamily | None
    history: Float[np.ndarray, "iteration"]
    status: str = eqx.field(static=True)


def em(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    *,
    family: AbstractFamily | None = None,
    num_iterations: int = 50,
    steps_per_iteration: int = 500,
    tolerance: float = 1e-7,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> EMResult:
    """Alternate E-steps and closed-form M-steps.

    The E-step is exact for a linear-Gaussian model, and the evidence then never decreases. With a
    family it is variational: the family is fitted for some steps, and its chains replace the
    posterior. The M-step solves the normal equations of every linear-Gaussian part. Other parts,
    and those wrapped in `Frozen`, do not change.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.Frozen(rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=20)
        >>> result = rd.em(jax.random.key(1), model, ys, num_iterations=3)
        >>> bool(result.history[-1] > result.history[0])
        True

    Args:
        key: a typed key.
        model: the model to start from.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
        family: a family with linear-Gaussian chains, for models that are not linear Gaussian.
        num_iterations: the largest number of E-steps and M-steps.
        steps_per_iteration: the number of steps of the family per E-step.
        tolerance: the gain in nats per time step below which exact EM stops. It goes on while the
            ratio of signal to noise grows by more than 1% per iteration: from a start in other
            units than the data the ratio becomes nearly zero at first, where the gain vanishes
            without a maximum.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.
    """
    check_key(key, "em")
    num_iterations = check_count(num_iterations, "num_iterations")
    if family is None:
        check_linear_gaussian(unwrap(model), "em")
    elif not isinstance(family, AbstractLinearGaussianFamily):
        raise TypeError(
            "em expects a family with linear-Gaussian chains, whose moments the M-step uses, got"
            f" {type(family).__name__}. Use fit(..., learn='both'), or GatedFamily."
        )
    batch = batch_for(unwrap(model), ys, mask=mask, inputs=inputs, length=length, learner="em")
    rows, history, status = int(Minibatch.on_devices(batch).num_rows()), [], "finished"
    before = model
    for iteration in range(num_iterations):
        if family is None:
            exact = _posteriors(unwrap(model), batch)
            chains = exact.chain
            history.append(float(jnp.sum(exact.log_evidence)) / rows)
            gain = history[-1] - history[-2] if iteration else tolerance
            decreased = not gain >= -max(tolerance, 1e-6 * abs(history[-1]))
            if decreased or (gain < tolerance and not _signal_grows(before, model)):
                status = "stopped early" if decreased else "converged"
                model = before if decreased else model
                break
        else:
            result = fit(
                jax.random.fold_in(key, iteration),
                family,
                model,
                ys,
                mask=mask,
                inputs=inputs,
                length=length,
                num_steps=steps_per_iteration,
                optimisation=Optimisation(prepare=iteration == 0),
                progress=False,
            )
            family = result.family
            history.append(float(np.max(result.held_out)))
            chains = _chains(unwrap(family), batch)
        before, model = model, maximise(model, chains, batch)
        if not _has_density(model.emission):
            model, status = before, "stopped early"
            break
    return EMResult(model, family, np.asarray(history), status)


@eqx.filter_jit
def _posteriors(model: StateSpaceModel, batch: Series) -> Any:
    return jax.vmap(lambda series: smooth_series(model, series, False))(batch)


@eqx.filter_jit
def _chains(family: Any, batch: Series) -> LinearGaussianChain:
    return jax.vmap(lambda series: infer_series(family, series))(batch)


def _has_density(emission: Any) -> bool:
    """Return whether an emission is not linear Gaussian, or has noise in all directions."""
    if not isinstance(emission, LinearGaussianKernel):
        return True
    scales = jnp.diagonal(dense_scale(unwrap(emission).scale_tril))
    return bool(jnp.all((scales != 0) & jnp.isfinite(scales)))


def _signal_grows(before: StateSpaceModel, after: StateSpaceModel) -> bool:
    """Return whether an iteration increased the ratio of signal to noise noticeably.

    A model whose observations do not depend on the state is a stationary point of EM, though
    rarely a maximum. Near it the ratio grows by a factor per iteration, and the evidence by the
    square of the ratio, which may be less than its rounding error.
    """
    kernels = unwrap(before.emission), unwrap(after.emission)
    if not all(isinstance(kernel, LinearGaussianKernel) for kernel in kernels):
        return False
    old, new = (jnp.linalg.norm(scale_solve(each.scale_tril, each.weight)) for each in kernels)
    return bool(new > MAX_GROWTH * old)


def maximise(model: StateSpaceModel, chains: LinearGaussianChain, batch: Series) -> StateSpaceModel:
    """Return the model that maximises E_q[log p(x, y)] over its linear-Gaussian parts.

    Args:
        model: the current model; parts without a closed form or without data are unchanged.
        chains: the posteriors of the series, with a leading axis `batch`.
        batch: the series themselves.
    """
    prior, transition, emission = model.prior, model.transition, model.emission
    for name, part in (("transition", transition), ("emission", emission)):
        if isinstance(part, AbstractParameter) and not isinstance(part, Frozen):
            raise ValueError(
                f"The {name} is a {type(part).__name__}, for which the M-step has no closed form."
                " Learn the model with fit or fit_evidence."
            )
    if isinstance(prior, Gaussian) and not is_frozen(prior, "prior"):
        prior = _new_prior(prior, chains)
    has_pairs, has_rows = _has_data(batch)
    learns_transition = isinstance(transition, LinearGaussianKernel) and has_pairs
    if learns_transition and not is_frozen(transition, "transition"):
        transition = _new_transition(transition, chains, batch)
    learns_emission = isinstance(emission, LinearGaussianKernel) and has_rows
    if learns_emission and not is_frozen(emission, "emission"):
        refuse_partly_missing_rows(batch)
        emission = _new_emission(emission, chains, batch)
    return StateSpaceModel(prior, transition, emission).learnable()


def _has_data(batch: Series) -> tuple[bool, bool]:
    """Return whether a series has two rows or more, and whether a row was observed."""
    longest = batch.ys.shape[1] if batch.length is None else int(jnp.max(batch.length))
    return longest > 1, batch.mask is None or bool(jnp.any(batch.mask))


def is_frozen(part: Any, name: str) -> bool:
    """Return whether all of a part is frozen; raise if only some of it is."""
    leaves = jax.tree.leaves(part, is_leaf=lambda leaf: isinstance(leaf, Frozen))
    frozen = [isinstance(leaf, Frozen) for leaf in leaves]
    if any(frozen) and not all(frozen):
        raise ValueError(
            f"The {name} is frozen in part, for which the M-step has no closed form. Freeze all of"
            " it or none, or learn the model with fit or fit_evidence."
        )
    return bool(frozen) and all(frozen)


@eqx.filter_jit
def _new_prior(prior: Gaussian, chains: LinearGaussianChain) -> Gaussian:
    first = jax.vmap(lambda chain: jax.tree.map(lambda leaf: leaf[0], chain.marginals()))(chains)
    mean = jnp.mean(first.mean, axis=0)
    shifts = first.mean - mean[None]
    covariance = jnp.mean(first.covariance, axis=0)
    covariance = covariance + linalg.matmul(shifts.T, shifts) / shifts.shape[0]
    return Gaussian(mean, scale_like(prior.scale_tril, covariance))


@eqx.filter_jit
def _new_transition(
    kernel: LinearGaussianKernel, chains: LinearGaussianChain, batch: Series
) -> LinearGaussianKernel:
    """Regress x_k on (x_{k-1}, u_k, 1) under the pair laws of the chains."""

    def one(chain: LinearGaussianChain, series: Series) -> tuple[Array, Array, Array]:
        pairs, exists = chain.pairwise(), series.exists()
        inputs = None if series.inputs is None else series.inputs[1:]
        means, spreads = beside_inputs(kernel, pairs.mean, pairs.covariance, inputs)
        ones = jnp.ones(means.shape[0], means.dtype)
        return means, spreads, ones if exists is None else exists[1:].astype(means.dtype)

    return regression(kernel, *jax.vmap(one)(chains, batch))


@eqx.filter_jit
def _new_emission(
    kernel: LinearGaussianKernel, chains: LinearGaussianChain, batch: Series
) -> LinearGaussianKernel:
    """Regress y_k on (x_k, u_k, 1) under the marginal laws, over the observed rows."""

    def one(chain: LinearGaussianChain, series: Series) -> tuple[Array, Array, Array]:
        laws, known = chain.marginals(), series.ys.shape[1]
        means = jnp.concatenate([laws.mean, series.ys], axis=1)
        spreads = jnp.pad(laws.covariance, ((0, 0), (0, known), (0, known)))
        means, spreads = beside_inputs(kernel, means, spreads, series.inputs)
        ones = jnp.ones(means.shape[0], means.dtype)
        mask = series.mask
        return means, spreads, ones if mask is None else jnp.all(mask, axis=1).astype(means.dtype)

    return regression(kernel, *jax.vmap(one)(chains, batch))


def refuse_partly_missing_rows(batch: Series) -> None:
    """Refuse rows of which some entries are observed and some are not."""
    if batch.mask is None:
        return
    all_or_nothing = np.asarray(jnp.all(batch.mask, axis=-1) | ~jnp.any(batch.mask, axis=-1))
    if not all_or_nothing.all():
        raise ValueError(
            "The M-step of an emission with partly missing rows has no closed form. Learn the"
            " model with fit or fit_evidence, or wrap the emission's arrays in Frozen."
        )


def beside_inputs(
    kernel: LinearGaussianKernel,
    means: Float[Array, "row size"],
    covariances: Float[Array, "row size size"],
    inputs: Float[Array, "row input"] | None,
) -> tuple[Float[Array, "row larger"], Float[Array, "row larger larger"]]:
    """Return the moments of (x, u, response) from those of (x, response), if u is a regressor."""
    if kernel.input_weight is None or inputs is None:
        return means, covariances
    d, count = unwrap(kernel).weight.shape[1], inputs.shape[1]
    random = np.delete(np.arange(means.shape[1] + count), np.arange(d, d + count))
    means = jnp.concatenate([means[:, :d], inputs, means[:, d:]], axis=1)
    spreads = jnp.zeros((*means.shape, means.shape[1]), means.dtype)
    return means, spreads.at[:, random[:, None], random[None, :]].set(covariances)


def regression(
    kernel: LinearGaussianKernel,
    means: Float[Array, "batch row size"],
    spreads: Float[Array, "batch row size size"],
    weights: Float[Array, "batch row"],
) -> LinearGaussianKernel:
    """Compute least squares of the last entries of each row on those before and a constant.

    Moments are taken about the mean of all rows. About zero, an offset that is large compared with
    the spread of the data would leave only rounding errors of the spread.
    """
    out, state_dim = unwrap(kernel).weight.shape
    split = means.shape[-1] - out
    weights = weights / jnp.sum(weights)
    centre = jnp.sum(means * weights[..., None], axis=(0, 1))
    shifts = jnp.where(weights[..., None] > 0, means - centre[None, None], 0.0)
    # A constant regressor is dropped: its deviations from the mean are rounding errors.
    tiny = 10 * jnp.finfo(means.dtype).eps * jnp.abs(centre)
    moves = jnp.max(jnp.abs(shifts), axis=(0, 1)) > tiny
    shifts = jnp.where(moves[None, None], shifts, 0.0)
    moments = jnp.einsum("bk,bki,bkj->ij", weights, shifts, shifts, precision="highest")
    moments = moments + jnp.sum(spreads * weights[..., None, None], axis=(0, 1))
    cross, gram = moments[split:, :split], moments[:split, :split]
    coefficients = _solve_semidefinite(gram, cross.T).T
    contrast = jnp.concatenate([-coefficients, jnp.eye(out, dtype=moments.dtype)], axis=1)
    covariance = linalg.matmul(linalg.matmul(contrast, moments), contrast.T)
    return LinearGaussianKernel(
        coefficients[:, :state_dim],
        linalg.matvec(contrast, centre),
        scale_like(kernel.scale_tril, 0.5 * (covariance + covariance.T)),
        coefficients[:, state_dim:] if kernel.input_weight is not None else None,
    )


def scale_like(scale: Any, covariance: Float[Array, "d d"]) -> Any:
    """Return a dense factor, or standard deviations if the scale was diagonal."""
    if isinstance(scale, Diagonal):
        return Diagonal(jnp.sqrt(jnp.diagonal(covariance)))
    return linalg.semidefinite_cholesky(covariance)


def _solve_semidefinite(
    gram: Float[Array, "k k"], right: Float[Array, "k out"]
) -> Float[Array, "k out"]:
    """Solve `gram` x = `right`, with the shortest x if regressors are linearly dependent.

    States that stay on a line or a plane are such regressors. The coefficients off it cannot be
    learned and have no effect.
    """
    inverse_std = linalg.safe_reciprocal(linalg.safe_sqrt(jnp.diagonal(gram)))
    scaled = gram * inverse_std[:, None] * inverse_std[None, :]
    shortest = linalg.matmul(jnp.linalg.pinv(scaled, hermitian=True), inverse_std[:, None] * right)
    return inverse_std[:, None] * shortest
