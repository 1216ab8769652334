"""One run of supervised fine-tuning: TRL makes tokens and labels of chats, cuts and packs them; the rest is a run as any other."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import nn
from transformers import Trainer
from trl import SFTTrainer

from midus_hf.models.host import MemoryConfig
from midus_hf.saved_models import check_ids, refusing
from midus_hf.training.data.corpus import read_corpus, say
from midus_hf.training.data.packing import IGNORED_LABEL, packed_sequences
from midus_hf.training.run import TrainingRun, TrainResult
from midus_hf.training.sft.arguments import SftArguments
from midus_hf.training.sft.rows import read_chats
from midus_hf.training.trainer import TrainsMemory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SftTrainer(TrainsMemory, SFTTrainer):
    """TRL's trainer with the loss that the model computes, which may have terms that TRL does not know."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # TRL's constructor needs the tokenizer, but a Trainer that keeps it rewrites the special tokens in the model's config.
        self.processing_class = None

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
    return SftRun(arguments).execute()


class SftRun(TrainingRun):
    """A run of supervised fine-tuning, ready to start."""

    length_key = "max_length"

    def read_data(self) -> None:
        """Read the chats, and held-out texts as packed sequences."""
        arguments = self.arguments
        self.dataset = read_chats(arguments, self.tokenizer)
        self.held_out = {}
        for name, path in arguments.eval_texts.items():
            key = f"eval_text {name}".rstrip()
            rows = read_corpus(path, key=key)
            self.held_out[name] = packed_sequences(
                rows, self.tokenizer, arguments.max_length, key=key, documents_apart=False
            )

    def make_trainer(self) -> SftTrainer:
        """Make TRL's Trainer, and leave out sequences without an answer.

        Raises:
            ValueError: If nothing trains but blocks of a bank, the template refuses a row, or no answer is left.
        """
        arguments, tokenizer, source = self.arguments, self.tokenizer, self.arguments.dataset_name
        self._check_banks()
        is_chat = "messages" in self.dataset.column_names or isinstance(self.dataset[0]["prompt"], list)
        if not is_chat:  # TRL tells completions from answers of an assistant
            arguments.completion_only_loss, arguments.assistant_only_loss = arguments.assistant_only_loss, False
        named, arguments.chat_template_path = arguments.chat_template_path, None  # the tokenizer has it already
        with refusing(
            f"dataset_name is {source!r}, of which TRL refuses a row", TemplateError, RuntimeError, TypeError
        ):
            trainer = SftTrainer(
                self.model,
                arguments,
                train_dataset=self.dataset,
                eval_dataset=self.held_out.get("", self.held_out) or None,
                processing_class=tokenizer,
            )
        arguments.chat_template_path = named
        if is_chat and arguments.assistant_only_loss:
            _stop_behind_answers(self.model, tokenizer, trainer.chat_template)
        prepared: Any = trainer.train_dataset
        columns = [name for name in ("labels", "seq_lengths") if name in prepared.column_names]
        sequences = prepared.filter(has_loss, input_columns=columns)
        if not len(sequences):
            raise ValueError(
                f"dataset_name is {source!r}, which has no answer to learn from within {arguments.max_length:,} tokens. Add data, or "
                "raise max_length."
            )
        check_ids(max(max(ids) for ids in sequences["input_ids"]), self.config.vocab_size)
        left_out = (len(prepared) if arguments.packing else len(self.dataset)) - len(sequences)
        if left_out:
            unit = "packed sequences" if arguments.packing else "rows"
            say(f"{left_out:,} {unit} are left out: no answer in the part of them that is kept")
        tokens = sum(map(len, sequences["input_ids"]))
        labels = sum(label != IGNORED_LABEL for row in sequences["labels"] for label in row)
        if arguments.process_index == 0:
            print(
                f"{len(sequences):,} sequences, {tokens:,} tokens, {labels:,} of them with a loss ({labels / tokens:.1%})"
            )
        trainer.train_dataset = sequences
        return trainer

    def _check_banks(self) -> None:
        """Say what chats read of a model's bank, and refuse to train blocks alone, which chats do not fetch."""
        banks: dict[str, Any] = self.config.memories().banks if isinstance(self.config, MemoryConfig) else {}
        if not banks:
            return
        reads_generic = any(layout.blocks.without_ids == "generic" for layout in banks.values())
        if not reads_generic and not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                f"nothing trains: trainable is {self.arguments.trainable!r}, which is the bank's blocks alone, and chats fetch none "
                "of them; expected trainable: all, adapters, or a model upscaled with without_ids = generic."
            )
        if self.arguments.process_index == 0:
            read = "read the generic memory alone" if reads_generic else "fetch no blocks from the model's bank"
            print(
                f"chats have no paths in a tree of topics: they, and held-out text, {read}, in training and where the model is "
                "measured"
            )


def has_loss(labels: list[int], lengths: Sequence[int] = ()) -> bool:
    """Return whether a sequence has a token with a loss. The first token of each text has none, since nothing predicts it.

    Args:
        labels: Labels of the sequence.
        lengths: Lengths of the texts that the sequence is packed from. Default: it is one text.
    """
    learned = np.asarray(labels) != IGNORED_LABEL
    learned[np.cumsum([0, *lengths[:-1]])[: len(learned)]] = False
    return bool(learned.any())


def _stop_behind_answers(model: Any, tokenizer: "PreTrainedTokenizerBase", template: str | None) -> None:
    """Let generation stop at the special token that ends answers; say so if text ends them.

    Args:
        template: Template by which TRL finds answers. None: the tokenizer's own.
    """
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded: Any = tokenizer.apply_chat_template(chat, chat_template=template, **options)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    # Some templates also mark the line break behind the token that ends an answer.
    answer = [token for token, is_learned in pairs if is_learned and str(tokenizer.decode([token])).strip()]
    added = tokenizer.added_tokens_decoder
    if answer[-1] not in tokenizer.all_special_ids and not (answer[-1] in added and added[answer[-1]].special):
        say("the chat template ends answers with no special token, so the model will not learn to stop")
        return
    settings = model.generation_config
    stops = settings.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if answer[-1] not in stops:
        settings.eos_token_id = [*stops, answer[-1]] if stops else answer[-1]
