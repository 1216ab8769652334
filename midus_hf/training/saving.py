"""Saving of the trained model: weights appear as a whole, and are kept if other files cannot be written."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import upload_folder
from huggingface_hub.errors import HfHubHTTPError
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerState

from midus_hf.config.wording import first_line
from midus_hf.config.yaml_options import write_yaml
from midus_hf.files.cards import card_example, without_results
from midus_hf.files.checkpoint_files import CARD_FILE, CONFIG_FILE, GENERATION_CONFIG, PARTIAL_MODEL, TRAINER_STATE
from midus_hf.files.outputs import DiskWriteError, convert_disk_errors
from midus_hf.files.secrets import for_record
from midus_hf.models.view import has_adapters
from midus_hf.training.checkpoints import way_on
from midus_hf.training.optim.freezing import restore_dtypes, whole_numel
from midus_hf.training.parallel import shares_parameters
from midus_hf.training.protection import without_section


class PartialSaveError(RuntimeError):
    """Error of a run whose results could not all be written; the message says what is on disk, and where."""


@contextlib.contextmanager
def saving_to(output: Path) -> Iterator[None]:
    """Raise a `PartialSaveError` that says what is in the output, and the free space, if writing within the context fails."""
    try:
        with convert_disk_errors(output):
            yield
    except DiskWriteError as error:
        kept = f"the trained model is in {output}, but " if (output / CONFIG_FILE).is_file() else ""
        raise PartialSaveError(f"{kept}{error.facts}. Free some space there, and {way_on(output)}.") from error


def save_model(
    trainer: Any,
    arguments: Any,
    dtypes: dict[str, torch.dtype],
    uses_cache: bool,
    tokenizer: PreTrainedTokenizerBase,
    files: Mapping[str, bytes],
) -> list[str]:
    """Save the whole trained model, with its dtypes and config as they were loaded; all processes call this.

    Args:
        trainer: The Trainer that trained it; adapters are merged.
        arguments: The run's, which its card records.
        dtypes: The dtypes that tensors had before `cast_for_training`, by their names.
        uses_cache: `use_cache` of the config that was loaded.
        tokenizer: The tokenizer, saved with it.
        files: Contents of other files that accompany it, by their names; a card gets a section on the training.

    Returns:
        A phrase about each file other than weights that could not be written.
    """
    model, is_main = trainer.model, arguments.process_index == 0
    trainer.check_finite()
    if shares_parameters(trainer):
        trainer.saved_dtypes = dtypes
    else:
        restore_dtypes(model, dtypes)
    if has_adapters(model):
        trainer.model = model = model.merge_and_unload()
    model.config.use_cache = uses_cache
    output, partial_model = Path(arguments.output_dir), Path(arguments.output_dir, PARTIAL_MODEL)
    pushes, trainer.args.push_to_hub = trainer.args.push_to_hub, False
    # transformers refuses to save a model with contradictory settings
    settings, model.generation_config = model.generation_config, GenerationConfig()
    size = sum(whole_numel(parameter) * parameter.element_size() for parameter in model.parameters())
    try:
        if is_main:
            shutil.rmtree(partial_model, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        with convert_disk_errors(partial_model, size):
            trainer.save_model(str(partial_model))
    except BaseException:
        shutil.rmtree(partial_model, ignore_errors=True)
        raise
    finally:
        model.generation_config, trainer.args.push_to_hub = settings, pushes
    if not is_main:
        return []
    (partial_model / "training_args.bin").unlink(missing_ok=True)
    failures = _written(partial_model, _beside_weights(arguments, trainer.state, settings, tokenizer, files))
    try:
        _move_into_place(partial_model, output)
    except OSError as error:
        raise PartialSaveError(
            f"the trained model is in {partial_model}, and could not be moved to {output}: {first_line(error)}. Move the files "
            "of both into one new folder."
        ) from error
    return failures


def _move_into_place(partial_model: Path, output: Path) -> None:
    """Move all files into the output, the config last, since a folder without one is not a model; files there are replaced."""
    (output / CONFIG_FILE).unlink(missing_ok=True)
    for path in sorted(partial_model.iterdir(), key=lambda path: path.name == CONFIG_FILE):
        if (output / path.name).is_dir():
            shutil.rmtree(output / path.name)
        os.replace(path, output / path.name)
    partial_model.rmdir()


def upload_model(repository: str, output: Path, token: str | None) -> None:
    options: dict[str, Any] = {"token": token, "ignore_patterns": ["checkpoint-*", ".*"]}
    try:
        upload_folder(repo_id=repository, folder_path=output, **options)
    except (HfHubHTTPError, OSError) as error:
        raise PartialSaveError(
            f"the trained model is in {output}, and could not be uploaded: {first_line(error)}. Upload it by: "
            f"hf upload {repository} {output}"
        ) from error


def _beside_weights(
    arguments: Any,
    state: TrainerState,
    settings: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    given: Mapping[str, bytes],
) -> dict[str, Callable[[Path], object]]:
    """Return functions that write the files other than config and weights into a folder, by the files' names in messages."""
    files = dict(given)
    if CARD_FILE in files:
        # A byte that is no UTF-8 stays as it is.
        card = without_section(without_results(files[CARD_FILE].decode(errors="surrogateescape"), "training"))
        files[CARD_FILE] = add_training(card.encode(errors="surrogateescape"), arguments, state)
    shared = dataclasses.replace(state, best_model_checkpoint=for_record(state.best_model_checkpoint))

    def write(name: str, content: bytes, folder: Path) -> None:
        (folder / name).write_bytes(content)

    return {
        TRAINER_STATE: lambda folder: shared.save_to_json(str(folder / TRAINER_STATE)),
        "the tokenizer": tokenizer.save_pretrained,
        GENERATION_CONFIG: lambda folder: settings.to_json_file(
            folder / GENERATION_CONFIG, keys_to_pop=["compile_config"]
        ),
        **{name: partial(write, name, content) for name, content in files.items()},
    }


def _written(folder: Path, writers: Mapping[str, Callable[[Path], object]]) -> list[str]:
    """Write files into a folder, and return a phrase about each that cannot be written; the others are."""
    failures = []
    for name, write in writers.items():
        try:
            write(folder)
        except Exception as error:  # of any library that writes it
            (folder / name).unlink(missing_ok=True)
            failures.append(f"{name} ({type(error).__name__}: {first_line(error)})")
    return failures


def add_training(card: bytes, arguments: Any, state: TrainerState) -> bytes:
    """Append the section "Trained with" to a model card: steps, losses, held-out texts before and after, and keys."""
    losses = [event["loss"] for event in state.log_history if "loss" in event]
    final_loss = f"{losses[-1]:.4f}" if losses else "not logged"
    keys = write_yaml(_shared(arguments.recorded()))
    section = f"""

## Trained with

| steps | tokens | final loss |
|---|---|---|
| {state.global_step:,} | {int(state.num_input_tokens_seen):,} | {final_loss} |
{_held_out(arguments, state)}
```yaml
{keys}```
"""
    return card.rstrip() + section.encode()


def _held_out(arguments: Any, state: TrainerState) -> str:
    """Return a table of held-out losses before the first step and of the saved model; empty if there are none."""
    best = state.best_model_checkpoint if arguments.load_best_model_at_end else None
    # The best step may have no checkpoint.
    saved = state.global_step if best is None else int(Path(best).name.rpartition("-")[2])
    rows = []
    for name in arguments.eval_texts:
        measured = f"eval_{name}_" if name else "eval_"
        by_step = {event["step"]: event for event in state.log_history if f"{measured}loss" in event}
        numbers = [
            f"{by_step[step][measured + kind]:.4f}" if step in by_step else "not measured"
            for kind in ("loss", "perplexity")
            for step in (0, saved)
        ]
        if by_step.keys() & {0, saved}:
            rows.append(f"| {name or 'held out'} | {' | '.join(numbers)} |\n")
    head = "| text | loss before training | after | perplexity before | after |\n|---|---|---|---|---|\n"
    return f"\n{head}{''.join(rows)}" if rows else ""


def _shared(value: Any) -> Any:
    """Return a recorded value with paths that exist here cut to their last part, since cards are shared."""
    if isinstance(value, dict):
        return {key: _shared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shared(inner) for inner in value]
    is_path = isinstance(value, str) and Path(value).expanduser().exists()
    return Path(value).expanduser().name if is_path else value


def new_card(arguments: Any, model_type: str) -> bytes:
    """Return the card of a model made from a config, without the section on training; the card names no base."""
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
