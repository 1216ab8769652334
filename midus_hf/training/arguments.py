"""Arguments of a run: the keys of Transformers' `TrainingArguments`, and the keys that memories and texts need."""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from transformers import TrainingArguments

from midus_hf.config.declared_tensors import TrainedRole
from midus_hf.files.secrets import for_record
from midus_hf.saved_models import as_value_error
from midus_hf.training.optim.rates import Rates

# Type of the key `trainable`.
Trainable = Literal["auto", "new", "all"] | list[int | TrainedRole]

# Keys that name what a run reads.
_SOURCES = (
    *("corpus", "tree", "dataset_name", "model_name_or_path", "config_name", "tokenizer_name"),
    *("eval_text", "protect"),
)

# How `HfArgumentParser` reads a flag that may have no value.
_FLAG = {"nargs": "?", "const": True}


@dataclasses.dataclass
class MemoryArguments(Rates):
    """Mixin with the arguments of models and memories, for a subclass of `TrainingArguments`.

    Write `class MyArguments(MemoryArguments, SFTConfig)`, as a dataclass, for arguments that a Trainer with `MemoryTrainerMixin`
    reads. Some defaults differ from those of Transformers: `learning_rate` is 1e-4, `lr_scheduler_type` `cosine` after
    `warmup_steps` 0.1 (a share of the steps), `num_train_epochs` 1, `logging_steps` 10, `save_total_limit` 2,
    `hub_strategy` `end`, and `report_to` `none`; `save_strategy` is `no` unless `save_steps` is given;
    `eval_strategy` is `steps` if `eval_steps` is given, else `epoch` if `eval_text` is.

    Args:
        model_name_or_path: Folder or Hub id of the model to train. Give this or `config_name`.
        config_name: File, folder or Hub id of a config, to train a new model, initialised at random with `seed`.
        tokenizer_name: Folder or Hub id of the tokenizer, only with `config_name`: a saved model comes with a tokenizer.
        attn_implementation: Installed attention, such as `sdpa`, as in `from_pretrained`. Default: transformers' choice.
        trainable: `"new"` (the added layers and memories), `"all"`, a list of layer indices such as `[3, 7]`, or a list
            of roles of tensors in added memories such as `[value]`. `"auto"` is `"new"` or `"all"`, as an upscaled
            model's config says, and `"all"` with `config_name`. Default: `"auto"`.
        frozen: Roles of memory tensors (`midus_hf.config.declared_tensors.TrainedRole`) that stay frozen regardless
            of `trainable`. Default: none.
        num_train_epochs: Passes over the data, if `max_steps` does not say how many steps. Null for a short run: 3, or as many as
            give 100 steps. Default: 1.
        adapters: LoRA by PEFT, merged into the weights at the end: keys of `LoraConfig` (by default `r` 16, `lora_alpha` 32,
            and `target_modules` all linear layers), and `layers`. With `layers: base` (default) the base gets adapters and
            new parts are trained in full; with `all`, all layers get adapters and nothing else trains. Default: none.
        sparse_values: Compute gradients of large value tables, and update them by AdamW, only in the rows that a step
            read. Needs `optim` `adamw_torch` or `adamw_torch_fused`, and one process. Default: false.
        generic_share: Share of the sequences with a path that read the generic memory instead of their path's blocks,
            resampled each epoch (hierarchical memories, section 4). Default: 1 / 17.
        base_kl: Weight of the divergence from the base on the text itself, added to the loss; the token that comes next is
            taken out of both distributions (arXiv:2605.29498). The base is the model without its adapters, or without all that
            upscaling added, and no parameter of it may train. Costs one more forward pass per step. Default: 0, none.
        protect: Texts that keep their logits bit for bit when they are the whole input, as `corpus`. Their n-grams are
            removed from the tables of the trained memories, which must be memories of known n-grams (`engram` with an
            exact table); no other parameter may train. The texts are computed with and without the memories at the end,
            and `certificate.json` lists them. Default: none.
        eval_text: Held-out text as `corpus`, or a mapping from names to several texts, which `eval_strategy` measures as
            packed sequences: `eval_loss` in nats per token, and `eval_perplexity`. Default: none.
        bf16: Compute in bfloat16, with trained parameters in float32; otherwise in float32. Default: true if the device
            computes bfloat16; if not, a message is printed.
        activation_checkpointing: Recompute activations in the backward pass instead of storing them. Default: false.
        activation_checkpointing_kwargs: Arguments of `torch.utils.checkpoint`. Default: Transformers' choice.
        resume_from_checkpoint: True resumes from the latest whole checkpoint in `output_dir`, a path resumes from that
            checkpoint. `"auto"` resumes if there is a whole checkpoint, and otherwise starts from the beginning. Default:
            false.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is str and value.startswith("~/"):
                setattr(self, name, os.path.expanduser(value))
        # Strategies that are not given follow from the steps that are.
        if self.save_strategy is None:
            self.save_strategy = "no" if self.save_steps is None else "steps"
        self.save_steps = 500 if self.save_steps is None else self.save_steps
        if self.eval_strategy is None:
            unsaid = "no" if self.eval_text is None else "epoch"
            self.eval_strategy = unsaid if self.eval_steps is None else "steps"
        if getattr(self, "disable_tqdm", None) is None:
            self.disable_tqdm = not sys.stderr.isatty()
        self.use_cpu = getattr(self, "use_cpu", False) or not torch.accelerator.is_available()
        # Whether float32 was not requested, which the run reports when it starts.
        self.lacks_bf16 = False
        if self.bf16 is None:
            has_fp16 = getattr(self, "fp16", False)
            self.bf16 = not has_fp16 and computes_bfloat16(self.use_cpu)
            self.lacks_bf16 = not self.bf16 and not has_fp16
        if not hasattr(TrainingArguments, "activation_checkpointing") and self.activation_checkpointing is not None:
            # The name before Transformers 5.24.
            self.gradient_checkpointing = self.activation_checkpointing
            self.gradient_checkpointing_kwargs = self.activation_checkpointing_kwargs
        if isinstance(self.protect, str):
            self.protect = [self.protect]
        Rates.__post_init__(self)
        self._check_keys()
        if self.config_name is not None and self.trainable == "auto":
            self.trainable = "all"
        # A loss that is not finite ends the run, so the log must not filter it out.
        self.logging_nan_inf_filter = False
        super_init = getattr(super(Rates, self), "__post_init__", None)
        if super_init is not None:
            with as_value_error("the Trainer refuses its keys", ValueError):
                super_init()

    def _check_keys(self) -> None:
        """Refuse keys that are out of range or contradict others."""
        data_key = getattr(self, "data_key", None)
        if data_key is not None and not getattr(self, data_key):
            raise ValueError(f"config has no {data_key!r}; set it in the recipe, or by --{data_key}.")
        optim, targets = getattr(self, "optim", None), getattr(self, "optim_target_modules", None)
        if targets is not None or _OWN_GROUPS.fullmatch(str(getattr(optim, "value", optim))):
            key, value = ("optim", optim) if targets is None else ("optim_target_modules", targets)
            raise ValueError(
                f"{key} is {value!r}, an optimizer that chooses its parameters itself, but a run makes the groups; expected "
                "one such as adamw_torch. Leave it out."
            )
        for key, (is_right, expected) in _RANGES.items():
            number = getattr(self, key, None)
            if isinstance(number, int | float) and not is_right(number):
                raise ValueError(f"{key} is {number!r}; expected {expected}.")
        if self.base_kl and getattr(self, "use_liger_kernel", False):
            raise ValueError(
                f"base_kl is {self.base_kl:g}, and use_liger_kernel is true, with which a step has no logits; expected one of them."
            )
        roles = get_args(TrainedRole)
        is_choice = isinstance(self.trainable, list) or self.trainable in ("auto", "new", "all")
        for key, is_wrong, expected in (
            ("frozen", not set(self.frozen) <= set(roles), f"roles of memory tensors: {', '.join(roles)}"),
            ("trainable", not is_choice, "'auto', 'new', 'all', or a list such as [3, 7]"),
            ("adapters", isinstance(self.adapters, str), 'a mapping, such as {"r": 16}'),
        ):
            if is_wrong:
                raise ValueError(f"{key} is {getattr(self, key)!r}; expected {expected}.")
        if self.adapters is not None:
            for other, free in (("trainable", "auto"), ("frozen", []), ("protect", None), ("config_name", None)):
                if getattr(self, other) != free:
                    raise ValueError(
                        f"adapters is set and {other} is {getattr(self, other)!r}; with adapters, only adapters and new parameters "
                        f"of a trained model train. Leave adapters out, or set {other}={free}."
                    )
        saved, made_from, tokenizer = self.model_name_or_path, self.config_name, self.tokenizer_name
        given = [each is not None for each in (saved, made_from, tokenizer)]
        if given not in ([True, False, False], [False, True, True]) and any(given):  # scripts bring their own model
            raise ValueError(
                f"model_name_or_path is {saved!r}, config_name {made_from!r} and tokenizer_name {tokenizer!r}; expected the first "
                "alone, for a saved model with its tokenizer, or the other two, for a model that is trained from scratch."
            )

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences of a step in all processes together."""
        arguments: Any = self
        return arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size

    @property
    def eval_texts(self) -> dict[str, str]:
        """Paths of the held-out texts by name; a single text is named `""`, and no text gives `{}`."""
        if self.eval_text is None:
            return {}
        return {"": self.eval_text} if isinstance(self.eval_text, str) else self.eval_text

    def sources(self) -> list[tuple[str, str]]:
        """Return all inputs of the run: the name of each key, with its path or id of a model or dataset."""
        sources: list[tuple[str, Any]] = []
        for key in _SOURCES:
            value = getattr(self, key, None)
            if isinstance(value, Mapping):
                sources += [(f"{key}.{name}", path) for name, path in value.items()]
            else:
                sources += [(key, path) for path in (value if isinstance(value, list) else [value])]
        return [(key, path) for key, path in sources if isinstance(path, str)]

    def recorded(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults, as YAML can hold them, as `for_record` shows them.

        Strategies that follow from steps are left out, and so are steps of disabled strategies.
        """
        values: dict[str, Any] = {}
        # Without the key, another device would compute in bfloat16.
        asked = () if self.lacks_bf16 or getattr(self, "fp16", False) else ("bf16",)
        for field in dataclasses.fields(self):
            default = field.default_factory() if callable(field.default_factory) else field.default
            value = getattr(self, field.name)
            value = getattr(value, "value", value)
            is_default = value == default or (value is False and default is None and field.name not in asked)
            if field.name not in _DERIVED and not field.name.endswith("_token") and not is_default:
                values[field.name] = value
        for kind in ("save", "eval"):
            strategy = values.get(f"{kind}_strategy")
            if strategy == "steps" or (strategy == "no" and (kind == "save" or self.eval_text is None)):
                del values[f"{kind}_strategy"]
                if strategy == "no":
                    values.pop(f"{kind}_steps", None)
        return for_record(values)

    def to_dict(self) -> dict[str, Any]:
        """Return all keys for reports, such as those of TensorBoard, as `for_record` shows them."""
        return for_record(super().to_dict())  # type: ignore[misc]

    def __str__(self) -> str:
        values = for_record({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in values.items())})"

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        return for_record(vars(self))  # `training_args.bin` is pushed

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied


# Keys with a range: the check, and its description in messages.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        (lambda size: size >= 1, "at least 1"),
    ),
    "max_steps": (lambda steps: steps != 0, "more than 0, or -1 for num_train_epochs"),
    "num_train_epochs": (lambda epochs: epochs > 0, "more than 0"),
    "shuffle_buffer": (lambda rows: rows >= 0, "at least 0"),
    "generic_share": (lambda share: 0 <= share <= 1, "a share from 0 to 1"),
    "base_kl": (lambda weight: 0 <= weight < math.inf, "a finite number, at least 0"),
}
# Optimizers that choose the parameters of their groups themselves.
_OWN_GROUPS = re.compile(r"(galore|apollo)_.*|(ada)?lomo")

# Keys that Transformers sets from others, or from the launcher.
_DERIVED = set(
    "accelerator_config parallelism_config local_rank debug do_eval disable_tqdm use_cpu report_to include_num_input_tokens_seen "
    "dataloader_pin_memory logging_nan_inf_filter gradient_checkpointing gradient_checkpointing_kwargs".split()
)


@dataclasses.dataclass(repr=False)
class TrainArguments(MemoryArguments, TrainingArguments):
    """Arguments of `midus train`: every key of `TrainingArguments`, the keys of `MemoryArguments`, and what follows.

    Args:
        corpus: Text to train on: a file, a folder, or the id of a dataset on the Hub, or a list of them.
        corpus_name: Configuration of a dataset on the Hub. Default: the dataset's default.
        corpus_split: Split of the corpus. Default: the only one, or `train`.
        text_column: Column that holds the text. Default: `"text"`.
        path_column: Column with each document's path in a tree of topics, from `midus cluster assign`. Documents are then
            packed within leaves, and fetch blocks by this path. Default: none.
        tree: Folder of the tree of topics that gave the paths; it is saved with the model, and paths of another tree
            are refused. Default: the tree that the corpus names, which is not saved.
        sequence_length: T, tokens per sequence. Default: 2048.
        document_mask: Attend only within documents. Default: false, a sequence is one context, as in the papers.
        streaming: Read, tokenise and pack the corpus while training, without a copy on disk. Needs `max_steps`. Each process reads
            its part of the files, again from the start after the last text. Default: false.
        shuffle_buffer: Number of sequences in memory of which a stream draws the next one; 0 keeps the order. Default: 10,000.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
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
    remove_unused_columns: bool = False
    prediction_loss_only: bool = True
    include_num_input_tokens_seen: str | bool = "all"

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length is {self.sequence_length}; expected at least 2 tokens.")
        if self.tree is not None and self.path_column is None:
            raise ValueError(
                f"tree is {self.tree!r}, and path_column is not given; expected the column with the paths of documents. Leave "
                "tree out, or give the column."
            )
        for key in ("eval_strategy", "eval_steps"):
            if getattr(self, key) not in (None, "no") and self.eval_text is None:
                raise ValueError(f"{key} is {getattr(self, key)!r}, which needs eval_text; set both or neither.")
        super().__post_init__()
        if self.streaming:
            batches: Any = self.accelerator_config
            splits = bool(batches.split_batches or batches.dispatch_batches)
            for key, is_right, expected in (
                (
                    "accelerator_config",
                    not splits,
                    "neither split_batches nor dispatch_batches, since each process reads its own",
                ),
                ("max_steps", self.max_steps > 0, "the number of steps, since the length of a stream is not known"),
                (
                    "dataloader_num_workers",
                    not self.dataloader_num_workers,
                    "0, since a stream is read in its process",
                ),
                (
                    "train_sampling_strategy",
                    self.train_sampling_strategy == "random",
                    "random, since a stream draws from shuffle_buffer, of which 0 keeps the order",
                ),
                ("auto_find_batch_size", not self.auto_find_batch_size, "false, since a stream is read once"),
            ):
                if not is_right:
                    raise ValueError(f"streaming is true, and {key} is {getattr(self, key)!r}; expected {expected}.")


def computes_bfloat16(use_cpu: bool = False) -> bool:
    """Return whether a run's device has instructions for bfloat16; a CPU without them emulates it, nine times slower than float32."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available() and not use_cpu:
        return True
    able = torch.cpu.get_capabilities()
    return any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
