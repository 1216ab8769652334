"""Registered ops are passed by only where nobody would miss them."""

import inspect

import pytest
import torch
from ops.interpreter import mended_interpreter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from midus_hf.ops import headwise_memory, product_key_topk
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.gather.native import native_weighted_rows
from midus_hf.ops.midus_hml.triton import triton_lookup


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no-grad", "inference"])
def test_nothing_sees_a_pass_without_gradients(context):
    with context():
        assert can_skip_dispatcher()


@pytest.mark.parametrize(
    "watching",
    [torch.enable_grad, FakeTensorMode, TorchDispatchMode, torch.autograd.forward_ad.dual_level],
    ids=["gradients", "fake-tensors", "dispatch-mode", "forward-mode"],
)
def test_contexts_that_watch_are_seen(watching):
    with torch.no_grad(), watching():
        assert not can_skip_dispatcher()


@pytest.mark.parametrize("how", ["compiled", "traced", "in a graph", "in a graph before dispatch", "transformed"])
def test_calls_that_are_traced_or_transformed_are_seen(how):
    seen = []

    def look(tensor):
        seen.append(can_skip_dispatcher())
        return tensor + 1 if seen[-1] else tensor + 2

    zeros = torch.zeros(2)
    with torch.no_grad():
        if how == "compiled":
            torch._dynamo.reset()
            assert torch.equal(torch.compile(look, backend="eager", fullgraph=True)(zeros), zeros + 2)
            torch._dynamo.reset()
        elif how == "traced":
            assert torch.equal(torch.jit.trace(look, zeros, check_trace=False)(zeros), zeros + 2)
        elif how.startswith("in a graph"):
            graph = make_fx(look, pre_dispatch=how.endswith("before dispatch"))(zeros)
            assert torch.equal(graph(zeros), zeros + 2)
        else:
            assert torch.equal(torch.func.vmap(look)(zeros), zeros + 2)
        assert can_skip_dispatcher()


class Standing(torch.Tensor):
    """A tensor that may stand for another."""


def test_tensors_of_a_subclass_are_not_plain():
    plain = torch.zeros(1)
    with torch.no_grad():
        assert can_skip_dispatcher(plain, torch.nn.Parameter(plain), None)
        assert not can_skip_dispatcher(plain, plain.as_subclass(Standing))


def inputs(tokens=3, heads=2, half=4, n=6, width=5, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, 2 * half), (heads, n, half), (heads, n, half), (n * n, width))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_direct_call_of_a_kernel_makes_no_room_for_a_gradient(dtype, monkeypatch):
    pytest.importorskip("triton")

    def refuse(*_):
        raise AssertionError("slots and weights are kept")

    monkeypatch.setitem(triton_lookup.__globals__, "room_for_gradient", refuse)
    with torch.no_grad(), mended_interpreter():
        headwise_memory(*inputs(1, 1, dtype=dtype), None, 2, backend="triton")
    with pytest.raises(AssertionError, match="slots and weights are kept"), mended_interpreter():
        headwise_memory(*inputs(1, 1, dtype=dtype), None, 2, backend="triton")


def test_a_residual_of_another_width_is_refused():
    """Else C would read behind its end."""
    with torch.no_grad(), pytest.raises(RuntimeError, match="shape"):
        headwise_memory(*inputs(), None, 3, residual=torch.zeros(3, 2, 4))


READ_BY_C = {
    headwise_memory: ("row_keys", "column_keys", "value_bank", "value_transform", "residual"),
    product_key_topk: ("row_keys", "column_keys"),
    native_weighted_rows: ("bank", "slots", "weights"),
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, names in READ_BY_C.items() for name in names]
)
def test_tensors_that_c_cannot_read_are_refused(function, name):
    """As of a model that was loaded in part: C would end the process."""
    every = dict(zip(("query", "row_keys", "column_keys", "bank"), inputs(), strict=True))
    every |= {"value_bank": every["bank"], "value_transform": torch.zeros(2, 5, 5), "residual": torch.zeros(3, 2, 5)}
    every |= {"slots": torch.zeros(3, 2, dtype=torch.int64), "weights": torch.ones(3, 2), "k": 3}
    every[name] = every[name].to("meta")
    arguments = {word: every[word] for word in inspect.signature(function).parameters if word in every}
    message = f"{name} is on meta, and others are on cpu; expected one device"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        function(**arguments)
