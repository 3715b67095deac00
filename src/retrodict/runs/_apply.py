"""Apply a run to a table: smoothed states, forecasts, and imputations."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

import retrodict as rd
from retrodict import data
from retrodict._interface import Argument
from retrodict.runs import _switching as switching
from retrodict.runs._record import RunError
from retrodict.runs._run import Run


def smooth(
    run: Run, table: data.Table, *, num_samples: int = 256, seed: int = 0
) -> rd.Smoothed | switching.SmoothedRegimes:
    """Smooth the states of each series given all its rows.

    Exact for linear-Gaussian models and for hidden Markov models; GPB2 for regimes with states;
    otherwise by the family of the run, without further training.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        >>> smoothed = rd.runs.smooth(run, table)
        >>> smoothed.mean.shape, smoothed.method
        ((1, 10, 1), 'exact')
        >>> frame = rd.data.to_frame(table, smoothed, state_names=rd.runs.state_names(run))

    Args:
        run: the run.
        table: the data, read with `run.layout`.
        num_samples: the number of paths for moments without a closed form.
        seed: the random seed.

    Returns:
        The result of `retrodict.smooth` for a batch: every array has a leading axis for the series.
        For models with regimes, it has their `probabilities` as well.
    """
    if isinstance(run.model, rd.switching.SwitchingModel):
        return switching.smooth(run.model, table, num_samples, seed)
    choice: dict[str, Any] = {"method": "exact"} if run.is_exact else {"family": run.family}
    return rd.smooth(
        run.model,
        **table.batch(),
        **choice,
        key=None if run.is_exact else jax.random.key(seed),
        num_samples=num_samples,
        check=False,
        progress=False,
    )


def for_each_series(function: Callable[..., Any], *arguments: Any) -> Any:
    """Apply a function to each series of a batch, in one compiled program.

    Args:
        function: a function of one series.
        *arguments: its arguments, whose arrays have a leading axis for the series.
    """
    return eqx.filter_jit(eqx.filter_vmap(function))(*arguments)


def forecast(
    run: Run,
    table: data.Table,
    num_times: int,
    *,
    inputs: Any = None,
    times: Sequence[np.ndarray] | None = None,
    num_samples: int = 1000,
    seed: int = 0,
    smoothed: rd.Smoothed | switching.SmoothedRegimes | None = None,
) -> rd.Forecast | rd.switching.SwitchingForecast:
    """Forecast the rows after a table.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        >>> ahead = rd.runs.forecast(run, table, 2)
        >>> ahead.mean.shape, [int(year) for year in table.future_times(2)[0]]
        ((1, 2, 1), [1881, 1882])

    Args:
        run: the run.
        table: the data, read with `run.layout`.
        num_times: the number of rows to forecast.
        inputs: the inputs of these rows, of shape `(batch, num_times, input)`, if the model takes
            any besides the length of the step.
        times: the times of these rows, `num_times` per series, where times are irregular; they
            determine the lengths of the steps. See `retrodict.data.read_times`.
        num_samples: the number of draws.
        seed: the random seed.
        smoothed: the result of `smooth` for this table, if it is available.

    Returns:
        The result of `retrodict.forecast`, or of `retrodict.switching.forecast` for models with
        regimes, with a leading axis for the series.
    """
    future = _future_inputs(table, num_times, inputs, times)
    smoothed = smooth(run, table, seed=seed) if smoothed is None else smoothed
    model, keys = rd.unwrap(run.model), jax.random.split(jax.random.key(seed), table.num_series)
    if isinstance(model, rd.switching.SwitchingModel):
        ys = np.where(table.mask, table.ys, 0.0)
        return switching.forecast_rows(
            model, keys, smoothed.chain, ys, num_times, future, num_samples
        )
    return for_each_series(
        lambda key, chain, u: rd.forecast(
            key, model, chain, num_times, inputs=u, num_samples=num_samples
        ),
        keys,
        smoothed.chain,
        future,
    )


def read_inputs(
    run: Run, table: data.Table, source: Any, num_times: int | None = None
) -> np.ndarray:
    """Read the inputs of the rows after a table from a separate file.

    Args:
        run: the run.
        table: the data, read with `run.layout`.
        source: a file or table with the time, identifiers and inputs of the future rows; rows up
            to the last of the table are ignored.
        num_times: the number of rows per series; by default as many as every series has.

    Returns:
        Inputs of shape `(batch, num_times, input)`.
    """
    layout = run.layout
    columns = layout["inputs"]
    if not columns:
        raise RunError("The model of this run takes no inputs; leave them out.")
    future = data.read(
        source,
        time=layout["time"],
        series=layout["series"],
        columns=columns,
        freq=layout["freq"],
        time_format=layout["time_format"],
    )
    begins = np.zeros(future.num_series, int)
    if future.series == table.series and layout["time"] is not None:
        pairs = zip(future.times, table.times, strict=True)
        begins = np.array([int(np.sum(times <= past[-1])) for times, past in pairs])
    fewest = int(np.min(future.length - begins))
    if future.series != table.series or fewest < (num_times or 1):
        expected = "at least one row" if num_times is None else f"{num_times} rows"
        raise RunError(
            f"{future.source} must have {expected} of inputs for each series of the data, after its"
            " last row."
        )
    num_times = fewest if num_times is None else num_times
    rows = begins[:, None] + np.arange(num_times)
    us = np.take_along_axis(future.ys, rows[..., None], axis=1)
    if np.isnan(us).any():
        raise RunError(f"{future.source} has gaps; fill in the inputs of every row.")
    steps = np.ones(us.shape[:2])
    if layout["time"] is not None:
        future_times = [times[places] for times, places in zip(future.times, rows, strict=True)]
        try:
            future_times = table.check_future_times(future_times)
        except ValueError as error:
            raise RunError(f"{future.source}: {{error}}", error=error) from error
        if layout["step_input"] and table.step is None:
            steps = table.future_steps(future_times)
    return us if not layout["step_input"] else np.concatenate([steps[..., None], us], axis=2)


def _future_inputs(
    table: data.Table, num_times: int, inputs: Any, times: Sequence[np.ndarray] | None
) -> np.ndarray | None:
    steps = None
    if times is not None and table.step_unit is not None:
        steps = table.future_steps(times)
        if steps.shape[1] != num_times:
            raise RunError(
                f"A forecast of {num_times} rows needs as many times per series, got"
                f" {steps.shape[1]}."
            )
    elif inputs is None and table.step is None and table.step_unit is not None:
        raise RunError(
            "The times of this run are irregular: a forecast needs future times, {times}.",
            times=Argument("times", hint="from data.read_times"),
        )
    if table.inputs is None:
        if inputs is not None:
            raise RunError("The model of this run takes no inputs; leave them out.")
        return None
    width = table.inputs.shape[2]
    if inputs is None:
        if width > 1 or table.step_unit is None:
            raise RunError(
                f"A forecast needs the inputs {', '.join(table.input_names)} of the future rows."
            )
        return np.ones((table.num_series, num_times, 1)) if steps is None else steps[..., None]
    us = np.asarray(inputs, float)
    if us.shape != (table.num_series, num_times, width):
        raise RunError(
            f"A forecast of {num_times} rows expects inputs of shape"
            f" {(table.num_series, num_times, width)}, got {us.shape}."
        )
    if steps is not None:
        us = np.concatenate([steps[..., None], us[..., 1:]], axis=2)
    return us


def impute(
    run: Run,
    table: data.Table,
    num_samples: int,
    *,
    hidden: np.ndarray | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Draw series with missing entries filled in, of shape `(batch, sample, time, obs)`.

    Example:
        >>> import tempfile, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        >>> completed = rd.runs.impute(run, table, num_samples=100)
        >>> completed.shape, completed[0, 0, 2].tolist()
        ((1, 100, 10, 1), [963.0])

    Args:
        run: the run.
        table: the data, read with `run.layout`.
        num_samples: the number of draws.
        hidden: true where an observed entry is treated as missing.
        seed: the random seed.
    """
    if hidden is not None:
        table = dataclasses.replace(table, mask=table.mask & ~hidden)
    model, keys = rd.unwrap(run.model), jax.random.split(jax.random.key(seed), table.num_series)
    chain = smooth(run, table, seed=seed).chain
    rows = (np.where(table.mask, table.ys, 0.0), table.mask, table.inputs, table.length)
    if isinstance(model, rd.switching.SwitchingModel):
        return np.asarray(switching.completed(model, keys, chain, *rows, num_samples))
    draws = for_each_series(
        lambda key, chain, ys, mask, us, length: rd.impute(
            key, model, chain, ys, num_samples, mask=mask, inputs=us, length=length
        ),
        keys,
        chain,
        *rows,
    )
    return np.asarray(draws)
