"""The template that makes texts of chats, and what of a chat it writes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Keys of messages that hold reasoning; a template reads one of them.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Keys of messages that are refused where the template does not write them.
WRITTEN = ("tool_calls", *REASONING)

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


def set_template(tokenizer: "PreTrainedTokenizerBase", named: str | None) -> None:
    """Give a tokenizer the template that a person names: "chatml", or a file with a Jinja template; None keeps its own.

    Raises:
        ValueError: If the template cannot be read, the tokenizer lacks its tokens, or has no template at all.
    """
    if named == "chatml":
        if not all(token in tokenizer.get_vocab() for token in _CHATML_TOKENS):
            raise ValueError(
                f"chat_template_path is 'chatml', whose tokens {' and '.join(_CHATML_TOKENS)} this tokenizer lacks; give a file with "
                "a template of tokens that it has."
            )
        begins = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = "{{ bos_token }}" * begins + CHATML
    elif named is not None:
        try:
            tokenizer.chat_template = Path(named).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"chat_template_path is {named!r}; expected chatml, or a file with a Jinja template."
            ) from error
    if not tokenizer.chat_template:
        raise ValueError(
            "the model's tokenizer has no chat template; set chat_template_path to chatml, or to a file with a template that has "
            "{% generation %} around answers."
        )


def check_written(chat: Mapping[str, Any], template: str) -> None:
    """Raise a `ValueError` if a template does not name a variable or a key of a message that a chat has beside its texts."""
    variables = [*(["tools"] if chat.get("tools") else []), *(chat.get("chat_template_kwargs") or {})]
    messages = [message for column in ("messages", "prompt", "completion") for message in chat.get(column, ())]
    keys = [key for key in WRITTEN if any(message.get(key) for message in messages)]
    unwritten = [key for key in variables if not re.search(rf"\b{re.escape(key)}\b", template)]
    unwritten += [key for key in keys if not reads_key(template, key)]
    if unwritten:
        raise ValueError(
            f"{unwritten[0]!r}, which the chat template does not write. Set chat_template_path to one that does"
        )


def reads_key(template: str, key: str) -> bool:
    """Return whether a template reads a key of messages, which differs from text such as `<thinking>` and from a variable."""
    return re.search(rf"[.'\"]{re.escape(key)}\b", template) is not None
