"""Shares of attention are the weights that `chapter_attention` reads values with."""

import pytest
import torch

from midus_hf.ops.chapters import rows as module
from midus_hf.ops.chapters.op import chapter_attention
from midus_hf.ops.chapters.rows import chapter_mass


@pytest.mark.parametrize(("stretches", "heads", "kv_heads"), [(1, 2, 2), (3, 4, 2), (6, 2, 1)])
@pytest.mark.parametrize("extra", [None, "scales", "biases"])
@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_it_is_what_attention_reads_values_with(stretches, heads, kv_heads, extra, at_once, monkeypatch):
    monkeypatch.setattr(module, "_MOST_AT_ONCE", at_once)
    torch.manual_seed(0)
    chapters, rows, width, chosen = 5, 3, 8, 3
    query = torch.randn(2, 6, heads, width, dtype=torch.float64)
    keys = torch.randn(chapters, rows, kv_heads, width, dtype=torch.float64)
    read = torch.stack([torch.randperm(chapters)[:chosen] for _ in range(2 * stretches)]).view(2, stretches, chosen)
    given = {} if extra is None else {extra: torch.rand(2, stretches, chosen, dtype=torch.float64) + 0.5}
    one_hot = torch.eye(chapters, width, dtype=torch.float64)[:, None, None].expand_as(keys)  # its chapter
    output = chapter_attention(query, keys, one_hot, read, **given, backend="reference").mean(2)  # [B, T, d]
    places = read.repeat_interleave(6 // stretches, dim=1)
    expected = output.gather(-1, places)
    if extra == "scales":  # which values are multiplied by too
        expected = expected / given["scales"].repeat_interleave(6 // stretches, dim=1)
    mass = chapter_mass(query, keys, read, **given)
    torch.testing.assert_close(mass, expected)
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 6, dtype=torch.float64))


def test_half_precision_is_summed_in_float32():
    query, keys = torch.randn(1, 2, 1, 4).bfloat16(), torch.randn(3, 2, 1, 4).bfloat16()
    mass = chapter_mass(query, keys, torch.tensor([[[0, 2]]]))
    assert mass.dtype == torch.float32
    assert chapter_mass(query[:, :0], keys, torch.tensor([[[0, 2]]])).shape == (1, 0, 2)
