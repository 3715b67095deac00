"""What one device finds and what eight find, in a process that has eight: run by `test_devices`.

Prints as JSON how far they are apart.
"""

import json
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd

jax.config.update("jax_enable_x64", True)


def model_of_levels() -> rd.StateSpaceModel:
    return rd.StateSpaceModel(
        prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), 0.5 * jnp.eye(1)),
        emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), 0.3 * jnp.eye(1)),
    )


def series(count: int, num_times: int = 6) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), count)
    model = model_of_levels()
    return np.asarray(jax.vmap(lambda key: model.simulate(key, num_times)[1])(keys))


def apart(one: object, other: object) -> float:
    """The largest difference between the arrays of two trees."""
    leaves = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (one, other))
    pairs = zip(*leaves, strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0.0)) for a, b in pairs)


def fitted(ys: np.ndarray, mesh: object, **options: object) -> rd.FitResult:
    return rd.fit(
        jax.random.key(1),
        rd.ConjugateFamily(jax.random.key(2), state_dim=1, obs_dim=1, width=3),
        model_of_levels(),
        ys,
        num_steps=50,
        mesh=mesh,
        **{"chunk_size": 25, "progress": False, **options},
    )


def fits(ys: np.ndarray, mesh: object, **options: object) -> dict[str, float]:
    one, several = (fitted(ys, devices, learn="both", **options) for devices in (None, mesh))
    learned = [(found.family, found.model) for found in (one, several)]
    return {
        "parameters": apart(*learned),
        "history": apart(one.history, several.history),
        "grades": apart(one.held_out, several.held_out),
        "restarts": apart(one.restart_scores, several.restart_scores),
    }


def main() -> dict[str, object]:
    ys, model = series(16), model_of_levels()
    mesh = jax.make_mesh((2, 4), ("start", "batch"))
    lengths = np.array([6, 5, 4, 6, 3, 6, 2, 6, 6, 5, 6, 6, 4])
    evidence = [
        rd.fit_evidence(
            jax.random.key(0),
            model,
            ys[:13],
            optimiser="lbfgs",
            num_steps=20,
            progress=False,
            mesh=devices,
        )
        for devices in (None, "all")
    ]

    def smoothed(key: jax.Array, y: jax.Array) -> jax.Array:
        return rd.ffbsi(key, model, y, num_particles=16, num_samples=8).samples

    family = rd.ConjugateFamily(jax.random.key(2), state_dim=1, obs_dim=1, width=3)
    keys = jax.random.split(jax.random.key(3), 5)

    def inferred(family: rd.AbstractFamily, y: jax.Array) -> object:
        return family.infer(y).laws

    laid = rd.sharded_vmap(inferred, (None, 0))(family, ys)
    return {
        "devices": jax.device_count(),
        "equal shares, starts spread": fits(ys, mesh, batch_size=8, restarts=2, tournament=0.5),
        "unequal shares and lengths": fits(ys[:13], "all", batch_size=5, length=lengths),
        "evidence": apart(evidence[0].model, evidence[1].model),
        "ffbsi": apart(*(rd.sharded_vmap(smoothed, mesh=m)(keys, ys[:5]) for m in (None, "all"))),
        "infer": apart(
            *(rd.sharded_vmap(inferred, (None, 0), mesh=m)(family, ys[:5]) for m in (None, mesh))
        ),
        "shards": len(laid.mean.sharding.device_set),
        "is whole": bool(laid.mean.is_fully_replicated),
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
