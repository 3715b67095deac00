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
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import retrodict as rd
from retrodict._workspace import Folder, Stage
from retrodict.experiments import published
from retrodict.experiments._drawing import DASHES, INKS, Picture, draw
from retrodict.experiments._measure import power_of_n, simulate
from retrodict.experiments._report import Chapter, Table, make_chapter

NUM_TIMES = 64
"""The length of the training series."""

PARAMETERS = ("prior mean", "prior std", "A", "a", "transition std", "B", "emission std")

Panels = list[tuple[str, tuple[Sequence[int], Stage]]]
"""The stopping points and the smoothing errors of the published parameters and of our fit."""


class Sizes(NamedTuple):
    """The sizes of the experiment.

    Attributes:
        num_series: the number of training series of 64 rows.
        batch_size: the number of series per step.
        epochs: the three stopping points; training ends at the last. An epoch is
            `num_series / batch_size` steps.
        num_fits: the number of fits from different starts.
        num_evaluated: how many of the paper's twenty evaluation sequences are smoothed.
    """

    num_series: int
    batch_size: int
    epochs: tuple[int, int, int]
    num_fits: int
    num_evaluated: int


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
    _, ys = simulate(theta, data_keys, NUM_TIMES)
    evidence = float(folder.stage("evidence", lambda: {"mean": _evidence(theta, ys)})["mean"])
    steps_per_epoch = sizes.num_series // sizes.batch_size
    optimisation = rd.Optimisation(
        batch_size=sizes.batch_size, chunk_size=steps_per_epoch, optimiser=optax.adam(1e-2)
    )

    def fit(name: str, i: int, epochs: int) -> tuple[rd.FitResult, float]:
        return folder.fit(
            name,
            partial(
                rd.fit,
                fit_keys[i],
                _start(start_keys[i]),
                theta,
                ys,
                num_steps=steps_per_epoch * epochs,
                held_out=ys,
                optimisation=optimisation,
                mask=True,
            ),
        )

    *early, last = sizes.epochs
    fits = [fit(f"fit {i}", i, last) for i in range(sizes.num_fits)]
    curves = np.stack([NUM_TIMES * result.held_out for result, _ in fits])
    best = int(curves.max(axis=1).argmax())
    # The rate is constant: a shorter fit equals the beginning of a longer one.
    stopped: list[Any] = [fit(f"fit {best}, stopped after {e} epochs", best, e)[0] for e in early]
    stopped.append(fits[best][0])
    models = [result.family.model for result in stopped]

    sequences = published.linear_sequences(sizes.num_evaluated)
    printed = [published.linear_lambda(epoch) for epoch in published.EPOCHS]
    theirs, ours = (
        folder.stage(f"smoothing with {whose}", lambda each=each: compare(theta, *sequences, each))
        for whose, each in (("the published parameters", printed), ("our own parameters", models))
    )
    return _chapter(
        sizes,
        evidence,
        curves,
        kept_epochs=[result.kept_step // steps_per_epoch for result in stopped],
        parameters=[_parameters(model) for model in models],
        theirs=theirs,
        ours=ours,
        seconds={f"fit {i}": seconds for i, (_, seconds) in enumerate(fits)},
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


def _parameters(model: rd.StateSpaceModel) -> list[float]:
    """Return the values of `PARAMETERS`."""
    prior, transition, emission = (
        getattr(rd.unwrap(model), part) for part in ("prior", "transition", "emission")
    )
    parts = [prior.mean, prior.scale_tril, transition.weight, transition.bias]
    parts += [transition.scale_tril, emission.weight, emission.scale_tril]
    return [float(jnp.ravel(part)[0]) for part in parts]


def compare(
    theta: rd.StateSpaceModel,
    xs: Float[Array, "series time state"],
    ys: Float[Array, "series time obs"],
    models: Sequence[rd.StateSpaceModel],
) -> dict[str, Any]:
    """Smooth under θ and under each λ; return the errors of θ to the states, and of λ to θ."""
    num_times = ys.shape[1]
    lengths = jnp.arange(num_times // 20, num_times + 1, num_times // 20)

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


def _chapter(
    sizes: Sizes,
    evidence: float,
    curves: np.ndarray,
    *,
    kept_epochs: list[int],
    parameters: list[list[float]],
    theirs: Stage,
    ours: Stage,
    seconds: dict[str, float],
) -> Chapter:
    """Return the chapter of section 5.1.

    Args:
        sizes: the sizes of the experiment.
        evidence: the mean log-evidence of the training series.
        curves: the ELBO in nats per series, by fit and epoch.
        kept_epochs: the epochs that the parameters of the best fit at each stop are from.
        parameters: these parameters.
        theirs: the errors of smoothing with the published parameters.
        ours: the errors of smoothing with our own.
        seconds: the duration of each fit.
    """
    archive, epochs, best = published.archive()["linear"], sizes.epochs, curves.max(axis=1).argmax()
    printed = np.array(archive["table"][: sizes.num_evaluated])
    errors = _errors(theirs)
    computed = np.vectorize("{:.6f}".format)(errors)
    agrees = computed == printed
    agreeing, total = int(agrees.sum()), agrees.size
    with_printed = np.vectorize("{} ({})".format)(computed, printed)
    gaps = evidence - curves.max(axis=1)
    lengths = theirs["lengths"]
    last = len(lengths) - len(lengths) // 2
    powers = [power_of_n(lengths, part.mean(axis=0), last) for part in theirs["additive"]]
    panels: Panels = [
        ("published parameters", (published.EPOCHS, theirs)),
        ("our fit", (epochs, ours)),
    ]
    return make_chapter(
        "linear",
        [
            _draw_training(evidence, curves),
            _curve_table(evidence, curves),
            _stop_table(evidence, epochs, curves[best]),
            _draw_additive(panels),
            _additive_table(panels),
            _draw_marginal(panels),
            _error_table(
                "table_published",
                published.EPOCHS,
                np.where(agrees, errors.astype(object), with_printed),
            ),
            _error_table("table_ours", epochs, _errors(ours)),
            Table.of_columns(
                "parameters",
                {
                    "": ("", PARAMETERS),
                    "θ": (".6f", archive["theta"]),
                    "published λ": (".6f", archive["lambda"]["100"]),
                    f"our λ, {epochs[-1]} epochs": (".6f", parameters[-1]),
                },
            ),
        ],
        numbers={
            "evidence_nats_per_series": evidence,
            "entries_as_printed": [agreeing, total],
            "gap_nats_per_series": gaps,
            "best_fit": best,
            "kept_epochs": kept_epochs,
            "power_of_n": powers,
            "parameters": dict(zip(map(str, epochs), parameters, strict=True)),
            "table_from_published_parameters": _numbered(errors),
            "table_from_our_fits": _numbered(_errors(ours)),
        },
        seconds=seconds,
        num_fits=len(curves),
        least_gap=max(gaps.min(), 0.0),
        error=ours["additive"][-1, :, -1].mean(),
        least_power=min(powers),
        largest_power=max(powers),
        epochs=epochs,
    )


def _errors(errors: Stage) -> Float[np.ndarray, "series column"]:
    """Return the columns of the appendix's table: errors of θ, and of λ at each stop."""
    columns = [errors["mean_error"], errors["variance_of_error"], *errors["additive"][:, :, -1]]
    return np.stack(columns, axis=1)


def _numbered(values: np.ndarray) -> list[list[Any]]:
    return [[str(i), *row] for i, row in enumerate(values)]


def _error_table(name: str, epochs: Sequence[int], values: np.ndarray) -> Table:
    titles = ("mean error, θ", "variance of error, θ", *(f"λ after {e} epochs" for e in epochs))
    header = {"sequence": "", **dict.fromkeys(titles, ".6f")}
    return Table(name, header, _numbered(values))


def _curve_table(evidence: float, curves: np.ndarray) -> Table:
    archive = published.archive()["linear"]
    theirs = [max(curve) for curve in archive["elbo_curves"]]
    pairs = list(zip_longest(theirs, curves.max(axis=1), fillvalue=np.nan))
    return Table(
        "training",
        {"": "", "the archived fits": ".6f", "ours": ".6f"},
        [
            ["evidence", archive["evidence"], evidence],
            *([f"best ELBO of fit {i}", *pair] for i, pair in enumerate(pairs)),
        ],
    )


def _stop_table(evidence: float, epochs: Sequence[int], curve: np.ndarray) -> Table:
    archive = published.archive()["linear"]
    elbos = [archive["elbo_at_lambda"][str(epoch)] for epoch in published.EPOCHS]
    return Table.of_columns(
        "stopping_points",
        {
            "stop": ("", [str(i) for i in range(len(epochs))]),
            "published λ": (".1e", [archive["evidence"] - elbo for elbo in elbos]),
            "our best fit": (".1e", [max(evidence - curve[: e + 1].max(), 0.0) for e in epochs]),
        },
    )


def _additive_table(panels: Panels) -> Table:
    columns: dict[str, Any] = {"n": ("", map(str, panels[0][1][1]["lengths"]))}
    for whose, (_, (epochs, errors)) in zip(("published", "ours"), panels, strict=True):
        for epoch, values in zip(epochs, errors["additive"], strict=True):
            columns[f"{whose}, {epoch}"] = (".2g", values.mean(axis=0))
    return Table.of_columns("additive_error", columns)


def _draw_training(evidence: float, curves: np.ndarray) -> Picture:
    archive = published.archive()["linear"]
    # Archived values average over an epoch; ours are at its end, and the first is the start.
    theirs = (np.array(archive["elbo_curves"]), archive["evidence"], 0.5)
    ours = (curves, evidence, 0.0)

    def plot(axis: Any, values: np.ndarray, top: float, first: float, is_gap: bool) -> None:
        epochs = first + np.arange(values.shape[1])
        for i, curve in enumerate(values):
            style = {"color": INKS[i % 5], "ls": DASHES[i % 5], "lw": 0.9, "label": f"fit {i}"}
            if is_gap:
                axis.semilogy(epochs, np.maximum(top - curve, 1e-14), **style)
            else:
                axis.plot(epochs, curve, **style)
        if not is_gap:
            axis.axhline(top, color="black", ls=":", lw=1, label="evidence")
            axis.set_ylim(100, 145)

    return draw(
        "training",
        plot,
        [
            ("the archived fits", (*theirs, False)),
            ("our fits", (*ours, False)),
            ("", (*theirs, True)),
            ("", (*ours, True)),
        ],
        columns=2,
        height=4.0,
        xlabel="epoch",
        ylabels=["ELBO, nats per series", "evidence − ELBO"],
        legend={"ncols": 2},
        sharex="col",
        sharey="row",
    )


def _draw_additive(panels: Panels) -> Picture:
    def plot(axis: Any, stops: Sequence[int], errors: Stage) -> None:
        for i, epoch in enumerate(stops):
            style = {"color": INKS[i], "ls": DASHES[i]}
            axis.loglog(errors["lengths"], errors["additive"][i].T, lw=0.35, **style)
            mean = errors["additive"][i].mean(axis=0)
            axis.loglog(errors["lengths"], mean, lw=1.8, label=f"{epoch} epochs", **style)
        axis.legend(loc="lower right")

    return draw(
        "additive_error",
        plot,
        panels,
        height=2.9,
        xlabel="observations n",
        ylabels=["additive error |E_q Σx − E_p Σx|"],
        sharey=True,
    )


def _draw_marginal(panels: Panels) -> Picture:
    def plot(axis: Any, stops: Sequence[int], errors: Stage) -> None:
        for i, epoch in enumerate(stops):
            mean = errors["marginal"][i].mean(axis=0)
            style = {"color": INKS[i], "ls": DASHES[i], "lw": 0.8, "label": f"{epoch} epochs"}
            axis.semilogy(mean, rasterized=True, **style)

    return draw(
        "marginal_error",
        plot,
        panels,
        height=2.7,
        xlabel="time k",
        ylabels=["|E_q x_k − E_p x_k|"],
        legend={"loc": "outside upper center", "ncols": 3},
        sharey=True,
    )
