"""What a forward computes with memories at each site, and what it returns beside logits."""

import pytest
import torch
from models.cases import CASES, chosen
from models.chapter_models import chapter_model
from models.hosting import logits
from models.ultramem_models import ultramem_model
from models.upscaled import upscaled_model
from tiny import NUM_LAYERS, WINDOW, prompt, tiny_model

from midus_hf.models.inference.statement import state

# What no proof of a type wires (test_every_type.py): tables that layers share, and layers to which a memory adds across others.
EVERY = (0, 1, 2, 3)
SHARING = {
    "neighbours": lambda family: chapter_model(family, routing="token", layers=EVERY, share="every:2"),
    **{kind: lambda family, kind=kind: ultramem_model(family, kind) for kind in ("ring", "skip", "shared skip")},
}


@pytest.mark.parametrize("kind", SHARING)
@torch.no_grad()
def test_layers_compute_what_is_stated_of_the_base_with_the_tables_of_their_group(native_family, kind):
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


def test_a_block_adds_its_memory_to_the_stream_and_nothing_else(family):
    model = upscaled_model(family)
    block, seen = model.model.layers[1], []
    hook = block.memory.register_forward_hook(lambda module, args, output: seen.append((*args, output)))
    with torch.no_grad():
        states = model(prompt(), output_hidden_states=True).hidden_states
        ((attention_output, stream, output),) = seen
        hook.remove()
        assert len(states) == NUM_LAYERS + 2 + 1
        assert torch.equal(stream, states[1]) and torch.equal(output, states[2])
        assert torch.equal(states[2], states[1] + block.memory(attention_output))


@pytest.mark.parametrize("case", chosen())
def test_attentions_are_those_of_the_sequence_in_every_layer(native_family, case, tmp_path):
    model = CASES[case].model(native_family, tmp_path, torch.float32)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(prompt(), output_attentions=True, use_cache=False, **CASES[case].given()).attentions
    assert len(attentions) == model.config.num_hidden_layers
    for attention in attentions:
        assert attention.shape == (2, 4, 3 * WINDOW, 3 * WINDOW)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 3 * WINDOW))
