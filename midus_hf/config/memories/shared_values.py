"""Options that the baselines of MIDUS's head-wise memory share: one table of values for all heads."""

import math
from dataclasses import dataclass

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, Normal
from midus_hf.config.flops.rules import linear
from midus_hf.config.installed import not_carried
from midus_hf.config.memories.retrieval import INNER_RESIDUAL_HELP, QUERY_NORM_HELP, QueryNorm, RetrievalOptions
from midus_hf.config.memories.value_bits import check_bits, in_bits
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option


@dataclass(kw_only=True)
class SharedValueOptions(RetrievalOptions):
    """Options of a memory whose heads read the same values of full width: `RetrievalOptions` with other defaults.

    The attention in front keeps its output projection, the block's input is added to the projection's output (MIDUS,
    equation 6), and queries are batch-normalised (section 5.2).
    """

    query_norm: QueryNorm = option("batch", QUERY_NORM_HELP)
    inner_residual: bool = option(True, INNER_RESIDUAL_HELP)

    @not_carried
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate == "head":
            raise ValueError("gate is 'head'; expected 'none' or 'token', since the heads' outputs are summed.")

    @not_carried
    def check(self, sizes: ModelSizes) -> None:
        super().check(sizes)
        check_bits(self.value_bits, {"hidden_size": sizes.hidden_size})

    @property
    def keeps_output_projection(self) -> bool:
        return True

    @not_carried
    def values_read(self, sizes: ModelSizes) -> int:
        return sizes.num_heads * self.k * sizes.hidden_size

    def projection_and_values(self, sizes: ModelSizes, slots: int) -> dict[str, DeclaredTensor]:
        """Declare the query projection, which keeps the scale of its input, and the values, which start at zero."""
        hidden = sizes.hidden_size
        return {
            "query_projection.weight": DeclaredTensor((hidden, hidden), "projection", Normal(1.0 / math.sqrt(hidden))),
            **in_bits({"value_bank": DeclaredTensor((slots, hidden), "value", ZEROS)}, self.value_bits),
        }

    @not_carried
    def projection_and_values_flops(self, sizes: ModelSizes, rows: int) -> dict[str, int]:
        """Count the operations of the query projection and of the weighted sum of values."""
        hidden = sizes.hidden_size
        return {
            "query projection": linear(rows, hidden, hidden),
            "values": linear(rows, sizes.num_heads * self.k, hidden),
        }
