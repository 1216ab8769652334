"""The `midus compare` command."""

import contextlib
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Annotated

from midus_hf.cli.command_line import (
    FAILED,
    CommandExit,
    Json,
    argument,
    cli_option,
    command_line,
    flag,
    run_command,
    show,
    show_tables,
)
from midus_hf.config.yaml_options import options_from_files

app = command_line()


@app.command()
def midus_compare(
    config: Annotated[
        list[Path], argument("YAML files, as in configs/compare; later ones replace keys.", "CONFIG...")
    ],
    set_: Annotated[
        list[str] | None, cli_option("A key, such as train.max_steps=9; repeatable.", "KEY=VALUE", "--set")
    ] = None,
    dry_run: Annotated[
        bool, flag("--dry-run", "Check the request; list the runs that are done and to be done.")
    ] = False,
    report_only: Annotated[bool, flag("--report", "Run nothing; write the report of the finished runs.")] = False,
    json_: Json = False,
) -> None:
    """Train several methods on one text, and compare the results.

    The report says what each method and baseline learned, from the same base, and what it forgot.
    Each rate is tried with the first seed, and the rate with the lowest final validation loss gets the other seeds. Runs are done
    one after another, each in its own process. Those whose results are in the output are not repeated, so the same command
    continues after an interruption, and variants, rates and seeds can be added later. For several GPUs, start the same command
    several times, each with its CUDA_VISIBLE_DEVICES: it takes runs that no other has taken.
    """
    with contextlib.redirect_stdout(sys.stderr):
        from midus_hf.compare.plan import Comparison, check, plan

        comparison, variants = plan(options_from_files(Comparison, config, set_ or []))
        if not report_only:
            check(comparison, variants)
    from midus_hf.compare import report
    from midus_hf.compare import run as runs

    if dry_run or report_only:  # a report needs neither base nor texts
        runs.check_finished(comparison, variants, runs.input_hasher(comparison) if dry_run else None)
    if dry_run:
        records = report.plan_records(comparison, variants)
        plan_of_runs = {"variants": records, "seeds": comparison.seeds}
        show(plan_of_runs, json_, lambda _: show_tables([report.plan_table(records)]), indent=2)
        return
    failures = {} if report_only else runs.run_all(comparison, variants)
    base, results, missing = runs.collect(comparison, variants)
    if base is None:
        why = failures.get("base", "the base is measured first")
        raise CommandExit(FAILED, f"{comparison.output_dir} has no result yet: {why}")
    found = report.findings(comparison, base, results, failures, missing)
    path = report.write_report(Path(comparison.output_dir), found)
    show(report.as_json(found, path), json_, lambda _: show_tables([report.variants_table(found)]), indent=2)
    if not json_:
        wrap = partial(textwrap.fill, width=80, break_long_words=False, break_on_hyphens=False)
        print(
            *map(wrap, report.cautions(found)), "", f"report: {path}", "", *map(wrap, report.advice(found)), sep="\n"
        )
    if failures:
        name, why = next(iter(failures.items()))
        count = f"one run failed, {name}" if len(failures) == 1 else f"{len(failures)} runs failed, the first {name}"
        raise CommandExit(FAILED, f"{count}: {why}. The same command repeats what failed.")


main = partial(run_command, app, name="midus compare")
