"""The driver: a model and data to a posterior, by the simplest method that stands up to a check."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jaxtyping import Array, Float

from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._exact import kalman_smoother
from retrodict._expectations import BackwardSampling, ClosedForm, Marginals, marginals
from retrodict._families import AbstractFamily
from retrodict._learning import batch_for, take
from retrodict._learning import num_series as count_series
from retrodict._linearised import LinearisedPosterior, check_moments, iterated_smoother
from retrodict._model import StateSpaceModel, check_densities, is_linear_gaussian
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._smooth.amortise import train_family
from retrodict._smooth.check import Grade, Witness, grade, pick, run_references
from retrodict._types import PRNGKey
from retrodict._validate import as_real_array, check_count, check_key
from retrodict.bounds import options_of

Method = Literal["exact", "linearised", "amortised"]

METHODS = ("auto", "exact", "linearised", "amortised")

MOST_DRAWN = 2**25
"""Numbers drawn at once for quantiles, which bounds the paths of long series."""


class Smoothed(eqx.Module):
    """A posterior, and why it was computed as it was.

    Given a batch, all arrays have a leading axis `batch`. In rows that do not exist, moments are
    those of the last row that does.

    Attributes:
        mean: of the states given the whole series.
        covariance: their covariances at each time.
        mean_standard_error: that of `mean` as a mean over drawn paths; zero in closed form. It says
            nothing of how far the chain is from the posterior.
        covariance_standard_error: that of `covariance` likewise.
        chain: the law of whole paths, to draw from or to take other expectations under; of a batch
            use `jax.tree.map` or `equinox.filter_vmap`.
        method: `"exact"`, `"linearised"` or `"amortised"`.
        trustworthy: whether the answer is exact, or agrees with a reference that was computed
            independently of it: a grid, or tempered particles (see `check_posterior`). False if it
            disagrees, if the reference failed, and if nothing was checked.
        reason: why, with the figures that decided. It also names what is wrong where no method
            passed.
        family: the family that was trained or given, to be saved, and to be passed as `family` with
            new series of the same model; `None` if there is none.
        model: the model, as it was given.
        draw_key: the key of the draws that `quantile` takes; `None` for `jax.random.key(0)`.
    """

    mean: Float[Array, "... time state"]
    covariance: Float[Array, "... time state state"]
    mean_standard_error: Float[Array, "... time state"]
    covariance_standard_error: Float[Array, "... time state state"]
    chain: AbstractBackwardChain
    method: Method = eqx.field(static=True)
    reason: str = eqx.field(static=True)
    family: AbstractFamily | None
    model: StateSpaceModel
    trustworthy: bool = eqx.field(static=True)
    draw_key: PRNGKey | None = None

    def quantile(
        self, probabilities: Any, *, num_samples: int | None = None
    ) -> Float[Array, "... time state"]:
        """Return quantiles of the smoothed law of each coordinate at each time.

        They are exact if the chain is linear Gaussian, else quantiles of paths drawn from the
        chain: a law with two modes has no use for its mean and covariance. The quantile of N draws
        at level p is the exact one at some level within p ± 2 sqrt(p (1 − p) / N), 95 times in 100.
        The same call has the same answer.

        Args:
            probabilities: one probability or an array of them, strictly between 0 and 1.
            num_samples: how many paths to draw; by default 1,000, and fewer of long series, 200 at
                least.

        Returns:
            Quantiles, with the axes of `probabilities` first.
        """
        levels = as_real_array(probabilities, "probabilities").astype(self.mean.dtype)
        if not bool(jnp.all((levels > 0) & (levels < 1))):
            raise ValueError(
                f"probabilities must lie strictly between 0 and 1, got {probabilities}."
            )
        ps = levels.reshape(-1)
        if isinstance(self.chain, LinearGaussianChain):
            std = jnp.sqrt(jnp.diagonal(self.covariance, axis1=-2, axis2=-1))
            reach = ndtri(ps).reshape(-1, *[1] * self.mean.ndim)
            found = self.mean[None] + reach * std[None]
        else:
            size = self.mean.shape[-2] * self.mean.shape[-1]
            count = max(200, min(1000, MOST_DRAWN // size)) if num_samples is None else num_samples
            found = self._of_paths(ps, check_count(count, "num_samples"))
        return found.reshape(*levels.shape, *self.mean.shape)

    def _of_paths(self, ps: Array, num_samples: int) -> Array:
        key = jax.random.key(0) if self.draw_key is None else self.draw_key
        if self.mean.ndim == 2:
            return _quantiles(self.chain, key, ps, num_samples)
        # One chain after another: the paths of all of them at once may not fit into memory.
        found = [
            _quantiles(pick(self.chain, i), jax.random.fold_in(key, i), ps, num_samples)
            for i in range(self.mean.shape[0])
        ]
        return jnp.stack(found, axis=1)

    def __repr__(self) -> str:
        trust = "" if self.trustworthy else ", not trustworthy"
        return f"Smoothed(mean of shape {self.mean.shape}, {self.method}{trust}: {self.reason})"


@eqx.filter_jit
def _quantiles(chain: AbstractBackwardChain, key: PRNGKey, ps: Array, num_samples: int) -> Array:
    return jnp.quantile(chain.sample(key, num_samples), ps, axis=0)


class Answer(NamedTuple):
    """The chains of a batch, with a leading axis, and how they were found."""

    chains: AbstractBackwardChain
    method: Method
    reason: str
    trustworthy: bool
    family: AbstractFamily | None = None


class Request(NamedTuple):
    """What is smoothed, and what a training may cost.

    Attributes:
        model: an unwrapped model.
        batch: the series, with a leading axis.
        family: a family to use instead of training one.
        num_steps: steps of training.
        num_series: series to train on.
        check: whether to grade the answer.
        progress: as in `fit`.
    """

    model: StateSpaceModel
    batch: Series
    family: AbstractFamily | None
    num_steps: int
    num_series: int
    check: bool
    progress: bool | Callable[[int, float], None]


def smooth(
    model: StateSpaceModel,
    ys: Any,
    *,
    key: PRNGKey | None = None,
    method: Literal["auto"] | Method = "auto",
    family: AbstractFamily | None = None,
    num_steps: int = 600,
    num_series: int = 1024,
    num_samples: int = 256,
    check: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    progress: bool | Callable[[int, float], None] = True,
) -> Smoothed:
    """Smooths one series or a batch of them by the simplest method that stands up to a check.

    1. A linear-Gaussian model is smoothed exactly, by `kalman_smoother`.
    2. Otherwise `iterated_smoother` is run and compared by `check_posterior` with a reference that
       is computed independently of it: a grid for one or two states, or tempered particles. If it
       passes, it is the answer.
    3. Otherwise a `MixtureFamily` and a `NonlinearFamily` are trained on series that the model
       simulates, and the better one is checked in the same way. Moments are then means over drawn
       paths, with standard errors. Should its ELBO on the given series be below that of step 2,
       and step 2 have lost no mode that step 3 has, then that one is the answer after all.

    `trustworthy` of the result is whether the answer passed. If the reference itself fails, the
    answer has not passed: `reason` then contains "not checked". There is one decision for a batch,
    that of its worst series; of large batches eight are checked.

    The training is on at most 64 rows: if the state does not return to where it was, as that of a
    random walk, long series lead the family to where it has not been, which `reason` shows. Not
    inside `jax.jit`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=50)
        >>> rd.smooth(model, ys)
        Smoothed(mean of shape (50, 1), exact: The model is linear and Gaussian.)

    Args:
        model: the model.
        ys: observations, of shape `(time, obs)` or `(batch, time, obs)`; NaN where missing.
        key: a typed key for particles, training and drawn paths; `jax.random.key(0)` by default, so
            that the same call has the same answer.
        method: `"auto"`, or the one to use: `"exact"`, `"linearised"` or `"amortised"`.
        family: a family that was trained for this model, as the `family` of an earlier result:
            nothing is trained, and the method is `"amortised"`.
        num_steps: steps of training of each of the two families.
        num_series: how many series to simulate for training.
        num_samples: paths over which moments are taken where they have no closed form, for each
            component of the last filtering law; a multiple of 16, and 32 at least.
        check: whether to check the answer by `check_posterior`, which costs a reference per series.
            Without a `method` or a `family` the check decides, and cannot be left out. An answer
            that is not checked is not `trustworthy`.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(time, input)` or `(batch, time, input)`.
        length: how many rows exist, one integer a series or one for all.
        progress: whether to show the progress of each of the two fits, or a function as in `fit`.

    Returns:
        Moments, the chain, the method, whether to trust them, and the reason.

    Raises:
        TypeError: if an argument is of the wrong kind, or the method asks more of the model than it
            has: linear-Gaussian kernels, or means and covariances.
        ValueError: if shapes do not fit, or the model has no density where one is needed.
    """
    if key is None:
        key = jax.random.key(0)
    check_key(key, "smooth")
    _check_choice(model, method, family)
    estimator = BackwardSampling(num_samples, noise="stratified", by_component=True)
    if estimator.num_replicates < 2:
        raise ValueError(
            f"smooth expects num_samples of 32 or more, got {num_samples}: a standard error needs"
            " two groups of 16 paths."
        )
    plain = unwrap(model)
    batch = batch_for(plain, ys, mask=mask, inputs=inputs, length=length, owner="smooth")
    request = Request(
        plain,
        batch,
        family,
        check_count(num_steps, "num_steps"),
        check_count(num_series, "num_series"),
        check,
        progress,
    )
    answer_key, draw_key = jax.random.split(key)
    answer = _answer(answer_key, request, method)
    found = _marginals(draw_key, answer.chains, estimator, count_series(batch))
    chains = answer.chains
    if jnp.ndim(ys) == 2:
        found, chains = pick((found, chains), 0)
    return Smoothed(
        found.mean,
        found.covariance,
        found.mean_standard_error,
        found.covariance_standard_error,
        chains,
        answer.method,
        answer.reason,
        answer.family,
        model,
        answer.trustworthy,
        jax.random.fold_in(draw_key, 2**31),
    )


def _check_choice(model: Any, method: Any, family: Any) -> None:
    """Refuses what is no model, no method or no family, and two wishes at once."""
    if not isinstance(model, StateSpaceModel):
        raise TypeError(f"smooth expects a StateSpaceModel, got {type(model).__name__}.")
    if method not in METHODS:
        raise ValueError(f"smooth expects a method of {METHODS}, got {method!r}.")
    if method == "exact" and not is_linear_gaussian(unwrap(model)):
        raise TypeError(
            "smooth with method='exact' expects a Gaussian prior and linear-Gaussian kernels, got"
            f" {_kinds(unwrap(model))}. Leave the method out, or use grid_smoother (state dimension"
            " 1 or 2)."
        )
    if family is None:
        return
    if not isinstance(family, AbstractFamily):
        hint = " Pass its .family." if hasattr(family, "family") else ""
        raise TypeError(f"smooth expects a family, got {type(family).__name__}.{hint}")
    if method not in ("auto", "amortised"):
        raise ValueError(
            f"smooth was given a family, which the method {method!r} has no use for. Leave one of"
            " the two out."
        )


def _kinds(model: StateSpaceModel) -> str:
    parts = (model.prior, model.transition, model.emission)
    return ", ".join(type(part).__name__ for part in parts)


def _answer(key: PRNGKey, request: Request, method: str) -> Answer:
    """The chains by the method that was asked for, or by the first that is good enough."""
    model, batch, prelude = request.model, request.batch, ""
    if request.family is not None:
        method = "amortised"
    if method in ("auto", "exact") and is_linear_gaussian(model):
        found = _over_series(lambda ys, **rest: kalman_smoother(model, ys, **rest), batch)
        return Answer(found.chain, "exact", "The model is linear and Gaussian.", True)
    if method == "auto" and not request.check:
        raise ValueError(
            "smooth chooses by a check: with check=False pass method='linearised' or 'amortised',"
            " or a family that was trained before."
        )
    if method == "auto" and not _has_moments(model, batch):
        method, prelude = "amortised", "The model has no moments to linearise by. "
    lacking = _lacking_density(model)
    if lacking is not None:
        # Neither particles nor a family can do without: there is nothing to grade by or to turn to.
        if method == "amortised":
            raise ValueError(lacking)
        posterior = _linearised(model, batch)
        return Answer(posterior.chain, "linearised", f"{_status(posterior)}. {lacking}", False)
    witness_key, linear_key, key = jax.random.split(key, 3)
    witnesses = run_references(witness_key, model, batch) if request.check else []
    if method == "amortised":
        answer = _amortised(key, request, witnesses)[0]
        return answer._replace(reason=prelude + answer.reason)
    posterior = _linearised(model, batch)
    if not witnesses:
        return Answer(posterior.chain, "linearised", f"{_status(posterior)}.", False)
    graded = grade(linear_key, model, posterior.chain, witnesses)
    reason = _verdict("The iterated smoother", graded)
    linearised = Answer(posterior.chain, "linearised", reason, graded.passed)
    if method == "linearised" or graded.passed:
        return linearised
    answer, trained = _amortised(key, request, witnesses)
    refused = f"{linearised.reason} {answer.reason}"
    if trained is None or _stands(trained, graded):
        return answer._replace(reason=refused)
    reason = (
        f"{refused} Its ELBO is {graded.elbo - trained.elbo:.1f} nats below that of the iterated"
        " smoother, which is therefore kept."
    )
    return linearised._replace(reason=reason, family=answer.family)


def _stands(trained: Grade, linearised: Grade) -> bool:
    """Whether a family is at least as good as the smoother that it is to replace."""
    if not math.isfinite(trained.elbo):
        return False
    if trained.passed:
        return True
    # A chain that lost a mode may have the larger ELBO of two, and be the worse one.
    found_modes = linearised.modes_lost and not trained.modes_lost
    return found_modes or trained.elbo >= linearised.elbo


def _amortised(
    key: PRNGKey, request: Request, witnesses: list[Witness]
) -> tuple[Answer, Grade | None]:
    """The chains of a family, trained if none was given, and their grade if there is any."""
    train_key, key = jax.random.split(key)
    family, story = request.family, "The family was given"
    if family is None:
        family, story = train_family(
            train_key,
            request.model,
            request.batch,
            num_steps=request.num_steps,
            num_series=request.num_series,
            progress=request.progress,
        )
    chains = _over_series(family.infer, request.batch)
    if not witnesses:
        return Answer(chains, "amortised", f"{story}, and was not checked.", False, family), None
    graded = grade(key, request.model, chains, witnesses)
    reason = f"{story}. {_verdict('It', graded)}"
    return Answer(chains, "amortised", reason, graded.passed, family), graded


def _linearised(model: StateSpaceModel, batch: Series) -> LinearisedPosterior:
    return _over_series(lambda ys, **rest: iterated_smoother(model, ys, **rest), batch)


def _over_series(verb: Callable[..., Any], batch: Series) -> Any:
    """A verb of one series over a batch of them."""
    return eqx.filter_vmap(lambda series: verb(series.ys, **options_of(series)))(batch)


def _marginals(
    key: PRNGKey, chains: AbstractBackwardChain, estimator: BackwardSampling, count: int
) -> Marginals:
    """The moments of the chains of a batch."""
    if isinstance(chains, LinearGaussianChain):
        return eqx.filter_vmap(lambda chain: marginals(chain, estimator=ClosedForm()))(chains)
    # One chain after another: the paths of all of them at once may not fit into memory.
    found = [
        marginals(pick(chains, i), estimator=estimator, key=jax.random.fold_in(key, i))
        for i in range(count)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def _verdict(name: str, graded: Grade) -> str:
    """Whether a chain passed, and with what figures."""
    if graded.objections:
        kinds = ", ".join(graded.objections)
        return f"{name} does not pass check_posterior ({kinds}): {graded.figures}."
    if graded.unchecked is not None:
        unchecked = graded.unchecked.removeprefix("not checked: ")
        return f"{name} was not checked: {unchecked}. Figures: {graded.figures}."
    return f"{name} passes check_posterior: {graded.figures}."


def _status(posterior: LinearisedPosterior) -> str:
    """What the smoother says of itself, where nothing else can be asked."""
    codes = jnp.atleast_1d(posterior.code)
    worst = pick(posterior, int(jnp.argmax(codes != 0)))
    return f"The iterated smoother calls itself {worst.status!r}, and was not checked otherwise"


def _lacking_density(model: StateSpaceModel) -> str | None:
    """Which part of the model has no density, in words; `None` if all have one."""
    try:
        check_densities(model, "A check by particles or a family")
    except ValueError as error:
        return str(error)
    return None


def _has_moments(model: StateSpaceModel, batch: Series) -> bool:
    """Whether the model says what its means and covariances are, and they are finite."""
    try:
        check_moments(model, take(batch, 0))
    except (TypeError, ValueError):
        return False
    return True
