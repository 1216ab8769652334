"""The n-gram memory in vLLM: what its tokens read of earlier ones comes from tables with a row per slot of vLLM's cache."""

from collections.abc import Mapping
from typing import Any

import torch

from midus_hf.memories.engram.layer import Ngrams
from midus_hf.memories.engram.options import NgramOptions
from midus_hf.memories.hosting.service import Tables
from midus_hf.memories.hosting.vllm import SlotState, SlotStates
from midus_hf.memories.registry import register_paged_layer


@register_paged_layer(NgramOptions)
class PagedNgrams(Ngrams):
    """The n-gram memory of a pass whose T tokens, of several requests, are treated as T sequences of one token."""

    services = (Tables, SlotStates)  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        tables: Mapping[str, torch.Tensor] | None = None,
        state: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Read the rows of the n-grams that end at each token, as `Ngrams` does.

        Args:
            hidden_states: `[1, T, D]`.
            input_ids: `[1, T]`.
            tables: As `Ngrams` takes them.
            state: Tables with the tokens before, a `SlotState`.

        Returns:
            `[1, T, D]`.
        """
        each = hidden_states.transpose(0, 1)
        return super().forward(each, input_ids=input_ids.transpose(0, 1), tables=tables, state=state).transpose(0, 1)

    def _before(self, kept: Any, name: str, count: int, like: torch.Tensor) -> torch.Tensor:
        """Keep what a token's row in a table is, `[T, 1, ...]`, and return what the tokens before have there that are read."""
        slots: SlotState = kept["slots"]
        back = range(count, 0, -1)
        if name == "values":
            back = range(count, 0, -self.dilation)
        return slots.earlier(name, like[:, 0], back)

    def _convolved(self, values: torch.Tensor, document: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum of the values of each token and of those before, `[T, kernel, D]`, the token's own last."""
        taps = self.convolution.to(values.dtype)
        total = taps[0] * values[:, -1:]
        for tap in range(1, self.options.kernel):
            total = total + taps[tap] * values[:, -1 - tap].unsqueeze(1)
        return total

    def _kept_after(self, *_: Any) -> dict[str, torch.Tensor]:
        """Return nothing, since rows of tables are kept as they are made."""
        return {}
