"""The head-wise memory layer: what it starts as, what it learns first, and what it refuses."""

import pytest
import torch
from tiny import FAMILIES

from midus_hf.config.memories.headwise import HeadwiseOptions
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.headwise import HeadwiseMemory
from midus_hf.ops import headwise_memory, op_choices
from tests.memory.building import build

NAMES = ("row_keys", "column_keys", "value_bank", "value_transform")


def layer(hidden_size=48, num_heads=4, head_dim=16, n=8, k=2, seed=0) -> HeadwiseMemory:
    torch.manual_seed(seed)
    return build("headwise", hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, n=n, k=k)


def attention_output(memory: HeadwiseMemory, batch=2, tokens=7, seed=1) -> torch.Tensor:
    width = memory.num_heads * memory.head_dim
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(seed))


def test_parameters_have_the_shapes_of_the_paper():
    shapes = {name: tuple(parameter.shape) for name, parameter in layer().named_parameters()}
    assert shapes == {
        "row_keys": (4, 8, 8),
        "column_keys": (4, 8, 8),
        "value_bank": (64, 12),
        "value_transform": (4, 12, 12),
    }


def test_values_start_at_zero_and_nothing_else_does():
    memory = layer()
    assert not memory.value_bank.any()
    for name in ("row_keys", "column_keys", "value_transform"):
        assert getattr(memory, name).all(), name


def test_keys_and_transforms_start_at_the_documented_scale():
    memory = layer(hidden_size=512, num_heads=8, head_dim=32, n=32)
    for keys in (memory.row_keys.detach(), memory.column_keys.detach()):
        assert 0.24 < keys.abs().max() <= 0.25  # 1 / sqrt(16)
        assert abs(keys.mean()) < 0.01
    assert memory.value_transform.detach().std() == pytest.approx(64**-0.5, rel=0.02)
    assert not torch.equal(memory.row_keys, memory.column_keys)
    assert not torch.equal(memory.row_keys[0], memory.row_keys[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_generator_gives_the_same_bytes(name, dtype):
    memory = layer()
    first, second, other = (torch.full_like(getattr(memory, name), 5.0, dtype=dtype) for _ in range(3))
    for tensor, seed in ((first, 3), (second, 3), (other, 4)):
        memory.declared[name].initial.fill(tensor, torch.Generator().manual_seed(seed))
    assert torch.equal(first, second)
    assert torch.equal(first, other) == (name == "value_bank")


def test_the_same_seed_gives_the_same_layer():
    first, second, other = layer(seed=0).state_dict(), layer(seed=0).state_dict(), layer(seed=1).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in NAMES)
    assert not torch.equal(first["row_keys"], other["row_keys"])


def test_initialising_leaves_what_a_checkpoint_has_filled():
    memory = layer()
    memory.value_transform._is_hf_initialized = True
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.fill_(7.0)
    memory.reset_parameters()
    assert torch.equal(memory.value_transform, torch.full_like(memory.value_transform, 7.0))
    assert not memory.value_bank.any() and not (memory.row_keys == 7.0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_new_layer_returns_zeros_and_leaves_the_residual_stream_as_it_is(dtype):
    memory = layer().to(dtype)
    output = memory(attention_output(memory).to(dtype))
    assert output.shape == (2, 7, 48) and output.dtype == dtype
    assert torch.equal(output, torch.zeros_like(output))
    stream = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(stream + output, stream)


def test_the_first_step_moves_the_values_alone_and_the_second_everything():
    memory = layer()
    inputs = attention_output(memory).requires_grad_()
    target = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(memory.parameters(), lr=0.1)

    (memory(inputs) - target).square().sum().backward()
    moved = {name: bool(parameter.grad.any()) for name, parameter in memory.named_parameters()}
    assert moved == {"row_keys": False, "column_keys": False, "value_bank": True, "value_transform": False}
    assert not inputs.grad.any()

    optimizer.step()
    optimizer.zero_grad()
    (memory(inputs) - target).square().sum().backward()
    assert all(parameter.grad.any() for parameter in memory.parameters())
    assert inputs.grad.any()


def test_each_head_asks_with_its_own_slice_and_writes_its_own_slice():
    memory = layer()
    with torch.no_grad():
        memory.value_bank.normal_()
    inputs = attention_output(memory)
    changed = inputs.clone()
    changed[..., 16:32] = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(5))  # head 1
    difference = memory(inputs) != memory(changed)
    assert difference[..., 12:24].any()
    assert not difference[..., :12].any() and not difference[..., 24:].any()


def test_tokens_do_not_see_each_other():
    memory = layer()
    with torch.no_grad():
        memory.value_bank.normal_()
    inputs = attention_output(memory, batch=1, tokens=6)
    changed = inputs.clone()
    changed[:, 3] += 1
    difference = (memory(inputs) != memory(changed)).any(-1)[0]
    assert difference.tolist() == [False, False, False, True, False, False]


def test_the_layer_is_the_op_on_its_parameters():
    memory = layer()
    with torch.no_grad():
        memory.value_bank.normal_()
    inputs = attention_output(memory)
    query = inputs.view(2, 7, 4, 16)
    tables = (memory.row_keys, memory.column_keys, memory.value_bank, memory.value_transform)
    assert torch.equal(memory(inputs), headwise_memory(query, *tables, 2).reshape(2, 7, 48))
    by_pytorch = headwise_memory(query, *tables, 2, backend="torch")
    with op_choices(backend="torch"):
        assert torch.equal(memory(inputs), by_pytorch.reshape(2, 7, 48))


@pytest.mark.parametrize("batch, tokens", [(0, 3), (1, 1), (2, 0)])
def test_empty_and_one_token_batches_run(batch, tokens):
    memory = layer()
    assert memory(attention_output(memory, batch, tokens)).shape == (batch, tokens, 48)


def test_heads_keep_the_width_of_the_family_and_write_an_equal_share_of_the_stream(family):
    config = FAMILIES[family].config()
    memory = HeadwiseMemory(HeadwiseOptions(n=8, k=3), ModelSizes.of(config))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (memory.head_dim, memory.value_dim) == (head_dim, config.hidden_size // config.num_attention_heads)
    assert (memory.n, memory.k) == (8, 3)
    assert memory(attention_output(memory)).shape == (2, 7, config.hidden_size)


def test_some_families_have_queries_wider_than_the_values():
    wider = {name for name, family in FAMILIES.items() if getattr(family.config(), "head_dim", 8) != 32 // 4}
    assert wider == {"qwen3", "gemma3"}


def test_its_text_names_its_sizes():
    assert repr(layer()) == "HeadwiseMemory(num_heads=4, head_dim=16, value_dim=12, n=8, k=2)"


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"hidden_size": 50}, "hidden_size is 50; expected a multiple of the 4 attention heads"),
        ({"head_dim": 15}, "head_dim is 15; expected an even number, half for rows and half for columns"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        layer(**sizes)


def test_more_slots_than_sub_keys_are_refused():
    with pytest.raises(ValueError, match=r"k is 9; expected 1 <= k <= n = 8\. Lower k or raise n"):
        layer(n=8, k=9)


def test_keys_and_values_are_named_so_that_their_rate_can_be_set():
    assert set(layer().names_of("key", "value")) == set(NAMES) - {"value_transform"}
