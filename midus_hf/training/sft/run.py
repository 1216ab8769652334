"""One run of supervised fine-tuning, from its arguments to the trained model."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from trl import SFTTrainer

from midus_hf.models.host import MemoryConfig
from midus_hf.training.data.corpus import read_corpus, say
from midus_hf.training.data.packing import IGNORED_LABEL, packed_sequences
from midus_hf.training.run import Run, TrainResult, preparing
from midus_hf.training.sft.arguments import SftArguments
from midus_hf.training.sft.chats import chat_examples, has_loss
from midus_hf.training.trainer import TrainsMemory


class _ModelLossTrainer(SFTTrainer):
    """TRL's trainer with the loss that the model computes, which may have terms that TRL does not know."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card, since the run extends the card of its model."""


class SftTrainer(TrainsMemory, _ModelLossTrainer):
    """The Trainer of a run of supervised fine-tuning, on examples that are tokens already; TRL cuts and packs them."""

    def __init__(self, model: Any, args: SftArguments, **kwargs: Any):
        prepared = copy.copy(args)
        # Both have been applied to the examples.
        prepared.assistant_only_loss, prepared.chat_template_path = False, None
        # A packed sequence has no padding, and no attention mask that would tell tokens from padding.
        prepared.include_num_input_tokens_seen = "all" if args.packing else "non_padding"
        super().__init__(model, prepared, **kwargs)
        if args.packing and args.packing_strategy != "bfd":
            self._leave_out_sequences_without_loss()
        # TRL's constructor needs the tokenizer, but a Trainer that keeps it rewrites the special tokens in the model's config.
        self.processing_class = None

    def _leave_out_sequences_without_loss(self) -> None:
        """Leave out sequences that lie wholly between answers, whose mean loss over no token would not be a number."""
        sequences: Any = self.train_dataset
        columns = [name for name in ("labels", "seq_lengths") if name in sequences.column_names]
        kept = self.train_dataset = sequences.filter(has_loss, input_columns=columns, load_from_cache_file=False)
        left_out = len(sequences) - len(kept)
        if left_out == len(sequences):
            raise ValueError("no packed sequence has an answer to learn from. Add data, or raise max_length.")
        if left_out:
            say(f"{left_out:,} of {len(sequences):,} packed sequences are left out: no answer in them")


def finetune(arguments: SftArguments) -> TrainResult:
    """Fine-tune a model on chats, or on prompts and their completions.

    Prints what trains, and writes the same files and log events to `arguments.output_dir` as `train`.

    Args:
        arguments: The arguments of the run.

    Returns:
        The folder of the trained model, and the steps, tokens and last loss of the run.

    Raises:
        ValueError: If the arguments are wrong; nothing has been written then.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
    """
    return prepare(arguments).execute()


def prepare(arguments: SftArguments) -> Run:
    """Check the arguments of a run, open its output, load the model and the data, and return the run, ready to start.

    Raises:
        ValueError: If the arguments are wrong; nothing has been written then.
    """
    with preparing(arguments, "max_length") as run:
        banks: dict[str, Any] = run.config.memories().banks if isinstance(run.config, MemoryConfig) else {}
        reads_generic = any(layout.blocks.without_ids == "generic" for layout in banks.values())
        with arguments.main_process_first(desc="reading the chats"):
            examples, last_token = chat_examples(arguments, run.tokenizer, run.config.vocab_size)
            held_out = {
                name: _held_out(f"eval_text {name}".rstrip(), path, run) for name, path in arguments.eval_texts.items()
            }
        run.load_model()
        if last_token is not None:
            _stop_at(run.model, last_token)
        trains = any(parameter.requires_grad for parameter in run.model.parameters())
        if banks and not trains and not reads_generic:
            raise ValueError(
                f"nothing trains: trainable is {arguments.trainable!r}, which is the bank's blocks alone, and chats fetch none "
                "of them; expected trainable: all, adapters, or a model upscaled with without_ids = generic."
            )
        run.make_trainer(
            SftTrainer,
            train_dataset=examples,
            eval_dataset=held_out.get("", held_out) or None,
            processing_class=run.tokenizer,
        )
        lines = [_describe(run.trainer.train_dataset)]
        if banks:
            read = "read the generic memory alone" if reads_generic else "fetch no blocks from the model's bank"
            lines.append(
                f"chats have no paths in a tree of topics: they, and held-out text, {read}, in training and where the model is "
                "measured"
            )
        if arguments.process_index == 0:
            print(*lines, sep="\n")
    return run


def _held_out(key: str, path: str, run: Run) -> Any:
    """Return a held-out text as packed sequences."""
    rows = read_corpus(path, key=key)
    return packed_sequences(rows, run.tokenizer, run.arguments.max_length, key=key, documents_apart=False)


def _describe(sequences: Any) -> str:
    """Return a sentence on the sequences of a run."""
    tokens = sum(map(len, sequences["input_ids"]))
    labels = sum(label != IGNORED_LABEL for row in sequences["labels"] for label in row)
    return f"{len(sequences):,} sequences, {tokens:,} tokens, {labels:,} of them with a loss ({labels / tokens:.1%})"


def _stop_at(model: Any, token: int) -> None:
    """Let generation stop at the token that ends answers."""
    settings = model.generation_config
    stops = settings.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if token not in stops:
        settings.eos_token_id = [*stops, token] if stops else token
