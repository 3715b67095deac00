"""Where a particle filter draws its next states from."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from retrodict._chains import LinearGaussianChain
from retrodict._kernels import AbstractGaussianKernel, AbstractKernel, Distribution
from retrodict._laws import Gaussian
from retrodict._model import StateSpaceModel
from retrodict._numerics import linalg
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import Scalar, State

Lookahead = Callable[[Any, Any], Any]
"""`lookahead(x, data)`: a log weight that stands for log p(y_k | x_{k-1} = x)."""


class AbstractProposal(eqx.Module):
    """The laws from which a guided particle filter draws.

    Attributes:
        steps: a pytree of arrays with one row a time step, of which `move` gets the row of the time
            that it moves to; `None` if there is nothing to keep.
    """

    if TYPE_CHECKING:

        @property
        def steps(self) -> PyTree:
            """One row a time step, or `None`."""
            ...
    else:
        # A type checker would take an abstract variable for an argument of the constructor.
        steps: eqx.AbstractVar[PyTree]

    @abstractmethod
    def initial(self, data: Series) -> Any:
        """The law of the first state, with `log_prob` and `sample`."""

    @abstractmethod
    def move(self, before: State, data: Series, step: PyTree) -> Any:
        """The law of x_k given x_{k-1}, the data of time k and a row of `steps`."""


class Guided(AbstractProposal):
    """A proposal of your own.

    Example:
        A proposal that looks at nothing but the last state, wider than the transition:
        `Guided(lambda data: prior, lambda before, data: rd.Gaussian(before, 2 * scale))`.

    Args:
        initial: called as `initial(data)` with the row `Series(ys, mask, inputs)` of time 0;
            returns a law with `log_prob` and `sample`.
        move: called as `move(before, data)` with x_{k-1} and the row of time k; likewise. Where the
            model has mass, these laws must have some.
    """

    initial_fn: Callable[[Any], Any]
    move_fn: Callable[[Any, Any], Any]

    def __init__(self, initial: Callable[[Any], Any], move: Callable[[Any, Any], Any]):
        for name, fn in (("initial", initial), ("move", move)):
            if not callable(fn):
                raise TypeError(
                    f"Guided expects a function as its {name}, got {type(fn).__name__}."
                )
        self.initial_fn, self.move_fn = initial, move

    @property
    def steps(self) -> PyTree:
        """Nothing is kept."""
        return None

    def initial(self, data: Series) -> Distribution:
        """The law that the first function returns."""
        return self.initial_fn(data)

    def move(self, before: State, data: Series, step: PyTree) -> Distribution:
        """The law that the second function returns."""
        return self.move_fn(before, data)


class ChainProposal(AbstractProposal):
    """A linear-Gaussian chain, such as a linearised or amortised smoother's, read forward.

    The chain has x_{k-1} = G x_k + c + s ε. Given x_{k-1}, its x_k is Gaussian again, of covariance
    S (I + BᵀB)⁻¹ Sᵀ for B = s⁻¹ G S and the marginal law N(m, S Sᵀ) of x_k.

    Args:
        chain: a chain of the series that is filtered, with densities at all times.
        inflation: a factor on the scales. Above one the weights have lighter tails where the chain
            is too sure of itself.
    """

    first: Gaussian
    steps: PyTree
    inflation: float

    def __init__(self, chain: LinearGaussianChain, inflation: float = 1.2):
        if not isinstance(chain, LinearGaussianChain):
            hint = " Pass its .chain." if hasattr(chain, "chain") else ""
            raise TypeError(
                f"ChainProposal expects a LinearGaussianChain, got {type(chain).__name__}.{hint}"
            )
        if not inflation > 0:
            raise ValueError(f"ChainProposal expects a positive inflation, got {inflation}.")
        self.first, self.steps = _forward(chain)
        self.inflation = inflation

    def initial(self, data: Series) -> Gaussian:
        """The marginal law of x_0."""
        return Gaussian(self.first.mean, self.inflation * self.first.scale_tril)

    def move(self, before: State, data: Series, step: PyTree) -> Gaussian:
        """The law of x_k given x_{k-1} under the chain."""
        gain, offset, scale = step
        return Gaussian(linalg.matvec(gain, before) + offset, self.inflation * scale)


@eqx.filter_jit
def _forward(chain: LinearGaussianChain) -> tuple[Gaussian, tuple[Array, Array, Array]]:
    """The law of x_0, and gains, offsets and scales of x_k given x_{k-1}; row 0 is not used."""
    laws, eye = chain.marginals(), jnp.eye(chain.state_dim, dtype=chain.laws.mean.dtype)

    def turn(mean: Array, scale: Array, gain: Array, offset: Array, noise: Array):
        whitener = linalg.solve_triangular(noise, eye)
        design = linalg.matmul(whitener, gain)
        seen = linalg.matmul(design, scale)
        precision = eye + linalg.matmul(seen.T, seen)
        upper = linalg.cholesky(precision[::-1, ::-1])[::-1, ::-1]
        after = linalg.matmul(scale, linalg.solve_triangular(upper.T, eye))
        pull = linalg.matmul(linalg.matmul(after, after.T), linalg.matmul(design.T, whitener))
        return pull, mean - linalg.matvec(pull, linalg.matvec(gain, mean) + offset), after

    kernels = chain.kernels
    steps = jax.vmap(turn)(
        laws.mean[1:], laws.scale_tril[1:], kernels.weight, kernels.bias, kernels.scale_tril
    )
    unused = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), (laws.scale_tril, laws.mean))
    first = (unused[0], unused[1], unused[0])
    steps = jax.tree.map(lambda head, tail: jnp.concatenate([head, tail]), first, steps)
    return jax.tree.map(lambda leaf: leaf[0], laws), steps


def mean_lookahead(model: StateSpaceModel) -> Lookahead:
    """The log emission density of y_k at the mean of x_k given x_{k-1}, for an auxiliary filter.

    Example:
        `rd.particle_filter(key, model, ys, lookahead=rd.particles.mean_lookahead(model))`.

    Args:
        model: a model whose transition is Gaussian.
    """
    plain = unwrap(model)
    kernel, emission = plain.transition, plain.emission
    if not isinstance(kernel, AbstractGaussianKernel):
        raise TypeError(
            "mean_lookahead reads the mean of a Gaussian transition, got"
            f" {type(kernel).__name__}. Pass a function lookahead(x, data) of your own."
        )

    return _MeanLookahead(kernel, emission)


class _MeanLookahead(eqx.Module):
    """The function of `mean_lookahead`: a module, so that filters with it are compiled once."""

    transition: AbstractGaussianKernel
    emission: AbstractKernel

    def __call__(self, x: State, data: Series) -> Scalar:
        mean = self.transition.law(x, data.inputs).mean
        u = data.inputs
        return self.emission.log_prob(mean, data.ys, u, data.mask)
