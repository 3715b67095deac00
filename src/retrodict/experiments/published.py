"""The printed tables of the paper, and models, sequences and fits of its authors' public archive.

The paper is Chagneux, Gassiat, Gloaguen and Le Corff (2022). `published.json` holds the printed
tables and, from the archived runs behind them, parameters, training curves and error curves. The
evaluation sequences are simulated here again and equal the archived ones to the last digit.
"""

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import retrodict as rd

EPOCHS = (60, 80, 100)
"""The stopping points of section 5.1."""


@cache
def archive() -> dict[str, Any]:
    """Return the contents of `published.json`: printed tables as strings, the rest as numbers."""
    return json.loads(files("retrodict.experiments").joinpath("published.json").read_text("utf-8"))


def linear_model(
    prior_mean: float,
    prior_std: float,
    weight: float,
    bias: float,
    transition_std: float,
    slope: float,
    emission_std: float,
) -> rd.StateSpaceModel:
    """Return the model of section 5.1, with one state and one observation.

    x_0 ~ N(m, s²), x_k = A x_{k-1} + a + N(0, q²), y_k = B x_k + N(0, r²). The emission has no
    bias, and none is learned.
    """

    def matrix(value: float) -> Array:
        return jnp.array([[value]])

    return rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.array([prior_mean]), matrix(prior_std)),
        transition=rd.LinearGaussianKernel(
            matrix(weight), jnp.array([bias]), matrix(transition_std)
        ),
        emission=rd.LinearGaussianKernel(
            matrix(slope), rd.Frozen(jnp.zeros(1)), matrix(emission_std)
        ),
    )


def linear_theta() -> rd.StateSpaceModel:
    """Return θ of section 5.1. Its transition has a bias, which the paper does not mention."""
    return linear_model(*archive()["linear"]["theta"])


def linear_lambda(epoch: int) -> rd.StateSpaceModel:
    """Return λ of the best archived fit of section 5.1 after 60, 80 or 100 epochs."""
    return linear_model(*archive()["linear"]["lambda"][str(epoch)])


def nonlinear_theta() -> rd.StateSpaceModel:
    """Return θ of section 5.2.

    x_k = A x_{k-1} + a + N(0, 0.1²), y_k = cos(tanh(w x_k)) + N(0, 0.001).
    """
    parameters = archive()["nonlinear"]
    weight, bias, noise = parameters["transition"]
    slope = parameters["slope"]
    return rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.zeros(1), parameters["prior_std"] * jnp.eye(1)),
        transition=rd.LinearGaussianKernel(
            weight * jnp.eye(1), jnp.array([bias]), noise * jnp.eye(1)
        ),
        emission=rd.NonlinearGaussianKernel(
            lambda x: jnp.cos(jnp.tanh(slope * x)),
            rd.Diagonal(jnp.array([parameters["emission_std"]])),
        ),
    )


def linear_sequences(
    num_series: int = 20,
) -> tuple[Float[Array, "series time state"], Float[Array, "series time obs"]]:
    """Return states and observations of the evaluation sequences of section 5.1, 2000 rows each."""
    return _sequences(linear_theta(), jax.random.PRNGKey(0), 20, 2000, num_series)


def nonlinear_sequences() -> tuple[
    Float[Array, "series time state"], Float[Array, "series time obs"]
]:
    """Return states and observations of the five sequences of section 5.2, 500 rows each."""
    with jax.threefry_partitionable(False):
        key = jax.random.split(jax.random.PRNGKey(0), 2)[0]
    return _sequences(nonlinear_theta(), key, 5, 500, 5)


def _sequences(
    model: rd.StateSpaceModel, key: Array, num_drawn: int, num_times: int, num_kept: int
) -> tuple[Array, Array]:
    """Draw the sequences as the archived code did.

    Each of 2n keys gives one standard normal: the first n are the noise of the states, the last n
    that of the observations. The layout of random bits is that of the JAX version used then.
    """
    with jax.threefry_partitionable(False):
        keys = jax.random.split(key, num_drawn + 1)[1 : num_kept + 1]
        noise = jnp.stack(
            [
                jax.vmap(lambda k: jax.random.normal(k, (1,)))(jax.random.split(k, 2 * num_times))
                for k in keys
            ]
        )
    model = rd.unwrap(model)

    def one(noise: Float[Array, "draw 1"]) -> tuple[Array, Array]:
        def move(x: Array, draw: Array) -> tuple[Array, Array]:
            law = model.transition.law(x)
            x = law.mean + law.scale_tril[0] * draw
            return x, x

        first = model.prior.mean + model.prior.scale_tril[0] * noise[0]
        _, rest = jax.lax.scan(move, first, noise[1:num_times])
        xs = jnp.concatenate([first[None], rest])

        def observe(x: Array, draw: Array) -> Array:
            law = model.emission.law(x)
            return law.mean + law.std * draw

        return xs, jax.vmap(observe)(xs, noise[num_times:])

    return jax.vmap(one)(noise)


def archived_chain(name: str, ys: Float[Array, "time 1"]) -> rd.LinearGaussianChain:
    """Return the posterior of one series by the authors' conjugate or gated network.

    The filtering laws come from a recursion: predict with the fitted transition, then update by
    the network. The backward kernels are those of the fitted transition. The gate of the gated
    network is a linear map to one number for mean and scale: as in the archive, not as printed.
    """
    archived = archive()["nonlinear"][name]
    prior_mean, prior_std, weight, bias, noise = archived["law"]
    update = _conjugate_update(archived) if name == "conjugate" else _gated_update(archived)

    def step(filtered: tuple[Array, Array], y: Array) -> tuple[Any, Any]:
        mean, std = filtered
        predicted = weight * mean + bias, jnp.sqrt((weight * std) ** 2 + noise**2)
        updated = update(y[0], *predicted)
        return updated, updated

    first = update(ys[0, 0], jnp.asarray(prior_mean), jnp.asarray(prior_std))
    _, rest = jax.lax.scan(step, first, ys[1:])
    means, stds = (jnp.concatenate([a[None], b]) for a, b in zip(first, rest, strict=True))
    covariance = stds[:-1] ** 2
    gains = covariance * weight / (weight**2 * covariance + noise**2)
    offsets = means[:-1] - gains * (weight * means[:-1] + bias)
    scales = jnp.sqrt(covariance * (1 - gains * weight))
    return rd.LinearGaussianChain.from_arrays(
        means[:, None],
        jnp.abs(stds)[:, None, None],
        gains[:, None, None],
        offsets[:, None],
        scales[:, None, None],
    )


def _network(layers: list, x: Array) -> Array:
    *hidden, last = [(jnp.array(weight), jnp.array(bias)) for weight, bias in layers]
    for weight, bias in hidden:
        x = jnp.tanh(x @ weight + bias)
    return x @ last[0] + last[1]


def _conjugate_update(archived: dict[str, Any]) -> Callable[..., tuple[Array, Array]]:
    def update(y: Array, mean: Array, std: Array) -> tuple[Array, Array]:
        first, second = _network(archived["network"], y[None])
        precision = 1 / std**2 + jax.nn.softplus(second)
        return (mean / std**2 + first) / precision, 1 / jnp.sqrt(precision)

    return update


def _gated_update(archived: dict[str, Any]) -> Callable[..., tuple[Array, Array]]:
    weight, bias = (jnp.array(part) for part in archived["gate"])

    def update(y: Array, mean: Array, std: Array) -> tuple[Array, Array]:
        predicted = jnp.stack([mean, std])
        features = jnp.concatenate([y[None], predicted])
        gate = (features @ weight + bias)[0]
        mixed = gate * predicted + (1 - gate) * _network(archived["network"], features)
        # The sign of a scale is arbitrary: only its square matters.
        return mixed[0], jnp.abs(mixed[1])

    return update
