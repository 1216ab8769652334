"""The `midus flops` command."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from midus_hf.cli.command_line import Json, argument, cli_option, command_line, run_command, show, show_tables

app = command_line()


@app.command()
def midus_flops(
    model: Annotated[str, argument("A config (.json), or folder or hub id of a model.", "MODEL")],
    sequence_length: Annotated[int, cli_option("Tokens per sequence.", "N")] = 1024,
    batch: Annotated[int, cli_option("Sequences in the batch.", "N")] = 1,
    json_: Json = False,
) -> None:
    """Count a model's floating-point operations (FLOPs) for a batch. Only its config is read."""
    from upscalers.architecture.flops import count_flops, count_parameters

    config = _read_config(model)
    flops = count_flops(config, sequence_length, batch)
    report = {"model": model, "sequence_length": sequence_length, "batch": batch}
    report |= {"forward": flops.forward, "backward": flops.backward, "total": flops.total, "parts": flops.parts}
    report["parameters"] = count_parameters(config)
    show(report, json_, _print_flops, indent=2)


def _print_flops(report: dict[str, Any]) -> None:
    """Print the operations of each part and pass, then numbers of parameters."""
    from midus_hf.look.page import TextTable

    passes = {"forward": report["forward"], "backward": report["backward"], "both": report["total"]}
    width = len(f"{report['total']:,}")  # digits are aligned
    rows = [
        [name, f"{count:{width},}", f"{count / report['forward']:.1%}"]
        for name, count in {**report["parts"], **passes}.items()
    ]
    show_tables([TextTable("Floating-point operations", ["part", "FLOPs", "of forward"], rows)])
    print(
        "{total:,} parameters: {backbone:,} of the backbone, {memory_values:,} values of memories, "
        "{memory_rest:,} other ones of memories\n"
        "{activated:,} activated by a token\n"
        "without embeddings {total_without_embeddings:,}, activated {activated_without_embeddings:,}".format(
            **report["parameters"]
        )
    )
    if report["parameters"]["bank"]:
        print(
            "bank: {bank:,} parameters beside the checkpoint; a text fetches {fetched:,}".format(
                **report["parameters"]
            )
        )


def _read_config(model: str) -> dict[str, Any]:
    from upscalers.checkpoint.base_checkpoint import read_config
    from upscalers.checkpoint.source import resolve_source

    path = Path(model).expanduser()
    if path.suffix == ".json" and not path.is_dir():
        return read_config(path)
    with resolve_source(model, config_only=True) as source:
        return read_config(source.folder)


main = partial(run_command, app, name="midus flops")
