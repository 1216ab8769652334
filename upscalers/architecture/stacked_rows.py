"""Order of the projections whose rows are stacked in one tensor, read from what a tiny random model computes."""

from functools import cache
from typing import Any

import torch
from torch import nn

from midus_hf.models.inference.tiny import tiny_model

_LENGTH, _SEED = 7, 0


@cache
def gate_and_up(model_type: str, kind: str, name: str, down: str) -> tuple[str, ...]:
    """Return the roles of the halves of a feed-forward network's stacked projection, `gate` and `up`; empty if they have others.

    The output grows with what the up projection gives, and not with what the activation of the gate is taken of.

    Args:
        model_type: The `model_type` of a causal language model of transformers.
        kind: Name of the class of the feed-forward network.
        name: Name of the stacked projection within the network.
        down: Name of the projection behind.
    """
    network: Any = _first(tiny_model(model_type), kind)
    if network is None:
        return ()
    stacked, behind = getattr(network, name), getattr(network, down)
    generator = torch.Generator().manual_seed(_SEED)
    hidden = torch.randn((1, _LENGTH, stacked.in_features), generator=generator)
    half = stacked.out_features // 2
    with torch.no_grad():
        for linear in (stacked, behind):
            if linear.bias is not None:
                linear.bias.zero_()
        expected = 2 * network(hidden)
        linear_halves: list[bool] = []
        for rows in (slice(0, half), slice(half, None)):
            stacked.weight[rows] *= 2
            linear_halves.append(torch.allclose(network(hidden), expected, rtol=1e-4, atol=1e-6))
            stacked.weight[rows] /= 2
    first_is_linear, second_is_linear = linear_halves
    if first_is_linear == second_is_linear:
        return ()
    return ("up", "gate") if first_is_linear else ("gate", "up")


@cache
def values_are_last(model_type: str, kind: str, name: str, output: str) -> bool:
    """Return whether an attention's stacked projection ends with the rows of all values: without them, the attention gives zero.

    Args:
        model_type: The `model_type` of a causal language model of transformers.
        kind: Name of the class of the attention.
        name: Name of the stacked projection within the attention, whose first rows are the queries.
        output: Name of the output projection.
    """
    model: Any = tiny_model(model_type)
    attention: Any = _first(model, kind)
    if attention is None:
        return False
    stacked, behind = getattr(attention, name), getattr(attention, output)
    queries = behind.in_features
    outputs: list[Any] = []
    attention.register_forward_hook(lambda *call: outputs.append(call[-1]))
    with torch.no_grad():
        for linear in (stacked, behind):
            if linear.bias is not None:
                linear.bias.zero_()
        for rows in (slice(0, queries), slice((queries + stacked.out_features) // 2, None)):
            kept = stacked.weight[rows].clone()
            stacked.weight[rows] = 0
            model(input_ids=torch.arange(3, 3 + _LENGTH)[None], use_cache=False)
            stacked.weight[rows] = kept
    without_queries, without_values = (each if isinstance(each, torch.Tensor) else each[0] for each in outputs)
    return bool(without_queries.any()) and not without_values.any()


def _first(model: nn.Module, kind: str) -> nn.Module | None:
    """Return the first module of a model whose class has a name; None if there is none."""
    return next((module for module in model.modules() if type(module).__name__ == kind), None)
