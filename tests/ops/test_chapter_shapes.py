"""What the op on chapters refuses, and how it sorts tokens by chapter."""

import re
from types import SimpleNamespace

import pytest
import torch
from ops.chapter_loops import made

from midus_hf.ops import op_choices
from midus_hf.ops.dispatch import calling as choices
from midus_hf.ops.moc.op import chapter_attention, sort_by_chapter
from midus_hf.ops.moc.triton import segment_refusal


def test_rows_of_a_block_have_one_chapter_and_every_pair_has_a_row():
    for pairs in (1, 31, 32, 33, 200):
        chapters = torch.randint(0, 7, (pairs, 3), generator=torch.Generator().manual_seed(pairs))
        segments = sort_by_chapter(chapters, 7)
        rows = segments.row_of_pair
        assert len(set(rows.tolist())) == len(rows) == 3 * pairs
        assert len(segments.pair_of_row) == 32 * len(segments.chapter_of_block)
        assert torch.equal(segments.pair_of_row[rows], torch.arange(3 * pairs))
        assert torch.equal(segments.chapter_of_block[rows // 32], chapters.flatten())
        starts = torch.cat([segments.block_ends.new_zeros(1), segments.block_ends])
        assert (starts[chapters.flatten()] <= rows // 32).all() and (rows // 32 < starts[chapters.flatten() + 1]).all()


@pytest.mark.parametrize("body", ["reference", "torch"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": (5, 3, 4, 3)}, r"keys is (5, 3, 4, 4) and values is (5, 3, 4, 3); expected [C, M, heads, width] twice."),
        ({"keys": (5, 6, 4), "values": (5, 6, 4)}, r"keys is (5, 6, 4) and values is (5, 6, 4); expected [C, M, heads, width]"),
        ({"query": (6, 2, 4, 3)}, "query is (6, 2, 4, 3); expected [segments, tokens, heads, width] with the keys' 4 heads and"),
        ({"query": (6, 2, 8, 4)}, "query is (6, 2, 8, 4); expected [segments, tokens, heads, width] with the keys' 4 heads"),
        ({"query": (12, 4, 4)}, "query is (12, 4, 4); expected [segments, tokens, heads, width] with the keys' 4 heads"),
        ({"chapters": (4, 2)}, "chapters is (4, 2); expected [6, 1 or more chapters each], a row per segment."),
        ({"chapters": (6, 1, 2)}, "chapters is (6, 1, 2); expected [6, 1 or more chapters each], a row per segment."),
        ({"chapters": (6, 0), "scales": (6, 0)}, "chapters is (6, 0); expected [6, 1 or more chapters each]"),
        ({"scales": (6, 1)}, "scales is (6, 1); expected the shape of chapters, (6, 2)."),
        ({"scales": (2, 6)}, "scales is (2, 6); expected the shape of chapters, (6, 2)."),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_that_disagree_are_refused(changes, message, body):
    arguments = made()
    for name, shape in changes.items():
        arguments[name] = torch.zeros(shape, dtype=arguments[name].dtype)
    with pytest.raises(ValueError, match=re.escape(message)):
        chapter_attention(**arguments, backend=body)


def wide_heads(length: int) -> dict[str, torch.Tensor]:
    """Two segments of queries of so many tokens, with heads that no kernel takes."""
    query, table = torch.randn(2, length, 1, 257), torch.randn(3, 2, 1, 257)
    chapters = torch.tensor([[0, 1], [1, 2]])
    return {"query": query, "keys": table, "values": table, "chapters": chapters, "scales": torch.ones(2, 2)}


def test_heads_that_are_too_wide_for_kernels_are_refused_where_kernels_are_asked_for():
    arguments, message = (
        wide_heads(1),
        "backend is 'triton', but heads are 257 wide; expected 256 or less, or choose 'torch'.",
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        chapter_attention(**arguments, backend="triton")
    with op_choices(backend="triton"), pytest.raises(ValueError, match=re.escape(message)):
        chapter_attention(**arguments)
    torch.testing.assert_close(chapter_attention(**arguments), chapter_attention(**arguments, backend="reference"))


def test_long_segments_are_read_by_matrix_products_whatever_is_asked_for():
    arguments = wide_heads(16)
    assert torch.equal(
        chapter_attention(**arguments, backend="triton"), chapter_attention(**arguments, backend="torch")
    )


def test_more_pairs_than_kernels_can_number_are_refused():
    assert segment_refusal(32, 64, 1 << 25) is None
    assert segment_refusal(32, 64, (1 << 25) + 1) == (
        "there are 33554433 pairs of a token and a chapter, with 32 heads each; expected 1073741824 or less together"
    )


def test_what_kernels_refuse_is_left_to_pytorch_where_nobody_asks_for_kernels(monkeypatch):
    monkeypatch.setattr(choices, "_multiplies", lambda tensor: True)
    monkeypatch.setattr(choices, "HAS_TRITON", True)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert choices.resolve("auto", on_gpu) == "triton"
    assert choices.resolve("auto", on_gpu, "heads are wide") == "torch"
    assert choices.resolve("torch", on_gpu, "heads are wide") == "torch"
