"""One run of supervised fine-tuning, from its arguments to the trained model."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Trainer
from trl import SFTTrainer, pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.models.host import MemoryConfig
from midus_hf.training.data.corpus import read_corpus
from midus_hf.training.data.packing import IGNORED_LABEL, packed_sequences
from midus_hf.training.run import (
    Run,
    TrainResult,
    check_sequence_length,
    load_config,
    load_tokenizer,
)
from midus_hf.training.sft.arguments import SftArguments
from midus_hf.training.sft.chats import chat_sequences
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
    """The Trainer of a run of supervised fine-tuning, on sequences that are already tokens."""

    def __init__(self, model: Any, args: SftArguments, **kwargs: Any):
        prepared = copy.copy(args)
        prepared.packing = prepared.padding_free = prepared.assistant_only_loss = False
        prepared.chat_template_path = None
        prepared.max_length, prepared.dataset_kwargs = None, {"skip_prepare_dataset": True}
        # A packed sequence has no padding, and no attention mask that would tell tokens from padding.
        prepared.include_num_input_tokens_seen = "all" if args.packing else "non_padding"
        prepared.remove_unused_columns = False
        super().__init__(model, prepared, **kwargs)
        # TRL's constructor needs the tokenizer, but a Trainer that keeps it rewrites the special tokens in the model's config.
        self.processing_class = None


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
    model_config = load_config(arguments)
    check_sequence_length("max_length", arguments.max_length or 0, model_config)
    tokenizer = load_tokenizer(arguments)
    banks = _banks_of(model_config)

    with Run(arguments) as run:
        with arguments.main_process_first(desc="reading the chats"):
            dataset, last_token = chat_sequences(arguments, tokenizer, model_config.vocab_size)
            lines = [*_describe(dataset), *_describe_banks(banks)]
            if arguments.packing:
                dataset = pack_dataset(dataset, arguments.max_length or 0, arguments.packing_strategy)
                lines.insert(1, f"packed into {len(dataset):,} sequences")

        run.load_model(model_config)
        if last_token is not None:
            _stop_at(run.model, last_token)
        trains = any(parameter.requires_grad for parameter in run.model.parameters())
        if banks and not trains and not _reads_generic(banks):
            raise ValueError(
                f"nothing trains: trainable is {arguments.trainable!r}, which is the bank's blocks alone, and chats fetch none "
                "of them; expected trainable: all, adapters, or a model upscaled with without_ids = generic."
            )
        for line in lines if arguments.process_index == 0 else []:
            print(line)
        padding = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
        run.make_trainer(
            SftTrainer,
            tokenizer,
            train_dataset=dataset,
            eval_dataset=_held_out(arguments, tokenizer),
            processing_class=tokenizer,
            data_collator=DataCollatorForLanguageModeling(padding, padding_free=arguments.packing),
        )
    return run


def _held_out(arguments: SftArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the held-out texts as packed sequences, by name if there are several; None without held-out text."""
    texts = {
        name: packed_sequences(read_corpus(path), tokenizer, arguments.max_length or 0, documents_apart=False)
        for name, path in arguments.eval_texts.items()
    }
    return texts.get("", texts) or None


def _describe(dataset: Any) -> list[str]:
    """Return a sentence on the examples of a run, how many tokens they have, and how many of these have a loss."""
    tokens = sum(map(len, dataset["input_ids"]))
    labels = sum(label != IGNORED_LABEL for row in dataset["labels"] for label in row)
    return [f"{len(dataset):,} examples, {tokens:,} tokens, {labels:,} of them with a loss ({labels / tokens:.1%})"]


def _banks_of(model_config: PreTrainedConfig) -> dict[str, BankLayout]:
    return model_config.memories().banks if isinstance(model_config, MemoryConfig) else {}


def _reads_generic(banks: dict[str, BankLayout]) -> bool:
    """Return whether texts without paths read, and therefore train, the generic memory of a bank."""
    return any(layout.blocks.without_ids == "generic" for layout in banks.values())


def _describe_banks(banks: dict[str, BankLayout]) -> list[str]:
    """Return a sentence for the user if the model has banks, since chats have no paths and fetch no blocks."""
    if not banks:
        return []
    read = "read the generic memory alone" if _reads_generic(banks) else "fetch no blocks from the model's bank"
    return [
        f"chats have no paths in a tree of topics: they, and held-out text, {read}, in training and where the model is measured"
    ]


def _stop_at(model: Any, token: int) -> None:
    """Let generation stop at the token that ends answers."""
    settings = model.generation_config
    stops = settings.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if token not in stops:
        settings.eos_token_id = [*stops, token] if stops else token
