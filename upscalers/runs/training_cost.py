"""What training a planned model takes, computed from sizes: GPU memory, and operations per token."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from upscalers.architecture.flops import count_parameters
from upscalers.upscaling import Upscaling

#: Tokens of the sequence whose activations are counted.
TOKENS = 4096
# Weight, gradient and two moments of AdamW in float32; a frozen weight in bfloat16.
_TRAINED_BYTES, _FROZEN_BYTES = 16, 2
_LORA_RANK = 16
_NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)  # with double quantisation
_PROJECTIONS = ("query", "key", "value", "output_projection", "gate", "up", "down")


@dataclass(frozen=True)
class TrainingCost:
    """Bytes of GPU memory for training on one sequence with `activation_checkpointing`, and FLOPs per token.

    Args:
        bytes: Of the result, training what the method trains; of a bank, the blocks that one text fetches.
        activation_bytes: The part of these that is of the sequence, which sharding does not divide.
        base_bytes: Of the base, training all of it.
        lora_bytes: Of the base with LoRA of rank 16 on all projections.
        qlora_bytes: The same with the projections in NF4.
        flops_per_token: Of the result: three passes, forward, recomputed and backward, and the gradients of trained parameters.
    """

    bytes: int
    activation_bytes: int
    base_bytes: int
    lora_bytes: int
    qlora_bytes: int
    flops_per_token: int

    def to_dict(self) -> dict[str, Any]:
        return {"tokens": TOKENS, **dataclasses.asdict(self)}


def training_cost(upscaling: Upscaling) -> TrainingCost | None:
    """Return what training takes; None if there is nothing to train, or the config lacks a size."""
    counts = upscaling.counts
    sizes = upscaling.layout.sizes
    vocabulary = upscaling.config.get("vocab_size")
    hidden, wide = sizes.hidden_size, sizes.intermediate_size
    if not counts.trainable or not isinstance(vocabulary, int) or not wide:
        return None

    def activations(layers: int) -> int:
        return TOKENS * (2 * hidden * layers + 2 * (10 * hidden + 4 * wide) + 10 * vocabulary)

    trained = counts.trainable if counts.fetched is None else counts.fetched
    frozen = counts.total - (counts.trainable if counts.fetched is None else 0)
    shapes = [
        tensor.shape
        for layer in upscaling.base.layout.layers
        for tensor in layer.values()
        if tensor.role in _PROJECTIONS and len(tensor.shape) == 2
    ]
    projections = sum(map(math.prod, shapes))
    adapters = sum(_LORA_RANK * sum(shape) for shape in shapes)
    adapted = _TRAINED_BYTES * adapters + activations(upscaling.base.num_layers)
    counted = count_parameters(upscaling.config)
    # Scores and weighted values of all tokens, later ones included.
    attention = 4 * TOKENS * sizes.num_heads * sizes.head_dim * len(upscaling.layout.layers)
    used = counted["activated_without_embeddings"] + hidden * vocabulary + (counts.fetched or 0)
    return TrainingCost(
        bytes=_TRAINED_BYTES * trained + _FROZEN_BYTES * frozen + activations(upscaling.plan.num_layers),
        activation_bytes=activations(upscaling.plan.num_layers),
        base_bytes=_TRAINED_BYTES * counts.base + activations(upscaling.base.num_layers),
        lora_bytes=_FROZEN_BYTES * counts.base + adapted,
        qlora_bytes=round(_NF4_BITS / 8 * projections) + _FROZEN_BYTES * (counts.base - projections) + adapted,
        flops_per_token=3 * (2 * used + attention) + 2 * min(trained, used),
    )
