"""Models with packs, of a tiny base, and a tokenizer with names among its random ids."""

import string
from collections.abc import Iterable
from typing import Any

import torch
from models.hosting import host_of
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from midus_hf.memories.packs.glossary import Entry, Glossary

# Byte-level: printable characters, a space, a line break, the bytes of é and ü, and letters after a space.
_BYTES = [*map(chr, range(33, 127)), *"ĠĊÃ©¼"]
_WORDS = [f"Ġ{letter}" for letter in string.ascii_lowercase]
# Of random tokens, about every sixth is a name of one of five entries; letters and digits are none within words.
_CHARACTERS = [chr(code) for code in range(33, 127) if chr(code) not in ";|"]
TEXTS = ["Qx", "to k", "(V) W", "xyzzy0", "A-B-C d"]
ENTRIES = [Entry((*_CHARACTERS[at::15], f"{at} é"), text) for at, text in enumerate(TEXTS)]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 128 tokens that tiny models have."""
    words = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *_BYTES, *_WORDS])}
    tokenizer = Tokenizer(BPE(words, [("Ġ", letter) for letter in string.ascii_lowercase]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def chat_tokenizer():
    tokenizer, turn = tiny_tokenizer(), "{{ '(Q)' if m['role'] == 'user' else '(A)' }} {{ m['content'] }}\n"
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}(A)"
    return tokenizer


def pack_model(
    family: str,
    dtype: torch.dtype,
    entries: Iterable[Entry] = ENTRIES,
    *,
    layers: Any = None,
    options: Any = None,
    tokenizer: Any = None,
    **sizes: Any,
) -> Any:
    """A tiny model in eval mode with a glossary; `options` are those of its memory."""
    native = tiny_model(family, dtype, **sizes)
    layers = list(range(native.config.num_hidden_layers)) if layers is None else layers
    model = host_of(native, {"type": "packs", "layers": layers, **(options or {})})
    service = model.model.services["glossary"]
    service.glossary = Glossary(tokenizer or tiny_tokenizer(), entries, options=service.options)
    return model
