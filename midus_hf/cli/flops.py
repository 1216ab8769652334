"""The `midus flops` command."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import Json, argument, option, show

app = command_line()


@app.command()
def midus_flops(
    model: Annotated[
        str,
        argument("A config (.json), or folder or hub id of a model; weights are not read.", "MODEL"),
    ],
    sequence_length: Annotated[int, option("Tokens per sequence.", "N")] = 1024,
    batch: Annotated[int, option("Sequences in the batch.", "N")] = 1,
    json_: Json = False,
) -> None:
    """Count the floating-point operations (FLOPs) of a model for one batch, from its config alone."""
    from midus_hf.config.flops.model import estimate_flops
    from midus_hf.config.parameters import count_parameters

    config = _read_config(model)
    flops = estimate_flops(config, sequence_length, batch)
    parameters = count_parameters(config)
    report = {
        "model": model,
        "sequence_length": sequence_length,
        "batch": batch,
        "forward": flops.forward,
        "backward": flops.backward,
        "total": flops.total,
        "parts": flops.parts,
        "parameters": {
            "total": parameters.total,
            "backbone": parameters.backbone,
            "memory_values": parameters.values,
            "memory_rest": parameters.memory,
            "activated": parameters.activated,
            "total_without_embeddings": parameters.total - parameters.embeddings,
            "activated_without_embeddings": parameters.activated - parameters.embeddings,
        },
    }
    show(report, json_, _print_flops, indent=2)


def _print_flops(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("part", title="Floating-point operations")
    for name in ("FLOPs", "share"):
        table.add_column(name, justify="right")
    for part, count in report["parts"].items():
        table.add_row(part, f"{count:,}", f"{count / report['forward']:.1%}")
    table.add_section()
    for name, count in (("forward", report["forward"]), ("backward", report["backward"]), ("both", report["total"])):
        table.add_row(name, f"{count:,}", "100.0%" if name == "forward" else "")
    console = Console()
    console.print(table)
    console.print(
        "{total:,} parameters: {backbone:,} of the backbone, {memory_values:,} values of memories, "
        "{memory_rest:,} other ones of memories\n"
        "{activated:,} activated by a token\n"
        "without embeddings {total_without_embeddings:,}, activated {activated_without_embeddings:,}".format(
            **report["parameters"]
        ),
        highlight=False,
    )


def _read_config(model: str) -> dict[str, Any]:
    from upscalers.checkpoint.base_model import read_config, read_config_file
    from upscalers.checkpoint.source import resolve_source

    path = Path(model).expanduser()
    if path.suffix == ".json" and not path.is_dir():
        return read_config_file(path)
    with resolve_source(model, config_only=True) as source:
        return read_config(source.folder)


main = partial(run_command, app, name="midus flops")
