"""The keys of a run that are new or have other defaults than the Trainer's; the help needs no torch."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from midus_hf.config.declared_tensors import TrainedRole
from midus_hf.config.errors import RequestError

# Steps that a warning about fewer recommends, and that a short run takes at least.
ENOUGH_STEPS = 100

# Rate of new parts, of adapters, and of what has no gradient before its first step, where none is measured.
NEW_RATE = 1e-3

_FLAG = {"nargs": "?", "const": True}
ValueSchedule = Literal["constant", "fixed", "4x-to-1x"]
MemoryKeys = Literal["constant", "weights"]


def short_run_rates(rate: float) -> dict[str, float]:
    """Return the rates of new parameters in a short run: ten times the rate for values, which are zero."""
    values = float(f"{10 * rate:.15g}")  # rounded, so that ten times 3e-4 is 0.003
    return {"learning_rate": rate, "value_learning_rate": values}


def trains_new_parts(keys: Mapping[str, Any], recorded: str | None) -> bool:
    """Return whether only adapters or new parts train, which need higher rates; `recorded` is `upscale`'s."""
    if keys.get("adapters") is not None:
        return True
    trainable = keys.get("trainable", "auto")
    if trainable == "auto":
        trainable = recorded
    # A list of roles names tensors of added memories; a list of numbers may name layers of the base.
    return trainable == "new" or (isinstance(trainable, list) and all(isinstance(part, str) for part in trainable))


def planned_epochs(arguments: Any, num_sequences: int) -> float:
    """Return the passes of a run over its sequences; a short run takes at least `ENOUGH_STEPS` steps."""
    if arguments.num_train_epochs is not None:
        return arguments.num_train_epochs
    return max(3, math.ceil(ENOUGH_STEPS / math.ceil(num_sequences / arguments.sequences_per_step)))


def planned_steps(arguments: Any, num_sequences: int) -> int:
    """Return the number of optimizer steps of a run over so many sequences."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    per_epoch = max(1, num_sequences // arguments.sequences_per_step)
    return math.ceil(planned_epochs(arguments, num_sequences) * per_epoch)


@dataclasses.dataclass
class Rates:
    """Learning rate and weight decay of each kind of tensor.

    Args:
        learning_rate: Maximum rate of everything without a separate rate. Null: a run measures one that fits model, method and text
            (`midus_hf/training/rates.py`), and those of values and gains. Default: 1e-4.
        memory_learning_rate: Maximum rate of a memory's projections, norms, routers, gates and transforms; follows the schedule.
            Default: `learning_rate`.
        key_value_learning_rate: Rate of memory keys and values, constant. Default: `learning_rate`.
        value_learning_rate: Rate of memory values only. Default: `key_value_learning_rate`.
        gain_learning_rate: Maximum rate of gains of norms that start at zero in new layers, times the root mean square of the gains
            that they are added next to, which `upscale` records; follows the schedule. Default: `learning_rate`, without the factor.
        value_schedule: Schedule of the rate of values. `"constant"`: as for keys (MIDUS). `"fixed"`: with warm-up and schedule
            (Memory Layers at Scale, Mixture of Chapters). `"4x-to-1x"`: `"fixed"` times a factor that falls linearly from 4 to 1 in
            the first quarter of the steps (UltraMemV2, appendix E.6: 350 billion of 1.4 trillion tokens). Default: `"constant"` for
            values in the model, `"fixed"` for blocks of a bank (hierarchical memories, appendix A.2).
        memory_keys: Training of keys. `"constant"`: at one rate, without decay (MIDUS). `"weights"`: with schedule and decay (Memory
            Layers at Scale, UltraMemV2). Default: `"constant"`.
        weight_decay: Decay of matrices. Norms and biases have none, nor do constant keys. Default: 0.
        value_weight_decay: Decay of memory values. Default: 0.
    """

    learning_rate: float | None = 1e-4
    memory_learning_rate: float | None = None
    key_value_learning_rate: float | None = None
    value_learning_rate: float | None = None
    gain_learning_rate: float | None = None
    value_schedule: ValueSchedule | None = None
    memory_keys: MemoryKeys = "constant"
    weight_decay: float = 0.0
    value_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        schedules = (*get_args(ValueSchedule), None)
        for name, choices in (("value_schedule", schedules), ("memory_keys", get_args(MemoryKeys))):
            if getattr(self, name) not in choices:
                expected = ", ".join(map(repr, choices))
                raise RequestError(f"{name} is {getattr(self, name)!r}; expected one of {expected}.")
        for name in (field.name for field in dataclasses.fields(Rates) if field.name.endswith(("rate", "decay"))):
            value = getattr(self, name)
            is_rate = name.endswith("rate")
            if value is not None and value <= 0 and (is_rate or value < 0):
                raise RequestError(f"{name} is {value}; expected {'a number above 0' if is_rate else '0 or more'}.")


@dataclasses.dataclass
class ModelKeys(Rates):
    """Keys of models and memories, and of how they train.

    Args:
        model_name_or_path: Folder or Hub id of the model to train. Give this or `config_name`. Default: none.
        config_name: File, folder or Hub id of a config, to train a new model, initialised at random with `seed`. Default: none.
        tokenizer_name: Folder or Hub id of the tokenizer, only with `config_name`: a saved model comes with a tokenizer. Default:
            none.
        attn_implementation: Installed attention, such as `sdpa`, as in `from_pretrained`. Default: transformers' choice.
        trainable: `"new"` (the added layers and memories), `"all"`, a list of layer indices such as `[3, 7]`, or a list of roles of
            tensors in added memories such as `[value]`. `"auto"` is `"new"` or `"all"`, as an upscaled model's config says, and
            `"all"` with `config_name`. Default: `"auto"`.
        frozen: Roles of memory tensors (`midus_hf.config.declared_tensors.TrainedRole`) that stay frozen regardless of `trainable`.
            Default: none.
        num_train_epochs: Passes over the data, if `max_steps` does not say how many steps. Null: 3, or as many as give 100 steps.
            Default: 1.
        adapters: LoRA by PEFT, merged into the weights at the end: keys of `LoraConfig` (by default `r` 16, `lora_alpha` 32, and
            `target_modules` all linear layers), and `layers`. With `layers: base` (default) the base gets adapters and new parts are
            trained in full; with `all`, all layers get adapters and nothing else trains. Default: none.
        sparse_values: Compute gradients of large value tables, and update them by AdamW, only in the rows that a step read. Needs
            `optim` `adamw_torch` or `adamw_torch_fused`, and one process. Default: false.
        generic_share: Share of the sequences with a path that read the generic memory instead of their path's blocks, resampled each
            epoch (hierarchical memories, section 4). Default: 1 / 17.
        base_kl: Weight of the divergence from the base on the text itself, added to the loss; the token that comes next is taken out
            of both distributions (arXiv:2605.29498). The base is the model without its adapters, or without all that upscaling added,
            and no parameter of it may train. Costs one more forward pass per step. Default: 0, none.
        protect: Texts that keep their logits bit for bit when they are the whole input, as `corpus`. Their n-grams are removed from
            the tables of the trained memories, which must be memories of known n-grams (`engram` with an exact table); no other
            parameter may train. The texts are computed with and without the memories at the end, and `certificate.json` lists them.
            Default: none.
        eval_text: Held-out text as `corpus`, or a mapping from names to several texts, which `eval_strategy` measures as packed
            sequences: `eval_loss` in nats per token, and `eval_perplexity`. Default: none.
        eval_share: Share of the documents or chats that are held out of training, chosen by the SHA-256 of their text, and measured
            before the first step and after the last. Default: 0.
        bf16: Compute in bfloat16, with trained parameters in float32; otherwise in float32. Default: true if the device computes
            bfloat16; a line says which.
        activation_checkpointing: Recompute activations in the backward pass instead of storing them. Default: false.
        activation_checkpointing_kwargs: Arguments of `torch.utils.checkpoint`. Default: Transformers' choice.
        resume_from_checkpoint: True resumes from the latest whole checkpoint in `output_dir`, a path resumes from that checkpoint.
            `"auto"` resumes if there is a whole checkpoint, and otherwise starts from the beginning. Default: false.
        lr_scheduler_type: Schedule of the rates, one of Transformers' `SchedulerType`. Default: `"cosine"`.
        warmup_steps: Steps in which the rates rise from 0, or below 1 a share of the steps. Default: 0.1.
        logging_steps: Steps between two losses in the log, or below 1 a share of the steps. Default: 10.
        save_strategy: When a checkpoint is saved: `"no"`, `"steps"`, `"epoch"` or `"best"`. Default: `"steps"` if `save_steps` is
            given, else `"no"`.
        save_steps: Steps between two checkpoints, or below 1 a share of the steps. Default: 500.
        save_total_limit: Number of checkpoints that are kept. Default: 2.
        eval_strategy: When `eval_text` is measured: `"no"`, `"steps"` or `"epoch"`. Default: `"steps"` if `eval_steps` is given, else
            `"epoch"` if `eval_text` is.
        eval_steps: Steps between two measurements, or below 1 a share of the steps. Default: `logging_steps`.
        hub_strategy: What `push_to_hub` pushes, and when: one of Transformers' `HubStrategy`. Default: `"end"`.
        report_to: Services that get the log, such as `tensorboard`, or `"all"` that are installed. Default: `"none"`.
    """

    # The command that trains with these arguments, and its keys of the data and of the length of a sequence.
    command: ClassVar[str]
    data_key: ClassVar[str]
    length_key: ClassVar[str]

    model_name_or_path: str | None = None
    config_name: str | None = None
    tokenizer_name: str | None = None
    attn_implementation: str | None = None
    # For a key with several types `HfArgumentParser` reads text if `str` is the second of them and None is one of them.
    trainable: list[int | TrainedRole] | str | None = "auto"
    frozen: list[str] = dataclasses.field(default_factory=list)
    adapters: dict[str, Any] | str | None = None
    sparse_values: bool = False
    generic_share: float = 1 / 17
    base_kl: float = 0.0
    protect: list[str] | str | None = dataclasses.field(default=None, metadata={"nargs": "+"})
    eval_text: dict[str, str] | str | None = None
    eval_share: float = 0.0
    bf16: bool | None = dataclasses.field(default=None, metadata=_FLAG)
    activation_checkpointing: bool | None = dataclasses.field(default=None, metadata=_FLAG)
    activation_checkpointing_kwargs: dict[str, Any] | str | None = None
    resume_from_checkpoint: Literal[True, False] | str | None = None
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.1
    num_train_epochs: float | None = 1.0
    logging_steps: float = 10
    save_strategy: str | None = None
    save_steps: float | None = None
    save_total_limit: int | None = 2
    eval_strategy: str | None = None
    eval_steps: float | None = None
    hub_strategy: str = "end"
    report_to: list[str] | str | None = "none"


@dataclasses.dataclass(repr=False)
class TrainKeys(ModelKeys):
    """Keys of `midus train`: those of `ModelKeys`, and of its texts.

    Args:
        corpus: Text to train on: a file, a folder, or the id of a dataset on the Hub, or a list of them. Default: none.
        corpus_name: Configuration of a dataset on the Hub. Default: the dataset's default.
        corpus_split: Split of the corpus. Default: the only one, or `train`.
        text_column: Column that holds the text. Default: `"text"`.
        path_column: Column with each document's path in a tree of topics, from `midus cluster assign`. Documents are then packed
            within leaves, and fetch blocks by this path. Default: none.
        tree: Folder of the tree of topics that gave the paths; it is saved with the model, and paths of another tree are refused.
            Default: the tree that the corpus names, which is not saved.
        sequence_length: T, tokens per sequence. Default: 2048.
        document_mask: Attend only within documents. Default: false, a sequence is one context, as in the papers.
        streaming: Read, tokenise and pack the corpus while training, without a copy on disk. Needs `max_steps`. Each process reads
            its part of the files, or of the texts if the files cannot be shared equally, and begins again after the last text.
            Default: false.
        shuffle_buffer: Number of sequences in memory from which a stream draws the next; 0 keeps the order. Default: 10,000.
    """

    command: ClassVar[str] = "train"
    data_key: ClassVar[str] = "corpus"
    length_key: ClassVar[str] = "sequence_length"

    corpus: list[str] | str | None = dataclasses.field(default=None, metadata={"nargs": "+"})
    corpus_name: str | None = None
    corpus_split: str | None = None
    text_column: str = "text"
    path_column: str | None = None
    tree: str | None = None
    sequence_length: int = 2048
    document_mask: bool = False
    streaming: bool = False
    shuffle_buffer: int = 10_000


@dataclasses.dataclass(repr=False)
class SftKeys(ModelKeys):
    """Keys of `midus sft`: those of `ModelKeys`, and of its chats.

    Args:
        dataset_name: A file of rows (JSON, CSV or Parquet), a folder, or the id of a dataset on the Hub, read as `corpus` of `midus
            train` is. Default: none.
        dataset_config: Configuration of a dataset on the Hub or of a downloaded one. Default: the dataset's own.
        dataset_train_split: Split of the data. Default: the only one, or `train`.
        max_length: Most tokens of a chat, or of a sequence of packed chats; longer chats are cut. Default: 2048.
        chat_template_path: Template of chats, saved with the tokenizer: `"chatml"`, or a file with a Jinja template that has `{%
            generation %}` around answers. Default: the tokenizer's own, for training in TRL's version.
        assistant_only_loss: Compute the loss only on answers: messages of the assistant with their end tokens, or completions.
            Default: true.
        activation_checkpointing: Recompute activations in the backward pass instead of storing them. Default: true.
        completion_only_loss: Compute the loss only on completions, of rows that have them. Default: as `assistant_only_loss`.
        packing: Pack several short chats into a sequence, without attention between them. Default: false.
        include_num_input_tokens_seen: Tokens that count as seen. Default: `"non_padding"`, and `"all"` with `packing`, whose
            sequences have no padding and no attention mask.
    """

    command: ClassVar[str] = "sft"
    data_key: ClassVar[str] = "dataset_name"
    length_key: ClassVar[str] = "max_length"

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str | None = None
    max_length: int | None = 2048
    chat_template_path: str | None = None
    assistant_only_loss: bool = True
    packing: bool = False
    completion_only_loss: bool | None = None
    include_num_input_tokens_seen: Literal[True, False] | str | None = None
