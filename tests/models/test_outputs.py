"""What a forward returns beside logits."""

import pytest
import torch
from models.cases import CASES, chosen
from models.upscaled import upscaled_model
from tiny import NUM_LAYERS, WINDOW, prompt


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
    assert {name for name, _ in block.named_children()} >= {"self_attn", "input_layernorm", "memory"}
    own = {name.partition(".")[0] for name, _ in block.named_parameters()}
    assert own == {"self_attn", "input_layernorm", "memory"}
    assert not any(name.startswith("self_attn.o_proj") for name in block.state_dict())


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
