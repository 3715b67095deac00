"""Runs: a model fitted to a table, kept in a folder, and what it says of tables of tomorrow."""

from retrodict.runs._answer import forecast as forecast
from retrodict.runs._answer import impute as impute
from retrodict.runs._answer import smooth as smooth
from retrodict.runs._check import Check as Check
from retrodict.runs._check import Finding as Finding
from retrodict.runs._check import check as check
from retrodict.runs._learn import fit as fit
from retrodict.runs._record import Run as Run
from retrodict.runs._record import RunError as RunError
from retrodict.runs._record import open_run as open_run
