"""Training steps, inference and the first step of `fit` of the amortised families.

A training step is the ELBO of 64 series and its gradient in the family. Its floor is the time of
the same network and emission terms, evaluated and differentiated at all n x 64 points at once,
without the recurrence.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import retrodict as rd
from accuracy import FAMILIES as LINEAR_FAMILIES
from accuracy import NONLINEAR, network_model, simulate
from kalman import problem, retrodict_model, tanh_model
from measure import Prepared, Task, prepared
from smoothers import with_cuthbert

FAMILIES = {**LINEAR_FAMILIES, "nonlinear": rd.NonlinearFamily, "mixture": rd.MixtureFamily}


def prepare(task: Task) -> Prepared:
    """Return the call of a task."""
    call = {"training": _training, "inference": _inference, "fit": _fit}[task.what](task)
    return prepared(lambda: jax.block_until_ready(call()))


def _training(task: Task) -> Callable[[], Any]:
    """Return a step, with 20-point quadrature at d = 1 and one draw of the emission term else."""
    model = NONLINEAR if task.state_dim == 1 else network_model(task.state_dim)
    ys = simulate(model, 0, task.num_series, task.num_times)[1]
    if task.library == "floor":
        return floor_step(task.option, model, ys, 20 if task.state_dim == 1 else 1)
    estimator = rd.Quadrature(20) if task.state_dim == 1 else rd.RaoBlackwellised(1)
    return training_step(task.option, model, ys, estimator)


def _inference(task: Task) -> Callable[[], Any]:
    """Return the smoothing of one series, or cuthbert's exact FFBSi with 1,000 particles."""
    if task.library == "cuthbert":
        return with_cuthbert("exact", 1, task.num_times)
    ys = simulate(NONLINEAR, 0, 1, task.num_times)[1][0]
    family = FAMILIES[task.option](jax.random.key(0), 1, 1).prepare(NONLINEAR, ys)
    # A trained family is a constant of the program that smooths with it.
    infer = jax.jit(lambda y: family.infer(y, mask=True).marginals())
    return lambda: infer(ys)


def _fit(task: Task) -> Callable[[], Any]:
    """Return a whole `fit` of one step, with the evaluations before and after it."""
    d, m = task.state_dim, task.obs_dim
    if task.option == "kalman":
        model = retrodict_model(problem(Task("retrodict", "smoother", d, m, 2)))
        family = rd.KalmanFamily(model)
    else:
        model, family = tanh_model(d, m), FAMILIES[task.option](jax.random.key(0), d, m)
    ys = simulate(model, 0, task.num_series, task.num_times)[1]

    def call() -> Any:
        # A call of the compiled program takes a chunk of steps.
        one = rd.Optimisation(chunk_size=1)
        key = jax.random.key(1)
        return rd.fit(
            key, family, model, ys, num_steps=1, optimisation=one, progress=False
        ).held_out

    return call


def training_step(name: str, model: Any, ys: Any, estimator: Any) -> Callable[[], Any]:
    """Return the ELBO of a batch and its gradient in the family."""
    d, m = model.state_dim, ys.shape[-1]
    family = FAMILIES[name](jax.random.key(0), d, m).prepare(model, ys)
    parameters, fixed = eqx.partition(family, eqx.is_inexact_array)

    @jax.jit
    def step(parameters: Any, ys: Any, key: Any) -> Any:
        def loss(parameters: Any) -> Any:
            family = eqx.combine(parameters, fixed)

            def one(y: Any, key: Any) -> Any:
                chain = family.infer(y, mask=True)
                return rd.elbo(model, chain, y, estimator=estimator, key=key, mask=True)

            return -jnp.mean(jax.vmap(one)(ys, jax.random.split(key, ys.shape[0])))

        return jax.value_and_grad(loss)(parameters)

    return lambda: step(parameters, ys, jax.random.key(0))


def floor_step(name: str, model: Any, ys: Any, nodes: int) -> Callable[[], Any]:
    """Return the networks and the emission terms at all points at once, with their gradient."""
    d, m = model.state_dim, ys.shape[-1]
    family = FAMILIES[name](jax.random.key(0), d, m)
    networks = [family.law, family.backward] if name == "recurrent" else [family.network]
    sizes = [network.in_size for network in networks]
    cell = getattr(family, "cell", None)
    parameters, fixed = eqx.partition((networks, cell), eqx.is_inexact_array)
    points = ys.reshape(-1, m)
    features = [
        jax.random.normal(jax.random.key(i), (points.shape[0], size))
        for i, size in enumerate(sizes)
    ]
    noise = jax.random.normal(jax.random.key(9), (nodes, d))

    @jax.jit
    def step(parameters: Any, points: Any, features: Any) -> Any:
        def loss(parameters: Any) -> Any:
            networks, cell = eqx.combine(parameters, fixed)
            outs = [jax.vmap(net)(x) for net, x in zip(networks, features, strict=True)]
            total = sum(jnp.sum(jnp.sin(out)) for out in outs[1:])
            if cell is not None:
                row = jnp.zeros((points.shape[0], cell.input_size)).at[:, :m].set(points)
                total = total + jnp.sum(jax.vmap(cell)(row, features[0][:, : cell.hidden_size]))
            mean, scale = outs[0][:, :d], jax.nn.softplus(outs[0][:, d : 2 * d])

            def emission(mean: Any, scale: Any, y: Any) -> Any:
                xs = mean + scale * noise
                return jnp.mean(jax.vmap(lambda x: model.emission.log_prob(x, y))(xs))

            return total + jnp.sum(jax.vmap(emission)(mean, scale, points))

        return jax.value_and_grad(loss)(parameters)

    return lambda: step(parameters, points, features)
