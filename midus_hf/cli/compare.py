"""The `midus compare` command."""

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from midus_hf.cli.command_line import FAILED, Ending, command_line, run_command
from midus_hf.cli.options import Json, argument, cli_option, flag, needing_harness, show, show_tables
from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import options_from_files

if TYPE_CHECKING:
    from midus_hf.compare.options import Comparison
    from midus_hf.compare.variants import Variant

app = command_line()


@app.command()
def midus_compare(
    config: Annotated[
        list[Path], argument("YAML files, as in configs/compare; later ones replace keys.", "CONFIG...")
    ],
    set_: Annotated[
        list[str] | None, cli_option("A key, such as train.max_steps=9; repeatable.", "KEY=VALUE", "--set")
    ] = None,
    jobs: Annotated[int, cli_option("Runs at a time; they share the processor's cores.", "N")] = 1,
    devices: Annotated[
        str | None, cli_option("GPUs such as 0,1, with a run on each.  [default: all, for one run]", "LIST")
    ] = None,
    dry_run: Annotated[
        bool, flag("--dry-run", "Check the request; list the runs that are done and to be done.")
    ] = False,
    report_only: Annotated[bool, flag("--report", "Run nothing; write the report of the finished runs.")] = False,
    json_: Json = False,
) -> None:
    """Train several methods on one text, and compare the results.

    The report says what each method and baseline learned, from the same base, and what it forgot.
    Each rate is tried with the first seed, and the rate with the lowest final validation loss gets the other seeds. Every run is a
    separate process. Runs whose results are in the output are not repeated, so the same command continues after an interruption,
    and variants, rates and seeds can be added later. An interrupted run is restarted.
    """
    gpus = devices_of(devices, jobs)
    with contextlib.redirect_stdout(sys.stderr):
        from midus_hf.compare.options import Comparison, check_names

        asked = options_from_files(Comparison, config, set_ or [])
        if not report_only:
            check_names(asked)
        from midus_hf.compare.runs import check
        from midus_hf.compare.variants import plan

        comparison, variants = plan(asked)
        if not report_only:
            with needing_harness():
                check(comparison, variants)
    from midus_hf.compare.running import check_finished, run_all

    if dry_run:
        from midus_hf.compare.origins import Inputs
        from midus_hf.compare.report import plan_records, plan_table

        check_finished(comparison, variants, Inputs(comparison))
        records = plan_records(comparison, variants)
        table = plan_table(records, comparison.controls)
        show({"variants": records, "seeds": comparison.seeds}, json_, lambda _: show_tables([table]), indent=2)
        return
    if report_only:  # even if base and texts no longer exist
        check_finished(comparison, variants, None)
    failures = {} if report_only else run_all(comparison, variants, jobs, gpus)
    _report(comparison, variants, failures, json_)
    if failures:
        name, why = next(iter(failures.items()))
        count = f"one run failed, {name}" if len(failures) == 1 else f"{len(failures)} runs failed, the first {name}"
        raise Ending(FAILED, f"{count}: {why}. The same command repeats what failed.")


def _report(comparison: "Comparison", variants: "Sequence[Variant]", failures: dict[str, str], json_: bool) -> None:
    """Write the report of the finished runs, and show it."""
    from midus_hf.compare.findings import cautions, findings
    from midus_hf.compare.report import as_json, tables, write_report
    from midus_hf.compare.running import collect

    base, results, missing = collect(comparison, variants)
    if base is None:
        why = failures.get("base", "the base is measured first")
        raise Ending(FAILED, f"{comparison.output_dir} has no result yet: {why}")
    all_findings = findings(comparison, base, results, failures, missing)
    page = write_report(Path(comparison.output_dir), all_findings)
    show(as_json(all_findings, page), json_, lambda _: show_tables(tables(all_findings)), indent=2)
    if not json_:
        print("\n".join([*cautions(all_findings), "", f"report: {page}"]))


def devices_of(devices: str | None, jobs: int) -> list[str]:
    """Return the GPU numbers that `--devices` lists, such as `"0,1"`; an empty list without the option."""
    numbers = [] if devices is None else [number.strip() for number in devices.split(",")]
    if jobs < 1:
        raise RequestError(f"jobs is {jobs}; expected at least 1.")
    if not all(number.isdecimal() for number in numbers):
        raise RequestError(f"devices is {devices!r}; expected numbers of GPUs, such as 0,1.")
    if numbers and jobs not in (1, len(numbers)):
        raise RequestError(
            f"jobs is {jobs}, and devices names {len(numbers)}; expected one run per device. Leave jobs out."
        )
    return numbers


main = partial(run_command, app, name="midus compare")
