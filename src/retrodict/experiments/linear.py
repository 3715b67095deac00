"""Section 5.1 and appendix D.2: a linear-Gaussian model, smoothed by a family that contains it.

Model: x_0 ~ N(m, s²), x_k = A x_{k-1} + a + N(0, q²), y_k = B x_k + N(0, r²), all scalar. θ is
known; λ, seven parameters with the same meaning, is learned by maximising the closed-form ELBO.

Reproduced: the training curves and the additive errors of the first figure, the marginal errors
and the table of the appendix.

Deviations of the archived runs from the paper's text: the transition has a bias a; prior mean and
all scales start at the truth; λ_60 denotes the parameters after 60 epochs of 64 steps.
Our deviations from those runs: other training series; an epoch is as many steps as would read
each series once, with new batches at each step; parameters are evaluated at the end of each epoch
on all series, where the archive averaged over the epoch, and the best so far are kept.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import retrodict as rd
from retrodict._workspace import Folder
from retrodict.experiments import published
from retrodict.experiments._linear_chapter import NUM_TIMES, Results, Sizes, chapter
from retrodict.experiments._report import Chapter

FULL = Sizes(4096, 64, (60, 80, 100), 5, 20)
QUICK = Sizes(4096, 64, (18, 24, 30), 2, 20)


def num_stages(sizes: Sizes) -> int:
    """Return the number of stages of `run`."""
    return sizes.num_fits + 5


def run(folder: Folder, sizes: Sizes, seed: int) -> Chapter:
    """Fit λ, and compare smoothing under the published and our own λ with the exact smoother."""
    theta = published.linear_theta()
    keys = jax.random.split(jax.random.key(seed), sizes.num_series + 2 * sizes.num_fits)
    data_keys, start_keys, fit_keys = jnp.split(
        keys, [sizes.num_series, sizes.num_series + sizes.num_fits]
    )
    ys = rd.distributed.sharded_vmap(lambda key: theta.simulate(key, NUM_TIMES)[1])(data_keys)
    evidence = float(folder.stage("evidence", lambda: {"mean": _evidence(theta, ys)})["mean"])

    steps_per_epoch = sizes.num_series // sizes.batch_size
    options = {
        "held_out": ys,
        "optimisation": rd.Optimisation(
            batch_size=sizes.batch_size, chunk_size=steps_per_epoch, optimiser=optax.adam(1e-2)
        ),
        "mask": True,
    }
    starts = [_start(key) for key in start_keys]
    fits, seconds = [], {}
    for i, (start, key) in enumerate(zip(starts, fit_keys, strict=True)):
        steps = steps_per_epoch * sizes.epochs[-1]
        fitted, seconds[f"fit {i}"] = folder.fit(
            f"fit {i}", key, start, theta, ys, num_steps=steps, **options
        )
        fits.append(fitted)
    curves = np.stack([NUM_TIMES * fit.held_out for fit in fits])
    best = int(curves.max(axis=1).argmax())

    # The rate is constant: a shorter fit equals the beginning of a longer one.
    stopped = []
    for epoch in sizes.epochs[:-1]:
        fitted, _ = folder.fit(
            f"fit {best}, stopped after {epoch} epochs",
            fit_keys[best],
            starts[best],
            theta,
            ys,
            num_steps=steps_per_epoch * epoch,
            **options,
        )
        stopped.append(fitted)
    stopped.append(fits[best])
    fitted_models = [fit.family.model for fit in stopped]
    kept_epochs = [fit.kept_step // steps_per_epoch for fit in stopped]
    printed = [published.linear_lambda(epoch) for epoch in published.EPOCHS]

    smooth = partial(compare, theta, *published.linear_sequences(sizes.num_evaluated))
    theirs = folder.stage("smoothing with the published parameters", lambda: smooth(printed))
    ours = folder.stage("smoothing with our own parameters", lambda: smooth(fitted_models))
    return chapter(
        Results(sizes, evidence, curves, best, fitted_models, kept_epochs, theirs, ours, seconds)
    )


def _evidence(model: rd.StateSpaceModel, ys: Float[Array, "series time obs"]) -> Array:
    return jnp.mean(
        rd.distributed.sharded_vmap(lambda y: rd.kalman_smoother(model, y).log_evidence)(ys)
    )


def _start(key: Array) -> rd.KalmanFamily:
    """Return the start of the archived fits: the truth, except for A, a and B."""
    mean, std, _, _, noise, _, error = published.archive()["linear"]["theta"]
    weight, bias, slope = np.asarray(jax.random.uniform(key, (3,)))
    return rd.KalmanFamily(
        published.linear_model(mean, std, 2 * weight - 1, bias, noise, slope, error)
    )


def _lengths(num_times: int) -> np.ndarray:
    return np.arange(num_times // 20, num_times + 1, num_times // 20)


def compare(
    theta: rd.StateSpaceModel,
    xs: Float[Array, "series time state"],
    ys: Float[Array, "series time obs"],
    models: Sequence[rd.StateSpaceModel],
) -> dict[str, Any]:
    """Smooth under θ and under each λ; return the errors of θ to the states, and of λ to θ."""
    lengths = jnp.asarray(_lengths(ys.shape[1]))

    def mean_of(model: rd.StateSpaceModel, y: Array) -> Array:
        return rd.kalman_smoother(model, y).chain.marginals().mean[:, 0]

    def sums_of(model: rd.StateSpaceModel, y: Array) -> Array:
        """Compute E[Σ_{k<n} x_k | y_{0:n-1}] at every length n."""

        def one(length: Array) -> Array:
            chain = rd.kalman_smoother(model, y, length=length).chain
            return rd.expectation(chain, rd.StateSum())[0]

        return jax.vmap(one)(lengths)

    means, sums = (rd.distributed.sharded_vmap(fn, (None, 0)) for fn in (mean_of, sums_of))
    exact, exact_sums = means(theta, ys), sums(theta, ys)
    squared = (exact - xs[..., 0]) ** 2
    return {
        "mean_error": squared.mean(axis=1),
        "variance_of_error": squared.var(axis=1),
        "lengths": lengths,
        "additive": jnp.stack([jnp.abs(sums(model, ys) - exact_sums) for model in models]),
        "marginal": jnp.stack([jnp.abs(means(model, ys) - exact) for model in models]),
    }
