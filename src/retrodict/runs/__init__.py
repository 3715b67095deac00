"""Runs: models fitted to a table, stored in a folder, and applied to new tables."""

from typing import TYPE_CHECKING

__all__ = [
    "Learning",
    "Run",
    "RunError",
    "check",
    "draw",
    "fit",
    "forecast",
    "impute",
    "open_run",
    "read_record",
    "smooth",
    "state_names",
    "stream",
    "write_report",
]

if TYPE_CHECKING:
    from retrodict.runs._apply import forecast as forecast
    from retrodict.runs._apply import impute as impute
    from retrodict.runs._apply import read_inputs as read_inputs
    from retrodict.runs._apply import smooth as smooth
    from retrodict.runs._check import NUM_CHECKS as NUM_CHECKS
    from retrodict.runs._check import Check as Check
    from retrodict.runs._check import Scope as Scope
    from retrodict.runs._check import check as check
    from retrodict.runs._fit import FitJob as FitJob
    from retrodict.runs._fit import check_folder as check_folder
    from retrodict.runs._fit import fit as fit
    from retrodict.runs._plot import FORMATS as FORMATS
    from retrodict.runs._record import RunError as RunError
    from retrodict.runs._record import likelihood_in_words as likelihood_in_words
    from retrodict.runs._record import parameter_lines as parameter_lines
    from retrodict.runs._record import read_record as read_record
    from retrodict.runs._record import regimes_in_words as regimes_in_words
    from retrodict.runs._record import unit_in_words as unit_in_words
    from retrodict.runs._report import draw as draw
    from retrodict.runs._report import write_report as write_report
    from retrodict.runs._report_content import Finding as Finding
    from retrodict.runs._run import Run as Run
    from retrodict.runs._run import open_run as open_run
    from retrodict.runs._run import shown_states as shown_states
    from retrodict.runs._run import state_names as state_names
    from retrodict.runs._stream import stream as stream
    from retrodict.runs._stream_learning import Learned as Learned
    from retrodict.runs._stream_learning import Learning as Learning
else:
    from retrodict._interface import lazily

    __getattr__, __dir__, __all__ = lazily(__name__)
