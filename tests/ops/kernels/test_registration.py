"""Kernel registration: fake tensors, gradients, one node per call in a compiled graph; and kernels that cannot run."""

import pytest
import torch
from ops.laws import (  # noqa: F401 - tests of this file
    leaves_of,
    test_graph_has_one_node_per_direction_and_the_same_bits,
    test_op_passes_opcheck,
)
from ops.table import DEVICE, OPS, depth_slots, stacked
from pairs import by_default

from midus_hf.ops import headwise_memory
from midus_hf.ops.midus_hml.op import headwise_lookup_op
from midus_hf.ops.moda.op import depth_attention_op

KERNELS = [name for name, op in OPS.items() if "triton" in op.bodies]
# What torch is told of the others does not depend on the body: `tests/ops/test_laws.py` has the same with PyTorch and C.
WHOLE = ["head-wise memory, shared bank", "chapters", "depth"]


@pytest.fixture(params=by_default(WHOLE, KERNELS), ids=lambda name: name.replace(" ", "-"))
def case(request):
    """Return each op whose kernels have a registration of their own, and one of those that do not; with the product, all."""
    return OPS[request.param], "triton"


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in WHOLE])
def test_kernels_match_schema_and_fake_tensors(name):
    op_of_torch, arguments = OPS[name].registered(leaves_of(OPS[name].make(tokens=6, dtype=torch.bfloat16)), "triton")
    torch.library.opcheck(op_of_torch, arguments, test_utils=("test_schema", "test_faketensor"))


def tables(dtype=torch.float32):
    shapes = ((6, 2, 8), (2, 4, 4), (2, 4, 4), (16, 5))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("body", "is_strided", "transform"),
    [("torch", False, False), ("native", True, True), ("native", False, False), ("triton", True, False)],
    indirect=["body"],
)
def test_lookup_with_residual_passes_opcheck(body, is_strided, transform):
    residual = torch.randn(6, 2, 5, device=DEVICE)
    residual = (residual.mT.contiguous().mT if is_strided else residual).requires_grad_()
    matrices = torch.randn(2, 5, 5, device=DEVICE).requires_grad_() if transform else None
    torch.library.opcheck(headwise_lookup_op, (*tables(), matrices, residual, 3, body))


def test_depth_without_softcap_passes_opcheck():
    leaves = leaves_of(stacked(tokens=2))
    arguments = (leaves["query"], *depth_slots(leaves), 0.3, None)
    torch.library.opcheck(depth_attention_op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_kernels_that_cannot_run_are_refused(monkeypatch):
    arguments = tables()
    with pytest.raises(ValueError, match="tensors are float64; expected float32 or less, or choose 'torch'"):
        headwise_memory(*tables(torch.float64), None, 2, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="tensors are on cpu; expected cuda, or choose 'torch'"):
            headwise_memory(*arguments, None, 2, backend="triton")
    monkeypatch.setattr("midus_hf.ops.dispatch.calling.HAS_TRITON", False)
    with pytest.raises(ValueError, match="triton is not installed; install it, or choose 'torch'"):
        headwise_memory(*arguments, None, 2, backend="triton")
