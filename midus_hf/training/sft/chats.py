"""Rows of instruction data as tokens with labels, by the training templates of TRL."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from midus_hf.saved_models import check_ids
from midus_hf.training.data.corpus import read_rows, say
from midus_hf.training.data.packing import IGNORED_LABEL, features_of
from midus_hf.training.sft.formats import REASONING, read_row, refuse, unread_keys

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# ChatML, with the marks around answers by which TRL finds their tokens.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Instructions and responses for tokenizers without special tokens of chats.
ALPACA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n\\n' }}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
# Templates by their name in `SftArguments.chat_template_path`.
TEMPLATES = {"chatml": CHATML, "alpaca": ALPACA}
_REMEDY = "set chat_template_path to chatml, alpaca or a file with a template that has {% generation %} around answers"


def encode(
    row: dict[str, Any],
    index: int,
    tokenizer: "PreTrainedTokenizerBase",
    template: str | None,
    answers_only: bool,
    source: str,
) -> dict[str, list[int]]:
    """Return the `input_ids` and `labels` of a row.

    Args:
        index: Index of the row in its data, from 0.
        template: Template of chats, with marks around answers; None if the data has no chats.
        answers_only: Whether only answers and completions have a loss.
        source: Name of the data, for messages.

    Raises:
        ValueError: If `read_row` or the template refuses the row, or the template would leave out what the row has.
    """
    location = f"row {index + 1} of {source!r}"
    example = read_row(row, location)
    if "messages" in example:
        assert template is not None, "the template was chosen from the first row"
        ids, is_answer = _chat_tokens(example, tokenizer, template, answers_only, location)
    else:
        ids, is_answer = _completion_tokens(example, tokenizer)
    marked = zip(ids, is_answer, strict=True)
    return {
        "input_ids": ids,
        "labels": [token if inside or not answers_only else IGNORED_LABEL for token, inside in marked],
    }


def _chat_tokens(
    example: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", template: str, answers_only: bool, location: str
) -> tuple[list[int], list[bool]]:
    def reads(key: str) -> bool:
        """Return whether the template reads a key of messages, which differs from a variable such as `enable_thinking`."""
        return re.search(rf"[.'\"]{key}\b", template) is not None

    remedy = "which the chat template does not write. Set chat_template_path to one that does, or take it out."
    options = example.get("chat_template_kwargs", {})
    for key in (*options, *(["tools"] if "tools" in example else [])):
        if not re.search(rf"\b{key}\b", template):
            refuse(location, key, remedy)
    read_reasoning = next(filter(reads, REASONING), None)
    for number, message in enumerate(example["messages"], start=1):
        for key in (*REASONING, "tool_calls"):
            if key in message and not reads(key):
                if key == "tool_calls" or read_reasoning is None:
                    refuse(f"message {number} of {location}", key, remedy)
                message[read_reasoning] = message.pop(key)
    try:
        encoded: Any = tokenizer.apply_chat_template(
            example["messages"],
            tools=example.get("tools"),
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **options,
        )
    except (TemplateError, TypeError, KeyError, IndexError, AttributeError) as error:
        # A template is a program that computes with the chat, and can fail in any of these ways.
        raise ValueError(
            f"{location} is refused by the chat template: {error}. Correct it, or take it out."
        ) from error
    ids, is_answer = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    learned = tokenizer.decode(
        [token for token, inside in zip(ids, is_answer, strict=True) if inside or not answers_only]
    )
    for number, message in enumerate(example["messages"], start=1):
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in learned:
                called = (
                    f"a call of {call['function']['name']!r}, which the chat template does not write into an answer."
                )
                refuse(f"message {number} of {location}", "tool_calls", f"{called} {remedy.partition('. ')[2]}")
    return ids, is_answer


def _completion_tokens(example: dict[str, str], tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[bool]]:
    """Return a text that no template is applied to: the prompt's tokens, then the completion's, which EOS ends."""
    prompt = list(tokenizer(example["prompt"])["input_ids"])
    whole = list(tokenizer(example["prompt"] + example["completion"])["input_ids"])
    eos = tokenizer.eos_token_id
    if prompt[-1:] == [eos]:
        prompt = prompt[:-1]
    if eos is not None and whole[-1:] != [eos]:
        whole.append(eos)
    # Where the tokens of the prompt merge with those of the completion, the merged token belongs to the completion.
    shared = next((at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    return whole, [at >= shared for at in range(len(whole))]


def choose_template(
    tokenizer: "PreTrainedTokenizerBase", named: str | None, has_tools: bool, answers_only: bool
) -> str:
    """Return the template that chats are trained by; a template that is named is saved with the tokenizer.

    Args:
        tokenizer: Tokenizer of the model; its `chat_template` is changed if a template is named.
        named: `"chatml"`, `"alpaca"`, or the path of a file with a Jinja template; None takes the tokenizer's own.
        has_tools: Whether rows have schemas of tools.
        answers_only: Whether the template has to mark answers.

    Raises:
        ValueError: If there is no template, or several and none for this data, or answers cannot be found by it.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if named == "chatml" and not all(token in tokenizer.get_vocab() for token in _CHATML_TOKENS):
        raise ValueError(
            f"chat_template_path is 'chatml', whose tokens {' and '.join(_CHATML_TOKENS)} this tokenizer lacks; set alpaca, or give "
            "a file with a template of tokens that it has."
        )
    if named == "alpaca" and tokenizer.eos_token is None:
        raise ValueError(
            "chat_template_path is 'alpaca', which ends answers with the end token, but this tokenizer has none; give a file with a "
            "template that needs no end token."
        )
    if named in TEMPLATES:
        begins = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = "{{ bos_token }}" * begins + TEMPLATES[named]
    elif named is not None:
        try:
            tokenizer.chat_template = Path(named).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"chat_template_path is {named!r}; expected chatml, alpaca, or a file with a Jinja template."
            ) from error
    template: Any = tokenizer.chat_template
    if not template:
        raise ValueError(f"the model's tokenizer has no chat template; {_REMEDY}.")
    if isinstance(template, dict):
        if "default" not in template or (has_tools and "tool_use" in template):
            reason = "none of them default" if "default" not in template else "and the data has tools"
            raise ValueError(
                f"the tokenizer has the chat templates {', '.join(template)}, {reason}; expected one. Write the one to train by into "
                "a file, and set chat_template_path to it."
            )
        template = template["default"]
    if has_generation_markers(template):
        return str(template)
    try:
        training_template = get_training_chat_template(tokenizer)
    except (ValueError, TemplateError, TypeError, KeyError, AttributeError) as error:
        if not answers_only:
            return str(template)
        raise ValueError(
            f"the model's chat template does not mark answers, and TRL has no training version of it; {_REMEDY}."
        ) from error
    return str(training_template or template)


def chat_examples(
    arguments: Any, tokenizer: "PreTrainedTokenizerBase", vocab_size: int
) -> tuple["Dataset", int | None]:
    """Return the examples of a run, uncut, as rows with `input_ids` and `labels`, and the token that ends answers.

    Rows are left out whose answers lie wholly behind what is kept of a long row.

    Args:
        arguments: The keys of `SftArguments` that begin with `dataset_` are read, `chat_template_path`, `max_length`,
            `truncation_mode`, `packing`, `packing_strategy` and `assistant_only_loss`.
        tokenizer: Tokenizer of the model, which gets the template that the arguments name.
        vocab_size: Number of ids that the model embeds.

    Raises:
        ValueError: If the data cannot be read, has no rows or no answer that is kept, or `choose_template` or `encode` raises it.
    """
    source, answers_only = arguments.dataset_name, arguments.assistant_only_loss
    rows = read_rows("dataset_name", source, split=arguments.dataset_train_split, name=arguments.dataset_config)
    if not len(rows):
        raise ValueError(f"dataset_name is {source!r}, which has no rows. Add data.")
    unread = unread_keys(rows.column_names, rows.features)
    if unread:
        say(f"dataset_name {source!r}: not read: {', '.join(unread)}")
    is_chat = "messages" in read_row(rows[0], f"row 1 of {source!r}")
    template = None
    if is_chat:
        template = choose_template(tokenizer, arguments.chat_template_path, "tools" in rows.column_names, answers_only)
    examples = rows.map(
        encode,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer, "template": template, "answers_only": answers_only, "source": source},
        remove_columns=rows.column_names,
        features=features_of("input_ids", "labels"),
        num_proc=arguments.dataset_num_proc,
        load_from_cache_file=False,
        desc="encoding chats",
    )
    check_ids(max(max(ids) for ids in examples["input_ids"]), vocab_size)
    last = _last_token(examples[0]["labels"], tokenizer) if is_chat and answers_only else None
    return _with_answers(examples, arguments), last


def _with_answers(examples: "Dataset", arguments: Any) -> "Dataset":
    """Return the rows with an answer in the part that TRL keeps of them; say how many are long, and how many left out.

    Raises:
        ValueError: If no row has an answer there.
    """
    limit, strategy, total = arguments.max_length, arguments.packing_strategy, len(examples)
    part, what_happens = slice(limit), "keep their first tokens"
    if not arguments.packing and arguments.truncation_mode == "keep_end":
        part, what_happens = slice(-limit, None), "keep their last tokens"
    elif arguments.packing and strategy != "bfd":
        part, what_happens = slice(None), "go on in another sequence, which does not see their beginning"
    long = sum(len(ids) > limit for ids in examples["input_ids"])
    if long:
        say(f"{long:,} of {total:,} rows are longer than max_length, {limit:,} tokens, and {what_happens}")
    rows = examples.filter(lambda labels: has_loss(labels[part]), input_columns=["labels"], load_from_cache_file=False)
    if not len(rows):
        raise ValueError(
            f"dataset_name is {arguments.dataset_name!r}, which has {total:,} rows and no answer to learn from within "
            f"{limit:,} tokens. Add data, or raise max_length."
        )
    if len(rows) < total:
        say(f"{total - len(rows):,} of {total:,} rows are left out: no answer in the part of them that is kept")
    return rows


def has_loss(labels: list[int], lengths: Sequence[int] = ()) -> bool:
    """Return whether a sequence has a token with a loss. The first token of each text has none, since nothing predicts it.

    Args:
        labels: Labels of the sequence.
        lengths: Lengths of the texts that the sequence is packed from. Default: it is one text.
    """
    learned = np.asarray(labels) != IGNORED_LABEL
    learned[np.cumsum([0, *lengths[:-1]])[: len(learned)]] = False
    return bool(learned.any())


def _last_token(labels: list[int], tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the special token that ends answers; None, and say so, if text ends them."""
    learned = [label for label in labels if label != IGNORED_LABEL]
    # Some templates also mark the line break behind the token that ends an answer.
    last = next((label for label in reversed(learned) if str(tokenizer.decode([label])).strip()), None)
    added_tokens = tokenizer.added_tokens_decoder
    if last in tokenizer.all_special_ids or (last in added_tokens and added_tokens[last].special):
        return last
    say("the chat template ends answers with no special token, so the model will not learn to stop")
    return None
