"""What every body of every op of the table does. A folder runs these on its bodies: `fixtures_of` makes what they take."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from ops.table import BATCHED, DEVICE, GATHERINGS, OPS, SCORINGS, Arguments, OpCase
from torch._dynamo.backends.common import aot_autograd

from midus_hf.ops import op_choices

# Largest ratio of the error's root mean square to the float64 reference's, by dtype of the inputs.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def assert_close(
    name: str, results: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, slack: float = 1
) -> None:
    """Compare with a float64 reference by RMS ratio, absolutely where the reference is zero; `slack` widens what may pass."""
    assert results.shape == expected.shape, f"{name}: {tuple(results.shape)}, expected {tuple(expected.shape)}"
    assert not results.isnan().any(), f"{name} holds NaN"
    error, size = (
        (x.double().square().mean().sqrt().item() if x.numel() else 0.0) for x in (results - expected, expected)
    )
    assert error <= slack * TOLERANCE[dtype] * max(size, 1e-6), f"{name}: error {error:.2e} against {size:.2e}"


def each_body(names: Iterable[str], bodies: Sequence[str]) -> Any:
    """Return a fixture that gives an op of these names and one of the bodies, each pair in turn; C, where it can run."""
    cases = [(name, body) for name in names for body in OPS[name].bodies if body in bodies]

    @pytest.fixture(params=cases, ids=lambda case: "-".join(case).replace(" ", "-"))
    def op_and_body(request) -> tuple[OpCase, str]:
        name, body = request.param
        if body == "native":
            request.getfixturevalue("in_c")
        return OPS[name], body

    return op_and_body


def fixtures_of(*bodies: str) -> tuple[Any, ...]:
    return tuple(each_body(names, bodies) for names in (OPS, GATHERINGS, SCORINGS, BATCHED))


def dtypes_of(op: OpCase, body: str) -> list[torch.dtype]:
    return [dtype for dtype in op.dtypes if body != "native" or dtype != torch.float16]


def leaves_of(arguments: Arguments, dtype: torch.dtype | None = None, wanted: str | None = None) -> Arguments:
    """Return copies that want gradients, all that are floating point, or one."""
    return {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_(wanted in (None, name))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in arguments.items()
    }


def output_and_gradients(
    op: OpCase, arguments: Arguments, body: str, dtype=None, wanted=None, along=None, **options
) -> Arguments:
    leaves = leaves_of(arguments, dtype, wanted)
    output = op.call(leaves, body, **options)
    if along is None:
        along = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    request = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    lowered = along.to(next(tensor for tensor in arguments.values() if tensor.is_floating_point()).dtype)
    gradients = torch.autograd.grad(output, list(request.values()), lowered.to(output.dtype))
    return {"output": output.detach()} | dict(zip(request, gradients, strict=True))


def assert_same_bits(results: Arguments, expected: Arguments, body: str = "native") -> None:
    """Compare to the bit; to rounding where PyTorch computes, whose products may add in another order for another layout."""
    for name, tensor in results.items():
        close = {"rtol": 1e-4, "atol": 1e-5} if body == "torch" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            tensor, expected[name], equal_nan=True, **close, msg=lambda text, name=name: f"{name}: {text}"
        )


def by_part(results: Arguments) -> Arguments:
    """Return `key 0`, `key 1`, ... as one `key`: the gradient of a slot that hardly counts is a difference of larger sums."""
    parts = {}
    for name, tensor in results.items():
        parts.setdefault(name.partition(" ")[0], []).append(tensor)
    return {name: torch.stack(tensors) for name, tensors in parts.items()}


def assert_equals_reference(op: OpCase, arguments: Arguments, body: str, along=None, slack=1, **options) -> None:
    """Compare output and every gradient with those of the reference in float64, to the rounding of the dtype."""
    dtype = next(tensor.dtype for tensor in arguments.values() if tensor.is_floating_point())
    actual = output_and_gradients(op, arguments, body, along=along, **options)
    expected = output_and_gradients(op, arguments, "reference", torch.float64, along=along, **options)
    if op.sums:
        for results in (actual, expected):
            results["output"], results["sums"] = results["output"][..., :-1], results["output"][..., -1]
    actual, expected = by_part(actual), by_part(expected)
    for name, exact in expected.items():
        assert actual[name].dtype == (torch.float32 if name in op.wide else dtype)
        assert_close(name, actual[name], exact, torch.float32 if name in op.exact else dtype, slack)


def sizes_and_dtypes(op: OpCase, body: str) -> list[tuple[str, torch.dtype]]:
    """Return every size with a dtype, the dtypes in turn, and the first sizes with every dtype."""
    dtypes, sizes = dtypes_of(op, body), list(op.sizes)
    sizes = list(op.sizes_of_kernels) or sizes if body == "triton" else sizes
    turns = [(size, dtypes[number % len(dtypes)]) for number, size in enumerate(sizes)]
    return list(dict.fromkeys([*turns, *((size, dtype) for size in sizes[:2] for dtype in dtypes)]))


def test_outputs_and_gradients_equal_the_reference(case):
    op, body = case
    for size, dtype in sizes_and_dtypes(op, body):
        arguments, options = op.made(size, dtype=dtype)
        assert_equals_reference(op, arguments, body, **options)


def test_two_runs_give_the_same_bits(case):
    op, body = case
    arguments = op.make(tokens=300 if body != "triton" else op.tokens_of_kernels)
    assert_same_bits(*(output_and_gradients(op, arguments, body) for _ in range(2)))


def test_layout_in_memory_does_not_matter(case):
    op, body = case
    arguments = op.make()
    expected = output_and_gradients(op, arguments, body)
    layouts = (
        lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
        lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
        lambda tensor: torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape),
    )
    for laid in layouts:
        # The bags of PyTorch want indices in order.
        moved = {
            name: laid(tensor) if tensor.dim() > 1 and (tensor.is_floating_point() or body != "torch") else tensor
            for name, tensor in arguments.items()
        }
        leaves = {name: tensor.detach() for name, tensor in moved.items()}
        assert_same_bits(output_and_gradients(op, leaves, body), expected, body)


def test_single_gradient_equals_that_among_all(case):
    op, body = case
    arguments = op.make()
    expected = output_and_gradients(op, arguments, body)
    for name in [name for name, tensor in arguments.items() if tensor.is_floating_point()]:
        actual = output_and_gradients(op, arguments, body, wanted=name)
        assert_same_bits({name: actual[name]}, expected, body)


def test_no_tokens_give_empty_results(case):
    op, body = case
    leaves = leaves_of(op.make(tokens=0))
    output = op.call(leaves, body)
    assert output.numel() == 0
    output.sum().backward()
    assert not any(leaf.grad is not None and leaf.grad.any() for leaf in leaves.values())


def test_op_passes_opcheck(case):
    op, body = case
    if body in op.unregistered:
        pytest.skip("it is no op of its own")
    # A dtype that is said wrongly shows where arguments are narrower than what sums are computed in.
    op_of_torch, arguments = op.registered(leaves_of(op.make(tokens=6, dtype=torch.bfloat16)), body)
    torch.library.opcheck(op_of_torch, arguments)


def test_graph_has_one_node_per_direction_and_the_same_bits(case):
    op, body = case
    leaves, names = leaves_of(op.make(tokens=6)), []

    def look(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    def step(leaves):
        return op.call(leaves, body)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    requests = [leaf for leaf in leaves.values() if leaf.requires_grad]
    results = []
    for run in (step, compiled):
        output = run(leaves)
        results.append({"output": output, **dict(enumerate(torch.autograd.grad(output.square().sum(), requests)))})
    torch._dynamo.reset()
    assert_same_bits(*results, body)
    if body not in op.unregistered:
        assert sum(f"midus_hf.{op.node}" in name for name in names) == 2, names
        assert op.around or not any(
            word in name for name in names for word in ("topk", "softmax", "embedding", "sort")
        )


def test_autocast_narrows_only_what_is_meant(case):
    op, body = case
    leaves = leaves_of(op.make())
    expected = op.call(leaves, body)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = op.call(leaves, body)
    if op.narrows:
        assert_close("output", actual, expected, torch.bfloat16)
    else:
        assert_same_bits({"output": actual}, {"output": expected})
    actual.float().sum().backward()
    assert all(leaf.grad.dtype == leaf.dtype and leaf.grad.any() for leaf in leaves.values() if leaf.requires_grad)


def test_call_without_gradients_bypasses_the_op(case, monkeypatch):
    op, body = case
    options, calls = op.make(tokens=4), []
    expected = op.call(leaves_of(options), body)
    if op.entry is not None and body not in op.never_direct:
        function, name = op.entry
        monkeypatch.setitem(function.__globals__, name, lambda *arguments: calls.append(arguments))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same_bits({"output": op.call(options, body)}, {"output": expected}, body)
    assert not calls


def test_op_choices_select_the_body(case):
    op, body = case
    arguments = op.make()
    expected = output_and_gradients(op, arguments, body)
    with op_choices(backend=body):
        assert_same_bits(output_and_gradients(op, arguments, "auto"), expected)
    with op_choices(backend="torch" if body == "native" else "reference"):
        assert_same_bits(output_and_gradients(op, arguments, body), expected)
    if body == "native":
        assert_same_bits(output_and_gradients(op, arguments, "auto"), expected)


def test_large_scores_overflow_nothing(scoring):
    """The exponential of a score above 88 is infinite in float32, and of one above 709 in float64."""
    op, body = scoring
    for size in op.query_sizes:
        arguments, options = op.made(size)
        arguments["query"] *= 1e3
        actual = output_and_gradients(op, arguments, body, **options)
        expected = output_and_gradients(op, arguments, "reference", torch.float64, **options)
        torch.testing.assert_close(actual["output"].double(), expected["output"], rtol=1e-3, atol=1e-3)
        assert all(gradient.isfinite().all() for gradient in actual.values())


def test_non_finite_query_spoils_only_its_own_output(scoring):
    """A run that diverged must end in a loss that is not finite, not in a read outside of a table."""
    op, body = scoring
    for size in op.query_sizes:
        arguments, options = op.made(size)
        expected = output_and_gradients(op, arguments, body, **options)
        of_heads = list(itertools.product(*map(range, arguments["query"].shape[:-1])))
        no_number, infinite = of_heads[0], of_heads[len(of_heads) // 2]
        arguments["query"][no_number][0], arguments["query"][infinite][-1] = math.nan, math.inf
        actual = output_and_gradients(op, arguments, body, **options)
        is_capped = options.get("softcap") is not None
        assert actual["output"][no_number].isnan().all()
        assert is_capped or not actual["output"][infinite].isfinite().any()
        others = torch.ones(arguments["query"].shape[:-1], dtype=torch.bool)
        others[no_number] = others[infinite] = False
        for name in ("output", "query"):
            assert_same_bits({name: actual[name][others]}, {name: expected[name][others]}, body)


def test_sparse_gradient_has_exactly_the_rows_read(gathering):
    op, body = gathering
    arguments = op.make(tokens=10, m=3, rows=100, width=8)
    dense = output_and_gradients(op, arguments, body)
    sparse = output_and_gradients(op, arguments, body, sparse_gradient=True)
    into_bank, read = sparse.pop("bank"), sorted(set(arguments["slots"].flatten().tolist()))
    assert into_bank.is_coalesced()
    assert into_bank.indices().flatten().tolist() == read
    torch.testing.assert_close(into_bank.to_dense(), dense["bank"])
    assert dense["bank"].any(-1).nonzero().flatten().tolist() == read
    assert_same_bits(sparse, dense)


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3)], ids=str)
def test_leading_shape_is_a_batch_of_tokens(batched, leading):
    op, body = batched
    arguments = op.make(tokens=torch.Size(leading).numel())
    shaped = {
        name: tensor.view(*leading, *tensor.shape[1:]) if name in ("query", "vectors", "slots", "weights") else tensor
        for name, tensor in arguments.items()
    }
    expected = output_and_gradients(op, arguments, body)
    for options in ({}, {"sparse_gradient": True}) if "slots" in arguments else ({},):
        actual = output_and_gradients(op, shaped, body, **options)
        assert actual["output"].shape == (*leading, *expected["output"].shape[1:])
        assert torch.equal(actual["output"].view_as(expected["output"]), expected["output"])
        assert all(actual[name].shape == tensor.shape for name, tensor in shaped.items() if name in actual)


def test_row_may_be_read_by_every_entry(gathering):
    op, body = gathering
    arguments = op.make(tokens=700 if body != "triton" else 300, m=6, rows=5, width=8)
    arguments["slots"] = torch.full_like(arguments["slots"], 3)
    assert_equals_reference(op, arguments, body)
