"""Registries of kernels, families and streams, over which generic tests run.

A new kernel is added to `KERNELS`, and the contract tests of `test_kernel.py` run on it; a new
family to `FAMILIES`, for those of `families/test_base.py`; a new stream to `STREAMS`, for those of
`test_stream.py`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist

import retrodict as rd
from retrodict._families import AbstractFactorFamily

INPUT_DIM = 2
"""Number of inputs of the kernels that take inputs."""


class KernelCase(NamedTuple):
    """A kernel, and its properties for the generic tests.

    Attributes:
        make: builds the kernel in the current precision.
        state_dim: the dimension of the state.
        out_dim: the dimension of a draw.
        takes_input: whether it takes inputs, `INPUT_DIM` of them.
        support: the support of its density.
        masked_by: whether a mask omits entries or whole rows.
    """

    make: Callable[[], rd.AbstractKernel]
    state_dim: int
    out_dim: int
    takes_input: bool
    support: Literal["real", "positive", "counts"] = "real"
    masked_by: Literal["entry", "row"] = "entry"


def tril(dim: int) -> jax.Array:
    """Return a well-conditioned lower factor that is not diagonal."""
    return 0.7 * jnp.eye(dim) + 0.3 * jnp.tril(jnp.cos(jnp.ones((dim, dim)).cumsum(0)), -1)


def weight(out_dim: int, state_dim: int) -> jax.Array:
    """Return an asymmetric matrix with entries between -0.8 and 0.8."""
    return 0.8 * jnp.sin(1.0 + jnp.arange(out_dim * state_dim)).reshape(out_dim, state_dim)


def _linear(state_dim: int, out_dim: int) -> rd.LinearGaussianKernel:
    return rd.LinearGaussianKernel(
        weight(out_dim, state_dim), weight(out_dim, 1)[:, 0], tril(out_dim)
    )


def _linear_diagonal() -> rd.LinearGaussianKernel:
    return rd.LinearGaussianKernel(weight(2, 2), jnp.ones(2), rd.Diagonal(jnp.array([0.5, 1.5])))


def _linear_input() -> rd.LinearGaussianKernel:
    return rd.LinearGaussianKernel(weight(2, 2), jnp.ones(2), tril(2), weight(2, INPUT_DIM))


def _linear_parameters() -> rd.LinearGaussianKernel:
    return rd.LinearGaussianKernel(
        weight(2, 2),
        rd.Frozen(jnp.ones(2)),
        rd.PositiveTril(tril(2)),
        rd.Frozen(weight(2, INPUT_DIM)),
    )


def _varying() -> rd.VaryingLinearGaussianKernel:
    def parameters(u: jax.Array):
        return jnp.cos(u)[:, None] * weight(2, 2), u, rd.Diagonal(rd.Positive(0.5 + u**2))

    return rd.VaryingLinearGaussianKernel(parameters)


def _nonlinear() -> rd.NonlinearGaussianKernel:
    return rd.NonlinearGaussianKernel(
        lambda x: jnp.sin(x[:1]) * x[1:], rd.Diagonal(0.5 * jnp.ones(1))
    )


def _nonlinear_input() -> rd.NonlinearGaussianKernel:
    return rd.NonlinearGaussianKernel(
        lambda x, u: jnp.tanh(x) + u, rd.PositiveTril(tril(INPUT_DIM)), takes_input=True
    )


def _network() -> rd.NonlinearGaussianKernel:
    network = eqx.nn.MLP(2, 3, width_size=4, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    return rd.NonlinearGaussianKernel(network, rd.Diagonal(rd.Positive(jnp.ones(3))))


def _distribution_input() -> rd.DistributionKernel:
    return rd.DistributionKernel(
        lambda x, u: dist.Normal(jnp.sin(x) + u, 0.5 + u**2), takes_input=True
    )


def _normal_mixture(x: jax.Array) -> dist.Distribution:
    weights = dist.Categorical(probs=jnp.array([[0.3, 0.7]]))
    centres = jnp.stack([x - 2.0, x + 1.0], axis=-1)
    return dist.MixtureSameFamily(weights, dist.Normal(centres, jnp.array([[0.5, 1.0]])))


def _multivariate_normal(x: jax.Array) -> dist.Distribution:
    return dist.MultivariateNormal(jnp.sin(x), scale_tril=tril(2))


_of = rd.DistributionKernel

KERNELS: dict[str, KernelCase] = {
    "linear_gaussian": KernelCase(lambda: _linear(2, 3), 2, 3, False),
    "linear_gaussian_scalar": KernelCase(lambda: _linear(2, 1), 2, 1, False),
    "linear_gaussian_large": KernelCase(lambda: _linear(8, 13), 8, 13, False),
    "linear_gaussian_diagonal": KernelCase(_linear_diagonal, 2, 2, False),
    "linear_gaussian_input": KernelCase(_linear_input, 2, 2, True),
    "linear_gaussian_parameters": KernelCase(_linear_parameters, 2, 2, True),
    "varying_linear_gaussian": KernelCase(_varying, 2, 2, True),
    "nonlinear_gaussian": KernelCase(_nonlinear, 2, 1, False),
    "nonlinear_gaussian_input": KernelCase(_nonlinear_input, 2, 2, True),
    "nonlinear_gaussian_network": KernelCase(_network, 2, 3, False),
    "gaussian": KernelCase(
        lambda: _of(lambda x: rd.Gaussian(x, tril(2))), 2, 2, False, "real", "row"
    ),
    "normal_input": KernelCase(_distribution_input, 2, 2, True),
    "multivariate_normal": KernelCase(
        lambda: _of(_multivariate_normal), 2, 2, False, "real", "row"
    ),
    "normal_mixture": KernelCase(lambda: _of(_normal_mixture), 1, 1, False),
    "student_t": KernelCase(lambda: _of(lambda x: dist.StudentT(5.0, x, 0.7)), 1, 1, False),
    "log_normal": KernelCase(
        lambda: _of(lambda x: dist.LogNormal(x, 0.4)), 1, 1, False, "positive"
    ),
    "poisson": KernelCase(lambda: _of(lambda x: dist.Poisson(jnp.exp(x))), 2, 2, False, "counts"),
    "binomial": KernelCase(
        lambda: _of(lambda x: dist.Binomial(10, logits=x)), 1, 1, False, "counts"
    ),
    "negative_binomial": KernelCase(
        lambda: _of(lambda x: dist.NegativeBinomial2(jnp.exp(x), 3.0)), 1, 1, False, "counts"
    ),
}
"""All kinds of kernels, and distributions in a `DistributionKernel`."""


class FamilyCase(NamedTuple):
    """A family, and its properties for the generic tests.

    Attributes:
        make: builds it from a linear-Gaussian model and numbers of states, observations, inputs.
        parallel: whether `infer` has a parallel form.
        has_network: whether it has random weights, and starts from the prior chain of the model
            that `prepare` is given.
        sampled: whether its chains are drawn, and have no marginals in closed form.
        holds_model: whether it keeps a frozen copy of the model.
    """

    make: Callable[[rd.StateSpaceModel, int, int, int], AbstractFactorFamily]
    parallel: bool = False
    has_network: bool = True
    sampled: bool = False
    holds_model: bool = False


def _network_family(kind: Any, **options: Any) -> Callable[..., AbstractFactorFamily]:
    def make(model: rd.StateSpaceModel, state_dim: int, obs_dim: int, input_dim: int) -> Any:
        return kind(jax.random.key(0), state_dim, obs_dim, input_dim=input_dim, **options)

    return make


FAMILIES: dict[str, FamilyCase] = {
    "kalman": FamilyCase(lambda model, *_: rd.KalmanFamily(model), True, False),
    "conjugate": FamilyCase(_network_family(rd.ConjugateFamily), True),
    "gated_scale": FamilyCase(_network_family(rd.GatedFamily, gate="scale")),
    "gated_natural": FamilyCase(_network_family(rd.GatedFamily, gate="natural")),
    "recurrent_free": FamilyCase(_network_family(rd.RecurrentFamily)),
    "recurrent_tied": FamilyCase(_network_family(rd.RecurrentFamily, tied=True)),
    "scan": FamilyCase(_network_family(rd.ScanFamily, hidden=8, width=8), True),
    "nonlinear": FamilyCase(
        _network_family(rd.NonlinearFamily, num_components=1, hidden=8, width=8), sampled=True
    ),
    "nonlinear_mixture": FamilyCase(
        _network_family(rd.NonlinearFamily, num_components=2, hidden=8, width=8), sampled=True
    ),
    "mixture": FamilyCase(
        _network_family(rd.MixtureFamily, num_components=4, hidden=8, width=8), sampled=True
    ),
    "assimilation": FamilyCase(
        lambda model, *_: rd.AssimilationFamily(jax.random.key(0), model),
        has_network=False,
        holds_model=True,
    ),
}
"""All amortised families, in all variants."""


class StreamCase(NamedTuple):
    """A stream, and its properties for the contract tests.

    Attributes:
        make: builds the stream for a linear-Gaussian model without inputs.
        tolerance: allowed difference between results of different chunks; 0 for streams that read
            rows in a loop.
    """

    make: Callable[[rd.StateSpaceModel], rd.online.AbstractStream]
    tolerance: float = 0.0


def _learner(model: rd.StateSpaceModel) -> rd.online.OnlineLearner:
    return rd.online.OnlineLearner(None, model, rd.online.KalmanScore())


STREAMS: dict[str, StreamCase] = {
    "fixed_lag": StreamCase(lambda m: rd.online.FixedLag(rd.KalmanFamily(m), 2), 1e-12),
    "running_posterior": StreamCase(
        lambda m: rd.online.RunningPosterior(
            rd.KalmanFamily(m), m, functionals={"sum": rd.StateSum()}, lag=2
        ),
        1e-12,
    ),
    "weighted_samples": StreamCase(
        lambda m: rd.online.RunningPosterior(
            rd.KalmanFamily(m), m, method=rd.online.WeightedSamples(4, num_replicates=2)
        ),
        1e-12,
    ),
    "online_learner": StreamCase(_learner),
    "lagged_learner": StreamCase(lambda m: rd.online.LaggedLearner(_learner(m), 2)),
    "online_smoother": StreamCase(
        lambda m: rd.online.OnlineSmoother(m, rd.StateSum(), 8, backward=None)
    ),
}
"""All streams."""
