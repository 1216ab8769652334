"""What PyTorch and C compute is what every body of every op computes, also where memory that it does not fill holds no numbers.

Kernels are held to the same in `kernels/`.
"""

import pytest
import torch
from ops.laws import *  # noqa: F403 - the tests of this file
from ops.laws import assert_same_bits, fixtures_of, output_and_gradients
from ops.table import OPS

from midus_hf.ops.gather import op as gather
from midus_hf.ops.midus_hml import op as headwise
from midus_hf.ops.product_key import op as product_keys

pytestmark = pytest.mark.usefixtures("poisoned_memory")

case, gathering, scoring, batched = fixtures_of("torch", "native")
in_c = pytest.mark.parametrize("name", [name for name, op in OPS.items() if "native" in op.bodies])


@pytest.mark.parametrize("name", OPS)
def test_unknown_backend_is_refused(name):
    message = "backend is 'cuda'; expected one of 'auto', 'reference', 'torch', 'native', 'triton'"
    with pytest.raises(ValueError, match=message):
        OPS[name].call(OPS[name].make(), "cuda")


@in_c
@pytest.mark.usefixtures("in_c")
def test_graph_traced_for_c_runs_without_c(name, monkeypatch):
    """As a graph does where there is no library, if there was one where it was compiled."""
    op = OPS[name]
    arguments = op.make()
    by_c = output_and_gradients(op, arguments, "native")
    for module in (headwise, product_keys, gather):
        monkeypatch.setattr(module, "native_library", lambda: None)
    without = output_and_gradients(op, arguments, "native")
    for part, tensor in by_c.items():
        torch.testing.assert_close(without[part], tensor, rtol=1e-4, atol=1e-5)
    assert not all(torch.equal(without[part], tensor) for part, tensor in by_c.items())


@in_c
@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_thread_count_changes_no_bit(name, dtype, threads):
    op, results = OPS[name], []
    for number in (1, 2, 3, 40):
        threads(number)
        results.append(output_and_gradients(op, op.make(tokens=700, dtype=dtype), "native"))
    for others in results[1:]:
        assert_same_bits(others, results[0])


@in_c
@pytest.mark.usefixtures("in_c")
def test_other_dtypes_are_refused_or_run_in_pytorch(name):
    op = OPS[name]
    for dtype in (torch.float16, torch.float64):
        arguments = op.make(dtype=dtype)
        message = f"backend is 'native', but the tensors are {str(dtype)[6:]}; expected float32 or bfloat16, or choose 'torch'"
        with pytest.raises(ValueError, match=message):
            op.call(arguments, "native")
        assert_same_bits({"output": op.call(arguments, "auto")}, {"output": op.call(arguments, "torch")})
