"""What is asked of an error bound, checked, with what several methods need computed once."""

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from retrodict._chains import LinearGaussianChain
from retrodict._exact import GridPosterior, increments, kalman_smoother
from retrodict._expectations import (
    AbstractFunctional,
    BackwardSampling,
    LogJoint,
    Score,
    Variation,
    check_chain,
    check_constant,
    elbo,
    series_of_chain,
    variation,
)
from retrodict._kernels import AbstractLinearGaussianKernel
from retrodict._laws import dense_scale
from retrodict._model import StateSpaceModel, check_densities, is_linear_gaussian
from retrodict._parameters import unwrap
from retrodict._series import Series, prepare_rows
from retrodict._types import Scalar
from retrodict._validate import check_count, check_key, is_concrete
from retrodict.bounds import on_grid, wasserstein
from retrodict.particles import ParticlePosterior

MISFIT = 1e-6
"""How much of a law may be missing on a grid that stands for the exact posterior."""

DEVIATIONS = 3.0
"""How many standard errors are added where a bound is taken by Monte Carlo."""

CONFIDENCE = 0.5 * math.erfc(-DEVIATIONS / math.sqrt(2))
"""The nominal confidence of a mean plus `DEVIATIONS` standard errors, if the mean is normal."""


class AnyLipschitz(eqx.Module):
    """Every functional Σ_k f_k(x_k) whose functions are all Lipschitz with one constant.

    A bound for it is a bound for each of them at once: of Σ_k x_k, Σ_k |x_k|, and of the worst.

    Args:
        constant: the Lipschitz constant of every f_k.
    """

    constant: float = eqx.field(static=True, default=1.0)

    def __check_init__(self) -> None:
        check_constant(math.nan if self.constant is None else self.constant, "constant")


class AnyBounded(eqx.Module):
    """Every functional Σ_k f_k(x_k) with sup f_k − inf f_k at most one constant.

    Args:
        oscillation: the bound of sup − inf.
    """

    oscillation: float = eqx.field(static=True, default=1.0)

    def __check_init__(self) -> None:
        check_constant(math.nan if self.oscillation is None else self.oscillation, "oscillation")


class Declined(Exception):
    """A method that does not apply, with the reason."""


Basis: TypeAlias = Literal["closed form", "grid", "samples", "particles"]
"""What a value was computed with, the most trustworthy first. Only the first is a certificate."""


class Gap(NamedTuple):
    """The gap of the ELBO to the evidence.

    Attributes:
        value: log p(y) − ELBO.
        error: its standard error.
        rests_on: what was taken for granted, in words.
        basis: what it was computed with.
    """

    value: Scalar
    error: Scalar
    rests_on: str
    basis: Basis


class Problem:
    """What was asked, with what several methods need computed at most once."""

    def __init__(
        self,
        model: StateSpaceModel,
        chain: Any,
        series: Series,
        functional: Any,
        data: PyTree,
        reference: Any,
        key: Any,
        num_samples: int,
        window: int,
    ):
        self.model, self.chain, self.series = model, chain, series
        self.functional, self.data = functional, data
        self.key, self.num_samples, self.window = key, num_samples, window
        self.grid = reference if isinstance(reference, GridPosterior) else None
        self.particles = reference if isinstance(reference, ParticlePosterior) else None
        self.first, self.later = _variation_of(functional)
        self._exact: Any = None
        self._gap: Any = None
        self._paths: Any = None
        self._distances: Any = None

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

    def linear_chain(self) -> LinearGaussianChain:
        """Return the chain if it is linear Gaussian; decline otherwise."""
        if not isinstance(self.chain, LinearGaussianChain):
            raise Declined(f"the chain is {type(self.chain).__name__}, not linear Gaussian")
        return self.chain

    def exact(self) -> wasserstein.Reference:
        """The exact posterior of a linear-Gaussian model."""
        if not self.linear_gaussian:
            raise Declined("the model is not linear Gaussian")
        if self._exact is None:
            if self._singular(self.model.emission, self.series.inputs):
                raise Declined("the scale of the emission is singular at some time")
            found = kalman_smoother(self.model, self.series.ys, **self.options)
            self._exact = wasserstein.reference_of(found.chain)
        return self._exact

    def sensitivity(self) -> wasserstein.Sensitivity:
        """Return the Lipschitz constants of the functional in each state."""
        constants = (self.first.now, self.later.before, self.later.now)
        if not all(math.isfinite(constant) for constant in constants):
            raise Declined("the functional declares no Lipschitz constant")
        found = wasserstein.Sensitivity.of(self.first, self.later, self.num_times)
        return jax.tree.map(lambda leaf: leaf.astype(self.series.ys.dtype), found)

    def lipschitz_in_single_states(self) -> Float[Array, "time"]:
        """Return the Lipschitz constants of a functional that is a sum over single states."""
        sensitivity = self.sensitivity()
        if self.later.before > 0:
            raise Declined("the functional looks at pairs of states")
        return sensitivity.now

    def oscillations(self) -> Float[Array, "time"]:
        """Return the oscillation of each term of the functional."""
        if not all(math.isfinite(part.oscillation) for part in (self.first, self.later)):
            raise Declined("the functional declares no oscillation")
        every = jnp.full(self.num_times, self.later.oscillation, self.series.ys.dtype)
        return every.at[0].set(self.first.oscillation)

    def one_functional(self) -> AbstractFunctional:
        """Return the functional; decline a class of functionals."""
        if not isinstance(self.functional, AbstractFunctional):
            raise Declined(f"{type(self.functional).__name__} is a class of functionals")
        return self.functional

    def draw(self) -> tuple[Any, Float[Array, "sample time state"]]:
        """A key, and paths of the chain."""
        if self.key is None:
            raise Declined("it draws paths: pass key=jax.random.key(0)")
        if self._paths is None:
            self._paths = self.chain.sample(jax.random.fold_in(self.key, 0), self.num_samples)
        return self.key, self._paths

    def refuse_singular(self) -> None:
        """Declines where the chain, its exact counterpart, or the transition has no density."""
        chains = [self.exact().chain] if self.linear_gaussian else []
        chains += [self.chain] if isinstance(self.chain, LinearGaussianChain) else []
        scales = [part.scale_tril for chain in chains for part in (chain.terminal, chain.kernels)]
        inputs = self.series.inputs
        later = None if inputs is None else inputs[1:]
        if any(map(_no_density, scales)) or self._singular(self.model.transition, later):
            raise Declined(
                "a scale of the chain, of the transition or of the exact posterior is singular at"
                " some time"
            )

    def _singular(self, kernel: Any, inputs: Float[Array, "time input"] | None) -> bool:
        """Whether a linear-Gaussian kernel that varies with the input lacks a density at a row."""
        if not isinstance(kernel, AbstractLinearGaussianKernel) or inputs is None:
            return False
        return _no_density(jax.vmap(lambda u: dense_scale(kernel.at(u).scale_tril))(inputs))

    def gap(self) -> "Gap":
        """The gap of the ELBO to a known evidence."""
        if self._gap is None:
            self._gap = self._find_gap()
        return self._gap

    def _find_gap(self) -> "Gap":
        self.refuse_singular()
        if self.linear_gaussian and isinstance(self.chain, LinearGaussianChain):
            gap = wasserstein.divergence(self.chain, self.exact())
            words = "exact: evidence and ELBO in closed form"
            return Gap(gap, jnp.zeros_like(gap), words, "closed form")
        if self.grid is None:
            raise Declined(
                "the evidence is not known: pass a GridPosterior as reference. A particle estimate"
                " of it has no upper confidence bound"
            )
        if self.key is None:
            raise Declined("the ELBO is taken by sampled paths: pass key=jax.random.key(0)")
        # A quadrature ELBO is no bound, and paths weigh p / q as they are.
        bound, error = elbo(
            self.model,
            self.chain,
            self.series.ys,
            estimator=BackwardSampling(self.num_samples),
            key=jax.random.fold_in(self.key, 1),
            with_standard_error=True,
            **self.options,
        )
        gap = self.grid.log_evidence - bound
        if not bool(jnp.isfinite(gap) & jnp.isfinite(error)):
            raise Declined("the ELBO is not finite")
        return Gap(gap, error, f"{grid_words(self.grid)}; {self.sampling_words()}", "samples")

    def sampling_words(self) -> str:
        """Describe what a mean over sampled paths rests on."""
        return (
            f"a mean over {self.num_samples} sampled paths plus {DEVIATIONS:g} standard errors,"
            f" which is no certificate: the nominal confidence is {CONFIDENCE:.2%} if the mean is"
            " close to normal, and an event that no path meets is not counted"
        )

    def kernel_distances(self) -> tuple[Array, Array]:
        """Mean distances of the backward kernels to those of the grid."""
        chain, grid = self.linear_chain(), self.grid
        if grid is None or grid.grid.dim != 1:
            raise Declined("it needs a GridPosterior in one dimension as reference")
        if self._distances is None:
            moves, variations, misfit = on_grid.kernel_distances(chain, grid)
            refuse_misfit(misfit)
            self._distances = moves, variations
        return self._distances


def _no_density(scales: Float[Array, "*time d d"]) -> bool:
    return bool(jnp.any(jnp.diagonal(scales, axis1=-2, axis2=-1) == 0))


def grid_words(posterior: GridPosterior) -> str:
    """Describe what a figure computed on a grid rests on."""
    error = float(posterior.discretisation_error)
    return (
        f"up to grid error, estimated as {error:.1e} of a standard deviation, and less than"
        f" {MISFIT:.0e} of the chain's mass beyond the box; no certificate, since the posterior's"
        " mass beyond the box is not bounded"
    )


def refuse_misfit(misfit: Scalar) -> None:
    """Declines a grid that does not hold the laws of the chain."""
    if not float(misfit) <= MISFIT:
        raise Declined(
            f"the grid misses {float(misfit):.1g} of a law of the chain, which lies outside of its"
            " box or is narrower than its spacing: widen or refine the grid"
        )


def prepare(
    model: StateSpaceModel,
    chain: Any,
    ys: Any,
    functional: Any,
    data: PyTree,
    reference: Any,
    key: Any,
    num_samples: int,
    window: int,
    mask: Any,
    inputs: Any,
    length: Any,
) -> Problem:
    """Check the arguments of `error_bound` and collect them."""
    check_chain(chain, "error_bound")
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
    if key is not None:
        check_key(key, "error_bound")
    model = unwrap(model)
    check_densities(model, "error_bound")
    if model.state_dim != chain.state_dim:
        raise ValueError(
            f"The model has {model.state_dim} state dimensions, and the chain {chain.state_dim}."
        )
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs, length=length)
    if not is_concrete(series.ys):
        raise ValueError("error_bound compares values: call it outside of jit and vmap.")
    if isinstance(functional, (LogJoint, Score)) and data is None:
        data = series.rows
    if isinstance(chain, LinearGaussianChain):
        # Data in single precision beside a chain in double precision, or the other way around.
        dtype = jnp.result_type(series.ys, chain.laws.mean)
        series = eqx.tree_at(lambda s: s.ys, series, series.ys.astype(dtype))
    n = series.num_times if series.length is None else int(series.length)
    if n < 2:
        raise ValueError(f"error_bound expects a series of two rows or more, got {n}.")
    data = prepare_rows(data, series.num_times)
    if check_count(num_samples, "num_samples") < 2:
        raise ValueError(
            "error_bound takes standard errors of paths: num_samples must be 2 or more."
        )
    series = Series(series.ys[:n], _rows(series.mask, n), _rows(series.inputs, n), None)
    return Problem(
        model,
        _first_rows(chain, n),
        series,
        functional,
        jax.tree.map(lambda leaf: leaf[:n], data),
        _first_rows_of_reference(reference, model, series),
        key,
        num_samples,
        check_count(window, "window"),
    )


def _rows(array: Array | None, n: int) -> Array | None:
    return None if array is None else array[:n]


def _first_rows(chain: Any, n: int) -> Any:
    chain = chain.prefix(n)
    return (
        LinearGaussianChain(chain.laws, chain.kernels)
        if isinstance(chain, LinearGaussianChain)
        else chain
    )


def _first_rows_of_reference(reference: Any, model: StateSpaceModel, series: Series) -> Any:
    """The reference without padding, refused unless it is of this series and model."""
    if reference is None:
        return None
    n, on_a_grid = series.num_times, isinstance(reference, GridPosterior)
    found = reference.weights.shape[0] if on_a_grid else reference.samples.shape[1]
    length = found if reference.length is None else int(reference.length)
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
    return eqx.tree_at(
        lambda p: (p.weights, p.filter_weights, p.inputs, p.length),
        reference,
        (reference.weights[:n], reference.filter_weights[:n], _rows(reference.inputs, n), None),
        is_leaf=lambda leaf: leaf is None,
    )


def _variation_of(functional: Any) -> tuple[Variation, Variation]:
    if isinstance(functional, AnyLipschitz):
        same = Variation(0.0, functional.constant, math.inf)
        return same, same
    if isinstance(functional, AnyBounded):
        same = Variation(0.0, math.inf, functional.oscillation)
        return same, same
    return variation(functional)
