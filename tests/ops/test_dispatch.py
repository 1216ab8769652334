"""Choices of bodies: calls that bypass registered ops, a torch without private functions, and missing Triton."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.interpreter import mended_interpreter
from processes.warm import run_warm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import midus_hf
from midus_hf.ops import headwise_memory, product_key_topk
from midus_hf.ops.dispatch import calling, private_torch
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.dispatch.triton import precise_product, wide_ranged_product
from midus_hf.ops.gather.native import native_weighted_rows
from midus_hf.ops.midus_hml.triton import triton_lookup


class Subclass(torch.Tensor):
    """A subclass may not have memory."""


WATCHING = (torch.enable_grad, FakeTensorMode, TorchDispatchMode, torch.autograd.forward_ad.dual_level)


def test_only_a_pass_without_gradients_or_watchers_skips_the_op():
    plain = torch.zeros(1)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert can_skip_dispatcher(plain, torch.nn.Parameter(plain), None)
    for watching in WATCHING:
        with torch.no_grad(), watching():
            assert not can_skip_dispatcher()
    with torch.no_grad():
        assert not can_skip_dispatcher(plain, plain.as_subclass(Subclass))


WAYS = {
    "compiled": lambda look: torch.compile(look, backend="eager", fullgraph=True),
    "traced": lambda look: torch.jit.trace(look, torch.zeros(2), check_trace=False),
    "in a graph": lambda look: make_fx(look)(torch.zeros(2)),
    "in a graph before dispatch": lambda look: make_fx(look, pre_dispatch=True)(torch.zeros(2)),
    "transformed": torch.func.vmap,
}


@pytest.mark.parametrize("way", WAYS)
def test_traced_or_transformed_calls_use_the_op(way):
    def look(tensor):
        return tensor + 1 if can_skip_dispatcher() else tensor + 2

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(WAYS[way](look)(torch.zeros(2)), torch.full((2,), 2.0))
        assert can_skip_dispatcher()
    torch._dynamo.reset()


def inputs(tokens=3, heads=2, half=4, n=6, width=5, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, 2 * half), (heads, n, half), (heads, n, half), (n * n, width))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_direct_kernel_call_allocates_nothing_for_gradients(dtype, monkeypatch):
    pytest.importorskip("triton")

    def refuse(*_):
        raise AssertionError("slots and weights are kept")

    monkeypatch.setitem(triton_lookup.__globals__, "room_for_gradient", refuse)
    with torch.no_grad(), mended_interpreter():
        headwise_memory(*inputs(1, 1, dtype=dtype), None, 2, backend="triton")
    with pytest.raises(AssertionError, match="slots and weights are kept"), mended_interpreter():
        headwise_memory(*inputs(1, 1, dtype=dtype), None, 2, backend="triton")


def test_residual_of_another_width_is_refused():
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
def test_tensors_outside_cpu_memory_are_refused(function, name):
    """As of a model that was loaded in part: C would end the process."""
    every = dict(zip(("query", "row_keys", "column_keys", "bank"), inputs(), strict=True))
    every |= {"value_bank": every["bank"], "value_transform": torch.zeros(2, 5, 5), "residual": torch.zeros(3, 2, 5)}
    every |= {"slots": torch.zeros(3, 2, dtype=torch.int64), "weights": torch.ones(3, 2), "k": 3}
    every[name] = every[name].to("meta")
    arguments = {word: every[word] for word in inspect.signature(function).parameters if word in every}
    message = f"{name} is on meta, and others are on cpu; expected one device"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        function(**arguments)


PACKAGES = Path(midus_hf.__file__).parent.parent


def test_only_one_file_names_private_functions_of_torch():
    """A private name begins with one underscore."""
    results = set()
    for package in ("midus_hf", "upscalers"):
        for path in (PACKAGES / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                name = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else name
                if re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", name, flags=re.IGNORECASE):
                    results.add(path.relative_to(PACKAGES).as_posix())
    assert results == {"midus_hf/ops/dispatch/private_torch.py"}


def test_missing_probes_always_use_the_op(monkeypatch):
    with torch.no_grad():
        assert can_skip_dispatcher()
        monkeypatch.setattr(private_torch, "_KNOWS_WATCHERS", False)
        assert not can_skip_dispatcher()
        tensors = inputs()
        called = headwise_memory(*tensors, None, 3)
        scores, _ = product_key_topk(*tensors[:3], 3)
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(called, headwise_memory(*tensors, None, 3))
        assert torch.equal(scores, product_key_topk(*tensors[:3], 3)[0])


def test_backward_pass_is_detected_in_checkpointing(monkeypatch):
    seen = []

    def part(tensor):
        seen.append(private_torch.is_in_backward())
        return tensor * 2

    checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True] or seen == [False]  # a part whose gradient needs nothing of it may not be repeated
    monkeypatch.setattr(private_torch, "_graph_task", None)
    assert not private_torch.is_in_backward()


def test_keep_address_without_dynamo_does_nothing(monkeypatch):
    monkeypatch.setattr(private_torch, "_static", None)
    private_torch.keep_address(torch.zeros(1))


def test_auto_runs_pytorch_for_what_kernels_refuse(monkeypatch):
    monkeypatch.setattr(calling, "_multiplies", lambda tensor: True)
    monkeypatch.setattr(calling, "HAS_TRITON", True)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert calling.resolve("auto", on_gpu) == "triton"
    assert calling.resolve("auto", on_gpu, "heads are wide") == "torch"
    assert calling.resolve("torch", on_gpu, "heads are wide") == "torch"


@pytest.mark.parametrize(
    ("hip", "expected"), [(None, ("tf32x3", "tf32")), ("6.4", ("ieee", "ieee"))], ids=["NVIDIA", "AMD"]
)
def test_amd_gpus_multiply_without_tf32(hip, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (precise_product(), wide_ranged_product()) == expected


def test_ops_run_without_triton():
    code = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import pytest, torch
from midus_hf.ops import weighted_gather
from midus_hf.ops.moc.op import chapter_attention
arguments = torch.eye(3), torch.tensor([[2, 0]]), torch.tensor([[0.5, 2.0]])
assert torch.equal(weighted_gather(*arguments), torch.tensor([[2.0, 0.0, 0.5]]))
with pytest.raises(ValueError, match="backend is 'triton', but triton is not installed; install it, or choose 'torch'"):
    weighted_gather(*arguments, backend="triton")
tokens = torch.randn(2, 1, 1, 4), *torch.randn(2, 3, 2, 1, 4), torch.tensor([[0], [2]]), torch.ones(2, 1)
torch.testing.assert_close(chapter_attention(*tokens), chapter_attention(*tokens, backend="reference"))
"""
    done = run_warm(code)
    assert done.returncode == 0, done.stderr
