"""The `midus compare` command."""

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from midus_hf.cli.command_line import FAILED, Ending, command_line, run_command
from midus_hf.cli.options import Json, argument, flag, needing_harness, option, show, show_tables
from midus_hf.cli.training.command import Overrides

if TYPE_CHECKING:
    from midus_hf.compare.options import Comparison
    from midus_hf.compare.variants import Variant

Jobs = Annotated[int, option("Runs at a time; they share the processor's cores.", "N")]
Devices = Annotated[
    str | None, option("GPUs such as 0,1, with one run at a time on each.  [default: all, for one run]", "LIST")
]
DryRun = Annotated[bool, flag("--dry-run", "Say what would be run, and what is done already.")]
app = command_line()


@app.command()
def midus_compare(
    config: Annotated[str, argument("YAML file of a comparison; some are in configs/compare.", "CONFIG")],
    overrides: Overrides = None,
    jobs: Jobs = 1,
    devices: Devices = None,
    dry_run: DryRun = False,
    report_only: Annotated[bool, flag("--report", "Run nothing; write the report of what is done.")] = False,
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
        from midus_hf.compare.runs import check, check_measurements

        check(comparison, variants)
        if not report_only:
            with needing_harness():
                check_measurements(comparison, variants)
    if dry_run:
        _show_plan(comparison, variants, json_)
        return
    failures: dict[str, str] = {}
    if not report_only:
        from midus_hf.compare.running import Running, ShownProgress

        with ShownProgress() as progress:
            running = Running(comparison, variants, progress, jobs, gpus)
            try:
                running.run()
            finally:
                failures = running.failures
    _report(comparison, variants, failures, json_)
    fail_for(failures)


def _show_plan(comparison: "Comparison", variants: "Sequence[Variant]", json_: bool) -> None:
    from midus_hf.compare.report.tables import plan_table, planned

    report = {"variants": planned(comparison, variants), "seeds": comparison.seeds}
    show(report, json_, lambda _: show_tables([plan_table(comparison, variants)]), indent=2)


def _report(comparison: "Comparison", variants: "Sequence[Variant]", failures: dict[str, str], json_: bool) -> None:
    """Write the report of the runs that are done, and show it."""
    from midus_hf.compare.report.findings import findings
    from midus_hf.compare.report.sentences import sentences
    from midus_hf.compare.report.tables import as_json, controls_table, short_table
    from midus_hf.compare.report.writing import write_report
    from midus_hf.compare.workplace import collect

    base, results, missing = collect(comparison, variants)
    if base is None:
        raise Ending(
            FAILED,
            f"{comparison.output_dir} holds no result yet: {failures.get('base', 'the base is measured first')}",
        )
    all_findings = findings(comparison, base, results, failures, missing)
    files = write_report(Path(comparison.output_dir), all_findings, results)
    shown = [short_table(all_findings), controls_table(all_findings)]
    show(as_json(all_findings, files), json_, lambda _: show_tables(shown), indent=2)
    if not json_:
        print("\n".join([*sentences(all_findings), "", f"report: {files[-1]}"]))


def devices_of(devices: str | None, jobs: int) -> list[str]:
    """Return the GPU numbers that `--devices` lists, such as `"0,1"`; an empty list without the option.

    Raises:
        ValueError: If `devices` holds anything but numbers, `jobs` is less than 1, or `jobs` is above 1 and not the number
            of devices.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; expected at least 1.")
    if devices is None:
        return []
    numbers = [number.strip() for number in devices.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"devices is {devices!r}; expected numbers of GPUs, such as 0,1.")
    if jobs not in (1, len(numbers)):
        raise ValueError(
            f"jobs is {jobs}, and devices names {len(numbers)}; expected one run per device. Leave jobs out."
        )
    return numbers


def fail_for(failures: dict[str, str]) -> None:
    """End the command with the status of failed work if runs failed, for the reasons in `failures`, by the run's name."""
    if failures:
        name, why = next(iter(failures.items()))
        count = f"one run failed, {name}" if len(failures) == 1 else f"{len(failures)} runs failed, the first {name}"
        raise Ending(FAILED, f"{count}: {why}. The same command repeats what failed.")


main = partial(run_command, app, name="midus compare", interruption="interrupted; the same command goes on")
