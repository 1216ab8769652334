"""Head-wise memory (HML), MIDUS's own: a product-key memory per attention head (section 4.2)."""

import math
from dataclasses import dataclass

from midus_hf.config.declarations import register_memory_type
from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, Normal
from midus_hf.config.flops.rules import flops, linear, values_read
from midus_hf.config.memories.retrieval import (
    RANDOM_SLOTS,
    RetrievalOptions,
    check_bits,
    check_halves,
    check_retrieval_fit,
    check_size,
    in_bits,
    sub_key_flops,
    sub_keys,
    weighing_flops,
)
from midus_hf.config.memory_types import check_fit, check_options
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option


@register_memory_type("headwise")
@dataclass(kw_only=True)
class HeadwiseOptions(RetrievalOptions):
    """Size of the memory: one bank of values, which each head transforms (HIVE).

    Values start at zero, so that the memory returns zero. Keys and transforms start non-zero, so that gradients reach
    the values; the paper states the start of the values only. Transforms are normal with variance 1 / v, which keeps
    the scale of a value.
    """

    controls = {"one-row": {"n": 1, "k": 1}, **RANDOM_SLOTS}

    n: int = option(64, "sub-keys per side; every head addresses n * n slots")
    output_projection: bool = option(False, "whether the attention in front keeps its output projection")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        heads, slots, width = sizes.num_heads, self.n * self.n, sizes.hidden_size // sizes.num_heads
        return {
            **self.norm_tensors(sizes),
            **sub_keys(heads, self.n, self.query_width(sizes)),
            **in_bits({"value_bank": DeclaredTensor((slots, width), "value", ZEROS)}, self.value_bits),
            "value_transform": DeclaredTensor((heads, width, width), "transform", Normal(1.0 / math.sqrt(width))),
        }


@check_options.register
def check_headwise_options(options: HeadwiseOptions) -> None:
    check_size(options, "n", "sub-key per side")


@check_fit.register
def check_headwise_fit(options: HeadwiseOptions, sizes: ModelSizes) -> None:
    check_retrieval_fit(options, sizes)
    check_halves(options, sizes)
    check_bits(
        "value_bits", options.value_bits, {"hidden_size / num_attention_heads": sizes.hidden_size // sizes.num_heads}
    )


@values_read.register
def headwise_values_read(options: HeadwiseOptions, sizes: ModelSizes) -> int:
    return sizes.num_heads * options.k * (sizes.hidden_size // sizes.num_heads)


@flops.register
def headwise_flops(
    options: HeadwiseOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations as `flops` does.

    Like the op, this applies transforms to the retrieved sum of each token, or to each row of the bank if rows are
    fewer.
    """
    rows, width = batch * tokens, sizes.hidden_size // sizes.num_heads
    transformed = min(rows, options.n * options.n) * sizes.num_heads
    return {
        **sub_key_flops(rows * sizes.num_heads, options.n, options.query_width(sizes), options.k),
        "values": linear(rows * sizes.num_heads, options.k, width) + linear(transformed, width, width),
        **weighing_flops(options, sizes, rows),
    }
