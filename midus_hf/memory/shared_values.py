"""What the memories share that MIDUS compares head-wise memory with: one table of values for all heads."""

from collections.abc import Mapping

import torch
from torch import nn

from midus_hf.memory.retrieval import RetrievalMemory
from midus_hf.ops.gather.weighted import weighted_gather


class SharedValueMemory(RetrievalMemory):
    """A memory with a query projection, keys per head, and one table of values that all heads read and sum over.

    Args:
        options: `SharedValueOptions`.
        sizes: Of the model.
    """

    query_projection: nn.Linear
    values_by_head = False

    def queries(self, attention_output: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        query = self.query_projection(attention_output)  # [B, T, D]
        query = query.unflatten(-1, (self.num_heads, self.query_width))
        return self.addressed(self.normalised(query, track_statistics))

    def forward(self, attention_output: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Retrieve what the attention output asks for, summed over heads (MIDUS, equation 15).

        Args:
            attention_output: `[B, T, D]`.
            residual: `[B, T, D]`, added to what is retrieved. Default: none.

        Returns:
            `[B, T, D]`.
        """
        scores, slots = self.select(self.queries(attention_output))  # [B, T, H, k]
        weights = self.weigh(scores)
        bank = self.value_bank.to(attention_output.dtype)
        output = weighted_gather(bank, slots.flatten(-2), weights.flatten(-2))  # [B, T, D]
        output = self.gated(attention_output, output)
        return output if residual is None else (residual + output).to(residual.dtype)

    def slot_outputs(
        self, slots: torch.Tensor, head: int, *, tables: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What slots add where a head reads them alone: their values, whichever head it is.

        Args:
            slots: `[S]`, int64.
            head: That reads them.
            tables: Not asked for.

        Returns:
            `[S, 1, D]`, in front of the gate.
        """
        return self.value_bank[slots].unsqueeze(1)

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError(f"{type(self).__name__} does not say how it selects slots.")
