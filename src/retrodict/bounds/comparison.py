"""A chain and a posterior to compare: checked arguments, and quantities that methods share."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import Scalar, check_count, check_key, is_concrete
from retrodict._chains import LinearGaussianChain
from retrodict._exact import GridPosterior, increments, kalman_smoother
from retrodict._expectations import (
    AbstractFunctional,
    BackwardSampling,
    LogJoint,
    Score,
    Variation,
    elbo,
)
from retrodict._model import (
    AbstractLinearGaussianKernel,
    Series,
    StateSpaceModel,
    dense_scale,
    is_linear_gaussian,
    prepare_rows,
)
from retrodict.bounds import grid_bounds, wasserstein
from retrodict.bounds.functional_classes import AnyBounded, AnyLipschitz, variation_of
from retrodict.bounds.lipschitz import Sensitivity
from retrodict.particles import ParticlePosterior

MISFIT = 1e-6
"""The largest mass of a law that a grid may miss."""

DEVIATIONS = 3.0
"""The number of standard errors added to a Monte Carlo mean."""

CONFIDENCE = 0.5 * math.erfc(-DEVIATIONS / math.sqrt(2))
"""The nominal confidence of a mean plus `DEVIATIONS` standard errors, if the mean is normal."""

SAMPLING_WORDS = (
    "a mean over {count} sampled paths plus {deviations:g} standard errors, which is not a"
    " certificate: the nominal confidence is {confidence:.2%} if the mean is close to normal, and"
    " an event that occurs in no path is not counted"
)


class Declined(Exception):
    """A method that does not apply, with the reason."""


def require(condition: Any, reason: str) -> None:
    """Decline the present method with a reason unless a condition holds."""
    if not condition:
        raise Declined(reason)


Basis: TypeAlias = Literal["closed form", "grid", "samples", "particles"]
"""How a value was computed, the most trustworthy first. Only the first is a certificate."""


class Gap(NamedTuple):
    """The gap between the evidence and the ELBO.

    Attributes:
        value: log p(y) − ELBO.
        error: its standard error.
        rests_on: the assumptions, in words.
        basis: how it was computed.
    """

    value: Scalar
    error: Scalar
    rests_on: str
    basis: Basis


@dataclass(eq=False)
class Comparison:
    """The checked arguments of `error_bound`, with shared quantities computed at most once."""

    model: StateSpaceModel
    chain: Any
    series: Series
    functional: Any
    data: PyTree
    reference: GridPosterior | ParticlePosterior | None
    key: Any
    num_samples: int
    window: int

    def __post_init__(self) -> None:
        _check_types(self.functional, self.reference)
        if self.key is not None:
            check_key(self.key, "error_bound")
        if check_count(self.num_samples, "num_samples") < 2:
            raise ValueError(
                "`num_samples` must be 2 or more for a standard error of paths, got"
                f" {self.num_samples}."
            )
        self.window = check_count(self.window, "window")
        if not is_concrete(self.series.ys):
            raise ValueError("error_bound compares values: call it outside of jit and vmap.")
        self._remove_padding()

    def _remove_padding(self) -> None:
        series, chain = self.series, self.chain
        n = series.num_times if series.length is None else int(series.length)
        if n < 2:
            raise ValueError(f"error_bound expects a series of two rows or more, got {n}.")
        if isinstance(self.functional, (LogJoint, Score)) and self.data is None:
            self.data = series.rows
        rows, self.data = jax.tree.map(
            lambda leaf: jnp.asarray(leaf)[:n],
            (series.rows, prepare_rows(self.data, series.num_times)),
        )
        self.series, self.chain = rows, chain.prefix(n)
        if isinstance(chain, LinearGaussianChain):
            self.chain = LinearGaussianChain(self.chain.laws, self.chain.kernels)
            # The data may be in single precision and the chain in double, or vice versa.
            dtype = jnp.result_type(rows.ys, chain.laws.mean)
            self.series = eqx.tree_at(lambda series: series.ys, rows, rows.ys.astype(dtype))
        self.reference = _without_padding(self.reference, self.model, self.series)

    def need_grid(self, reason: str) -> GridPosterior:
        """Return the reference if it is a grid; decline for this reason otherwise."""
        if not isinstance(self.reference, GridPosterior):
            raise Declined(reason)
        return self.reference

    def draw_key(self, stream: int, reason: str) -> Any:
        """Return the key of one of the independent streams; decline if no key was given."""
        require(self.key is not None, reason)
        return jax.random.fold_in(self.key, stream)

    @property
    def num_times(self) -> int:
        """The number of rows of the series."""
        return self.series.num_times

    @property
    def linear_gaussian(self) -> bool:
        """Whether the model is linear Gaussian."""
        return is_linear_gaussian(self.model)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that describe the series to a smoother."""
        return {"mask": self.series.mask, "inputs": self.series.inputs}

    @property
    def sampling_words(self) -> str:
        """The assumptions behind a mean over sampled paths."""
        return SAMPLING_WORDS.format(
            count=self.num_samples, deviations=DEVIATIONS, confidence=CONFIDENCE
        )

    @cached_property
    def variation(self) -> tuple[Variation, Variation]:
        """The declared constants of h_0 and of the later increments."""
        return variation_of(self.functional)

    @property
    def pairs(self) -> bool:
        """Whether an increment declares a constant in the earlier of two states."""
        return self.variation[1].before > 0

    def linear_chain(self) -> LinearGaussianChain:
        """Return the chain if it is linear Gaussian; decline otherwise."""
        if not isinstance(self.chain, LinearGaussianChain):
            raise Declined(f"the chain is {type(self.chain).__name__}, not linear Gaussian")
        return self.chain

    @cached_property
    def exact(self) -> wasserstein.ExactPosterior:
        """The exact posterior of a linear-Gaussian model."""
        require(self.linear_gaussian, "the model is not linear Gaussian")
        singular = _is_singular(self.model.emission, self.series.inputs)
        require(not singular, "the scale of the emission is singular at some time")
        chain = kalman_smoother(self.model, self.series.ys, **self.options).chain
        return wasserstein.exact_posterior(chain)

    def sensitivity(self) -> Sensitivity:
        """Return the Lipschitz constants of the functional in each state."""
        first, later = self.variation
        declared = all(map(math.isfinite, (first.now, later.before, later.now)))
        require(declared, "the functional declares no Lipschitz constant")
        return Sensitivity.of(first, later, self.num_times, self.series.ys.dtype)

    def lipschitz_in_single_states(self) -> Float[Array, "time"]:
        """Return the Lipschitz constants of a functional that is a sum over single states."""
        sensitivity = self.sensitivity()
        require(not self.pairs, "the functional depends on pairs of states")
        return sensitivity.now

    def oscillations(self) -> Float[Array, "time"]:
        """Return the oscillation of each term of the functional."""
        first, later = self.variation
        declared = math.isfinite(first.oscillation + later.oscillation)
        require(declared, "the functional declares no oscillation")
        every = jnp.full(self.num_times, later.oscillation, self.series.ys.dtype)
        return every.at[0].set(first.oscillation)

    def one_functional(self) -> AbstractFunctional:
        """Return the functional; decline a class of functionals."""
        if not isinstance(self.functional, AbstractFunctional):
            raise Declined(f"{type(self.functional).__name__} is a class of functionals")
        return self.functional

    @cached_property
    def paths(self) -> Float[Array, "sample time state"]:
        """Sampled paths of the chain."""
        key = self.draw_key(0, "it draws paths: pass key=jax.random.key(0)")
        return self.chain.sample(key, self.num_samples)

    def refuse_singular(self) -> None:
        """Decline if the chain, the exact posterior or the transition lacks a density."""
        chains = [self.exact.chain] if self.linear_gaussian else []
        chains += [self.chain] if isinstance(self.chain, LinearGaussianChain) else []
        scales = [part.scale_tril for chain in chains for part in (chain.terminal, chain.kernels)]
        later = None if self.series.inputs is None else self.series.inputs[1:]
        singular = any(map(_no_density, scales)) or _is_singular(self.model.transition, later)
        require(
            not singular,
            "a scale of the chain, of the transition or of the exact posterior is singular at some"
            " time",
        )

    @cached_property
    def gap(self) -> Gap:
        """The gap between a known evidence and the ELBO."""
        self.refuse_singular()
        if self.linear_gaussian and isinstance(self.chain, LinearGaussianChain):
            gap = wasserstein.divergence(self.chain, self.exact)
            words = "exact: evidence and ELBO in closed form"
            return Gap(gap, jnp.zeros_like(gap), words, "closed form")
        grid = self.need_grid(
            "the evidence is not known: pass a GridPosterior as reference. A particle estimate of"
            " it has no upper confidence bound"
        )
        key = self.draw_key(1, "the ELBO is taken by sampled paths: pass key=jax.random.key(0)")
        # A quadrature ELBO is not a bound.
        bound, error = elbo(
            self.model,
            self.chain,
            self.series.ys,
            estimator=BackwardSampling(self.num_samples),
            key=key,
            with_standard_error=True,
            **self.options,
        )
        gap = grid.log_evidence - bound
        require(jnp.isfinite(gap) & jnp.isfinite(error), "the ELBO is not finite")
        return Gap(gap, error, f"{grid_words(grid)}; {self.sampling_words}", "samples")

    @cached_property
    def kernel_distances(self) -> tuple[Array, Array]:
        """Mean Wasserstein and total-variation distances of the backward kernels to the grid's."""
        reason = "it needs a GridPosterior in one dimension as reference"
        chain, grid = self.linear_chain(), self.need_grid(reason)
        require(grid.grid.dim == 1, reason)
        moves, variations, misfit = grid_bounds.kernel_distances(chain, grid)
        refuse_misfit(misfit)
        return moves, variations


def _no_density(scales: Float[Array, "*time d d"]) -> bool:
    return bool(jnp.any(jnp.diagonal(scales, axis1=-2, axis2=-1) == 0))


def _is_singular(kernel: Any, inputs: Float[Array, "time input"] | None) -> bool:
    """Return whether a linear-Gaussian kernel that depends on inputs lacks a density at a row."""
    if not isinstance(kernel, AbstractLinearGaussianKernel) or inputs is None:
        return False
    return _no_density(jax.vmap(lambda u: dense_scale(kernel.at(u).scale_tril))(inputs))


def grid_words(posterior: GridPosterior) -> str:
    """Describe the assumptions behind a value that was computed on a grid."""
    error = float(posterior.discretisation_error)
    return (
        f"up to grid error, estimated as {error:.1e} of a standard deviation, and less than"
        f" {MISFIT:.0e} of the chain's mass beyond the box; not a certificate, since the"
        " posterior's mass beyond the box is not bounded"
    )


def refuse_misfit(misfit: Scalar) -> None:
    """Decline a grid that does not cover or resolve the laws of the chain."""
    require(
        float(misfit) <= MISFIT,
        f"the grid misses {float(misfit):.1g} of a law of the chain, which is outside of its box or"
        " narrower than its spacing: widen or refine the grid",
    )


def _check_types(functional: Any, reference: Any) -> None:
    if not isinstance(functional, (AbstractFunctional, AnyLipschitz, AnyBounded)):
        raise TypeError(
            "error_bound expects a functional such as StateSum(), or a class of them such as"
            f" AnyLipschitz(), got {type(functional).__name__}."
        )
    if reference is not None and not isinstance(reference, (GridPosterior, ParticlePosterior)):
        raise TypeError(
            "error_bound expects a GridPosterior or a ParticlePosterior as its reference, got"
            f" {type(reference).__name__}."
        )


def _without_padding(reference: Any, model: StateSpaceModel, series: Series) -> Any:
    """Return the existing rows of the reference; refuse that of another series or model."""
    if reference is None:
        return None
    n, is_grid = series.num_times, isinstance(reference, GridPosterior)
    num_rows = reference.weights.shape[0] if is_grid else reference.samples.shape[1]
    length = num_rows if reference.length is None else int(reference.length)
    if length != n:
        raise ValueError(f"The reference must be of the same series, of {n} rows, got {length}.")
    if isinstance(reference, ParticlePosterior):
        if not bool(jnp.allclose(reference.data.ys[:n], series.ys)):
            raise ValueError("The reference is of another series: its observations differ.")
        return reference
    reference.check()
    if reference.grid.dim != model.state_dim:
        raise ValueError(
            f"The reference has {reference.grid.dim} state dimensions, the model {model.state_dim}."
        )
    expected = increments(model, series, reference.grid, reference.kind)
    if not bool(jnp.allclose(expected, reference.log_evidence_increments[:n], atol=1e-3)):
        raise ValueError(
            "The reference is of another model or another series: the evidence that its grid gives"
            " to this series under this model is not the one it has."
        )
    inputs = None if reference.inputs is None else reference.inputs[:n]
    return eqx.tree_at(
        lambda p: (p.weights, p.filter_weights, p.inputs, p.length),
        reference,
        (reference.weights[:n], reference.filter_weights[:n], inputs, None),
        is_leaf=lambda leaf: leaf is None,
    )
