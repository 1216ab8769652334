"""Models with UltraMemV2 attached: they are saved with what training kept, and have losses of their own."""

import pytest
import torch
from models.hosting import logits
from models.ultramem_models import KINDS, ultramem_model
from tiny import prompt
from transformers import AutoModelForCausalLM

from midus_hf.analysis.slots.usage import record_usage


@pytest.mark.parametrize("kind", KINDS)
def test_what_training_kept_is_saved_and_loaded(kind, tmp_path):
    model, tokens = ultramem_model("llama", kind, torch.float32).train(), prompt(length=6)
    model(tokens)
    kept = {name: buffer for name, buffer in model.named_buffers() if name.endswith("_vector")}
    assert bool(kept) == (kind != "memory-plus") and not any((buffer == 2**-0.5).all() for buffer in kept.values())
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, tokens), logits(model, tokens))
    found = dict(loaded.named_buffers())
    assert all(torch.equal(found[name], buffer) for name, buffer in kept.items())


@pytest.mark.parametrize("options", [{"balance_coef": 0.5}, {"penalty_coef": 0.5, "penalty_margin": 0.0}, {}], ids=str)
def test_losses_join_the_models_own_once_also_under_checkpointing(options):
    tokens, gradients, losses = prompt(length=6), [], []
    for checkpointing in (False, True):
        model = ultramem_model("llama", "own", **options).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        output = model(tokens, labels=tokens)
        output.loss.backward()
        losses.append(output.loss.detach())
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    torch.testing.assert_close(losses[0], losses[1])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
    plain = ultramem_model("llama", "own").train()(tokens, labels=tokens).loss
    assert (losses[0] > plain).item() == bool(options)
    assert (losses[0] == plain).item() == (not options)


@pytest.mark.parametrize("kind", ["own", "ring", "expanded", "memory-plus"])
def test_usage_is_what_layers_retrieve(kind):
    model, tokens, seen = ultramem_model("llama", kind), prompt(length=6), {}
    memories = {layer: model.get_decoder().layers[layer].memories["ultramem"] for layer in (1, 3)}
    hooks = [
        memory.register_forward_pre_hook(lambda memory, given, layer=layer: seen.update({layer: given[0]}))
        for layer, memory in memories.items()
    ]
    with record_usage(model) as usage:
        logits(model, tokens)
    for hook in hooks:
        hook.remove()
    assert {place[0] for place in usage.counts} == {1, 3}
    for (layer, _), counts in usage.counts.items():
        with torch.no_grad():
            _, rows = memories[layer].retrieve(seen[layer])
        expected = torch.stack([of_head.flatten().bincount(minlength=counts.shape[1]) for of_head in rows.unbind(2)])
        assert torch.equal(counts, expected)
        assert counts.sum() == tokens.numel() * memories[layer].num_heads * 3
