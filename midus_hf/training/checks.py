"""Checks of the keys of a run, before anything is read."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, get_args

from midus_hf.config.declared_tensors import TrainedRole
from midus_hf.config.errors import RequestError

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
#: Keys of TRL that would have no effect, with the values that they may have and the reason.
WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_init_kwargs": ((None,), "a run loads its model itself; attn_implementation is a separate key"),
    "trust_remote_code": ((False,), "a run executes no code that comes with a model"),
    "dataset_kwargs": ((None,), "rows are always made into tokens and labels"),
    "dataset_text_field": (
        ("text",),
        "rows are chats, or prompts and completions; midus train reads texts, by text_column",
    ),
    "eval_packing": ((None,), "held-out texts are always packed sequences"),
    "padding_free": ((False,), "packing: true leaves padding out, and keeps max_length"),
    "loss_type": (("nll", "chunked_nll"), "the loss is computed by the model, with the terms of its memories"),
}


def _refuse(arguments: Any, rows: Iterable[tuple[str, bool, str]], start: str = "") -> None:
    """Refuse the first key that is wrong, of rows (key, whether it is wrong, what is expected)."""
    for key, is_wrong, expected in rows:
        if is_wrong:
            raise RequestError(f"{start}{key} is {getattr(arguments, key)!r}; expected {expected}.")


def check_keys(arguments: Any) -> None:
    """Refuse keys of `MemoryArguments` that are out of range, or contradict one another."""
    data_key = getattr(arguments, "data_key", None)
    if data_key is not None and not getattr(arguments, data_key):
        raise RequestError(f"config has no {data_key!r}; set it in the recipe, or by --{data_key}.")
    _check_optimizer(arguments)
    for key, (is_right, expected) in _RANGES.items():
        number = getattr(arguments, key, None)
        is_wrong = isinstance(number, int | float) and not is_right(number)
        _refuse(arguments, [(key, is_wrong, expected)])
    if arguments.eval_share and arguments.eval_text is not None:
        raise RequestError(
            f"eval_share is {arguments.eval_share:g}, and eval_text is {arguments.eval_text!r}; expected one of them. Leave one out."
        )
    if arguments.base_kl and getattr(arguments, "use_liger_kernel", False):
        raise RequestError(
            f"base_kl is {arguments.base_kl:g}, and use_liger_kernel is true, with which a step has no logits; expected one of them."
        )
    roles = get_args(TrainedRole)
    is_choice = isinstance(arguments.trainable, list) or arguments.trainable in ("auto", "new", "all")
    _refuse(
        arguments,
        [
            ("frozen", not set(arguments.frozen) <= set(roles), f"roles of memory tensors: {', '.join(roles)}"),
            ("trainable", not is_choice, "'auto', 'new', 'all', or a list such as [3, 7]"),
            ("adapters", isinstance(arguments.adapters, str), 'a mapping, such as {"r": 16}'),
        ],
    )
    _check_adapters(arguments)
    _check_model(arguments)


def _check_optimizer(arguments: Any) -> None:
    optim, targets = getattr(arguments, "optim", None), getattr(arguments, "optim_target_modules", None)
    if targets is None and not _OWN_GROUPS.fullmatch(str(getattr(optim, "value", optim))):
        return
    key, value = ("optim", optim) if targets is None else ("optim_target_modules", targets)
    raise RequestError(
        f"{key} is {value!r}, an optimizer that chooses its parameters itself, but a run makes the groups; expected "
        "one such as adamw_torch. Leave it out."
    )


def _check_adapters(arguments: Any) -> None:
    if arguments.adapters is None:
        return
    for other, free in (("trainable", "auto"), ("frozen", []), ("protect", None), ("config_name", None)):
        if getattr(arguments, other) != free:
            raise RequestError(
                f"adapters is set and {other} is {getattr(arguments, other)!r}; with adapters, only adapters and new parameters "
                f"of a trained model train. Leave adapters out, or set {other}={free}."
            )


def _check_model(arguments: Any) -> None:
    saved = arguments.model_name_or_path
    made_from = arguments.config_name
    tokenizer = arguments.tokenizer_name
    given = [each is not None for each in (saved, made_from, tokenizer)]
    if given not in ([True, False, False], [False, True, True]) and any(given):  # scripts bring their own model
        raise RequestError(
            f"model_name_or_path is {saved!r}, config_name {made_from!r} and tokenizer_name {tokenizer!r}; expected only the "
            "first, for a saved model with its tokenizer, or the other two, for a model that is trained from scratch."
        )


def check_text_keys(arguments: Any) -> None:
    """Refuse keys of `midus train`, as given, that contradict one another."""
    if arguments.sequence_length < 2:
        raise RequestError(f"sequence_length is {arguments.sequence_length}; expected at least 2 tokens.")
    if arguments.tree is not None and arguments.path_column is None:
        raise RequestError(
            f"tree is {arguments.tree!r}, and path_column is not given; expected the column with the paths of documents. Leave "
            "tree out, or give the column."
        )
    for key in ("eval_strategy", "eval_steps"):
        value = getattr(arguments, key)
        if value not in (None, "no") and arguments.eval_text is None and not arguments.eval_share:
            raise RequestError(f"{key} is {value!r}, which needs eval_text or eval_share; set both or neither.")


def check_stream_keys(arguments: Any) -> None:
    """Refuse keys of `midus train` that a stream does not take."""
    if not arguments.streaming:
        return
    batches: Any = arguments.accelerator_config
    splits = bool(batches.split_batches or batches.dispatch_batches)
    in_order = arguments.train_sampling_strategy != "random"
    has_workers = bool(arguments.dataloader_num_workers)
    rows = [
        ("accelerator_config", splits, "neither split_batches nor dispatch_batches"),
        ("max_steps", arguments.max_steps <= 0, "the number of steps, since the length of a stream is not known"),
        ("dataloader_num_workers", has_workers, "0, since a stream is read in its process"),
        ("train_sampling_strategy", in_order, "random; shuffle_buffer: 0 keeps the order"),
        ("auto_find_batch_size", arguments.auto_find_batch_size, "false, since a stream is read once"),
    ]
    _refuse(arguments, rows, "streaming is true, and ")


def check_chat_keys(arguments: Any) -> None:
    """Refuse keys of `midus sft`, as given, that have no effect or contradict one another."""
    for key, (expected, reason) in WITHOUT_EFFECT.items():
        value = getattr(arguments, key)
        if value not in expected:
            raise RequestError(f"{key} is {value!r}; expected {expected[0]!r}: {reason}. Leave it out.")
    if arguments.max_length is None or arguments.max_length < 2:
        raise RequestError(f"max_length is {arguments.max_length}; expected at least 2 tokens.")
    if arguments.packing and arguments.truncation_mode != "keep_start":
        raise RequestError(
            f"truncation_mode is {arguments.truncation_mode!r}, and packing keeps the first tokens of long chats; expected "
            "keep_start. Leave truncation_mode or packing out."
        )
