"""The `midus eval` command."""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import Device, Json, cli_option, flag, model_argument, needing_harness, show
from midus_hf.config.yaml_options import from_mapping, read_mapping
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.sources.names import check_sources

app = command_line()


@app.command()
def midus_eval(
    context: typer.Context,
    models: Annotated[list[str], model_argument("Folders or Hub ids, compared side by side.", "MODEL...")],
    text: Annotated[str | None, cli_option("File, folder or dataset id to measure perplexity on.", "PATH")] = None,
    column: Annotated[str | None, cli_option("Column that holds the text.  [default: text]", "NAME")] = None,
    sequence_length: Annotated[int | None, cli_option("Tokens per window of the text.  [default: 1024]", "N")] = None,
    max_tokens: Annotated[
        int | None, cli_option("Tokens to predict, spread over the text.  [default: all]", "N")
    ] = None,
    retriever: Annotated[str | None, cli_option("Tree of topics by which models fetch blocks.", "TREE")] = None,
    path_column: Annotated[str | None, cli_option("Column with the path to fetch blocks by.", "NAME")] = None,
    tasks: Annotated[list[str] | None, cli_option("Tasks of lm-eval, separated by commas.", "NAMES")] = None,
    data: Annotated[str | None, cli_option("Folder with the questions of local tasks.", "DIR")] = None,
    include_path: Annotated[str | None, cli_option("Folder with more task files.", "DIR")] = None,
    num_fewshot: Annotated[int | None, cli_option("Examples before a question.  [default: the task's]", "N")] = None,
    limit: Annotated[int | None, cli_option("Questions per task, from the first on.  [default: all]", "N")] = None,
    batch_size: Annotated[int | None, cli_option("Windows or requests per forward pass.  [default: 4]", "N")] = None,
    dtype: Annotated[str | None, cli_option("auto, float32, bfloat16 or float16.  [default: auto]", "NAME")] = None,
    device: Device = None,
    trust_remote_code: Annotated[bool | None, flag("--trust-remote-code", "Run code of a checkpoint.")] = None,
    config: Annotated[Path | None, cli_option("YAML file of these keys; options win.", "FILE")] = None,
    write_card: Annotated[bool, flag("--write-card", "Write results into the cards of the folders.")] = False,
    json_: Json = False,
) -> None:
    """Measure perplexity on a text, and accuracy on tasks.

    Tasks are those of lm-evaluation-harness.
    With --data, the tasks atomic_numbers, boolq, commonsenseqa, facts, logiqa, mmlu,
    openbookqa and piqa take their questions from that folder. Others are lm-eval's.
    """
    keys = {field.name for field in dataclasses.fields(EvaluationSettings)}
    given = {key: value for key, value in context.params.items() if key in keys and value not in (None, ())}
    if tasks is not None:
        given["tasks"] = [name.strip() for name in ",".join(tasks).split(",") if name.strip()]
    settings = from_mapping(EvaluationSettings, {**({} if config is None else read_mapping(config)), **given})
    named = {key: getattr(settings, key) for key in ("text", "retriever", "data", "include_path")}
    check_sources((key, name) for key, name in named.items() if name is not None)
    from rich.console import Console

    from midus_hf.evaluation.card import check_cards, write_results
    from midus_hf.evaluation.report import comparison_table
    from midus_hf.sources.progress import quiet_libraries

    if write_card:
        check_cards(models)
    with needing_harness(), quiet_libraries():
        from midus_hf.evaluation.evaluate import evaluate

        report = evaluate(models, settings)
    for measured in report["models"]:
        if measured["reads_blocks"] is False:
            print(
                f"{measured['model']}: no block of its bank was read, since the topics of the texts are not known; pass --retriever "
                "TREE, or --path-column NAME",
                file=sys.stderr,
            )
    show(report, json_, lambda report: Console().print(comparison_table(report)), indent=2)
    for line in write_results(report) if write_card else ():
        print(line, file=sys.stderr)


main = partial(run_command, app, name="midus eval")
