"""Queries find the slots that were drawn for them, and these are as popular as they are meant to be."""

import dataclasses

import pytest
import torch

from benchmarks.ops.inputs import draw_sub_keys, retrieval_inputs, sub_key_probabilities, sub_keys
from benchmarks.ops.shapes import POPULARITIES, SHAPES, Case, Shape
from midus_hf.ops import product_key_topk


def _case(shape, popularity, tokens=400):
    return Case("product_key_topk", shape, tokens, popularity, "float32", "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("name", SHAPES)
def test_retrieved_slots_are_the_ones_drawn(name, popularity, dtype):
    tokens = 3000 if name == "smollm2-135m" else 200
    case = _case(SHAPES[name], popularity, tokens)
    tensors, drawn = retrieval_inputs(case, torch.Generator().manual_seed(3))
    _, slots = product_key_topk(**{key: t.to(dtype) for key, t in tensors.items()}, k=4, backend="reference")
    assert torch.equal(slots.sort(-1).values, drawn.sort(-1).values)


def test_popularities_are_uniform_and_inverse_to_the_rank():
    assert torch.equal(sub_key_probabilities("uniform", 64), torch.full((64,), 1 / 64))
    zipf = sub_key_probabilities("zipf", 64)
    assert zipf.sum().item() == pytest.approx(1)
    assert torch.allclose(zipf[0] / zipf, torch.arange(1.0, 65.0))
    with pytest.raises(ValueError, match="popularity is 'normal'; expected 'uniform' or 'zipf'"):
        sub_key_probabilities("normal", 64)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_sub_keys_are_drawn_as_often_as_intended(popularity):
    shape, tokens = SHAPES["smollm2-135m"], 20_000
    drawn = draw_sub_keys(_case(shape, popularity, tokens), torch.Generator().manual_seed(0))  # [S, H, 2]
    assert (drawn[..., 0] != drawn[..., 1]).all()
    p = sub_key_probabilities(popularity, shape.n).double()
    # Of two draws without putting back: the first is r, or the first is another and the second is r.
    expected = p + p * ((p / (1 - p)).sum() - p / (1 - p))
    for head in range(shape.heads):
        counts = drawn[:, head].flatten().bincount(minlength=shape.n).double() / tokens
        by_popularity = counts.sort(descending=True).values
        assert (by_popularity - expected.sort(descending=True).values).abs().max() < 0.02
    most_popular = [drawn[:, head].flatten().bincount().argmax().item() for head in range(shape.heads)]
    assert popularity == "uniform" or len(set(most_popular)) > 1


def test_keys_are_unit_vectors_that_are_hardly_alike():
    keys = sub_keys(SHAPES["llama-3.2-1b"], "cpu", torch.Generator().manual_seed(0)).double()
    products = torch.einsum("hip,hjp->hij", keys, keys)
    diagonal = torch.diagonal(products, dim1=1, dim2=2)
    assert torch.allclose(diagonal, torch.ones_like(diagonal), atol=1e-5)
    others = products - torch.diag_embed(diagonal)
    assert others.abs().max().item() == pytest.approx(32**-0.5, rel=1e-4)


def test_what_cannot_be_built_is_refused():
    generator = torch.Generator()
    for shape in (Shape("odd", 2, 96, 64), Shape("narrow", 2, 32, 32), Shape("many", 2, 64, 128)):
        with pytest.raises(
            ValueError, match=rf"n is {shape.n} and d / 2 is {shape.head_dim // 2}; expected n <= d / 2"
        ):
            sub_keys(shape, "cpu", generator)
    case = _case(dataclasses.replace(SHAPES["tiny"], k=3), "uniform")
    with pytest.raises(ValueError, match="k is 3; expected a square number"):
        draw_sub_keys(case, generator)
