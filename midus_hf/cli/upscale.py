"""The `upscale` command."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from midus_hf.cli.command_line import FAILED, INTERRUPTED, Ending, command_line, run_command
from midus_hf.cli.reading import Json
from midus_hf.cli.recipes import other_command
from midus_hf.config.yaml_options import GivenTwice, read_yaml
from upscalers.record.report import PushError
from upscalers.request.errors import RequestError, one_line
from upscalers.request.options import parse_options

app = command_line(add_completion=True)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with these options; the command line wins.", metavar="FILE")
]
Output = Annotated[str, typer.Option(help="Folder to make.", metavar="DIR2")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what upscale or strip wrote there.")]


@dataclasses.dataclass
class RunRequest:
    """Keys of a YAML file, with the names and meanings of the arguments of `upscalers.upscale`. `placement` may be a list."""

    base: str | None = None
    method: str | None = None
    output: str | None = None
    num_new_layers: int | None = None
    placement: Any = None
    options: dict | None = None
    seed: int | None = None
    dtype: str | None = None
    max_shard_size: Any = None
    dry_run: bool | None = None
    verify: bool | None = None
    allow_nan: bool | None = None
    overwrite: bool | None = None
    push_to_hub: str | None = None
    private: bool | None = None
    revision: str | None = None
    stream: bool | None = None
    adapter: str | None = None


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    base: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file or hub id (owner/name, owner/name@revision).", metavar="DIR_OR_HUB_ID"),
    ] = None,
    method: Annotated[str | None, typer.Option(help="See 'upscale methods'.", metavar="NAME")] = None,
    output: Annotated[str | None, typer.Option(help="Folder to make; needed unless --dry-run.", metavar="DIR")] = None,
    num_new_layers: Annotated[
        int | None, typer.Option(help="New layers to insert.  [default: half the base's, or near it]", metavar="K")
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            help="distributed, top-heavy, bottom-heavy, llama-pro, whole-periods (keeps a pattern of sliding and full "
            "attention), or indices in the result.  [default: the method's]",
            metavar="POLICY|I,J,K",
        ),
    ] = None,
    config: ConfigFile = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the method, such as n=32; repeat for more.", metavar="KEY=VALUE"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.  [default: 0]", metavar="N")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16.  [default: auto]", metavar="DTYPE")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Largest size of an output file.  [default: 5GB]", metavar="SIZE")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; config.json suffices.")] = False,
    json_: Json = False,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Scan the base for NaN and compare both models' logits, layer by layer in little memory, or only check "
            "each new block.  [default: verify, but check new blocks where memory does not suffice]",
        ),
    ] = None,
    allow_nan: Annotated[
        bool, typer.Option("--allow-nan", help="Let NaN and infinite values in the base pass.")
    ] = False,
    overwrite: Overwrite = False,
    push_to_hub: Annotated[str | None, typer.Option(help="Upload the result.", metavar="REPO")] = None,
    private: Annotated[bool, typer.Option("--private", help="Upload to a private repository.")] = False,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a base on the hub.  [default: its main branch]", metavar="REV"),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Fetch a base on the hub file by file and keep none: needs the disk of one file and the output.",
        ),
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of a LoRA to merge into the base while it is read.", metavar="DIR_OR_HUB_ID"
        ),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Upscale a pretrained checkpoint: add memory or depth. Most methods do not change what it computes."""
    if context.invoked_subcommand is not None:
        return
    if not any(context.params.values()):
        print(context.get_help())
        return
    options = {
        "base": base,
        "method": method,
        "output": output,
        "num_new_layers": num_new_layers,
        "placement": placement,
        "seed": seed,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
        "dry_run": dry_run or None,
        "verify": verify,
        "allow_nan": allow_nan or None,
        "overwrite": overwrite or None,
        "push_to_hub": push_to_hub,
        "private": private or None,
        "revision": revision,
        "stream": stream or None,
        "adapter": adapter,
    }
    request = {**_read_config_file(config), **{key: value for key, value in options.items() if value is not None}}
    request["options"] = {**(request.get("options") or {}), **_parse_settings(set_ or [])}
    if isinstance(request.get("placement"), int):
        request["placement"] = [request["placement"]]
    for needed in ("base", "method"):
        if not request.get(needed):
            raise RequestError(f"--{needed} is missing. See 'upscale --help'; 'upscale methods' lists the methods.")

    from upscalers.console import Console, print_report
    from upscalers.runs.upscale import upscale

    ending: Ending | None = None
    try:
        report = upscale(**request, progress=Console())
    except PushError as error:
        report, ending = error.report, Ending(INTERRUPTED if error.interrupted else FAILED, str(error))
    if json_:
        print(json.dumps(report.to_dict()))
    else:
        print_report(report, dry_run=bool(request.get("dry_run")))
    if ending is not None:
        raise ending


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Only this one.  [default: all]", metavar="NAME")] = None,
    json_: Json = False,
) -> None:
    """List every method, its options, defaults and paper."""
    import upscalers.methods  # noqa: F401 - fills the table
    from midus_hf.config.options import describe_options
    from upscalers.console import print_methods
    from upscalers.methods.contract import METHODS, get_method, load_offered_methods
    from upscalers.record.provenance import paper_entry

    load_offered_methods()
    described = [
        {
            "name": method.name,
            "summary": method.summary,
            "identity": method.identity,
            "trainable": method.trainable,
            "placement": method.default_placement,
            "adds_layers": method.adds_layers,
            "options": describe_options(method.options_class),
            "paper": paper_entry(method),
        }
        for method in ([get_method(name)] if name else [METHODS[known] for known in sorted(METHODS)])
    ]
    _tell(described, json_, print_methods)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A checkpoint that was upscaled or stripped.", metavar="DIR")],
    json_: Json = False,
) -> None:
    """Show what was done to a checkpoint."""
    from upscalers.console import print_inspection
    from upscalers.runs.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(model)
    _tell(inspection, json_, print_inspection)


@app.command()
def strip(
    model: Annotated[str, typer.Argument(help="An upscaled checkpoint.", metavar="DIR")],
    output: Output,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Take the new parts out again, and say whether exactly the base is left, byte for byte."""
    from upscalers.console import Console, print_stripped
    from upscalers.runs.strip import strip as strip_checkpoint

    result = strip_checkpoint(model, output, overwrite, progress=Console())
    _tell(result, json_, print_stripped)


@app.command()
def extract(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint that holds a language model, such as one that reads images.", metavar="DIR"),
    ],
    output: Output,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Save the language model of a larger model as a separate checkpoint."""
    from upscalers.console import Console, print_extracted
    from upscalers.runs.extract import extract as extract_checkpoint

    result = extract_checkpoint(model, output, overwrite, progress=Console())
    _tell(result, json_, print_extracted)


@app.command()
def adapter(
    adapter: Annotated[str, typer.Argument(help="A PEFT adapter that was made for the base.", metavar="ADAPTER")],
    onto: Annotated[str, typer.Option(help="The model that was upscaled from the base.", metavar="DIR")],
    output: Output,
    json_: Json = False,
) -> None:
    """Write an adapter of the base for the upscaled model, whose layers have other numbers."""
    from upscalers.console import print_adapter
    from upscalers.runs.adapter import write_adapter

    result = write_adapter(adapter, onto, output)
    _tell(result, json_, print_adapter)


@app.command()
def shuffle(
    model: Annotated[str, typer.Argument(help="An upscaled checkpoint with memory, trained or not.", metavar="DIR")],
    output: Output,
    seed: Annotated[int, typer.Option(help="Seed of the new orders.", metavar="N")] = 0,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Permute the rows of a memory's values: a null control, whose addresses have lost their meaning."""
    from upscalers.console import Console, print_shuffled
    from upscalers.controls.shuffling import shuffle as shuffle_checkpoint

    result = shuffle_checkpoint(model, output, seed, overwrite, progress=Console())
    _tell(result, json_, print_shuffled)


def _tell(result: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """Print a result, as one object of JSON or as a person reads it."""
    if as_json:
        print(json.dumps(result))
    else:
        show(result)


def _parse_settings(settings: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise RequestError(f"--set is {setting!r}; expected key=value.")
        key = key.strip().replace("-", "_")
        if key in texts:
            raise RequestError(
                f"--set {key} is given twice, as {texts[key]!r} and as {value!r}; expected each key once. Leave one out."
            )
        texts[key] = value
        try:
            parsed[key] = read_yaml(value)
        except GivenTwice as error:
            raise RequestError(f"--set is {setting!r}, which {error}") from None
        except yaml.YAMLError:
            raise RequestError(f"--set is {setting!r}; expected a YAML scalar after '='.") from None
    return parsed


def _read_config_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except GivenTwice as error:
        raise RequestError(f"--config {path} {error}") from None
    except OSError as error:
        raise RequestError(f"--config {path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"--config {path} is not YAML: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise RequestError(f"--config {path} holds no mapping; expected keys such as base, method, output.")
    if (other := other_command(RunRequest, path, content)) is not None:
        raise RequestError(other)
    options = vars(parse_options(RunRequest, content, f"--config {path}"))
    return {key: value for key, value in options.items() if value is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: the words of `sys.argv`.

    Returns:
        The exit status.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # upscale checks the base itself
    return run_command(
        app,
        arguments,
        name="upscale",
        refusals=(RequestError,),
        interruption="interrupted; nothing is left of the output.",
    )
