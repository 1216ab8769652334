"""The tables of families that tests run on: a tiny random checkpoint of each."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

NUM_LAYERS = 4
# Sliding window of the families that have one: shorter than the prompts of the tests.
WINDOW = 8
_COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_SLIDING = {"sliding_window": WINDOW}


@dataclass(frozen=True)
class TinyFamily:
    """One row of the table: a config that exercises what is peculiar to the family."""

    name: str
    config_class: type
    peculiar: dict[str, Any]

    def config(self, **changes: Any) -> Any:
        return self.config_class(**{**_COMMON, **self.peculiar, **changes})


#: What most tests run on.
FAMILIES = {
    family.name: family
    for family in (
        TinyFamily("llama", LlamaConfig, {"tie_word_embeddings": False}),
        TinyFamily(
            "qwen2",
            Qwen2Config,
            {**_SLIDING, "use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True},
        ),
        TinyFamily("qwen3", Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
        TinyFamily("gemma2", Gemma2Config, {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
        TinyFamily(
            "gemma3",
            Gemma3TextConfig,
            {**_SLIDING, "head_dim": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        ),
    )
}
# All that methods take.
NATIVE_FAMILIES = FAMILIES | {
    family.name: family
    for family in (
        TinyFamily("mistral", MistralConfig, {"sliding_window": WINDOW, "tie_word_embeddings": False}),
        TinyFamily("olmo2", Olmo2Config, {"tie_word_embeddings": False}),
    )
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of the family, with every bias and norm moved off its start value, in eval mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(NATIVE_FAMILIES[family].config(**changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def save_tiny_model(family: str, folder: Path, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Path:
    """Save `tiny_model(family)` to `folder` as any checkpoint is saved; `kwargs` go to `save_pretrained`."""
    tiny_model(family, dtype).save_pretrained(folder, **kwargs)
    return folder


def save_tiny_tokenizer(folder: Path, **kwargs: Any) -> None:
    """Save a tokenizer of the words `word1` to `word127`, whose numbers are their ids."""
    words = {"<unk>": 0, **{f"word{number}": number for number in range(1, _COMMON["vocab_size"])}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **kwargs).save_pretrained(folder)


def prompt(length: int = 3 * WINDOW, batch: int = 2, seed: int = 1) -> torch.Tensor:
    """Token ids `[batch, length]` without special tokens; longer than the sliding window by default."""
    return torch.randint(3, _COMMON["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    """The logits of one pass without a cache; by default of `prompt()`."""
    return model(prompt() if tokens is None else tokens, use_cache=False, **arguments).logits


def json_rows(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
