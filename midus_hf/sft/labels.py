"""Templates of chats, and the tokens of a chat that belong to an answer, found in the text that a template writes."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from midus_hf.sft.formats import Chat, Example
from midus_hf.topics.text_files import DocumentError

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ALPACA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
# Built-in templates, by their name in `SftConfig.chat_template`.
TEMPLATES = {"chatml": _CHATML, "alpaca": _ALPACA}

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def set_template(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Set the chat template of a tokenizer.

    Args:
        tokenizer: Tokenizer of the model; its `chat_template` is changed.
        name: Name of a template or path of a file, as in `SftConfig.chat_template`; None keeps the tokenizer's
            template.

    Raises:
        ValueError: If the tokenizer has no template and `name` is None, `name` is neither a template nor a readable
            file, or the tokenizer lacks the special tokens of the template.
    """
    if name is None:
        if tokenizer.chat_template is None:
            raise ValueError(
                "the model's tokenizer has no chat template; set chat_template to chatml, alpaca or a file with a Jinja "
                "template."
            )
        return
    if name not in TEMPLATES:
        tokenizer.chat_template = _read(name)
        return
    if name == "chatml" and not all(token in tokenizer.get_vocab() for token in _CHATML_TOKENS):
        raise ValueError(
            f"chat_template is 'chatml', whose tokens {' and '.join(_CHATML_TOKENS)} this tokenizer lacks; set alpaca, or "
            "a file with a template of tokens that it has."
        )
    if name == "alpaca" and tokenizer.eos_token is None:
        raise ValueError(
            "chat_template is 'alpaca', which ends answers with the end token, but this tokenizer has none; set a file "
            "with a template that needs no end token."
        )
    begins = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    tokenizer.chat_template = "{{ bos_token }}" * begins + TEMPLATES[name]


def _read(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template is {name!r}; expected one of {', '.join(TEMPLATES)}, or a file with a Jinja template."
        ) from error


# Tag by which a template itself marks where answers stand.
_MARKERS = re.compile(r"{%-?\s*generation\s*-?%}")

_NOWHERE = (math.inf, math.inf)
# Text that occurs in no template.
_ELSEWHERE = "\u241f an answer \u241f"


@dataclass(frozen=True)
class Tokens:
    """Tokens of an example.

    Args:
        ids: Token ids, one per token.
        in_answer: For each token, whether it belongs to an answer; the token that ends an answer does.
        is_chat: Whether a chat template wrote the text. Default: true.
    """

    ids: list[int]
    in_answer: list[bool]
    is_chat: bool = True

    def cut(self, length: int) -> "Tokens":
        """Return the first tokens."""
        return self if len(self.ids) <= length else Tokens(self.ids[:length], self.in_answer[:length], self.is_chat)


def encode(tokenizer: PreTrainedTokenizerBase, example: Example, location: str) -> Tokens:
    """Write an example out and turn it into tokens.

    A token belongs to an answer if all of its text does. What a template writes after an answer, such as the token that
    ends the answer, belongs to the answer, except for white space at the end.

    Args:
        tokenizer: A fast tokenizer, with a chat template if the example is a chat.
        example: A chat, or a prompt and its completion.
        location: Location of the example, for messages.

    Raises:
        DocumentError: If the template rejects the chat, changes earlier messages so that answers cannot be located, or
            omits tool calls.
    """
    if not isinstance(example, Chat):
        return _encode_completion(tokenizer, example.prompt, example.completion)
    try:
        if _MARKERS.search(str(tokenizer.chat_template)):
            return _encode_marked(tokenizer, example)
        text, spans = _write_out(tokenizer, example)
    except DocumentError as error:
        raise DocumentError(f"{location}: {error}") from error
    except (TemplateError, TypeError, KeyError, IndexError, AttributeError) as error:
        # A template is a program that computes with the chat, and can fail in any of these ways.
        raise DocumentError(
            f"{location} is refused by the chat template: {error}. Correct it, or take it out."
        ) from error
    return _tokens_of(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True), spans)


def _write_out(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and the span of each answer in it as (start, end) in characters."""

    def write(number: int, **options: Any) -> str:
        return _render(tokenizer, Chat(chat.messages[:number], chat.tools), **options)

    text, spans = write(len(chat.messages)), []
    for number, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        after = write(number + 1)
        before = write(number, add_generation_prompt=True) if number else _before_first(tokenizer, chat, after)
        if not (after.startswith(before) and text.startswith(after)):
            raise DocumentError(
                "the chat template writes earlier messages differently once others follow, so answers cannot be found in "
                "its text; put {% generation %} and {% endgeneration %} around them in it, or set chat_template."
            )
        answer = after[len(before) :].rstrip()
        _check_calls_are_written(message, number, answer)
        spans.append((len(before), len(before) + len(answer)))
    return text, spans


def _check_calls_are_written(message: Mapping[str, Any], number: int, answer: str) -> None:
    for call in message.get("tool_calls") or ():
        name = call.get("function", call)["name"]
        if name not in answer:
            raise DocumentError(
                f"the chat template does not write that message {number + 1} calls {name!r}; set chat_template to one that "
                "knows tool_calls, or take the row out."
            )


def _before_first(tokenizer: PreTrainedTokenizerBase, chat: Chat, after: str) -> str:
    """Return what a template writes before an answer that begins a chat.

    No template writes a chat without messages, so other chats show where the answer begins.
    """
    question = Chat([{"role": "user", "content": "?"}], chat.tools)
    without, asking = _render(tokenizer, question), _render(tokenizer, question, add_generation_prompt=True)
    header = asking[len(without) :] if asking.startswith(without) else ""
    start = after.find(header) + len(header) if header and header in after else -1
    if start < 0:
        # A template that marks only questions writes nothing before an answer. Another answer in its place shows where it begins.
        start = _render(tokenizer, Chat([{**chat.messages[0], "content": _ELSEWHERE}], chat.tools)).find(_ELSEWHERE)
    if start < 0:
        raise DocumentError(
            "it begins with an answer, which cannot be found in the text that the chat template writes; put a question in front, or "
            "take it out."
        )
    return after[:start]


def _render(tokenizer: PreTrainedTokenizerBase, chat: Chat, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False, **options))


def _encode_marked(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> Tokens:
    encoded: Any = tokenizer.apply_chat_template(
        chat.messages, tools=chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = Tokens(list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]])
    marked = [token for token, in_answer in zip(tokens.ids, tokens.in_answer, strict=True) if in_answer]
    answers = str(tokenizer.decode(marked))
    for number, message in enumerate(chat.messages):
        _check_calls_are_written(message, number, answers)
    return tokens


def _encode_completion(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> Tokens:
    text = prompt + completion
    tokens = _tokens_of(tokenizer(text, return_offsets_mapping=True), [(len(prompt), len(text))])
    if tokenizer.eos_token_id is None:
        return Tokens(tokens.ids, tokens.in_answer, is_chat=False)
    ids, in_answer = tokens.ids, tokens.in_answer
    if ids[-1:] == [tokenizer.eos_token_id]:
        return Tokens(ids, [*in_answer[:-1], True], is_chat=False)
    return Tokens([*ids, tokenizer.eos_token_id], [*in_answer, True], is_chat=False)


def _tokens_of(encoded: Any, spans: Sequence[tuple[float, float]]) -> Tokens:
    later, in_answer, start = iter(spans), [], 0
    first, last = next(later, _NOWHERE)
    for begin, end in encoded["offset_mapping"]:
        while end > last:
            first, last = next(later, _NOWHERE)
        # Offsets may leave out white space before a word, so a token's text starts where the previous token's text ends.
        in_answer.append(begin < end and first <= start)
        start = max(start, end)
    return Tokens(list(encoded["input_ids"]), in_answer)
