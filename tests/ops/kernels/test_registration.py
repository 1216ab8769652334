"""What torch is told of the ops: fake tensors, gradients, one node a call in a compiled graph."""

import pytest
import torch
from ops.kernels.conftest import DEVICE
from pairs import by_default

from midus_hf.ops import headwise_memory, product_key_topk, weighted_gather
from midus_hf.ops.chapters.op import chapter_attention
from midus_hf.ops.chapters.segments import segment_attention_op
from midus_hf.ops.gather.weighted import weighted_gather_op
from midus_hf.ops.headwise.lookup import headwise_lookup_op
from midus_hf.ops.product_key.scores import product_key_scores_op


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tables(dtype=torch.float32):
    shapes = ((6, 2, 8), (2, 4, 4), (2, 4, 4), (16, 5))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("with_residual", ["none", "plain", "strided"])
def test_the_lookup_is_registered_rightly(body, with_residual):
    residual = None
    if with_residual != "none":
        residual = torch.randn(6, 2, 5, device=DEVICE)
        residual = (residual.mT.contiguous().mT if with_residual == "strided" else residual).requires_grad_()
    arguments = (*tables(), residual, 3, 0.5, False, body)
    torch.library.opcheck(headwise_lookup_op, arguments)


@pytest.mark.parametrize("gathering", ["rows", "product"])
def test_gathering_is_registered_rightly(body, gathering):
    bank, weights = torch.randn(7, 4, device=DEVICE), torch.randn(5, 3, device=DEVICE)
    slots = torch.randint(7, (5, 3), device=DEVICE)
    arguments = (bank.requires_grad_(), slots, weights.requires_grad_(), body, gathering)
    torch.library.opcheck(weighted_gather_op, arguments)


def test_selection_is_registered_rightly():
    torch.library.opcheck(product_key_scores_op, (*tables()[:3], 3, False, "triton"))


def chapters_of_tokens(weighed=("scales", "biases")):
    """Arguments of `chapter_attention` for one sequence whose tokens have chapters of their own."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (1, 6, 2, 8), "keys": (4, 3, 1, 8), "values": (4, 3, 1, 8)} | dict.fromkeys(weighed, (1, 6, 2))
    made = {
        name: torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for name, shape in shapes.items()
    }
    return made | {"chapters": torch.rand(1, 6, 4, generator=generator).argsort(-1)[..., :2].to(DEVICE)}


@pytest.mark.parametrize("weighed", [(), ("scales",), ("scales", "biases")], ids="-".join)
@pytest.mark.parametrize("wanted", by_default(["all"], ["all", "query", "values"]))
def test_attention_to_chapters_is_registered_rightly(weighed, wanted):
    made = chapters_of_tokens(weighed)
    arguments = []
    for name in ("query", "keys", "values", "chapters", "scales", "biases"):
        tensor = made.get(name)
        if tensor is not None and name not in ("keys", "values"):
            tensor = tensor.squeeze(0)
        if tensor is not None and tensor.is_floating_point():
            tensor = tensor.detach().requires_grad_(wanted in ("all", name))
        arguments.append(tensor)
    torch.library.opcheck(segment_attention_op, tuple(arguments))


def nodes_of(function, arguments):
    """Names of the ops in the graph of a function, compiled as one."""
    names = []

    def look(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(function, fullgraph=True, backend=look)(*arguments)
    return names


def test_head_wise_memory_is_one_node_and_views(body):
    def lookup(query, row_keys, column_keys, bank):
        return headwise_memory(query, row_keys, column_keys, bank, None, 3, backend=body)

    names = nodes_of(lookup, tables())
    assert sum("headwise_lookup" in name for name in names) == 1
    assert not any(word in name for name in names for word in ("topk", "softmax", "embedding", "matmul", "bmm"))


def test_gathering_is_one_node(body):
    bank, slots, weights = torch.randn(7, 4), torch.randint(7, (5, 3)), torch.randn(5, 3)
    on_device = [tensor.to(DEVICE) for tensor in (bank, slots, weights)]
    names = nodes_of(lambda *tensors: weighted_gather(*tensors, backend=body), on_device)
    assert sum("weighted_gather" in name for name in names) == 1


def test_selecting_by_a_kernel_is_one_node():
    names = nodes_of(lambda *tensors: product_key_topk(*tensors, 2, backend="triton"), tables()[:3])
    assert sum("product_key_scores" in name for name in names) == 1 and not any("topk" in name for name in names)


def test_attention_to_chapters_by_kernels_is_one_node_and_views():
    made = chapters_of_tokens()
    names = nodes_of(
        lambda *tensors: chapter_attention(**dict(zip(made, tensors, strict=True)), backend="triton"), made.values()
    )
    assert sum("chapter_segments" in name for name in names) == 1
    assert not any(word in name for name in names for word in ("sort", "softmax", "einsum", "matmul", "index"))


def test_compiled_attention_to_chapters_computes_the_same_gradients():
    made = chapters_of_tokens()
    leaves = [tensor for tensor in made.values() if tensor.requires_grad]

    def attend(*tensors):
        return chapter_attention(**dict(zip(made, tensors, strict=True)), backend="triton")

    upstream = torch.randn(made["query"].shape, device=DEVICE)
    eager, compiled = (
        torch.autograd.grad(call(*made.values()), leaves, upstream)
        for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager"))
    )
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_a_compiled_call_computes_the_same_gradients(body):
    leaves = tables()

    def lookup(*tensors):
        return headwise_memory(*tensors, None, 3, backend=body)

    upstream = torch.randn(6, 2, 5, device=DEVICE)
    eager, compiled = (
        torch.autograd.grad(call(*leaves), leaves, upstream)
        for call in (lookup, torch.compile(lookup, fullgraph=True, backend="aot_eager"))
    )
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_kernels_are_refused_where_they_cannot_run(monkeypatch):
    arguments = tables()
    with pytest.raises(ValueError, match="tensors are float64; expected float32 or less, or choose 'torch'"):
        headwise_memory(*tables(torch.float64), None, 2, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="tensors are on cpu; expected cuda, or choose 'torch'"):
            headwise_memory(*arguments, None, 2, backend="triton")
    monkeypatch.setattr("midus_hf.ops.dispatch.choices.HAS_TRITON", False)
    with pytest.raises(ValueError, match="triton is not installed; install it, or choose 'torch'"):
        headwise_memory(*arguments, None, 2, backend="triton")
