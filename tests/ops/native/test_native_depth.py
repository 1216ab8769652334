"""Attention over the depth in C: chosen on a CPU, the same bits by any threads, and PyTorch where there is no library."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(dtype, threads):
    arguments = inputs(tokens=150, dtype=dtype)
    results = []
    for number in (1, 2, 3, 40):
        threads(number)
        results.append(outputs_and_gradients(*arguments, backend="native"))
    for others in results[1:]:
        assert_same_bits(results[0], others)


def test_a_token_reads_the_same_whatever_stands_beside_it():
    arguments = inputs()
    whole = depth_attention(*arguments, 0.3, backend="native")
    for token in range(9):
        query, keys, values = arguments
        alone = ([slot[:, :, token : token + 1] for slot in slots] for slots in ([query], keys, values))
        (query,), keys, values = alone
        some = depth_attention(query, keys, values, 0.3, backend="native")
        assert_same_bits(some, [part[:, :, token : token + 1] for part in whole])


def test_it_is_what_runs_where_nobody_chose_and_pytorch_where_there_is_no_library(monkeypatch):
    arguments = inputs()
    chosen = outputs_and_gradients(*arguments)
    assert_same_bits(chosen, outputs_and_gradients(*arguments, backend="native"))
    with op_choices(backend="native"):
        assert_same_bits(chosen, outputs_and_gradients(*arguments))
        monkeypatch.setitem(depth_attention.__globals__, "native_library", lambda: None)
        assert_same_bits(outputs_and_gradients(*arguments), outputs_and_gradients(*arguments, backend="torch"))
    for dtype in (torch.float64, torch.float16):
        query, keys, values = inputs(dtype=dtype)
        expected = depth_attention(query, keys, values, 0.3, backend="torch")
        assert_same_bits(depth_attention(query, keys, values, 0.3), expected)


def test_without_gradients_c_is_called_by_itself_and_gives_the_same_bits(monkeypatch):
    arguments = inputs()
    expected = depth_attention(*arguments, 0.3, backend="native")
    monkeypatch.setitem(depth_attention.__globals__, "depth_attention_op", None)
    with torch.no_grad():
        assert_same_bits(depth_attention(*arguments, 0.3, backend="native"), expected)


def test_modes_of_dispatch_see_the_op():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    names = []
    with torch.no_grad(), Seen():
        depth_attention(*inputs(), 0.3, backend="native")
    assert "depth_attention.default" in names


def test_a_graph_holds_it_and_gives_the_same_bits():
    arguments = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(depth_attention, fullgraph=True, backend="aot_eager")
    assert_same_bits(outputs_and_gradients(*arguments, call=compiled), outputs_and_gradients(*arguments))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["query", "key 1", "value 0"])
def test_tensors_that_c_cannot_read_are_refused(name):
    query, keys, values = inputs()
    of, slot = {"query": ([query], 0), "key 1": (keys, 1), "value 0": (values, 0)}[name]
    of[slot] = of[slot].to("meta")
    query = of[0] if name == "query" else query
    with pytest.raises(ValueError, match=f"{name} is on meta, and others are on cpu; expected one device"):
        native_reading(DepthInputs(query, keys, values, 0.3, None))
