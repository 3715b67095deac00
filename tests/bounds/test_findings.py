"""The wording of checks: each finding and figure is worded once, in `bounds/findings.py`."""

from typing import Any

import jax.numpy as jnp
import pytest

from retrodict._smooth.check import BatchCheck
from retrodict.bounds import PosteriorCheck, describe_figures
from retrodict.bounds.check import _compare_elbo
from retrodict.bounds.reference import Reference


def posterior_check(**fields: Any) -> PosteriorCheck:
    """A check without findings, but for the given fields."""
    figures = {
        "k_hat": jnp.asarray(0.25),
        "elbo": jnp.asarray(-12.0),
        "elbo_standard_error": jnp.asarray(0.1),
        "log_evidence": jnp.asarray(-11.5),
        "log_evidence_standard_error": jnp.asarray(0.0),
        "missed": jnp.array([0.0, 0.02]),
        "distance": jnp.array([0.03, 0.03]),
        "kinds": (),
        "messages": (),
        "reference": "grid",
    }
    return PosteriorCheck(**{**figures, **fields})  # pyright: ignore


def test_figures_are_those_of_the_worst_series():
    worse = posterior_check(
        elbo=jnp.asarray(-14.0), missed=jnp.array([0.0, 0.1]), reference="particles"
    )
    words = describe_figures([posterior_check(), worse])
    assert words.startswith("compared with a reference (grid or particles), ")
    assert "of 2 series, at worst, is 0.03 on average" in words
    assert "up to 10% of the states" in words and "its ELBO is 2.5 nats below" in words


@pytest.mark.parametrize("k_hat, word", [(0.25, "0.25"), (jnp.inf, "infinite"), (-jnp.inf, "none")])
def test_figures_name_the_pareto_shape(k_hat: float, word: str):
    words = describe_figures([posterior_check(k_hat=jnp.asarray(k_hat))])
    assert f"the Pareto shape of its path weights is {word} (importance weights can " in words


def test_evidence_below_the_elbo_means_that_nothing_was_checked():
    evidence, noise = jnp.asarray(-20.0), jnp.asarray(0.1)
    reference = Reference(jnp.zeros((1, 2, 1)), evidence, noise, "particles", None)
    ((kind, message),) = _compare_elbo(-12.0, 0.1, reference, 2)
    assert kind == "evidence below"
    assert message.startswith("not checked: the evidence of the reference (particles) is 8.0 nats")
    check = BatchCheck((), -12.0, "figures", message)
    assert check.verdict("It").startswith("It was not checked: the evidence of the reference")
