"""Parts of the commands that train: each makes one run, prints one line at its end, and sets the exit status."""

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from midus_hf.cli.command_line import FAILED, WRONG_REQUEST, Ending, is_main_process
from midus_hf.cli.options import argument, option, read_recipe
from midus_hf.cli.training.printed_config import recipes
from midus_hf.config.yaml_options import apply_words, from_mapping
from midus_hf.model_names import saved_config
from midus_hf.training.early_checks import check_early, key_names
from midus_hf.training.optim.rates import short_run_rates, trains_new_parts

Overrides = Annotated[
    list[str] | None,
    argument("Keys that replace those of the recipe, or recipes.", "KEY=VALUE", show_default=False),
]
Model = Annotated[str | None, option("The model to train; needed with texts.", "MODEL")]
Output = Annotated[str | None, option("Folder to make; needed with texts.", "DIR")]

# The key of the texts, by command, and keys for a short run on them.
_TEXTS = {"train": "corpus", "sft": "dataset_name"}
_LENGTH = {"train": "sequence_length", "sft": "max_length"}
_SHORT_RUN = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "logging_steps": 0.05}
_LEAST_STEPS = 100
_RATES = {"new": short_run_rates(1e-3), "all": {"learning_rate": 1e-4}}


def read_arguments(
    arguments_class: type[Any],
    command: str,
    first: str,
    overrides: Sequence[str],
    model: str | None = None,
    output: str | None = None,
    quiet: bool = False,
) -> Any:
    """Return the arguments of a run: the keys of a recipe, or keys for a short run on texts, which one line names.

    The options and the texts replace keys of every recipe.

    Args:
        arguments_class: The dataclass of the arguments.
        command: Name of the command: `train` or `sft`.
        first: A recipe, or texts.
        overrides: Words behind `first`, `key=value` or recipes. Of two words with one key, the later one counts.
        model: Value of `--model`.
        output: Value of `--output`.
        quiet: Whether to print no line. Default: false.

    Raises:
        ValueError: If the words are no request.
    """
    quiet = quiet or not is_main_process()
    is_recipe = first.endswith((".yaml", ".yml"))
    options = {"model_name_or_path": ("--model", model), "output_dir": ("--output", output)}
    if not is_recipe:
        options = {_TEXTS[command]: (repr(first), first), **options}
    options = {key: (source, value) for key, (source, value) in options.items() if value is not None}
    for word in overrides:
        key, equals, _ = word.partition("=")
        if equals and key in options:
            raise ValueError(
                f"{key} is given twice, by {options[key][0]} and {word!r}; expected each key once. Leave one out."
            )
    values = {key: value for key, (_, value) in options.items()}
    if is_recipe:
        last = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        arguments = read_recipe(arguments_class, first, [*overrides, *last])
    else:
        _refuse_other_kinds(command, first)
        keys, has_own_length = _short_run(arguments_class, command, first, overrides, values, quiet)
        arguments = from_mapping(arguments_class, keys)
        if command == "train" and not has_own_length:
            arguments.least_steps = _LEAST_STEPS
    has_epochs = any(word.startswith("num_train_epochs=") for word in overrides)
    if not quiet and has_epochs and arguments.max_steps > 0:
        print(
            f"max_steps={arguments.max_steps} counts, and not num_train_epochs; max_steps=-1 lets epochs count",
            file=sys.stderr,
        )
    return arguments


def check_request(
    command: str, first: str, overrides: Sequence[str], model: str | None = None, output: str | None = None
) -> None:
    """Check what can be told of a request before torch and transformers are imported. Arguments are as in `read_arguments`.

    Raises:
        Ending: If the request is wrong.
    """
    names = key_names(command)
    if names is None:
        return
    keys_class = dataclasses.make_dataclass("Keys", [(name, Any, None) for name in names])
    try:
        check_early(command, vars(read_arguments(keys_class, command, first, overrides, model, output, quiet=True)))
    except ValueError as error:
        raise Ending(WRONG_REQUEST, str(error)) from None


def _short_run(
    arguments_class: type[Any], command: str, first: str, overrides: Sequence[str], values: dict[str, Any], quiet: bool
) -> tuple[dict[str, Any], bool]:
    """Return the keys that words and options give, with keys for a short run where they give none, and whether they say how long."""
    written = apply_words(arguments_class, {}, overrides) | values
    for key, name in (("model_name_or_path", "model"), ("output_dir", "output")):
        if key not in written:
            raise ValueError(
                f"--{name} is missing: {first!r} is read as texts; run 'midus {command} {first} --model MODEL --output DIR', or "
                "give a recipe, a file that ends in .yaml."
            )
    recorded = saved_config(str(written["model_name_or_path"])).get("upscale", {}).get("trainable")
    chosen = {_LENGTH[command]: 256, **_SHORT_RUN, **_RATES["new" if trains_new_parts(written, recorded) else "all"]}
    if written.get("max_steps") not in (None, -1):  # which the Trainer prefers to epochs
        del chosen["num_train_epochs"]
    own = {key: f"{value:g}" for key, value in chosen.items() if key not in written}
    if command == "train" and "num_train_epochs" in own:
        own["num_train_epochs"] += f" (more for fewer than {_LEAST_STEPS} steps)"
    unchanged = ", ".join(f"{key}={value}" for key, value in own.items())
    if unchanged and not quiet:
        print(f"for a short run: {unchanged}; KEY=VALUE behind the texts replaces any", file=sys.stderr)
    return chosen | written, "num_train_epochs" not in own


def _refuse_other_kinds(command: str, first: str) -> None:
    """Refuse a first word that is a model, a method or a word `key=value`, and say what takes it.

    Raises:
        ValueError: If it is one.
    """
    path = Path(first)
    usage = f"midus {command} TEXTS --model MODEL --output DIR"
    if (path / "config.json").is_file():
        raise ValueError(f"{first!r} is a model, and texts are expected; run 'midus {command} TEXTS --model {path}'.")
    if path.exists():
        return
    if "=" in first:
        raise ValueError(f"{first!r} stands first; expected a recipe or texts before it: '{usage} {first}'.")
    if first in recipes(command):
        raise ValueError(
            f"{first!r} is a recipe's name; run 'midus {command} --print-config {first} > recipe.yaml' and then "
            f"'midus {command} recipe.yaml'."
        )
    import upscalers.methods  # noqa: F401  # which registers the methods
    from upscalers.methods.contract import METHODS

    if first in METHODS:
        raise ValueError(
            f"{first!r} is a method, by which 'upscale --method {first}' makes a model; then run '{usage}'."
        )


def keys_of(options_class: Callable[[], type[Any]]) -> set[str]:
    """Return the keys of the arguments of a command; none if a package that they need is missing.

    Args:
        options_class: Function that imports and returns the dataclass of the arguments.
    """
    try:
        return {field.name for field in dataclasses.fields(options_class())}
    except ModuleNotFoundError:
        return set()


def train_in_group(run_class: Callable[[Any], Any], *request: Any) -> None:
    """Read the arguments of a run, train, and print one line about the result.

    At the end the process leaves the launcher's process group: at exit, a thread of the group that is still alive may
    abort the process (gloo). A process that a second signal ends at once does not leave, since the others may be waiting
    for it.

    Args:
        run_class: Makes a run of the arguments, whose `execute` returns a `TrainResult`.
        request: What the run is to do: arguments of `read_arguments`.

    Raises:
        Ending: If the request is wrong, or the run failed or was interrupted.
    """
    # `_train` returns the ending, since a raised exception would keep the trainer alive.
    ending = _train(run_class, request)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        # A finishing thread of gloo releases tensors. It then waits for the interpreter's lock and holds a lock that the end of the
        # group needs. If garbage collection comes first, the two wait for each other for ever. The pause lets the thread finish.
        time.sleep(_SECONDS_TO_SETTLE)
        gc.collect()  # the cycles of trainer and model keep the group, and so its threads, alive
    if ending is not None:
        raise ending


_SECONDS_TO_SETTLE = 0.5


def _train(run_class: Callable[[Any], Any], request: Sequence[Any]) -> Ending | None:
    from midus_hf.library_bars import library_bars_on_terminals
    from midus_hf.model_names import check_sources

    try:
        arguments = read_arguments(*request)
        check_sources(arguments.sources())
        with library_bars_on_terminals():
            run = run_class(arguments)
    except ValueError as error:
        return Ending(WRONG_REQUEST, str(error))
    from midus_hf.training.callbacks import RunInterrupted
    from midus_hf.training.saving import SavedInPart
    from midus_hf.training.trainer import NotFiniteError

    try:
        result = run.execute()
    except RunInterrupted as interrupted:
        return Ending(128 + interrupted.signal_number, str(interrupted))
    except (NotFiniteError, SavedInPart) as error:
        return Ending(FAILED, str(error))
    if is_main_process():
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}")
    return None
