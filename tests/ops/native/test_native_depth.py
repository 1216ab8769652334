"""Attention over the depth in C: each token by itself, seen by who watches, and PyTorch where there is no library."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from midus_hf.ops import op_choices
from midus_hf.ops.depth.inputs import DepthInputs
from midus_hf.ops.depth.native import native_reading
from midus_hf.ops.depth.op import depth_attention

pytestmark = pytest.mark.usefixtures("library")


def inputs(tokens=9, dtype=torch.float32, heads=(6, 2), width=20, slots=3):
    """A query, keys and values, as models have them."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count):
        numbers = torch.randn(2, tokens, count, width, generator=generator)
        return numbers.to(dtype).transpose(1, 2).requires_grad_()

    return drawn(heads[0]), *([drawn(heads[1]) for _ in range(slots)] for _ in range(2))


def outputs_and_gradients(query, keys, values, call=depth_attention, **options):
    made = call(query, keys, values, 0.3, 2.0, **options)
    along = [torch.linspace(-1, 1, part.numel()).view(part.shape).to(part.dtype) for part in made]
    return *made, *torch.autograd.grad(made, [query, *keys, *values], along)


def assert_same_bits(results, others):
    assert all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


def test_a_token_reads_the_same_whatever_stands_beside_it():
    arguments = inputs()
    whole = depth_attention(*arguments, 0.3, backend="native")
    for token in range(9):
        query, keys, values = arguments
        alone = ([slot[:, :, token : token + 1] for slot in slots] for slots in ([query], keys, values))
        (query,), keys, values = alone
        some = depth_attention(query, keys, values, 0.3, backend="native")
        assert_same_bits(some, [part[:, :, token : token + 1] for part in whole])


def test_pytorch_runs_where_there_is_no_library(monkeypatch):
    arguments = inputs()
    monkeypatch.setitem(depth_attention.__globals__, "native_library", lambda: None)
    with op_choices(backend="native"):
        assert_same_bits(outputs_and_gradients(*arguments), outputs_and_gradients(*arguments, backend="torch"))


def test_modes_of_dispatch_see_the_op():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    names = []
    with torch.no_grad(), Seen():
        depth_attention(*inputs(), 0.3, backend="native")
    assert "depth_attention.default" in names


@pytest.mark.parametrize("name", ["query", "key 1", "value 0"])
def test_tensors_that_c_cannot_read_are_refused(name):
    query, keys, values = inputs()
    of, slot = {"query": ([query], 0), "key 1": (keys, 1), "value 0": (values, 0)}[name]
    of[slot] = of[slot].to("meta")
    query = of[0] if name == "query" else query
    with pytest.raises(ValueError, match=f"{name} is on meta, and others are on cpu; expected one device"):
        native_reading(DepthInputs(query, keys, values, 0.3, None))
