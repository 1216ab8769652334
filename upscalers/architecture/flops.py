"""Floating-point operations and parameters of a model, counted from its config alone."""

import math
from typing import Any

from midus_hf.anatomy.types import MAIN_TYPES, MEMORY_PREFIX
from midus_hf.config.errors import RequestError
from midus_hf.memories.bank import banks_of
from midus_hf.memories.flops import Backbone, ModelFlops, estimate_flops
from midus_hf.memories.registry import tensors_in_layer
from upscalers.architecture.layer_tensors import family_of
from upscalers.architecture.layout import layout_of

# Types that multiply embeddings by a number, which is not visible in their tensors.
_SCALE_EMBEDDINGS = ("gemma2", "gemma3_text")


def count_flops(config: dict[str, Any], tokens: int, batch: int = 1) -> ModelFlops:
    """Return the FLOPs of a raw config's model for one batch, default 1, of sequences of `tokens` tokens."""
    model_type = config.get("model_type")
    native = model_type.removeprefix(MEMORY_PREFIX) if isinstance(model_type, str) else None
    if native not in MAIN_TYPES:
        raise RequestError(
            f"config has model_type = {model_type!r}; expected one of: {', '.join(MAIN_TYPES)}, or {MEMORY_PREFIX} and one of them."
        )
    layout = layout_of(config)
    tensors = layout.backbone_layers[0].values()
    biases = {tensor.role for tensor in tensors if len(tensor.shape) == 1}  # norms too, which have their own roles
    norms = {tensor.role: tensor.shape[0] for tensor in tensors if tensor.role in ("query_norm", "key_norm")}
    backbone = Backbone(
        sizes=layout.sizes,
        vocabulary=layout.outer["model.embed_tokens.weight"][0],
        attention_bias="query" in biases,
        output_bias="output_projection" in biases,
        mlp_bias="down" in biases,
        query_key_norm=(norms["query_norm"], norms["key_norm"]) if norms else None,
        input_norms="mlp_norm" in biases,
        output_norms="mlp_output_norm" in biases,
        scales_embedding=native in _SCALE_EMBEDDINGS,
        caps_scores=bool(layout.values.get("attn_logit_softcapping")),
        caps_logits=bool(layout.values.get("final_logit_softcapping")),
    )
    return estimate_flops(backbone, layout.memories, tokens, batch)


def count_parameters(config: dict[str, Any]) -> dict[str, int]:
    """Count the parameters of a model by the part of the model. A tied matrix counts once; `total` leaves out `bank`."""
    family_of(config)  # which refuses types that are not read
    layout = layout_of(config)
    memories, sizes = layout.memories, layout.sizes
    shapes = [*layout.outer.values(), *(tensor.shape for layer in layout.layers for tensor in layer.values())]
    numbers = {"value": 0, "buffer": 0, "rest": 0}
    read = 0
    for entry in memories.entries:
        held = [(1, tensors_in_layer(entry, layer, sizes)) for layer in entry.layers]
        if entry.is_attached:
            held += [(len(tables.layers), tables.tensors) for tables in memories.tables(entry.name)]
        per_token = entry.options.values_read(sizes)
        for readers, tensors in held:
            for tensor in tensors.values():
                numbers[tensor.role if tensor.role in numbers else "rest"] += math.prod(tensor.shape)
            num_values = sum(math.prod(tensor.shape) for tensor in tensors.values() if tensor.role == "value")
            # Layers may read the same rows of a table that they share.
            read += num_values if per_token is None else min(num_values, per_token * readers)
    backbone = sum(map(math.prod, shapes)) - sum(numbers.values())
    embeddings = sum(math.prod(layout.outer.get(f"{name}.weight", (0,))) for name in ("model.embed_tokens", "lm_head"))
    total = backbone + numbers["value"] + numbers["rest"]
    activated = backbone + numbers["rest"] + read
    banks = banks_of(memories).values()
    return {
        "total": total,
        "backbone": backbone,
        "memory_values": numbers["value"],
        "memory_rest": numbers["rest"],
        "activated": activated,
        "total_without_embeddings": total - embeddings,
        "activated_without_embeddings": activated - embeddings,
        "bank": sum(bank.parameters for bank in banks),
        "fetched": sum(bank.fetched for bank in banks),
    }
