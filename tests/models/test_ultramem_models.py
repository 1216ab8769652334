"""Models with UltraMemV2 attached: they generate what one pass computes, compile, and are saved with what training kept."""

import pytest
import torch
from accelerate import cpu_offload
from models.ultramem_models import KINDS, logits, ultramem_model
from pairs import by_default
from tiny import prompt, tiny_model
from transformers import AutoModelForCausalLM

from midus_hf.analysis.slots.usage import record_usage


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_one_by_one_have_the_logits_of_one_pass(native_family, kind):
    model, tokens = ultramem_model(native_family, kind), prompt(length=9)
    expected = logits(model, tokens)
    assert not torch.allclose(expected, logits(tiny_model(native_family, torch.float64), tokens))
    cache, steps = None, []
    for position in range(tokens.shape[1]):
        with torch.no_grad():
            output = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("kind", ["own", "ring"])
def test_padding_on_the_left_and_beams_change_nothing(kind):
    model, tokens = ultramem_model("llama", kind), prompt(length=6, batch=1)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(tokens, **settings)
    padded = torch.nn.functional.pad(tokens, (3, 0))
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (3, 0))
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 3:], alone)
    static = model.generate(tokens, cache_implementation="static", **settings)
    assert torch.equal(static, alone)
    beams = [model.generate(tokens, num_beams=3, use_cache=use_cache, **settings) for use_cache in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("kind", by_default(["expanded"], ["expanded", "memory-plus"]))
def test_it_compiles_as_one_graph(kind):
    torch._dynamo.reset()
    # Few layers, to be compiled soon.
    model = ultramem_model("llama", kind, torch.float32, num_hidden_layers=2, layers=[0, 1])
    tokens = prompt(length=6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, tokens), logits(model, tokens))
    trained = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    trained(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


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


@pytest.mark.parametrize("kind", ["own", "ring", "skip"])
def test_layers_on_disk_and_modules_fetched_one_by_one_give_the_same_logits(kind, tmp_path):
    model, tokens = ultramem_model("gemma3", kind, torch.float32), prompt(length=6)
    model.save_pretrained(tmp_path / "model")
    expected = logits(model, tokens)
    device_map = {name: "cpu" for name, _ in model.model.named_children() if name != "layers"}
    device_map = {f"model.{name}": place for name, place in device_map.items()} | {"lm_head": "cpu"}
    device_map |= {f"model.layers.{layer}": "disk" for layer in range(len(model.model.layers))}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert loaded.model.layers[1].memories["ultramem"].query_projection.weight.is_meta
    assert torch.equal(logits(loaded, tokens), expected)
    assert torch.equal(logits(cpu_offload(model, execution_device=torch.device("cpu")), tokens), expected)
