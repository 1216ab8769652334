"""What a forward returns beside logits, and how sequences share a row."""

import copy

import pytest
import torch
from models.upscaled import upscaled_model, upscaled_pair
from tiny import NUM_LAYERS, WINDOW, prompt


def test_hidden_states_are_those_of_every_layer_and_the_embedding(family):
    model = upscaled_model(family)
    streams = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: streams.append(output))
    with torch.no_grad():
        states = model(prompt(), output_hidden_states=True).hidden_states
    assert len(states) == NUM_LAYERS + 2 + 1
    for state, stream in zip(states[1:-1], streams[:-1], strict=True):
        assert torch.equal(state, stream)
    assert torch.equal(states[-1], model.model.norm(streams[-1]))


def test_a_block_adds_its_memory_to_the_stream_and_nothing_else(family):
    model = upscaled_model(family)
    block, seen = model.model.layers[1], []
    hook = block.memory.register_forward_hook(lambda module, args, output: seen.append((*args, output)))
    with torch.no_grad():
        states = model(prompt(), output_hidden_states=True).hidden_states
        ((attention_output, stream, output),) = seen
        hook.remove()
        assert torch.equal(stream, states[1]) and torch.equal(output, states[2])
        assert torch.equal(states[2], states[1] + block.memory(attention_output))
    assert {name for name, _ in block.named_children()} >= {"self_attn", "input_layernorm", "memory"}
    assert {name.partition(".")[0] for name, _ in block.named_parameters()} == {
        "self_attn",
        "input_layernorm",
        "memory",
    }
    assert not any(name.startswith("self_attn.o_proj") for name in block.state_dict())


def test_the_attention_of_a_block_is_called_with_all_that_the_attention_of_a_layer_is(family):
    """Kernels for packed sequences read `position_ids` and arguments that the family's code merely passes on."""
    model, calls = upscaled_model(family), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
    with torch.no_grad():
        model(prompt(), cu_seq_lens_q=torch.tensor([0, 3]), max_length_q=3)
    (args, of_first_layer), block_calls = calls[0], [calls[1], calls[4]]
    for block_args, of_block in block_calls:
        assert len(block_args) == len(args)
        assert of_block.keys() == of_first_layer.keys() >= {"position_ids", "cu_seq_lens_q", "max_length_q"}
        assert of_block["position_ids"] is of_first_layer["position_ids"]
        assert of_block["cu_seq_lens_q"] is of_first_layer["cu_seq_lens_q"]


def test_attentions_are_those_of_every_layer(family):
    model = upscaled_model(family, attention="eager")
    with torch.no_grad():
        attentions = model(prompt(), output_attentions=True).attentions
    assert len(attentions) == NUM_LAYERS + 2
    for attention in attentions:
        assert attention.shape == (2, 4, 3 * WINDOW, 3 * WINDOW)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 3 * WINDOW))


def test_the_language_model_keeps_what_its_family_does_after_the_last_layer(family):
    """Embedding scale, logit cap and head are inherited: a base and blocks that return zero agree on the loss too."""
    base, model = upscaled_pair(family, acting=False)
    with torch.no_grad():
        expected, found = (each(prompt(), labels=prompt(), logits_to_keep=0) for each in (base, model))
        assert torch.equal(expected.loss, found.loss)
        assert torch.equal(base(prompt(), logits_to_keep=3).logits, model(prompt(), logits_to_keep=3).logits)
        embeddings = model.get_input_embeddings()(prompt())
        assert torch.equal(model(inputs_embeds=embeddings).logits, base(inputs_embeds=embeddings).logits)


def packing_error(model, lengths: list[int]) -> float:
    """Largest difference between sequences packed into one row and the same sequences alone."""
    sequences = [prompt(length, batch=1, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = model(torch.cat(sequences, dim=1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(sequence, use_cache=False).logits for sequence in sequences], dim=1)
    return (packed - alone).abs().max().item()


@pytest.mark.parametrize("lengths", [[WINDOW + 5, 3, 2 * WINDOW], [1, 4, 1]], ids=str)
def test_packed_sequences_do_not_see_each_other(family, lengths):
    base, model = upscaled_pair(family)
    base_error, error = packing_error(base, lengths), packing_error(model, lengths)
    assert error <= 4 * max(base_error, torch.finfo(torch.float32).eps)
    assert base_error < 1e-5, "the base itself mixes packed sequences here, so that this shows nothing"


def test_resized_embeddings_keep_the_blocks(family):
    model = upscaled_model(family)
    with torch.no_grad():
        before = model(prompt()).logits
        model.resize_token_embeddings(130)
        after = model(prompt()).logits
    assert model.config.vocab_size == after.shape[-1] == 130
    assert torch.equal(after[..., :128], before)


def test_a_copy_of_a_model_computes_the_same_and_learns_apart(family):
    model = upscaled_model(family)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(prompt()).logits
        assert torch.equal(twin(prompt()).logits, before)
        twin.model.layers[1].memory.value_bank.zero_()
        assert not torch.equal(twin(prompt()).logits, before)
        assert torch.equal(model(prompt()).logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_compute_nearly_what_float32_ones_do(family, dtype):
    model, reference = upscaled_model(family, dtype=dtype), upscaled_model(family)
    reference.load_state_dict(model.state_dict())
    tokens = prompt(batch=24)
    with torch.no_grad():
        logits, expected = model(tokens).logits, reference(tokens).logits
    assert logits.dtype == dtype
    # Where two scores are close, rounded queries retrieve another slot, and every later token of the prompt sees that. A
    # quarter of the tokens meets none of it.
    errors = (logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.quantile(0.25) < 0.02
    assert errors.median() < 0.06
