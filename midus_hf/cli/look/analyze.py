"""The `midus-analyze` command."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from midus_hf.cli.exit_status import WRONG_REQUEST, Ending, run_command
from midus_hf.cli.look import fetched_blocks, inside, inside_page
from midus_hf.cli.reading import Device, Dtype, Json, check_picture, load_to_read, show_report, working

app = typer.Typer(
    help="Look inside models: what their parts do for a task.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def midus_analyze() -> None:
    """Look inside models: what their parts do for a task."""


@app.command()
def heads(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Folders or hub ids: a base, and what was made of it."),
    ],
    tasks: Annotated[str, typer.Option(help="Of lm-eval, separated by commas.", metavar="NAMES")],
    data: Annotated[
        str | None,
        typer.Option(help="Folder with the questions of the local tasks.  [default: lm-eval's own]", metavar="DIR"),
    ] = None,
    include_path: Annotated[
        str | None, typer.Option(help="Folder with more task files.  [default: none]", metavar="DIR")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Questions per task.  [default: all]", metavar="N")] = None,
    signed: Annotated[
        bool,
        typer.Option(
            "--signed",
            help="Sums that may cancel, as in equation 20.  [default: absolute values]",
        ),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw maps of layers and heads (.png).  [default: none]", metavar="FILE")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    json_: Json = False,
) -> None:
    """Say how much each head of attention matters for the right answers of tasks, and how much heads of a layer differ in that."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; expected at least 1.")
    check_picture("picture", picture, ".png")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    try:
        with working():
            from tqdm import tqdm

            from midus_hf.analysis.inside.head_importance import HeadImportance, head_importance
            from midus_hf.analysis.task_answers import task_answers
            from midus_hf.evaluation.harness import Tasks
            from midus_hf.evaluation.quiet import quiet_libraries

            found: dict[str, HeadImportance] = {}
            with quiet_libraries():
                asked = Tasks(names, data=data, include_path=include_path)
                for model in models:
                    loaded, tokenizer = load_to_read(model, dtype, device)
                    answers = list(task_answers(loaded, tokenizer, asked, limit))
                    with tqdm(desc=model, total=len(answers), unit=" answers", disable=None) as bar:
                        found[model] = head_importance(loaded, answers, bar.update)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "datasets"):
            raise
        words = f"tasks need lm-evaluation-harness ({error.name} is missing): pip install 'midus-hf[eval]'"
        raise Ending(WRONG_REQUEST, words) from error
    from midus_hf.analysis.inside.head_report import as_json, draw_heads, layers_table
    from midus_hf.short_names import short_names

    report = {"tasks": names, "limit": limit, "models": as_json(found)}
    labelled = dict(zip(short_names(list(found)), found.values(), strict=True))
    show_report(report, [layers_table(label, one, not signed) for label, one in labelled.items()], json_)
    if picture is not None:
        picture.write_bytes(draw_heads(labelled, not signed))


app.command()(inside.layers)
app.command()(inside.drift)
app.command()(inside.values)
app.command()(fetched_blocks.blocks)
app.command()(inside_page.page)


def main() -> None:
    """Run the command, and exit with its status, also if that is 0; every error is one line on standard error."""
    status = run_command(app, None, "midus-analyze", hint=" See 'midus-analyze --help'.", failure="failed: ")
    sys.exit(status)
