"""Templates of chats: the tokenizer's own, one of the built-in templates, or a template from a file."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

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
