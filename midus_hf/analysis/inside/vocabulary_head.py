"""What the model's own final norm and head make of a vector that is added to the residual stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from midus_hf.analysis.watched_models import bare_model, decoder_of

_MOST_LOGITS = 1 << 26
"""Logits that are held at a time: 256 MB in float32."""


@dataclass(frozen=True)
class NearToken:
    """A token of the vocabulary.

    Args:
        token: Its text.
        id: Its number.
        logit: That the model's head gives it, less the mean over the vocabulary.
    """

    token: str
    id: int
    logit: float


@dataclass(frozen=True)
class VocabularyHead:
    """The model's final norm and head, and the words for what they give.

    What is read is `head(norm(v))`, less its mean over the vocabulary, where v is all that the residual stream holds: the logit lens
    (nostalgebraist, 2020) on what is added, as Geva et al. (arXiv:2203.14680) read the values of feed-forward networks, who leave
    the norm out. A soft cap of the logits is left out, for it changes no order.

    Args:
        norm: The final one.
        output: The head.
        tokenizer: Of the model.
        top: Tokens that are named.
    """

    norm: nn.Module
    output: Any
    tokenizer: PreTrainedTokenizerBase
    top: int

    @classmethod
    def of(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, top: int) -> "VocabularyHead":
        """That of a causal language model, compiled or not, or what accelerate or PEFT has wrapped around one."""
        return cls(decoder_of(model).norm, bare_model(model).get_output_embeddings(), tokenizer, top)

    def logits(self, added: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits `[m, V]`, float32 at least, less their mean, of what is added `[M, D]`, so many rows at a time."""
        for part in added.split(max(1, _MOST_LOGITS // self.output.weight.shape[0])):
            logits = self.output(self.norm(part.to(self.output.weight.device)))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            yield logits - logits.mean(-1, keepdim=True)

    def nearest(self, logits: torch.Tensor) -> list[NearToken]:
        """The tokens with the highest of logits `[V]`."""
        best = logits.topk(min(self.top, len(logits)))
        return [
            NearToken(str(self.tokenizer.decode([number])), number, logit)
            for number, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def in_words(tokens: Sequence[NearToken]) -> str:
    """Return the texts of tokens, as a table tells them."""
    return " ".join(repr(token.token) for token in tokens)


def check_top(top: int) -> None:
    """See that a number of tokens is one.

    Raises:
        ValueError: If it is less than 1.
    """
    if top < 1:
        raise ValueError(f"top is {top}; expected at least 1.")


def on_its_way(block: Any, name: str, added: torch.Tensor) -> torch.Tensor:
    """What becomes of what a memory of a layer gives, `[..., D]`, before it is added to the residual stream.

    Beside a feed-forward network that has a norm behind it (Gemma, OLMo 2) both go through the norm together, whose scale depends on
    both: here it is that of what the memory gives alone, so the direction is right, up to the norm's eps, and the length is not.

    Args:
        block: The decoder layer.
        name: That the memory is attached by; empty where the layer was inserted for it.
        added: What the memory gives.
    """
    norm = getattr(block, "mlp_output_norm", None)
    if norm is None or getattr(block, "sites", {}).get(name) != "beside-ffn":
        return added
    return getattr(block, norm)(added)
