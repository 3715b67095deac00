"""`retrodict check`."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrodict.cli._errors import require_output
from retrodict.cli._input import open_run_and_table
from retrodict.cli._options import AsJson, DataFile, PythonModel, RunFolder, Seed
from retrodict.cli._output import grid, print_json, print_verdict
from retrodict.cli._progress import Stages


def check(
    run: RunFolder,
    source: DataFile,
    model: PythonModel = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Check whether a run can be trusted on a table.

    Compares the ELBO with a particle estimate of the evidence, computes the Pareto shape of path
    weights, tests residuals and the coverage of held-out points, and bounds the error where a bound
    applies. Prints a verdict. The exit code is 0 whatever the verdict.
    """
    from retrodict import runs

    require_output()
    opened, table = open_run_and_table(run, source, model)
    with Stages("check", runs.NUM_CHECKS, Console(stderr=True)) as stages:
        checked = runs.check(opened, table, seed=seed, progress=stages)
    if as_json:
        print_json(checked.to_dict())
        return
    findings: Table = grid()
    for heading in ("check", "result", "verdict", "meaning"):
        findings.add_column(heading)
    for finding in checked.findings:
        texts = (finding.name, str(finding.value), finding.verdict, finding.meaning)
        findings.add_row(*(Text(runs.visible(text)) for text in texts))
    Console().print(findings)
    print_verdict(checked)
