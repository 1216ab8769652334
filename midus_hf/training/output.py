"""The output folder of a run: who may write it, the record of the arguments, and how the trained model and its card get there."""

import codecs
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import broadcast_object_list
from transformers import TrainerState

from midus_hf.files.card_example import card_example
from midus_hf.files.checkpoint_files import CARD_FILE, RUN_CONFIG, is_begun_run
from midus_hf.files.locks import Lock, lock_or_warn
from midus_hf.files.secrets import for_record
from midus_hf.files.whole_files import whole_file
from midus_hf.topics.corpus import say
from midus_hf.training.arguments import AUTO
from midus_hf.training.checkpoints import latest_whole, resumed_checkpoint
from midus_hf.training.early_checks import check_folder, holds_files

# Keys that may change when a run is resumed, because they do not change what is computed.
_FREE = re.compile(
    "(output_dir|resume_|run_name|project|attn_implementation|use_cpu|skip_memory_metrics|log_level"
    "|logging_|save_|load_best_model|eval_|per_device_|gradient_accumulation|metric_for_best|greater_is_better|push_to_hub|hub_"
    "|activation_checkpointing|gradient_checkpointing|dataloader_(num_workers|prefetch|persistent)|disable_tqdm).*"
)

_SEQUENCES = "sequences_per_step"


def open_output(arguments: Any) -> tuple[Path | None, Lock | None]:
    """Check that a run may write its output, lock and begin it, and return the checkpoint to resume from, and the lock.

    The main process does this for all; the others return no lock.

    Raises:
        ValueError: If the output cannot be written, is being written, holds files and is not resumed, or holds an input or
            lies in one; if there is no whole checkpoint to resume from, or a key that changes the run differs from it.
    """
    locks: list[Lock | None] = [None]

    def open_here() -> Path | None:
        checkpoint, locks[0] = _open_here(Path(arguments.output_dir), arguments)
        return checkpoint

    return by_main_process(arguments, open_here), locks[0]


def by_main_process(arguments: Any, make: Callable[[], Any]) -> Any:
    """Return in all processes what a function returns in the main process, or raise in all the `ValueError` that it raises."""
    outcome: list[Any] = [None, None]
    if arguments.process_index == 0:
        try:
            outcome[0] = make()
        except ValueError as error:
            outcome[1] = str(error)
    broadcast_object_list(outcome)
    made, refusal = outcome
    if refusal is not None:
        raise ValueError(refusal)
    return made


def _open_here(output: Path, arguments: Any) -> tuple[Path | None, Lock | None]:
    check_folder(output, arguments.sources())
    new_folders = [folder for folder in (output, *output.parents) if not folder.exists()]
    output.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_or_warn(output)
    except BlockingIOError:
        raise ValueError(
            f"output_dir {str(output)!r} is being written by another run. Wait for it, or choose another folder."
        ) from None
    try:
        checkpoint = _checkpoint_to_resume(output, arguments)
        if checkpoint is not None:
            _check_same_run(arguments, checkpoint)
        record_arguments(arguments)
    except BaseException:
        if lock is not None:
            lock.release()
        for folder in new_folders:
            folder.rmdir()
        raise
    return checkpoint, lock


def record_arguments(arguments: Any) -> None:
    """Write the arguments of a run into its output."""
    with whole_file(Path(arguments.output_dir, RUN_CONFIG)) as partial:
        partial.write_text(yaml.safe_dump(_record(arguments), sort_keys=False), encoding="utf-8")


def sequences_per_step(arguments: Any) -> int:
    """Return the number of sequences of a step in all processes together."""
    return arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size


def _record(arguments: Any) -> dict[str, Any]:
    return {**arguments.recorded(), _SEQUENCES: sequences_per_step(arguments)}


def close_output(arguments: Any, lock: Lock | None) -> None:
    """Release the lock on the output of a run; take back the record of a run that left nothing else."""
    if lock is not None:
        lock.release()
    output = Path(arguments.output_dir)
    if int(os.environ.get("RANK", 0)) == 0 and sorted(os.listdir(output)) == [RUN_CONFIG]:
        (output / RUN_CONFIG).unlink()
        output.rmdir()


def _checkpoint_to_resume(output: Path, arguments: Any) -> Path | None:
    resume = arguments.resume_from_checkpoint
    if resume and resume != AUTO:
        return resumed_checkpoint(output, resume)
    whole = latest_whole(output) if resume == AUTO else None
    files = sorted(os.listdir(output)) if output.is_dir() else []
    if whole is None and files and not (resume == AUTO and all(is_begun_run(name) for name in files)):
        raise holds_files(output, files)
    return whole


def _check_same_run(arguments: Any, checkpoint: Path) -> None:
    """Refuse keys that would change a run which goes on from a checkpoint, since a run keeps its schedule and data."""
    path = checkpoint.parent / RUN_CONFIG
    if not path.is_file():
        return
    earlier, record = for_record(yaml.safe_load(path.read_text(encoding="utf-8"))), _record(arguments)
    if arguments.least_steps:  # the number of epochs is not chosen yet
        record["num_train_epochs"] = earlier.get("num_train_epochs")
    if earlier.get(_SEQUENCES) != record[_SEQUENCES]:
        raise ValueError(
            f"a step of the run to resume takes {earlier.get(_SEQUENCES)} sequences, and one of this run {record[_SEQUENCES]}; set "
            "gradient_accumulation_steps or per_device_train_batch_size so that all processes together take as many."
        )
    for name in sorted(earlier.keys() | record.keys()):
        if not _FREE.fullmatch(name) and earlier.get(name) != record.get(name):
            raise ValueError(
                f"{name} is {record.get(name, 'its default')!r}, but the run to resume has {earlier.get(name, 'its default')!r}; "
                "give the same, or start a new run in another folder."
            )


def readable_card(card: bytes) -> bytes:
    """Return a model card in UTF-8; one in UTF-16, or of bytes that are no UTF-8, is converted, which a line says."""
    for encoding in (
        ("utf-16",) if card.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ("utf-8", "latin-1")
    ):
        try:
            text = card.decode(encoding)
        except UnicodeDecodeError:
            continue
        if encoding != "utf-8":
            say(f"the model's {CARD_FILE} is not UTF-8; it is read as {encoding.upper()}, and saved as UTF-8")
        return text.encode()
    say(f"the model's {CARD_FILE} cannot be read as text; the trained model gets an empty one")
    return b""


def add_training(card: bytes, arguments: Any, state: TrainerState) -> bytes:
    """Append the section "Trained with" to a model card: steps, losses, held-out texts before and after, and keys.

    The card shows only the last part of local paths, since cards are made to be shared.

    Args:
        card: The `README.md` of the model that was trained, in UTF-8.
        state: State of the Trainer at the end.
    """
    losses = [event["loss"] for event in state.log_history if "loss" in event]
    final_loss = f"{losses[-1]:.4f}" if losses else "not logged"
    keys = yaml.safe_dump(_without_folders(arguments.recorded()), sort_keys=False)
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


def _without_folders(value: Any) -> Any:
    """Return a recorded value with the last part of each path that exists here, in mappings and lists too."""
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    is_path = isinstance(value, str) and Path(value).expanduser().exists()
    return Path(value).expanduser().name if is_path else value


def _held_out(arguments: Any, state: TrainerState) -> str:
    """Return a table of what held-out texts measured before the first step and of the saved model; empty if neither was measured."""
    saved = state.best_global_step if arguments.load_best_model_at_end else state.global_step
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


def new_card(arguments: Any, model_type: str) -> bytes:
    """Return the card of a model made from a config, without the section on training; the card names no base."""
    metadata = yaml.safe_dump(
        {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["midus_hf"]}, sort_keys=False
    )
    config = _without_folders(arguments.config_name)
    text = f"""---
{metadata}---

# {Path(arguments.output_dir).name}

Trained from the beginning: the weights were made at random by seed {arguments.seed}, for the config `{config}`. The
model is based on no other.

{chr(10).join(card_example(model_type, "AutoModelForCausalLM", writes=True))}
"""
    return text.encode()
