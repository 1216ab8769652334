"""Mixture of Chapters by loops over rows, tokens, heads and memory tokens, to judge the tensor code by.

Written from equations 1 to 4 and algorithm 1 of the paper, and from what the options say of weights and of what is pooled.
Vectors are float64 tensors, so that autograd gives gradients of the loops as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from midus_hf.memories.chapters.options import ChaptersOptions

EPS = 1e-6


@dataclass(frozen=True)
class Read:
    """What the loops found for one token: its router logits, the routed chapters, best first, and what is added to it."""

    logits: torch.Tensor
    chosen: list[int]
    added: torch.Tensor


def read_by_loops(
    options: ChaptersOptions,
    num_heads: int,
    tensors: Mapping[str, torch.Tensor],
    hidden_states: torch.Tensor,
    documents: Sequence[Sequence[Sequence[int]]],
) -> dict[tuple[int, int], Read]:
    """What each token that is no padding gets, by row and index.

    Args:
        options: Of the memory.
        num_heads: Query heads.
        tensors: Of the layer and of the bank, by name, float64.
        hidden_states: `[B, T, D]`, float64.
        documents: For each row its documents, each the indices of its tokens; padding is in none.
    """
    reads = {}
    for row, of_row in enumerate(documents):
        states = hidden_states[row]
        first_chunk = min(8, options.chunk_size)
        for document in of_row:
            for position, index in enumerate(document):
                begin = 0
                for other in range(position + 1):
                    if other == first_chunk or (other > first_chunk and other % options.chunk_size == 0):
                        begin = other
                pooled_over = {
                    "token": [index],
                    "sequence": list(document),
                    "chunk": list(document[:begin]),
                }[options.routing]
                if len(pooled_over) > 1 and options.routing != "token":
                    pooled_over = [other for other in pooled_over if other != document[0]]
                pooled = torch.zeros_like(states[index])
                for other in pooled_over:
                    state = states[other] / (states[other].square().mean() + EPS).sqrt()
                    pooled = pooled + state.clamp(-1, 1) / len(pooled_over)
                reads[row, index] = _read(options, num_heads, tensors, states[index], pooled)
    return reads


def _read(
    options: ChaptersOptions,
    num_heads: int,
    tensors: Mapping[str, torch.Tensor],
    state: torch.Tensor,
    pooled: torch.Tensor,
) -> Read:
    logits = torch.stack(
        [
            torch.dot(weight, pooled) + bias
            for weight, bias in zip(tensors["router_weight"], tensors["router_bias"], strict=True)
        ]
    )
    routed = range(options.shared_chapters, options.chapters)
    probabilities = logits.softmax(0)
    chosen = sorted(routed, key=lambda chapter: -probabilities[chapter].item())[: options.k]
    total = sum(probabilities[chapter] for chapter in chosen)
    weights: list[tuple[int, torch.Tensor]] = [
        (chapter, torch.ones((), dtype=torch.float64)) for chapter in range(options.shared_chapters)
    ]
    weights += [(chapter, options.routed_scale * probabilities[chapter] / total) for chapter in chosen]
    all_weights = sum(weight for _, weight in weights)

    keys, values = [], []
    for chapter, weight in weights:
        share = weight / all_weights
        for number in range(options.chapter_tokens):
            token = tensors["bank"][chapter * options.chapter_tokens + number]
            token = token / (token.square().mean() + EPS).sqrt() * share
            keys.append(tensors["key_projection.weight"] @ token)
            values.append(tensors["value_projection.weight"] @ token)

    normalised = state / (state.square().mean() + EPS).sqrt() * tensors["norm_weight"]
    query = tensors["query_projection.weight"] @ normalised
    width = len(query) // num_heads
    heads = []
    for head in range(num_heads):
        own = slice(head * width, (head + 1) * width)
        scores = [torch.dot(query[own], key[own]) / math.sqrt(width) for key in keys]
        attention = torch.stack(scores).softmax(0)
        heads.append(sum(share * value[own] for share, value in zip(attention, values, strict=True)))
    return Read(logits, chosen, tensors["output_projection.weight"] @ torch.cat(heads))
