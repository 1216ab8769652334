"""Attention to the sequence and the depth, one score at a time, in Python numbers of float64."""

import math

import torch


def attend(query, key, value, keys, values, gate, scaling, softcap=None, is_causal=True, added=False):
    """What each head reads of the keys of the sequence and of the slots of its own position, joined by a gate.

    Args:
        query: `[B, H, T, d]`, float64.
        key: `[B, K, T, d]`; value alike.
        keys: n of `[B, K, T, d]`; values alike.
        gate: c, `[H]`; None for 1, one softmax over both.
        scaling: By what scores are multiplied.
        softcap: What scores do not exceed.
        is_causal: Whether queries read no later key.
        added: Whether, as far as the gate is closed, what is read of the depth is added to the sequence's.
    """
    batch, heads, tokens, width = query.shape
    group = heads // key.shape[1]

    def score(one, other):
        raw = sum(one[index] * other[index] for index in range(width)) * scaling
        return raw if softcap is None else softcap * torch.tanh(raw / softcap)

    rows = []
    for row in range(batch):
        for head in range(heads):
            for token in range(tokens):
                queries, of = query[row, head, token], head // group
                parts = []  # of the sequence and of the depth: the sum of exponentials, and what is read times that
                for slots in (
                    [
                        (key[row, of, other], value[row, of, other])
                        for other in range(token + 1 if is_causal else key.shape[2])
                    ],
                    [
                        (slot_key[row, of, token], slot_value[row, of, token])
                        for slot_key, slot_value in zip(keys, values, strict=True)
                    ],
                ):
                    masses = [score(queries, one).exp() for one, _ in slots]
                    parts.append((sum(masses), sum(mass * one for mass, (_, one) in zip(masses, slots, strict=True))))
                (total, of_sequence), (depth_total, of_depth) = parts
                both = (of_sequence + of_depth) / (total + depth_total)
                closed = of_sequence / total + (of_depth / depth_total if added else 0)
                rows.append(both if gate is None else (1 - gate[head]) * closed + gate[head] * both)
    assert math.prod((batch, heads, tokens)) == len(rows)
    return torch.stack(rows).view(batch, heads, tokens, width)
