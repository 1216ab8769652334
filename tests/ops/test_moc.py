"""Cross-attention to chapters: every body is what loops over tokens, heads and memory tokens give, forward and backward."""

import pytest
import torch
from ops.chapter_loops import CHAPTERS, MEMORY_TOKENS, ODD, WIDTH, by_loops, made

from midus_hf.ops.moc import op
from midus_hf.ops.moc.op import chapter_attention, sort_by_chapter

BODIES = ("reference", "gathered", "segments")
WANTED = ("query", "keys", "values", "scales")


@pytest.fixture(params=BODIES)
def body(request, monkeypatch) -> str:
    if request.param != "reference":
        monkeypatch.setattr(op, "_MIN_TOGETHER", 1 if request.param == "gathered" else 1 << 30)
    return request.param


def backend_of(body: str) -> str:
    return "reference" if body == "reference" else "torch"


def gradients(output: torch.Tensor, arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad((output.double() * weights).sum(), [arguments[name] for name in WANTED])
    return dict(zip(WANTED, found, strict=True))


def check(arguments: dict[str, torch.Tensor], body: str) -> None:
    output, expected = chapter_attention(**arguments, backend=backend_of(body)), by_loops(**arguments)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    expected_gradients = gradients(expected, arguments)
    for name, gradient in gradients(output, arguments).items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


SHAPES = [{}, {"segments": 1, "length": 6}, {"segments": 12, "length": 1}, {"chosen": 1}, {"chosen": CHAPTERS}]
SHAPES += [{"heads": 3}, {"segments": 35, "length": 1, "heads": 1}, {"segments": 2, "length": 17, "heads": 1}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_equal_loops(shape, body):
    check(made(**shape), body)


@pytest.mark.parametrize("what", ODD)
def test_odd_arguments_equal_loops(what, body):
    check(ODD[what](made(segments=33, length=1, heads=1)), body)


@pytest.mark.parametrize("limit", [0, 1, 2, 4], ids=lambda limit: f"{limit}-segments")
def test_segments_over_the_limit_are_gathered_in_parts(limit, monkeypatch):
    monkeypatch.setattr(op, "_MIN_TOGETHER", 1)
    arguments = made()
    monkeypatch.setattr(op, "_MAX_GATHERED", limit * 2 * MEMORY_TOKENS * 4 * WIDTH)
    sizes = []
    attend = op._attend_at_once
    monkeypatch.setattr(op, "_attend_at_once", lambda query, *rest: sizes.append(len(query)) or attend(query, *rest))
    parts = {0: [1] * 6, 1: [1] * 6, 2: [2] * 3, 4: [4, 2]}[limit]
    output = chapter_attention(**arguments, backend="torch")
    assert sizes == parts
    gradients(output, arguments)
    assert sorted(sizes) == sorted(parts * 2)
    check(arguments, "torch")
    sizes.clear()
    with torch.no_grad():
        torch.testing.assert_close(chapter_attention(**arguments, backend="torch"), by_loops(**arguments))
    assert sizes == parts


def test_long_segments_are_gathered_and_short_ones_sorted(monkeypatch):
    called = []
    for name in ("_gathered", "segment_attention"):
        whole = getattr(op, name)
        monkeypatch.setattr(
            op, name, lambda *args, name=name, whole=whole, **rest: called.append(name) or whole(*args, **rest)
        )
    for shape in ({"segments": 4, "length": 16}, {"segments": 4, "length": 15}, {"segments": 1, "length": 1}):
        chapter_attention(**made(**shape), backend="torch")
    assert called == ["_gathered", "segment_attention", "_gathered"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tables_are_cast_to_the_query_and_gradients_back(dtype, body):
    arguments = made(dtype=dtype, segments=64, length=1)
    expected = chapter_attention(**arguments, backend=backend_of(body))
    wide = arguments | {name: arguments[name].detach().double().requires_grad_() for name in ("keys", "values")}
    output = chapter_attention(**wide, backend=backend_of(body))
    assert output.dtype == dtype
    assert torch.equal(output, expected)
    lowered = gradients(expected, arguments)
    for name, gradient in gradients(output, wide).items():
        assert gradient.dtype == wide[name].dtype, name
        assert torch.equal(gradient.to(dtype), lowered[name]), name


def test_chapter_gradient_is_summed_in_float32():
    query, keys, values = (torch.randn(shape).bfloat16() for shape in ((1024, 1, 2, 8), (3, 4, 2, 8), (3, 4, 2, 8)))
    chapters, scales = torch.zeros(1024, 1, dtype=torch.int64), torch.ones(1024, 1)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = values.detach().to(dtype).requires_grad_()
        output = chapter_attention(query.to(dtype), keys.to(dtype), leaf, chapters, scales, backend="reference")
        gradients.append(torch.autograd.grad(output.sum(), leaf)[0].double())
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 0.01


def test_block_has_one_chapter_and_each_pair_a_row():
    for pairs in (1, 31, 32, 33, 200):
        chapters = torch.randint(0, 7, (pairs, 3), generator=torch.Generator().manual_seed(pairs))
        segments = sort_by_chapter(chapters, 7)
        rows = segments.row_of_pair
        assert len(set(rows.tolist())) == len(rows) == 3 * pairs
        assert len(segments.pair_of_row) == 32 * len(segments.chapter_of_block)
        assert torch.equal(segments.pair_of_row[rows], torch.arange(3 * pairs))
        assert torch.equal(segments.chapter_of_block[rows // 32], chapters.flatten())
        starts = torch.cat([segments.block_ends.new_zeros(1), segments.block_ends])
        assert (starts[chapters.flatten()] <= rows // 32).all()
        assert (rows // 32 < starts[chapters.flatten() + 1]).all()
