"""The interface of amortised families: maps from observations to backward chains.

A family is written as `init` and `step`, so that the same code smooths a stored series, a batch of
them and a live stream. A step has two halves. `advance` runs sequentially, row after row;
`read` turns two neighbouring states into the factors q_k and q_{k-1|k} and is evaluated for all
rows at once when the series is stored.
"""

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from retrodict._arrays import PRNGKey
from retrodict._chains import (
    AbstractBackwardKernel,
    LinearGaussianChain,
    SampledChain,
)
from retrodict._model import (
    AbstractModel,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    prepare_batch,
    prepare_series,
    unwrap,
)
from retrodict._model import prepare_row as validate_row
from retrodict._numerics import linalg
from retrodict.distributed import Parallel, laid_out, on_accelerator, prepended

C = TypeVar("C", bound=eqx.Module)
F = TypeVar("F", bound="AbstractPreparedFamily")
T = TypeVar("T")

if TYPE_CHECKING:
    # A type checker would take abstract variables for properties.
    Abstract = Annotated[T, "a field that final classes declare"]
else:
    Abstract = eqx.AbstractVar


class Factor(eqx.Module):
    """The factors that one row adds to a chain.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> family = rd.KalmanFamily(rd.models.local_level(prior_scale=1.0))
        >>> state, first = family.step(family.init(), jnp.array([1.0]))
        >>> state, second = family.step(state, jnp.array([2.0]))
        >>> print(np.array(first.law.mean).round(3), np.array(second.kernel.weight).round(3))
        [0.5] [[0.333]]

    Attributes:
        law: the filtering law q_k, a `Gaussian` or a `GaussianMixture`.
        kernel: the backward kernel q_{k-1|k}, a `LinearGaussianKernel`, or the parameters of the
            chain's `kernel_law`; without meaning at the first row.
    """

    law: Any
    kernel: Any


class AbstractFamily(eqx.Module):
    """An amortised variational family: y_{0:n-1} ↦ q_{n-1}(x_{n-1}) ∏ q_{k-1|k}(x_k, x_{k-1}).

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> def last_filtered_mean(family: rd.AbstractFamily, ys):
        ...     state = family.init()
        ...     for y in ys:
        ...         state, factor = family.step(state, y)
        ...     return factor.law.mean
        >>> family = rd.KalmanFamily(rd.models.local_level(prior_scale=1.0))
        >>> print(np.array(last_filtered_mean(family, jnp.array([[1.0], [2.0], [4.0]]))).round(3))
        [3.]
    """

    num_paths: ClassVar[int] = 1
    """The number of sampled paths per series and step of `fit`. The gradient leaves out the score.
    For the same time, more steps with one path gave a better ELBO than fewer with more paths."""

    model_class: ClassVar[type[AbstractModel]] = StateSpaceModel
    """The class of the models whose posteriors the family approximates."""

    state_dim: Abstract[int]
    obs_dim: Abstract[int]
    input_dim: Abstract[int]

    @abstractmethod
    def prepare(
        self,
        model: Any,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> "AbstractFamily":
        """Return the family in the units of these data, started near the model's prior chain.

        Args:
            model: the model whose posterior is approximated.
            ys: observations, of shape `(time, obs)` or `(batch, time, obs)`.
            mask: true where an entry was observed.
            inputs: inputs, of shape `(time, input)` or `(batch, time, input)`.
            length: the number of rows that exist, one integer, or one per series.
        """

    @abstractmethod
    def redraw(self, key: PRNGKey) -> "AbstractFamily":
        """Return the same family with new random weights, for a restart."""

    @abstractmethod
    def init(self) -> Any:
        """Return the state before the first row."""

    @abstractmethod
    def step(
        self, state: Any, y: Any, *, mask: Any = None, inputs: Any = None
    ) -> tuple[Any, Factor]:
        """Process one row.

        Args:
            state: the state that `init` or the previous step returned.
            y: the observation, of shape `(obs,)`; NaN where an entry is missing.
            mask: true where an entry was observed.
            inputs: the input of the row, of shape `(input,)`, if the family takes inputs.

        Returns:
            The next state, and the factors q_k and q_{k-1|k}.
        """

    @abstractmethod
    def infer(self, ys: Any, *, mask: Any = None, inputs: Any = None, length: Any = None) -> Any:
        """Return the chain of a whole series.

        Args:
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was observed.
            inputs: inputs of shape `(time, input)`, if the family takes them.
            length: the number of rows that exist; the rest is padding.
        """


class AbstractPreparedFamily(AbstractFamily):
    """A family whose `prepare` checks model and data first."""

    @abstractmethod
    def started(self: F, model: Any, batch: Series) -> F:
        """Return the family in the units of checked series, started near the model's prior chain.

        Args:
            model: the model whose posterior is approximated.
            batch: the series, with a leading axis `batch`.
        """

    def prepare(
        self: F,
        model: Any,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> F:
        """Return the family in the units of these data, started near the model's prior chain."""
        check_fits(self, model)
        options = {"mask": mask, "inputs": inputs, "length": length}
        return self.started(model, prepare_batch(ys, **options, **dimensions(self)))


class AbstractFactorFamily(AbstractFamily, Generic[C]):
    """A family whose factors are read from a state that is advanced row by row.

    A family with an associative recurrence also has a method `advance_in_parallel(embedded, exists,
    parallel)`, which returns the states after every row in O(log n) depth. `embedded` are the
    results of `embed` with a leading time axis, `exists` marks existing rows (`None` for all),
    and `parallel` is a mesh to use several devices, or `True`.

    A family may also have a method `advance_on_accelerator(state, embedded, exists)`, which returns
    the same states as `advance` row after row, from a given state, in fewer operations.
    """

    @abstractmethod
    def embed(self, row: Series) -> Any:
        """Compute what depends on one row alone, before any recurrence.

        Args:
            row: the row; its arrays have no axis `time`.
        """

    @abstractmethod
    def advance(self, state: Any, embedded: Any) -> Any:
        """Return the next state; the only part that runs sequentially."""

    @abstractmethod
    def read(self, before: Any, after: Any, embedded: Any) -> Factor:
        """Return the factors q_k and q_{k-1|k}, from the states before and after row k."""

    @abstractmethod
    def assemble(self, read: Factor, length: Any) -> C:
        """Return the chain of the factors of all rows; the first kernel is left out.

        Args:
            read: the factors, with a leading time axis.
            length: the number of rows that exist; `None` for all.
        """

    def step(
        self, state: Any, y: Any, *, mask: Any = None, inputs: Any = None
    ) -> tuple[Any, Factor]:
        """Process one row, and return the next state and the factors q_k and q_{k-1|k}."""
        return _step(self, state, prepare_row(self, y, mask=mask, inputs=inputs))

    def infer(
        self,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
        parallel: Parallel = False,
    ) -> C:
        """Return the chain of a whole series: a scan of `step`.

        Args:
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was observed; `True` alone promises that all were.
            inputs: inputs of shape `(time, input)`, if the family takes them.
            length: the number of rows that exist; the rest is padding.
            parallel: whether to run in O(log n) depth, for families that are associative; a
                `time_mesh` to do so over several devices.
        """
        series = prepare_for(self, ys, mask=mask, inputs=inputs, length=length)
        return _infer(self, series, parallel)


class AbstractLinearGaussianFamily(AbstractFactorFamily[LinearGaussianChain]):
    """A family whose chains are all of type `LinearGaussianChain`.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> class ExponentialSmoothing(rd.AbstractLinearGaussianFamily):
        ...     gain: float = 0.5  # an array or a parameter, if `fit` is to learn it
        ...     state_dim: int = 1
        ...     obs_dim: int = 1
        ...     input_dim: int = 0
        ...     def prepare(self, model, ys, **series): return self
        ...     def redraw(self, key): return self
        ...     def init(self): return jnp.zeros(1)
        ...     def embed(self, row): return row.ys
        ...     def advance(self, level, y): return level + self.gain * (y - level)
        ...     def read(self, before, after, y):
        ...         bias, scale = (1 - self.gain) * before, jnp.eye(1)
        ...         kernel = rd.LinearGaussianKernel(self.gain * jnp.eye(1), bias, scale)
        ...         return rd.Factor(rd.Gaussian(after, scale), kernel)
        >>> chain = ExponentialSmoothing().infer(jnp.array([[2.0], [4.0]]))
        >>> chain.laws.mean.tolist(), chain.marginals().mean.tolist()
        ([[1.0], [2.5]], [[1.75], [2.5]])
    """

    def assemble(self, read: Factor, length: Any) -> LinearGaussianChain:
        """Return the chain, with identity kernels at padded rows."""
        kernels = read.kernel
        if length is not None:
            exists = jnp.arange(kernels.bias.shape[0]) < length
            kernels = _identity_at_padding(kernels, exists)
        return LinearGaussianChain(read.law, jax.tree.map(lambda leaf: leaf[1:], kernels), length)


class AbstractSampledFamily(AbstractFactorFamily[SampledChain]):
    """A family whose backward kernels are sampled, and not marginalised in closed form.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> class Sine(rd.AbstractBackwardKernel):
        ...     def law(self, step, x):
        ...         return rd.Gaussian(step["shift"] + jnp.sin(x), jnp.eye(1))
        >>> class SineFamily(rd.AbstractSampledFamily):
        ...     state_dim: int = 1
        ...     obs_dim: int = 1
        ...     input_dim: int = 0
        ...     def prepare(self, model, ys, **series): return self
        ...     def redraw(self, key): return self
        ...     def shared(self): return Sine()
        ...     def init(self): return jnp.zeros(1)
        ...     def embed(self, row): return row.ys
        ...     def advance(self, level, y): return 0.5 * (level + y)
        ...     def read(self, before, after, y):
        ...         return rd.Factor(rd.Gaussian(after, jnp.eye(1)), {"shift": before})
        >>> chain = SineFamily().infer(jnp.array([[2.0], [4.0]]))
        >>> chain.laws.mean.tolist(), chain.sample(jax.random.key(0), 3).shape
        ([[1.0], [2.5]], (3, 2, 1))
    """

    @abstractmethod
    def shared(self) -> AbstractBackwardKernel:
        """Return the part that the backward kernels of all times share."""

    def assemble(self, read: Factor, length: Any) -> SampledChain:
        """Return the chain, which ignores padded rows."""
        steps = jax.tree.map(lambda leaf: leaf[1:], read.kernel)
        return SampledChain(read.law, self.shared(), steps, length)


@eqx.filter_jit
def _step(family: AbstractFactorFamily, state: Any, row: Series) -> tuple[Any, Factor]:
    return read_row(unwrap(family), state, row)


def read_row(family: AbstractFactorFamily, state: Any, row: Series) -> tuple[Any, Factor]:
    """Return the next state of an unwrapped family, and the factors of the row."""
    embedded = family.embed(row)
    after = family.advance(state, embedded)
    return after, family.read(state, after, embedded)


@eqx.filter_jit
def _infer(family: AbstractFactorFamily[C], series: Series, parallel: Parallel) -> C:
    return infer_series(unwrap(family), series, parallel=parallel)


def infer_series(
    family: AbstractFactorFamily[C],
    series: Series,
    state: Any = None,
    *,
    parallel: Parallel = False,
) -> C:
    """Return the chain of a prepared series; called inside `jax.jit`.

    Args:
        family: an unwrapped family.
        series: a series that fits it.
        state: the state before the first row; by default that of `init`.
        parallel: whether to run in O(log n) depth.
    """
    state = family.init() if state is None else state
    read, _ = factors(family, state, laid_out(series, parallel), parallel=parallel)
    return family.assemble(read, series.length)


def factors(
    family: AbstractFactorFamily, state: Any, series: Series, *, parallel: Parallel = False
) -> tuple[Factor, Any]:
    """Return the factors of all rows and the last state; the first kernel has no meaning.

    Args:
        family: an unwrapped family.
        state: the state before the first of the rows; that of `init` if `parallel`.
        series: the rows; the state does not change from the first padded row on.
        parallel: whether to run in O(log n) depth.
    """
    embedded, exists = jax.vmap(family.embed)(series.rows), series.exists()
    if parallel:
        advance_in_parallel = getattr(family, "advance_in_parallel", None)
        if advance_in_parallel is None:
            raise ValueError(
                f"{type(family).__name__} has no parallel form: its recurrence is not associative."
                " Use parallel=False, or ScanFamily."
            )
        afters = advance_in_parallel(embedded, exists, parallel)
    elif family.state_dim > linalg.UNROLLED and not on_accelerator():
        return _read_one_by_one(family, state, embedded, exists)
    else:
        fast = getattr(family, "advance_on_accelerator", None) if on_accelerator() else None
        one_by_one = fast or partial(_advance_one_by_one, family)
        afters = one_by_one(state, embedded, exists)
    befores = prepended(state, jax.tree.map(lambda leaf: leaf[:-1], afters), parallel)
    read = jax.vmap(family.read)(befores, afters, embedded)
    return read, jax.tree.map(lambda leaf: leaf[-1], afters)


def _advance_one_by_one(
    family: AbstractFactorFamily,
    state: Any,
    embedded: Any,
    exists: Bool[Array, "time"] | None,
) -> Any:
    """Return the states after every row."""

    def move(before: Any, at: tuple) -> tuple[Any, Any]:
        after = _advance(family, before, *at)
        return after, after

    # Storing the residuals of a step takes longer than recomputing the step: each is an operation
    # of its own. With one state dimension a step is a few tiny operations, and two steps per
    # iteration save a sixth of the time of smoothing one series.
    unroll = 2 if family.state_dim == 1 else 1
    return lax.scan(jax.checkpoint(move), state, (embedded, exists), unroll=unroll)[1]


def _read_one_by_one(
    family: AbstractFactorFamily,
    state: Any,
    embedded: Any,
    exists: Bool[Array, "time"] | None,
) -> tuple[Factor, Any]:
    """Return the factors of all rows and the last state, from one scan.

    With large states, arrays of all rows exceed the caches, and writing them takes longer than the
    arithmetic. Factors are therefore read where the states are, and residuals are recomputed.
    """

    @jax.checkpoint
    def move(before: Any, at: tuple) -> tuple[Any, Factor]:
        row, _ = at
        after = _advance(family, before, *at)
        return after, family.read(before, after, row)

    last, read = lax.scan(move, state, (embedded, exists))
    return read, last


def _advance(family: AbstractFactorFamily, before: Any, row: Any, real: Any) -> Any:
    """Return the state after a row; that before it if the row is padding."""
    after = family.advance(before, row)
    if real is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(real, new, old), after, before)


def advance_over(family: AbstractFactorFamily, series: Series, stop: Any) -> Any:
    """Return the state after the first `stop` rows, without storing earlier states.

    Args:
        family: an unwrapped family.
        series: the rows.
        stop: the number of rows to read.
    """

    def move(k: Array, state: Any) -> Any:
        return family.advance(state, family.embed(series.rows.at(k)))

    return lax.fori_loop(0, stop, move, family.init())


def _identity_at_padding(
    kernels: LinearGaussianKernel, exists: Bool[Array, "time"]
) -> LinearGaussianKernel:
    """Replace the kernels of padded rows by identities, as `LinearGaussianChain` requires."""
    eye = jnp.eye(kernels.bias.shape[-1], dtype=kernels.bias.dtype)
    weights = jnp.where(exists[:, None, None], kernels.weight, eye)
    biases = jnp.where(exists[:, None], kernels.bias, 0.0)
    scales = jnp.where(exists[:, None, None], kernels.scale_tril, 0.0)
    return jax.vmap(LinearGaussianKernel)(weights, biases, scales)


def dimensions(family: AbstractFamily) -> dict[str, Any]:
    """Return the dimensions of the series that a family reads, as arguments of `prepare_series`."""
    return {
        "takes_input": family.input_dim > 0,
        "obs_dim": family.obs_dim,
        "input_dim": family.input_dim,
    }


def prepare_for(family: AbstractFamily, ys: Any, *, mask: Any, inputs: Any, length: Any) -> Series:
    """Validate one series against a family's dimensions."""
    options = {"mask": mask, "inputs": inputs, "length": length}
    return prepare_series(ys, **options, **dimensions(family))


def prepare_row(family: AbstractFamily, y: Any, *, mask: Any, inputs: Any) -> Series:
    """Check one row against a family's dimensions, and turn NaN into a mask."""
    return validate_row(y, mask=mask, inputs=inputs, **dimensions(family))


def check_fits(family: AbstractFamily, model: AbstractModel) -> None:
    """Raise unless the model has the family's class, state dimension and inputs."""
    if not isinstance(model, family.model_class):
        raise TypeError(
            f"{type(family).__name__} approximates posteriors of a {family.model_class.__name__},"
            f" got a {type(model).__name__}."
        )
    if model.state_dim != family.state_dim:
        raise ValueError(
            f"This {type(family).__name__} has state_dim={family.state_dim}, and the model has"
            f" {model.state_dim} states. Build the family with state_dim={model.state_dim}."
        )
    if model.takes_input != (family.input_dim > 0):
        raise ValueError(
            f"This {type(family).__name__} has input_dim={family.input_dim}, and the model takes"
            f" {'inputs' if model.takes_input else 'no inputs'}. Build the family with the"
            " input_dim of the model's inputs."
        )
