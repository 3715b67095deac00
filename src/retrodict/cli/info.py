"""`retrodict info`."""

from retrodict.cli._errors import require_output
from retrodict.cli._options import AsJson, RunFolder
from retrodict.cli._output import print_json, print_run


def info(run: RunFolder, as_json: AsJson = False) -> None:
    """Print the model, data and parameters of a run."""
    from retrodict import runs

    require_output()
    record = runs.read_record(run)
    print_json(record) if as_json else print_run(record)
