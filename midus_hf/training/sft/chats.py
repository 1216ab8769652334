"""Rows of instruction data as tokens with labels, by the training templates of TRL."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from midus_hf.training.data.corpus import bars_on_terminals, read_rows, say
from midus_hf.training.data.packing import IGNORED_LABEL, features_of
from midus_hf.training.sft.formats import REASONING, read_row, unread_keys

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


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Turns a row into tokens and labels.

    Args:
        template: Template of chats, with marks around answers; None if the data has no chats.
        max_length: Most tokens of an example; later ones are cut. None cuts nothing.
        answers_only: Whether only answers and completions have a loss.
    """

    tokenizer: "PreTrainedTokenizerBase"
    template: str | None
    max_length: int | None
    answers_only: bool
    source: str

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        """Return `input_ids`, `labels`, and `length`, the number of tokens before the cut."""
        location = f"row {index + 1} of {self.source!r}"
        example = read_row(row, location)
        ids, is_answer = self._chat(example, location) if "messages" in example else self._completion(example)
        labels = [
            token if inside or not self.answers_only else IGNORED_LABEL
            for token, inside in zip(ids, is_answer, strict=True)
        ]
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length], "length": [len(ids)]}

    def _chat(self, example: dict[str, Any], location: str) -> tuple[list[int], list[bool]]:
        assert self.template is not None, "the template was chosen from the first row"
        messages = [
            self._with_reasoning(message, number, location) for number, message in enumerate(example["messages"], 1)
        ]
        options = example.get("chat_template_kwargs", {})
        unknown = [key for key in options if not re.search(rf"\b{key}\b", self.template)]
        if unknown:
            raise ValueError(
                f"{location} has chat_template_kwargs.{unknown[0]}, which the chat template does not read. Take it out, or set "
                "chat_template_path."
            )
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                messages,
                tools=example.get("tools"),
                chat_template=self.template,
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
        answers = self.tokenizer.decode([token for token, inside in zip(ids, is_answer, strict=True) if inside])
        for number, message in enumerate(messages, start=1):
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in answers:
                    raise ValueError(
                        f"message {number} of {location} calls {call['function']['name']!r}, which the chat template does not write; "
                        "set chat_template_path to one that knows tool_calls, or take the row out."
                    )
        return ids, is_answer

    def _with_reasoning(self, message: dict[str, Any], number: int, location: str) -> dict[str, Any]:
        """Return a message whose reasoning, if it has any, has the key that the template reads."""
        message = dict(message)
        for key in REASONING:
            if key in message and not _reads(self.template, key):
                other = next((name for name in REASONING if _reads(self.template, name)), None)
                if other is None:
                    raise ValueError(
                        f"message {number} of {location} has {key!r}, which the chat template does not write. Set chat_template_path "
                        "to one that does, or take the key out."
                    )
                message[other] = message.pop(key)
        return message

    def _completion(self, example: dict[str, str]) -> tuple[list[int], list[bool]]:
        """Return a text that no template is applied to: the prompt's tokens, then the completion's, which EOS ends."""
        prompt = list(self.tokenizer(example["prompt"])["input_ids"])
        whole = list(self.tokenizer(example["prompt"] + example["completion"])["input_ids"])
        eos = self.tokenizer.eos_token_id
        if prompt[-1:] == [eos]:
            prompt = prompt[:-1]
        if eos is not None and whole[-1:] != [eos]:
            whole.append(eos)
        # Where the tokens of the prompt merge with those of the completion, the merged token belongs to the completion.
        shared = next(
            (at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt)
        )
        return whole, [at >= shared for at in range(len(whole))]


def _reads(template: str | None, key: str) -> bool:
    """Return whether a template reads a key of messages, which differs from a variable such as `enable_thinking`."""
    return re.search(rf"[.'\"]{key}\b", str(template)) is not None


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


@bars_on_terminals()
def chat_sequences(
    arguments: Any, tokenizer: "PreTrainedTokenizerBase", vocab_size: int
) -> tuple["Dataset", int | None]:
    """Return the examples of a run as rows with `input_ids` and `labels`, and the token that ends answers.

    Rows without an answer within `max_length` are left out, which a line says, as it does of cut rows and unread columns.

    Args:
        arguments: The keys of `SftArguments` that begin with `dataset_` are read, `chat_template_path`, `max_length` and
            `assistant_only_loss`.
        tokenizer: Tokenizer of the model, which gets the template that the arguments name.
        vocab_size: Number of ids that the model embeds.

    Raises:
        ValueError: If the data cannot be read or has no answer, or `choose_template` or `read_row` raises it.
    """
    from midus_hf.saved_models import check_ids

    source = arguments.dataset_name
    rows = read_rows("dataset_name", source, split=arguments.dataset_train_split, name=arguments.dataset_config)
    if not len(rows):
        raise ValueError(f"dataset_name is {source!r}, which has no rows. Add data.")
    unread = unread_keys(rows.column_names, rows.features)
    if unread:
        say(f"dataset_name {source!r}: not read: {', '.join(unread)}")
    is_chat = "messages" in read_row(rows[0], f"row 1 of {source!r}")
    answers_only = arguments.assistant_only_loss
    template = None
    if is_chat:
        has_tools = "tools" in rows.column_names
        template = choose_template(tokenizer, arguments.chat_template_path, has_tools, answers_only)
    encoder = Encoder(tokenizer, template, arguments.max_length, answers_only, source)
    encoded = rows.map(
        encoder,
        with_indices=True,
        remove_columns=rows.column_names,
        features=features_of("input_ids", "labels", "length"),
        num_proc=arguments.dataset_num_proc,
        load_from_cache_file=False,
        desc="encoding chats",
    )
    cut = sum(length[0] > len(ids) for length, ids in zip(encoded["length"], encoded["input_ids"], strict=True))
    # No token predicts the first one of a sequence, so only later tokens can have a loss.
    kept = encoded.filter(lambda row: any(label != IGNORED_LABEL for label in row["labels"][1:]))
    if not len(kept):
        raise ValueError(
            f"dataset_name is {source!r}, which has {len(rows):,} rows and no answer to learn from within {arguments.max_length:,} "
            "tokens. Add data, or raise max_length."
        )
    check_ids(max(max(ids) for ids in kept["input_ids"]), vocab_size)
    if cut:
        say(
            f"{cut:,} of {len(rows):,} rows were longer than max_length, {arguments.max_length:,} tokens, and were cut there"
        )
    if len(kept) < len(rows):
        say(f"{len(rows) - len(kept):,} of {len(rows):,} rows were left out: no answer within max_length")
    last = None
    whole = next((row for row in kept if row["length"][0] == len(row["input_ids"])), None)
    if is_chat and answers_only and whole is not None:
        learned = [label for label in whole["labels"] if label != IGNORED_LABEL]
        # Some templates also mark the line break behind the token that ends an answer.
        last = next((label for label in reversed(learned) if str(tokenizer.decode([label])).strip()), learned[-1])
        if not _is_special(tokenizer, last):
            say("the chat template ends answers with no special token, so the model will not learn to stop")
            last = None
    return kept.remove_columns("length"), last


def _is_special(tokenizer: "PreTrainedTokenizerBase", token: int) -> bool:
    """Return whether a token is a special mark rather than text."""
    added_tokens = tokenizer.added_tokens_decoder
    return token in tokenizer.all_special_ids or (token in added_tokens and added_tokens[token].special)
