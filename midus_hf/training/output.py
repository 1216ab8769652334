"""The output folder of a run: its lock, the record of the arguments, and the trained model."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from huggingface_hub import upload_folder
from huggingface_hub.errors import HfHubHTTPError
from transformers import GenerationConfig, TrainerState

from midus_hf.config.errors import RequestError, first_few, first_line
from midus_hf.config.yaml_options import read_mapping, write_yaml
from midus_hf.files.cards import (
    PROTECTED_HEADING,
    card_bytes,
    card_example,
    card_text,
    without_results,
    without_section,
)
from midus_hf.files.checkpoint_files import (
    CARD_FILE,
    CONFIG_FILE,
    GENERATION_CONFIG,
    PARTIAL_MODEL,
    RUN_CONFIG,
    TRAINER_STATE,
)
from midus_hf.files.outputs import DiskWriteError, convert_disk_errors, exclusive, write_text
from midus_hf.files.secrets import for_record
from midus_hf.models.view import has_adapters
from midus_hf.sources.downloads import connection_errors
from midus_hf.training.checkpoints import resume_hint, resumed_checkpoint
from midus_hf.training.optim import restore_dtypes, whole_numel
from midus_hf.training.outcome import GLOSSARY, HELD_OUT, OWN_TEXT

# Beginnings of keys that may change when a run is resumed, because they do not change what is computed.
_MAY_CHANGE = tuple(
    "output_dir resume_ run_name project attn_implementation use_cpu skip_memory_metrics log_level logging_ save_ load_best_model "
    "eval_ per_device_ gradient_accumulation metric_for_best greater_is_better push_to_hub hub_ activation_checkpointing "
    "gradient_checkpointing dataloader_num_workers dataloader_prefetch dataloader_persistent disable_tqdm".split()
)
# One of `eval_` that says what is trained on.
_STAYS = "eval_share"
_SEQUENCES = "sequences_per_step"

Result = TypeVar("Result")


class PartialSaveError(RuntimeError):
    """Error of a run with results that could not be written; the message says what is on disk."""


@contextlib.contextmanager
def open_output(arguments: Any) -> Iterator[Path | None]:
    """Lock and create a run's output in its main process; yield the checkpoint to resume from, if any.

    At the end the output is unlocked, and removed if it contains only the record of the run. If the run may not write there, all
    processes raise `RequestError`.
    """
    with contextlib.ExitStack() as opened:
        yield in_main_process(arguments, lambda: _open_here(arguments, opened))


class MainProcessError(RuntimeError):
    """Error of a process of a run whose main process failed, and says why."""


def in_main_process(arguments: Any, work: Callable[[], Result]) -> Result:
    """Do work in the main process; return its result in all processes.

    An error is raised in all processes, too: in the others a `RequestError` as it is, and `MainProcessError` for any other.
    """
    outcome: list[Any] = [None, None]  # the result of the main process, and the error of the others
    failure: Exception | None = None
    if arguments.process_index == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            failure = error
            kind = RequestError if isinstance(error, RequestError) else MainProcessError
            outcome[1] = kind(str(error) if kind is RequestError else f"{type(error).__name__}: {error}")
    broadcast_object_list(outcome)
    result, told = outcome
    if told is not None:
        raise failure or told
    return result


def _open_here(arguments: Any, opened: contextlib.ExitStack) -> Path | None:
    """Lock and create the output in this process; return the checkpoint to resume from, if any."""
    output = Path(arguments.output_dir)
    resume = arguments.resume_from_checkpoint
    if output.exists() and not output.is_dir():
        raise RequestError(f"output_dir is {str(output)!r}, a file; expected a folder.")
    ancestor = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise RequestError(
            f"output_dir is {str(output)!r}, but {str(ancestor)!r} is no folder to write in; choose another."
        )
    for key, source in arguments.sources():
        if Path(source).exists():  # other names are ids of models or datasets
            for outer, inner, verb in ((output, Path(source), "holds"), (Path(source), output, "lies in")):
                if inner.resolve().is_relative_to(outer.resolve()):
                    raise RequestError(
                        f"output_dir is {str(output)!r}, which {verb} the {key} {source!r}; choose another folder."
                    )
    busy = f"output_dir {str(output)!r} is being written by another run. Wait for it, or choose another folder."
    with contextlib.ExitStack() as opening:
        opening.enter_context(exclusive(output, RequestError(busy)))
        opening.callback(_remove_unused_output, output)
        checkpoint = resumed_checkpoint(output, resume) if resume else None
        files = sorted(os.listdir(output))
        is_begun = RUN_CONFIG in files and CONFIG_FILE not in files  # by a run that has trained no model yet
        rates = {}
        if checkpoint is not None:
            if arguments.learning_rate is None:
                recorded = rates_in(checkpoint.parent / RUN_CONFIG)
                rates = {key: rate for key, rate in recorded.items() if getattr(arguments, key) is None}
            _check_same_run({**_record(arguments), **rates}, checkpoint.parent / RUN_CONFIG)
        elif files and not (resume == "auto" and is_begun):
            raise RequestError(
                f"output_dir is {str(output)!r}, which holds {first_few(files)}; choose another folder, remove it, or set "
                "resume_from_checkpoint: true."
            )
        write_run_config(arguments, rates)
        opened.push(opening.pop_all())
    return checkpoint


def write_run_config(arguments: Any, rates: Mapping[str, float] | None = None) -> None:
    """Write the keys of a run into its folder; `rates` are those of the run to resume, if it measured them."""
    write_text(Path(arguments.output_dir) / RUN_CONFIG, write_yaml({**_record(arguments), **(rates or {})}))


def rates_in(path: Path) -> dict[str, float]:
    """Return the rates that a run has recorded; empty if it had not measured them yet, or is not recorded."""
    record = read_mapping(path) if path.is_file() else {}
    if record.get("learning_rate", 0) is None:
        return {}
    return {key: rate for key, rate in record.items() if key.endswith("learning_rate")}


def _record(arguments: Any) -> dict[str, Any]:
    return {**arguments.recorded(), _SEQUENCES: arguments.sequences_per_step}


def _remove_unused_output(output: Path) -> None:
    if os.listdir(output) in ([], [RUN_CONFIG]):
        (output / RUN_CONFIG).unlink(missing_ok=True)
        output.rmdir()


def _check_same_run(record: Mapping[str, Any], path: Path) -> None:
    """Refuse changed keys when a run is resumed: schedule and data must stay the same."""
    if not path.is_file():
        return
    earlier = for_record(read_mapping(path))
    if earlier.get(_SEQUENCES) != record[_SEQUENCES]:
        raise RequestError(
            f"a step of the run to resume takes {earlier.get(_SEQUENCES)} sequences, and one of this run {record[_SEQUENCES]}; set "
            "gradient_accumulation_steps or per_device_train_batch_size so that all processes together take as many."
        )
    for name in sorted(earlier.keys() | record.keys()):
        may_change = name.startswith(_MAY_CHANGE) and name != _STAYS
        if not may_change and earlier.get(name) != record.get(name):
            raise RequestError(
                f"{name} is {record.get(name, 'its default')!r}, but the run to resume has {earlier.get(name, 'its default')!r}; "
                "give the same, or start a new run in another folder."
            )


@contextlib.contextmanager
def saving_to(output: Path) -> Iterator[None]:
    """Raise a `PartialSaveError` with the output's state and free space if writing in the context fails."""
    try:
        with convert_disk_errors(output):
            yield
    except DiskWriteError as error:
        kept = f"the trained model is in {output}, but " if (output / CONFIG_FILE).is_file() else ""
        raise PartialSaveError(f"{kept}{error.facts}. Free some space there, and {resume_hint(output)}.") from error


def save_run(trainer: Any, prepared: Any) -> list[str]:
    """Save the trained model, adapters merged, with dtypes and `use_cache` as loaded; all processes call this.

    A card among the files of `prepared`, a `Prepared`, gets a section on the training. Weights are kept if other files cannot be
    written; a phrase about each of these is returned.
    """
    model = trainer.model
    arguments = prepared.arguments
    if not trainer.shares_parameters:
        restore_dtypes(model, prepared.saved_dtypes)
    trainer.check_finite()
    if has_adapters(model):
        trainer.model = model = model.merge_and_unload()
    model.config.use_cache = prepared.uses_cache
    partial_model = Path(arguments.output_dir, PARTIAL_MODEL)
    # Transformers refuses to save a model with contradictory settings.
    settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        _write_weights(trainer, model, partial_model)
    finally:
        model.generation_config = settings
    if arguments.process_index != 0:
        return []
    (partial_model / "training_args.bin").unlink(missing_ok=True)
    failures = _write_siblings(trainer.state, settings, prepared, partial_model)
    _move_model(partial_model, Path(arguments.output_dir))
    return failures


def _write_weights(trainer: Any, model: Any, folder: Path) -> None:
    """Write weights and config to a new folder; nothing is left of it after an error."""
    size = sum(whole_numel(parameter) * parameter.element_size() for parameter in model.parameters())
    pushes, trainer.args.push_to_hub = trainer.args.push_to_hub, False  # which is done at the end, with all files
    try:
        if trainer.args.process_index == 0:
            shutil.rmtree(folder, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        with convert_disk_errors(folder, size):
            trainer.write_model(str(folder))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        trainer.args.push_to_hub = pushes


def _write_siblings(state: TrainerState, settings: Any, prepared: Any, folder: Path) -> list[str]:
    """Write the log, the tokenizer, settings of generation and files of the base; return what failed."""
    shown = dataclasses.replace(state, best_model_checkpoint=for_record(state.best_model_checkpoint))
    writers: dict[str, Callable[[], object]] = {
        TRAINER_STATE: lambda: shown.save_to_json(str(folder / TRAINER_STATE)),
        "the tokenizer": lambda: prepared.tokenizer.save_pretrained(folder),
        GENERATION_CONFIG: lambda: settings.to_json_file(folder / GENERATION_CONFIG, keys_to_pop=["compile_config"]),
    }
    for name, content in prepared.files.items():
        if name == CARD_FILE:
            card = without_section(without_results(card_text(content), "training"), PROTECTED_HEADING)
            content = card_bytes(add_training(card, prepared.arguments, state))
        writers[name] = partial((folder / name).write_bytes, content)
    failures = []
    for name, write in writers.items():
        try:
            write()
        except Exception as error:  # of any library that writes it
            (folder / name).unlink(missing_ok=True)
            failures.append(f"{name} ({type(error).__name__}: {first_line(error)})")
    return failures


def _move_model(folder: Path, output: Path) -> None:
    """Move a model's files to the output, the config last, since a folder without one is not a model."""
    try:
        (output / CONFIG_FILE).unlink(missing_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE):
            if (output / path.name).is_dir():
                shutil.rmtree(output / path.name)
            os.replace(path, output / path.name)
        folder.rmdir()
    except OSError as error:
        raise PartialSaveError(
            f"the trained model is in {folder}, and could not be moved to {output}: {first_line(error)}. Move the files "
            "of both into one new folder."
        ) from error


def upload_model(repository: str, output: Path, token: str | None) -> None:
    """Upload the trained model, without its checkpoints, to a repository of the Hub."""
    options: dict[str, Any] = {"token": token, "ignore_patterns": ["checkpoint-*", ".*"]}
    failures: tuple[type[Exception], ...] = (HfHubHTTPError, OSError, *connection_errors())
    try:
        upload_folder(repo_id=repository, folder_path=output, **options)
    except failures as error:
        raise PartialSaveError(
            f"the trained model is in {output}, and could not be uploaded: {first_line(error)}. Upload it by: "
            f"hf upload {repository} {output}"
        ) from error


def add_training(card: str, arguments: Any, state: TrainerState) -> str:
    """Append "Trained with" to a model card: steps, losses, held-out texts before and after, and keys."""
    losses = [event["loss"] for event in state.log_history if "loss" in event]
    final_loss = f"{losses[-1]:.4f}" if losses else "not logged"
    saved = saved_step(arguments, state)
    rows = []  # of held-out losses before the first step and of the saved model
    for name in arguments.eval_texts or (HELD_OUT, GLOSSARY, OWN_TEXT):
        measured = f"eval_{name}_" if name else "eval_"
        by_step = {event["step"]: event for event in state.log_history if f"{measured}loss" in event}
        numbers = [
            f"{by_step[step][measured + kind]:.4f}" if step in by_step else "not measured"
            for kind in ("loss", "perplexity")
            for step in (0, saved)
        ]
        if by_step.keys() & {0, saved}:
            rows.append(f"| {name or 'held out'} | {' | '.join(numbers)} |\n")
    head = "\n| text | loss before training | after | perplexity before | after |\n|---|---|---|---|---|\n"
    section = f"""

## Trained with

| steps | tokens | final loss |
|---|---|---|
| {state.global_step:,} | {int(state.num_input_tokens_seen):,} | {final_loss} |
{head + "".join(rows) if rows else ""}
```yaml
{write_yaml(_shared(arguments.recorded()))}```
"""
    return card.rstrip() + section


def saved_step(arguments: Any, state: TrainerState) -> int:
    """Return the step of the model that a run saves, which may have no checkpoint."""
    best = state.best_model_checkpoint if arguments.load_best_model_at_end else None
    return state.global_step if best is None else int(Path(best).name.rpartition("-")[2])


def _shared(value: Any) -> Any:
    """Return a recorded value with paths that exist here cut to their last part, as cards are shared."""
    if isinstance(value, dict):
        return {key: _shared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shared(inner) for inner in value]
    is_path = isinstance(value, str) and Path(value).expanduser().exists()
    return Path(value).expanduser().name if is_path else value


def new_card(arguments: Any, model_type: str) -> bytes:
    """Return the card of a model made from a config, which names no base, before the training section."""
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- midus_hf
---

# {Path(arguments.output_dir).name}

Trained from scratch: the weights were initialised at random with seed {arguments.seed}, for the config
`{_shared(arguments.config_name)}`. The model has no base model.

{chr(10).join(card_example(model_type, "AutoModelForCausalLM", writes=True))}
"""
    return text.encode()
