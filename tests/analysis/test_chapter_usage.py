"""Chapters are counted by the tokens that open them, in compiled models too, and nothing is left behind."""

import pytest
import torch
from analysis.chapter_models import CHAPTERS, LAYERS, READ, SHARED, routed_model, rows_of
from tiny import FAMILIES

from midus_hf.analysis.chapters.usage import record_chapter_usage
from midus_hf.analysis.text_rows import read_rows
from midus_hf.analysis.watched_models import MemoryPlace


def expected(of_kinds: dict[str, int]) -> list[int]:
    """Tokens of each kind that open each routed chapter."""
    return [
        sum(tokens for kind, tokens in of_kinds.items() if chapter in READ[kind])
        for chapter in range(SHARED, CHAPTERS)
    ]


@pytest.mark.parametrize(
    ("what", "family"), [*(("plain", family) for family in FAMILIES), ("compiled", "llama"), ("in place", "llama")]
)
def test_every_token_counts_once_for_each_chapter_that_it_opens(what, family):
    model = routed_model(family)
    called = torch.compile(model, backend="eager") if what == "compiled" else model
    if what == "in place":
        model.compile(backend="eager")
    with torch.no_grad():
        usual = called(
            rows_of("a").rows[0][None], use_cache=False
        ).logits  # it has been compiled before there is a hook
    with record_chapter_usage(called) as usage:
        for kinds in READ:
            read_rows(called, rows_of(kinds), batch_size=2)  # of other lengths: padding does not count
    assert {place: counts.tolist() for place, counts in usage.counts.items()} == {
        MemoryPlace(layer, "chapters"): [expected({"a": 31, "b": 31})] for layer in LAYERS
    }
    with torch.no_grad():
        assert torch.equal(called(rows_of("a").rows[0][None], use_cache=False).logits, usual)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_generated_token_counts_once():
    model = routed_model(routing="chunk", chunk_size=4)
    with record_chapter_usage(model) as usage:
        model.generate(rows_of("a").rows[0][None, :5], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert all(counts.sum() == (5 + 3) * 2 for counts in usage.counts.values()), "the last token is not read"
