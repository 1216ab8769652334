"""`torch.export` of models whose memories retrieve slots."""

from typing import Any

import pytest
import torch
from models.cases import CASES
from pairs import by_default
from tiny import logits, prompt

from midus_hf.ops import op_choices


class _LogitsOf(torch.nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


# docs/serve.md exports head-wise memory.
@pytest.mark.parametrize(
    "kind", by_default(["ultramem own"], ("midus-hml", "midus-pkm", "ultramem own"), fewest=["midus-hml"])
)
def test_exported_graph_takes_any_number_of_tokens(kind):
    model, tokens = CASES[kind].model("llama", None, torch.float32, small=True), prompt(7)
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    with op_choices(backend="reference"):
        graph = torch.export.export(_LogitsOf(model), (tokens,), dynamic_shapes=sizes).module()
        for some in (tokens, prompt(4, 3)):
            assert torch.equal(graph(some), logits(model, some))
