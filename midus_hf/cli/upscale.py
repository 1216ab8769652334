"""The `upscale` command."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from midus_hf.cli.command_line import (
    FAILED,
    INTERRUPTED,
    CommandExit,
    Json,
    argument,
    cli_option,
    command_line,
    flag,
    run_command,
    show,
)
from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import read_mapping, read_settings
from midus_hf.version import __version__
from upscalers.request import Request, parse_options

app = command_line(add_completion=True)

Output = Annotated[str, cli_option("Folder to make.", "DIR2")]
_PLACEMENTS = "distributed, top-heavy, bottom-heavy, llama-pro, or indices in the result.  [default: the method's]"
_VERIFIES = (
    "Scan the base for NaN, and compare both models' logits, layer by layer in little memory.  [default: verify]"
)
_OVERWRITE = flag("--overwrite", "Replace a checkpoint that upscale or strip wrote.")
Overwrite = Annotated[bool, _OVERWRITE]


_RARER = (
    "Rarer commands: extract, which saves the language model of a composite model, and shuffle, for a null control."
)


@app.callback(invoke_without_command=True, epilog=_RARER)
def run(
    context: typer.Context,
    base: Annotated[
        str | None, cli_option("Folder or hub id (owner/name, owner/name@revision).", "DIR_OR_HUB_ID")
    ] = None,
    method: Annotated[str | None, cli_option("See 'upscale methods'.", "NAME")] = None,
    output: Annotated[str | None, cli_option("Folder to make; needed unless --dry-run.", "DIR")] = None,
    corpus: Annotated[
        str | None, cli_option("Texts that the method reads (packs, engram), as --set corpus=CORPUS.", "CORPUS")
    ] = None,
    num_new_layers: Annotated[
        int | None, cli_option("New layers.  [default: half the base's, or nearly]", "K")
    ] = None,
    placement: Annotated[str | None, cli_option(_PLACEMENTS, "POLICY|I,J,K")] = None,
    seed: Annotated[int | None, cli_option("Seed of all random numbers.  [default: 0]", "N")] = None,
    dtype: Annotated[str | None, cli_option("auto, float32, bfloat16 or float16.  [default: auto]", "DTYPE")] = None,
    max_shard_size: Annotated[
        str | None, cli_option("Largest size of an output file.  [default: 5GB]", "SIZE")
    ] = None,
    dry_run: Annotated[bool | None, flag("--dry-run", "Print what would be done; config.json suffices.")] = None,
    verify: Annotated[bool | None, flag("--verify/--no-verify", _VERIFIES)] = None,
    overwrite: Annotated[bool | None, _OVERWRITE] = None,
    push_to_hub: Annotated[str | None, cli_option("Upload the result.", "REPO")] = None,
    private: Annotated[bool | None, flag("--private", "Upload to a private repository.")] = None,
    config: Annotated[Path | None, cli_option("YAML file with these options; the command line wins.", "FILE")] = None,
    set_: Annotated[
        list[str] | None, cli_option("An option of the method; repeat for more.", "KEY=VALUE", "--set")
    ] = None,
    json_: Json = False,
    version: Annotated[bool, flag("--version", "Print the version.")] = False,
) -> None:
    """Add memory or layers to a pretrained model. Until it is trained, the new model computes the same as the base.

    \b
    upscale --base meta-llama/Llama-3.2-1B --method midus-hml --output DIR
    """
    sources = {key: context.get_parameter_source(key) for key in context.params}
    given = [key for key, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if context.invoked_subcommand is not None:
        if given:
            option = given[0].strip("_").replace("_", "-")
            raise RequestError(
                f"--{option} is given before {context.invoked_subcommand!r}, which would not read it; expected options after the "
                "command. Move it there, or leave it out."
            )
        return
    if not given:
        print(context.get_help())
        return
    keys = {field.name for field in dataclasses.fields(Request)} - {"corpus"}
    options = {key: value for key, value in context.params.items() if key in keys and value is not None}
    read = {} if config is None else read_mapping(config)
    # A key without a value is as one that is left out; an unknown key is refused either way.
    given_keys = {key: value for key, value in read.items() if value is not None or key not in keys | {"corpus"}}
    given_keys |= options
    for needed in ("base", "method"):
        if not given_keys.get(needed):
            raise RequestError(f"--{needed} is missing. See 'upscale --help'; 'upscale methods' lists the methods.")
    request = parse_options(Request, given_keys, "the command" if config is None else f"--config {config}")

    from upscalers.console import Console, print_report
    from upscalers.methods.contract import with_corpus
    from upscalers.record.provenance import PushError
    from upscalers.runs.upscale import upscale

    chosen = {
        **with_corpus(request.method, request.options or {}, request.corpus),
        **with_corpus(request.method, read_settings(set_ or []), corpus),
    }
    arguments = {**vars(request), "options": chosen, "corpus": None}  # the corpus is among the options
    ending: CommandExit | None = None
    try:
        report = upscale(**arguments, progress=Console())
    except PushError as error:
        report = error.report
        ending = CommandExit(INTERRUPTED if error.interrupted else FAILED, str(error))
    show(report.to_dict() if json_ else report, json_, partial(print_report, dry_run=request.dry_run))
    if ending is not None:
        raise ending


@app.command()
def methods(
    name: Annotated[str | None, argument("Only this one.  [default: all]", "NAME")] = None,
    json_: Json = False,
) -> None:
    """List the methods, or show the options, defaults and paper of one."""
    import upscalers.methods  # noqa: F401 - fills the table
    from midus_hf.config.options import describe_options
    from upscalers.console import print_method_list, print_methods
    from upscalers.methods.contract import METHODS, get_method, load_plugin_methods

    load_plugin_methods()
    described = [
        {
            "name": method.name,
            "summary": method.summary,
            "identity": method.identity,
            "identity_except": method.identity_except,
            "trainable": method.trainable,
            "adds_parameters": method.adds_parameters,
            "placement": method.default_placement,
            "adds_layers": method.adds_layers,
            "options": describe_options(method.options_class),
            "paper": method.paper and method.paper.to_dict(),
        }
        for method in ([get_method(name)] if name else [METHODS[known] for known in sorted(METHODS)])
    ]
    show(described, json_, print_methods if name else print_method_list)


@app.command()
def inspect(
    model: Annotated[str, argument("A checkpoint that was upscaled or stripped.", "DIR")],
    json_: Json = False,
) -> None:
    """Show what was done to a checkpoint. The exit status is 1 if code in it is not what this version generates."""
    from upscalers.console import print_inspection
    from upscalers.runs.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(model)
    show(inspection, json_, print_inspection)
    code = inspection.get("code")
    if "other_code" in inspection or (code is not None and not code["as_generated"]):
        raise CommandExit(
            FAILED,
            f"{model} has code that midus-hf {__version__} does not generate, and that trust_remote_code=True runs. Read it "
            "before you trust it.",
        )


@app.command()
def strip(
    model: Annotated[str, argument("An upscaled checkpoint.", "DIR")],
    output: Output,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Take the new parts out, and compare what is left with the base. They are compared byte for byte."""
    from upscalers.console import Console, print_stripped
    from upscalers.runs.strip import strip as strip_checkpoint

    show(strip_checkpoint(model, output, overwrite, progress=Console()), json_, print_stripped)


@app.command(hidden=True)
def extract(
    model: Annotated[
        str, argument("A checkpoint that contains a language model, such as one that reads images.", "DIR")
    ],
    output: Output,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Save the language model of a composite model as a separate checkpoint."""
    from upscalers.console import Console, print_stripped
    from upscalers.runs.strip import extract as extract_checkpoint

    show(extract_checkpoint(model, output, overwrite, progress=Console()), json_, print_stripped)


@app.command(hidden=True)
def shuffle(
    model: Annotated[str, argument("An upscaled checkpoint with memory, trained or not.", "DIR")],
    output: Output,
    seed: Annotated[int, cli_option("Seed of the permutations.", "N")] = 0,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Permute the rows of a memory's values: a null control, whose addresses no longer match their values."""
    from upscalers.console import Console, print_edit
    from upscalers.edits.checkpoint_edit import shuffle as shuffle_checkpoint

    show(shuffle_checkpoint(model, output, seed, overwrite, progress=Console()), json_, print_edit)


main = partial(run_command, app, name="upscale")
