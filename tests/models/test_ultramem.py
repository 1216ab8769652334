"""Models with UltraMemV2: how they start (tests/config/test_ultramem.py has appendix B), and their usage."""

import pytest
import torch
from models.hosting import host_config
from models.memory_models import ultramem_model
from tiny import NATIVE_FAMILIES, logits, prompt, tiny_model
from torch import nn

from midus_hf.look.usage import record_usage
from midus_hf.models import FAMILIES

ENTRY = {"type": "ultramem-v2", "layers": [1, 3], "n": 8, "k": 3}


def built(family, memory=ENTRY):
    """A tiny model, built from a config."""
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
        assert torch.equal(counts, expected) and counts.sum() == tokens.numel() * memory.num_heads * 3
