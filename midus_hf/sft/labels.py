"""Which tokens of a chat are of answers: told by where answers stand in the text that a template makes of it."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from midus_hf.documents import DocumentError
from midus_hf.sft.formats import Chat, Example

_MARKERS = re.compile(r"{%-?\s*generation\s*-?%}")
"""By which a template may say itself where answers stand."""

_NOWHERE = (math.inf, math.inf)


@dataclass(frozen=True)
class Tokens:
    """The tokens of an example.

    Args:
        ids: Token ids.
        in_answer: Of each whether it belongs to an answer, the token included that ends one.
        is_chat: Whether a template has written them.
    """

    ids: list[int]
    in_answer: list[bool]
    is_chat: bool = True

    def cut(self, length: int) -> "Tokens":
        """The first of them.

        Args:
            length: How many at most.
        """
        return self if len(self.ids) <= length else Tokens(self.ids[:length], self.in_answer[:length], self.is_chat)


def encode(tokenizer: PreTrainedTokenizerBase, example: Example, place: str) -> Tokens:
    """Write an example out and turn it into tokens.

    A token belongs to an answer if all of its text does. What a template writes after an answer belongs to it, white
    space at the end excepted: the token that ends it.

    Args:
        tokenizer: A fast one, with a chat template if the example is a chat.
        example: A chat, or a prompt and its completion.
        place: Where it is, for messages.

    Raises:
        DocumentError: If the template does not take the chat.
        ValueError: If the template does not let answers be found.
    """
    if not isinstance(example, Chat):
        return _encode_completion(tokenizer, example.prompt, example.completion)
    try:
        if _MARKERS.search(str(tokenizer.chat_template)):
            return _encode_marked(tokenizer, example.messages)
        text, spans = _write_out(tokenizer, example.messages)
    except TemplateError as error:
        raise DocumentError(
            f"{place} is not taken by the chat template: {error}. Correct it, or take it out."
        ) from error
    return _tokens_of(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True), spans)


def _write_out(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a chat, and from where to where in it each answer goes."""

    def write(number: int, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages[:number], tokenize=False, **options))

    text, spans = write(len(messages)), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = write(number, add_generation_prompt=True), write(number + 1)
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                "the chat template writes earlier messages differently once others follow, so answers cannot be found in "
                "its text; put {% generation %} and {% endgeneration %} around them in it, or set chat_template."
            )
        spans.append((len(before), len(before) + len(after[len(before) :].rstrip())))
    return text, spans


def _encode_marked(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Tokens:
    encoded: Any = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return Tokens(list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]])


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
        # Offsets may leave out white space before a word: a token's text starts where that of the one before ends.
        in_answer.append(begin < end and first <= start)
        start = max(start, end)
    return Tokens(list(encoded["input_ids"]), in_answer)
