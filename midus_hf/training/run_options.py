"""Options that every training run has, whatever it trains on."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, Self

from midus_hf.config.declared_tensors import TrainedRole

# Type of the option `trainable` of `RunOptions`.
Trainable = Literal["auto", "new", "all"] | list[int | TrainedRole]

# Layers that can have adapters: see `adapters` of `RunOptions`.
AdapterLayers = Literal["base", "new", "all"]

# Value of `resume_from_checkpoint` that resumes a run if there is a checkpoint: see `RunOptions`.
AUTO = "auto"

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """Model, output, what trains, how long, and what is logged and kept.

    Args:
        model_name_or_path: Folder or Hub id of the model to train. Give this or `config_name`.
        config_name: File, folder or Hub id of a config, to train a new model with weights drawn by `seed`.
        tokenizer_name: Folder or Hub id of the tokenizer, with `config_name` only: a saved model has its own tokenizer.
        output_dir: Folder for checkpoints, logs and the trained model. A folder with files needs
            `resume_from_checkpoint` or `overwrite_output_dir`. Default: `"trainer_output"`, as in Transformers.
        output_on_failure: Empty or new folder, best on another disk, for what was trained if writing to `output_dir`
            fails. Default: a new folder among the system's temporary files, if it has room.
        trainable: `"new"` (the added layers and memories), `"all"`, a list of layer indices such as `[3, 7]`, or a list
            of roles of tensors in added memories such as `[value]`. `"auto"` is `"new"` or `"all"`, as an upscaled
            model's config says, and `"all"` with `config_name`. Default: `"auto"`.
        frozen: Roles of memory tensors (`midus_hf.config.declared_tensors.TrainedRole`) that stay frozen whatever `trainable`
            says. Default: none.
        adapters: PEFT adapters, merged into the weights at the end, as a mapping of `method` (default `lora`, with `r`
            16 and `lora_alpha` 32), `layers`, and keys of the method's config such as `target_modules` (default: all
            linear layers). With `layers: base` (default) the base has adapters, and new parts of the model train whole.
            With `new` (new layers without memory) or `all`, only adapters train. Default: none, weights train as
            `trainable` says.
        balance_loss: Coefficient of a loss that is small when tokens spread over all keys of a memory
            (`midus_hf.memory.balance.balance_loss`). Default: 0, none.
        sparse_values: Compute gradients of large value tables, and update them by AdamW, only in the rows that a step
            read. Needs an `adamw_torch` optimizer, and one process or `shard_values`. Default: false.
        shard_values: Let each process hold some columns of these tables instead of whole tables. Default: false.
        optim: Name of the optimizer in `TrainingArguments`, such as `"adamw_torch"`. Default: transformers' choice.
        adam_beta2: Decay rate of AdamW's mean of squared gradients. Default: 0.999.
        max_grad_norm: Norm to which larger gradients are scaled down; 0 leaves gradients as they are. Default: 1.
        max_steps: Optimizer steps. Give this or `num_train_epochs`. Default: one epoch.
        num_train_epochs: Passes over the data; of several corpora, one pass is as many sequences as all have together.
        max_seconds: Seconds of training, including training before a resumption, after which the current step becomes
            the last. Loading, evaluations and checkpoints do not count, and the schedule does not change. Default: none.
        per_device_train_batch_size: Sequences per device and forward pass. Default: 8.
        gradient_accumulation_steps: Forward passes per step. Default: 1.
        bf16: Compute in bfloat16, with float32 masters of what trains; otherwise in float32. Default: true.
        attn_implementation: Installed attention, such as `sdpa`, as in `from_pretrained`. Default: transformers'
            choice.
        activation_checkpointing: Recompute activations in the backward pass to save memory. Default: false.
        save_steps: Steps between checkpoints. Default: none, only the trained model is saved.
        save_total_limit: Number of latest checkpoints to keep. Default: 2; null keeps all.
        logging_steps: Steps between log events. Default: 10.
        usage_steps: Steps between log events on how many memory slots were retrieved, and how evenly. Default: none.
        eval_text: Held-out text, a file or a folder, or a mapping from names to several texts. Perplexity is measured
            as by `midus eval --text` before the first step, every `eval_steps` steps and after the last. Columns and
            encoding are the corpus's (in `midus sft`: `text`, UTF-8). Documents with the corpus's `path_column` are
            measured one by one, with their blocks; text without this column is measured without blocks. Default: none.
        eval_steps: Steps between these evaluations. Default: none, only at the start and at the end.
        eval_max_tokens: Tokens to predict in each held-out text, spread evenly over the text. Default: all.
        load_best_model_at_end: Save a checkpoint at each lowest loss of the first held-out text, keep the best beside
            `save_total_limit` latest, and save its model at the end. Default: false, the last model is saved.
        early_stopping_patience: Evaluations without a lower loss (first held-out text) that end the run. Default: none.
        report_to: Trackers that get the log beside `log.jsonl`: one that the Trainer knows or a list, such as
            `"tensorboard"`, `"trackio"` or `"wandb"`. Default: `"none"`.
        seed: Seed of the order of sequences and of all that is random, such as weights of a new model. Default: 0.
        resume_from_checkpoint: True resumes from the latest whole checkpoint in `output_dir`, a path resumes from that
            checkpoint. `"auto"` resumes if there is a checkpoint, and otherwise starts anew, even over a run that died
            before its first checkpoint. Default: false.
        overwrite_output_dir: Replace an earlier run in `output_dir`. Default: false.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    model_name_or_path: str | None = None
    config_name: str | None = None
    tokenizer_name: str | None = None
    output_dir: str = "trainer_output"
    output_on_failure: str | None = None
    trainable: Trainable = "auto"
    frozen: list[TrainedRole] = dataclasses.field(default_factory=list)
    adapters: dict[str, Any] | None = None
    balance_loss: float = 0.0
    sparse_values: bool = False
    shard_values: bool = False
    optim: str | None = None
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    max_steps: int | None = None
    num_train_epochs: float | None = None
    max_seconds: float | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    bf16: bool = True
    attn_implementation: str | None = None
    activation_checkpointing: bool = False
    save_steps: int | None = None
    save_total_limit: int | None = 2
    logging_steps: int = 10
    usage_steps: int | None = None
    eval_text: str | dict[str, str] | None = None
    eval_steps: int | None = None
    eval_max_tokens: int | None = None
    load_best_model_at_end: bool = False
    early_stopping_patience: int | None = None
    report_to: str | list[str] = "none"
    seed: int = 0
    resume_from_checkpoint: bool | str = False
    overwrite_output_dir: bool = False

    def __post_init__(self) -> None:
        if self.adapters is not None:
            self._check_beside_adapters()
        self._check_origin()
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_steps",
            "save_steps",
            "save_total_limit",
            "logging_steps",
            "usage_steps",
            "eval_steps",
            "eval_max_tokens",
            "early_stopping_patience",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1.")
        for name in ("num_train_epochs", "max_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; expected a number above 0.")
        if not 0 <= self.adam_beta2 < 1:
            raise ValueError(f"adam_beta2 is {self.adam_beta2}; expected 0 <= beta < 1.")
        for name in ("max_grad_norm", "seed", "balance_loss"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more.")
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise ValueError(
                f"max_steps is {self.max_steps} and num_train_epochs is {self.num_train_epochs}; give one of them."
            )
        if isinstance(self.eval_text, dict):
            _check_texts(self.eval_text)
        for name, needed in (
            ("eval_steps", "eval_text"),
            ("eval_max_tokens", "eval_text"),
            ("load_best_model_at_end", "eval_steps"),
            ("early_stopping_patience", "eval_steps"),
        ):
            if getattr(self, name) and getattr(self, needed) is None:
                raise ValueError(f"{name} is {getattr(self, name)!r}, which needs {needed}; set both or neither.")
        if self.resume_from_checkpoint and self.overwrite_output_dir:
            raise ValueError(
                "resume_from_checkpoint and overwrite_output_dir are both set; the first keeps the output, the second removes it."
            )

    def _check_origin(self) -> None:
        """Refuse options that name two origins of the model or none; let a new model train whole by default."""
        if self.model_name_or_path is None and self.config_name is None:
            raise ValueError(
                "config has no 'model_name_or_path'; set it in the file, or as model_name_or_path=... after it. To train a model "
                "from the beginning, set config_name and tokenizer_name."
            )
        if self.model_name_or_path is not None and self.config_name is not None:
            raise ValueError(
                f"model_name_or_path is {self.model_name_or_path!r} and config_name is {self.config_name!r}; expected one of them: "
                "model_name_or_path to train a saved model, config_name to train one from the beginning."
            )
        if (self.tokenizer_name is None) != (self.config_name is None):
            raise ValueError(
                "config has 'config_name' and no 'tokenizer_name'; set it to the folder or Hub id of a tokenizer."
                if self.tokenizer_name is None
                else f"tokenizer_name is {self.tokenizer_name!r}, but a saved model has its own; leave it out, or set config_name."
            )
        if self.config_name is not None and self.trainable == "auto":
            self.trainable = "all"

    def _check_beside_adapters(self) -> None:
        """Refuse options beside `adapters` that contradict what adapters train."""
        for other, value, free in (("trainable", self.trainable, "auto"), ("frozen", self.frozen, [])):
            if value != free:
                raise ValueError(
                    f"adapters is set and {other} is {value!r}; with adapters, only adapters and new parts of the model train. "
                    f"Leave adapters out, or set {other}={free}."
                )
        if self.config_name is not None:
            raise ValueError(
                f"adapters is set and config_name is {self.config_name!r}; adapters are for weights that are trained already. Give "
                "model_name_or_path, or leave them out."
            )

    @property
    def eval_texts(self) -> dict[str, str]:
        """Paths of the held-out texts by name; a single text is named `""`, and no text gives `{}`."""
        if self.eval_text is None:
            return {}
        return {"": self.eval_text} if isinstance(self.eval_text, str) else self.eval_text

    def sources(self) -> list[tuple[str, str]]:
        """Return all that the run reads: the name of each option, with its path or id of a model or dataset."""
        named = [(name, getattr(self, name)) for name in ("model_name_or_path", "config_name", "tokenizer_name")]
        return [
            *((name, value) for name, value in named if value is not None),
            *((text_option(name), path) for name, path in self.eval_texts.items()),
        ]

    def to_share(self, label: Callable[[str], str]) -> Self:
        """Return the options as a model card shows them, without anything private.

        Args:
            label: Returns the text that stands for a path or an id in the card.
        """
        named: dict[str, Any] = {
            name: getattr(self, name) for name in ("model_name_or_path", "config_name", "tokenizer_name")
        }
        labelled: dict[str, Any] = {name: label(value) for name, value in named.items() if value is not None}
        texts = {name: label(path) for name, path in self.eval_texts.items()}
        return dataclasses.replace(
            self,
            **labelled,
            eval_text=texts if isinstance(self.eval_text, dict) else texts.get(""),
            output_dir=label(self.output_dir),
            # A reader of the card has no use for where the model would have gone.
            output_on_failure=None,
            resume_from_checkpoint=bool(self.resume_from_checkpoint),
        )


def text_option(name: str) -> str:
    """Return the name by which messages call a held-out text."""
    return f"eval_text.{name}" if name else "eval_text"


def _check_texts(texts: dict[str, str]) -> None:
    if not texts:
        raise ValueError(
            "eval_text is {}; expected a name and a path at least, as in {wiki: wiki.txt}, or a path alone."
        )
    for name in texts:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(
                f"eval_text names a text {name!r}; expected letters, digits, '-' and '_', since the log has an entry "
                "eval_NAME_loss. Rename the text, or put a number in quotes."
            )
