"""Arguments of a run: the keys of `TrainingArguments` and of `keys.py`, with their checks."""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from transformers import TrainingArguments

from midus_hf.config.declared_tensors import TrainedRole
from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.files.secrets import for_record
from midus_hf.training.keys import ModelKeys, Rates, TrainKeys

Trainable = Literal["auto", "new", "all"] | list[int | TrainedRole]

_SOURCES = "corpus tree dataset_name model_name_or_path config_name tokenizer_name eval_text protect".split()


@dataclasses.dataclass
class MemoryArguments(ModelKeys):
    """Mixin with `ModelKeys` for a dataclass that extends `TrainingArguments`, for a `MemoryTrainerMixin`.

    Write `class MyArguments(MemoryArguments, SFTConfig)`. Values that are out of range or contradict others are refused.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is str and value.startswith("~/"):
                setattr(self, name, os.path.expanduser(value))
        # Strategies that are not given follow from the steps that are.
        if self.save_strategy is None:
            self.save_strategy = "no" if self.save_steps is None else "steps"
        self.report_to = "none" if self.report_to is None else self.report_to
        self.save_steps = 500 if self.save_steps is None else self.save_steps
        if self.eval_strategy is None:
            unsaid = "no" if self.eval_text is None else "epoch"
            self.eval_strategy = unsaid if self.eval_steps is None else "steps"
        if getattr(self, "disable_tqdm", None) is None:
            self.disable_tqdm = not sys.stderr.isatty()
        self.use_cpu = getattr(self, "use_cpu", False) or not torch.accelerator.is_available()
        # Whether the device chooses between bfloat16 and float32, which the run reports when it starts.
        self.chooses_bf16 = self.bf16 is None and not getattr(self, "fp16", False)
        if self.bf16 is None:
            self.bf16 = self.chooses_bf16 and computes_bfloat16(self.use_cpu)
        if not hasattr(TrainingArguments, "activation_checkpointing") and self.activation_checkpointing is not None:
            # The name before Transformers 5.24.
            self.gradient_checkpointing = self.activation_checkpointing
            self.gradient_checkpointing_kwargs = self.activation_checkpointing_kwargs
        if isinstance(self.protect, str):
            self.protect = [self.protect]
        if self.eval_share:
            self.eval_on_start = True
            if getattr(self, "load_best_model_at_end", False) and getattr(self, "metric_for_best_model", None) is None:
                self.metric_for_best_model: str | None = "eval_held_out_loss"
        Rates.__post_init__(self)
        self._check_keys()
        if self.config_name is not None and self.trainable == "auto":
            self.trainable = "all"
        # A loss that is not finite ends the run, so the log must not filter it out.
        self.logging_nan_inf_filter = False
        super_init = getattr(super(Rates, self), "__post_init__", None)
        if super_init is not None:
            with as_request_error("the Trainer refuses its keys", ValueError):
                super_init()

    def _check_keys(self) -> None:
        data_key = getattr(self, "data_key", None)
        if data_key is not None and not getattr(self, data_key):
            raise RequestError(f"config has no {data_key!r}; set it in the recipe, or by --{data_key}.")
        optim, targets = getattr(self, "optim", None), getattr(self, "optim_target_modules", None)
        if targets is not None or _OWN_GROUPS.fullmatch(str(getattr(optim, "value", optim))):
            key, value = ("optim", optim) if targets is None else ("optim_target_modules", targets)
            raise RequestError(
                f"{key} is {value!r}, an optimizer that chooses its parameters itself, but a run makes the groups; expected "
                "one such as adamw_torch. Leave it out."
            )
        for key, (is_right, expected) in _RANGES.items():
            number = getattr(self, key, None)
            if isinstance(number, int | float) and not is_right(number):
                raise RequestError(f"{key} is {number!r}; expected {expected}.")
        if self.eval_share and self.eval_text is not None:
            raise RequestError(
                f"eval_share is {self.eval_share:g}, and eval_text is {self.eval_text!r}; expected one of them. Leave one out."
            )
        if self.base_kl and getattr(self, "use_liger_kernel", False):
            raise RequestError(
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
                raise RequestError(f"{key} is {getattr(self, key)!r}; expected {expected}.")
        if self.adapters is not None:
            for other, free in (("trainable", "auto"), ("frozen", []), ("protect", None), ("config_name", None)):
                if getattr(self, other) != free:
                    raise RequestError(
                        f"adapters is set and {other} is {getattr(self, other)!r}; with adapters, only adapters and new parameters "
                        f"of a trained model train. Leave adapters out, or set {other}={free}."
                    )
        saved, made_from, tokenizer = self.model_name_or_path, self.config_name, self.tokenizer_name
        given = [each is not None for each in (saved, made_from, tokenizer)]
        if given not in ([True, False, False], [False, True, True]) and any(given):  # scripts bring their own model
            raise RequestError(
                f"model_name_or_path is {saved!r}, config_name {made_from!r} and tokenizer_name {tokenizer!r}; expected only the "
                "first, for a saved model with its tokenizer, or the other two, for a model that is trained from scratch."
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
            each: Any = value if isinstance(value, list | Mapping) else [value]
            sources += [(f"{key}.{name}", each[name]) if isinstance(each, Mapping) else (key, name) for name in each]
        return [(key, path) for key, path in sources if isinstance(path, str)]

    def recorded(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults, as YAML can hold them, as `for_record` shows them.

        Strategies that follow from steps are left out, and so are steps of disabled strategies.
        """
        values: dict[str, Any] = {}
        # Without the key, another device would compute in bfloat16.
        asked = () if self.chooses_bf16 or getattr(self, "fp16", False) else ("bf16",)
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
    "eval_share": (lambda share: 0 <= share < 1, "a share from 0 to below 1"),
}
# Optimizers that choose the parameters of their groups themselves.
_OWN_GROUPS = re.compile(r"(galore|apollo)_.*|(ada)?lomo")

# Keys that Transformers sets from others, or from the launcher.
_DERIVED = set(
    "accelerator_config parallelism_config local_rank debug do_eval disable_tqdm use_cpu report_to include_num_input_tokens_seen "
    "dataloader_pin_memory logging_nan_inf_filter gradient_checkpointing gradient_checkpointing_kwargs".split()
)


@dataclasses.dataclass(repr=False)
class TrainArguments(TrainKeys, MemoryArguments, TrainingArguments):
    """Arguments of `midus train`: every key of `TrainingArguments`, and `TrainKeys`."""

    remove_unused_columns: bool = False
    prediction_loss_only: bool = True
    include_num_input_tokens_seen: Literal[True, False] | str | None = "all"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise RequestError(f"sequence_length is {self.sequence_length}; expected at least 2 tokens.")
        if self.tree is not None and self.path_column is None:
            raise RequestError(
                f"tree is {self.tree!r}, and path_column is not given; expected the column with the paths of documents. Leave "
                "tree out, or give the column."
            )
        for key in ("eval_strategy", "eval_steps"):
            if (value := getattr(self, key)) not in (None, "no") and self.eval_text is None and not self.eval_share:
                raise RequestError(f"{key} is {value!r}, which needs eval_text or eval_share; set both or neither.")
        super().__post_init__()
        if self.streaming:
            batches: Any = self.accelerator_config
            splits = bool(batches.split_batches or batches.dispatch_batches)
            in_order, has_workers = self.train_sampling_strategy != "random", bool(self.dataloader_num_workers)
            for key, is_wrong, expected in (
                ("accelerator_config", splits, "neither split_batches nor dispatch_batches"),
                ("max_steps", self.max_steps <= 0, "the number of steps, since the length of a stream is not known"),
                ("dataloader_num_workers", has_workers, "0, since a stream is read in its process"),
                ("train_sampling_strategy", in_order, "random; shuffle_buffer: 0 keeps the order"),
                ("auto_find_batch_size", self.auto_find_batch_size, "false, since a stream is read once"),
            ):
                if is_wrong:
                    raise RequestError(f"streaming is true, and {key} is {getattr(self, key)!r}; expected {expected}.")


def computes_bfloat16(use_cpu: bool = False) -> bool:
    """Return whether the device has bfloat16 instructions; other CPUs are 9x slower than in float32."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available() and not use_cpu:
        return True
    able = torch.cpu.get_capabilities()
    return any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
