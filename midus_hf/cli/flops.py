"""The `midus flops` command."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.reading import Json

if TYPE_CHECKING:
    from rich.table import Table

    from midus_hf.config.flops.model import ModelFlops

app = command_line()


@app.command()
def midus_flops(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A config (.json), or folder or hub id of a model; weights are not read."
        ),
    ],
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.", metavar="N")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.", metavar="N")] = 1,
    json_: Json = False,
) -> None:
    """Count the floating-point operations (FLOPs) of a model for one batch, from its config alone."""
    from rich.console import Console

    from midus_hf.config.flops.model import estimate_flops
    from midus_hf.config.parameters import count_parameters

    config = _read_config(model)
    flops = estimate_flops(config, sequence_length, batch)
    parameters = count_parameters(config)
    if json_:
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
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(_table(flops))
    console.print(
        f"{parameters.total:,} parameters: {parameters.backbone:,} of the backbone, {parameters.values:,} values of memories, "
        f"{parameters.memory:,} other ones of memories\n"
        f"{parameters.activated:,} activated by a token\n"
        f"without embeddings {parameters.total - parameters.embeddings:,}, "
        f"activated {parameters.activated - parameters.embeddings:,}",
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


def _table(flops: "ModelFlops") -> "Table":
    from rich.table import Table

    table = Table("part", title="Floating-point operations")
    for name in ("FLOPs", "share"):
        table.add_column(name, justify="right")
    for part, count in flops.parts.items():
        table.add_row(part, f"{count:,}", f"{count / flops.forward:.1%}")
    table.add_section()
    for name, count in (("forward", flops.forward), ("backward", flops.backward), ("both", flops.total)):
        table.add_row(name, f"{count:,}", "100.0%" if name == "forward" else "")
    return table


main = partial(run_command, app, name="midus flops")
