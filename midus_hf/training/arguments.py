"""Arguments of a run: the keys of `TrainingArguments` and of `keys.py`."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from midus_hf.config.declared_tensors import TrainedRole
from midus_hf.config.errors import as_request_error
from midus_hf.files.secrets import for_record
from midus_hf.training.checks import check_keys, check_stream_keys, check_text_keys
from midus_hf.training.keys import ModelKeys, Rates, TrainKeys

Trainable = Literal["auto", "new", "all"] | list[int | TrainedRole]

_SOURCES = "corpus tree dataset_name model_name_or_path config_name tokenizer_name eval_text protect".split()


@dataclasses.dataclass
class MemoryArguments(ModelKeys):
    """Mixin with `ModelKeys` for a dataclass that extends `TrainingArguments`, for a `MemoryTrainerMixin`.

    Write `class MyArguments(MemoryArguments, SFTConfig)`. Values that are out of range or contradict others are refused.
    """

    def __post_init__(self) -> None:
        """Fill in what follows from other keys, and refuse keys that do not fit together."""
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
        check_keys(self)
        if self.config_name is not None and self.trainable == "auto":
            self.trainable = "all"
        # A loss that is not finite ends the run, so the log must not filter it out.
        self.logging_nan_inf_filter = False
        super_init = getattr(super(Rates, self), "__post_init__", None)
        if super_init is not None:
            with as_request_error("the Trainer refuses its keys", ValueError):
                super_init()

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
        check_text_keys(self)
        super().__post_init__()
        check_stream_keys(self)


def computes_bfloat16(use_cpu: bool = False) -> bool:
    """Return whether the device has bfloat16 instructions; other CPUs are 9x slower than in float32."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available() and not use_cpu:
        return True
    able = torch.cpu.get_capabilities()
    return any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
