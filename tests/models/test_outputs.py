"""What memories compute at each site and with shared tables; UltraMemV2's start and usage."""

import pytest
import torch
from models.hosting import host_config, host_of
from models.memory_models import act_by_chapters, chapter_model, ultramem_model
from tiny import NATIVE_FAMILIES, logits, prompt, tiny_model
from torch import nn

from midus_hf.look.usage import record_usage
from midus_hf.memories.hierarchical.bank import FetchedBatch
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.models import FAMILIES
from scripts.anatomy.statement import state

# What no proof of a type wires (test_every_type.py): tables that layers share, and memories that add across layers.
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


ENTRY = {"type": "ultramem-v2", "layers": [1, 3], "n": 8, "k": 3}


def built(family, memory=ENTRY):
    config = NATIVE_FAMILIES[family].config()
    torch.manual_seed(0)
    return FAMILIES[config.model_type](host_config(config, [memory]))


@pytest.mark.parametrize("is_there", [True, False], ids=["ultramem", "midus-hml"])
def test_only_projections_into_the_stream_start_narrower(native_family, is_there):
    model = built(native_family, ENTRY if is_there else {**ENTRY, "type": "midus-hml", "layers": [1]})
    width, scale, seen = model.config.initializer_range, (2 * model.config.num_hidden_layers) ** -0.5, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".memor" not in name:
            writes = is_there and name.endswith(("self_attn.o_proj", "mlp.down_proj"))
            assert module.weight.std().item() == pytest.approx(width * scale if writes else width, rel=0.15)
            torch.manual_seed(1)
            drawn = torch.empty_like(module.weight).normal_(0, width)
            torch.manual_seed(1)
            model._init_weights(module)
            assert torch.equal(module.weight, drawn * scale if writes else drawn), name
            seen += writes
    assert seen == (2 * model.config.num_hidden_layers if is_there else 0)


def test_loaded_tensors_are_not_scaled(native_family, tmp_path):
    """Of a checkpoint that lacks a memory: that is drawn, and nothing else."""
    base = tiny_model(native_family)
    base.save_pretrained(tmp_path)
    model = built(native_family)
    filled = type(model).from_pretrained(tmp_path, config=model.config).state_dict()
    assert all(torch.equal(filled[name], value) for name, value in base.state_dict().items())


@pytest.mark.parametrize("kind", ["ring", "heads"])
def test_usage_counts_what_layers_retrieve(kind):
    model, tokens, seen = ultramem_model("llama", kind), prompt(length=6), []
    memories = [model.model.layers[layer].memories["ultramem"] for layer in (1, 3)]
    for memory in memories:
        memory.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with record_usage(model) as usage:
        logits(model, tokens)
    assert list(usage) == ["1 ultramem", "3 ultramem"]
    for memory, states, counts in zip(memories, seen, usage.values(), strict=True):
        _, rows = memory.retrieve(states)
        expected = torch.stack([of_head.flatten().bincount(minlength=counts.shape[1]) for of_head in rows.unbind(2)])
        assert torch.equal(counts, expected)
        assert counts.sum() == tokens.numel() * memory.num_heads * 3
