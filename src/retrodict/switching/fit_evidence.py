"""TEMPORARY."""

from typing import Any
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from scipy.optimize import minimize
from retrodict._model import unwrap
from retrodict._learning.coordinates import coordinates_in
from retrodict.switching.information import evidence_of
from retrodict.switching.model import prepare_switching_batch


class SwitchingFit(eqx.Module):
    model: Any
    history: Any
    status: str = eqx.field(static=True)
    start_values: Any


def fit_evidence(
    key,
    model,
    ys,
    *,
    num_starts=10,
    num_steps=200,
    mask=None,
    inputs=None,
    length=None,
    progress=True,
):
    batch = prepare_switching_batch(unwrap(model), ys, mask=mask, inputs=inputs, length=length)
    co = coordinates_in(model)

    @jax.jit
    def f(theta):
        def g(theta):
            m = unwrap(co.model_at(theta))
            return -jnp.sum(jax.lax.map(lambda s: evidence_of(m, s), batch))

        return jax.value_and_grad(g)(theta)

    t0 = np.asarray(co.theta())
    best = None
    vals = []
    for i in range(num_starts):
        z = t0 + (
            0
            if i == 0
            else np.asarray(0.7 * jax.random.normal(jax.random.fold_in(key, i), t0.shape))
        )
        hist = []

        def fun(t):
            v, g = f(jnp.asarray(t))
            v = float(v)
            g = np.asarray(g, float)
            if not np.isfinite(v):
                v = 1e10
                g = np.zeros_like(g)
            return v, g

        r = minimize(
            fun,
            z,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": num_steps},
            callback=lambda t: hist.append(-fun(t)[0]),
        )
        vals.append(-r.fun)
        if best is None or -r.fun > best[0]:
            best = (-r.fun, r.x, hist, r.success)
    return SwitchingFit(
        co.model_at(jnp.asarray(best[1])),
        np.asarray(best[2]),
        "converged" if best[3] else "finished",
        np.asarray(vals),
    )
