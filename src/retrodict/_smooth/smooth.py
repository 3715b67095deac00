"""The driver `smooth`: choose the simplest method that passes a check."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._exact import check_values, smooth_series
from retrodict._expectations import BackwardSampling, ClosedForm, Marginals, marginals
from retrodict._families import AbstractFamily, MixtureFamily, NonlinearFamily
from retrodict._learning import FitResult, batch_for, fit
from retrodict._linearised import LinearisedPosterior, check_moments, iterated_smoother
from retrodict._model import Series, StateSpaceModel, check_densities, is_linear_gaussian, unwrap
from retrodict._smooth.check import BatchCheck, SeriesReference, check_chains, pick, run_references
from retrodict._smooth.simulate_like import MAX_ROWS, NonFiniteSimulation, simulate_batch
from retrodict._smooth.smoothed import Method, Smoothed

T = TypeVar("T")

METHODS = ("auto", "exact", "linearised", "amortised")

NUM_HELD_OUT = 128
"""The number of simulated series that compare the families and are not trained on."""


class Answer(NamedTuple):
    """The chains of a batch, with a leading axis, and how they were computed."""

    chains: AbstractBackwardChain
    method: Method
    reason: str
    trustworthy: bool
    family: AbstractFamily | None = None


class Request(NamedTuple):
    """The checked arguments of `smooth`.

    Attributes:
        model: the unwrapped model.
        batch: the series, with a leading axis.
        family: the trained family, or `None`.
        check: whether to check the answer.
        training: the options of `train_family`.
    """

    model: StateSpaceModel
    batch: Series
    family: AbstractFamily | None
    check: bool
    training: dict[str, Any]


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
    """Smooth one series or a batch by the simplest method that passes a check.

    1. A linear-Gaussian model is smoothed exactly, by `kalman_smoother`.
    2. Otherwise `iterated_smoother` is run and compared by `check_posterior` with a reference that
       is computed independently of it: a grid for one or two states, or tempered particles. If it
       passes, it is the answer.
    3. Otherwise a `MixtureFamily` and a `NonlinearFamily` are trained on series simulated from the
       model, and the better one is checked in the same way. Moments are then means over drawn
       paths, with standard errors. If the family does not pass either, the answer is the one with
       the larger ELBO, unless it alone has lost a mode. If the model cannot be simulated, because
       most of its paths are not finite, the answer is that of step 2.

    `trustworthy` of the result states whether the answer passed. If the reference itself fails, the
    answer has not passed, and `reason` contains "not checked". There is one decision per batch,
    that of its worst checked series. Of a batch of more than eight series only eight are checked,
    evenly spread over the batch, and `reason` contains this: "run on 8 of 300 series".

    The family is trained on at most 64 rows. If the state is not stationary, as in a random walk,
    long series reach states outside of the training data, and the check fails. Not inside
    `jax.jit`.

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
            that the same call gives the same answer.
        method: `"auto"`, `"exact"`, `"linearised"` or `"amortised"`.
        family: a family that was trained for this model, such as the `family` of an earlier
            result. Nothing is trained then, and the method is `"amortised"`.
        num_steps: training steps per family.
        num_series: the number of series to simulate for training.
        num_samples: the number of paths for moments without a closed form, per component of the
            last filtering law; a multiple of 16, at least 32.
        check: whether to check the answer by `check_posterior`, which costs a reference per series.
            It is required unless a `method` or a `family` is passed. An answer that is not checked
            is not `trustworthy`.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(time, input)` or `(batch, time, input)`.
        length: the number of rows that exist, one integer per series or one for all.
        progress: whether to show the progress of both fits, or a callback as in `fit`.

    Returns:
        Moments, the chain, the method, whether it is trustworthy, and the reason.

    Raises:
        TypeError: if an argument has the wrong type, or the model lacks what the method needs:
            linear-Gaussian kernels, or means and covariances.
        ValueError: if shapes do not match, the model lacks a density that the method needs, or
            most of its simulated paths are not finite and `method` is `"amortised"`.
    """
    if key is not None:
        check_key(key, "smooth")
    _check_choice(model, method, family)
    estimator = BackwardSampling(num_samples, noise="stratified", by_component=True)
    if estimator.num_replicates < 2:
        raise ValueError(
            f"`num_samples` must be 32 or more, got {num_samples}: a standard error needs two"
            " groups of 16 paths."
        )
    plain = unwrap(model)
    batch = batch_for(plain, ys, mask=mask, inputs=inputs, length=length)
    training = {
        "num_steps": check_count(num_steps, "num_steps"),
        "num_series": check_count(num_series, "num_series"),
        "progress": progress,
    }
    request = Request(plain, batch, family, check, training)
    answer = _exact_answer(request, method)
    if answer is not None:
        moments, quantile_key = _exact_moments(answer.chains), None
    else:
        answer_key, draw_key = jax.random.split(jax.random.key(0) if key is None else key)
        answer = _answer(answer_key, request, method)
        moments = _moments(draw_key, answer.chains, estimator, batch.num_series)
        quantile_key = jax.random.fold_in(draw_key, 2**31)
    chains = answer.chains
    if jnp.ndim(ys) == 2:
        moments, chains = _only((moments, chains))
    return Smoothed(
        moments.mean,
        moments.covariance,
        moments.mean_standard_error,
        moments.covariance_standard_error,
        chains,
        answer.method,
        answer.reason,
        answer.family,
        model,
        answer.trustworthy,
        quantile_key,
    )


def _check_choice(model: Any, method: Any, family: Any) -> None:
    """Refuse invalid models, methods and families, and combinations that contradict."""
    if not isinstance(model, StateSpaceModel):
        raise TypeError(f"smooth expects a StateSpaceModel, got {type(model).__name__}.")
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {METHODS}, got {method!r}.")
    if method == "exact" and not is_linear_gaussian(unwrap(model)):
        parts = (unwrap(model).prior, unwrap(model).transition, unwrap(model).emission)
        raise TypeError(
            "smooth with method='exact' expects a Gaussian prior and linear-Gaussian kernels, got"
            f" {', '.join(type(part).__name__ for part in parts)}. Omit `method`, or use"
            " grid_smoother (state dimension 1 or 2)."
        )
    if family is None:
        return
    if not isinstance(family, AbstractFamily):
        hint = " Pass its .family." if hasattr(family, "family") else ""
        raise TypeError(f"smooth expects a family, got {type(family).__name__}.{hint}")
    if method not in ("auto", "amortised"):
        raise ValueError(
            f"The method {method!r} does not use a family. Omit either `family` or `method`."
        )


def _exact_answer(request: Request, method: str) -> Answer | None:
    """Compute the chains of a linear-Gaussian model, unless another method is asked for."""
    exact = method in ("auto", "exact") and request.family is None
    if not exact or not is_linear_gaussian(request.model):
        return None
    check_values(request.model, request.batch, False, "smooth")
    chains = _exact_chains(request.model, request.batch)
    return Answer(chains, "exact", "The model is linear and Gaussian.", True)


def _answer(key: PRNGKey, request: Request, method: str) -> Answer:
    """Compute the chains by the given approximate method, or by the first that passes."""
    model, batch, prelude = request.model, request.batch, ""
    if request.family is not None:
        method = "amortised"
    if method == "auto" and not request.check:
        raise ValueError(
            "The check chooses the method: with check=False pass method='linearised' or"
            " 'amortised', or a trained family."
        )
    if method == "auto" and _refusal(check_moments, model, batch.at(0)) is not None:
        method, prelude = "amortised", "The model has no moments to linearise by. "
    lacking = _refusal(check_densities, model, "A check by particles or a family")
    if lacking is not None:
        # Particles and families need densities: there is no reference and no alternative.
        if method == "amortised":
            raise ValueError(lacking)
        posterior = _linearised(model, batch)
        return Answer(posterior.chain, "linearised", f"{_status(posterior)}. {lacking}", False)
    reference_key, linear_key, key = jax.random.split(key, 3)
    references = run_references(reference_key, model, batch) if request.check else []
    if method == "amortised":
        answer = _amortised(key, request, references)[0]
        return answer._replace(reason=prelude + answer.reason)
    posterior = _linearised(model, batch)
    if not references:
        return Answer(posterior.chain, "linearised", f"{_status(posterior)}.", False)
    check = check_chains(linear_key, model, posterior.chain, references, batch.num_series)
    reason = check.verdict("The iterated smoother")
    linearised = Answer(posterior.chain, "linearised", reason, check.passed)
    if method == "linearised" or check.passed:
        return linearised
    return _replace_if_better(key, request, references, linearised, check)


def _replace_if_better(
    key: PRNGKey,
    request: Request,
    references: list[SeriesReference],
    linearised: Answer,
    check: BatchCheck,
) -> Answer:
    """Train a family, and return the better of its answer and the linearised one."""
    try:
        answer, trained = _amortised(key, request, references)
    except NonFiniteSimulation as error:
        return linearised._replace(reason=f"{linearised.reason} {error}")
    reason = f"{linearised.reason} {answer.reason}"
    if trained is None or _is_as_good(trained, check):
        return answer._replace(reason=reason)
    return linearised._replace(
        reason=f"{reason} Its ELBO is {check.elbo - trained.elbo:.1f} nats below that of the"
        " iterated smoother, which is therefore kept.",
        family=answer.family,
    )


def _is_as_good(trained: BatchCheck, linearised: BatchCheck) -> bool:
    """Return whether a family is at least as good as the linearised smoother."""
    if not math.isfinite(trained.elbo):
        return False
    if trained.passed:
        return True
    # A chain that lost a mode may have the larger ELBO and still be worse.
    has_more_modes = linearised.modes_lost and not trained.modes_lost
    return has_more_modes or trained.elbo >= linearised.elbo


def _amortised(
    key: PRNGKey, request: Request, references: list[SeriesReference]
) -> tuple[Answer, BatchCheck | None]:
    """Compute the chains of a family, trained unless one was given, and check them."""
    train_key, key = jax.random.split(key)
    family, description = request.family, "The family was given"
    if family is None:
        family, description = train_family(
            train_key, request.model, request.batch, **request.training
        )
    chains = _over_series(lambda series: family.infer(series.ys, **series.options()), request.batch)
    if not references:
        reason = f"{description}, and was not checked."
        return Answer(chains, "amortised", reason, False, family), None
    check = check_chains(key, request.model, chains, references, request.batch.num_series)
    reason = f"{description}. {check.verdict('It')}"
    return Answer(chains, "amortised", reason, check.passed, family), check


def train_family(
    key: PRNGKey,
    model: StateSpaceModel,
    batch: Series,
    *,
    num_steps: int,
    num_series: int,
    progress: bool | Callable[[int, float], None],
) -> tuple[AbstractFamily, str]:
    """Train a mixture and a nonlinear family; return the better one, and what was done in words.

    Both are trained to the end: stopping one early would cost another compilation, which takes as
    long as the steps it saves. A family that loses one of two modes loses log 2 nats of ELBO for
    the whole series, which is little per time step. So the mixture, which can represent both modes,
    is preferred unless the other is better by more than that.

    Args:
        key: a typed key.
        model: the model.
        batch: the series that will be smoothed.
        num_steps: training steps per family.
        num_series: the number of series to simulate for training.
        progress: as in `fit`.

    Raises:
        NonFiniteSimulation: if most of the simulated series are not finite.
    """
    data_key, held_out_key, mixture_key, nonlinear_key, key = jax.random.split(key, 5)
    train = simulate_batch(data_key, model, batch, num_series, MAX_ROWS)
    held_out = tuple(simulate_batch(held_out_key, model, batch, NUM_HELD_OUT, MAX_ROWS))
    dims = (model.state_dim, batch.ys.shape[-1])
    input_dim = 0 if batch.inputs is None else batch.inputs.shape[-1]

    def trained(family: AbstractFamily) -> FitResult:
        options = {"num_steps": num_steps, "held_out": held_out, "progress": progress}
        return fit(key, family, model, train.ys, **options, **train.options)

    mixture = trained(MixtureFamily(mixture_key, *dims, input_dim=input_dim))
    nonlinear = trained(NonlinearFamily(nonlinear_key, *dims, input_dim=input_dim))
    elbos = _held_out_elbo(mixture), _held_out_elbo(nonlinear)
    num_rows = train.ys.shape[1]
    best = nonlinear if elbos[1] > elbos[0] + math.log(2) / num_rows else mixture
    return best.family, (
        f"A {type(best.family).__name__} was trained on {num_series} simulated series of"
        f" {num_rows} rows (held-out ELBO, nats per time step: {elbos[0]:.3f} for a mixture,"
        f" {elbos[1]:.3f} for a nonlinear family)"
    )


def _held_out_elbo(result: FitResult) -> float:
    """Return the held-out ELBO of the returned family, −∞ if it is not finite."""
    elbo = float(result.held_out[result.held_out_steps == result.kept_step][-1])
    return elbo if math.isfinite(elbo) else -math.inf


def _linearised(model: StateSpaceModel, batch: Series) -> LinearisedPosterior:
    return _over_series(
        lambda series: iterated_smoother(model, series.ys, **series.options()), batch
    )


def _over_series(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function of one series, or of one chain, to a batch."""
    # A program for a batch takes twice as long to trace.
    if jax.tree.leaves(batch)[0].shape[0] == 1:
        return _as_batch(function(_only(batch)))
    return eqx.filter_vmap(function)(batch)


# The exact path is two programs, this one and `_exact_moments`: each operation by itself would take
# as long to prepare as it takes to smooth a series.
@eqx.filter_jit
def _exact_chains(model: StateSpaceModel, batch: Series) -> AbstractBackwardChain:
    """Smooth a batch under a linear-Gaussian model."""
    return _over_series(lambda series: smooth_series(model, series, False), batch).chain


@eqx.filter_jit
def _exact_moments(chains: AbstractBackwardChain) -> Marginals:
    """Return the moments of the linear-Gaussian chains of a batch, in closed form."""
    return _over_series(lambda chain: marginals(chain, estimator=ClosedForm()), chains)


@eqx.filter_jit
def _only(batch: T) -> T:
    """Return the only element of a batch."""
    return pick(batch, 0)


@eqx.filter_jit
def _as_batch(element: T) -> T:
    """Return a batch of one element."""
    return jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, element)


def _moments(
    key: PRNGKey, chains: AbstractBackwardChain, estimator: BackwardSampling, count: int
) -> Marginals:
    """Compute the moments of the chains of a batch."""
    if isinstance(chains, LinearGaussianChain):
        return _exact_moments(chains)
    # One chain at a time: the paths of all of them may not fit into memory.
    by_series = [
        marginals(pick(chains, i), estimator=estimator, key=jax.random.fold_in(key, i))
        for i in range(count)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *by_series)


def _status(posterior: LinearisedPosterior) -> str:
    """Describe the status of the worst series, where there is no other check."""
    codes = jnp.atleast_1d(posterior.code)
    worst = pick(posterior, int(jnp.argmax(codes != 0)))
    return f"The iterated smoother has status {worst.status!r}, and was not checked otherwise"


def _refusal(check: Callable[..., None], *arguments: Any) -> str | None:
    """Return the message with which a check of a model refuses it; `None` if it accepts it."""
    try:
        check(*arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None
