"""What a toy memory computes, by hooks on the base's own model: nothing of the code that hosts memories runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sites.cases import SiteCase
from torch import nn
from transformers import PreTrainedModel

_Map = Callable[[torch.Tensor], torch.Tensor]

_PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output_projection": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def add_reference(
    base: PreTrainedModel, case: SiteCase, tensors: dict[str, torch.Tensor], names: Sequence[str] = ()
) -> None:
    """Make the native model of the base compute what toy memories make of it.

    Args:
        base: Gets hooks.
        case: Where the memories sit.
        tensors: All tensors of the model that hosts the memories, by name.
        names: Of the memories, which all read the same; their outputs are added up. Default: the case's own memory alone.
    """
    names = names or (case.method,)
    layers = base.model.layers
    for position, layer in enumerate(case.layers):
        if case.site == "inserted":
            _insert(layers[layer - position], _low_rank(tensors, f"model.layers.{layer}.memory."))
        elif case.method == "toy-heads":
            tables = [tensors[f"model.layers.{layer}.memories.{name}.table"] for name in names]
            _add_to_heads(layers[layer].self_attn, torch.stack(tables).sum(0))
        elif case.site in ("inside-ffn", "inside-attention"):
            prefixes = [f"model.layers.{layer}.memories.{name}." for name in names]
            for role in _roles(tensors, prefixes[0]):
                added = _sum([_low_rank(tensors, f"{prefix}{role}_") for prefix in prefixes])
                layers[layer].get_submodule(_PROJECTIONS[role]).register_forward_hook(_added_to_output(added))
        else:
            _attach(layers, case, position, _sum([_attached_map(tensors, case, position, name) for name in names]))


def _low_rank(tensors: dict[str, torch.Tensor], prefix: str, table: str = "") -> _Map:
    down, up = tensors[f"{prefix}down"], tensors[table or f"{prefix}up"]
    return lambda read: torch.einsum("...d,rd,re->...e", read, down, up)


def _sum(maps: list[_Map]) -> _Map:
    return lambda read: torch.stack([each(read) for each in maps]).sum(0)


def _attached_map(tensors: dict[str, torch.Tensor], case: SiteCase, position: int, name: str) -> _Map:
    prefix = f"model.layers.{case.layers[position]}.memories.{name}."
    table = f"model.memory_tables.{name}.{position // case.options.get('share', 1)}.up"
    return _low_rank(tensors, prefix, table if case.shares_tables else "")


def _roles(tensors: dict[str, torch.Tensor], prefix: str) -> list[str]:
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    return [name.removesuffix("_down") for name in names if name.endswith("_down")]


def _added_to_output(added: _Map) -> Callable[..., torch.Tensor]:
    return lambda module, arguments, output: output + added(arguments[0])


def _attach(layers: nn.ModuleList, case: SiteCase, position: int, added: _Map) -> None:
    layer = layers[case.layers[position]]
    if case.site == "beside-ffn":
        layer.mlp.register_forward_hook(_added_to_output(added))
    elif case.site == "behind-layer":
        layer.register_forward_hook(lambda module, arguments, output: output + added(output))
    elif case.site == "behind-attention":
        _attach_behind_attention(layer, added)
    else:
        assert case.site == "skip"
        seen: list[torch.Tensor] = []
        layer.mlp.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
        layers[case.into[position]].register_forward_hook(lambda module, arguments, output: output + added(seen.pop()))


def _attach_behind_attention(layer: nn.Module, added: _Map) -> None:
    """The residual stream behind attention is what the layer was given, and what attention, or the norm behind it, gives."""
    residual: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, arguments: residual.append(arguments[0]))

    def with_added(output: torch.Tensor) -> torch.Tensor:
        return output + added(residual.pop() + output)

    if _has_output_norm(layer):
        layer.post_attention_layernorm.register_forward_hook(lambda module, arguments, output: with_added(output))
    else:
        layer.self_attn.register_forward_hook(lambda module, arguments, output: (with_added(output[0]), *output[1:]))


def _insert(layer: nn.Module, added: _Map) -> None:
    """A block with this layer's attention runs in front of the layer."""

    def block(module: Any, arguments: tuple, options: dict[str, Any]) -> tuple:
        (hidden_states,) = arguments
        normalised = module.input_layernorm(hidden_states) if hasattr(module, "input_layernorm") else hidden_states
        attention_output = module.self_attn(hidden_states=normalised, **options)[0]
        if _has_output_norm(module):
            attention_output = module.post_attention_layernorm(attention_output)
        return (hidden_states + added(attention_output),), options

    layer.register_forward_pre_hook(block, with_kwargs=True)


def _add_to_heads(attention: Any, table: torch.Tensor) -> None:
    """What each head gives, in front of the output projection, and a map `[H, d, d]` of its query, which is rotated here again."""
    seen: dict[str, Any] = {}

    def add(module: nn.Module, arguments: tuple) -> tuple:
        (cosine, sine), query = seen["position_embeddings"], seen["query"]
        batch, length, _ = arguments[0].shape
        if query.dim() == 3 or query.shape[1] == length:  # else a norm has seen the heads in front
            query = query.view(batch, length, -1, attention.head_dim).transpose(1, 2)
        first, second = query.chunk(2, dim=-1)
        query = query * cosine[:, None] + torch.cat((-second, first), dim=-1) * sine[:, None]
        return (arguments[0] + torch.einsum("bhtd,hde->bthe", query, table).flatten(2),)

    attention.register_forward_pre_hook(
        lambda module, arguments, options: seen.update(position_embeddings=options["position_embeddings"]),
        with_kwargs=True,
    )
    last = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
    last.register_forward_hook(lambda module, arguments, output: seen.update(query=output))
    attention.o_proj.register_forward_pre_hook(add)


def _has_output_norm(layer: nn.Module) -> bool:
    """Whether a norm stands behind the attention's output projection; elsewhere its name is that of another."""
    return hasattr(layer, "post_feedforward_layernorm")
