"""Attention over the depth by matrix products, against the body that reads one slot after another."""

import pytest
import torch

from midus_hf.ops.depth.batched import batched_depth_attention
from midus_hf.ops.depth.inputs import DepthInputs
from midus_hf.ops.depth.op import depth_attention


def drawn(*shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "kv_heads", "tokens", "slots"), [(1, 2, 5, 1), (3, 1, 4, 7), (2, 2, 9, 3)])
def test_it_gives_what_the_reference_gives(group, kv_heads, tokens, slots, dtype, softcap, monkeypatch):
    monkeypatch.setattr("midus_hf.ops.depth.batched._FEWEST", 4)
    monkeypatch.setattr("midus_hf.ops.depth.batched._NUMBERS", 0)
    query = drawn(2, tokens, group * kv_heads, 6, seed=0, dtype=dtype)
    keys = [drawn(2, tokens, kv_heads, 6, seed=slot + 1, dtype=dtype) for slot in range(slots)]
    values = [drawn(2, tokens, kv_heads, 6, seed=slot + 100, dtype=dtype) for slot in range(slots)]
    got = batched_depth_attention(DepthInputs(query, keys, values, 0.5, softcap))
    expected = depth_attention(query, keys, values, 0.5, softcap, backend="reference")
    tolerance = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    leaves, along = [query, *keys, *values], [torch.ones_like(part) + part.detach() for part in expected]
    assert [part.dtype for part in got] == [part.dtype for part in expected]
    for ours, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, reference, **tolerance)
    for ours, reference in zip(
        torch.autograd.grad(got, leaves, along), torch.autograd.grad(expected, leaves, along), strict=True
    ):
        torch.testing.assert_close(ours, reference, **tolerance)
