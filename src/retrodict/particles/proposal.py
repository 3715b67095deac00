"""Proposals: the laws from which a particle filter draws its next states."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from retrodict._arrays import Scalar, State
from retrodict._chains import LinearGaussianChain
from retrodict._model import (
    AbstractGaussianKernel,
    AbstractKernel,
    Distribution,
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    unwrap,
)
from retrodict._numerics import GaussianLaw, linalg, reverse

Lookahead = Callable[[Any, Any], Any]
"""`lookahead(x, data)`: an approximation of log p(y_k | x_{k-1} = x)."""


class AbstractProposal(eqx.Module):
    """The laws from which a guided particle filter draws.

    Example:
        Draws that do not look at the observations, wider than the model:

        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> class Wide(rd.particles.AbstractProposal):
        ...     scale_tril: jax.Array
        ...     steps: None = None
        ...     def initial(self, data):
        ...         return rd.Gaussian(jnp.zeros(1), self.scale_tril)
        ...     def move(self, before, data, step):
        ...         return rd.Gaussian(before, self.scale_tril)
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> proposal = Wide(2.0 * jnp.eye(1))
        >>> rd.particle_filter(jax.random.key(0), model, ys, 100, proposal=proposal).mean.shape
        (3, 1)

    Attributes:
        steps: a pytree of arrays with one row per time step, of which `move` receives the row of
            the time that it moves to; or `None`.
    """

    if TYPE_CHECKING:

        @property
        def steps(self) -> PyTree:
            """One row per time step, or `None`."""
            ...
    else:
        # A type checker would take an abstract variable for an argument of the constructor.
        steps: eqx.AbstractVar[PyTree]

    @abstractmethod
    def initial(self, data: Series) -> Any:
        """Return the law of the first state, with `log_prob` and `sample`."""

    @abstractmethod
    def move(self, before: State, data: Series, step: PyTree) -> Any:
        """Return the law of x_k given x_{k-1}, the data of time k and a row of `steps`."""


class Guided(AbstractProposal):
    """A proposal given by two functions.

    Example:
        Draws between the previous state and the observation:

        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> proposal = rd.particles.Guided(
        ...     lambda data: rd.Gaussian(0.5 * data.ys, jnp.eye(1)),
        ...     lambda before, data: rd.Gaussian(0.5 * (before + data.ys), jnp.eye(1)),
        ... )
        >>> rd.particle_filter(jax.random.key(0), model, ys, 100, proposal=proposal).mean.shape
        (3, 1)

    Args:
        initial: called as `initial(data)` with the row `Series(ys, mask, inputs)` of time 0;
            returns a law with `log_prob` and `sample`.
        move: called as `move(before, data)` with x_{k-1} and the row of time k; likewise. These
            laws must have mass wherever the model has.
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
        """There are no rows."""
        return None

    def initial(self, data: Series) -> Distribution:
        """Return the result of the first function."""
        return self.initial_fn(data)

    def move(self, before: State, data: Series, step: PyTree) -> Distribution:
        """Return the result of the second function."""
        return self.move_fn(before, data)


class ChainProposal(AbstractProposal):
    """The forward kernels of a linear-Gaussian chain, such as that of a linearised smoother.

    The chain has x_{k-1} = G x_k + c + s ε. Given x_{k-1}, its x_k is Gaussian again.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> proposal = rd.particles.ChainProposal(chain, inflation=1.5)
        >>> rd.particle_filter(jax.random.key(0), model, ys, 100, proposal=proposal).mean.shape
        (3, 1)

    Args:
        chain: a chain of the filtered series, with densities at all times.
        inflation: a factor on the scales. Above one the weights have lighter tails where the scales
            of the chain are too small.
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
        """Return the marginal law of x_0."""
        return Gaussian(self.first.mean, self.inflation * self.first.scale_tril)

    def move(self, before: State, data: Series, step: PyTree) -> Gaussian:
        """Return the law of x_k given x_{k-1} under the chain."""
        gain, offset, scale = step
        return Gaussian(linalg.matvec(gain, before) + offset, self.inflation * scale)


@eqx.filter_jit
def _forward(chain: LinearGaussianChain) -> tuple[Gaussian, tuple[Array, Array, Array]]:
    """Return the law of x_0, and gains, offsets and scales of x_k given x_{k-1}; row 0 is zero."""
    laws, kernels = chain.marginals(), chain.kernels

    def turn(law: Gaussian, kernel: LinearGaussianKernel) -> tuple[Array, Array, Array]:
        before = GaussianLaw(law.mean, law.scale_tril)
        return reverse(before, kernel.weight, kernel.bias, kernel.scale_tril)

    steps = jax.vmap(turn)(jax.tree.map(lambda leaf: leaf[1:], laws), kernels)
    steps = jax.tree.map(lambda leaf: jnp.pad(leaf, ((1, 0), *[(0, 0)] * (leaf.ndim - 1))), steps)
    return jax.tree.map(lambda leaf: leaf[0], laws), steps


def mean_lookahead(model: StateSpaceModel) -> Lookahead:
    """Return a lookahead: the log emission density of y_k at the mean of x_k given x_{k-1}.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> lookahead = rd.particles.mean_lookahead(model)
        >>> rd.particle_filter(jax.random.key(0), model, ys, 100, lookahead=lookahead).mean.shape
        (3, 1)

    Args:
        model: a model whose transition is Gaussian.
    """
    plain = unwrap(model)
    kernel, emission = plain.transition, plain.emission
    if not isinstance(kernel, AbstractGaussianKernel):
        raise TypeError(
            "mean_lookahead reads the mean of a Gaussian transition, got"
            f" {type(kernel).__name__}. Pass a function lookahead(x, data)."
        )

    return _MeanLookahead(kernel, emission)


class _MeanLookahead(eqx.Module):
    """The function of `mean_lookahead`, as a module so that filters are compiled once."""

    transition: AbstractGaussianKernel
    emission: AbstractKernel

    def __call__(self, x: State, data: Series) -> Scalar:
        mean = self.transition.law(x, data.inputs).mean
        u = data.inputs
        return self.emission.log_prob(mean, data.ys, u, data.mask)
