"""What PyTorch and C compute is what every body of every op computes, also where memory that it does not fill holds no numbers.

Kernels are held to the same in `kernels/`.
"""

import pytest
import torch
from ops.laws import *  # noqa: F403 - the tests of this file
from ops.laws import assert_same_bits, each_body, output_and_gradients
from ops.table import GATHERINGS, OPS

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES = [(name, body) for name, op in OPS.items() for body in op.bodies if body != "triton"]

case = each_body(OPS, CASES, in_c="in_c")
gathering = each_body(OPS, [pair for pair in CASES if pair[0] in GATHERINGS], in_c="in_c")
in_c = pytest.mark.parametrize("name", [name for name, op in OPS.items() if "native" in op.bodies])


@in_c
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit_of_what_c_computes(name, dtype, threads):
    op, results = OPS[name], []
    for number in (1, 2, 3, 40):
        threads(number)
        results.append(output_and_gradients(op, op.make(tokens=700, dtype=dtype), "native"))
    for others in results[1:]:
        assert_same_bits(others, results[0])


@in_c
@pytest.mark.usefixtures("library")
def test_what_c_does_not_compute_is_refused_or_left_to_pytorch(name):
    op = OPS[name]
    for dtype in (torch.float16, torch.float64):
        arguments = op.make(dtype=dtype)
        message = f"backend is 'native', but the tensors are {str(dtype)[6:]}; expected float32 or bfloat16, or choose 'torch'"
        with pytest.raises(ValueError, match=message):
            op.call(arguments, "native")
        assert_same_bits({"output": op.call(arguments, "auto")}, {"output": op.call(arguments, "torch")})
