"""Runs: what is kept of a fit to a user's own data, and its report."""

from retrodict.runs._content import Band as Band
from retrodict.runs._content import Curve as Curve
from retrodict.runs._content import Diagnostic as Diagnostic
from retrodict.runs._content import ParameterLine as ParameterLine
from retrodict.runs._content import ReportContent as ReportContent
from retrodict.runs._content import Series as Series
from retrodict.runs._content import SeriesPanel as SeriesPanel
from retrodict.runs._page import page as page
from retrodict.runs._plot import plot as plot
