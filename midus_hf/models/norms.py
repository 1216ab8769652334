"""Names of a layer's norms in the families' code."""

from typing import ClassVar

import torch


class NamesNorms:
    """Mixin for a family's layers that holds the norms' names by role. The defaults are Llama's names."""

    # The norm before attention; None if the family has none.
    attention_norm: ClassVar[str | None] = "input_layernorm"
    # The norm behind the attention's output projection.
    attention_output_norm: ClassVar[str | None] = None
    # The norm before the feed-forward network.
    mlp_norm: ClassVar[str | None] = "post_attention_layernorm"
    # The norm behind the feed-forward network.
    mlp_output_norm: ClassVar[str | None] = None

    def normalised(self, norm: str | None, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return hidden states after a norm, or unchanged if the norm is None."""
        return hidden_states if norm is None else getattr(self, norm)(hidden_states)
