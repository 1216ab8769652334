"""A model with new memories computes what its base computes, and with values at its sites what the formula says."""

import json

import torch
from sites.cases import everywhere
from sites.reference import add_reference
from tiny import prompt

from tests.upscalers.checkpoints import load, logits


@everywhere()
def test_logits_are_those_of_the_base_and_the_config_says_where_memories_are(case, family, shared_base, upscaled):
    folder = upscaled(case, family)
    assert torch.equal(logits(folder), logits(shared_base(family)))
    (entry,) = json.loads((folder / "config.json").read_text())["memory"]
    assert (entry["site"], entry["layers"], entry.get("into", [])) == (case.site, case.layers, case.into)
    assert entry.get("name") == (case.method if case.is_attached else None)


@everywhere()
@torch.no_grad()
def test_with_values_outputs_are_those_of_hooks_on_the_base(case, family, shared_base, toy_model):
    model, reference = toy_model(case, family, torch.float64), load(shared_base(family), torch.float64)
    plain = reference(prompt(), use_cache=False).logits
    add_reference(reference, case, dict(model.state_dict()))
    expected = reference(prompt(), use_cache=False).logits
    assert (expected - plain).abs().max() > 1e-2
    torch.testing.assert_close(model(prompt(), use_cache=False).logits, expected, rtol=1e-10, atol=1e-10)
