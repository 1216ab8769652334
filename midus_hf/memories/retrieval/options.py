"""Options of memories that retrieve slots, and declarations of their keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, ModelSizes, Uniform
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.options import DeclaredControl, InsertedOptions

Addressing = Literal["content", "random"]
ADDRESSING_HELP = (
    "how slots are retrieved. content: by what a token holds; random: by a query that is drawn anew for every token and pass, as "
    "long as the token's own query, so that it says nothing of the text: a control"
)
RANDOM_SLOTS: Mapping[DeclaredControl, Mapping[str, Any]] = {"random-slots": {"addressing": "random"}}

QueryNorm = Literal["none", "batch", "layer"]
QUERY_NORM_HELP = (
    "norm of each head's query: layer over its features, or batch over all tokens of a batch, padding included; in training batch "
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
