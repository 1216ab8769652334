"""Ops where triton is not installed."""

from processes.warm import run_warm


def test_ops_run_by_pytorch_and_kernels_are_refused():
    code = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import pytest, torch
from midus_hf.ops import weighted_gather
from midus_hf.ops.dispatch.triton import HAS_TRITON

assert not HAS_TRITON
arguments = torch.eye(3), torch.tensor([[2, 0]]), torch.tensor([[0.5, 2.0]])
assert torch.equal(weighted_gather(*arguments), torch.tensor([[2.0, 0.0, 0.5]]))
with pytest.raises(ValueError, match="backend is 'triton', but triton is not installed; install it, or choose 'torch'"):
    weighted_gather(*arguments, backend="triton")

from midus_hf.ops.moc.op import chapter_attention

tokens = torch.randn(2, 1, 1, 4), *torch.randn(2, 3, 2, 1, 4), torch.tensor([[0], [2]]), torch.ones(2, 1)
torch.testing.assert_close(chapter_attention(*tokens), chapter_attention(*tokens, backend="reference"))
"""
    done = run_warm(code)
    assert done.returncode == 0, done.stderr
