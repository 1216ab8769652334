"""Preparation of a run: its texts, and its model with what trains."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from midus_hf.models.view import ModelView
from midus_hf.training.inputs import Digests, RunTexts, load_for_training, model_hashes
from midus_hf.training.optim import cast_for_training, set_trainable
from midus_hf.training.outcome import measured_texts
from midus_hf.training.output import in_main_process
from midus_hf.training.protection import Protection
from midus_hf.training.sft.template_day import first_day

_CHOSEN_DTYPE = {
    True: "this device computes bfloat16: the run computes in it, with trained parameters in float32; set bf16 to choose",
    False: "this device does not compute bfloat16: the run computes in float32; set bf16 to choose",
}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a run has read and loaded; its arguments, and all of this, have been checked.

    Args:
        arguments: The run's own copy of `MemoryArguments`.
        tokenizer: The tokenizer, which is saved with the model.
        texts: Training and held-out data.
        model: The model, or PEFT's model around it, with `requires_grad` set and trained tensors in float32.
        saved_dtypes: Dtypes of the model's tensors as loaded, by name, in which it is saved.
        uses_cache: `use_cache` of the config as loaded.
        files: Contents of files to save with the model, by name.
        hashes: SHA-256 of what the model is made of; empty in other than the main process.
        checkpoint: The checkpoint to resume from, if any.
        first_day: The day on which the run began, as YYYY-MM-DD.
        protection: The texts whose logits stay, if any.
    """

    arguments: Any
    tokenizer: PreTrainedTokenizerBase
    texts: RunTexts
    model: Any
    saved_dtypes: dict[str, torch.dtype]
    uses_cache: bool
    files: dict[str, bytes]
    hashes: Digests
    checkpoint: Path | None
    first_day: str
    protection: Protection | None


def prepare(
    arguments: Any,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    read: Callable[..., RunTexts],
    trains: bool = True,
) -> Prepared:
    """Read the texts of a run, and load its model; print what trains.

    Args:
        arguments: `MemoryArguments`, which this changes: `num_train_epochs` where `max_steps` decides, and `eval_on_start` where
            nothing is held out.
        config: The model's config.
        tokenizer: The tokenizer.
        checkpoint: The checkpoint to resume from, if any.
        read: Returns training and held-out data, from arguments, config and tokenizer.
        trains: Whether the run trains, so that the model is hashed, and what trains is printed. Default: True.

    Raises:
        RequestError: If texts or model cannot be read, or do not fit one another.
    """
    is_main = arguments.process_index == 0
    if arguments.num_train_epochs is None and arguments.max_steps > 0:
        arguments.num_train_epochs = 1.0  # which the Trainer compares with 0, and else leaves to max_steps
    day = in_main_process(arguments, partial(first_day, checkpoint))
    with arguments.main_process_first(desc="reading texts"):
        texts = read(arguments, config, tokenizer)
    if arguments.eval_share and texts.held_out is None:
        arguments.eval_on_start = False
    set_seed(arguments.seed)
    model, files = load_for_training(arguments, config)
    hashes = model_hashes(model, arguments) if is_main and trains else {}
    uses_cache = model.config.use_cache
    if arguments.eval_share and texts.held_out is not None:
        texts = texts._replace(held_out=measured_texts(texts.held_out, model, tokenizer, arguments))
    trained, report = _choose_trained(ModelView(model), arguments)
    saved_dtypes = cast_for_training(trained, bool(arguments.bf16))
    if is_main and trains:
        print(report)
        if arguments.chooses_bf16:
            print(_CHOSEN_DTYPE[arguments.bf16])
        if checkpoint is not None:
            print(f"resuming from {checkpoint}")
    protection = None
    if arguments.protect:
        protection = _protect(trained, tokenizer, arguments, checkpoint)
    return Prepared(
        arguments=arguments,
        tokenizer=tokenizer,
        texts=texts,
        model=trained,
        saved_dtypes=saved_dtypes,
        uses_cache=uses_cache,
        files=files,
        hashes=hashes,
        checkpoint=checkpoint,
        first_day=day,
        protection=protection,
    )


def _choose_trained(view: ModelView, arguments: Any) -> tuple[Any, str]:
    """Set what trains; return the model, or PEFT's model around it, and what trains in words."""
    if arguments.adapters is None:
        return view.model, str(set_trainable(view, arguments.trainable, arguments.frozen))
    from midus_hf.training.adapters import add_adapters

    assert isinstance(arguments.adapters, dict), "checked by the arguments"
    return add_adapters(view, arguments.adapters)


def _protect(model: Any, tokenizer: Any, arguments: Any, checkpoint: Path | None) -> Protection:
    """Take protected texts out of the model's tables; print what is left to learn with."""
    with arguments.main_process_first(desc="reading protected texts"):
        column = getattr(arguments, "text_column", "text")
        protection = Protection(model, tokenizer, arguments.protect, column)
    if checkpoint is not None:
        protection.check_checkpoint(model, checkpoint)
    if arguments.process_index == 0:
        print(protection)
    return protection
