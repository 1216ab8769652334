"""Product-key retrieval in C: exact slots, and scores with gradients."""

import math

import pytest
import torch

from midus_hf.ops import product_key_topk
from midus_hf.ops.product_key import op as product_key_scores

pytestmark = pytest.mark.usefixtures("library")


def inputs(leading=(30,), heads=3, half=8, n=12, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*leading, heads, 2 * half), (heads, n, half), (heads, n, half))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def scores_slots_and_gradients(arguments, k, **options):
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    scores, slots = product_key_topk(*leaves, k, **options)
    upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5)).to(scores.dtype)
    return scores.detach(), slots, *torch.autograd.grad(scores, leaves, upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes, k",
    [
        ({}, 4),
        ({"leading": (2, 5)}, 1),
        ({"leading": ()}, 3),
        ({"leading": (300,), "n": 64, "half": 33}, 4),
        ({"n": 40}, 33),
        ({"n": 300, "heads": 1}, 9),
    ],
    ids=str,
)
def test_slots_are_the_references_and_scores_and_gradients_close(sizes, k, dtype):
    arguments = inputs(**sizes, dtype=dtype)
    actual = scores_slots_and_gradients(arguments, k, backend="native")
    expected = scores_slots_and_gradients([argument.double() for argument in arguments], k, backend="reference")
    assert actual[0].dtype == torch.float32 and torch.equal(actual[1], expected[1])
    for index, name in ((0, "scores"), (2, "query"), (3, "row_keys"), (4, "column_keys")):
        close = 1e-2 if actual[index].dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            actual[index].double(),
            expected[index],
            rtol=close,
            atol=5 * close,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_nan_in_a_query_is_nan_in_its_scores():
    arguments = inputs()
    arguments[0][7, 1, 3] = math.nan
    scores, slots = product_key_topk(*arguments, 4, backend="native")
    assert scores[7, 1].isnan().all() and scores.isnan().sum() == 4
    assert slots.min() >= 0 and slots.max() < 144


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": 65, "n": 65}, "k is 65; expected 64 or less"),
    ],
    ids=["k"],
)
def test_what_it_cannot_take_is_refused(change, message):
    k = change.get("k", 4)
    arguments = inputs(**{name: value for name, value in change.items() if name != "k"})
    with pytest.raises(ValueError, match=f"backend is 'native', but {message}, or choose 'torch'"):
        product_key_topk(*arguments, k, backend="native")
    assert product_key_topk(*arguments, k)[1].shape == (30, 3, k)


def test_a_graph_that_was_made_for_it_runs_without_it(monkeypatch):
    arguments = inputs()
    expected = scores_slots_and_gradients(arguments, 4, backend="native")
    with monkeypatch.context() as without:
        without.setattr(product_key_scores, "native_library", lambda: None)
        actual = scores_slots_and_gradients(arguments, 4, backend="native")
    assert torch.equal(actual[1], expected[1])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
