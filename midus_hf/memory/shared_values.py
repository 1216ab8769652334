"""What the memories share that MIDUS compares head-wise memory with: one table of values for all heads."""

import dataclasses
import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from midus_hf.memory.retrieval import RetrievalMemory, RetrievalOptions
from midus_hf.ops.weighted_gather import weighted_gather


@dataclasses.dataclass(kw_only=True)
class SharedValueOptions(RetrievalOptions):
    """Options of a memory whose heads share values of the full width: `RetrievalOptions` with other defaults.

    The attention in front keeps its output projection, the block's input is added to it (MIDUS, equation 6), and
    queries are batch-normalised (section 5.2).
    """

    query_norm: str = "batch"
    inner_residual: bool = True

    @property
    def keeps_output_projection(self) -> bool:
        return True

    @property
    def adds_block_input(self) -> bool:
        return self.inner_residual

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate == "head":
            raise ValueError("gate is 'head'; expected 'none' or 'token', since the heads' outputs are summed.")


class SharedValueMemory(RetrievalMemory):
    """A memory with a query projection, keys per head, and one table of values that all heads read and sum over.

    Args:
        hidden_size: D; a multiple of `num_heads`.
        num_heads: H, lookups per token.
        slots: N, values.
        k: Slots retrieved a head and token. Default: 4.
        norm_and_gate: `query_norm`, `temperature` and `gate`, as in `RetrievalOptions`.

    Raises:
        ValueError: If `hidden_size` is no multiple of `num_heads`.
    """

    value_parameters = ("value_bank",)

    def __init__(self, *, hidden_size: int, num_heads: int, slots: int, k: int = 4, **norm_and_gate: Any):
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size is {hidden_size}; expected a multiple of the {num_heads} attention heads, "
                "since each head asks with an equal share of the query."
            )
        super().__init__(
            query_width=hidden_size // num_heads,
            input_width=hidden_size,
            num_heads=num_heads,
            k=k,
            **norm_and_gate,
        )
        self.query_projection = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value_bank = nn.Parameter(torch.empty(slots, hidden_size))

    @classmethod
    def from_config(cls, config: PreTrainedConfig, options: SharedValueOptions) -> "SharedValueMemory":
        of_block = ("layers", "inner_residual")
        own = {name: value for name, value in vars(options).items() if name not in of_block}
        return cls(hidden_size=config.hidden_size, num_heads=config.num_attention_heads, **own)

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator | None = None) -> None:
        """Values start at zero, so that the layer returns zero; the projection keeps the scale of its input.

        The paper gives the values alone. Keys follow product-key memory (Lample et al. 2019): uniform in +-1 over the
        square root of their width.
        """
        if name == "value_bank":
            tensor.zero_()
        elif name == "query_projection.weight":
            tensor.normal_(0.0, 1.0 / math.sqrt(tensor.shape[-1]), generator=generator)
        elif name in self.key_value_parameters:
            bound = 1.0 / math.sqrt(tensor.shape[-1])
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            super().init_parameter(name, tensor, generator)

    def queries(self, attention_output: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        query = self.query_projection(attention_output)  # [B, T, D]
        return self.normalised(query.unflatten(-1, (self.num_heads, self.query_width)), track_statistics)

    def forward(
        self, attention_output: torch.Tensor, residual: torch.Tensor | None = None, backend: str = "auto"
    ) -> torch.Tensor:
        """Retrieve what the attention output asks for, summed over heads (MIDUS, equation 15).

        Args:
            attention_output: `[B, T, D]`.
            residual: `[B, T, D]`, added to what is retrieved. Default: none.
            backend: Body of the ops. Default: `"auto"`.

        Returns:
            `[B, T, D]`.
        """
        scores, slots = self.select(self.queries(attention_output), backend)  # [B, T, H, k]
        weights = self.weigh(scores)
        bank = self.value_bank.to(attention_output.dtype)
        output = weighted_gather(bank, slots.flatten(-2), weights.flatten(-2), backend=backend)  # [B, T, D]
        output = self.gated(attention_output, output)
        return output if residual is None else (residual + output).to(residual.dtype)

    def select(self, query: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError(f"{type(self).__name__} does not say how it selects slots.")
