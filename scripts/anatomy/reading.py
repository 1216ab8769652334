"""Read the row of a type from its tiny model: everything but what is proven."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from midus_hf.anatomy.types import CompositeType, ModelType, UnknownType
from midus_hf.memories.hosting.heads import rotates
from midus_hf.memories.hosting.parts import FEED_FORWARDS, MIXERS, PROJECTIONS, STACKED, has_heads
from scripts.anatomy.architecture import (
    architecture_of,
    feed_forward_of,
    mixer_of,
    part_name,
    passes_on,
    projection_of,
)
from scripts.anatomy.tiny import small_composite_sizes, small_sizes, tiny_composite_model, tiny_model

_SEED, _LENGTH = 0, 7
_OUTPUTS = PROJECTIONS["output_projection"]


@cache
def read_type(model_type: str) -> ModelType:
    """Return what the tiny model of a causal type shows, before any wiring is proven.

    Raises:
        UnknownType: If the type cannot host memory. The message says why.
    """
    architecture = architecture_of(model_type)
    model = tiny_model(model_type)
    layers: Any = model.model.layers
    attentions = [mixer for mixer in map(mixer_of, layers) if has_heads(mixer)]
    stacked = _stacked(model_type)
    networks = [network for network in map(feed_forward_of, layers) if _has_gate(network, stacked)]
    return ModelType(
        model_type=model_type,
        class_name=architecture.class_name,
        stack=type(model.model).__name__,
        layers={kind.__name__: parts for kind, parts in architecture.layers.items()},
        mixers=tuple(filter(None, dict.fromkeys(part_name(layer, MIXERS) for layer in layers))),
        attention_class=_only_class(attentions),
        mlp_class=_only_class(networks),
        some_do_not_rotate=not all(map(_rotates, attentions)),
        norms_all_heads=architecture.norms_all_heads,
        stacked=stacked,
        wirings=(),
        refused={},
        config=small_sizes(model_type),
        transformers={},
    )


def read_composite(model_type: str) -> CompositeType:
    """Return what the tiny model of a composite type shows.

    Args:
        model_type: The `model_type` of a composite model of transformers.

    Raises:
        UnknownType: If the composite model cannot host memory. The message says why.
    """
    model: Any = tiny_composite_model(model_type)
    language_config = model.config.get_text_config(decoder=True)
    language_type = language_config.model_type
    if type(language_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnknownType(
            f"{model_type!r} holds a language model, {language_type!r}, that transformers loads only within a composite model; "
            "expected a language model that transformers loads alone too."
        )
    stack_class = type(tiny_model(language_type).model)
    paths = [name for name, module in model.named_modules() if type(module) is stack_class]
    if len(paths) != 1:
        raise UnknownType(
            f"{model_type!r} holds {len(paths)} stacks of class {stack_class.__name__}; expected that of its language model alone."
        )
    if not passes_on(model, [model.get_submodule(paths[0])], "language model"):
        raise UnknownType(
            f"{model_type!r} does not pass all keyword arguments on to its language model; expected a model that does."
        )
    config = small_composite_sizes(model_type)
    return CompositeType(
        model_type=model_type, language_type=language_type, path=paths[0], config=config, transformers={}
    )


def _only_class(modules: list[Any]) -> str | None:
    classes = {type(module).__name__ for module in modules}
    return classes.pop() if len(classes) == 1 else None


def _has_gate(network: Any, stacked: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether a feed-forward network has the three projections of a gated one, separate or stacked in a known order."""
    found = [network and projection_of(network, role, stacked) for role in ("gate", "up", "down")]
    return all(each and isinstance(getattr(network, each.module), nn.Linear) for each in found)


def _rotates(attention: nn.Module) -> bool:
    """Return whether an attention rotates queries and keys, or cannot be tried."""
    with suppress(Exception):  # models raise whatever their parts raise
        return rotates(attention)
    return True


def _stacked(model_type: str) -> dict[str, tuple[str, ...]]:
    """Return the roles of projections that one linear module stacks, by class and name, where their order can be told."""
    found = {}
    for layer in tiny_model(model_type).model.layers:  # type: ignore[attr-defined]
        for network in (getattr(layer, name, None) for name in FEED_FORWARDS):
            down: Any = next((child for name, child in _children(network) if name in PROJECTIONS["down"]), None)
            for name, child in _children(network):
                if (
                    name in (*PROJECTIONS["gate"], *PROJECTIONS["up"])
                    and isinstance(down, nn.Linear)
                    and child.out_features == 2 * down.in_features
                ):
                    found[f"{type(network).__name__}.{name}"] = gate_and_up(network, child, down)
        for mixer in (getattr(layer, name, None) for name in MIXERS):
            behind: Any = next((child for name, child in _children(mixer) if name in _OUTPUTS), None)
            for name, _ in _children(mixer):
                if name in STACKED and behind is not None and values_are_last(model_type, type(mixer).__name__, name):
                    found[f"{type(mixer).__name__}.{name}"] = ("query", "key", "value")
    return {name: roles for name, roles in found.items() if roles}


def _children(module: Any) -> list[tuple[str, Any]]:
    """Return the linear children of a module, by name; none without a module."""
    children = module.named_children() if isinstance(module, nn.Module) else ()
    return [(name, child) for name, child in children if isinstance(child, nn.Linear)]


@torch.no_grad()
def gate_and_up(network: nn.Module, stacked: nn.Linear, behind: nn.Linear) -> tuple[str, ...]:
    """Return the roles of the halves of a feed-forward network's stacked projection, `gate` and `up`; empty if they have others.

    The output of a random network grows with the up projection's output, and not with the gate's input to the activation. The
    biases are set to zero.
    """
    hidden = torch.randn((1, _LENGTH, stacked.in_features), generator=torch.Generator().manual_seed(_SEED))
    half = stacked.out_features // 2
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


@torch.no_grad()
def values_are_last(model_type: str, kind: str, name: str) -> bool:
    """Return whether an attention's stacked projection ends with the rows of all values: without them, the attention gives zero.

    Queries are the first rows of the projection `name`.
    """
    model: Any = tiny_model(model_type)
    attention: Any = next(module for module in model.modules() if type(module).__name__ == kind)
    stacked = getattr(attention, name)
    behind = next(child for child_name, child in _children(attention) if child_name in _OUTPUTS)
    queries = behind.in_features
    rest = stacked.out_features - behind.in_features
    if rest <= 0 or rest % 2:
        return False
    outputs: list[Any] = []
    attention.register_forward_hook(lambda *call: outputs.append(call[-1]))
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
