"""Program of `test_mesh`: compare results on one device with those on eight simulated devices.

It prints differences as JSON: those of the quick tests, or with the argument `all` those of the
slow ones.
"""

import json
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fit_options import fit_options
from in_memory_store import InMemoryStore
from jax import lax
from linear_models import linear_model

import retrodict as rd
from retrodict._learning.dataset import InMemoryBatches, Minibatch
from retrodict._model import Series, prepare_batch
from retrodict.distributed import MeshLike, as_mesh

jax.config.update("jax_enable_x64", True)


def autoregression() -> rd.StateSpaceModel:
    return linear_model(noise=0.5, error=0.3)


def small_family() -> rd.ConjugateFamily:
    return rd.ConjugateFamily(jax.random.key(2), state_dim=1, obs_dim=1, width=3)


def series(count: int, num_times: int = 6) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), count)
    model = autoregression()
    return np.asarray(jax.vmap(lambda key: model.simulate(key, num_times)[1])(keys))


def difference(one: object, other: object) -> float:
    """Return the largest difference between the arrays of two trees."""
    leaves = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (one, other))
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*leaves, strict=True)]
    return max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in pairs)


def fit_small_family(ys: object, mesh: MeshLike, **options: Any) -> rd.FitResult:
    return rd.fit(
        jax.random.key(1),
        small_family(),
        autoregression(),
        ys,
        num_steps=50,
        mesh=mesh,
        **fit_options(**{"chunk_size": 25, "progress": False, **options}),
    )


def compare_fits(ys: object, mesh: MeshLike, **options: Any) -> dict[str, float]:
    one, several = (fit_small_family(ys, devices, **options) for devices in (None, mesh))
    return {
        "parameters": difference((one.family, one.model), (several.family, several.model)),
        "history": difference(one.history, several.history),
        "grades": difference(one.held_out, several.held_out),
        "restarts": difference(one.restart_scores, several.restart_scores),
    }


def minibatch_series(
    batch: Series, batch_size: int, mesh: MeshLike, axes: Any = (), count: Any = None
) -> Any:
    """Return the series of one minibatch."""
    devices = as_mesh(mesh)
    axes = axes or (() if devices is None else devices.axis_names)
    count = batch.ys.shape[0] if count is None else count
    everything = Minibatch.on_devices(batch, devices, axes, count)
    batches = InMemoryBatches(everything, min(batch_size, count))
    draw = eqx.filter_jit(lambda batches: batches.minibatch(jax.random.key(0), jnp.asarray(3)))
    minibatch = draw(batches)
    return minibatch.series.ys[: minibatch.count]


def compare_minibatches(count: int, batch_size: int) -> float:
    """Compare minibatches on all devices with those on one; shares may be unequal."""
    batch = prepare_batch(series(count), mask=None, inputs=None, length=None, takes_input=False)
    return difference(
        minibatch_series(batch, batch_size, None), minibatch_series(batch, batch_size, "all")
    )


def compare_shared_minibatches() -> float:
    """Compare minibatches of shared series that are padded to the number of devices."""
    mesh, ys = jax.make_mesh((2, 4), ("start", "batch")), series(4)
    shared = rd.data.SharedSeries(ys, mesh=mesh)
    return difference(
        minibatch_series(rd.data.SharedSeries(ys, mesh=None).series, 4, None),
        minibatch_series(shared.series, 4, mesh, ("batch",), shared.num_series),
    )


def num_reductions() -> int:
    """Count exchanges between devices in a gradient step with a loop over time."""
    devices = as_mesh("all")
    if devices is None:
        raise ValueError("This is to be run with several devices.")
    batch = prepare_batch(series(16), mask=None, inputs=None, length=None, takes_input=False)

    def loss(weight: jax.Array, batch: Minibatch) -> jax.Array:
        def one(weight: jax.Array, series: Series) -> jax.Array:
            return lax.scan(lambda x, y: (jnp.tanh(weight @ x + y), None), jnp.ones(1), series.ys)[
                0
            ]

        return batch.total(batch.each(one, weight)[:, 0])

    laid = Minibatch.on_devices(batch, devices, devices.axis_names)
    text = jax.jit(jax.grad(loss)).lower(jnp.eye(1), laid).compile().as_text() or ""
    exchanges = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    return sum(text.count(f" {name}(") for name in exchanges)


def quick_comparisons() -> dict[str, object]:
    ys, family = series(16), small_family()
    inferred = [
        rd.distributed.sharded_vmap(
            lambda family, y: family.infer(y).laws.mean, (None, 0), mesh=mesh
        )
        for mesh in (None, "all")
    ]
    laid = inferred[1](family, ys)
    return {
        "devices": jax.device_count(),
        "fit": compare_fits(ys, "all", batch_size=8),
        "draws": [
            compare_minibatches(16, 8),
            compare_minibatches(13, 5),
            compare_minibatches(3, 64),
            compare_shared_minibatches(),
        ],
        "reductions": num_reductions(),
        "infer": difference(*(infer(family, ys[:5]) for infer in inferred)),
        "shares": [len(laid.sharding.device_set), bool(laid.is_fully_replicated)],
    }


def slow_comparisons() -> dict[str, object]:
    ys, model = series(16), autoregression()
    few_starts = {"batch_size": 4, "restarts": 2, "tournament": 0.5}
    mesh = jax.make_mesh((2, 4), ("start", "batch"))
    shared = rd.data.SharedSeries(ys[:4], mesh=mesh)
    lengths = np.array([6, 5, 4, 6, 3, 6, 2, 6, 6, 5, 6, 6, 4])
    evidence = [
        rd.fit_evidence(
            jax.random.key(0),
            model,
            ys[:13],
            num_steps=20,
            optimiser=optimiser,
            progress=False,
            mesh=devices,
        ).model
        for optimiser in ("lbfgs", None)
        for devices in (None, "all")
    ]
    keys = jax.random.split(jax.random.key(3), 5)

    def smoothed(key: jax.Array, y: jax.Array) -> jax.Array:
        return rd.ffbsi(key, model, y, num_particles=16, num_samples=8).samples

    return {
        "starts": compare_fits(ys, mesh, batch_size=8, restarts=2, tournament=0.5, learn="both"),
        "shared": {
            what: difference(getattr(one, what), getattr(other, what))
            for one, other in [
                (
                    fit_small_family(ys[:4], None, **few_starts),
                    fit_small_family(shared, mesh, **few_starts),
                )
            ]
            for what in ("family", "history", "held_out", "restart_scores")
        },
        "lengths": compare_fits(ys[:13], "all", batch_size=5, length=lengths, learn="both"),
        "windows": compare_fits(ys[:13], "all", batch_size=5, window=3),
        # Two starts on halves of the devices, and then the better one on all of them.
        "stored": compare_fits(
            InMemoryStore(ys[:13], [4, 6, 3], lengths),
            mesh,
            batch_size=9,
            restarts=2,
            tournament=0.5,
        ),
        "evidence": difference(evidence[0], evidence[1]),
        "evidence by steps": difference(evidence[2], evidence[3]),
        "ffbsi": difference(
            *(rd.distributed.sharded_vmap(smoothed, mesh=m)(keys, ys[:5]) for m in (None, mesh))
        ),
    }


if __name__ == "__main__":
    json.dump(slow_comparisons() if sys.argv[1:] == ["all"] else quick_comparisons(), sys.stdout)
