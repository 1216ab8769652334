"""A model with new memories computes what its base computes."""

import json

import torch
from sites.cases import everywhere

from tests.upscalers.checkpoints import logits


@everywhere()
def test_logits_are_those_of_the_base_and_the_config_says_where_memories_are(case, family, shared_base, upscaled):
    folder = upscaled(case, family)
    assert torch.equal(logits(folder), logits(shared_base(family)))
    (entry,) = json.loads((folder / "config.json").read_text())["memory"]
    assert (entry["site"], entry["layers"], entry.get("into", [])) == (case.site, case.layers, case.into)
    assert entry.get("name") == (case.method if case.is_attached else None)
