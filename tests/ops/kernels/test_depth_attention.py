"""Kernels of attention over the depth against the PyTorch body in float64: outputs, sums and every gradient."""

import math

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from pairs import by_default

from midus_hf.ops.depth import triton as depth_attention_triton
from midus_hf.ops.depth import triton as depth_gradients_triton
from midus_hf.ops.depth.op import depth_attention
from midus_hf.ops.depth.triton import device_numbers, slot_table


@pytest.fixture
def fast() -> str:
    """The body that reads slots where they lie."""
    return "triton"


def heads(texts, count, tokens, width, generator, dtype=torch.float32):
    """As a model has them: `[B, T, H, d]` in memory, seen as `[B, H, T, d]`."""
    drawn = torch.randn(texts, tokens, count, width, generator=generator)
    return drawn.to(DEVICE, dtype).transpose(1, 2)


def inputs(group=2, kv_heads=2, width=16, slots=5, tokens=3, texts=2, dtype=torch.float32):
    """A query, keys and values."""
    generator = torch.Generator().manual_seed(0)
    query = heads(texts, group * kv_heads, tokens, width, generator, dtype)
    keys, values = ([heads(texts, kv_heads, tokens, width, generator, dtype) for _ in range(slots)] for _ in range(2))
    return query, keys, values


def outputs_and_gradients(query, keys, values, backend, softcap=None, dtype=None, wanted=None):
    """By name; `wanted` are the names of leaves."""
    leaves = {"query": query}
    leaves |= {
        f"{part} {slot}": tensor
        for part, slots in (("key", keys), ("value", values))
        for slot, tensor in enumerate(slots)
    }
    wanted = list(leaves) if wanted is None else wanted
    leaves = {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_(name in wanted)
        for name, tensor in leaves.items()
    }
    slots = [[leaf for name, leaf in leaves.items() if name.startswith(part)] for part in ("key", "value")]
    read, lse = depth_attention(leaves["query"], *slots, query.shape[-1] ** -0.5, softcap, backend=backend)
    generator = torch.Generator().manual_seed(9)
    along = [
        torch.randn(made.shape, generator=generator).to(DEVICE, query.dtype).to(made.dtype) for made in (read, lse)
    ]
    gradients = torch.autograd.grad([read, lse], [leaves[name] for name in wanted], along)
    return {"read": read.detach(), "lse": lse.detach()} | dict(zip(wanted, gradients, strict=True))


def assert_equals_float64(query, keys, values, fast, softcap=None):
    actual = outputs_and_gradients(query, keys, values, fast, softcap)
    expected = outputs_and_gradients(query, keys, values, "torch", softcap, torch.float64)
    for name, exact in expected.items():
        assert actual[name].dtype == (torch.float32 if name == "lse" else query.dtype)
        assert_close(name, actual[name], exact, torch.float32 if name == "lse" else query.dtype)
    return actual


SIZES = [
    (1, 96, 33, 5, torch.bfloat16, 2.0),
    (2, 80, 1, 7, torch.float32, 2.0),
    (7, 256, 5, 3, torch.float32, 2.0),
    (8, 80, 5, 3, torch.bfloat16, 2.0),
    (5, 20, 33, 3, torch.float16, None),
    (17, 16, 5, 3, torch.float32, None),
    (64, 1, 3, 1, torch.float32, None),
]
MORE_SIZES = [
    (3, 64, 33, 5, torch.float32, 2.0),
    (3, 256, 1, 3, torch.bfloat16, None),
    (4, 96, 5, 5, torch.float32, 2.0),
    (6, 64, 1, 5, torch.bfloat16, 2.0),
    (6, 128, 33, 3, torch.float32, None),
]


@pytest.mark.parametrize("group, width, slots, tokens, dtype, softcap", by_default(SIZES, [*SIZES, *MORE_SIZES]))
def test_every_size(group, width, slots, tokens, dtype, softcap, fast):
    assert_equals_float64(*inputs(group, 2, width, slots, tokens, 2, dtype), fast, softcap)


@pytest.mark.parametrize("slots", [255, 300, 512])
def test_hundreds_of_slots(slots, fast):
    assert_equals_float64(*inputs(2, 1, 16, slots, 1, 1), fast)


LAYOUTS = {
    "heads first": lambda slot: slot.contiguous(),
    "one of several": lambda slot: torch.stack([slot, slot], dim=-2)[..., 1, :],
    "every other number": lambda slot: torch.stack([slot, slot], dim=-1)[..., 0],
    "behind one number": lambda slot: torch.cat([slot.new_zeros(1), slot.flatten()])[1:].view(slot.shape),
    "one for all texts": lambda slot: slot[:1].expand(slot.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_in_memory_does_not_matter(layout, fast):
    query, keys, values = inputs()
    if layout == "one for all texts":
        keys, values = ([slot[:1].repeat(2, 1, 1, 1) for slot in slots] for slots in (keys, values))
    expected = outputs_and_gradients(query, keys, values, fast)
    laid = LAYOUTS[layout]
    keys, values = ([laid(slot) for slot in slots] for slots in (keys, values))
    actual = outputs_and_gradients(query if layout == "one for all texts" else laid(query), keys, values, fast)
    assert all(torch.equal(actual[name], exact) for name, exact in expected.items())


def test_slots_may_each_lie_otherwise(fast):
    query, keys, values = inputs(slots=11)
    layouts = list(LAYOUTS.values())[:4]
    keys = [layouts[slot % 4](key) for slot, key in enumerate(keys)]
    values = [layouts[slot % 3](value) for slot, value in enumerate(values)]
    assert len({(key.stride(), value.stride()) for key, value in zip(keys, values, strict=True)}) > 4
    assert_equals_float64(query, keys, values, fast)


def test_slots_alike_are_one_run_read_sixteen_bytes_at_a_time_where_they_can():
    _, keys, values = inputs(slots=4)
    table = slot_table(keys, values)
    strides = [4 * stride for stride in keys[0].stride()[:3]]
    assert (table.runs, table.unit) == (1, 16)
    assert table.numbers.tolist() == [4, *strides, *strides, *(slot.data_ptr() for slot in (*keys, *values))]
    keys[1], values[3] = keys[1].contiguous(), LAYOUTS["behind one number"](values[3])
    table = slot_table(keys, values)
    assert (table.runs, table.unit) == (3, 4)
    ends = table.numbers[:21:7].tolist()
    assert ends[-1] == 4 and sorted(ends) == ends
    assert sorted(table.numbers[21:25].tolist()) == sorted(key.data_ptr() for key in keys)
    assert slot_table(*([slot[..., :15] for slot in slots] for slots in inputs()[1:])).unit == 4


def test_a_slot_may_be_there_twice_and_as_key_and_value(fast):
    query, keys, _ = inputs(slots=2)
    assert_equals_float64(query, [keys[0], keys[1], keys[0]], [keys[1], keys[0], keys[0]], fast)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_large_scores_do_not_overflow(softcap, fast):
    query, keys, values = inputs(slots=20)
    actual = outputs_and_gradients(query * 1e3, keys, values, fast, softcap)
    exact = outputs_and_gradients(query * 1e3, keys, values, "torch", softcap, torch.float64)
    assert all(made.isfinite().all() for made in actual.values())
    for name in ("read", "lse"):
        torch.testing.assert_close(actual[name].double(), exact[name], rtol=1e-3, atol=1e-3)


def test_a_head_that_is_not_finite_spoils_its_own_output_alone(fast):
    query, keys, values = inputs(3, 2)
    expected, _ = depth_attention(query, keys, values, 0.5, backend=fast)
    query[0, 1, 2, 0], query[1, 4, 0, 3] = math.nan, math.inf
    spoiled = torch.zeros(2, 6, 3, dtype=torch.bool, device=DEVICE)
    spoiled[0, 1, 2] = spoiled[1, 4, 0] = True
    actual, _ = depth_attention(query, keys, values, 0.5, backend=fast)
    assert actual[spoiled].isnan().all() and torch.equal(actual[~spoiled], expected[~spoiled])


@pytest.mark.parametrize("wanted", [["query"], ["key 1"], ["value 0", "value 2"]], ids="-".join)
def test_only_gradients_that_are_wanted_are_computed(wanted, monkeypatch):
    launched = []
    kernel = depth_gradients_triton.depth_gradient_kernel

    class Recorded:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: (launched.append(constants), kernel[grid](*arguments, **constants))

    monkeypatch.setattr(depth_gradients_triton, "depth_gradient_kernel", Recorded())
    whole = outputs_and_gradients(*inputs(), "triton")
    some = outputs_and_gradients(*inputs(), "triton", wanted=wanted)
    assert all(torch.equal(some[name], whole[name]) for name in some)
    requests = [(constants["WANTS_QUERY"], constants["WANTS_SLOTS"]) for constants in launched]
    assert requests == [(True, True), (wanted == ["query"], wanted != ["query"])]


def test_a_gradient_of_one_of_the_two_outputs_is_enough(fast):
    for part in (0, 1):
        query, keys, values = inputs()
        actual, exact = (
            torch.autograd.grad(depth_attention(leaf, keys_, values_, 0.5, backend=body)[part].sum(), leaf)[0]
            for body, leaf, keys_, values_ in (
                (fast, query.requires_grad_(), keys, values),
                (
                    "torch",
                    query.detach().double().requires_grad_(),
                    *([slot.double() for slot in s] for s in (keys, values)),
                ),
            )
        )
        assert_close("query", actual, exact, torch.float32)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_numbers_arrive_as_they_are(count):
    ends = [-(1 << 60), 1 << 60, 0, 1, -1, 16, (1 << 47) + 512]
    numbers = [ends[index % len(ends)] for index in range(count)]
    like = torch.zeros(1, device=DEVICE)
    result = device_numbers(numbers, like)
    assert result.dtype == torch.int64 and result.device == like.device and result.tolist() == numbers


def test_one_kernel_writes_whatever_numbers(monkeypatch):
    """Triton compiles anew for numbers of 32 bits, for 1, and for multiples of 16."""
    passed = []

    class Caught:
        def __getitem__(self, grid):
            return lambda numbers, into, **constants: passed.append(numbers)

    monkeypatch.setattr(depth_attention_triton, "write_numbers_kernel", Caught())
    device_numbers([0, 1, 16, -16, 1 << 40, -(1 << 60)], torch.zeros(1, device=DEVICE))
    assert len(passed) == 1 and len(passed[0]) == 16
    assert all(number % 2 and 1 << 32 < number < 1 << 63 for number in passed[0])


@pytest.fixture
def launches(monkeypatch):
    """Arguments of every call of the op."""
    calls = []
    op = depth_attention.__globals__["depth_attention_op"]

    def spied(*arguments):
        calls.append(arguments)
        return op(*arguments)

    monkeypatch.setitem(depth_attention.__globals__, "depth_attention_op", spied)
    return calls


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_tensors_of_several_dtypes_are_read_in_one(autocast, launches):
    """Under autocast keys are rotated in float32 and values are not; PyTorch's attention casts all of them."""
    query, keys, values = inputs()
    keys[1], values = keys[1].bfloat16(), [value.bfloat16() for value in values]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        actual = outputs_and_gradients(query, keys, values, "triton")
    dtype = torch.bfloat16 if autocast else torch.float32
    (arguments,) = launches
    assert {tensor.dtype for tensor in (arguments[0], *arguments[1], *arguments[2])} == {dtype}
    expected = outputs_and_gradients(query, keys, values, "torch", dtype=torch.float64)
    for name, exact in expected.items():
        assert actual[name].dtype == {"read": query.dtype, "lse": torch.float32, "query": query.dtype}.get(
            name, torch.bfloat16 if name == "key 1" or name.startswith("value") else torch.float32
        )
        assert_close(name, actual[name], exact, torch.bfloat16)


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ({"width": 257}, None, r"heads are 257 wide; expected 256 or less, or choose 'torch'\."),
        ({"group": 65, "width": 1}, None, r"65 query heads read each head of keys and values; expected 64 or fewer, or choose"),
        ({}, "few", r"there are 2 texts of 3 tokens and 2 heads of keys; expected 11 or less in all, or choose 'torch'\."),
    ],
    ids=["wide", "many", "programs"],
)  # fmt: skip
def test_what_kernels_cannot_take_is_refused(sizes, change, message, monkeypatch):
    query, keys, values = inputs(slots=2, **sizes)
    if change == "few":
        monkeypatch.setattr(depth_attention_triton, "_MOST_PROGRAMS", 11)
    with pytest.raises(ValueError, match=f"backend is 'triton', but {message}"):
        depth_attention(query, keys, values, 0.5, backend="triton")
