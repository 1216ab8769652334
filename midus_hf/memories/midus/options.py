"""Memories of MIDUS, which retrieve slots: head-wise (HML), and its baselines, linear and product-key; with FLOPs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, ModelSizes, Normal, Uniform
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.flops import SOFTMAX, layer_norm, linear, top_k
from midus_hf.memories.options import (
    ADDRESSING_HELP,
    RANDOM_SLOTS,
    Addressing,
    DeclaredControl,
    InsertedOptions,
    package_only,
)
from midus_hf.memories.registry import register_memory

QueryNorm = Literal["none", "batch", "layer"]
QUERY_NORM_HELP = (
    "norm of each head's query: layer over its features, or batch over all tokens of a batch, without padding; in training batch "
    "lets a token see the statistics of later tokens"
)
INNER_RESIDUAL_HELP = "whether the block's input is added to the attention output that the memory reads"


@dataclass(kw_only=True)
class RetrievalOptions(InsertedOptions):
    """Options of every memory that retrieves slots. Norms start with gain 1 and bias 0.

    A batch norm with a frozen gain uses its running statistics and does not update them.
    """

    sites = ("inserted",)
    controls: ClassVar[Mapping[DeclaredControl, Mapping[str, Any]]] = RANDOM_SLOTS
    #: Option that bounds `k`, and a noun for what it counts.
    size_option: ClassVar[tuple[str, str]] = ("n", "sub-key per side")

    k: int = option(4, "slots retrieved per head and token")
    query_norm: QueryNorm = option("none", QUERY_NORM_HELP)
    inner_residual: bool = option(False, INNER_RESIDUAL_HELP)
    addressing: Addressing = option("content", ADDRESSING_HELP)

    def query_width(self, sizes: ModelSizes) -> int:
        """Return the width of each head's query: the head's share of the memory's input."""
        return sizes.hidden_size // sizes.num_heads if self.output_projection else sizes.head_dim

    def norm_tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """Return the tensors of the query norm."""
        if self.query_norm == "none":
            return {}
        shape = (sizes.num_heads, self.query_width(sizes))
        tensors = {
            "query_norm_weight": DeclaredTensor(shape, "norm", ONES),
            "query_norm_bias": DeclaredTensor(shape, "norm", ZEROS),
        }
        if self.query_norm == "batch":
            tensors["query_mean"] = DeclaredTensor(shape, "buffer", ZEROS)
            tensors["query_variance"] = DeclaredTensor(shape, "buffer", ONES)
        return tensors

    def check(self) -> None:
        name, noun = self.size_option
        size = getattr(self, name)
        if size < 1:
            raise RequestError(f"{name} is {size}; expected at least one {noun}.")
        if not 1 <= self.k <= size:
            raise RequestError(f"k is {self.k}; expected 1 <= k <= {name} = {size}. Lower k or raise {name}.")

    def check_fit(self, sizes: ModelSizes) -> None:
        if sizes.hidden_size % sizes.num_heads:
            raise RequestError(
                f"hidden_size is {sizes.hidden_size}; expected a multiple of the {sizes.num_heads} attention heads, since each "
                "has an equal share of the residual stream. This model needs another memory."
            )
        query_width = self.query_width(sizes)
        width = sizes.num_heads * query_width
        if self.inner_residual and width != sizes.hidden_size:
            raise RequestError(
                f"inner_residual adds the block's input of width {sizes.hidden_size} to an attention output of width {width}; "
                "expected equal widths. Set output_projection to true as well."
            )
        if self.size_option[0] == "n" and query_width % 2:  # product keys halve queries
            name = "hidden_size / num_attention_heads" if self.output_projection else "head_dim"
            raise RequestError(
                f"{name} is {query_width}; expected an even number, half for rows and half for columns."
            )


def sub_keys(num_heads: int, n: int, query_width: int) -> dict[str, DeclaredTensor]:
    """Declare row and column keys `[H, n, w]`, w = query_width / 2, uniform in +-1 / sqrt(w) (Lample)."""
    width = query_width // 2
    keys = DeclaredTensor((num_heads, n, width), "key", Uniform(1.0 / math.sqrt(width)))
    return {"row_keys": keys, "column_keys": keys}


@register_memory("midus-hml")
@dataclass(kw_only=True)
class MidusHmlOptions(RetrievalOptions):
    """Size of the memory: one bank of values, which each head transforms (HIVE).

    Values start at zero, so that the memory returns zero. Keys and transforms start non-zero, so that gradients reach the values;
    the paper does not give theirs. Transforms are normal with variance 1 / v, which keeps the scale of a value.
    """

    controls = {"one-row": {"n": 1, "k": 1}, **RANDOM_SLOTS}

    n: int = option(64, "sub-keys per side; every head addresses n * n slots")
    output_projection: bool = option(False, "whether the attention in front keeps its output projection")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        heads, slots, width = sizes.num_heads, self.n * self.n, sizes.hidden_size // sizes.num_heads
        return {
            **self.norm_tensors(sizes),
            **sub_keys(heads, self.n, self.query_width(sizes)),
            "value_bank": DeclaredTensor((slots, width), "value", ZEROS),
            "value_transform": DeclaredTensor((heads, width, width), "transform", Normal(1.0 / math.sqrt(width))),
        }

    @package_only
    def values_read(self, sizes: ModelSizes) -> int:
        return sizes.num_heads * self.k * (sizes.hidden_size // sizes.num_heads)

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        """Count the operations; like the op, transform each token's sum, or each row if rows are fewer."""
        rows, width = batch * tokens, sizes.hidden_size // sizes.num_heads
        transformed = min(rows, self.n * self.n) * sizes.num_heads
        return {
            **sub_key_flops(rows * sizes.num_heads, self.n, self.query_width(sizes), self.k),
            "values": linear(rows * sizes.num_heads, self.k, width) + linear(transformed, width, width),
            **weighing_flops(self, sizes, rows),
        }


@dataclass(kw_only=True)
class SharedValueOptions(RetrievalOptions):
    """Options of a memory whose heads read the same values of full width.

    The attention keeps its output projection, the block's input is added to the projection's output (MIDUS, equation 6), and
    queries are batch-normalised (section 5.2).
    """

    output_projection = True

    query_norm: QueryNorm = option("batch", QUERY_NORM_HELP)
    inner_residual: bool = option(True, INNER_RESIDUAL_HELP)

    def projection_and_values(self, sizes: ModelSizes, slots: int) -> dict[str, DeclaredTensor]:
        """Declare a query projection that keeps the scale of its input, and values, zero at first."""
        hidden = sizes.hidden_size
        return {
            "query_projection.weight": DeclaredTensor((hidden, hidden), "projection", Normal(1.0 / math.sqrt(hidden))),
            "value_bank": DeclaredTensor((slots, hidden), "value", ZEROS),
        }

    @package_only
    def values_read(self, sizes: ModelSizes) -> int:
        return sizes.num_heads * self.k * sizes.hidden_size

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        """Count the operations; every query is compared with every flat key of its head, or with sub-keys."""
        rows, hidden = batch * tokens, sizes.hidden_size
        return {
            "query projection": linear(rows, hidden, hidden),
            "values": linear(rows, sizes.num_heads * self.k, hidden),
            **self.choosing_flops(rows * sizes.num_heads, self.query_width(sizes)),
            **weighing_flops(self, sizes, rows),
        }

    @package_only
    def choosing_flops(self, queries: int, query_width: int) -> dict[str, int]:
        """Count the operations of `queries` that are compared with keys, and of the choice of k values for each."""
        raise NotImplementedError


@register_memory("midus-linear")
@dataclass(kw_only=True)
class MidusLinearOptions(SharedValueOptions):
    """Size of the memory (MIDUS, equations 4 and 5)."""

    controls = {"one-row": {"slots": 1, "k": 1}, **RANDOM_SLOTS}
    size_option = ("slots", "slot")

    slots: int = option(4096, "number of values, and of keys per head")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        width = self.query_width(sizes)
        return {
            **self.norm_tensors(sizes),
            **self.projection_and_values(sizes, self.slots),
            "slot_keys": DeclaredTensor((sizes.num_heads, self.slots, width), "key", Uniform(1.0 / math.sqrt(width))),
        }

    @package_only
    def choosing_flops(self, queries: int, query_width: int) -> dict[str, int]:
        return {"scores": linear(queries, query_width, self.slots), "choice": top_k(queries, self.slots, self.k)}


@register_memory("midus-pkm")
@dataclass(kw_only=True)
class MidusPkmOptions(SharedValueOptions):
    """Size of the memory (MIDUS, equations 11 to 15; Lample et al. 2019)."""

    controls = {"one-row": {"n": 1, "k": 1}, **RANDOM_SLOTS}

    n: int = option(64, "sub-keys per side; every head addresses the same n * n values")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        return {
            **self.norm_tensors(sizes),
            **self.projection_and_values(sizes, self.n * self.n),
            **sub_keys(sizes.num_heads, self.n, self.query_width(sizes)),
        }

    @package_only
    def choosing_flops(self, queries: int, query_width: int) -> dict[str, int]:
        return sub_key_flops(queries, self.n, query_width, self.k)


def weighing_flops(options: RetrievalOptions, sizes: ModelSizes, rows: int) -> dict[str, int]:
    """Count the operations of the query norm, in any mode, the softmax over slots and the residual adds."""
    queries = rows * sizes.num_heads
    return {
        "query norm": 0 if options.query_norm == "none" else layer_norm(queries, options.query_width(sizes)),
        "weights": queries * options.k * SOFTMAX,
        "residual adds": rows * sizes.hidden_size * (2 if options.inner_residual else 1),
    }


def sub_key_flops(queries: int, n: int, query_width: int, k: int) -> dict[str, int]:
    """Count operations that find the k best pairs of sub-keys: k rows, k columns, k of k * k sums."""
    return {
        "scores": 2 * linear(queries, query_width // 2, n),
        "choice": 2 * top_k(queries, n, k) + queries * k * k + top_k(queries, k * k, k),
    }
