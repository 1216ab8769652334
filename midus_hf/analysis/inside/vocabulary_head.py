"""Tokens that the model's own final norm and head give for a vector that is added to the residual stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from midus_hf.analysis.watched_models import bare_model, decoder_of

# Number of logits that are held at a time: 256 MB in float32.
_MOST_LOGITS = 1 << 26


@dataclass(frozen=True)
class NearToken:
    """A token of the vocabulary with its logit.

    Args:
        token: Text of the token.
        id: Id of the token.
        logit: Logit that the model's head gives the token, minus the mean over the vocabulary.
    """

    token: str
    id: int
    logit: float


@dataclass(frozen=True)
class VocabularyHead:
    """The final norm and head of a model, with the tokenizer that names tokens.

    The logits of a vector v are `head(norm(v))` minus their mean over the vocabulary, as if v were the whole residual stream.
    This is the logit lens (nostalgebraist, 2020), applied to an addition alone. Geva et al. (arXiv:2203.14680) read the values
    of feed-forward networks in this way, without the norm. A soft cap of the logits is left out, since it keeps their order.

    Args:
        norm: Final norm of the model.
        output: Output head of the model.
        tokenizer: The model's tokenizer.
        top: Number of tokens that `nearest` returns at most.
    """

    norm: nn.Module
    output: Any
    tokenizer: PreTrainedTokenizerBase
    top: int

    @classmethod
    def of(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, top: int) -> "VocabularyHead":
        """Return the head of a causal language model. The model may be compiled, or wrapped by accelerate or PEFT."""
        return cls(decoder_of(model).norm, bare_model(model).get_output_embeddings(), tokenizer, top)

    def logits(self, added: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield logits minus their mean, `[m, V]`, float32 at least, for m rows at a time of what is added, `[M, D]`."""
        for part in added.split(max(1, _MOST_LOGITS // self.output.weight.shape[0])):
            logits = self.output(self.norm(part.to(self.output.weight.device)))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            yield logits - logits.mean(-1, keepdim=True)

    def nearest(self, logits: torch.Tensor) -> list[NearToken]:
        """Return the tokens with the highest logits, from logits `[V]`."""
        best = logits.topk(min(self.top, len(logits)))
        return [
            NearToken(str(self.tokenizer.decode([number])), number, logit)
            for number, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def in_words(tokens: Sequence[NearToken]) -> str:
    """Return the texts of tokens as one string for a table."""
    return " ".join(repr(token.token) for token in tokens)


def check_top(top: int) -> None:
    if top < 1:
        raise ValueError(f"top is {top}; expected at least 1.")


def on_its_way(block: Any, name: str, added: torch.Tensor) -> torch.Tensor:
    """Return a memory's output, `[..., D]`, as it is added to the residual stream.

    Beside a feed-forward network with an output norm (Gemma, OLMo 2), the outputs of both go through the norm together, so the
    norm's scale depends on both. Here the norm sees the memory's output alone: the direction is right, up to the norm's eps, but
    the length is not.

    Args:
        block: The decoder layer.
        name: Name of the attached memory; empty if the layer was inserted for the memory.
        added: Output of the memory, `[..., D]`.
    """
    norm = getattr(block, "mlp_output_norm", None)
    if norm is None or getattr(block, "sites", {}).get(name) != "beside-ffn":
        return added
    return getattr(block, norm)(added)
