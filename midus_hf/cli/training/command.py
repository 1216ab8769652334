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
from midus_hf.cli.options import argument, option

Overrides = Annotated[
    list[str] | None,
    argument("Keys that replace those of the recipe, or recipes.", "KEY=VALUE", show_default=False),
]


Model = Annotated[str | None, option("The model to train; needed with texts.", "MODEL")]
Output = Annotated[str | None, option("Folder to make; needed with texts.", "DIR")]

_RECIPES = (".yaml", ".yml")
# The key of the texts, by command, and keys for a short run on them.
_TEXTS = {"train": "corpus", "sft": "dataset_name"}
_LENGTH = {"train": "sequence_length", "sft": "max_length"}
_SHORT_RUN = {"num_train_epochs": 3, "per_device_train_batch_size": 4}
_RATES = {"new": {"learning_rate": 1e-3, "value_learning_rate": 1e-2}, "all": {"learning_rate": 1e-4}}


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to a command that trains, in words.

    Args:
        command: Name of the command: `train` or `sft`.
        first: A recipe, or texts.
        overrides: Words behind `first`, `key=value` or recipes.
        model: Value of `--model`.
        output: Value of `--output`.
    """

    command: str
    first: str
    overrides: Sequence[str]
    model: str | None = None
    output: str | None = None

    def read(self, arguments_class: type[Any]) -> Any:
        """Return the arguments of the run: the keys of the recipe, or keys for a short run on the texts, which one line names.

        The options and the texts replace keys of every recipe.

        Raises:
            ValueError: If the words are no request.
        """
        from midus_hf.cli.options import read_recipe
        from midus_hf.config.yaml_options import apply_words, from_mapping

        values = {"model_name_or_path": self.model, "output_dir": self.output}
        sources = {"model_name_or_path": "--model", "output_dir": "--output"}
        if self.first.endswith(_RECIPES):
            values = {key: value for key, value in values.items() if value is not None}
            self._refuse_keys_given_twice({key: sources[key] for key in values})
            last = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
            return read_recipe(arguments_class, self.first, [*self.overrides, *self._with_epochs(), *last])
        self._refuse_other_kinds()
        texts = _TEXTS[self.command]
        values = {key: value for key, value in {texts: self.first, **values}.items() if value is not None}
        self._refuse_keys_given_twice({key: sources.get(key, repr(self.first)) for key in values})
        written = apply_words(arguments_class, {}, [*self.overrides, *self._with_epochs()]) | values
        for key, name in (("model_name_or_path", "model"), ("output_dir", "output")):
            if key not in written:
                raise ValueError(
                    f"--{name} is missing: {self.first!r} is read as texts; run 'midus {self.command} {self.first} --model MODEL "
                    "--output DIR', or give a recipe, a file that ends in .yaml."
                )
        chosen = {_LENGTH[self.command]: 256, **_SHORT_RUN, **_RATES["new" if _trains_new_parts(written) else "all"]}
        if written.get("max_steps") not in (None, -1):  # which the Trainer prefers to epochs
            del chosen["num_train_epochs"]
        unchanged = ", ".join(f"{key}={value:g}" for key, value in chosen.items() if key not in written)
        if unchanged and is_main_process():
            print(f"for a short run: {unchanged}; KEY=VALUE behind the texts replaces any", file=sys.stderr)
        return from_mapping(arguments_class, chosen | written)

    def _refuse_keys_given_twice(self, sources: dict[str, str]) -> None:
        """Refuse words that give a key which an option or the texts give. Of two words with one key, the later one counts.

        Args:
            sources: What gives a value before the words, by key.

        Raises:
            ValueError: If a word gives a key that one of `sources` gives.
        """
        for word in self.overrides:
            key, equals, _ = word.partition("=")
            if not equals:
                continue
            if key in sources:
                raise ValueError(
                    f"{key} is given twice, by {sources[key]} and {word!r}; expected each key once. Leave one out."
                )

    def _with_epochs(self) -> list[str]:
        """Return the word that takes `max_steps` of recipes away where a word says `num_train_epochs`, and say so in a line.

        A recipe behind that word keeps its `max_steps`.
        """
        from midus_hf.config.yaml_options import read_mapping

        keys = [word.partition("=")[0] for word in self.overrides]
        if "num_train_epochs" not in keys or "max_steps" in keys:
            return []
        paths = [word for word in self.overrides if word.endswith(_RECIPES) and "=" not in word]
        if self.first.endswith(_RECIPES):
            paths.insert(0, self.first)
        recipes = {path: read_mapping(path) for path in paths}
        last = next((path for path in reversed(recipes) if "max_steps" in recipes[path]), None)
        if last is None or recipes[last]["max_steps"] in (None, -1):
            return []
        if last in self.overrides[keys.index("num_train_epochs") :]:
            return []
        if is_main_process():
            print(f"num_train_epochs replaces max_steps={recipes[last]['max_steps']} of {last}", file=sys.stderr)
        return ["max_steps=-1"]

    def _refuse_other_kinds(self) -> None:
        """Refuse a first word that is a model, a method or a word `key=value`, and say what takes it.

        Raises:
            ValueError: If it is one.
        """
        from midus_hf.cli.training.printed_config import recipes

        path = Path(self.first)
        usage = f"midus {self.command} TEXTS --model MODEL --output DIR"
        if not path.exists() and "=" in self.first:
            raise ValueError(
                f"{self.first!r} stands first; expected a recipe or texts before it: '{usage} {self.first}'."
            )
        if (path / "config.json").is_file():
            raise ValueError(
                f"{self.first!r} is a model, and texts are expected; run 'midus {self.command} TEXTS --model {path}'."
            )
        if path.exists():
            return
        if self.first in recipes(self.command):
            raise ValueError(
                f"{self.first!r} is a recipe's name; run 'midus {self.command} --print-config {self.first} > recipe.yaml' and then "
                f"'midus {self.command} recipe.yaml'."
            )
        import upscalers.methods  # noqa: F401  # which registers the methods
        from upscalers.methods.contract import METHODS

        if self.first in METHODS:
            raise ValueError(
                f"{self.first!r} is a method, by which 'upscale --method {self.first}' makes a model; then run '{usage}'."
            )


def _trains_new_parts(keys: dict[str, Any]) -> bool:
    """Return whether a run trains adapters or new parts of a model alone, which learn at higher rates than a whole model."""
    if keys.get("adapters") is not None:
        return True
    trainable = keys.get("trainable", "auto")
    if trainable == "auto":
        config = Path(str(keys["model_name_or_path"]), "config.json").expanduser()
        record = json.loads(config.read_text(encoding="utf-8")).get("upscale", {}) if config.is_file() else {}
        trainable = record.get("trainable")
    # A list of roles names tensors of added memories; a list of numbers may name layers of the base.
    return trainable == "new" or (isinstance(trainable, list) and all(isinstance(part, str) for part in trainable))


def keys_of(options_class: Callable[[], type[Any]]) -> set[str]:
    """Return the keys of the arguments of a command; none if a package that they need is missing.

    Args:
        options_class: Function that imports and returns the dataclass of the arguments.
    """
    try:
        return {field.name for field in dataclasses.fields(options_class())}
    except ModuleNotFoundError:
        return set()


def train_in_group(arguments_class: type[Any], prepare: Callable[[Any], Any], request: Request) -> None:
    """Read the arguments of a run, train, and print one line about the result.

    Args:
        arguments_class: The dataclass of the arguments.
        prepare: Makes a run of the arguments, whose `execute` returns a `TrainResult`.
        request: What the run is to do.

    Raises:
        Ending: If the request is wrong, or the run failed or was interrupted.
    """
    group_is_ours = not _is_in_process_group()
    # `_train` returns the ending, since a raised exception would keep the trainer alive.
    ending = _train(arguments_class, prepare, request)
    if group_is_ours:
        _leave_process_group()
    if ending is not None:
        raise ending


def _train(arguments_class: type[Any], prepare: Callable[[Any], Any], request: Request) -> Ending | None:
    from midus_hf.library_bars import library_bars_on_terminals
    from midus_hf.model_names import check_sources
    from midus_hf.training.callbacks import RunInterrupted
    from midus_hf.training.optim.finite import NotFiniteError

    try:
        arguments = request.read(arguments_class)
        check_sources(arguments.sources())
        with library_bars_on_terminals():
            run = prepare(arguments)
    except ValueError as error:
        return Ending(WRONG_REQUEST, str(error))
    try:
        result = run.execute()
    except RunInterrupted as interrupted:
        return Ending(128 + interrupted.signal_number, str(interrupted))
    except NotFiniteError as error:
        return Ending(FAILED, str(error))
    if is_main_process():
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}")
    return None


_SECONDS_TO_SETTLE = 0.5


def _is_in_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _leave_process_group() -> None:
    """Leave the launcher's process group: at exit, a thread of the group that is still alive may abort the process (gloo).

    A process that a second signal ends at once does not leave, since the others may be waiting for it.
    """
    if _is_in_process_group():
        sys.modules["torch.distributed"].destroy_process_group()
        # A finishing thread of gloo releases tensors. It then waits for the interpreter's lock and holds a lock that the end of the
        # group needs. If garbage collection comes first, the two wait for each other for ever. The pause lets the thread finish.
        time.sleep(_SECONDS_TO_SETTLE)
        gc.collect()  # the cycles of trainer and model keep the group, and so its threads, alive
