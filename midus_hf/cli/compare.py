"""The `midus compare` command."""

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midus_hf.cli.command_line import FAILED, Ending, command_line, run_command
from midus_hf.cli.reading import Json, show_report
from midus_hf.cli.runs import Devices, DryRun, Jobs, devices_of, fail_for
from midus_hf.cli.training.command import Overrides

if TYPE_CHECKING:
    from midus_hf.compare.options import Comparison
    from midus_hf.compare.variants import Variant

app = command_line()


@app.command()
def midus_compare(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML file of a comparison; some are in configs/compare.")
    ],
    overrides: Overrides = None,
    jobs: Jobs = 1,
    devices: Devices = None,
    dry_run: DryRun = False,
    report_only: Annotated[
        bool, typer.Option("--report", help="Run nothing; write the report of what is done.")
    ] = False,
    json_: Json = False,
) -> None:
    """Train methods on the same text from the same base, and report what each learned and what it forgot.

    Every run is a separate process. Runs whose results are in the output are not repeated, so that the same command goes on after
    an interruption, and variants, rates and seeds can be added later.
    """
    with contextlib.redirect_stdout(sys.stderr):
        from midus_hf.cli.recipes import read_recipe
        from midus_hf.compare.options import Comparison
        from midus_hf.compare.variants import plan

        gpus = devices_of(devices, jobs)
        comparison, variants = plan(read_recipe(Comparison, config, overrides or []))
        from midus_hf.compare.checking import check

        check(comparison, variants)
    if dry_run:
        _show_plan(comparison, variants, json_)
        return
    failures: dict[str, str] = {}
    if not report_only:
        from midus_hf.compare.progress import ShownProgress
        from midus_hf.compare.running import Running

        with ShownProgress() as progress:
            running = Running(comparison, variants, progress, jobs, gpus)
            try:
                running.run()
            finally:
                failures = running.failures
    _report(comparison, variants, failures, json_)
    fail_for(failures)


def _show_plan(comparison: "Comparison", variants: "Sequence[Variant]", json_: bool) -> None:
    from midus_hf.compare.report.planned import plan_table, planned

    show_report(
        {"variants": planned(comparison, variants), "seeds": comparison.seeds},
        [plan_table(comparison, variants)],
        json_,
    )


def _report(comparison: "Comparison", variants: "Sequence[Variant]", failures: dict[str, str], json_: bool) -> None:
    """Write the report of the runs that are done, and show it."""
    from midus_hf.compare.collecting import collect
    from midus_hf.compare.report.findings import findings
    from midus_hf.compare.report.tables import as_json, controls_table, short_table
    from midus_hf.compare.report.words import sentences
    from midus_hf.compare.report.writing import write_report

    base, results, missing = collect(comparison, variants)
    if base is None:
        raise Ending(
            FAILED,
            f"{comparison.output_dir} holds no result yet: {failures.get('base', 'the base is measured first')}",
        )
    all_findings = findings(comparison, base, results, failures, missing)
    files = write_report(Path(comparison.output_dir), all_findings, results)
    shown = [table for table in (short_table(all_findings), controls_table(all_findings)) if table.rows]
    show_report(as_json(all_findings, files), shown, json_)
    if not json_:
        print("\n".join([*sentences(all_findings), "", f"report: {files[-1]}"]))


main = partial(run_command, app, name="midus compare", interruption="interrupted; the same command goes on")
