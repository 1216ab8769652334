"""Values that each head has expanded are kept for inference alone, and never longer than they are right."""

import copy
import io

import pytest
import torch
from accelerate import cpu_offload
from models.upscaled import upscaled_model
from tiny import prompt

from midus_hf.memory.headwise import HeadwiseMemory
from midus_hf.memory.value_cache import without_value_cache


@pytest.fixture
def memory() -> HeadwiseMemory:
    """A memory that acts, in eval mode."""
    torch.manual_seed(0)
    memory = HeadwiseMemory(hidden_size=32, num_heads=4, head_dim=8, n=8, k=3).eval()
    with torch.no_grad():
        memory.value_bank.normal_()
    return memory


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


def computed(memory, inputs):
    """The output with the cache, which is filled afterwards, and the same without it."""
    with torch.no_grad():
        output = memory(inputs)
        kept = memory.value_cache.is_filled
        with without_value_cache():
            expected = memory(inputs)
        assert not memory.value_cache.is_filled
        memory(inputs)
    assert kept
    return output, expected


def is_right(memory, inputs) -> bool:
    return torch.allclose(*computed(memory, inputs), rtol=1e-5, atol=1e-5)


def test_it_is_made_once_and_computes_the_same(memory, inputs):
    assert not memory.value_cache.is_filled
    with torch.no_grad():
        first = memory(inputs)
        kept = memory.value_cache._derived
        assert kept.shape == (4, 64, 8)
        assert torch.equal(memory(inputs), first)
    assert memory.value_cache._derived is kept
    assert is_right(memory, inputs)


@pytest.mark.parametrize("values", ["shared", "own"])
def test_values_that_are_not_expanded_need_none(values, inputs):
    memory = HeadwiseMemory(hidden_size=32, num_heads=4, head_dim=8, n=8, k=3, values=values).eval()
    with torch.no_grad():
        memory(inputs)
    assert not memory.value_cache.is_filled


def test_it_is_made_neither_with_gradients_nor_in_training(memory, inputs):
    memory(inputs)
    assert not memory.value_cache.is_filled
    with torch.no_grad():
        memory.train()(inputs)
    assert not memory.value_cache.is_filled


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_that_must_not_use_it_drops_it(memory, inputs, training):
    computed(memory, inputs)
    assert memory.value_cache.is_filled
    memory.train(training)(inputs)
    assert not memory.value_cache.is_filled


def in_place(memory):
    memory.value_bank.mul_(2)


def one_step(memory):
    optimizer = torch.optim.AdamW(memory.parameters(), lr=0.1)
    with torch.enable_grad():
        memory(torch.ones(1, 2, 32)).sum().backward()
    computed(memory, torch.ones(1, 2, 32))
    optimizer.step()


def a_step_that_no_forward_saw(memory):
    for parameter in memory.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(memory.parameters(), lr=0.1).step()


def a_loaded_state(memory):
    memory.load_state_dict({name: tensor + 1 for name, tensor in memory.state_dict().items()})


def an_assigned_state(memory):
    memory.load_state_dict({name: tensor + 1 for name, tensor in memory.state_dict().items()}, assign=True)


def other_data(memory):
    memory.value_transform.data = memory.value_transform.data + 1


def another_parameter(memory):
    memory.value_transform = torch.nn.Parameter(memory.value_transform + 1)


CHANGES = (
    in_place,
    one_step,
    a_step_that_no_forward_saw,
    a_loaded_state,
    an_assigned_state,
    other_data,
    another_parameter,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_made_anew_after(change, memory, inputs):
    before, _ = computed(memory, inputs)
    with torch.no_grad():
        change(memory)
    after, expected = computed(memory, inputs)
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-2)


def test_it_follows_a_cast_and_is_not_what_it_was_after_a_cast_back(memory, inputs):
    """Freed memory is given out again: a new tensor may lie where the one lay that the values were made from."""
    before, _ = computed(memory, inputs)
    memory.to(torch.bfloat16)
    assert memory(inputs.bfloat16()).dtype == torch.bfloat16
    with torch.no_grad():
        memory(inputs.bfloat16())
        assert memory.value_cache._derived.dtype == torch.bfloat16
    for _ in range(20):
        memory.to(torch.bfloat16).to(torch.float32)
        after, expected = computed(memory, inputs)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(after, before)


def test_an_address_that_is_used_again_is_no_reason_to_keep_it(memory, inputs):
    for _ in range(50):
        computed(memory, inputs)
        shape = memory.value_bank.shape
        memory.value_bank.data = torch.empty(0)  # frees the bank, so that the next may take its place
        memory.value_bank.data = torch.randn(shape)
        assert is_right(memory, inputs)


def test_it_is_neither_saved_nor_copied_nor_pickled(memory, inputs):
    computed(memory, inputs)
    assert set(memory.state_dict()) == {"row_keys", "column_keys", "value_bank", "value_transform"}
    file = io.BytesIO()
    torch.save(memory, file)
    file.seek(0)
    for other in (copy.deepcopy(memory), torch.load(file, weights_only=False)):
        assert not other.value_cache.is_filled and other.value_cache is not memory.value_cache
        with torch.no_grad():
            assert torch.equal(other(inputs), memory(inputs))
            other.value_bank.add_(1)
        assert is_right(other, inputs) and is_right(memory, inputs)
    assert memory.value_cache.is_filled


def test_it_is_not_kept_where_parameters_come_and_go(memory, inputs):
    expected, _ = computed(memory, inputs)
    offloaded = cpu_offload(copy.deepcopy(memory), execution_device=torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(offloaded(inputs), expected, rtol=1e-5, atol=1e-5)
    assert not offloaded.value_cache.is_filled


def test_it_is_not_kept_of_what_only_stands_for_a_parameter(memory, inputs):
    with torch.no_grad():
        stand_in = {"value_bank": memory.value_bank + 1}
        shifted = torch.func.functional_call(memory, stand_in, (inputs,))
        assert not memory.value_cache.is_filled
        memory.value_bank.add_(1)
    torch.testing.assert_close(shifted, computed(memory, inputs)[1], rtol=1e-5, atol=1e-5)


def test_inference_mode_may_use_it_before_and_after_other_modes(memory, inputs):
    with torch.inference_mode():
        first = memory(inputs)
        assert memory.value_cache.is_filled
    with torch.no_grad():
        assert torch.equal(memory(inputs), first)
    memory(inputs).sum().backward()
    assert memory.value_bank.grad.any()


def test_parameters_made_in_inference_mode_keep_none(inputs):
    with torch.inference_mode():
        memory = HeadwiseMemory(hidden_size=32, num_heads=4, head_dim=8, n=8, k=3).eval()
        memory(inputs)
        assert not memory.value_cache.is_filled


def test_a_model_generates_with_it_what_it_generates_without(family):
    model = upscaled_model(family)
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with_cache = model.generate(prompt(), **settings)
    memories = [layer.memory for layer in model.model.layers if hasattr(layer, "memory")]
    assert len(memories) == 2 and all(memory.value_cache.is_filled for memory in memories)
    with without_value_cache():
        without = model.generate(prompt(), **settings)
    assert not any(memory.value_cache.is_filled for memory in memories)
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(torch.stack(with_cache.logits), torch.stack(without.logits), rtol=1e-4, atol=1e-4)
