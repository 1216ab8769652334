"""A memory whose values are filled adds at its site what the formula says."""

import torch
from sites.cases import everywhere
from sites.reference import add_reference
from tiny import prompt

from tests.upscalers.checkpoints import load


def logits(model) -> torch.Tensor:
    return model(prompt(), use_cache=False).logits


@everywhere()
def test_outputs_are_those_of_hooks_on_the_base(case, family, shared_base, toy_model):
    model = toy_model(case, family, torch.float64)
    reference = load(shared_base(family), torch.float64)
    with torch.no_grad():
        plain = logits(reference)
        add_reference(reference, case, dict(model.state_dict()))
        expected = logits(reference)
        output = logits(model)
    assert (expected - plain).abs().max() > 1e-2
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
