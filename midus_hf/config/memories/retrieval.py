"""What memories that retrieve slots share: their options, keys, and values as integers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, Normal, Uniform
from midus_hf.config.memory_types import DeclaredControl, InsertedOptions
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option

Addressing = Literal["content", "random"]
ADDRESSING_HELP = (
    "how slots are retrieved. content: by what a token holds; random: by a query that is drawn anew for every token and pass, as "
    "long as the token's own query, so that it says nothing of the text: a control"
)
# Control of every memory that has the option `addressing`.
RANDOM_SLOTS: Mapping[DeclaredControl, Mapping[str, Any]] = {"random-slots": {"addressing": "random"}}

ValueBits = Literal[8, 4]
VALUE_BITS_HELP = (
    "bits per element of values that no longer train, whose rows are integers with a scale each, as quantise_tables makes them; "
    "null: the values train"
)

QueryNorm = Literal["none", "batch", "layer"]
QUERY_NORM_HELP = (
    "norm of each head's query: layer over its features, or batch over all tokens of a batch, padding included; in training batch "
    "lets a token see the statistics of later tokens"
)
INNER_RESIDUAL_HELP = "whether the block's input is added to the attention output that the memory reads"


@dataclass(kw_only=True)
class RetrievalOptions(InsertedOptions):
    """Options of every memory that retrieves slots. Norms start with gain 1 and bias 0, gates start half open.

    A batch norm with a frozen gain uses its running statistics and does not update them.
    """

    sites = ("inserted",)
    controls: ClassVar[Mapping[DeclaredControl, Mapping[str, Any]]] = RANDOM_SLOTS

    k: int = option(4, "slots retrieved per head and token")
    query_norm: QueryNorm = option("none", QUERY_NORM_HELP)
    temperature: float = option(1.0, "number by which scores are divided before the softmax")
    gate: Literal["none", "token", "head"] = option(
        "none",
        "a sigmoid of the attention output that scales what a token retrieves (token), or each of its heads (head)",
    )
    inner_residual: bool = option(False, INNER_RESIDUAL_HELP)
    addressing: Addressing = option("content", ADDRESSING_HELP)
    value_bits: ValueBits | None = option(None, VALUE_BITS_HELP)

    @property
    def adds_block_input(self) -> bool:
        return self.inner_residual

    def query_width(self, sizes: ModelSizes) -> int:
        """Return the width of each head's query: the head's share of the memory's input."""
        return self.read_width(sizes) // sizes.num_heads

    def norm_and_gate(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """Return the tensors of the query norm and of the gate."""
        tensors: dict[str, DeclaredTensor] = {}
        if self.query_norm != "none":
            shape = (sizes.num_heads, self.query_width(sizes))
            tensors["query_norm_weight"] = DeclaredTensor(shape, "norm", ONES)
            tensors["query_norm_bias"] = DeclaredTensor(shape, "norm", ZEROS)
            if self.query_norm == "batch":
                tensors["query_mean"] = DeclaredTensor(shape, "buffer", ZEROS)
                tensors["query_variance"] = DeclaredTensor(shape, "buffer", ONES)
        if self.gate != "none":
            gates = sizes.num_heads if self.gate == "head" else 1
            tensors["gate_weight"] = DeclaredTensor((gates, self.read_width(sizes)), "gate", ZEROS)
            tensors["gate_bias"] = DeclaredTensor((gates,), "gate", ZEROS)
        return tensors


@dataclass(kw_only=True)
class SharedValueOptions(RetrievalOptions):
    """Options of a memory whose heads read the same values of full width: `RetrievalOptions` with other defaults.

    The attention in front keeps its output projection, the block's input is added to the projection's output (MIDUS,
    equation 6), and queries are batch-normalised (section 5.2).
    """

    query_norm: QueryNorm = option("batch", QUERY_NORM_HELP)
    inner_residual: bool = option(True, INNER_RESIDUAL_HELP)

    @property
    def keeps_output_projection(self) -> bool:
        return True

    def projection_and_values(self, sizes: ModelSizes, slots: int) -> dict[str, DeclaredTensor]:
        """Declare the query projection, which keeps the scale of its input, and the values, which start at zero."""
        hidden = sizes.hidden_size
        return {
            "query_projection.weight": DeclaredTensor((hidden, hidden), "projection", Normal(1.0 / math.sqrt(hidden))),
            **in_bits({"value_bank": DeclaredTensor((slots, hidden), "value", ZEROS)}, self.value_bits),
        }


def sub_keys(num_heads: int, n: int, query_width: int) -> dict[str, DeclaredTensor]:
    """Declare row and column keys `[H, n, w]`, w = query_width / 2, uniform within +-1 / sqrt(w) (Lample et al.)."""
    width = query_width // 2
    keys = DeclaredTensor((num_heads, n, width), "key", key_initial(width))
    return {"row_keys": keys, "column_keys": keys}


def key_initial(width: int) -> Uniform:
    """Return the initial values of keys of a width: uniform within +-1 / sqrt(width)."""
    return Uniform(1.0 / math.sqrt(width))


def in_bits(values: Mapping[str, DeclaredTensor], bits: ValueBits | None) -> dict[str, DeclaredTensor]:
    """Declare tables of values as they are stored: as they are, or as `NAME_integers` and `NAME_scales`.

    Args:
        values: The tables, `[..., N, W]`, by name.
        bits: Bits per element, 8 or 4; None for tables that train.
    """
    if bits is None:
        return dict(values)
    stored = {}
    for name, table in values.items():
        *rows, width = table.shape
        shape = (*rows, width if bits == 8 else width // 2)
        stored[f"{name}_integers"] = DeclaredTensor(shape, "buffer", ZEROS, dtype="int8" if bits == 8 else "uint8")
        stored[f"{name}_scales"] = DeclaredTensor(tuple(rows), "buffer", ONES)
    return stored
