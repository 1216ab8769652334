"""The `midus reproduce` command."""

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.compare import Devices, DryRun, Jobs, devices_of, fail_for
from midus_hf.cli.options import Json, argument, needing_harness, option, show, show_tables

if TYPE_CHECKING:
    from midus_hf.compare.reproduce.repository import Repository

app = command_line()


@app.command()
def midus_reproduce(
    paper: Annotated[str | None, argument("Such as midus; without it, tables are listed.", "PAPER")] = None,
    table: Annotated[str | None, argument("Number of the table, such as 1.", "TABLE")] = None,
    overrides: Annotated[
        list[str] | None,
        argument("Keys of the scale to change, such as limit=50.", "KEY=VALUE", show_default=False),
    ] = None,
    scale: Annotated[
        str, option("paper: as printed, on GPUs. small: SmolLM2-135M on a CPU. tiny: a random model.", "NAME")
    ] = "small",
    rows: Annotated[
        str | None, option("Only these rows, by name, separated by semicolons.  [default: all]", "NAMES")
    ] = None,
    output: Annotated[
        Path | None, option("Folder of results, where a later run goes on.  [default: outputs/reproduce/...]", "DIR")
    ] = None,
    root: Annotated[Path | None, option("Clone of the repository.  [default: that of this package]", "DIR")] = None,
    jobs: Jobs = 1,
    devices: Devices = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Reproduce a table of a paper: upscale, train, fine-tune and evaluate each row, and put the paper's numbers beside ours.

    Every step is kept: the same command goes on after an interruption, and runs failed rows again.
    """
    with contextlib.redirect_stdout(sys.stderr):
        from midus_hf.compare.reproduce.repository import Repository
        from midus_hf.compare.reproduce.table import read_table, variant_name
        from midus_hf.compare.runs import check_measurements, check_runs
        from midus_hf.compare.variants import plan

        repository = Repository(root)
    if paper is None:
        _list(repository, json_)
        return
    if table is None:
        raise ValueError(
            f"no table of {paper} is named; expected one. 'midus reproduce' without arguments lists all tables."
        )
    gpus = devices_of(devices, jobs)
    with contextlib.redirect_stdout(sys.stderr):
        read = read_table(repository, paper, table, scale, overrides or [])
        by_variant = {variant_name(name): name for name in read.options.rows}
        row_names = list(read.options.rows) if rows is None else [name.strip() for name in rows.split(";")]
        names = [by_variant.get(name, name) for name in row_names]
        for name in names:
            if name not in read.options.rows:
                raise ValueError(f"rows names {name!r}; expected some of: {'; '.join(read.options.rows)}.")
        folder = output or Path("outputs") / "reproduce" / f"{paper}-{table}-{scale}"
        comparison, variants = plan(read.comparison(repository, folder, names))
        check_runs(comparison, variants)
        if not dry_run:  # material of a table is there once its runs begin
            with needing_harness():
                check_measurements(comparison, variants)
    from midus_hf.compare.report.tables import plan_table, planned
    from midus_hf.compare.reproduce.report import as_json, stage_table, write_table
    from midus_hf.compare.running import Running, ShownProgress
    from midus_hf.compare.workplace import collect

    if dry_run:
        report = {"needs": read.scale.needs, "rows": planned(comparison, variants)}
        show(report, json_, lambda _: show_tables([plan_table(comparison, variants)]), indent=2)
        return
    with ShownProgress() as progress:
        running = Running(comparison, variants, progress, jobs, gpus)
        running.run()
    _, results, _ = collect(comparison, variants)
    of_rows = {variant.name: [result for result in results if result.variant == variant.name] for variant in variants}
    files = write_table(folder, read, of_rows, running.failures)
    report = {**as_json(read, of_rows, running.failures), "files": list(map(str, files))}
    tables = [stage_table(read, stage, of_rows, running.failures) for stage in read.options.stages]
    show(report, json_, lambda _: show_tables(tables), indent=2)
    if not json_:
        print(f"\nreport: {files[-1]}")
    fail_for(running.failures)


def _list(repository: "Repository", json_: bool) -> None:
    from midus_hf.compare.reproduce.table import read_options_of
    from midus_hf.look.page import TableOfWords

    listed = [
        {"paper": paper, "table": table, "title": read_options_of(repository, paper, table).title}
        for paper, tables in repository.tables().items()
        for table in tables
    ]
    table_of_words = TableOfWords("Tables", ["paper", "table", "title"], [list(row.values()) for row in listed])
    show({"tables": listed}, json_, lambda _: show_tables([table_of_words]), indent=2)


main = partial(run_command, app, name="midus reproduce", interruption="interrupted; the same command goes on")
