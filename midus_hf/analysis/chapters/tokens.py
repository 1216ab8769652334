"""Tokens of the vocabulary that memory tokens are nearest to, on the path from a bank to the model's own head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from midus_hf.analysis.chapters.edits import hosts_of
from midus_hf.analysis.inside.vocabulary_head import NearToken, VocabularyHead, check_top
from midus_hf.analysis.watched_models import decoder_of


@dataclass(frozen=True)
class NearChapter:
    """The tokens nearest to a chapter in one layer.

    Args:
        layer: Index of the decoder layer, whose projections were used.
        chapter: Number of the chapter, from 0.
        norm: Norm of what the memory would add for one memory token, averaged over the chapter's memory tokens.
        tokens: Tokens with the highest logits, averaged over the chapter's memory tokens. Empty if all of them add zero.
        rows: Tokens with the highest logits for each memory token alone. Empty unless `each_row` was true.
    """

    layer: int
    chapter: int
    norm: float
    tokens: list[NearToken]
    rows: list[list[NearToken]]


def nearest_tokens(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chapters: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    top: int = 10,
    each_row: bool = False,
    memory: str | None = None,
) -> list[NearChapter]:
    """Return the tokens nearest to what each chapter's memory tokens would add. This is a probe, not a proof.

    Each memory token is treated as the only one that is attended to, and as the last addition to the residual stream: what it
    adds goes through the model's final norm and head. The probe ignores the residual stream itself, the mixing of many memory
    tokens by attention, and the reaction of later layers. So the tokens suggest what a chapter is about; `ablate` shows what it does.

    Args:
        model: A causal language model with chapters. It may be compiled, or wrapped by accelerate or PEFT.
        tokenizer: The model's tokenizer.
        chapters: Numbers of the chapters. Default: all chapters.
        layers: Indices of decoder layers. Default: all layers that read chapters.
        top: Tokens per chapter. Default: 10.
        each_row: Whether to return the nearest tokens of each memory token as well. Default: False.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.

    Raises:
        ValueError: As `zero_in_layers`; if `top` is less than 1.
    """
    check_top(top)
    hosts = hosts_of(model, chapters or (), layers, memory)
    tables = {id(reader): shared for reader, shared in decoder_of(model).table_readers()}
    numbers = list(range(hosts[0].module.num_chapters)) if chapters is None else list(chapters)
    head = VocabularyHead.of(model, tokenizer, top)
    return [
        _near(hosted.layer, chapter, hosted.memory, tables.get(id(hosted.memory), {}), head, each_row)
        for hosted in hosts
        for chapter in numbers
    ]


@torch.no_grad()
def _near(
    layer: int, chapter: int, memory: Any, tables: Mapping[str, torch.Tensor], head: VocabularyHead, each_row: bool
) -> NearChapter:
    device = next(memory.parameters()).device
    added = memory.token_outputs(torch.tensor([chapter], device=device), tables=tables)[0]  # [M, D]
    norms = added.float().norm(dim=-1)
    if not norms.any():
        return NearChapter(layer, chapter, 0.0, [], [[] for _ in added] if each_row else [])
    sums: list[torch.Tensor] = []
    rows: list[list[NearToken]] = []
    for logits in head.logits(added):
        sums.append(logits.sum(0))
        rows += [head.nearest(of_row) for of_row in logits] if each_row else []
    return NearChapter(layer, chapter, norms.mean().item(), head.nearest(torch.stack(sums).sum(0) / len(added)), rows)
