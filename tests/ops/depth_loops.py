"""Attention to the sequence and the depth, one score at a time, in Python numbers of float64."""

import math

import torch


def attend(query, key, value, keys, values, weight, scaling, softcap=None, is_causal=True):
    """What each head reads in one softmax over the keys of the sequence and, weighed by g, the slots of its own position.

    Args:
        query: `[B, H, T, d]`, float64.
        key: `[B, K, T, d]`; value alike.
        keys: n of `[B, K, T, d]`; values alike.
        weight: g, `[H]`.
        scaling: By what scores are multiplied.
        softcap: What scores do not exceed.
        is_causal: Whether queries read no later key.
    """
    batch, heads, tokens, width = query.shape
    group = heads // key.shape[1]

    def score(one, other):
        raw = sum(one[place] * other[place] for place in range(width)) * scaling
        return raw if softcap is None else softcap * torch.tanh(raw / softcap)

    rows = []
    for row in range(batch):
        for head in range(heads):
            for token in range(tokens):
                asked, of = query[row, head, token], head // group
                masses, read = [], []
                for other in range(token + 1 if is_causal else key.shape[2]):
                    masses.append(score(asked, key[row, of, other]).exp())
                    read.append(value[row, of, other])
                for slot_key, slot_value in zip(keys, values, strict=True):
                    masses.append(weight[head] * score(asked, slot_key[row, of, token]).exp())
                    read.append(slot_value[row, of, token])
                total = sum(masses)
                rows.append(sum(mass / total * vector for mass, vector in zip(masses, read, strict=True)))
    assert math.prod((batch, heads, tokens)) == len(rows)
    return torch.stack(rows).view(batch, heads, tokens, width)
