"""Runs: a model fitted to a table, kept in a folder, and what it says of tables of tomorrow."""

from retrodict.runs._answer import forecast as forecast
from retrodict.runs._answer import impute as impute
from retrodict.runs._answer import read_inputs as read_inputs
from retrodict.runs._answer import smooth as smooth
from retrodict.runs._check import Check as Check
from retrodict.runs._check import Finding as Finding
from retrodict.runs._check import check as check
from retrodict.runs._content import Band as Band
from retrodict.runs._content import Curve as Curve
from retrodict.runs._content import Diagnostic as Diagnostic
from retrodict.runs._content import ParameterLine as ParameterLine
from retrodict.runs._content import ReportContent as ReportContent
from retrodict.runs._content import Series as Series
from retrodict.runs._content import SeriesPanel as SeriesPanel
from retrodict.runs._learn import NUM_STAGES as NUM_STAGES
from retrodict.runs._learn import fit as fit
from retrodict.runs._names import state_names as state_names
from retrodict.runs._page import page as page
from retrodict.runs._plot import plot as plot
from retrodict.runs._record import Run as Run
from retrodict.runs._record import RunError as RunError
from retrodict.runs._record import open_run as open_run
from retrodict.runs._report import draw as draw
from retrodict.runs._report import write_report as write_report
from retrodict.runs._stream import stream as stream
