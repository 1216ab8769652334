"""What a forward computes with memories at each site, with tables that layers share."""

import pytest
import torch
from models.hosting import host_of
from models.memory_models import act_by_chapters, chapter_model, ultramem_model
from tiny import logits, prompt, tiny_model

from midus_hf.memories.hierarchical.bank import FetchedBatch
from midus_hf.memories.hierarchical.options import block_layouts
from scripts.anatomy.statement import state

# What no proof of a type wires (test_every_type.py): tables that layers share, and layers to which a memory adds across others.
EVERY = (0, 1, 2, 3)
SHARING = {
    "neighbours": lambda family: chapter_model(family, routing="token", layers=EVERY, share="every:2"),
    **{kind: lambda family, kind=kind: ultramem_model(family, kind) for kind in ("ring", "skip", "shared skip")},
}


@pytest.mark.parametrize("kind", SHARING)
@torch.no_grad()
def test_layers_with_shared_tables_match_the_stated_base(native_family, kind):
    model, native, inputs = SHARING[kind](native_family), tiny_model(native_family, torch.float64), {}
    ((name, entry),) = model.config.memories().attached.items()
    memories = [model.model.layers[layer].memories[name] for layer in entry.layers]
    for position, memory in enumerate(memories):
        assert memory.index == position
        memory.register_forward_pre_hook(lambda memory, _, given: inputs.update({memory: given}), with_kwargs=True)
    plain, actual = logits(native, prompt()), logits(model, prompt())
    for position, memory in enumerate(memories if kind != "skip" else ()):
        own = model.model.memory_tables[name][str(position // 2)]
        assert all(table is own.get_parameter(each) for each, table in inputs[memory]["tables"].items())
    state(native, model, entry, inputs=inputs)
    torch.testing.assert_close(actual, logits(native, prompt()), rtol=1e-6, atol=1e-8)
    assert (actual - plain).abs().max() > 1e-2


SMALL = {"ultramem": {"n": 8, "k": 3, "zero": "none"}, "hier-lora-ffn": {"sizes": [3, 0, 2], "branching": 3}}
SMALL["chapters"] = {"memory_tokens": 24, "chapters": 12, "k": 2, "routing": "token", "share": "none"}
SITES = {"behind-attention": "chapters", "behind-layer": "chapters", "beside-ffn": "ultramem", "skip": "ultramem"}
SITES["inside-ffn"] = "hier-lora-ffn"


def blocks_of(model):
    """Return the same blocks for each memory that fetches any, for two rows."""
    batches = {}
    for name, layout in block_layouts(model.config.memories()).items():
        generator = torch.Generator().manual_seed(2)
        shapes = {level: (2, layout.record_numel(level)) for level in layout.levels}
        records = {level: 0.1 * torch.randn(shape, generator=generator).double() for level, shape in shapes.items()}
        batches[name] = FetchedBatch(layout, records, dict.fromkeys(records, torch.arange(2)))
    return {"memory_blocks": batches} if batches else {}


@pytest.mark.parametrize("site", SITES)
def test_memories_at_one_site_read_the_same_and_add_up(native_family, site):
    """Two with the same tensors give what one gives whose output is doubled."""
    entry = {"type": SITES[site], "site": site, "layers": [1, 2], **SMALL[SITES[site]]}
    entry |= {"into": [1, 3]} if site == "skip" else {}
    native = tiny_model(native_family, torch.float64)
    once, twice = host_of(native, entry), host_of(native, entry, {**entry, "name": "other"})
    act_by_chapters(once)
    tensors = {name: tensor for name, tensor in once.state_dict().items() if ".memories." in name}
    tensors |= {name.replace(f".{SITES[site]}.", ".other."): tensor for name, tensor in tensors.items()}
    assert not twice.load_state_dict(tensors, strict=False).unexpected_keys
    before, actual = logits(once, prompt(), **blocks_of(once)), logits(twice, prompt(), **blocks_of(twice))
    for layer in entry["layers"]:
        (memory,) = once.model.layers[layer].memories.values()
        memory.register_forward_hook(lambda _, read, output: 2 * output - sum(read[1:]))
    expected = logits(once, prompt(), **blocks_of(once))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)
    assert (expected - before).abs().max() > 1e-3
