"""Kernels of attention over the depth against the PyTorch body in float64: outputs, sums and every gradient."""

import pytest
import torch
from ops.laws import assert_close, assert_equals_reference, assert_same_bits, leaves_of, output_and_gradients
from ops.table import DEVICE, OPS, depth_slots, stacked

from midus_hf.ops.moda import triton as kernels_of_depth
from midus_hf.ops.moda.op import depth_attention
from midus_hf.ops.moda.triton import device_numbers, slot_table

OP = OPS["depth"]

LAYOUTS = {
    "heads first": lambda slot: slot.contiguous(),
    "one of several": lambda slot: torch.stack([slot, slot], dim=-2)[..., 1, :],
    "every other number": lambda slot: torch.stack([slot, slot], dim=-1)[..., 0],
    "behind one number": lambda slot: torch.cat([slot.new_zeros(1), slot.flatten()])[1:].view(slot.shape),
    "one for all texts": lambda slot: slot[:1].expand(slot.shape),
}


def test_slots_may_have_different_layouts():
    arguments, layouts = stacked(slots=11), list(LAYOUTS.values())
    for slot in range(11):
        for part, several in (("key", 5), ("value", 3)):
            arguments[f"{part} {slot}"] = layouts[slot % several](arguments[f"{part} {slot}"])
    assert len({(key.stride(), value.stride()) for key, value in zip(*depth_slots(arguments), strict=True)}) > 4
    assert_equals_reference(OP, arguments, "triton", softcap=None)


def test_slots_with_equal_strides_are_one_aligned_run():
    keys, values = depth_slots(stacked(slots=4))
    table = slot_table(keys, values)
    strides = [4 * stride for stride in keys[0].stride()[:3]]
    assert (table.runs, table.unit) == (1, 16)
    assert table.numbers.tolist() == [4, *strides, *strides, *(slot.data_ptr() for slot in (*keys, *values))]
    keys[1], values[3] = keys[1].contiguous(), LAYOUTS["behind one number"](values[3])
    table = slot_table(keys, values)
    assert (table.runs, table.unit) == (3, 4)
    ends = table.numbers[:21:7].tolist()
    assert ends[-1] == 4
    assert sorted(ends) == ends
    assert sorted(table.numbers[21:25].tolist()) == sorted(key.data_ptr() for key in keys)
    assert slot_table(*([slot[..., :15] for slot in slots] for slots in depth_slots(stacked()))).unit == 4


def test_slot_may_repeat_as_key_and_value():
    first, second = depth_slots(stacked(slots=2))[0]
    named = {"key 0": first, "key 1": second, "key 2": first, "value 0": second, "value 1": first, "value 2": first}
    assert_equals_reference(OP, {"query": stacked()["query"]} | named, "triton", softcap=None)


@pytest.mark.parametrize("wanted", ["query", "key 1", "value 0"])
def test_only_needed_gradients_are_computed(wanted, monkeypatch):
    launched = []
    kernel = kernels_of_depth.depth_gradient_kernel

    class Recorded:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: (launched.append(constants), kernel[grid](*arguments, **constants))

    monkeypatch.setattr(kernels_of_depth, "depth_gradient_kernel", Recorded())
    whole = output_and_gradients(OP, stacked(), "triton")
    assert_same_bits(output_and_gradients(OP, stacked(), "triton", wanted=wanted), whole)
    requests = [(constants["WANTS_QUERY"], constants["WANTS_SLOTS"]) for constants in launched]
    assert requests == [(True, True), (wanted == "query", wanted != "query")]


def test_gradient_of_one_output_is_enough():
    for part in (0, 1):
        gradients = []
        for body, dtype in (("triton", torch.float32), ("reference", torch.float64)):
            leaves = leaves_of(stacked(), dtype)
            outputs = depth_attention(leaves["query"], *depth_slots(leaves), 0.5, backend=body)
            gradients += torch.autograd.grad(outputs[part].sum(), leaves["query"])
        assert_close("query", *gradients, torch.float32)


@pytest.mark.parametrize("count", [1, 256, 600])
def test_numbers_arrive_on_the_device(count):
    ends = [-(1 << 60), 1 << 60, 0, 1, -1, 16, (1 << 47) + 512]
    numbers = [ends[index % len(ends)] for index in range(count)]
    like = torch.zeros(1, device=DEVICE)
    result = device_numbers(numbers, like)
    assert (result.dtype, result.device) == (torch.int64, like.device)
    assert result.tolist() == numbers


def test_any_numbers_need_one_compiled_kernel(monkeypatch):
    """Triton compiles anew for numbers of 32 bits, for 1, and for multiples of 16."""
    passed = []

    class Caught:
        def __getitem__(self, grid):
            return lambda numbers, into, **constants: passed.append(numbers)

    monkeypatch.setattr(kernels_of_depth, "write_numbers_kernel", Caught())
    device_numbers([0, 1, 16, -16, 1 << 40, -(1 << 60)], torch.zeros(1, device=DEVICE))
    assert [len(each) for each in passed] == [16]
    assert all(number % 2 and 1 << 32 < number < 1 << 63 for number in passed[0])


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_mixed_dtypes_are_read_in_one(autocast, monkeypatch):
    """Under autocast keys are rotated in float32 and values are not; PyTorch's attention casts all of them."""
    arguments, dtypes, op = stacked(), set(), depth_attention.__globals__["depth_attention_op"]

    def spied(query, keys, values, *rest):
        dtypes.update(tensor.dtype for tensor in (query, *keys, *values))
        return op(query, keys, values, *rest)

    monkeypatch.setitem(depth_attention.__globals__, "depth_attention_op", spied)
    narrow = [name for name in arguments if name == "key 1" or name.startswith("value")]
    arguments |= {name: arguments[name].bfloat16() for name in narrow}
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        actual = output_and_gradients(OP, arguments, "triton")
    assert dtypes == {torch.bfloat16 if autocast else torch.float32}
    for name, exact in output_and_gradients(OP, arguments, "reference", torch.float64).items():
        assert actual[name].dtype == (torch.bfloat16 if name in narrow else torch.float32)
        assert_close(name, actual[name], exact, torch.bfloat16)
