"""Models with UltraMemV2: how they start (tests/config/test_ultramem.py has appendix B), and what training keeps."""

import pytest
import torch
from models.hosting import host_config, logits
from models.ultramem_models import KINDS, ultramem_model
from tiny import NATIVE_FAMILIES, prompt, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from midus_hf.look.usage import record_usage
from midus_hf.models import FAMILIES

ENTRY = {"type": "ultramem-v2", "layers": [1, 3], "n": 8, "k": 3}


def built(family, memory=ENTRY):
    """A tiny model, built from a config."""
    config = NATIVE_FAMILIES[family].config()
    torch.manual_seed(0)
    return FAMILIES[config.model_type](host_config(config, [memory]))


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize("is_there", [True, False], ids=["beside it", "beside another memory"])
def test_projections_that_write_to_the_residual_stream_are_drawn_narrower_once_and_no_others(family, is_there):
    model, seen = built(family, ENTRY if is_there else {"type": "midus-hml", "layers": [1], "n": 8, "k": 3}), 0
    width, scale = model.config.initializer_range, (2 * model.config.num_hidden_layers) ** -0.5
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


def test_what_a_checkpoint_holds_is_loaded_as_it_is(native_family, tmp_path):
    model = built(native_family)
    model.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    base = tiny_model(native_family)  # has no memory: that is drawn, and nothing else
    base.save_pretrained(tmp_path / "base")
    beside_memory = type(model).from_pretrained(tmp_path / "base", config=model.config).state_dict()
    assert all(torch.equal(beside_memory[name], value) for name, value in base.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_what_training_kept_is_saved_and_loaded(kind, tmp_path):
    model, tokens = ultramem_model("llama", kind, torch.float32).train(), prompt(length=6)
    model(tokens)
    kept = {name: buffer for name, buffer in model.named_buffers() if name.endswith("_vector")}
    assert kept and not any((buffer == 2**-0.5).all() for buffer in kept.values())
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, tokens), logits(model, tokens))
    result = dict(loaded.named_buffers())
    assert all(torch.equal(result[name], buffer) for name, buffer in kept.items())


@pytest.mark.parametrize("kind", ["own", "ring", "heads"])
def test_usage_is_what_layers_retrieve(kind):
    model, tokens, seen = ultramem_model("llama", kind), prompt(length=6), []
    memories = [model.model.layers[layer].memories["ultramem"] for layer in (1, 3)]
    for memory in memories:
        memory.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with record_usage(model) as usage:
        logits(model, tokens)
    assert list(usage) == ["1 ultramem", "3 ultramem"]
    for memory, read, counts in zip(memories, seen, usage.values(), strict=True):
        _, rows = memory.retrieve(read)
        expected = torch.stack([of_head.flatten().bincount(minlength=counts.shape[1]) for of_head in rows.unbind(2)])
        assert torch.equal(counts, expected)
        assert counts.sum() == tokens.numel() * memory.num_heads * 3
