"""What PyTorch and C compute is what every body of every op computes; kernels are held to the same in `kernels/`."""

import pytest
import torch
from ops.laws import *  # noqa: F403 - the tests of this file
from ops.laws import assert_same_bits, output_and_gradients
from ops.table import GATHERINGS, OPS

CASES = [(name, body) for name, op in OPS.items() for body in op.bodies if body != "triton"]


def made(request):
    """An op and a body of it, if that can run."""
    name, body = request.param
    if body == "native":
        request.getfixturevalue("library")
    return OPS[name], body


def id_of(case):
    return "-".join(case).replace(" ", "-")


@pytest.fixture(params=CASES, ids=id_of)
def case(request):
    """Each op with each of these bodies."""
    return made(request)


@pytest.fixture(params=[case for case in CASES if case[0] in GATHERINGS], ids=id_of)
def gathering(request):
    """Each op that gathers rows, and may give a sparse gradient, with each of these bodies."""
    return made(request)


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
        given = op.make(dtype=dtype)
        told = f"backend is 'native', but the tensors are {str(dtype)[6:]}; expected float32 or bfloat16, or choose 'torch'"
        with pytest.raises(ValueError, match=told):
            op.call(given, "native")
        assert_same_bits({"output": op.call(given, "auto")}, {"output": op.call(given, "torch")})
