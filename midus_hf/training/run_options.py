"""What every training run may be told, whatever it trains on."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, Self

from midus_hf.config.declared_tensors import Role

Trainable = Literal["auto", "new", "all"] | list[int | Role]
"""What trains: see `RunOptions`."""

AdapterLayers = Literal["base", "new", "all"]
"""Which layers have adapters: see `RunOptions`."""

AUTO = "auto"
"""Of `resume_from_checkpoint`: see `RunOptions`."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """Model, output, what trains, how long, and what is logged and kept.

    Args:
        model_name_or_path: Folder or Hub id of the model to train. Give this or `config_name`.
        config_name: File, folder or Hub id of a config, to train a model of this shape from the beginning, with weights
            made at random by `seed`; of a folder or id nothing else is read.
        tokenizer_name: Folder or Hub id of the tokenizer of a model that is made from `config_name`; given with it, and with it
            alone. A saved model has its own.
        output_dir: Folder for checkpoints, logs and the trained model. A run refuses a folder that exists, unless
            `resume_from_checkpoint` or `overwrite_output_dir` is set. Default: `"trainer_output"`, as in Transformers.
        output_on_failure: Folder, best on another disk, for what was trained should writing to `output_dir` fail; it must
            not exist. Default: none; then a new folder in the system's folder for temporary files, if it has room.
        trainable: `"new"` trains the layers that were added to the base, `"all"` everything, a list of indices such
            as `[3, 7]` these layers of any model, a list of roles such as `[value]` the tensors of these roles in the
            memories that were added (`midus_hf.config.declared_tensors.Role` names them). `"auto"` is `"new"` or `"all"`:
            what the config of an upscaled model records as its method's own, and `"all"` of a model that is made from
            `config_name`. Default: `"auto"`.
        frozen: Roles of memory tensors that do not train all the same, such as `[value]`. Default: none.
        adapters: Adapters of PEFT, a mapping: `method`, what PEFT calls it, by default `lora`; the `layers` that have them; and
            keys of the method's config, such as `r`, `lora_alpha`, `target_modules`. With `layers: base`, the default, they
            are on the base, and what is new in an upscaled model trains whole beside them; with `new` on new layers without
            memory, and with `all` on all layers, and nothing else trains. Targets are all linear layers by default; of
            `lora`, `r` is 16 and `lora_alpha` 32. What comes out is merged. Default: none, weights train as `trainable` says.
        balance_loss: Coefficient of a loss that is small when tokens spread over all keys of a memory; see
            `memory.balance.balance_loss`. Default: 0, none.
        sparse_values: Whether gradients of large value tables are of the rows that a step has read, and AdamW updates these alone;
            see `Tables`. Default: false.
        shard_values: Whether each of several processes holds some columns of these tables, in place of all; see `Tables`.
            Default: false.
        optim: Optimizer, by its name in `transformers.TrainingArguments`, such as `"adamw_torch"`. Default: transformers' choice.
        adam_beta2: Share that AdamW keeps of its mean of squared gradients at a step. Default: 0.999.
        max_grad_norm: Gradients are scaled down to this norm; 0 leaves them. Default: 1.
        max_steps: Optimizer steps. Give this or `num_train_epochs`. Default: one epoch.
        num_train_epochs: Passes over the data; of several corpora, as many sequences as all of them have together count as one.
        max_seconds: Seconds of training after which it ends with the step that it is at, as if that were the last: evaluations,
            checkpoints and loading do not count, what came before a resumption does. The schedule is still that of `max_steps`
            or `num_train_epochs`. Default: none.
        per_device_train_batch_size: Sequences per device and forward pass. Default: 8.
        gradient_accumulation_steps: Forward passes per step. Default: 1.
        bf16: Whether to compute in bfloat16, with float32 masters of what trains; otherwise in float32. Default: true.
        attn_implementation: As in `from_pretrained`, such as `sdpa`; it must be installed. Default: transformers' choice.
        activation_checkpointing: Recompute activations in the backward pass to save memory. Default: false.
        save_steps: Steps between checkpoints. Default: none, only the trained model is saved.
        save_total_limit: Latest checkpoints to keep. Default: 2; null keeps all.
        logging_steps: Steps between log events. Default: 10.
        usage_steps: Steps between events that tell how many memory slots were retrieved since the last one, and how
            evenly. Default: none.
        eval_text: Held-out text, a file or a folder, whose perplexity is measured as `midus eval --text` does: before
            the first step, every `eval_steps` steps and after the last one. Columns and encoding are those of the
            corpus: with its `path_column`, documents are measured by themselves, with the blocks of their paths, and text
            without that column is measured without blocks. Or several texts, a mapping from names to paths, all of which are
            measured each time. Default: none.
        eval_steps: Steps between these evaluations. Default: none, only at the start and at the end.
        eval_max_tokens: Tokens of each held-out text to predict, spread evenly over it. Default: all.
        load_best_model_at_end: Whether to save a checkpoint wherever the held-out loss is the least so far, keep that of the best
            beside `save_total_limit` latest ones, and save its model in the end. Of several texts the first that is named
            decides. Default: false, the last model.
        early_stopping_patience: Evaluations without a lower held-out loss after which to stop; of several texts that of the first.
            Default: none.
        report_to: Where to send the log beside `log.jsonl`: what the Trainer knows, such as `"tensorboard"`,
            `"trackio"` or `"wandb"`, or a list of them. Default: `"none"`.
        seed: Seed of the order of sequences and of anything random, such as weights made from `config_name`. Default: 0.
        resume_from_checkpoint: True for the latest checkpoint in `output_dir`, or the path of one; `"auto"` for the latest one if
            there is any, and else to begin, also where such a run has died before its first checkpoint. Default: false.
        overwrite_output_dir: Whether to replace an earlier run in `output_dir`. Default: false.

    Raises:
        ValueError: If a value lies outside its range or contradicts another.
    """

    model_name_or_path: str | None = None
    config_name: str | None = None
    tokenizer_name: str | None = None
    output_dir: str = "trainer_output"
    output_on_failure: str | None = None
    trainable: Trainable = "auto"
    frozen: list[Role] = dataclasses.field(default_factory=list)
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
        """Refuse two origins of the model, or none; a model that is made from a config trains whole."""
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
                "config has 'config_name' and no 'tokenizer_name'; set it to the folder or Hub id of one."
                if self.tokenizer_name is None
                else f"tokenizer_name is {self.tokenizer_name!r}, but a saved model has its own; leave it out, or set config_name."
            )
        if self.config_name is not None and self.trainable == "auto":
            self.trainable = "all"

    def _check_beside_adapters(self) -> None:
        """Refuse what says otherwise what trains, beside adapters."""
        for other, value in (("trainable", self.trainable), ("frozen", self.frozen)):
            if value not in ("auto", []):
                raise ValueError(
                    f"adapters is set and {other} is {value!r}; with adapters, adapters and what is new in the model train. "
                    "Leave one of them out."
                )
        if self.config_name is not None:
            raise ValueError(
                f"adapters is set and config_name is {self.config_name!r}; adapters are for weights that are trained already. Give "
                "model_name_or_path, or leave them out."
            )

    @property
    def eval_texts(self) -> dict[str, str]:
        """The held-out texts by their names, `""` for one that has none; `{}` if there are none."""
        if self.eval_text is None:
            return {}
        return {"": self.eval_text} if isinstance(self.eval_text, str) else self.eval_text

    def sources(self) -> list[tuple[str, str]]:
        """What the run reads: the name of an option, and a path or the id of a model or dataset."""
        named = [(name, getattr(self, name)) for name in ("model_name_or_path", "config_name", "tokenizer_name")]
        return [
            *((name, value) for name, value in named if value is not None),
            *((text_option(name), path) for name, path in self.eval_texts.items()),
        ]

    def to_share(self, label: Callable[[str], str]) -> Self:
        """The options as a model card tells them, which is made to be shared.

        Args:
            label: What is told of a path or an id.
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
            # Where the model would have gone is of no interest to whom it is shared with.
            output_on_failure=None,
            resume_from_checkpoint=bool(self.resume_from_checkpoint),
        )


def text_option(name: str) -> str:
    """What messages call a held-out text.

    Args:
        name: Of the text, `""` if it has none.
    """
    return f"eval_text.{name}" if name else "eval_text"


def _check_texts(texts: dict[str, str]) -> None:
    if not texts:
        raise ValueError(
            "eval_text is {}; expected a name and a path at least, as in {wiki: wiki.txt}, or a path alone."
        )
    for name in texts:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(
                f"eval_text names a text {name!r}; expected letters, digits, '-' and '_', since the log has eval_NAME_loss of it. "
                "Rename it, or put a number in quotes."
            )
